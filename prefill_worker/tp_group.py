"""The hand-off of a tensor-parallel prefill worker: each rank pushes its own KV heads into one incoming transfer.

To the worker's loop, which exists only at rank 0, `TPGroupPush` looks like a `PushService`: it reserves for all ranks,
passes the grant on, and reports that a transfer has ended when it has ended at every rank, because all of them read the
same blocks. Events of other ranks arrive asynchronously, and wake the loop. The other ranks run `PrefillRankPush`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from baton.core.requests.request import AttemptKey
from baton.engine.tp.plan import PlanChannel, plan_codec
from baton.engine.tp.plan_codec import PlanCodec, Stop
from baton.engine.tp.rank_runners import RankRunner
from baton.kvcache.allocator import BlockTable
from baton.kvtransfer.sender.data_path_choice import DataPathChoice
from baton.kvtransfer.sender.service import (
    Acked,
    DecodePeer,
    Denied,
    Granted,
    GrantInfo,
    PushDrained,
    PushEvent,
    PushFailed,
    PushService,
)
from baton.kvtransfer.sender.table import PathCounts
from baton.proto import kv_pb2


@dataclass(frozen=True, slots=True)
class Adopt:
    """A `PushService.adopt` call for the other ranks."""

    attempt: AttemptKey
    peer: DecodePeer
    table: BlockTable
    prompt_len: int
    grant: GrantInfo


@dataclass(frozen=True, slots=True)
class PushCached:
    """A `PushService.push_cached` call for the other ranks."""

    attempt: AttemptKey
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Commit:
    """A `PushService.commit` call for the other ranks, without the state, which rank 0 commits."""

    attempt: AttemptKey
    prefill_end_s: float


@dataclass(frozen=True, slots=True)
class Abort:
    """A `PushService.abort` call for the other ranks."""

    attempt: AttemptKey
    reason: str


TOLD: dict[int, type] = {67: Adopt, 68: PushCached, 69: Commit, 70: Abort}
REPORTED: dict[int, type] = {80: Acked, 81: PushFailed, 82: PushDrained}


def prefill_codec() -> PlanCodec:
    """Return the codec of a prefill worker's TP group."""
    return plan_codec({**TOLD, **REPORTED})


@dataclass(slots=True)
class _Transfer:
    """The transfer of one attempt, over all ranks."""

    peer: DecodePeer
    table: BlockTable
    prompt_len: int
    reading: set[int] = field(default_factory=lambda: {0})  # ranks whose transfer has not ended
    bytes_pushed: int = 0
    is_acked: bool = True  # by every rank whose transfer has ended
    has_failed: bool = False  # and the worker was told
    given_up: Abort | None = None  # before the other ranks took part


