"""Which prompt tokens the next prefill step computes, and when a request may ask for its landing.

Pure bookkeeping over host values: no tensors, no sockets, no clock of its own. Blocks are never held while a request
queues: a sequence gets its own blocks, and asks the decode worker for a landing, only when fewer prompt tokens than
the lookahead are ahead of it. Blocks that other prompts have left of its beginning are then among them, and are not
computed again; but the last prompt token always is, because the first answer token follows from it.

A decode worker that is slow, full or dead holds up nobody else's requests. Only granted sequences count as ahead; a
decode worker has a few askers at most; and those of its sequences that wait for it, to be granted, acknowledged or
drained, hold no more than its share of the blocks. Requests of one decode worker start in order of arrival. Those of
different ones do too, but nobody waits for blocks that only a decode worker which has stalled could give back.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from baton.core.request import AttemptKey, GenerationRequest
from baton.kvcache.allocator import BlockAllocator, BlockTable

MAX_ASKERS = 2  # sequences that wait for a landing on one decode worker; more would only hold blocks
STALL_S = 0.5  # a sequence that waits for its decode worker for so long is not counted on to end soon


class PrefillState(Enum):
    """Where a request is on its way through the prefill worker."""

    WAITING = auto()  # holds nothing
    RESERVING = auto()  # own blocks held, landing asked for
    READY = auto()  # landing granted; chunks may run
    COMMITTING = auto()  # prompt computed, commit not acknowledged yet
    ABORTING = auto()  # given up; source blocks wait until no push reads them


@dataclass(slots=True)
class PrefillSequence:
    """One request's progress."""

    request: GenerationRequest
    peer: str = ""  # the decode worker its KV goes to
    state: PrefillState = PrefillState.WAITING
    table: BlockTable | None = None
    block_names: tuple[bytes, ...] = ()  # of the prompt's full blocks (core.block_hash); empty: nothing is shared
    num_cached: int = 0  # prompt tokens whose KV was there when the blocks were reserved
    num_computed: int = 0  # those, and what was computed since
    marks_s: dict[str, float] = field(default_factory=dict)  # moments, by name, on the worker's clock
    chunks: list[tuple[float, float, int, int]] = field(default_factory=list)  # traced: begin, end, first, length
    error: str = ""  # what ended it, if it ended badly
    seen: tuple[PrefillState, float] | None = None  # the state the scheduler last saw it in, and since when

    @property
    def key(self) -> AttemptKey:
        """Identity of the attempt."""
        return self.request.key

    def computed(self, length: int, start_s: float, end_s: float) -> None:
        """A step has computed the next `length` tokens."""
        if self.request.trace is not None:
            self.chunks.append((start_s, end_s, self.num_computed, length))
        self.num_computed += length

    @property
    def num_left(self) -> int:
        """Prompt tokens not computed yet."""
        return self.request.prompt_len - self.num_computed

    @property
    def num_blocks(self) -> int:
        """Blocks it holds."""
        return 0 if self.table is None else len(self.table.blocks)

    @property
    def waits_for_peer(self) -> bool:
        """Whether it is the decode worker's turn to do something."""
        return self.state not in (PrefillState.WAITING, PrefillState.READY)


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """`length` prompt tokens of one sequence, from `start`."""

    sequence: PrefillSequence
    start: int
    length: int


