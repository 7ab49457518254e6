"""Tokens of one answer to text, as soon as it is certain; text that might begin a stop string waits."""

from collections.abc import Iterable

from baton.core.requests.sampling import SamplingParams
from baton.core.requests.stop_matcher import StopMatcher
from baton.core.requests.tokenizer import Tokenizer


class AnswerText:
    """The text of one stream. What it returns, joined, is the answer.

    It ends before the stop string that is found, and without the text of a stop token; with both if the request
    includes them. Whether the answer has ended is the worker's word: this only follows it (`engine.finish`).

    Args:
        tokenizer: the model's.
        sampling: the request's.
    """

    __slots__ = ("_ends", "_includes_stop", "_matcher", "_num_early", "_stop_ids", "_stream", "stop_reason")

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self.stop_reason: int | str | None = None  # the stop token or string that ended it; None for EOS
        self._stream = tokenizer.stream(skip_special_tokens=sampling.skip_special_tokens)
        self._includes_stop = sampling.include_stop_str_in_output
        self._matcher = StopMatcher(sampling.stop, include=self._includes_stop) if sampling.stop else None
        self._num_early = sampling.min_tokens  # tokens in which no stop string may end
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._ends = frozenset() if sampling.ignore_eos else frozenset(tokenizer.eos_token_ids)

    def push(self, token_ids: Iterable[int]) -> str:
        """Text that became certain with these tokens."""
        return "".join(map(self._push, token_ids))

    def finish(self) -> str:
        """What was still withheld at the end."""
        rest = self._stream.flush()
        return rest if self._matcher is None else self._matcher.push(rest, may_end=False) + self._matcher.flush()

    def _push(self, token_id: int) -> str:
        if token_id in self._ends or token_id in self._stop_ids:
            if token_id not in self._ends:
                self.stop_reason = token_id
            if not self._includes_stop:
                return ""
        text = self._stream.push(token_id)
        if self._matcher is None:
            return text
        is_early = self._num_early > 0
        self._num_early -= is_early
        text = self._matcher.push(text, may_end=not is_early)
        self.stop_reason = self._matcher.matched or self.stop_reason
        return text
