"""Which prompt tokens the next prefill step computes, and when a request may ask for its landing.

Pure bookkeeping over host values: no tensors, no sockets, no clock of its own. Blocks are never held while a request
queues: a sequence gets its own blocks, and asks the decode worker for a landing, only when fewer prompt tokens than
the lookahead are ahead of it. Blocks that other prompts have left of its beginning are then among them, and are not
computed again; but the last prompt token always is, because the first answer token follows from it. Only granted ones
count as ahead: a decode worker that has no room must hold up nobody else's requests, so it gets a few askers at most,
and those at most half of the blocks.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from baton.core.request import AttemptKey, GenerationRequest
from baton.kvcache.allocator import BlockAllocator, BlockTable

MAX_ASKERS = 2  # sequences that wait for a landing on one decode worker; more would only hold blocks


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

    @property
    def key(self) -> AttemptKey:
        """Identity of the attempt."""
        return self.request.key

    @property
    def num_left(self) -> int:
        """Prompt tokens not computed yet."""
        return self.request.prompt_len - self.num_computed


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

    def next_to_reserve(self) -> PrefillSequence | None:
        """The oldest waiting sequence if its turn is near and its blocks are free; its blocks are then held."""
        ready = [s for s in self._sequences.values() if s.state is PrefillState.READY]
        ahead_len = sum(sequence.num_left for sequence in ready)
        # One chunk of lookahead hides the round trip of RESERVE behind the step before.
        if ahead_len >= 2 * self._chunk_len or len(ready) >= self._max_num_seqs:
            return None
        askers = [s for s in self._sequences.values() if s.state is PrefillState.RESERVING]
        num_asking = Counter(sequence.peer for sequence in askers)
        waiting = next(
            (
                s
                for s in self._sequences.values()
                if s.state is PrefillState.WAITING and num_asking[s.peer] < MAX_ASKERS
            ),
            None,
        )
        if waiting is None:
            return None
        prompt_len = waiting.request.prompt_len
        num_blocks = self._allocator.num_blocks_for(prompt_len)
        shared = self._match(waiting)
        num_held = sum(len(sequence.table.blocks) for sequence in askers if sequence.table is not None)
        if self._allocator.num_missing(prompt_len, shared) or (
            askers and num_held + num_blocks > self._allocator.num_blocks // 2
        ):
            return None
        waiting.table = self._allocator.reserve(prompt_len, shared)
        waiting.num_cached = waiting.num_computed = len(shared) * self._allocator.block_size
        waiting.state = PrefillState.RESERVING
        self._count_lookup(waiting)
        return waiting

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
