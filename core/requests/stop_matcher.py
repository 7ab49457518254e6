"""Where an answer's text ends: at the stop string that is complete first; and what is withheld until that is clear.

The rule is vLLM's. Of all stop strings the one that ends earliest counts, and of those that end there the one that was
named first; so the result does not depend on how tokens cut the text. A match needs one character behind `min_tokens`
at least; it may begin before.
"""


class StopMatcher:
    """Withholds text that might begin a stop string, and says when one is complete.

    Args:
        stop: the strings.
        include: the text ends behind the stop string, not before it.
    """

    __slots__ = ("_include", "_num_held", "_stop", "_tail", "_tail_len", "matched")

    def __init__(self, stop: tuple[str, ...], *, include: bool = False) -> None:
        self.matched: str | None = None
        self._stop = stop
        self._include = include
        self._tail = ""  # of the text so far; a stop string that is not complete may have begun in it
        self._tail_len = max(map(len, stop), default=1) - 1
        self._num_held = 0  # of its last characters, not shown yet

    def push(self, text: str, *, may_end: bool = True) -> str:
        """Take text; return what may be shown. After a match nothing more is returned.

        Args:
            text: what follows.
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
        """Withheld text that turned out to begin no stop string."""
        held = self._tail[len(self._tail) - self._num_held :]
        self._num_held = 0
        return held

    def _end(self, seen: str, num_old: int) -> int:
        """Where the text ends; -1 if no stop string ends behind its first `num_old` characters."""
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
