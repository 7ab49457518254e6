"""Recent duration of a prefill step: a fixed part, and a part per token. Pure: times are arguments.

A rate alone says too little if prompts differ in length: a step over four tokens takes about as long as one over forty.
Older steps count less. Until steps of different lengths were seen, half of the time is taken as fixed. An incarnation's
first step is ignored, because it sets things up. A step that takes far longer than expected counts as only somewhat
longer, because something else interfered.
"""

from typing import Final

HALF_LIFE_STEPS: Final = 64
FEW_STEPS: Final = 8  # with fewer steps, none is taken for an outlier
STRAY: Final = 4.0  # an outlier counts as at most this multiple of the expected time
MIN_SPREAD: Final = 0.1  # minimum spread of lengths, relative to their mean, to tell the two parts apart


class PrefillPace:
    """The pace of one worker."""

    def __init__(self) -> None:
        self._num_seen = 0
        self._weight = 0.0
        self._x = self._y = self._xx = self._xy = self._draft = 0.0
        self.fixed_s = 0.0
        self.per_token_s = 0.0

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return self._weight > 0

    @property
    def draft_s(self) -> float:
        """Mean part of a step that the MTP head took."""
        return self._draft / self._weight if self._weight else 0.0

    def step_s(self, num_tokens: int) -> float:
        """Predicted duration of a step over `num_tokens`; 0 before the first measurement."""
        return self.fixed_s + num_tokens * self.per_token_s

    def add(self, num_tokens: int, seconds: float, draft_s: float = 0.0) -> None:
        """Record a step and the MTP head's part of it."""
        assert num_tokens > 0
        assert 0 <= draft_s
        self._num_seen += 1
        if self._num_seen == 1:
            return
        if self._num_seen > FEW_STEPS:
            seconds = min(seconds, STRAY * self.step_s(num_tokens))
        seconds, draft_s = max(seconds, 1e-9), min(draft_s, seconds)
        keep = 0.5 ** (1 / HALF_LIFE_STEPS)
        self._weight = self._weight * keep + 1
        self._x = self._x * keep + num_tokens
        self._y = self._y * keep + seconds
        self._xx = self._xx * keep + num_tokens * num_tokens
        self._xy = self._xy * keep + num_tokens * seconds
        self._draft = self._draft * keep + draft_s
        self._fit()

    def _fit(self) -> None:
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        if variance < (MIN_SPREAD * mean_x) ** 2:
            self.fixed_s, self.per_token_s = mean_y / 2, mean_y / 2 / mean_x
            return
        slope = (self._xy / self._weight - mean_x * mean_y) / variance
        most = self._xy / self._xx  # through the origin: no fixed part
        self.per_token_s = min(max(slope, 0.0), most)
        self.fixed_s = max(mean_y - self.per_token_s * mean_x, 0.0)
