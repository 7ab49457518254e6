"""Decides when a sequence ends (EOS, stop tokens, stop strings, `max_tokens`), and which tokens belong to it.

There is one checker per sequence, which gets every token once. The router produces the text for clients; here text is
only searched for stop strings, so a sequence without them is never decoded to text.
"""

from collections.abc import Iterable, Sequence

from baton.core.errors import InvalidRequest
from baton.core.requests.answer_text import StopMatcher
from baton.core.requests.request import FinishReason, GenerationRequest
from baton.core.requests.sampling import SamplingParams
from baton.core.requests.tokenizer import Tokenizer


class FinishChecker:
    """Watches one sequence's tokens, in order."""

    def __init__(self, sampling: SamplingParams, eos_token_ids: Iterable[int], tokenizer: Tokenizer) -> None:
        self._max_tokens = sampling.max_tokens
        self._min_tokens = sampling.min_tokens
        self._stop_ids = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            self._stop_ids.update(eos_token_ids)
        self._matcher = StopMatcher(sampling.stop) if sampling.stop else None
        self._stream = tokenizer.stream(skip_special_tokens=sampling.skip_special_tokens) if sampling.stop else None
        self._num_tokens = 0
        self._reason: FinishReason | None = None

    @classmethod
    def of(cls, request: GenerationRequest, tokenizer: Tokenizer) -> "FinishChecker":
        """The checker of a request's attempt, after it has taken the tokens of earlier attempts.

        Raises:
            InvalidRequest: these tokens already end the sequence, so there is nothing to continue.
        """
        checker = cls(request.sampling, tokenizer.eos_token_ids, tokenizer)
        kept, reason = checker.accept(request.forced_token_ids)
        if reason is not None:
            message = f"the answer ends at token {len(kept)} of {request.num_forced} that it is to go on from"
            raise InvalidRequest(message, field="num_forced_tokens", at=len(kept), reason=reason.value)
        return checker

    def accept(self, token_ids: Sequence[int]) -> tuple[list[int], FinishReason | None]:
        """Take a step's tokens; returns those that belong to the answer, and why it ended if it did.

        The token that ends it is kept: EOS and stop tokens, the token that completes a stop string, the last one of
        `max_tokens`. Nothing may be passed in after the end.
        """
        assert self._reason is None
        if self._matcher is None and self._num_tokens + len(token_ids) < self._max_tokens:
            if self._stop_ids.isdisjoint(token_ids):  # by far the most common case
                self._num_tokens += len(token_ids)
                return list(token_ids), None
        kept: list[int] = []
        for token_id in token_ids:
            kept.append(token_id)
            self._num_tokens += 1
            if token_id in self._stop_ids or self._completes_stop_string(token_id):
                self._reason = FinishReason.STOP
            elif self._num_tokens == self._max_tokens:
                self._reason = FinishReason.LENGTH
            if self._reason is not None:
                break
        return kept, self._reason

    def _completes_stop_string(self, token_id: int) -> bool:
        if self._matcher is None or self._stream is None:
            return False
        # A stop string that ends after `min_tokens` may begin before.
        self._matcher.push(self._stream.push(token_id), may_end=self._num_tokens > self._min_tokens)
        return self._matcher.matched is not None
