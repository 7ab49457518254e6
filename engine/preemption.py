"""Decides which sequence gives up its blocks when none is left, and how it resumes.

Sequences start with blocks for their tokens and some headroom (`overcommit`), and grow before every step that may write
past them. When no block is left, the youngest sequence is preempted: it takes part in no further step. Once no step in
flight runs it, its KV is copied to host memory, or dropped if offloading is off or host memory is full, and its blocks
go to the sequences that wait, oldest first. So the oldest sequence always makes progress. A sequence that was preempted
MAX_PREEMPTIONS times is protected: it restarts only with every block that it may need, and keeps them. Tokens do not
depend on preemption.
"""

import logging
from collections.abc import Callable, Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from baton.engine.scheduler import Scheduler
from baton.engine.sequence import Sequence
from baton.engine.step.executor import Pending
from baton.engine.step.plan import Grow, Growth, Load, Operation, Release, Save
from baton.kvcache.allocator import BlockTable
from baton.kvcache.host_ranges import HostRange, HostRanges

log = logging.getLogger(__name__)

HEADROOM_BLOCKS = 4  # added at once while plenty are free


@dataclass(slots=True)
class PreemptionCounts:
    """Cost of preemption so far.

    Attributes:
        num_preemptions: number of times that a sequence was preempted.
        num_recomputed_tokens: positions whose KV was dropped and is recomputed.
        num_offloaded_blocks: blocks copied to host memory.
        num_restored_blocks: blocks copied back.
        num_host_full: preemptions that dropped the KV because too little host memory was free, where there is any.
    """

    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_offloaded_blocks: int = 0
    num_restored_blocks: int = 0
    num_host_full: int = 0


class Holder(Protocol):
    """The part of a sequence that `plan_room` uses."""

    @property
    def table(self) -> BlockTable | None:
        """Its block table."""
        ...


S = TypeVar("S", bound=Holder)


@dataclass(frozen=True, slots=True)
class RoomPlan:
    """Decision about sequences that have too few blocks.

    Attributes:
        growing: sequences that get their missing blocks now, with how many.
        waiting: sequences that get them later, with how many.
        victims: sequences that are preempted for them.
    """

    growing: list[tuple[Sequence, int]] = field(default_factory=list)
    waiting: list[tuple[Sequence, int]] = field(default_factory=list)
    victims: list[Sequence] = field(default_factory=list)


def plan_room(
    short: Items[tuple[Sequence, int]], candidates: Items[Sequence], *, num_free: int, num_coming: int
) -> RoomPlan:
    """Divide the free blocks: oldest sequence first; none gets a block while an older one waits.

    Args:
        short: (sequence, missing blocks), oldest first; all of them are candidates.
        candidates: sequences that may be preempted, oldest first.
        num_free: number of free blocks.
        num_coming: number of blocks that will be free soon without preemption.
    """
    plan = RoomPlan()
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


def table_of(sequence: Holder) -> BlockTable:
    """The block table of a sequence that has one."""
    assert sequence.table is not None
    return sequence.table


class Steps(Protocol):
    """The part of the engine that preemption uses."""

    def runs(self, sequence: Sequence) -> bool:
        """Whether a step that was not read yet runs this sequence."""
        ...

    def execute(self, operation: Operation) -> Pending | None:
        """Execute an operation after the steps launched so far."""
        ...

    def last_step(self, sequence: Sequence) -> Pending | None:
        """The last step that runs a sequence; None if that step is over."""
        ...

    def after(self, ending: Pending | None, act: Callable[[], None]) -> None:
        """Call `act` once `ending` is over."""
        ...

    def was_preempted(self, sequence: Sequence) -> None:
        """Handle that a sequence has given up its blocks."""
        ...


