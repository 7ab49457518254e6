"""Tokens of one answer to text, as soon as it is certain; text that might begin a stop string waits."""

from collections.abc import Iterable

from baton.core.tokenizer import StopMatcher, Tokenizer


class IncrementalText:
    """The text of one stream. What it returns, joined, is the answer: it ends before the stop string found.

    Args:
        tokenizer: the model's.
        stop: strings that end it.
        min_tokens: stop strings are looked for after so many tokens.
    """

    __slots__ = ("_matcher", "_num_unchecked", "_stream")  # of thousands that are open each byte counts

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...], min_tokens: int = 0) -> None:
        self._stream = tokenizer.stream()
        self._matcher = StopMatcher(stop) if stop else None
        self._num_unchecked = min_tokens

    def push(self, token_ids: Iterable[int]) -> str:
        """Text that became certain with these tokens."""
        return "".join(map(self._push, token_ids))

    def _push(self, token_id: int) -> str:
        text = self._stream.push(token_id)
        if self._num_unchecked:
            self._num_unchecked -= 1
            return text
        return text if self._matcher is None else self._matcher.push(text)

    def finish(self) -> str:
        """What was still withheld at the end."""
        rest = self._stream.flush()
        return rest if self._matcher is None else self._matcher.push(rest) + self._matcher.flush()
