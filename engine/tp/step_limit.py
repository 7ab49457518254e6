"""How long a step may take before a rank is said to hang in it: max(2 s, 4 x the predicted step).

The prediction is the slowest recent step of about the same size; of a size not seen yet, the slowest smaller one,
scaled; of the first step, a warm-up (kernels are compiled, memory is mapped) is allowed for.
"""

from typing import Final

MIN_LIMIT_S: Final = 2.0
FACTOR: Final = 4.0
FIRST_S: Final = 15.0  # predicted where nothing was measured
_FADE: Final = 0.98  # a slow step counts less with each faster one after it


class StepLimit:
    """Of one kind of step."""

    def __init__(self) -> None:
        self._slowest_s: dict[int, float] = {}  # by size, in powers of two

    def limit_s(self, num_rows: int) -> float:
        """For a step over so many rows."""
        return max(MIN_LIMIT_S, FACTOR * self.predicted_s(num_rows))

    def predicted_s(self, num_rows: int) -> float:
        """How long it takes, as far as is known."""
        size = num_rows.bit_length()
        if not self._slowest_s:
            return FIRST_S
        known = max((seen for seen in self._slowest_s if seen <= size), default=min(self._slowest_s))
        return self._slowest_s[known] * 2.0 ** max(0, size - known)

    def note(self, num_rows: int, took_s: float) -> None:
        """A step was measured."""
        size = num_rows.bit_length()
        self._slowest_s[size] = max(took_s, _FADE * self._slowest_s.get(size, 0.0))
