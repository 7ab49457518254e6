"""What to expect of a time that is measured again and again, with room for how much it varies. Pure: times are given.

A measurement loses half of its weight with every half-life: both against newer ones and against none, so that what was
learnt under a load that has passed fades to "nothing is expected".
"""

from typing import Final

WEIGHT: Final = 0.05  # of the newest, at least
HALF_LIFE_S: Final = 5.0
NUM_DEVIATIONS: Final = 2.0
CLIP: Final = 4.0  # times what is seldom exceeded: one request must not tell for all
FLOOR_S: Final = 0.05  # less is never clipped


class Estimate:
    """A running mean and mean deviation, of TCP's retransmission timer (RFC 6298); 0 before anything is measured.

    Args:
        half_life_s: of a measurement.
    """

    def __init__(self, half_life_s: float = HALF_LIFE_S) -> None:
        assert half_life_s > 0
        self._half_life_s = half_life_s
        self.latest = 0.0  # the mean as of the last measurement
        self._deviation = 0.0
        self._added_s = 0.0
        self._is_empty = True

    def mean(self, now_s: float) -> float:
        """The mean; it fades."""
        return self.latest * self._kept(now_s)

    def high(self, now_s: float) -> float:
        """Seldom exceeded; it fades."""
        return self._high() * self._kept(now_s)

    def add(self, value: float, now_s: float) -> None:
        """A new measurement."""
        if self._is_empty:
            self._is_empty = False
            self.latest, self._added_s = value, now_s
            return
        value = min(value, max(CLIP * self._high(), FLOOR_S))
        weight = max(WEIGHT, 1.0 - self._kept(now_s))
        self._deviation += weight * (abs(value - self.latest) - self._deviation)
        self.latest += weight * (value - self.latest)
        self._added_s = now_s

    def _high(self) -> float:
        return self.latest + NUM_DEVIATIONS * self._deviation

    def _kept(self, now_s: float) -> float:
        kept: float = 0.5 ** (max(0.0, now_s - self._added_s) / self._half_life_s)
        return kept