class TPGroupPush:
    """Combines rank 0's `PushService` with the events of the other ranks' services."""

    def __init__(self, own: PushService, channel: PlanChannel) -> None:
        self._own = own
        self._channel = channel
        self._transfers: dict[AttemptKey, _Transfer] = {}

    @property
    def wakeup(self) -> Callable[[], None]:
        """Callback on another thread when there is something to poll."""
        return self._own.wakeup

    @wakeup.setter
    def wakeup(self, wakeup: Callable[[], None]) -> None:
        self._own.wakeup = wakeup
        self._channel.link.on_report = wakeup

    def start(self) -> None:
        """Begin to serve, at every rank."""
        self._own.start()

    def close(self) -> None:
        """Stop, at every rank; must be the last call."""
        self._own.close()
        self._channel.link.expect_end()
        self._channel.tell(Stop())

    def inventory(self) -> dict[str, int]:
        """Return rank 0's counters. Any thread may call this."""
        return self._own.inventory()

    def paths(self) -> tuple[PathCounts, ...]:
        """Return rank 0's path measurements. Any thread may call this."""
        return self._own.paths()

    def data_paths(self) -> dict[str, DataPathChoice]:
        """Return rank 0's data paths. Any thread may call this."""
        return self._own.data_paths()

    def reserve(
        self,
        attempt: AttemptKey,
        peer: DecodePeer,
        table: BlockTable,
        prompt_len: int,
        capacity_len: int,
        wait_s: float,
    ) -> None:
        """Like `PushService.reserve`; the other ranks take part from the grant on."""
        self._transfers[attempt] = _Transfer(peer, table, prompt_len)
        self._own.reserve(attempt, peer, table, prompt_len, capacity_len, wait_s)

    def push_cached(self, attempt: AttemptKey, first: int, count: int) -> None:
        """Like `PushService.push_cached`, at every rank."""
        self._channel.tell(PushCached(attempt, first, count))
        self._own.push_cached(attempt, first, count)

    def commit(self, attempt: AttemptKey, state: kv_pb2.SequenceState, prefill_end_s: float) -> None:
        """Like `PushService.commit`, at every rank; rank 0 commits the state."""
        self._channel.tell(Commit(attempt, prefill_end_s))
        self._own.commit(attempt, state, prefill_end_s)

    def abort(self, attempt: AttemptKey, reason: str) -> None:
        """Like `PushService.abort`, at every rank."""
        transfer = self._transfers.get(attempt)
        if transfer is not None and transfer.reading - {0}:
            self._channel.tell(Abort(attempt, reason))
        elif transfer is not None:
            transfer.given_up = Abort(attempt, reason)
        self._own.abort(attempt, reason)

    def poll(self) -> list[PushEvent]:
        """Return the events since the last call.

        Raises:
            TransferFailed: rank 0 cannot push any more.
            WorkerLost: another rank is gone.
        """
        happened: list[PushEvent] = []
        for event in self._own.poll():
            happened += self._take(0, event)
        for rank, event in self._channel.link.reports():
            happened += self._take(rank, event)
        return happened

    def _take(self, rank: int, event: PushEvent) -> list[PushEvent]:
        """Convert a rank's event to events for the worker."""
        transfer = self._transfers[event.attempt]
        match event:
            case Granted():
                adopt = Adopt(event.attempt, transfer.peer, transfer.table, transfer.prompt_len, event.grant)
                self._channel.tell(adopt)
                # Every grant goes to every rank: the decode worker asks all of them before it frees the blocks.
                if transfer.given_up is not None:
                    self._channel.tell(transfer.given_up)
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


class PrefillRankPush:
    """The loop of another rank, until rank 0 says stop.

    Args:
        runner: this rank's runner; its steps push through `push`.
        push: this rank's push service; owned from here on.
        channel: channel to rank 0.
    """

    def __init__(self, runner: RankRunner, push: PushService, channel: PlanChannel) -> None:
        self._runner = runner
        self._push = push
        self._channel = channel

    def run(self) -> None:
        """Serve until rank 0 says stop.

        Raises:
            WorkerLost: rank 0 is gone, or this rank diverged.
            TransferFailed: this rank cannot push any more.
        """
        self._push.wakeup = self._channel.link.wake
        self._push.start()
        try:
            while not isinstance(plan := self._channel.hear(self._runner.look_s), Stop):
                if plan is not None and not self._runner.take(plan):
                    self._take(plan)
                self._runner.look()
                for event in self._push.poll():
                    self._channel.tell(event)
        finally:
            self._push.close()

    def _take(self, plan: Any) -> None:
        push = self._push
        match plan:
            case Adopt():
                push.adopt(plan.attempt, plan.peer, plan.table, plan.prompt_len, plan.grant)
            case PushCached():
                push.push_cached(plan.attempt, plan.first, plan.count)
            case Commit():
                push.commit(plan.attempt, None, plan.prefill_end_s)
            case Abort():
                push.abort(plan.attempt, plan.reason)
            case _:
                raise AssertionError(f"a prefill rank does not know {plan!r}")
