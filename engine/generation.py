"""Results of the one-process engine: tokens as they are made, and finally the whole answer."""

from dataclasses import dataclass

from baton.core.errors import BatonError
from baton.core.requests.request import AttemptKey, FinishReason, SpeculationCounts, TokenLogprobs
from baton.engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """The outcome of a request, or of one of its `n` answers.

    Attributes:
        key: the request's key.
        token_ids: all generated tokens, including the one that ended it.
        finish_reason: why it ended; None if there is an `error`.
        error: what ended it instead (deadline, cancel, a grammar beyond its limits); `token_ids` were made before.
        counts: drafts proposed and accepted, and tokens emitted (including the first token, which prefill samples).
        ttft_s: from submission to the first token; None without one.
        tpot_s: mean time per token after the first; None with fewer than two.
        num_preemptions: number of times that it was preempted.
        choice: which of the request's answers this is.
        logprobs: of each token; None if not requested.
        prompt_logprobs: of each prompt token but the first, with choice 0; None if not requested.
    """

    key: AttemptKey
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    error: BatonError | None
    counts: SpeculationCounts
    ttft_s: float | None
    tpot_s: float | None
    num_preemptions: int = 0
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None

    @classmethod
    def of(
        cls,
        sequence: Sequence,
        error: BatonError | None,
        logprobs: tuple[TokenLogprobs, ...],
        prompt_logprobs: tuple[TokenLogprobs, ...],
    ) -> "GenerationResult":
        """The result of a sequence that has ended."""
        asked = sequence.request.sampling
        ttft_s = tpot_s = None
        num_tokens = len(sequence.token_ids)
        if sequence.first_token_s:
            ttft_s = sequence.first_token_s - sequence.submitted_s
            if num_tokens > 1:
                tpot_s = (sequence.last_token_s - sequence.first_token_s) / (num_tokens - 1)
        return cls(
            key=sequence.key,
            token_ids=tuple(sequence.token_ids),
            finish_reason=sequence.finish_reason,
            error=error,
            counts=sequence.counts,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            num_preemptions=sequence.num_preemptions,
            choice=sequence.request.choice,
            logprobs=None if asked.logprobs is None else logprobs,
            prompt_logprobs=None if asked.prompt_logprobs is None else prompt_logprobs,
        )


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """Tokens that one step made for one answer; the answer's last event carries the result."""

    token_ids: tuple[int, ...]
    result: GenerationResult | None
    choice: int = 0
