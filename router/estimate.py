"""What to expect of a time that is measured again and again, with room for how much it varies. Pure."""

from typing import Final

WEIGHT: Final = 0.05  # of the newest
NUM_DEVIATIONS: Final = 2.0
CLIP: Final = 4.0  # times what is seldom exceeded: a single client that reads slowly must not tell for all
FLOOR_S: Final = 0.05  # less is never clipped


class Estimate:
    """A running mean and mean deviation, of TCP's retransmission timer (RFC 6298); 0 before anything is measured."""

    def __init__(self) -> None:
        self.mean = 0.0
        self._deviation = 0.0
        self._is_empty = True

    @property
    def high(self) -> float:
        """Seldom exceeded."""
        return self.mean + NUM_DEVIATIONS * self._deviation

    def add(self, value: float) -> None:
        """A new measurement."""
        if self._is_empty:
            self._is_empty = False
            self.mean = value
            return
        value = min(value, max(CLIP * self.high, FLOOR_S))
        self._deviation += WEIGHT * (abs(value - self.mean) - self._deviation)
        self.mean += WEIGHT * (value - self.mean)
