"""Recent rates of work. Pure: durations are arguments."""

from collections import deque
from statistics import median
from typing import Final

HALF_LIFE_S: Final = 5.0
NUM_STEPS: Final = 15
FEW_STEPS: Final = 4  # fewer steps give no rate
MAX_AGE_S: Final = 60.0


class RateMeter:
    """Work divided by the time it took; older work counts less, by working time.

    Args:
        half_life_s: working time after which a measurement counts half.
    """

    def __init__(self, half_life_s: float = HALF_LIFE_S) -> None:
        assert half_life_s > 0
        self._half_life_s = half_life_s
        self._amount = 0.0
        self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Record work and the seconds it took, both >= 0."""
        assert amount >= 0
        assert seconds >= 0
        kept = 0.5 ** (seconds / self._half_life_s)
        self._amount = self._amount * kept + amount
        self._seconds = self._seconds * kept + seconds

    @property
    def per_s(self) -> float:
        """The rate; 0 before the first measurement."""
        return self._amount / self._seconds if self._seconds else 0.0


class FullStepRate:
    """A worker's capacity: the median rate of recent steps that were at least half full.

    A step over a few tokens takes about as long as a full one, so its rate says nothing about capacity. Neither do a
    process's first step, which sets things up, nor steps of long ago.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=NUM_STEPS)  # (end of the step, rate)
        self._has_begun = False

    def add(self, num_tokens: int, seconds: float, now_s: float, *, full_len: int) -> None:
        """Record a step over `num_tokens`, of at most `full_len`, that took `seconds` and ended now."""
        assert num_tokens >= 0
        if not self._has_begun:
            self._has_begun = True
        elif 2 * num_tokens >= full_len and seconds > 0:
            self._steps.append((now_s, num_tokens / seconds))

    def per_s(self, now_s: float) -> float:
        """Tokens per second; 0 if too little was measured recently. Callable from any thread."""
        rates = [rate for added_s, rate in tuple(self._steps) if now_s - added_s <= MAX_AGE_S]
        return median(rates) if len(rates) >= FEW_STEPS else 0.0
