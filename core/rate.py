"""How much is done in a second, lately. Pure: durations are given."""

from typing import Final

HALF_LIFE_S: Final = 5.0


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
