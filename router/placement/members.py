"""The table of workers, built from their heartbeats. Pure; the clock is injected, and nothing is called over a wire.

A worker has a name (`worker_id`) and an incarnation (`epoch`). An incarnation is lost when it is silent for `alive_s`,
or when its worker reports under a new epoch. A replaced incarnation never comes back; a silent one may. A stalled
router hears no worker, so its own stalls do not count as silence.
"""

from collections import deque
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from baton.core.clock import Clock
from baton.core.errors import InvalidRequest, Overloaded
from baton.proto import worker_pb2
from baton.proto.wire import distribution_from_proto, report_from_proto
from baton.router.access.message_limits import is_repeated

ALIVE_S: Final = 1.5
MAX_GAP_S: Final = 0.25  # of the time between two calls of `expire`, at most this counts as silence
FORGET_S: Final = 600.0  # of silence: from then on, it counts as a death
GONE_S: Final = (
    86_400.0  # so long a worker that did not come back is still shown, or an alert on it would end by itself
)
FORGET_ENDED_S: Final = 10.0  # likewise, for a drained worker that is no longer wanted
MAX_WORKERS: Final = 4096
MAX_RETIRED_EPOCHS: Final = 64
PREFILL: Final = "prefill"
DECODE: Final = "decode"
FENCE: Final = "fence"  # why an incarnation was lost, if only its silence says so


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One incarnation of one worker."""

    worker_id: str
    epoch: int


@dataclass(slots=True)
class Member:
    """The latest state of a worker.

    Attributes:
        state: its last heartbeat.
        heartbeat_s: when that arrived.
        lease_s: start of its silence: `heartbeat_s`, moved forward by the router's own stalls.
        alive: whether it counts as alive.
        num_epochs: number of incarnations seen.
        lost_by: "death" or "fence" if it is not alive.
        retired_epochs: epochs of replaced incarnations.
    """

    state: worker_pb2.WorkerState
    heartbeat_s: float
    lease_s: float
    alive: bool = True
    num_epochs: int = 1
    lost_by: str = ""
    retired_epochs: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_RETIRED_EPOCHS))

    @property
    def incarnation(self) -> Incarnation:
        """The worker's current incarnation."""
        return Incarnation(self.state.worker_id, self.state.epoch)

    @property
    def capacity_len(self) -> int:
        """Positions in its whole KV pool."""
        return self.state.inventory.num_blocks * self.state.block_size


class Members:
    """The workers known to the router, live or lost."""

    def __init__(self, clock: Clock, alive_s: float = ALIVE_S) -> None:
        self._clock = clock
        self._alive_s = alive_s
        self._members: dict[str, Member] = {}
        self._gone: dict[str, Member] = {}
        self._watches: dict[Incarnation, dict[object, Callable[[], None]]] = {}
        self._live: dict[str, list[Member]] = {}  # by role; cached until a worker joins or is lost
        self._expired_s = clock.now_s()

    def heartbeat(self, state: worker_pb2.WorkerState) -> bool:
        """Take in a worker's heartbeat; return whether this incarnation was already known and alive.

        Raises:
            InvalidRequest: the heartbeat lacks a required field, or its numbers are invalid.
            Overloaded: the table is full.
        """
        _check(state)
        now_s = self._clock.now_s()
        member = self._members.get(state.worker_id)
        if member is None:
            if len(self._members) >= MAX_WORKERS:
                raise Overloaded(f"the router knows {MAX_WORKERS} workers, no more", limit=MAX_WORKERS)
            self._members[state.worker_id] = Member(state, now_s, now_s)
            self._gone.pop(state.worker_id, None)
            self._live.clear()
            return False
        if state.epoch in member.retired_epochs:
            return False  # a replaced incarnation: a late heartbeat, or a process that should be dead
        known = member.alive and state.epoch == member.state.epoch
        if state.epoch != member.state.epoch:
            self._lose(member, "death")
            member.retired_epochs.append(member.state.epoch)
            member.num_epochs += 1
        if not known or state.role != member.state.role:
            self._live.clear()
        member.state, member.heartbeat_s, member.lease_s, member.alive = state, now_s, now_s, True
        return known

    def expire(self, ended: Set[Incarnation] = frozenset()) -> list[Incarnation]:
        """Declare workers lost that were silent too long, and return their incarnations.

        It must be called several times per MAX_GAP_S. A late call extends every lease by its lateness, because
        heartbeats may be waiting to be read.

        Args:
            ended: incarnations no longer wanted; once lost, they are forgotten soon, and never shown as gone.
        """
        now_s = self._clock.now_s()
        stalled_s = max(0.0, now_s - self._expired_s - MAX_GAP_S)
        self._expired_s = now_s
        lost = []
        for worker_id, member in tuple(self._members.items()):
            member.lease_s = min(member.lease_s + stalled_s, now_s)
            age_s = now_s - member.lease_s
            if member.alive and age_s >= self._alive_s:
                self._lose(member, FENCE)
                lost.append(member.incarnation)
            elif not member.alive and member.incarnation in ended:
                if age_s >= FORGET_ENDED_S:
                    del self._members[worker_id]
            elif age_s >= FORGET_S:
                self._gone[worker_id] = self._members.pop(worker_id)
        for worker_id, member in tuple(self._gone.items()):
            if now_s - member.lease_s >= GONE_S or len(self._gone) > MAX_WORKERS:
                del self._gone[worker_id]
        return lost

    def watch(self, incarnation: Incarnation, on_lost: Callable[[], None]) -> Callable[[], None]:
        """Have `on_lost` called once when this incarnation is lost, now if it is; return an unwatch function."""
        member = self._members.get(incarnation.worker_id)
        if member is None or not member.alive or member.incarnation != incarnation:
            on_lost()
            return lambda: None
        key = object()
        self._watches.setdefault(incarnation, {})[key] = on_lost

        def unwatch() -> None:
            watches = self._watches.get(incarnation, {})
            watches.pop(key, None)
            if not watches:
                self._watches.pop(incarnation, None)

        return unwatch

    def has_met(self, incarnation: Incarnation) -> bool:
        """Whether this incarnation has sent a heartbeat, even if it was lost or replaced since."""
        member = self._members.get(incarnation.worker_id)
        return member is not None and (
            incarnation.epoch == member.state.epoch or incarnation.epoch in member.retired_epochs
        )

    def why_lost(self, incarnation: Incarnation) -> str:
        """Why an incarnation was lost: "fence" if only its silence says so, else "death"."""
        member = self._members.get(incarnation.worker_id)
        return (
            member.lost_by if member is not None and member.incarnation == incarnation and member.lost_by else "death"
        )

    def heard_since(self, incarnation: Incarnation, moment_s: float) -> bool:
        """Whether this incarnation sent a heartbeat after a moment, even if it was lost since."""
        member = self._members.get(incarnation.worker_id)
        return member is not None and member.incarnation == incarnation and member.heartbeat_s > moment_s

    def live(self, role: str) -> list[Member]:
        """Live workers of a role, by name."""
        found = self._live.get(role)
        if found is None:
            found = [member for member in self.all() if member.alive and member.state.role == role]
            self._live[role] = found
        return list(found)

    def all(self) -> list[Member]:
        """All known workers, by name."""
        return [self._members[worker_id] for worker_id in sorted(self._members)]

    def gone(self) -> list[Member]:
        """Lost workers that are forgotten otherwise, by name: none came back, and no operator took them away."""
        return sorted(self._gone.values(), key=lambda member: member.state.worker_id)

    def dismiss_gone(self) -> None:
        """Show none of `gone` any more: an operator has said how many workers there should be."""
        self._gone.clear()

    @property
    def serving(self) -> bool:
        """Whether there is a live worker of each role."""
        return bool(self.live(PREFILL)) and bool(self.live(DECODE))

    def heartbeat_age_s(self, member: Member) -> float:
        """Seconds since a worker's last heartbeat, not counting the router's own stalls."""
        return max(0.0, self._clock.now_s() - member.lease_s)

    def _lose(self, member: Member, why: str) -> None:
        if member.alive:
            member.lost_by = why
        member.alive = False
        self._live.clear()
        for on_lost in self._watches.pop(member.incarnation, {}).values():
            on_lost()


