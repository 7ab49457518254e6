"""Turns one answer's tokens into text as soon as it is certain; withholds text that might begin a stop string."""

from collections.abc import Iterable

from baton.core.requests.sampling import SamplingParams
from baton.core.requests.tokenizer import Tokenizer


class StopMatcher:
    """Withholds text that might begin a stop string, and detects when one is complete.

    Args:
        stop: the stop strings.
        include: whether the text ends after the stop string instead of before it.
    """

    __slots__ = ("_include", "_num_held", "_stop", "_tail", "_tail_len", "matched")

    def __init__(self, stop: tuple[str, ...], *, include: bool = False) -> None:
        self.matched: str | None = None
        self._stop = stop
        self._include = include
        self._tail = ""  # end of the text so far, in which a stop string may have begun
        self._tail_len = max(map(len, stop), default=1) - 1
        self._num_held = 0  # characters at its end that are not shown yet

    def push(self, text: str, *, may_end: bool = True) -> str:
        """Take text; return what may be shown. After a match nothing more is returned.

        Args:
            text: the text that follows.
            may_end: whether a stop string that ends in it counts.
        """
        if self.matched is not None or not text:
            return ""
        seen = self._tail + text
        begin = len(self._tail) - self._num_held
        end = self._end(seen, len(self._tail)) if may_end else -1
        if end >= 0:
            self._tail, self._num_held = "", 0
            return seen[begin:end]
        self._num_held = 0 if self._include else self._longest_begin(seen)
        shown = seen[begin : len(seen) - self._num_held]
        self._tail = seen[-self._tail_len :] if self._tail_len else ""
        return shown

    def flush(self) -> str:
        """Return withheld text that turned out not to begin a stop string."""
        held = self._tail[len(self._tail) - self._num_held :]
        self._num_held = 0
        return held

    def _end(self, seen: str, num_old: int) -> int:
        """Position where the text ends; -1 if no stop string ends after its first `num_old` characters."""
        first_end, end = len(seen) + 1, -1
        for stop in self._stop:
            at = seen.find(stop, max(0, num_old - len(stop) + 1))
            if at >= 0 and at + len(stop) < first_end:
                first_end = at + len(stop)
                end = first_end if self._include else at
                self.matched = stop
        return end

    def _longest_begin(self, seen: str) -> int:
        """How many of the last characters may begin a stop string."""
        longest = 0
        for stop in self._stop:
            at = seen.find(stop[0], max(0, len(seen) - len(stop) + 1))
            while 0 <= at < len(seen) - longest:
                if stop.startswith(seen[at:]):
                    longest = len(seen) - at
                    break
                at = seen.find(stop[0], at + 1)
        return longest


class AnswerText:
    """The text of one stream. What it returns, joined, is the answer.

    The text ends before the matched stop string, and without the text of a stop token; with both if the request
    includes them. The worker decides when the answer ends; this class only follows (`engine.finish`).

    Args:
        tokenizer: the model's tokenizer.
        sampling: the request's sampling parameters.
    """

    __slots__ = ("_ends", "_includes_stop", "_matcher", "_num_early", "_stop_ids", "_stream", "stop_reason")

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self.stop_reason: int | str | None = None  # stop token or string that ended the answer; None for EOS
        self._stream = tokenizer.stream(skip_special_tokens=sampling.skip_special_tokens)
        self._includes_stop = sampling.include_stop_str_in_output
        self._matcher = StopMatcher(sampling.stop, include=self._includes_stop) if sampling.stop else None
        self._num_early = sampling.min_tokens  # number of tokens in which no stop string may end
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._ends = frozenset() if sampling.ignore_eos else frozenset(tokenizer.eos_token_ids)

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that became certain with these tokens."""
        return "".join(map(self._push, token_ids))

    def finish(self) -> str:
        """Return the text that was still withheld at the end."""
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
