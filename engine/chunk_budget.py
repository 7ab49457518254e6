"""How many prompt tokens the next step computes. Pure.

Where nothing decodes, a step takes as many as it may. Where sequences decode, each of them waits for the chunk, so the
gap between two of its tokens grows by what the chunk adds. So a step with both may take about `DECODE_STEPS` times as
long as one that only decodes; or, where the host needs longer than that to launch its kernels, a little longer than the
host does: up to there the device would wait for the host anyway, and prompt tokens cost nothing. The length that fits
follows from the steps before: each makes it a little longer or shorter. A long queue of prompts gets larger chunks: all
that wait are computed within some `DRAIN_STEPS` steps, because there the rate of prompts decides when sequences start.
"""

from typing import Final

FIRST_LEN: Final = 32  # before anything is known
MIN_LEN: Final = 16
DECODE_STEPS: Final = 2.5  # that a step with chunks may take
LAUNCHES: Final = 1.1  # by its host that it may take
DRAIN_STEPS: Final = 16
WEIGHT: Final = 0.1  # of the newest step in a mean time
FORGET: Final = 1.02  # how fast a fast launch is forgotten, by launch
_SHRINK: Final = 0.5  # of what fits, by one step, at most
_GROW: Final = 1.25
_FULL: Final = 0.9


class ChunkBudget:
    """Of one engine.

    Args:
        max_num_batched_tokens: of a step, decode rows included.
    """

    def __init__(self, max_num_batched_tokens: int) -> None:
        assert max_num_batched_tokens > 0
        self.last_len = 0  # of the last step that decoded, too
        self.decode_s = 0.0  # mean time of a step that only decodes; 0: not known
        # What the host takes to launch a step with chunks and decode rows, when nothing else holds it up: long launches
        # must not make chunks longer, for those make launches longer.
        self.launch_s = 0.0
        self._most = max_num_batched_tokens
        self._fitting = float(FIRST_LEN)

    @property
    def limit_s(self) -> float:
        """What a step with chunks and decode rows may take."""
        return max(DECODE_STEPS * self.decode_s, LAUNCHES * self.launch_s)

    def decoded(self, seconds: float) -> None:
        """A step that only decodes took so long."""
        self.decode_s = _mean(self.decode_s, seconds)

    def mixed(self, num_tokens: int, seconds: float, launch_s: float) -> None:
        """A step with decode rows and so many tokens of chunks took so long, `launch_s` of the host's time."""
        self.launch_s = min(launch_s, FORGET * self.launch_s) if self.launch_s else launch_s
        limit_s = self.limit_s
        if seconds <= 0.0:
            return
        if seconds > limit_s:  # of a step that its host held up fewer tokens would not have been faster
            if self.decode_s and seconds > LAUNCHES * launch_s:
                fits = num_tokens * limit_s / seconds
                self._fitting = min(self._fitting, max(fits, _SHRINK * self._fitting, float(MIN_LEN)))
        elif num_tokens >= _FULL * self._fitting:  # a short step that is fast says nothing of longer ones
            fits = num_tokens * limit_s / seconds
            self._fitting = min(max(fits, self._fitting), _GROW * self._fitting, float(self._most))

    def length(self, num_decode_rows: int, num_waiting: int) -> int:
        """Tokens of the next step's chunks.

        Args:
            num_decode_rows: rows of the step that decode.
            num_waiting: prompt tokens that wait to be computed.
        """
        if not num_decode_rows:
            return self._most
        wanted = max(int(self._fitting), -(-num_waiting // DRAIN_STEPS))
        self.last_len = max(min(MIN_LEN, self._most), min(wanted, self._most - num_decode_rows))
        return self.last_len


def _mean(before: float, newest: float) -> float:
    return newest if not before else before + WEIGHT * (newest - before)
