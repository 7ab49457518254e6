"""Who runs next in the one-process engine: first come, first served, with chunked prefill.

A sequence is started when a slot is free and the blocks it may ever need are. With `overcommit` the blocks of its
prompt and first step are enough, and it takes more as it grows (`engine.preemption`); one that is preempted waits, in
order of arrival, so before all that have not started. Prompts are computed in order of arrival, at most `chunk_len`
tokens a step. This module touches no tensor.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from baton.core.logprobs import TokenLogprobs
from baton.core.request import AttemptKey, FinishReason, GenerationRequest, SpeculationCounts
from baton.engine.finish import FinishChecker
from baton.engine.preemption import MAX_PREEMPTIONS
from baton.engine.prefill import PrefillChunk
from baton.engine.slots import Growth
from baton.kvcache.allocator import BlockAllocator, BlockTable
from baton.kvcache.host_ranges import HostRange


@dataclass(slots=True, kw_only=True, eq=False)
class LocalSequence:
    """One answer to a request on its way through the engine; times are readings of the engine's clock."""

    request: GenerationRequest  # its own choice of `n`
    draft_cap: int
    finish: FinishChecker
    submitted_s: float
    order: int = -1  # of arrival
    table: BlockTable | None = None
    slot: int | None = None
    num_prefilled: int = 0
    num_recomputed: int = 0  # tokens of the output whose KV the prefill makes again
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    is_decoding: bool = False
    is_giving_way: bool = False
    saved: HostRange | None = None
    num_lost: int = 0
    num_preemptions: int = 0
    num_scripted: int = 0  # of those, some that a test asked for
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

    @property
    def prefill_len(self) -> int:
        """Tokens that prefill has to compute: the prompt, and after a preemption all of the output but its last."""
        return self.request.prompt_len + self.num_recomputed

    def prefilled_token_ids(self) -> tuple[int, ...]:
        """Those tokens."""
        prompt = self.request.prompt_token_ids
        return (*prompt, *self.token_ids[: self.num_recomputed]) if self.num_recomputed else prompt

    @property
    def step_len(self) -> int:
        """Positions it occupies once its next decode step is done, whatever that accepts."""
        num_tokens = self.request.prompt_len + max(1, len(self.token_ids))
        return min(num_tokens + self.draft_cap, self.capacity_len)

    @property
    def is_protected(self) -> bool:
        """Whether it has been preempted often enough."""
        return self.num_preemptions >= MAX_PREEMPTIONS

    @property
    def runner_slot(self) -> int | None:
        """Where the runner has it, if it decodes."""
        return self.slot if self.is_decoding else None

    @property
    def num_kv(self) -> int:
        """Positions whose KV is in its blocks, all steps read."""
        return self.request.prompt_len + len(self.token_ids) - 1 if self.is_decoding else self.num_prefilled

    @property
    def is_whole(self) -> bool:
        """Whether its prompt is computed."""
        return self.is_decoding