MAX_NUMBER: Final = 1e18  # upper bound of every reported number, so that results computed from it are finite
MIN_RATE: Final = 1e-12  # likewise: a divisor is at least this, or 0
_RATES: Final = frozenset(("gbps", "prefill_tokens_per_s", "full_prefill_tokens_per_s"))


class _Numbers(NamedTuple):
    """Names of a message type's floating-point fields, including those of nested messages."""

    own: tuple[str, ...]
    lists: tuple[str, ...]
    inner: tuple[tuple[str, "_Numbers"], ...]
    inner_lists: tuple[tuple[str, "_Numbers"], ...]

    @classmethod
    def of(cls, kind: Any) -> "_Numbers":
        """Collect the fields from the descriptor, so that a new field is not forgotten."""
        plain = [field for field in kind.fields if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE]
        inner = [(field, cls.of(field.message_type)) for field in kind.fields if field.message_type is not None]
        inner = [(field, numbers) for field, numbers in inner if any(numbers)]
        return cls(
            tuple(field.name for field in plain if not is_repeated(field)),
            tuple(field.name for field in plain if is_repeated(field)),
            tuple((field.name, numbers) for field, numbers in inner if not is_repeated(field)),
            tuple((field.name, numbers) for field, numbers in inner if is_repeated(field)),
        )

    def bad(self, message: Message) -> str:
        """Return the first field with an invalid number (NaN, negative or too large); empty if there is none."""
        for name in self.own:
            value = getattr(message, name)
            if not 0 <= value <= MAX_NUMBER or (name in _RATES and 0 < value < MIN_RATE):
                return name
        for name in self.lists:
            if not all(0 <= value <= MAX_NUMBER for value in getattr(message, name)):
                return name
        for name, numbers in self.inner:
            if message.HasField(name) and (found := numbers.bad(getattr(message, name))):
                return found
        for name, numbers in self.inner_lists:
            if found := next(filter(None, map(numbers.bad, getattr(message, name))), ""):
                return found
        return ""


_NUMBERS: Final = _Numbers.of(worker_pb2.WorkerState.DESCRIPTOR)


def _check(state: worker_pb2.WorkerState) -> None:
    problems = {
        "worker_id": not state.worker_id,
        "role": state.role not in (PREFILL, DECODE),
        "epoch": not state.epoch,
        "address": not state.address,
        "kv_address": state.role == DECODE and not state.kv_address,
        "max_model_len": not state.max_model_len,
        "block_size": not state.block_size,
        "num_blocks": not state.inventory.num_blocks,  # the smallest worker bounds all prompts
        "prefix_naming": state.HasField("prefix_naming") and not state.prefix_naming.block_size,
    }
    wrong = next((name for name, is_wrong in problems.items() if is_wrong), "") or _NUMBERS.bad(state)
    if wrong:
        raise InvalidRequest(f"a heartbeat without a usable {wrong}", field=wrong, worker_id=state.worker_id)
    if state.inventory.HasField("steps"):
        report_from_proto(state.inventory.steps)
    transfer = state.inventory.transfer
    for name in ("transfer_times", "exposed_times"):
        if transfer.HasField(name):
            distribution_from_proto(getattr(transfer, name))