class PrefillScheduler:
    """First come, first served, in chunks of at most `chunk_len` tokens a step over all sequences."""

    def __init__(self, allocator: BlockAllocator, chunk_len: int, max_num_seqs: int) -> None:
        assert chunk_len > 0
        assert max_num_seqs > 0
        self._allocator = allocator
        self._chunk_len = chunk_len
        self._max_num_seqs = max_num_seqs
        self._sequences: dict[AttemptKey, PrefillSequence] = {}
        self.num_prefix_tokens = 0
        self.num_prefix_hit_tokens = 0
        self.num_prefix_hits = 0

    def add(self, sequence: PrefillSequence) -> None:
        """Queue a request behind the others."""
        assert sequence.key not in self._sequences
        self._sequences[sequence.key] = sequence

    def get(self, key: AttemptKey) -> PrefillSequence | None:
        """The sequence of `key`, if it is here."""
        return self._sequences.get(key)

    def sequences(self) -> Iterable[PrefillSequence]:
        """All of them, oldest first."""
        return tuple(self._sequences.values())

    def count(self, *states: PrefillState) -> int:
        """Sequences in any of `states`."""
        return sum(sequence.state in states for sequence in tuple(self._sequences.values()))

    def num_tokens_queued(self) -> int:
        """Prompt tokens that are to be computed; what waits takes what it would find cached now. Any thread."""
        num_tokens = 0
        for sequence in tuple(self._sequences.values()):
            if sequence.state in (PrefillState.WAITING, PrefillState.RESERVING, PrefillState.READY):
                num_tokens += sequence.num_left
            if sequence.state is PrefillState.WAITING:
                num_tokens -= len(self._match(sequence)) * self._allocator.block_size
        return num_tokens

    def next_to_reserve(self, now_s: float) -> PrefillSequence | None:
        """The sequence that may ask for its landing now; its blocks are then held. None if it is nobody's turn."""
        ready = [s for s in self._sequences.values() if s.state is PrefillState.READY]
        # One chunk of lookahead hides the round trip of RESERVE behind the step before.
        if sum(s.num_left for s in ready) >= 2 * self._chunk_len or len(ready) >= self._max_num_seqs:
            return None
        num_stalled = self._num_stalled_blocks(now_s)
        for sequence in self._next_of_each_peer():
            shared = self._match(sequence)
            num_missing = self._allocator.num_missing(sequence.request.prompt_len, shared)
            if not num_missing:
                return self._reserve(sequence, shared)
            # Blocks held by those that get on come back soon, and nobody may take them away before this one's turn.
            if num_missing <= self._allocator.num_reserved - num_stalled:
                return None
        return None

    def _num_stalled_blocks(self, now_s: float) -> int:
        """Blocks that no progress of this worker gives back."""
        stalled: set[int] = set()
        for sequence in self._sequences.values():
            if sequence.seen is None or sequence.seen[0] is not sequence.state:
                sequence.seen = (sequence.state, now_s)
            elif sequence.waits_for_peer and sequence.table is not None and now_s - sequence.seen[1] > STALL_S:
                stalled.update(sequence.table.blocks)
        return len(stalled)

    def _next_of_each_peer(self) -> Iterator[PrefillSequence]:
        """Each decode worker's oldest waiting sequence, the oldest first, where it may ask and hold blocks."""
        num_asking = Counter(s.peer for s in self._sequences.values() if s.state is PrefillState.RESERVING)
        num_held: Counter[str] = Counter()
        peers = set()
        for sequence in self._sequences.values():
            peers.add(sequence.peer)
            if sequence.waits_for_peer:
                num_held[sequence.peer] += sequence.num_blocks
        share = self._allocator.num_blocks // (len(peers) + 1)
        passed = set()
        for sequence in self._sequences.values():
            peer = sequence.peer
            if sequence.state is not PrefillState.WAITING or peer in passed:
                continue
            passed.add(peer)
            num_blocks = self._allocator.num_blocks_for(sequence.request.prompt_len)
            is_in_share = not num_held[peer] or num_held[peer] + num_blocks <= share
            if num_asking[peer] < MAX_ASKERS and is_in_share:
                yield sequence

    def _reserve(self, sequence: PrefillSequence, shared: tuple[int, ...]) -> PrefillSequence:
        sequence.table = self._allocator.reserve(sequence.request.prompt_len, shared)
        sequence.num_cached = sequence.num_computed = len(shared) * self._allocator.block_size
        sequence.state = PrefillState.RESERVING
        self._count_lookup(sequence)
        return sequence

    def plan(self) -> list[ChunkPlan]:
        """The chunks of the next step, oldest request first; empty when nothing is ready."""
        budget_len = self._chunk_len
        chunks: list[ChunkPlan] = []
        for sequence in self._sequences.values():
            if sequence.state is not PrefillState.READY or budget_len == 0:
                continue
            length = min(sequence.num_left, budget_len)
            chunks.append(ChunkPlan(sequence, sequence.num_computed, length))
            budget_len -= length
        return chunks

    def name_blocks(self, chunk: ChunkPlan) -> None:
        """A chunk's step has ended: every layer of it is written, so others may share the blocks it completed."""
        sequence, block_size = chunk.sequence, self._allocator.block_size
        assert sequence.table is not None
        assert sequence.num_computed == chunk.start + chunk.length
        full = slice(chunk.start // block_size, sequence.num_computed // block_size)
        for block, name in zip(sequence.table.blocks[full], sequence.block_names[full], strict=False):
            self._allocator.index.add(name, block)

    def remove(self, sequence: PrefillSequence) -> None:
        """Forget a sequence and free its blocks; nothing reads them any more."""
        del self._sequences[sequence.key]
        if sequence.table is not None:
            self._allocator.release(sequence.table)
            sequence.table = None

    def _match(self, sequence: PrefillSequence) -> tuple[int, ...]:
        """Blocks that hold the beginning of the prompt already, all but the last token at most."""
        most = (sequence.request.prompt_len - 1) // self._allocator.block_size
        return self._allocator.index.match(sequence.block_names[:most])

    def _count_lookup(self, sequence: PrefillSequence) -> None:
        if sequence.block_names:
            self.num_prefix_tokens += sequence.request.prompt_len
            self.num_prefix_hit_tokens += sequence.num_cached
            self.num_prefix_hits += sequence.num_cached > 0
