"""The hand-off of a tensor-parallel prefill worker: each rank pushes its own KV heads into one landing.

To the worker's loop, which exists at rank 0 alone, `GangPush` is a `PushService`: it reserves for all ranks, hands the
grant on, and says that a transfer has ended when it has ended at every rank, because all of them read the same blocks.
What happens at other ranks comes back whenever the loop polls. The other ranks run `PrefillFollower`.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from baton.core.request import AttemptKey
from baton.engine.gang import STOP, FollowPrefill, table_fields, table_of
from baton.engine.plan import Plan, PlanChannel
from baton.kvcache.allocator import BlockTable
from baton.kvtransfer.async_writer import AsyncWriter, PushPart
from baton.kvtransfer.lane_choice import LaneChoice
from baton.kvtransfer.push import Acked, DecodePeer, Denied, Granted, PushDrained, PushEvent, PushFailed, PushService
from baton.kvtransfer.push_actions import GrantInfo
from baton.kvtransfer.push_totals import PathCounts
from baton.proto import kv_pb2


@dataclass(slots=True)
class _Transfer:
    """One attempt's, over all ranks."""

    peer: DecodePeer
    table: BlockTable
    prompt_len: int
    reading: set[int] = field(default_factory=lambda: {0})  # ranks whose transfer has not ended
    bytes_pushed: int = 0
    is_acked: bool = True  # by every rank that has ended
    has_failed: bool = False  # and the worker was told


class GangWriter:
    """Every rank's `AsyncWriter`, as one."""

    def __init__(self, own: AsyncWriter, channel: PlanChannel) -> None:
        self._own = own
        self._channel = channel

    @contextlib.contextmanager
    def step(self, parts: Sequence[PushPart]) -> Iterator["GangWriter"]:
        """As `AsyncWriter.step`, at every rank."""
        self._channel.tell("begin", parts=[_part_fields(part) for part in parts])
        self._own.begin(parts)
        try:
            yield self
        except BaseException:
            self._own.cancel()
            raise  # the loop ends, and the other ranks with their group
        self._channel.tell("end")
        self._own.wait_all()

    def submit(self, layer: int) -> None:
        """As `AsyncWriter.submit`, at every rank."""
        if not self._channel.is_computing:  # else each rank's own forward submits
            self._channel.tell("submit", layer=layer)
        self._own.submit(layer)


class GangPush:
    """Rank 0's `PushService`, and what the other ranks' have to say."""

    def __init__(self, own: PushService, channel: PlanChannel) -> None:
        self.writer = GangWriter(own.writer, channel)
        self._own = own
        self._channel = channel
        self._transfers: dict[AttemptKey, _Transfer] = {}

    @property
    def wakeup(self) -> Callable[[], None]:
        """Called on another thread when there is something to poll."""
        return self._own.wakeup

    @wakeup.setter
    def wakeup(self, wakeup: Callable[[], None]) -> None:
        self._own.wakeup = wakeup

    def start(self) -> None:
        """Begin to serve, at every rank."""
        self._own.start()

    def close(self) -> None:
        """Stop, at every rank; the last call."""
        self._own.close()
        self._channel.tell(STOP)

    def inventory(self) -> dict[str, int]:
        """Rank 0's counts. Any thread."""
        return self._own.inventory()

    def paths(self) -> tuple[PathCounts, ...]:
        """Rank 0's. Any thread."""
        return self._own.paths()

    def lanes(self) -> dict[str, LaneChoice]:
        """Rank 0's. Any thread."""
        return self._own.lanes()

    def reserve(
        self,
        attempt: AttemptKey,
        peer: DecodePeer,
        table: BlockTable,
        prompt_len: int,
        capacity_len: int,
        wait_s: float,
    ) -> None:
        """As `PushService.reserve`; the other ranks take part from the grant on."""
        self._transfers[attempt] = _Transfer(peer, table, prompt_len)
        self._own.reserve(attempt, peer, table, prompt_len, capacity_len, wait_s)

    def push_cached(self, attempt: AttemptKey, first: int, count: int) -> None:
        """As `PushService.push_cached`, at every rank."""
        self._channel.tell("push_cached", attempt=asdict(attempt), first=first, count=count)
        self._own.push_cached(attempt, first, count)

    def commit(self, attempt: AttemptKey, state: kv_pb2.SequenceState, prefill_end_s: float) -> None:
        """As `PushService.commit`, at every rank; the state goes with rank 0's."""
        self._channel.tell("commit", attempt=asdict(attempt), prefill_end_s=prefill_end_s)
        self._own.commit(attempt, state, prefill_end_s)

    def abort(self, attempt: AttemptKey, reason: str) -> None:
        """As `PushService.abort`, at every rank."""
        transfer = self._transfers.get(attempt)
        if transfer is not None and transfer.reading - {0}:
            self._channel.tell("abort", attempt=asdict(attempt), reason=reason)
        self._own.abort(attempt, reason)

    def poll(self) -> list[PushEvent]:
        """What happened since the last call.

        Raises:
            TransferFailed: rank 0 cannot push any more.
            WorkerLost: another rank is gone.
        """
        happened: list[PushEvent] = []
        for event in self._own.poll():
            happened += self._take(0, event)
        if any(transfer.reading - {0} for transfer in self._transfers.values()):
            self._channel.tell("poll")
            for rank, theirs in enumerate(self._channel.communicator.gather_bytes(b"")[1:], start=1):
                for event in _events(theirs):
                    happened += self._take(rank, event)
        return happened

    def _take(self, rank: int, event: PushEvent) -> list[PushEvent]:
        """What a rank's event means to the worker."""
        transfer = self._transfers[event.attempt]
        match event:
            case Granted():
                self._channel.tell(
                    "adopt",
                    attempt=asdict(event.attempt),
                    peer=asdict(transfer.peer),
                    table=table_fields(transfer.table),
                    prompt_len=transfer.prompt_len,
                    grant=asdict(event.grant),
                )
                transfer.reading = set(range(self._channel.communicator.size))
                return [event]
            case Denied():
                del self._transfers[event.attempt]
                return [event]
            case PushFailed():
                if transfer.has_failed:
                    return []
                transfer.has_failed = True
                return [event]
            case Acked():
                transfer.bytes_pushed += event.bytes_pushed
            case PushDrained():
                transfer.is_acked = False
        transfer.reading.discard(rank)
        if transfer.reading:
            return []
        del self._transfers[event.attempt]
        if transfer.is_acked and not transfer.has_failed:
            return [Acked(event.attempt, transfer.bytes_pushed)]
        return [PushDrained(event.attempt)]


