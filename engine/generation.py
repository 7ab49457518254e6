"""What the one-process engine gives its caller: tokens as they are made, and in the end the whole answer."""

from dataclasses import dataclass

from baton.core.errors import BatonError
from baton.core.requests.request import AttemptKey, FinishReason, SpeculationCounts, TokenLogprobs
from baton.engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """What became of a request, or of one of its `n` answers.

    Attributes:
        key: the request's.
        token_ids: everything generated, the token that ended it included.
        finish_reason: why it ended; None if `error` says so.
        error: what ended it instead (deadline, cancel, a grammar beyond its limits); `token_ids` were made before.
        counts: drafts proposed, accepted, and tokens emitted (the first token, which prefill makes, included).
        ttft_s: from submission to the first token; None if there is none.
        tpot_s: mean time of a token after the first; None with fewer than two.
        num_preemptions: times that it gave its blocks to others.
        choice: which of the request's answers this is.
        logprobs: of each token; None if none were asked for.
        prompt_logprobs: of each prompt token but the first, with choice 0; None if none were asked for.
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
        """What there is to say of a sequence that has ended."""
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
    """Tokens of one answer as one step made them; its last event carries the result."""

    token_ids: tuple[int, ...]
    result: GenerationResult | None
    choice: int = 0
