"""Who gets blocks, who gets a slot, and who waits, on a decode worker. Pure bookkeeping over host values.

The life of a request here: ATTENDING (the router listens; nothing is held) -> LANDING (blocks granted, pushes arrive)
-> READY (sealed and verified, waits for a slot) -> RUNNING -> ENDED, and gone. One that ends while LANDING is gone at
once, but its blocks are quarantined until nothing can write them; one that ends while RUNNING keeps its slot and blocks
until no step has it. RESERVEs wait first come, first served, and hold nothing while they wait.

One whose prompt is computed here (`is_local`) waits for blocks in the same line, by itself. Then it is READY for a slot
without a landing, and COMPUTING until its first token is known.

With `overcommit` a grant is of blocks for the prompt and the first step, and sequences grow as they run. One that gives
way (`engine.preemption`) is PREEMPTED: it holds nothing here, and is served before any RESERVE; it runs again at once
if its KV was saved, else it is COMPUTING first.
"""

import bisect
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

from baton.core.request import AttemptKey
from baton.decode_worker.sequence import DecodeSequence, DecodeState, DecodeStream
from baton.engine.preemption import table_of
from baton.engine.prefill import SequenceStart
from baton.engine.slots import Growth
from baton.kvcache.allocator import BlockAllocator, BlockTable
from baton.kvtransfer.landing import ReserveWanted, Sealed

__all__ = ["DecodeScheduler", "DecodeSequence", "DecodeState", "DecodeStream"]

MAX_ENDED = 4096  # attempts remembered after they ended, so that a late RESERVE is refused and not parked

_WAITS_FOR = {DecodeState.LANDING: "transfer", DecodeState.READY: "slot", DecodeState.PREEMPTED: "preempted"}


