"""How much is done in a second, lately. Pure: durations are given."""

from collections import deque
from statistics import median
from typing import Final

HALF_LIFE_S: Final = 5.0
NUM_STEPS: Final = 15
FEW_STEPS: Final = 4  # say nothing
MAX_AGE_S: Final = 60.0


class RateMeter:
    """Work over the time it took; what is older counts less, by time that was worked.

    Args:
        half_life_s: after so much working time a measurement counts half.
    """

    def __init__(self, half_life_s: float = HALF_LIFE_S) -> None:
        assert half_life_s > 0
        self._half_life_s = half_life_s
        self._amount = 0.0
        self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """So much was done in so many seconds, >= 0 both."""
        assert amount >= 0
        assert seconds >= 0
        kept = 0.5 ** (seconds / self._half_life_s)
        self._amount = self._amount * kept + amount
        self._seconds = self._seconds * kept + seconds

    @property
    def per_s(self) -> float:
        """The rate; 0 before anything was measured."""
        return self._amount / self._seconds if self._seconds else 0.0


class FullStepRate:
    """What a worker can do when it has enough to do: the median rate of the last steps that were at least half full.

    A step over a few tokens takes about as long as a full one, so its rate says nothing of what the worker can do; nor
    do the first steps of a process, which set things up, or those of long ago.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=NUM_STEPS)  # when, and the rate
        self._has_begun = False

    def add(self, num_tokens: int, seconds: float, now_s: float, *, full_len: int) -> None:
        """A step over so many tokens, of `full_len` at the most, took so long and ended now."""
        assert num_tokens >= 0
        if not self._has_begun:
            self._has_begun = True
        elif 2 * num_tokens >= full_len and seconds > 0:
            self._steps.append((now_s, num_tokens / seconds))

    def per_s(self, now_s: float) -> float:
        """Tokens in a second; 0: too little was measured lately. Any thread."""
        rates = [rate for added_s, rate in tuple(self._steps) if now_s - added_s <= MAX_AGE_S]
        return median(rates) if len(rates) >= FEW_STEPS else 0.0
