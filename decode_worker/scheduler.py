"""Who gets blocks, who gets a slot, and who waits, on a decode worker. Pure bookkeeping over host values.

The life of a request here: ATTENDING (the router listens; nothing is held) -> LANDING (blocks granted, pushes arrive)
-> READY (sealed and verified, waits for a slot) -> RUNNING -> ENDED, and gone. One that ends while LANDING is gone at
once, but its blocks are quarantined until nothing can write them; one that ends while RUNNING keeps its slot and blocks
until no step has it. RESERVEs wait first come, first served, and hold nothing while
they wait.
"""

import bisect
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from baton.core.request import AttemptKey, GenerationRequest, SpeculationCounts
from baton.engine.finish import FinishChecker
from baton.engine.prefill import SequenceStart
from baton.kvcache.allocator import BlockAllocator, BlockTable
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
    ENDED = auto()


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
    num_output: int = 0  # tokens of the output so far, the first one included
    handoff_ms: float = 0.0
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)

    @property
    def key(self) -> AttemptKey:
        """Identity of the attempt."""
        return self.request.key


class DecodeScheduler:
    """Blocks, slots and queues of one decode worker."""

    def __init__(self, allocator: BlockAllocator, max_num_seqs: int) -> None:
        assert max_num_seqs > 0
        self._allocator = allocator
        self._free_slots = deque(range(max_num_seqs))
        self._sequences: dict[AttemptKey, DecodeSequence] = {}
        self._reserves: deque[ReserveWanted] = deque()
        self._ready: deque[DecodeSequence] = deque()
        self._ended: OrderedDict[AttemptKey, None] = OrderedDict()
        self._quarantined: dict[AttemptKey, BlockTable] = {}
        self._running: list[DecodeSequence] = []  # in slot order
        self._num_leaving = 0

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
        waiting = dict.fromkeys(("prefill", "blocks", "transfer", "slot"), 0)
        for sequence in self.sequences():
            match sequence.state:
                case DecodeState.ATTENDING:
                    waiting["blocks" if sequence.key in asking else "prefill"] += 1
                case DecodeState.LANDING:
                    waiting["transfer"] += 1
                case DecodeState.READY:
                    waiting["slot"] += 1
                case DecodeState.RUNNING | DecodeState.ENDED:
                    pass
        return waiting

    @property
    def num_slots_in_use(self) -> int:
        """Slots that running sequences hold, and those that ended in a step that is not over. Any thread."""
        return len(self._running) + self._num_leaving

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
        that a long prompt is not starved by short ones.
        """
        for reserve, sequence in self.open_reserves():
            capacity_len = sequence.request.capacity_len
            if self._allocator.num_blocks_for(capacity_len) > self._allocator.num_free:
                return None
            self._reserves.remove(reserve)
            sequence.table = self._allocator.reserve(capacity_len)
            sequence.state = DecodeState.LANDING
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
            self._ready.append(sequence)

    def next_admission(self) -> DecodeSequence | None:
        """The oldest ready sequence, given a slot; None when there is none, or no slot."""
        if not self._ready or not self._free_slots:
            return None
        sequence = self._ready.popleft()
        sequence.slot = self._free_slots.popleft()
        sequence.state = DecodeState.RUNNING
        at = bisect.bisect([item.slot for item in self._running], sequence.slot)
        self._running = [*self._running[:at], sequence, *self._running[at:]]  # a new list: steps keep the old one
        return sequence

    def running(self) -> Sequence[DecodeSequence]:
        """Sequences of the next step, in slot order; the list is never changed."""
        return self._running

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
        if sequence.state is DecodeState.RUNNING:
            self._running = [item for item in self._running if item is not sequence]
            self._num_leaving += 1
        sequence.state = DecodeState.ENDED

    def free(self, sequence: DecodeSequence) -> None:
        """Give back the slot and the blocks of a retired sequence: no step has it any more."""
        assert sequence.state is DecodeState.ENDED
        if sequence.slot >= 0:
            self._num_leaving -= 1
            self._free_slots.append(sequence.slot)
            sequence.slot = -1
        if sequence.table is not None:
            self._allocator.release(sequence.table)
            sequence.table = None