class LocalScheduler:
    """Owns the blocks and slots of the engine and the two queues before them.

    Args:
        allocator: of the pool.
        num_slots: sequences that run at once.
        chunk_len: prompt tokens of a step.
        overcommit: start sequences without all the blocks they may need.
    """

    def __init__(self, allocator: BlockAllocator, *, num_slots: int, chunk_len: int, overcommit: bool = False) -> None:
        assert num_slots >= 1
        assert chunk_len >= 1
        self._allocator = allocator
        self._chunk_len = chunk_len
        self._overcommit = overcommit
        self._free_slots = deque(range(num_slots))
        self._num_slots = num_slots
        self._num_arrived = 0
        self._waiting: list[LocalSequence] = []  # both in order of arrival
        self._running: list[LocalSequence] = []
        self._num_leaving = 0  # out of `_running`, while a step may still read and write their blocks
        self._num_leaving_blocks = 0
        self._num_claimed = 0

    @property
    def is_idle(self) -> bool:
        """Whether no sequence is waiting or running, and none that ended holds anything."""
        return not self._waiting and not self._running and not self._num_leaving

    @property
    def num_coming(self) -> int:
        """See `preemption.Scheduler`."""
        tables = [sequence.table for sequence in self._running if sequence.is_giving_way]
        return self._num_leaving_blocks + sum(len(table.blocks) for table in tables if table is not None)

    def submit(self, sequence: LocalSequence) -> None:
        """Put a sequence last in the queue; it must fit an empty pool."""
        assert self._allocator.num_blocks_for(sequence.capacity_len) <= self._allocator.num_blocks
        sequence.order = self._num_arrived
        self._num_arrived += 1
        self._waiting.append(sequence)

    def start_waiting(self) -> list[LocalSequence]:
        """Start sequences from the head of the queue while slots and blocks last; nobody overtakes. Those started."""
        started: list[LocalSequence] = []
        while self._waiting and self._free_slots:
            sequence = self._waiting[0]
            start_len = sequence.capacity_len
            num_kept = self._num_claimed
            if self._overcommit and not sequence.is_protected:
                start_len = sequence.step_len
                num_kept += len(self._running)  # those that run may need a block each, soon
            if self._allocator.num_blocks_for(start_len) + num_kept > self._allocator.num_free:
                break
            del self._waiting[0]
            sequence.table = self._allocator.reserve(start_len)
            sequence.slot = self._free_slots.popleft()
            insort(self._running, sequence, key=_order)
            started.append(sequence)
        return started

    def next_chunks(self) -> list[tuple[LocalSequence, PrefillChunk]]:
        """The chunks of one prefill step; the caller moves `num_prefilled` once they are computed."""
        budget_len = self._chunk_len
        chunks: list[tuple[LocalSequence, PrefillChunk]] = []
        for sequence in self._running:
            length = min(budget_len, sequence.prefill_len - sequence.num_prefilled)
            if length == 0:
                continue
            assert sequence.table is not None
            sampling = sequence.request.sampling
            if sequence.token_ids:
                sampling = replace(sampling, prompt_logprobs=None)  # they were reported
            chunk = PrefillChunk(
                prompt_token_ids=sequence.prefilled_token_ids(),
                start=sequence.num_prefilled,
                length=length,
                table=sequence.table,
                sampling=sampling,
                draft_cap=sequence.draft_cap,
                choice=sequence.request.choice,
                output_len=sequence.num_recomputed,
                next_token=sequence.token_ids[-1] if sequence.token_ids else None,
            )
            chunks.append((sequence, chunk))
            budget_len -= length
        return chunks

    def running(self) -> tuple[LocalSequence, ...]:
        """Sequences that hold blocks, in order of arrival."""
        return tuple(self._running)

    def decoding(self) -> list[LocalSequence]:
        """Sequences that take part in decode steps."""
        return [sequence for sequence in self._running if sequence.is_decoding and not sequence.is_giving_way]

    def claim(self, num_blocks: int) -> None:
        """See `preemption.Scheduler`."""
        self._num_claimed = num_blocks

    def candidates(self) -> list[LocalSequence]:
        """See `preemption.Scheduler`."""
        return [item for item in self._running if not item.is_giving_way and not item.is_protected]

    def give_way(self, sequence: LocalSequence) -> None:
        """See `preemption.Scheduler`."""
        sequence.is_giving_way = True

    def giving_way(self) -> tuple[LocalSequence, ...]:
        """See `preemption.Scheduler`."""
        return tuple(sequence for sequence in self._running if sequence.is_giving_way)

    def add_blocks(self, sequence: LocalSequence, num_blocks: int) -> Growth:
        """See `preemption.Scheduler`."""
        assert sequence.table is not None
        assert sequence.slot is not None
        first = len(sequence.table.blocks)
        wanted_len = min((first + num_blocks) * self._allocator.block_size, sequence.capacity_len)
        sequence.table = self._allocator.grow(sequence.table, wanted_len)
        return Growth(sequence.slot, first, sequence.table.blocks[first:])

    def preempt(self, sequence: LocalSequence) -> Callable[[], None]:
        """See `preemption.Scheduler`."""
        free = self._detach(sequence)
        sequence.is_decoding = sequence.is_giving_way = False
        sequence.num_recomputed = max(0, len(sequence.token_ids) - 1)
        sequence.num_prefilled = 0 if sequence.saved is None else sequence.prefill_len
        if not sequence.token_ids:
            sequence.prompt_logprobs.clear()
        insort(self._waiting, sequence, key=_order)
        return free

    def remove(self, sequence: LocalSequence) -> None:
        """Take a sequence out, wherever it is, and free what it holds."""
        if sequence.table is None:
            self._waiting.remove(sequence)
        else:
            self._detach(sequence)()

    def retire(self, sequence: LocalSequence) -> Callable[[], None]:
        """Take a running sequence out; the function frees its slot and blocks, when no step has it any more."""
        return self._detach(sequence)

    def unfinished(self) -> list[LocalSequence]:
        """Every sequence that is waiting or running."""
        return [*self._running, *self._waiting]

    def check_empty(self) -> None:
        """With nothing to run, every block and slot is free; anything else is a leak."""
        if self.is_idle:
            assert self._allocator.num_free == self._allocator.num_blocks
            assert len(self._free_slots) == self._num_slots
            assert self._num_leaving_blocks == 0

    def _detach(self, sequence: LocalSequence) -> Callable[[], None]:
        table, slot = sequence.table, sequence.slot
        assert table is not None
        assert slot is not None
        self._running.remove(sequence)
        self._num_leaving += 1
        self._num_leaving_blocks += len(table.blocks)
        sequence.table = sequence.slot = None

        def free() -> None:
            self._num_leaving -= 1
            self._num_leaving_blocks -= len(table.blocks)
            self._allocator.release(table)
            self._free_slots.append(slot)

        return free


def _order(sequence: LocalSequence) -> int:
    return sequence.order
