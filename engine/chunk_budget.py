"""How many prompt tokens the next step computes. Pure.

Where nothing decodes, a step takes as many as it may. Where sequences decode, each of them waits for the chunk, so the
gap between two of its tokens grows by what the chunk adds. So a step with both may take about `DECODE_STEPS` times as
long as one that only decodes; or, where the host needs longer than that to launch its kernels, a little longer than the
host does: up to there the device would wait for the host anyway, and prompt tokens cost nothing. And where a step with
the shortest chunk takes long, as in an MoE model, where any chunk reads nearly all experts, it may take `FLOORS` times
that: shorter chunks would read the same weights more often. The length that fits follows from the steps before: each
makes it a little longer or shorter. A long queue of prompts gets larger chunks: all that wait are computed within
`DRAIN_STEPS` steps, because there the rate of prompts decides when sequences start.
"""

from typing import Final

FIRST_LEN: Final = 32  # before anything is known
MIN_LEN: Final = 16
DECODE_STEPS: Final = 2.5  # that a step with chunks may take
LAUNCHES: Final = 1.1  # by its host that it may take
FLOORS: Final = 1.5  # of what a step with the shortest chunk takes that it may take
DRAIN_STEPS: Final = 32
WEIGHT: Final = 0.1  # of the newest step in a mean time
FORGET: Final = 1.02  # how fast a fast launch is forgotten, by launch
_SHRINK: Final = 0.5  # of what fits, by one step, at most
_GROW: Final = 1.25
_FULL: Final = 0.9
_FEW: Final = 4  # steps: through fewer no line is drawn
_SHORTER: Final = 0.75
_SPREAD: Final = 0.1  # of their lengths, in means, that is too little for a line


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
        self.floor = Floor()
        self._most = max_num_batched_tokens
        self._fitting = float(FIRST_LEN)
        self._is_shorter = False
        self._drain_len = 0  # of each of the next `_drain_steps`, for a queue
        self._drain_steps = 0

    @property
    def limit_s(self) -> float:
        """What a step with chunks and decode rows may take."""
        return max(DECODE_STEPS * self.decode_s, LAUNCHES * self.launch_s, FLOORS * self.floor.seconds)

    def decoded(self, seconds: float) -> None:
        """A step that only decodes took so long."""
        self.decode_s = _mean(self.decode_s, seconds)

    def mixed(self, num_tokens: int, seconds: float, launch_s: float) -> None:
        """A step with decode rows and so many tokens of chunks took so long, `launch_s` of the host's time."""
        self.launch_s = min(launch_s, FORGET * self.launch_s) if self.launch_s else launch_s
        if seconds <= 0.0:
            return
        is_held_up = seconds <= LAUNCHES * launch_s  # by its host: fewer tokens would not have been faster
        if not is_held_up:
            self.floor.add(num_tokens, seconds)
        limit_s = self.limit_s
        if seconds > limit_s:
            if self.decode_s and not is_held_up:
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
            self._drain_steps = 0
            return self._most
        fitting = self._fitting
        if 0.0 < self.limit_s == FLOORS * self.floor.seconds:  # lengths that differ tell whether it still holds
            self._is_shorter = not self._is_shorter
            fitting *= _SHORTER if self._is_shorter else 1.0
        share = -(-num_waiting // DRAIN_STEPS)
        if share > self._drain_len or not self._drain_steps:
            self._drain_len, self._drain_steps = share, DRAIN_STEPS
        self._drain_steps -= 1
        wanted = max(int(fitting), self._drain_len)
        if num_waiting <= wanted:  # no queue is left for the next step
            self._drain_steps = 0
        self.last_len = max(min(MIN_LEN, self._most), min(wanted, self._most - num_decode_rows))
        return self.last_len


class Floor:
    """What a step with decode rows and the shortest chunk takes: a line through the newest steps, at no tokens."""

    def __init__(self) -> None:
        self.seconds = 0.0  # 0: not known
        self._count = 0
        self._tokens, self._mean_s = 0.0, 0.0  # means
        self._variance, self._covariance = 0.0, 0.0
        self._per_token_s = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        """Such a step took so long. What a token takes is learned where lengths differ, and stays where they do not."""
        tokens = num_tokens - self._tokens
        if self._count >= _FEW:  # one that was held up says little
            seconds = min(seconds, 2.0 * (self._mean_s + max(self._per_token_s * tokens, 0.0)))
        self._count += 1
        weight = max(WEIGHT, 1.0 / self._count)
        more_s = seconds - self._mean_s
        self._tokens += weight * tokens
        self._mean_s += weight * more_s
        self._variance = (1.0 - weight) * (self._variance + weight * tokens * tokens)
        self._covariance = (1.0 - weight) * (self._covariance + weight * tokens * more_s)
        if self._count >= _FEW and self._variance > (_SPREAD * self._tokens) ** 2:
            self._per_token_s = self._covariance / self._variance
        if self._per_token_s > 0.0:
            self.seconds = min(max(self._mean_s - self._per_token_s * self._tokens, 0.0), seconds)


def _mean(before: float, newest: float) -> float:
    return newest if not before else before + WEIGHT * (newest - before)
