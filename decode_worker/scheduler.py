"""Who gets blocks, who gets a slot, and who waits, on a decode worker. Pure bookkeeping over host values.

The life of a request here: ATTENDING (the router listens; nothing is held) -> LANDING (blocks granted, pushes arrive)
-> READY (sealed and verified, waits for a slot) -> RUNNING -> ENDED, and gone. One that ends while LANDING is gone at
once, but its blocks are quarantined until nothing can write them; one that ends while RUNNING keeps its slot and blocks
until no step has it. RESERVEs wait first come, first served, and hold nothing while they wait.

With `overcommit` a grant is of blocks for the prompt and the first step, and sequences grow as they run. One that gives
way (`engine.preemption`) is PREEMPTED: it holds nothing here, and is served before any RESERVE; it runs again at once
if its KV was saved, else it is COMPUTING first.
"""

import bisect
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from baton.core.request import AttemptKey, GenerationRequest, SpeculationCounts
from baton.decode_worker.times import DecodeTimes
from baton.engine.finish import FinishChecker
from baton.engine.preemption import MAX_PREEMPTIONS, table_of
from baton.engine.prefill import SequenceStart
from baton.engine.slots import Growth
from baton.kvcache.allocator import BlockAllocator, BlockTable
from baton.kvcache.host_ranges import HostRange
from baton.kvtransfer.landing import ReserveWanted, Sealed
from baton.proto import worker_pb2
from baton.worker.stream import EventSink

MAX_ENDED = 4096  # attempts remembered after they ended, so that a late RESERVE is refused and not parked

DecodeStream = EventSink[worker_pb2.DecodeEvent]


class DecodeState(Enum):
    """Where a request is on its way through the decode worker."""

    ATTENDING = auto()
    LANDING = auto()
    READY = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    COMPUTING = auto()
    ENDED = auto()


_WAITS_FOR = {DecodeState.LANDING: "transfer", DecodeState.READY: "slot", DecodeState.PREEMPTED: "preempted"}


@dataclass(slots=True, eq=False)
class DecodeSequence:
    """One request on a decode worker."""

    request: GenerationRequest
    stream: DecodeStream
    checker: FinishChecker
    state: DecodeState = DecodeState.ATTENDING
    table: BlockTable | None = None
    sealed: Sealed | None = None
    start: SequenceStart | None = None
    slot: int = -1
    order: int = -1  # of grants
    token_ids: list[int] = field(default_factory=list)  # of the output so far, the first one included, none forced
    handoff_ms: float = 0.0
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    is_giving_way: bool = False
    saved: HostRange | None = None
    num_lost: int = 0
    num_preemptions: int = 0
    num_scripted: int = 0  # of those, some that a test asked for
    num_computed: int = 0  # positions, while it is computed again
    times: DecodeTimes = field(default_factory=DecodeTimes)

    @property
    def key(self) -> AttemptKey:
        """Identity of the attempt."""
        return self.request.key

    @property
    def num_output(self) -> int:
        """Tokens of the output so far, without those of earlier attempts."""
        return len(self.token_ids)

    @property
    def step_len(self) -> int:
        """Positions it occupies once its next decode step is done, whatever that accepts."""
        num_tokens = self.request.prompt_len + max(1, len(self.token_ids))
        return min(num_tokens + self.request.num_draft_tokens, self.request.capacity_len)

    @property
    def is_protected(self) -> bool:
        """Whether it has been preempted often enough."""
        return self.num_preemptions >= MAX_PREEMPTIONS

    @property
    def runner_slot(self) -> int | None:
        """Where the runner has it, if it decodes."""
        return self.slot if self.state is DecodeState.RUNNING else None

    @property
    def num_kv(self) -> int:
        """Positions whose KV is in its blocks, all steps read."""
        if self.state is DecodeState.COMPUTING:
            return self.num_computed
        return self.request.prompt_len + max(0, len(self.token_ids) - 1)

    @property
    def is_whole(self) -> bool:
        """Whether its prompt is computed."""
        return self.state in (DecodeState.READY, DecodeState.RUNNING)


class DecodeScheduler:
    """Blocks, slots and queues of one decode worker."""

    def __init__(self, allocator: BlockAllocator, max_num_seqs: int, *, overcommit: bool = False) -> None:
        assert max_num_seqs > 0
        self._allocator = allocator
        self._overcommit = overcommit
        self._free_slots = deque(range(max_num_seqs))
        self._sequences: dict[AttemptKey, DecodeSequence] = {}
        self._reserves: deque[ReserveWanted] = deque()
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
        asking = {reserve.attempt for reserve in tuple(self._reserves)}
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
        """Queue a prefill worker's RESERVE; False, and not queued, when its attempt has ended here."""
        if reserve.attempt in self._ended:
            return False
        self._reserves.append(reserve)
        return True

    def open_reserves(self) -> Iterable[tuple[ReserveWanted, DecodeSequence]]:
        """RESERVEs whose stream is open, oldest first."""
        for reserve in tuple(self._reserves):
            sequence = self._sequences.get(reserve.attempt)
            if sequence is not None and sequence.state is DecodeState.ATTENDING:
                yield reserve, sequence

    def next_grant(self) -> DecodeSequence | None:
        """The oldest RESERVE that can be granted now, with its blocks taken; None when none can.

        A RESERVE whose stream is not open yet does not hold up those behind it; one that waits for blocks does, so
        that a long prompt is not starved by short ones. None is granted while a preempted sequence waits.
        """
        if self._preempted:
            return None
        for reserve, sequence in self.open_reserves():
            table = self._reserve(sequence)
            if table is None:
                return None
            self._reserves.remove(reserve)
            sequence.table = table
            sequence.state = DecodeState.LANDING
            sequence.order = self._num_granted
            self._num_granted += 1
            return sequence
        return None

    def expired_reserves(self, now_s: float) -> Iterable[ReserveWanted]:
        """RESERVEs whose time to be answered has passed; they leave the queue."""
        late = [reserve for reserve in self._reserves if reserve.deadline_s <= now_s]
        for reserve in late:
            self._reserves.remove(reserve)
        return late

    def drop_reserves(self, key: AttemptKey) -> list[ReserveWanted]:
        """Take the RESERVEs of an attempt that ended out of the queue."""
        gone = [reserve for reserve in self._reserves if reserve.attempt == key]
        for reserve in gone:
            self._reserves.remove(reserve)
        return gone

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
        """The oldest ready sequence, given a slot; None when there is none, or no slot."""
        if not self._ready or not self._free_slots:
            return None
        sequence = self._ready.popleft()
        sequence.slot = self._free_slots.popleft()
        self.run(sequence)
        return sequence

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
        sequence.state, sequence.num_computed = DecodeState.COMPUTING, 0
        bisect.insort(self._computing, sequence, key=_order)
        return sequence

    def computing(self) -> Sequence[DecodeSequence]:
        """Sequences whose KV is to be computed again, in order of grants."""
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
        if sequence.num_preemptions == 1:
            self._dropped.append(sequence.key)
        sequence.state = DecodeState.PREEMPTED
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
