"""How many prompt tokens a decode worker computes between two steps of the sequences that run there. Pure.

While a chunk is computed no stream gets a token, so a chunk may take about as long as one decode step: then the gap
between two tokens grows to some two steps, however long the prompt. Where a chunk's fixed cost alone is more than that,
a shorter chunk would only be paid more often: the chunk may then take twice its fixed cost. Before the worker knows
what chunks cost it takes few tokens. Nobody's tokens are held up where nothing runs, and a sequence that has begun to
answer and is computed again waits for its own next token: there chunks are as long as a prefill worker's.
"""

from collections.abc import Callable
from typing import Final

from baton.core.distribution import Distribution
from baton.core.pace import PrefillPace

FIRST_LEN: Final = 32  # before anything is known
MIN_LEN: Final = 16
STEPS: Final = 1.0  # decode steps that a chunk may take
WEIGHT: Final = 0.5  # of the steps since the last look in the mean step


class ChunkBudget:
    """Of one worker.

    Args:
        chunk_len: the most tokens of a step.
        pace: what chunks take.
        steps: durations of decode steps, all that were read so far.
    """

    def __init__(self, chunk_len: int, pace: PrefillPace, steps: Callable[[], Distribution]) -> None:
        assert chunk_len > 0
        self._chunk_len = chunk_len
        self._pace = pace
        self._steps = steps
        self._seen: Distribution | None = None
        self._step_s = 0.0
        self.last_len = 0

    def length(self) -> int:
        """Tokens of the next chunk while sequences run."""
        self._look()
        self.last_len = max(1, min(self._fitting(), self._chunk_len))
        return self.last_len

    def _fitting(self) -> int:
        pace = self._pace
        if not pace.is_known or not self._step_s:
            return FIRST_LEN
        if not pace.per_token_s:
            return self._chunk_len
        left_s = max(STEPS * self._step_s - pace.fixed_s, pace.fixed_s)
        return max(MIN_LEN, int(left_s / pace.per_token_s))

    def _look(self) -> None:
        now = self._steps()
        mean_s = (now if self._seen is None else now.since(self._seen)).mean
        if mean_s is not None:
            self._step_s = mean_s if not self._step_s else self._step_s + WEIGHT * (mean_s - self._step_s)
        self._seen = now
