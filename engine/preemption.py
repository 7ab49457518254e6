"""Who gives way when KV blocks run out, and how: by host memory, or by being computed again.

Sequences start with blocks for what they have and some headroom (`overcommit`), and grow ahead of every step that may
write. When none is left the youngest gives way: it is not launched any more, and once no step in flight has it, its KV
goes to host memory, or is dropped where that is off or full, and its blocks to those that wait, the oldest first. So
the oldest always goes on. Whoever gave way MAX_PREEMPTIONS times is protected: it starts again only with every block
that it may need, and keeps them. Tokens do not depend on any of this. The caller's scheduler owns queues and blocks;
this owns the choice and its accounts. One thread uses it.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from baton.engine.host_future import HostFuture
from baton.engine.slots import Growth
from baton.engine.step_pipeline import Ending, StepPipeline
from baton.engine.step_ticket import StepTicket
from baton.kvcache.allocator import BlockAllocator, BlockTable
from baton.kvcache.host_ranges import HostRange, HostRanges

log = logging.getLogger(__name__)

MAX_PREEMPTIONS = 3  # of one sequence, for want of blocks
HEADROOM_BLOCKS = 4  # that a sequence gets at once while there are plenty


@dataclass(slots=True)
class PreemptionCounts:
    """What giving way has cost so far.

    Attributes:
        num_preemptions: times that a sequence gave its blocks to others.
        num_recomputed_tokens: positions whose KV was dropped and is computed again.
        num_offloaded_blocks: copied to host memory.
        num_restored_blocks: copied back.
        num_host_full: preemptions that found too little host memory, where there is any, and dropped the KV.
    """

    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_offloaded_blocks: int = 0
    num_restored_blocks: int = 0
    num_host_full: int = 0


class Preemptible(Protocol):
    """What is known here of a sequence."""

    num_preemptions: int
    is_giving_way: bool
    saved: HostRange | None
    num_lost: int

    @property
    def table(self) -> BlockTable | None:
        """Its blocks, while it has any."""
        ...

    @property
    def runner_slot(self) -> int | None:
        """Where the runner has it, if it decodes."""
        ...

    @property
    def num_kv(self) -> int:
        """Positions whose KV is in its blocks, all steps read."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether its prompt is computed, so that its KV is worth saving."""
        ...


S = TypeVar("S", bound=Preemptible)


class Offload(Protocol):
    """What is needed of `KVOffload`."""

    @property
    def num_blocks(self) -> int:
        """Host blocks."""
        ...

    def save(self, blocks: Sequence[int], first: int, slot: int | None) -> HostFuture:
        """Copy to the host."""
        ...

    def load(self, blocks: Sequence[int], first: int, slot: int) -> HostFuture:
        """Copy back."""
        ...


class Runner(Protocol):
    """What is needed of `DecodeRunner`."""

    @property
    def kv_offload(self) -> Offload:
        """Its host memory."""
        ...

    def grow(self, growths: Sequence[Growth]) -> None:
        """Give running sequences more blocks."""
        ...

    def release(self, slot: int) -> StepTicket | None:
        """Forget a sequence."""
        ...


class Scheduler(Protocol[S]):
    """What is needed of the scheduler that owns the sequences."""

    @property
    def num_coming(self) -> int:
        """Blocks of sequences that have left, or are giving way, which will be free when the steps they are in are."""
        ...

    def claim(self, num_blocks: int) -> None:
        """So many blocks are for sequences that wait for room: nobody else may start with them."""
        ...

    def candidates(self) -> list[S]:
        """Sequences that may be preempted, oldest first: they have blocks, are not giving way, and not protected."""
        ...

    def give_way(self, sequence: S) -> None:
        """It is not launched any more, and preempted when no step has it."""
        ...

    def giving_way(self) -> tuple[S, ...]:
        """Those."""
        ...

    def add_blocks(self, sequence: S, num_blocks: int) -> Growth:
        """More blocks, which are free, for a sequence that runs."""
        ...

    def preempt(self, sequence: S) -> Callable[[], None]:
        """It waits again; the function frees the blocks and the slot that it had."""
        ...


@dataclass(frozen=True, slots=True)
class RoomPlan(Generic[S]):
    """What becomes of sequences whose blocks are too few.

    Attributes:
        growing: those that get what they miss now, with how many blocks.
        waiting: those that get it later, with how many.
        victims: who must give way for them.
    """

    growing: list[tuple[S, int]] = field(default_factory=list)
    waiting: list[tuple[S, int]] = field(default_factory=list)
    victims: list[S] = field(default_factory=list)


def plan_room(
    short: Sequence[tuple[S, int]], candidates: Sequence[S], *, num_free: int, num_coming: int
) -> RoomPlan[S]:
    """Divide the free blocks: to the oldest first, and nobody gets one while an older one waits for it.

    Args:
        short: (sequence, blocks it misses), oldest first; all of them are candidates.
        candidates: who may give way, oldest first.
        num_free: blocks.
        num_coming: that will be free soon by themselves.
    """
    plan: RoomPlan[S] = RoomPlan()
    left = list(candidates)
    claimed = 0
    for sequence, num_missing in short:
        if sequence in plan.victims:
            continue
        claimed += num_missing
        if claimed <= num_free:
            plan.growing.append((sequence, num_missing))
            continue
        plan.waiting.append((sequence, num_missing))
        while claimed > num_free + num_coming and left != [sequence]:
            victim = left.pop()
            plan.victims.append(victim)
            num_coming += len(table_of(victim).blocks)
            if victim is sequence:
                claimed -= num_missing
                plan.waiting.pop()
                break
    return plan


