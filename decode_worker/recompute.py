"""Computing prompts on a decode worker, chunk by chunk, while no decode step is in flight.

There are two kinds. A sequence that was preempted without being saved has its prompt and output prefilled together, up
to the newest token, which is known: nothing is chosen but the draft. A prompt that no prefill worker computes has its
first token chosen here, by what would have chosen it there. Nothing is pushed in either case. Chunks lie between decode
steps, so that ranks of a group add in one order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from baton.core.clock import Clock, MonotonicClock
from baton.core.logprobs import TokenLogprobs
from baton.core.pace import PrefillPace
from baton.decode_worker.chunk_budget import ChunkBudget
from baton.decode_worker.sequence import DecodeSequence, DecodeState
from baton.engine.prefill import PrefillChunk, PrefillForward, SequenceStart


class Prefill(Protocol):
    """What is needed of `PrefillRunner`."""

    def forward(self, chunks: Sequence[PrefillChunk], on_layer: Callable[[int], None]) -> PrefillForward:
        """Compute the chunks' trunk KV."""
        ...

    def draft(self, forward: PrefillForward, on_layer: Callable[[int], None]) -> tuple[SequenceStart | None, ...]:
        """Compute the chunks' MTP KV."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """What a chunk of a prompt that is computed here alone has brought.

    Attributes:
        prompt_logprobs: of prompt tokens, that were not reported before; None: not asked for.
        first_token: if the prompt is complete.
        logprobs: of that token, if asked for.
        now_s: when it was known.
    """

    prompt_logprobs: Sequence[TokenLogprobs] | None
    first_token: int | None
    logprobs: TokenLogprobs | None
    now_s: float


def _nobody(sequence: DecodeSequence, computed: Computed) -> None:
    raise AssertionError(f"{sequence.key}: nobody hears of its first token")


class Recompute:
    """Runs prefill steps over the decode worker's own pool.

    Args:
        prefill: over that pool.
        chunk_len: tokens of a step.
        budget: tokens of a step that others wait for; None: `chunk_len`.
        on_computed: told what chunks of prompts have brought, before the drafts are made; it may end the sequence.
        clock: that chunks are timed by.
    """

    def __init__(
        self,
        prefill: Prefill,
        chunk_len: int,
        *,
        budget: ChunkBudget | None = None,
        pace: PrefillPace | None = None,
        on_computed: Callable[[DecodeSequence, Computed], None] = _nobody,
        clock: Clock | None = None,
    ) -> None:
        assert chunk_len > 0
        self.pace = pace or PrefillPace()
        self.budget = budget
        self.num_prompts = 0
        self.num_prompt_tokens = 0
        self._prefill = prefill
        self._chunk_len = chunk_len
        self._on_computed = on_computed
        self._clock = clock or MonotonicClock()

    @property
    def chunk_len(self) -> int:
        """Tokens of the last step that others waited for; 0 if none was yet."""
        return 0 if self.budget is None else self.budget.last_len

    def step(
        self, sequences: Sequence[DecodeSequence], *, holds_up: bool = False
    ) -> list[tuple[DecodeSequence, SequenceStart]]:
        """Compute one step of what `sequences` lack, the first before the others; those that are whole with it.

        Args:
            sequences: in the order of their turns.
            holds_up: others run, and wait for this.
        """
        has_begun = any(sequence.token_ids for sequence in sequences)
        is_short = holds_up and not has_begun and self.budget is not None
        budget_len = self.budget.length() if is_short and self.budget is not None else self._chunk_len
        planned: list[tuple[DecodeSequence, PrefillChunk]] = []
        for sequence in sequences:
            length = min(budget_len, sequence.num_to_compute)
            if length > 0:
                planned.append((sequence, _chunk(sequence, length)))
                budget_len -= length
        begin_s = self._clock.now_s()
        for sequence, _ in planned:
            sequence.times.computing_s = sequence.times.computing_s or begin_s
        forward = self._prefill.forward([chunk for _, chunk in planned], _ignore_layer)
        forward_s = self._clock.now_s()
        self._report(planned, forward, forward_s)
        draft_s = self._clock.now_s()
        starts = self._prefill.draft(forward, _ignore_layer)
        end_s = self._clock.now_s()
        num_tokens = sum(chunk.length for _, chunk in planned)
        self.pace.add(num_tokens, forward_s - begin_s + end_s - draft_s, end_s - draft_s)
        whole: list[tuple[DecodeSequence, SequenceStart]] = []
        for (sequence, chunk), start in zip(planned, starts, strict=True):
            sequence.num_computed = chunk.end
            times = sequence.times
            if start is not None and sequence.is_local and not times.admitted_s:
                times.admitted_s = end_s
                sequence.handoff_ms = 1e3 * (end_s - times.first_token_s)
            if start is not None and sequence.state is DecodeState.COMPUTING:
                whole.append((sequence, start))
        return whole

    def _report(
        self, planned: Sequence[tuple[DecodeSequence, PrefillChunk]], forward: PrefillForward, now_s: float
    ) -> None:
        for at, (sequence, chunk) in enumerate(planned):
            if chunk.next_token is not None:
                continue
            self.num_prompt_tokens += chunk.length
            if chunk.is_last:
                self.num_prompts += 1
                sequence.times.first_token_s = now_s
            reports = forward.prompt_logprobs[at]
            if reports is not None:  # after a preemption a part of the prompt is computed for the second time
                reports = reports[max(0, sequence.num_reported - chunk.start) :]
                sequence.num_reported += len(reports)
            found = Computed(
                prompt_logprobs=reports,
                first_token=forward.first_tokens[at],
                logprobs=forward.first_logprobs[at],
                now_s=now_s,
            )
            self._on_computed(sequence, found)


def start_of(sequence: DecodeSequence) -> SequenceStart:
    """How a sequence goes on whose KV was saved: from its newest token; its draft comes back with the KV."""
    if sequence.start is not None:  # it had not begun
        return sequence.start
    prompt_len = sequence.request.prompt_len + sequence.num_output - 1
    return SequenceStart(first_token=sequence.token_ids[-1], draft_token=0, hidden_D=None, prompt_len=prompt_len)


def _chunk(sequence: DecodeSequence, length: int) -> PrefillChunk:
    request, table = sequence.request, sequence.table
    assert table is not None
    begun = sequence.num_output > 0
    quiet = replace(request.sampling, logprobs=None, prompt_logprobs=None)  # they were reported
    return PrefillChunk(
        prompt_token_ids=(*request.prompt_token_ids, *sequence.token_ids[:-1]),
        start=sequence.num_computed,
        length=length,
        table=table,
        sampling=quiet if begun else request.sampling,
        draft_cap=request.num_draft_tokens,
        choice=request.choice,
        output_len=request.num_forced + max(0, sequence.num_output - 1),
        next_token=sequence.token_ids[-1] if begun else None,
    )


def _ignore_layer(layer: int) -> None:
    """One pool: nothing to push."""
