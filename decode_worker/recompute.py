"""Computing again, on a decode worker, the KV of sequences that were preempted without being saved.

Prompt and output are prefilled together, chunk by chunk, up to the newest token, which is known; nothing is pushed and
nothing is chosen but the draft. It happens while no decode step is in flight, so that ranks of a group add in one
order.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from baton.decode_worker.scheduler import DecodeSequence
from baton.engine.prefill import PrefillChunk, PrefillForward, SequenceStart


class Prefill(Protocol):
    """What is needed of `PrefillRunner`."""

    def forward(self, chunks: Sequence[PrefillChunk], on_layer: Callable[[int], None]) -> PrefillForward:
        """Compute the chunks' trunk KV."""
        ...

    def draft(self, forward: PrefillForward, on_layer: Callable[[int], None]) -> tuple[SequenceStart | None, ...]:
        """Compute the chunks' MTP KV."""
        ...


class Recompute:
    """Runs prefill steps over the decode worker's own pool.

    Args:
        prefill: over that pool.
        chunk_len: tokens of a step.
    """

    def __init__(self, prefill: Prefill, chunk_len: int) -> None:
        assert chunk_len > 0
        self._prefill = prefill
        self._chunk_len = chunk_len

    def step(self, sequences: Sequence[DecodeSequence]) -> list[tuple[DecodeSequence, SequenceStart]]:
        """Compute one step of what `sequences` lack, the first before the others; those that are whole with it."""
        budget_len = self._chunk_len
        planned: list[tuple[DecodeSequence, PrefillChunk]] = []
        for sequence in sequences:
            length = min(budget_len, sequence.request.prompt_len + sequence.num_output - 1 - sequence.num_computed)
            if length > 0:
                planned.append((sequence, _chunk(sequence, length)))
                budget_len -= length
        forward = self._prefill.forward([chunk for _, chunk in planned], _ignore_layer)
        starts = self._prefill.draft(forward, _ignore_layer)
        whole: list[tuple[DecodeSequence, SequenceStart]] = []
        for (sequence, chunk), start in zip(planned, starts, strict=True):
            sequence.num_computed = chunk.end
            if start is not None:
                whole.append((sequence, start))
        return whole


def start_of(sequence: DecodeSequence) -> SequenceStart:
    """How a sequence goes on whose KV was saved: from its newest token; its draft comes back with the KV."""
    if sequence.start is not None:  # it had not begun
        return sequence.start
    prompt_len = sequence.request.prompt_len + sequence.num_output - 1
    return SequenceStart(first_token=sequence.token_ids[-1], draft_token=0, hidden_D=None, prompt_len=prompt_len)


def _chunk(sequence: DecodeSequence, length: int) -> PrefillChunk:
    request, table = sequence.request, sequence.table
    assert table is not None
    return PrefillChunk(
        prompt_token_ids=(*request.prompt_token_ids, *sequence.token_ids[:-1]),
        start=sequence.num_computed,
        length=length,
        table=table,
        sampling=replace(request.sampling, logprobs=None, prompt_logprobs=None),  # they were reported
        draft_cap=request.num_draft_tokens,
        choice=request.choice,
        output_len=request.num_forced + sequence.num_output - 1,
        next_token=sequence.token_ids[-1],
    )


def _ignore_layer(layer: int) -> None:
    """One pool: nothing to push."""
