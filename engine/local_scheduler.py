"""Who runs next in the one-process engine: first come, first served, with chunked prefill.

A sequence is started when a slot and all the blocks it may ever need are free, so none is ever preempted. Prompts are
computed in order of arrival, at most `chunk_len` tokens a step. This module touches no tensor.
"""

from collections import deque
from dataclasses import dataclass, field

from baton.core.request import AttemptKey, FinishReason, GenerationRequest, SpeculationCounts
from baton.engine.finish import FinishChecker
from baton.engine.prefill import PrefillChunk
from baton.kvcache.allocator import BlockAllocator, BlockTable


@dataclass(slots=True, kw_only=True)
class LocalSequence:
    """One request on its way through the engine; times are readings of the engine's clock."""

    request: GenerationRequest
    draft_cap: int
    finish: FinishChecker
    submitted_s: float
    table: BlockTable | None = None
    slot: int | None = None
    num_prefilled: int = 0
    token_ids: list[int] = field(default_factory=list)
    is_decoding: bool = False
    finish_reason: FinishReason | None = None
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    first_token_s: float | None = None
    last_token_s: float | None = None

    @property
    def key(self) -> AttemptKey:
        """Identity of the request."""
        return self.request.key

    @property
    def capacity_len(self) -> int:
        """Positions its KV may ever occupy."""
        return self.request.prompt_len + self.request.sampling.max_tokens + self.draft_cap


class LocalScheduler:
    """Owns the blocks and slots of the engine and the two queues before them."""

    def __init__(self, allocator: BlockAllocator, *, num_slots: int, chunk_len: int) -> None:
        assert num_slots >= 1
        assert chunk_len >= 1
        self._allocator = allocator
        self._chunk_len = chunk_len
        self._free_slots = deque(range(num_slots))
        self._num_slots = num_slots
        self._waiting: deque[LocalSequence] = deque()
        self._running: list[LocalSequence] = []  # in order of arrival
        self._num_leaving = 0  # out of `_running`, while a step may still read and write their blocks

    @property
    def is_idle(self) -> bool:
        """Whether no sequence is waiting or running, and none that ended holds anything."""
        return not self._waiting and not self._running and not self._num_leaving

    def submit(self, sequence: LocalSequence) -> None:
        """Put a sequence last in the queue; it must fit an empty pool."""
        assert self._allocator.num_blocks_for(sequence.capacity_len) <= self._allocator.num_blocks
        self._waiting.append(sequence)

    def start_waiting(self) -> None:
        """Start sequences from the head of the queue while slots and blocks last; nobody overtakes."""
        while self._waiting and self._free_slots:
            capacity_len = self._waiting[0].capacity_len
            if self._allocator.num_blocks_for(capacity_len) > self._allocator.num_free:
                return
            sequence = self._waiting.popleft()
            sequence.table = self._allocator.reserve(capacity_len)
            sequence.slot = self._free_slots.popleft()
            self._running.append(sequence)

    def next_chunks(self) -> list[tuple[LocalSequence, PrefillChunk]]:
        """The chunks of one prefill step; the caller moves `num_prefilled` once they are computed."""
        budget_len = self._chunk_len
        chunks: list[tuple[LocalSequence, PrefillChunk]] = []
        for sequence in self._running:
            length = min(budget_len, sequence.request.prompt_len - sequence.num_prefilled)
            if length == 0:
                continue
            assert sequence.table is not None
            chunk = PrefillChunk(
                prompt_token_ids=sequence.request.prompt_token_ids,
                start=sequence.num_prefilled,
                length=length,
                table=sequence.table,
                sampling=sequence.request.sampling,
                draft_cap=sequence.draft_cap,
            )
            chunks.append((sequence, chunk))
            budget_len -= length
        return chunks

    def decoding(self) -> list[LocalSequence]:
        """Sequences that take part in decode steps."""
        return [sequence for sequence in self._running if sequence.is_decoding]

    def remove(self, sequence: LocalSequence) -> None:
        """Take a sequence out, wherever it is, and free what it holds."""
        if sequence.table is None:
            self._waiting.remove(sequence)
            return
        self.retire(sequence)
        self.free(sequence)

    def retire(self, sequence: LocalSequence) -> None:
        """Take a running sequence out; its slot and blocks stay its own until `free`."""
        self._running.remove(sequence)
        self._num_leaving += 1

    def free(self, sequence: LocalSequence) -> None:
        """Free what a retired sequence holds: no step has it any more."""
        assert sequence.slot is not None
        assert sequence.table is not None
        self._num_leaving -= 1
        self._allocator.release(sequence.table)
        self._free_slots.append(sequence.slot)
        sequence.table = sequence.slot = None

    def unfinished(self) -> list[LocalSequence]:
        """Every sequence that is waiting or running."""
        return [*self._running, *self._waiting]

    def check_empty(self) -> None:
        """With nothing to run, every block and slot is free; anything else is a leak."""
        if self.is_idle:
            assert self._allocator.num_free == self._allocator.num_blocks
            assert len(self._free_slots) == self._num_slots