def table_of(sequence: Preemptible) -> BlockTable:
    """The blocks of a sequence that has some."""
    assert sequence.table is not None
    return sequence.table


class Preemption(Generic[S]):
    """Room for the sequences of one engine or worker.

    Args:
        allocator: of the pool.
        scheduler: who is where.
        runner: that has the sequences in its slots.
        steps: of that runner.
    """

    def __init__(
        self, allocator: BlockAllocator, scheduler: Scheduler[S], runner: Runner, steps: StepPipeline[S]
    ) -> None:
        self.counts = PreemptionCounts()
        self._allocator = allocator
        self._scheduler = scheduler
        self._runner = runner
        self._steps = steps
        self._ranges = HostRanges(runner.kv_offload.num_blocks)
        self._num_running = 0

    @property
    def num_host_blocks_used(self) -> int:
        """Host blocks that hold somebody's KV."""
        return self._ranges.num_used

    def launch(self, slots: Sequence[int], sequences: Sequence[S]) -> bool:
        """`StepPipeline.launch`, with room for everybody who takes part; before each step, also if there is nobody."""
        self._scheduler.claim(0)
        self._num_running = len(slots)
        return bool(slots) and self._steps.launch(slots, sequences, self._make_room)

    def preempt_due(self) -> None:
        """Preempt those that are giving way and that no step has any more."""
        for sequence in self._scheduler.giving_way():
            if not self._steps.has(sequence):
                self.preempt(sequence)

    def request(self, sequence: S) -> None:
        """Preempt a sequence as soon as no step has it."""
        if self._steps.has(sequence):
            self._scheduler.give_way(sequence)
        else:
            self.preempt(sequence)

    def preempt(self, sequence: S) -> None:
        """Take the slot and the blocks of a sequence that no step has."""
        slot, table = sequence.runner_slot, table_of(sequence)
        copied: Ending | None = None
        saved = None
        if sequence.is_whole and self._ranges.num_blocks:
            num_blocks = self._allocator.num_blocks_for(sequence.num_kv)
            saved = self._ranges.take(num_blocks)
            if saved is None:
                if self.counts.num_host_full == 0:
                    log.warning("host memory for KV is full: preempted sequences are computed again; said once")
                self.counts.num_host_full += 1
            else:
                self._steps.disturb()
                copied = self._runner.kv_offload.save(table.blocks[:num_blocks], saved.first, slot)
                self.counts.num_offloaded_blocks += num_blocks
        sequence.saved, sequence.num_lost = saved, 0 if saved else sequence.num_kv
        sequence.num_preemptions += 1
        self.counts.num_preemptions += 1
        if slot is not None:
            last = self._runner.release(slot)
            assert last is None, "a step has a sequence that is preempted"
            filled = self._steps.filled(slot)  # by a copy that no step has followed
            copied = copied or filled
        free = self._scheduler.preempt(sequence)
        if copied is None:
            free()
        else:
            self._steps.give_back_after(copied, free)

    def started_again(self, sequence: S) -> None:
        """It has blocks again, and computes what it lost."""
        self.counts.num_recomputed_tokens += sequence.num_lost
        sequence.num_lost = 0

    def load(self, sequence: S, slot: int) -> None:
        """Bring the KV of a saved sequence, and its draft, back to the blocks and the slot that it has now."""
        saved = sequence.saved
        assert saved is not None
        self._steps.disturb()
        self._steps.fill(
            slot, self._runner.kv_offload.load(table_of(sequence).blocks[: saved.length], saved.first, slot)
        )
        self.counts.num_restored_blocks += saved.length
        self.forget(sequence)

    def forget(self, sequence: S) -> None:
        """Nobody needs what is saved of a sequence."""
        if sequence.saved is not None:
            self._ranges.give_back(sequence.saved)
            sequence.saved = None

    def _make_room(self, short: list[tuple[S, int]]) -> Collection[S]:
        """Let sequences grow for a step; who does not take part in it: those that wait for blocks, or give way.

        `short` are (sequence, positions that it needs), in any order.
        """
        missing = {item: self._num_missing(item, wanted_len) for item, wanted_len in short}
        if sum(missing.values()) <= self._allocator.num_free:  # by far the most often
            self._grow(missing.items())
            return ()
        gone: set[S] = set()
        while True:
            candidates = self._scheduler.candidates()
            asking = [(sequence, missing[sequence]) for sequence in candidates if sequence in missing]
            assert len(asking) + len(gone & missing.keys()) == len(missing), "one that has all its blocks is short"
            num_free, num_coming = self._allocator.num_free, self._scheduler.num_coming
            plan = plan_room(asking, candidates, num_free=num_free, num_coming=num_coming)
            at_once = [victim for victim in plan.victims if not self._steps.has(victim)]
            if not at_once:
                break
            for victim in at_once:
                self.preempt(victim)
                gone.add(victim)
        for victim in plan.victims:
            self._scheduler.give_way(victim)
        self._grow(plan.growing)
        self._scheduler.claim(sum(number for _, number in plan.waiting))
        return gone.union((item for item, _ in plan.waiting), plan.victims)

    def _num_missing(self, sequence: S, wanted_len: int) -> int:
        return self._allocator.num_blocks_for(wanted_len) - len(table_of(sequence).blocks)

    def _grow(self, growing: Collection[tuple[S, int]]) -> None:
        """Give so many blocks, which are free; some more, so that it need not be soon again, if there are plenty."""
        if growing:
            num_left = self._allocator.num_free - sum(number for _, number in growing)
            extra = HEADROOM_BLOCKS - 1 if num_left >= self._num_running * HEADROOM_BLOCKS else 0
            self._runner.grow([self._scheduler.add_blocks(item, number + extra) for item, number in growing])