class PrefillFollower:
    """What another rank does, until rank 0 says stop.

    Args:
        runner: of this rank.
        push: of this rank; owned from here on.
        channel: to rank 0.
    """

    def __init__(self, runner: FollowPrefill, push: PushService, channel: PlanChannel) -> None:
        self._runner = runner
        self._push = push
        self._channel = channel

    def run(self) -> None:
        """Serve.

        Raises:
            WorkerLost: rank 0 is gone, or this rank diverged.
            TransferFailed: this rank cannot push any more.
        """
        self._push.start()
        try:
            while (plan := self._channel.hear()).kind != STOP:
                if not self._runner.take(plan, self._push.writer.submit):
                    self._take(plan)
        finally:
            self._push.close()

    def _take(self, plan: Plan) -> None:
        fields, push = plan.fields, self._push
        match plan.kind:
            case "begin":
                push.writer.begin(
                    [PushPart(_key(part["attempt"]), part["first"], part["count"]) for part in fields["parts"]]
                )
            case "submit":
                push.writer.submit(fields["layer"])
            case "end":
                push.writer.wait_all()
            case "adopt":
                table, peer = table_of(fields["table"]), DecodePeer(**fields["peer"])
                push.adopt(_key(fields["attempt"]), peer, table, fields["prompt_len"], _grant(fields["grant"]))
            case "push_cached":
                push.push_cached(_key(fields["attempt"]), fields["first"], fields["count"])
            case "commit":
                push.commit(_key(fields["attempt"]), None, fields["prefill_end_s"])
            case "abort":
                push.abort(_key(fields["attempt"]), fields["reason"])
            case "poll":
                self._channel.communicator.gather_bytes(_report(push.poll()))
            case kind:
                raise AssertionError(f"a prefill rank does not know {kind!r}")


_KINDS: dict[str, type[Acked] | type[PushFailed] | type[PushDrained]] = {
    kind.__name__: kind for kind in (Acked, PushFailed, PushDrained)
}


def _report(events: Sequence[PushEvent]) -> bytes:
    """Events as bytes; those that another rank than 0 can have."""
    if not events:
        return b""
    return json.dumps([{"kind": type(event).__name__, **asdict(event)} for event in events]).encode()


def _events(data: bytes) -> list[PushEvent]:
    found: list[PushEvent] = []
    for fields in json.loads(data) if data else []:
        kind = _KINDS[fields.pop("kind")]
        found.append(kind(_key(fields.pop("attempt")), **fields))
    return found


def _part_fields(part: PushPart) -> dict[str, Any]:
    return {"attempt": asdict(part.attempt), "first": part.first, "count": part.count}


def _key(fields: dict[str, Any]) -> AttemptKey:
    return AttemptKey(**fields)


def _grant(fields: dict[str, Any]) -> GrantInfo:
    return GrantInfo(**{**fields, "blocks": tuple(fields["blocks"])})
