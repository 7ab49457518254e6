"""Decides how many prompt tokens the next step computes. Pure.

If no sequence decodes, a step takes as many tokens as it may. If sequences decode, each of them waits for the chunk, so
the gap between two of its tokens grows by the chunk's time. So a step with both has a time limit, the largest of three:
- About `DECODE_STEPS` times a decode-only step.
- A little more than the host needs to launch its kernels: up to there the device would wait for the host anyway, and
  prompt tokens cost nothing.
- `FLOORS` times a step with the shortest chunk, for example in an MoE model, where any chunk reads nearly all experts:
  shorter chunks would read the same weights more often.

The length that fits is learned: each step makes it a little longer or shorter. A long queue of prompts gets larger
chunks, so that all waiting prompts are computed within `DRAIN_STEPS` steps, because then prompt throughput decides when
sequences start. With the decode rows, a very long one gets at most `LARGEST` of a step's tokens: GEMMs of more rows are
hardly faster a row, and CUDA graphs of steps with chunks have no more (`engine/graphs/piecewise.py`).
"""

from typing import Final

FIRST_LEN: Final = 32  # used before anything is known
MIN_LEN: Final = 16
DECODE_STEPS: Final = 2.25  # time limit of a step with chunks, in decode-only steps
LAUNCHES: Final = 1.1  # time limit, in times the host's launch takes
FLOORS: Final = 1.5  # time limit, in steps with the shortest chunk
DRAIN_STEPS: Final = 40
LARGEST: Final = 0.5  # of a step's tokens, that a queue gets together with decode rows
WEIGHT: Final = 0.1  # of the newest step in a mean
FORGET: Final = 1.02  # growth per launch of the remembered fastest launch time
_SHRINK: Final = 0.5  # smallest factor by which one step changes what fits
_GROW: Final = 1.25
_FULL: Final = 0.9
_FEW: Final = 4  # minimum steps for fitting a line
_SHORTER: Final = 0.75
_SPREAD: Final = 0.1  # spread of lengths, relative to their mean, too small for a line


class ChunkBudget:
    """The chunk budget of one engine.

    Args:
        max_num_batched_tokens: maximum tokens of a step, including decode rows.
    """

    def __init__(self, max_num_batched_tokens: int) -> None:
        assert max_num_batched_tokens > 0
        self.last_len = 0  # of the last step that also had decode rows
        self.decode_s = 0.0  # mean time of a decode-only step; 0: not known
        # The host's time to launch a step with chunks and decode rows, when nothing else delays it: long launches must
        # not make chunks longer, because longer chunks make launches longer.
        self.launch_s = 0.0
        self.floor = Floor()
        self._most = max_num_batched_tokens
        self._fitting = float(FIRST_LEN)
        self._is_shorter = False
        self._drain_len = 0  # of each of the next `_drain_steps`, to drain a queue
        self._drain_steps = 0

    @property
    def limit_s(self) -> float:
        """Time limit of a step with chunks and decode rows."""
        return max(DECODE_STEPS * self.decode_s, LAUNCHES * self.launch_s, FLOORS * self.floor.seconds)

    def full_len(self, num_decode_rows: int) -> int:
        """Most tokens that a step's chunks have beside these decode rows, if any number of prompts wait."""
        if not num_decode_rows:
            return self._most
        return self._at_most(max(int(self._fitting), self._largest(num_decode_rows)), num_decode_rows)

    def _largest(self, num_decode_rows: int) -> int:
        return max(int(LARGEST * self._most) - num_decode_rows, MIN_LEN)

    def _at_most(self, wanted: int, num_decode_rows: int) -> int:
        return max(min(MIN_LEN, self._most), min(wanted, self._most - num_decode_rows))

    def decoded(self, seconds: float) -> None:
        """Record the time of a decode-only step."""
        self.decode_s = _mean(self.decode_s, seconds)

    def mixed(self, num_tokens: int, seconds: float, launch_s: float) -> None:
        """Record the time of a step with decode rows and `num_tokens` chunk tokens, and its launch time on the host."""
        self.launch_s = min(launch_s, FORGET * self.launch_s) if self.launch_s else launch_s
        if seconds <= 0.0:
            return
        is_held_up = seconds <= LAUNCHES * launch_s  # by the host: fewer tokens would not have been faster
        if not is_held_up:
            self.floor.add(num_tokens, seconds)
        limit_s = self.limit_s
        if seconds > limit_s:
            if self.decode_s and not is_held_up:
                fits = num_tokens * limit_s / seconds
                self._fitting = min(self._fitting, max(fits, _SHRINK * self._fitting, float(MIN_LEN)))
        elif num_tokens >= _FULL * self._fitting:  # a fast short step says nothing about longer ones
            fits = num_tokens * limit_s / seconds
            self._fitting = min(max(fits, self._fitting), _GROW * self._fitting, float(self._most))

    def length(self, num_decode_rows: int, num_waiting: int) -> int:
        """Number of tokens of the next step's chunks.

        Args:
            num_decode_rows: decode rows of the step.
            num_waiting: prompt tokens that wait to be computed.
        """
        if not num_decode_rows:
            self._drain_steps = 0
            return self._most
        fitting = self._fitting
        if 0.0 < self.limit_s == FLOORS * self.floor.seconds:  # alternate lengths, to check that the floor still holds
            self._is_shorter = not self._is_shorter
            fitting *= _SHORTER if self._is_shorter else 1.0
        largest = self._largest(num_decode_rows)
        num_steps = max(DRAIN_STEPS, -(-num_waiting // largest))
        share = -(-num_waiting // num_steps)
        if share > self._drain_len or num_steps < self._drain_steps or not self._drain_steps:
            self._drain_len, self._drain_steps = share, num_steps
        elif self._drain_len > largest:  # decode rows have come since
            self._drain_len, self._drain_steps = largest, max(self._drain_steps, -(-num_waiting // largest))
        self._drain_steps -= 1
        needed = self._drain_len
        if num_waiting < needed * self._drain_steps:  # the steps after this one would take more: some went away
            needed = -(-num_waiting // self._drain_steps)
        wanted = max(int(fitting), needed)
        if num_waiting <= wanted:  # the queue is drained
            self._drain_steps = 0
        self.last_len = self._at_most(wanted, num_decode_rows)
        return self.last_len


class Floor:
    """Time of a step with decode rows and the shortest chunk: a line through the newest steps, at zero tokens."""

    def __init__(self) -> None:
        self.seconds = 0.0  # 0: not known
        self._count = 0
        self._tokens, self._mean_s = 0.0, 0.0  # means
        self._variance, self._covariance = 0.0, 0.0
        self._per_token_s = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        """Record the time of such a step. The time per token is learned only while lengths differ."""
        tokens = num_tokens - self._tokens
        if self._count >= _FEW:  # an outlier says little
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
