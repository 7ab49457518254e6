"""Which sequence gives up its blocks when none is left, and how it comes back.

Sequences start with blocks for what they have and some headroom (`overcommit`), and grow ahead of every step that may
write. When none is left the youngest is preempted: it takes part in no further step, and once no step in flight runs
it, its KV goes to host memory, or is dropped where that is off or full, and its blocks to those that wait, the oldest
first. So the oldest always goes on. A sequence that was preempted MAX_PREEMPTIONS times is protected: it starts again
only with every block that it may need, and keeps them. Tokens do not depend on any of this.
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

HEADROOM_BLOCKS = 4  # that a sequence gets at once while there are plenty


@dataclass(slots=True)
class PreemptionCounts:
    """What preemption has cost so far.

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


class Holder(Protocol):
    """What `plan_room` knows of a sequence."""

    @property
    def table(self) -> BlockTable | None:
        """Its blocks."""
        ...


S = TypeVar("S", bound=Holder)


@dataclass(frozen=True, slots=True)
class RoomPlan:
    """What becomes of sequences whose blocks are too few.

    Attributes:
        growing: those that get what they miss now, with how many blocks.
        waiting: those that get it later, with how many.
        victims: those that are preempted for them.
    """

    growing: list[tuple[Sequence, int]] = field(default_factory=list)
    waiting: list[tuple[Sequence, int]] = field(default_factory=list)
    victims: list[Sequence] = field(default_factory=list)


def plan_room(
    short: Items[tuple[Sequence, int]], candidates: Items[Sequence], *, num_free: int, num_coming: int
) -> RoomPlan:
    """Divide the free blocks: the oldest first, and none gets one while an older one waits for it.

    Args:
        short: (sequence, blocks that it misses), oldest first; all of them are candidates.
        candidates: those that may be preempted, oldest first.
        num_free: blocks.
        num_coming: that will be free soon by themselves.
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
    """The blocks of a sequence that has some."""
    assert sequence.table is not None
    return sequence.table


class Steps(Protocol):
    """What preemption needs of the steps in flight."""

    def runs(self, sequence: Sequence) -> bool:
        """Whether a step that was not read runs this sequence."""
        ...

    def execute(self, operation: Operation) -> Pending | None:
        """Carry out an operation behind the steps launched so far."""
        ...

    def last_step(self, sequence: Sequence) -> Pending | None:
        """The last step that runs a sequence; None if that is over."""
        ...

    def after(self, ending: Pending | None, act: Callable[[], None]) -> None:
        """Call `act` when something is over."""
        ...

    def was_preempted(self, sequence: Sequence) -> None:
        """A sequence has left its blocks."""
        ...


class Preemption:
    """Room for the sequences of one engine.

    Args:
        scheduler: of the engine.
        steps: of the engine.
        num_host_blocks: that host memory holds.
        num_state_images: state slots that it holds.
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
        """Host blocks that hold a sequence's KV."""
        return self._ranges.num_used

    @property
    def num_state_images_used(self) -> int:
        """State slots that host memory holds."""
        return self._images.num_used

    def preempt_leaving(self) -> None:
        """Preempt those that are leaving and that no step in flight runs any more."""
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
        """A sequence whose KV was dropped has blocks again, and computes what it lost and did not find cached."""
        self.counts.num_recomputed_tokens += max(0, sequence.num_lost - sequence.num_cached)
        sequence.num_lost = 0

    def load(self, sequence: Sequence) -> None:
        """Bring the KV of a saved sequence, and its draft, back to the blocks and the slot that it has now."""
        saved, slot = sequence.saved, sequence.slot
        assert saved is not None and slot is not None
        table, image = table_of(sequence), None if sequence.saved_state is None else sequence.saved_state.first
        ending = self._steps.execute(Load(table.blocks[: saved.length], saved.first, slot, table.state_slot, image))
        assert ending is not None
        self._filling[sequence] = ending
        self.counts.num_restored_blocks += saved.length
        self.forget(sequence)

    def filled(self, sequence: Sequence) -> Pending | None:
        """The copy that still writes the blocks of a sequence which leaves its slot; asked once."""
        ending = self._filling.pop(sequence, None)
        return None if ending is None or ending.is_done else ending

    def forget(self, sequence: Sequence) -> None:
        """What is saved of a sequence is not needed any more."""
        if sequence.saved is not None:
            self._ranges.give_back(sequence.saved)
            sequence.saved = None
        if sequence.saved_state is not None:
            self._images.give_back(sequence.saved_state)
            sequence.saved_state = None

    def _take(self, sequence: Sequence, num_blocks: int, state_slot: int | None) -> HostRange | None:
        """Host memory for the blocks of a sequence and for its state slot, if it has one: both or neither."""
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
            num_decoding: sequences of the step.

        Returns:
            Those that do not take part in it: they wait for blocks, or are preempted.
        """
        missing: dict[int, dict[Sequence, int]] = {}  # by owner: its rank's pool has to have them
        for item, wanted_len in short:
            missing.setdefault(item.owner, {})[item] = self._num_missing(item, wanted_len)
        gone: set[Sequence] = set()
        for owner in sorted(missing):
            gone.update(self._make_room_at(owner, missing[owner], num_decoding))
        return gone

    def _make_room_at(self, owner: int, missing: dict[Sequence, int], num_decoding: int) -> Collection[Sequence]:
        """The same of one rank's pool; how many blocks each misses."""
        allocator = self._scheduler.allocators[owner]
        if sum(missing.values()) <= allocator.num_free:  # by far the most often
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
        """Give so many blocks, which are free; some more, so that it need not be soon again, if there are plenty."""
        if not growing:
            return
        num_left = self._scheduler.allocators[owner].num_free - sum(number for _, number in growing)
        extra = HEADROOM_BLOCKS - 1 if num_left >= num_decoding * HEADROOM_BLOCKS else 0
        growths: list[Growth] = [self._scheduler.add_blocks(item, number + extra) for item, number in growing]
        self._steps.execute(Grow(tuple(growths)))
