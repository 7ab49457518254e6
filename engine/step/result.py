"""Holds the result of one launched step, and tells whether the step is over."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

import torch

from baton.core.errors import BatonError, ModelOutputInvalid
from baton.core.requests.request import TokenLogprobs
from baton.engine.sampling.logprobs import num_packed, unpack, unpack_step
from baton.engine.step.counters import IDLE
from baton.engine.step.executor import Pending
from baton.engine.step.host_future import HostFuture
from baton.engine.step.meter import StepTimes
from baton.kernels.sampling.verify import NOT_FINITE


class Emitted(NamedTuple):
    """Result of one step for one decode sequence.

    Attributes:
        token_ids: emitted tokens, accepted_len + 1 of them.
        accepted_len: drafts accepted; -1 if nothing was emitted, because its grammar was late.
        proposed_len: drafts that could have been accepted.
        logprobs: log-probabilities of the emitted tokens; None if not requested.
        error: the error that ended the sequence; if set, no token of this step may be used.
    """

    token_ids: tuple[int, ...]
    accepted_len: int
    proposed_len: int
    logprobs: tuple[TokenLogprobs, ...] | None
    error: BatonError | None

    @property
    def is_idle(self) -> bool:
        """Whether the step emitted nothing."""
        return self.accepted_len < 0


class ChunkOutput(NamedTuple):
    """Result of one step for one chunk.

    Attributes:
        token: the next token; None if the chunk does not end with the sequence's newest token, or if nothing was
            sampled because its grammar was late.
        logprobs: log-probabilities of that token; None if not requested.
        prompt_logprobs: log-probabilities of the prompt tokens that the chunk reports, in order.
        error: the error that ended the sequence.
    """

    token: int | None
    logprobs: TokenLogprobs | None
    prompt_logprobs: tuple[TokenLogprobs, ...]
    error: BatonError | None


class HandoffState(NamedTuple):
    """What a decode worker needs to continue a pushed sequence, besides its KV and its first token.

    Attributes:
        draft_token: the draft for the position after the first token; None without an MTP head.
        hidden: the hidden state that made it, [hidden_size] in the model's dtype, as bytes; empty without one.
    """

    draft_token: int | None
    hidden: bytes


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Results of a step's rows, on the host, in the order of the plan."""

    decode: tuple[Emitted, ...] = ()
    chunks: tuple[ChunkOutput, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultLayout:
    """Layout of a step's results in its int64 buffer.

    Attributes:
        num_drafts: K of the step.
        tells_proposed: rows say how many drafts they had; else all had as many as they may use.
        proposed_lens: drafts that each of the B decode sequences may accept.
        num_tops: number of likeliest tokens that each decode sequence reports; None if it reports nothing.
        samples: per chunk, whether a token follows from it.
        chunk_tops: number of likeliest tokens reported with each chunk's token; None if it reports nothing.
        reports: per chunk, how many prompt tokens it reports, with how many likeliest tokens each; (0, 0) if none.
    """

    num_drafts: int = 0
    tells_proposed: bool = False
    proposed_lens: tuple[int, ...] = ()
    num_tops: tuple[int | None, ...] = ()
    samples: tuple[bool, ...] = ()
    chunk_tops: tuple[int | None, ...] = ()
    reports: tuple[tuple[int, int], ...] = ()

    @property
    def num_columns(self) -> int:
        """Integers per decode sequence: its accepted length, K + 1 tokens, and optionally how many drafts it had."""
        return self.num_drafts + 2 + self.tells_proposed

    @property
    def num_ints(self) -> int:
        """Integers of all rows; bits of log-probabilities follow them."""
        return len(self.proposed_lens) * self.num_columns + 2 * sum(self.samples)

    @property
    def num_values(self) -> int:
        """Length of the buffer."""
        decode, sampled = _reported(self.num_tops), self._sampled_tops
        num_bits = len(decode) * (self.num_drafts + 1) * num_packed(max(decode, default=0))
        num_bits += len(_reported(sampled)) * num_packed(max(_reported(sampled), default=0))
        return self.num_ints + num_bits + sum(count * num_packed(num_top) for count, num_top in self.reports)

    @property
    def _sampled_tops(self) -> list[int | None]:
        return [num_top for num_top, is_sampled in zip(self.chunk_tops, self.samples, strict=True) if is_sampled]

    def read(self, values: torch.Tensor, errors: Mapping[int, BatonError]) -> StepOutput:
        """Decode the buffer; `errors` are keyed by place, decode sequences first, then chunks."""
        num_decode = len(self.proposed_lens)
        num_decode_ints = num_decode * self.num_columns
        rows = values[:num_decode_ints].view(num_decode, self.num_columns).tolist()
        firsts = values[num_decode_ints : self.num_ints].view(-1, 2).tolist()
        bits = values[self.num_ints : self.num_values].view(torch.float64)
        num_emitted = [0 if row[0] == IDLE else (row[0] & ~NOT_FINITE) + 1 for row in rows]
        proposed_lens = [row[-1] for row in rows] if self.tells_proposed else self.proposed_lens
        decode_logprobs, bits = self._step_logprobs(bits, self.num_drafts + 1, self.num_tops, num_emitted)
        sampled_tops = self._sampled_tops
        first_logprobs, bits = self._step_logprobs(bits, 1, sampled_tops, [1] * len(firsts))
        decode = tuple(
            Emitted(
                tuple(row[1 : 1 + count]), count - 1, proposed_len, logprobs, errors.get(place) or _not_finite(row[0])
            )
            for place, (row, count, proposed_len, logprobs) in enumerate(
                zip(rows, num_emitted, proposed_lens, decode_logprobs, strict=True)
            )
        )
        sampled = iter(zip(firsts, first_logprobs, strict=True))
        chunks: list[ChunkOutput] = []
        for place, (is_sampled, (count, num_top)) in enumerate(zip(self.samples, self.reports, strict=True)):
            token, logprobs, error = None, None, errors.get(num_decode + place)
            if is_sampled:
                (told_len, sampled_token), reported = next(sampled)
                error = error or _not_finite(told_len)
                if told_len < NOT_FINITE:
                    token, logprobs = sampled_token, None if reported is None else reported[0]
            num_bits = count * num_packed(num_top)
            reports = bits[:num_bits].view(count, -1).tolist() if count else ()
            bits = bits[num_bits:]
            reported_prompt = tuple(unpack(packed, num_top) for packed in reports)
            chunks.append(ChunkOutput(token, logprobs, reported_prompt, error))
        return StepOutput(decode, tuple(chunks))

    @staticmethod
    def _step_logprobs(
        bits: torch.Tensor, num_rows: int, num_tops: Sequence[int | None], num_emitted: Sequence[int]
    ) -> tuple[Sequence[tuple[TokenLogprobs, ...] | None], torch.Tensor]:
        reported = _reported(num_tops)
        if not reported:
            return tuple(repeat(None, len(num_tops))), bits
        num_bits = len(reported) * num_rows * num_packed(max(reported))
        return unpack_step(bits[:num_bits], num_rows, num_tops, num_emitted), bits[num_bits:]


def _not_finite(told_len: int) -> BatonError | None:
    """The error of a row with this reported length, if its logits were not finite."""
    if not NOT_FINITE <= told_len < IDLE:
        return None
    return ModelOutputInvalid(
        "the model gave logits that are not finite (NaN or infinite), so no token could be chosen: its weights, its KV "
        "or the device may be damaged, or a number was too large for its dtype"
    )


def _reported(num_tops: Sequence[int | None]) -> list[int]:
    return [num_top for num_top in num_tops if num_top is not None]


class StepTicket:
    """Handle of a step that `Runner.launch` has launched.

    Args:
        layout: layout of its result.
        future: its result, which is ready as soon as its tokens are sampled.
        end: done when the whole step is over, including its draft extend.
        errors: called once, when the result is read.
        on_read: called once with the result's values; the future's buffer is free afterwards.
        handoffs: state of pushed sequences, in the order of their chunks; ready when the step is over.
        read_handoffs: decodes the values of `handoffs`.
        times: the step's marks.
    """

    def __init__(
        self,
        layout: ResultLayout,
        future: HostFuture,
        end: Pending,
        *,
        errors: Callable[[], Mapping[int, BatonError]],
        on_read: Callable[[torch.Tensor], None],
        handoffs: HostFuture | None = None,
        read_handoffs: Callable[[torch.Tensor], tuple[HandoffState, ...]] | None = None,
        times: StepTimes,
    ) -> None:
        self.layout = layout
        self.times = times
        self.on_result: Callable[[], None] | None = None  # called once, by the first `result`
        self._future: HostFuture | None = future
        self._end = end
        self._errors = errors
        self._on_read = on_read
        self._handoffs = handoffs
        self._read_handoffs = read_handoffs
        self._output: StepOutput | None = None

    @property
    def is_sampled(self) -> bool:
        """Whether `result` would return without waiting."""
        return self._future is None or self._future.is_done

    @property
    def is_done(self) -> bool:
        """Whether the whole step is over: nothing of it reads or writes KV any more."""
        return self._end.is_done

    @property
    def is_read(self) -> bool:
        """Whether `result` has been called."""
        return self._output is not None

    def result(self) -> StepOutput:
        """Result of the step; waits until its tokens are sampled. May be called again.

        Raises:
            Exception: what the step, or one before it, raised. Nothing can be computed any more.
        """
        if self._output is None:
            assert self._future is not None
            values = self._future.get()
            self._output = self.layout.read(values, self._errors())
            self._on_read(values)
            self._future = None
            if self.on_result is not None:
                self.on_result()
        return self._output

    def handoffs(self) -> tuple[HandoffState, ...]:
        """Hand-off state of pushed sequences whose prompts this step completed; waits for the end of the step.

        Raises:
            Exception: what the step raised.
        """
        if self._handoffs is None or self._read_handoffs is None:
            return ()
        return self._read_handoffs(self._handoffs.get())