class Preemption:
    """Preempts and restores the sequences of one engine.

    Args:
        scheduler: the engine's scheduler.
        steps: the engine.
        num_host_blocks: number of KV blocks that fit in host memory.
        num_state_images: number of state slots that fit in host memory.
    """

    def __init__(self, scheduler: Scheduler, steps: Steps, num_host_blocks: int, num_state_images: int = 0) -> None:
        self.counts = PreemptionCounts()
        self._scheduler = scheduler
        self._steps = steps
        self._ranges = HostRanges(num_host_blocks)
        self._images = HostRanges(num_state_images)
        self._filling: dict[Sequence, Pending] = {}  # sequences whose blocks a copy from host memory still writes

    @property
    def num_host_blocks_used(self) -> int:
        """Number of host blocks that hold a sequence's KV."""
        return self._ranges.num_used

    @property
    def num_state_images_used(self) -> int:
        """Number of state slots stored in host memory."""
        return self._images.num_used

    def preempt_leaving(self) -> None:
        """Preempt the leaving sequences that no step in flight runs any more."""
        for sequence in self._scheduler.leaving():
            if not self._steps.runs(sequence):
                self.preempt(sequence)

    def request(self, sequence: Sequence) -> None:
        """Preempt a sequence as soon as no step in flight runs it."""
        if self._steps.runs(sequence):
            self._scheduler.leave(sequence)
        else:
            self.preempt(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Take the slot and the blocks of a sequence that no step in flight runs."""
        assert not self._steps.runs(sequence)
        slot, table = sequence.slot, table_of(sequence)
        copied: Pending | None = None
        saved = None
        if sequence.is_whole and self._ranges.num_blocks:
            num_blocks = self._scheduler.allocator.num_blocks_for(sequence.num_kv)
            saved = self._take(sequence, num_blocks, table.state_slot)
            if saved is None:
                if self.counts.num_host_full == 0:
                    log.warning("host memory for KV is full: preempted sequences are computed again; said once")
                self.counts.num_host_full += 1
            else:
                image = None if sequence.saved_state is None else sequence.saved_state.first
                copied = self._steps.execute(
                    Save(table.blocks[:num_blocks], saved.first, slot, table.state_slot, image)
                )
                self.counts.num_offloaded_blocks += num_blocks
        sequence.saved, sequence.num_lost = saved, 0 if saved else sequence.num_kv
        sequence.num_preemptions += 1
        self.counts.num_preemptions += 1
        if slot is not None:
            self._steps.execute(Release(slot))
        last = copied or self._steps.last_step(sequence) or self.filled(sequence)
        self._filling.pop(sequence, None)
        self._steps.after(last, self._scheduler.preempt(sequence))
        self._steps.was_preempted(sequence)

    def started_again(self, sequence: Sequence) -> None:
        """Count what a restarted sequence recomputes: the KV it lost, less what it found cached."""
        self.counts.num_recomputed_tokens += max(0, sequence.num_lost - sequence.num_cached)
        sequence.num_lost = 0

    def load(self, sequence: Sequence) -> None:
        """Copy the KV and draft of a saved sequence back to the blocks and slot that it has now."""
        saved, slot = sequence.saved, sequence.slot
        assert saved is not None and slot is not None
        table, image = table_of(sequence), None if sequence.saved_state is None else sequence.saved_state.first
        ending = self._steps.execute(Load(table.blocks[: saved.length], saved.first, slot, table.state_slot, image))
        assert ending is not None
        self._filling[sequence] = ending
        self.counts.num_restored_blocks += saved.length
        self.forget(sequence)

    def filled(self, sequence: Sequence) -> Pending | None:
        """The copy, if any, that still writes the blocks of a sequence that leaves its slot; to be called once."""
        ending = self._filling.pop(sequence, None)
        return None if ending is None or ending.is_done else ending

    def forget(self, sequence: Sequence) -> None:
        """Free the host memory of a sequence."""
        if sequence.saved is not None:
            self._ranges.give_back(sequence.saved)
            sequence.saved = None
        if sequence.saved_state is not None:
            self._images.give_back(sequence.saved_state)
            sequence.saved_state = None

    def _take(self, sequence: Sequence, num_blocks: int, state_slot: int | None) -> HostRange | None:
        """Allocate host memory for a sequence's blocks and for its state slot, if it has one: both or neither."""
        saved = self._ranges.take(num_blocks)
        if saved is None or state_slot is None:
            return saved
        sequence.saved_state = self._images.take(1)
        if sequence.saved_state is None:
            self._ranges.give_back(saved)
            return None
        return saved

    def make_room(self, short: Items[tuple[Sequence, int]], num_decoding: int) -> Collection[Sequence]:
        """Let sequences grow for a step.

        Args:
            short: (sequence, positions that it needs), in any order.
            num_decoding: number of sequences in the step.

        Returns:
            The sequences that do not take part in the step, because they wait for blocks or are preempted.
        """
        missing: dict[int, dict[Sequence, int]] = {}  # by owner, because the blocks come from its pool
        for item, wanted_len in short:
            missing.setdefault(item.owner, {})[item] = self._num_missing(item, wanted_len)
        gone: set[Sequence] = set()
        for owner in sorted(missing):
            gone.update(self._make_room_at(owner, missing[owner], num_decoding))
        return gone

    def _make_room_at(self, owner: int, missing: dict[Sequence, int], num_decoding: int) -> Collection[Sequence]:
        """Let sequences grow in one rank's pool; `missing` says how many blocks each lacks."""
        allocator = self._scheduler.allocators[owner]
        if sum(missing.values()) <= allocator.num_free:  # by far the most common case
            self._grow(owner, missing.items(), num_decoding)
            return ()
        gone: set[Sequence] = set()
        while True:
            candidates = self._scheduler.candidates(owner)
            asking = [(sequence, missing[sequence]) for sequence in candidates if sequence in missing]
            assert len(asking) + len(gone & missing.keys()) == len(missing), "one that has all its blocks is short"
            num_coming = self._scheduler.num_coming(owner)
            plan = plan_room(asking, candidates, num_free=allocator.num_free, num_coming=num_coming)
            at_once = [victim for victim in plan.victims if not self._steps.runs(victim)]
            if not at_once:
                break
            for victim in at_once:
                self.preempt(victim)
                gone.add(victim)
        for victim in plan.victims:
            self._scheduler.leave(victim)
        self._grow(owner, plan.growing, num_decoding)
        self._scheduler.claim(sum(number for _, number in plan.waiting), owner)
        return gone.union((item for item, _ in plan.waiting), plan.victims)

    def _num_missing(self, sequence: Sequence, wanted_len: int) -> int:
        return self._scheduler.allocator.num_blocks_for(wanted_len) - len(table_of(sequence).blocks)

    def _grow(self, owner: int, growing: Collection[tuple[Sequence, int]], num_decoding: int) -> None:
        """Give each sequence its missing blocks, which are free, plus some headroom if plenty are left."""
        if not growing:
            return
        num_left = self._scheduler.allocators[owner].num_free - sum(number for _, number in growing)
        extra = HEADROOM_BLOCKS - 1 if num_left >= num_decoding * HEADROOM_BLOCKS else 0
        growths: list[Growth] = [self._scheduler.add_blocks(item, number + extra) for item, number in growing]
        self._steps.execute(Grow(tuple(growths)))
