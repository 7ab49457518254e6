"""Tokens of one answer to text, as soon as it is certain; text that might begin a stop string waits."""

from collections.abc import Iterable

from baton.core.tokenizer import StopMatcher, Tokenizer


class IncrementalText:
    """The text of one stream. What it returns, joined, is the answer: it ends before the stop string found."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self._stream = tokenizer.stream()
        self._matcher = StopMatcher(stop)

    def push(self, token_ids: Iterable[int]) -> str:
        """Text that became certain with these tokens."""
        return "".join(self._matcher.push(self._stream.push(token_id)) for token_id in token_ids)

    def finish(self) -> str:
        """What was still withheld at the end."""
        return self._matcher.push(self._stream.flush()) + self._matcher.flush()