class DecodeScheduler:
    """Blocks, slots and queues of one decode worker."""

    def __init__(self, allocator: BlockAllocator, max_num_seqs: int, *, overcommit: bool = False) -> None:
        assert max_num_seqs > 0
        self._allocator = allocator
        self._overcommit = overcommit
        self._free_slots = deque(range(max_num_seqs))
        self._sequences: dict[AttemptKey, DecodeSequence] = {}
        self._asks: deque[ReserveWanted | DecodeSequence] = deque()  # for blocks
        self._ready: deque[DecodeSequence] = deque()
        self._ended: OrderedDict[AttemptKey, None] = OrderedDict()
        self._quarantined: dict[AttemptKey, BlockTable] = {}
        self._running: list[DecodeSequence] = []  # in slot order, but for those that give way
        self._giving_way: list[DecodeSequence] = []
        self._preempted: list[DecodeSequence] = []  # both in order of grants
        self._computing: list[DecodeSequence] = []
        self._dropped: list[AttemptKey] = []
        self._num_granted = 0
        self._num_leaving = 0
        self._num_leaving_blocks = 0
        self._num_claimed = 0

    def add(self, sequence: DecodeSequence) -> None:
        """A stream for this attempt was opened."""
        assert sequence.key not in self._sequences
        self._sequences[sequence.key] = sequence
        if sequence.is_local:
            self._asks.append(sequence)

    def get(self, key: AttemptKey) -> DecodeSequence | None:
        """The sequence of `key`, if it is here."""
        return self._sequences.get(key)

    def sequences(self) -> tuple[DecodeSequence, ...]:
        """All of them, oldest first. Any thread."""
        return tuple(self._sequences.values())

    def count(self, *states: DecodeState) -> int:
        """Sequences in any of `states`. Any thread."""
        return sum(sequence.state in states for sequence in self.sequences())

    def num_waiting(self) -> dict[str, int]:
        """Sequences that do not run yet, by what they wait for, in the order of their lives. Any thread."""
        asking = {ask.key if isinstance(ask, DecodeSequence) else ask.attempt for ask in tuple(self._asks)}
        waiting = dict.fromkeys(("prefill", "blocks", *_WAITS_FOR.values()), 0)
        for sequence in self.sequences():
            if sequence.state is DecodeState.ATTENDING:
                waiting["blocks" if sequence.key in asking else "prefill"] += 1
            elif sequence.state in _WAITS_FOR:
                waiting[_WAITS_FOR[sequence.state]] += 1
        return waiting

    @property
    def num_slots_in_use(self) -> int:
        """Slots that running sequences hold, and those that ended in a step that is not over. Any thread."""
        return len(self._running) + len(self._giving_way) + len(self._computing) + self._num_leaving

    def want(self, reserve: ReserveWanted) -> bool:
        """Queue a prefill worker's RESERVE; False, and not queued, when its attempt has ended here, or needs none."""
        sequence = self._sequences.get(reserve.attempt)
        if reserve.attempt in self._ended or (sequence is not None and sequence.is_local):
            return False
        self._asks.append(reserve)
        return True

    def open_reserves(self) -> Iterable[tuple[ReserveWanted, DecodeSequence]]:
        """RESERVEs whose stream is open, oldest first."""
        for ask, sequence in self._open_asks():
            if isinstance(ask, ReserveWanted):
                yield ask, sequence

    def next_grant(self) -> DecodeSequence | None:
        """The oldest RESERVE that can be granted now, with its blocks taken; None when none can.

        A RESERVE whose stream is not open yet does not hold up those behind it; one that waits for blocks does, so
        that a long prompt is not starved by short ones. None is granted while a preempted sequence waits. Sequences
        that are computed here have their turns between, and are not returned.
        """
        if self._preempted:
            return None
        for ask, sequence in self._open_asks():
            table = self._reserve(sequence)
            if table is None:
                return None
            self._asks.remove(ask)
            sequence.table = table
            sequence.order = self._num_granted
            self._num_granted += 1
            if not sequence.is_local:
                sequence.state = DecodeState.LANDING
                return sequence
            sequence.state = DecodeState.READY
            self._ready.append(sequence)
        return None

    def _open_asks(self) -> Iterable[tuple[ReserveWanted | DecodeSequence, DecodeSequence]]:
        """Who asks for blocks and can use them, oldest first."""
        for ask in tuple(self._asks):
            if isinstance(ask, DecodeSequence):
                yield ask, ask
                continue
            sequence = self._sequences.get(ask.attempt)
            if sequence is not None and sequence.state is DecodeState.ATTENDING and not sequence.is_local:
                yield ask, sequence

    def _take_reserves(self, is_gone: Callable[[ReserveWanted], bool]) -> list[ReserveWanted]:
        gone = [ask for ask in self._asks if isinstance(ask, ReserveWanted) and is_gone(ask)]
        for reserve in gone:
            self._asks.remove(reserve)
        return gone

    def expired_reserves(self, now_s: float) -> Iterable[ReserveWanted]:
        """RESERVEs whose time to be answered has passed; they leave the queue."""
        return self._take_reserves(lambda reserve: reserve.deadline_s <= now_s)

    def drop_reserves(self, key: AttemptKey) -> list[ReserveWanted]:
        """Take the RESERVEs of an attempt that ended out of the queue."""
        return self._take_reserves(lambda reserve: reserve.attempt == key)

    def seal(self, sequence: DecodeSequence, sealed: Sealed, start: SequenceStart | None) -> None:
        """The landing is complete and verified; the sequence waits for a slot, if its commit made sense."""
        assert sequence.state is DecodeState.LANDING
        sequence.state = DecodeState.READY
        sequence.sealed = sealed
        sequence.start = start
        if start is not None:
            sequence.token_ids.append(start.first_token)
            self._ready.append(sequence)

    def next_admission(self) -> DecodeSequence | None:
        """The oldest ready sequence, given a slot; None when there is none, or no slot.

        Those whose prompts are still to be computed get theirs on the way, and are COMPUTING then.
        """
        while self._ready and self._free_slots:
            sequence = self._ready.popleft()
            sequence.slot = self._free_slots.popleft()
            if sequence.is_whole:
                self.run(sequence)
                return sequence
            self._compute(sequence)
        return None

    def _compute(self, sequence: DecodeSequence) -> None:
        sequence.state, sequence.num_computed = DecodeState.COMPUTING, 0
        bisect.insort(self._computing, sequence, key=_order)

    def run(self, sequence: DecodeSequence) -> None:
        """A sequence that has a slot takes part in steps from now on."""
        if sequence.state is DecodeState.COMPUTING:
            self._computing.remove(sequence)
        sequence.state = DecodeState.RUNNING
        at = bisect.bisect([item.slot for item in self._running], sequence.slot)
        self._running = [*self._running[:at], sequence, *self._running[at:]]  # a new list: steps keep the old one

    def next_return(self) -> DecodeSequence | None:
        """The oldest preempted sequence, given a slot and blocks, and COMPUTING; None when it cannot have them."""
        if not self._preempted or not self._free_slots:
            return None
        table = self._reserve(self._preempted[0])
        if table is None:
            return None
        sequence = self._preempted.pop(0)
        sequence.table, sequence.slot = table, self._free_slots.popleft()
        self._compute(sequence)
        return sequence

    def computing(self) -> Sequence[DecodeSequence]:
        """Sequences whose KV is to be computed here, in order of grants."""
        return tuple(self._computing)

    def running(self) -> Sequence[DecodeSequence]:
        """Sequences of the next step, in slot order; the list is never changed."""
        return self._running

    @property
    def num_coming(self) -> int:
        """See `preemption.Scheduler`."""
        return self._num_leaving_blocks + sum(len(table_of(sequence).blocks) for sequence in self._giving_way)

    def claim(self, num_blocks: int) -> None:
        """See `preemption.Scheduler`."""
        self._num_claimed = num_blocks

    def candidates(self) -> list[DecodeSequence]:
        """See `preemption.Scheduler`; those that are ready and have no slot yet are among them."""
        holders = [*self._running, *self._computing, *self._ready]
        return sorted((item for item in holders if not item.is_protected), key=_order)

    def give_way(self, sequence: DecodeSequence) -> None:
        """See `preemption.Scheduler`."""
        assert sequence.state is DecodeState.RUNNING
        sequence.is_giving_way = True
        self._running = [item for item in self._running if item is not sequence]
        self._giving_way.append(sequence)

    def giving_way(self) -> tuple[DecodeSequence, ...]:
        """See `preemption.Scheduler`."""
        return tuple(self._giving_way)

    def add_blocks(self, sequence: DecodeSequence, num_blocks: int) -> Growth:
        """See `preemption.Scheduler`."""
        table = table_of(sequence)
        first = len(table.blocks)
        wanted_len = min((first + num_blocks) * self._allocator.block_size, sequence.request.capacity_len)
        sequence.table = self._allocator.grow(table, wanted_len)
        return Growth(sequence.slot, first, sequence.table.blocks[first:])

    def preempt(self, sequence: DecodeSequence) -> Callable[[], None]:
        """See `preemption.Scheduler`."""
        table, slot = table_of(sequence), sequence.slot
        if sequence.state is DecodeState.READY:
            self._ready.remove(sequence)
            self._num_leaving_blocks += len(table.blocks)
        else:
            self._leave(sequence)
        if sequence.saved is None:
            sequence.start = None  # its hidden state belongs to what is lost
        if sequence.num_preemptions == 1 and not sequence.is_local:
            self._dropped.append(sequence.key)
        sequence.state, sequence.num_computed = DecodeState.PREEMPTED, 0
        sequence.is_giving_way = False
        sequence.table, sequence.slot = None, -1
        bisect.insort(self._preempted, sequence, key=_order)

        def free() -> None:
            self._num_leaving_blocks -= len(table.blocks)
            self._allocator.release(table)
            if slot >= 0:
                self._num_leaving -= 1
                self._free_slots.append(slot)

        return free

    def dropped(self) -> list[AttemptKey]:
        """Attempts that have left the blocks they landed in, each said once."""
        keys, self._dropped = self._dropped, []
        return keys

    def quarantine(self, sequence: DecodeSequence) -> None:
        """Forget a sequence that ended while it was landing; its blocks stay until `drained`."""
        assert sequence.state is DecodeState.LANDING
        assert sequence.table is not None
        self._allocator.quarantine(sequence.table)
        self._quarantined[sequence.key] = sequence.table
        sequence.table = None
        self.remove(sequence)

    def drained(self, key: AttemptKey) -> None:
        """Nothing writes the blocks of an ended landing any more: they are free."""
        self._allocator.release_quarantined(self._quarantined.pop(key))

    def remove(self, sequence: DecodeSequence) -> None:
        """Forget a sequence that no step has; its slot and blocks are free for others."""
        self.retire(sequence)
        self.free(sequence)

    def retire(self, sequence: DecodeSequence) -> None:
        """Forget a sequence; its slot and blocks stay its own until `free`."""
        del self._sequences[sequence.key]
        self._ended[sequence.key] = None
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        if sequence in self._ready:
            self._ready.remove(sequence)
        elif sequence in self._asks:
            self._asks.remove(sequence)
        elif sequence.state is DecodeState.PREEMPTED:
            self._preempted.remove(sequence)
        elif sequence.slot >= 0:
            self._leave(sequence)
        sequence.state = DecodeState.ENDED

    def free(self, sequence: DecodeSequence) -> None:
        """Give back the slot and the blocks of a retired sequence: no step has it any more."""
        assert sequence.state is DecodeState.ENDED
        if sequence.slot >= 0:
            self._num_leaving -= 1
            self._num_leaving_blocks -= len(table_of(sequence).blocks)
            self._free_slots.append(sequence.slot)
            sequence.slot = -1
        if sequence.table is not None:
            self._allocator.release(sequence.table)
            sequence.table = None

    def _reserve(self, sequence: DecodeSequence) -> BlockTable | None:
        """The blocks that a sequence starts with; None if they cannot be had."""
        start_len, num_kept = sequence.request.capacity_len, self._num_claimed
        if self._overcommit and not sequence.is_protected:
            start_len = sequence.step_len
            # Those that are here may need a block each, soon.
            num_kept += len(self._running) + len(self._computing) + len(self._ready)
        if self._allocator.num_blocks_for(start_len) + num_kept > self._allocator.num_free:
            return None
        return self._allocator.reserve(start_len)

    def _leave(self, sequence: DecodeSequence) -> None:
        """Its slot and its blocks are its own until they are freed."""
        if sequence.is_giving_way:
            self._giving_way.remove(sequence)
        elif sequence.state is DecodeState.COMPUTING:
            self._computing.remove(sequence)
        else:
            self._running = [item for item in self._running if item is not sequence]
        self._num_leaving += 1
        self._num_leaving_blocks += len(table_of(sequence).blocks)


def _order(sequence: DecodeSequence) -> int:
    return sequence.order
