"""Limits how long a step may take before a rank counts as hung in it: max(2 s, 4 x the predicted step).

The prediction is the slowest recent step of about the same size. For a size not seen yet it is scaled from the slowest
smaller one; for the first step it allows for a warm-up (kernels are compiled, memory is mapped).
"""

from typing import Final

MIN_LIMIT_S: Final = 2.0
FACTOR: Final = 4.0
FIRST_S: Final = 15.0  # prediction before anything was measured
_FADE: Final = 0.98  # a slow step counts less after each faster one


class StepLimit:
    """The time limit for one kind of step."""

    def __init__(self) -> None:
        self._slowest_s: dict[int, float] = {}  # by size, in powers of two

    def limit_s(self, num_rows: int) -> float:
        """The limit for a step over `num_rows` rows."""
        return max(MIN_LIMIT_S, FACTOR * self.predicted_s(num_rows))

    def predicted_s(self, num_rows: int) -> float:
        """The predicted duration."""
        size = num_rows.bit_length()
        if not self._slowest_s:
            return FIRST_S
        known = max((seen for seen in self._slowest_s if seen <= size), default=min(self._slowest_s))
        return self._slowest_s[known] * 2.0 ** max(0, size - known)

    def note(self, num_rows: int, took_s: float) -> None:
        """Record the duration of a step."""
        size = num_rows.bit_length()
        self._slowest_s[size] = max(took_s, _FADE * self._slowest_s.get(size, 0.0))
