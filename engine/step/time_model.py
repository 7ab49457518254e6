"""What steps take, learnt from measured ones: by size of batch and number of drafts, with how sure that is.

One Kalman filter over the logarithms of all times. What it knows beforehand: more drafts take somewhat longer, times of
neighbouring numbers of drafts and of sizes of batch are alike, and a drift that is seen in one time is mostly
everybody's (the machine, the context length), so that it makes no other k look fast. What is not observed becomes
doubtful with every step. A time that cannot be believed is taken for a stray one, until three in a row say the same;
then, and when errors lean to one side, something has jumped, and all is doubted.

Legend: K the largest number of drafts, A = K + 1 of them, N sizes of batch that were seen, X = N * A times.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeOptions:
    """Constants; variances are of logarithms.

    Attributes:
        slope: of the logarithm with each draft, before anything is known,
        slope_var: and how much that may vary from one draft to the next,
        own_var: and what any time may differ beside.
        level_drift: growth of the variance of what all times share, per step.
        walk_doubt: growth of the variance of ratios between neighbours among the k, per step that shows neither,
        own_doubt: and of each time beside that.
        local_share: of these doubts, what belongs to each size of batch alone.
        size_var: variance of a ratio between sizes of batch next to each other.
        jump_share: of the square of a jump, what other times are doubted by; the rest moves all of them.
        most_jump: but by no more than this.
        strays: how many times are stray,
        stray_width: and over how wide a range of logarithms.
        lean: mean error, in standard deviations, that is taken for a jump;
        sure: or one, if the time was shorter than it should be.
    """

    slope: float = 0.13
    slope_var: float = 0.12
    own_var: float = 0.02
    level_drift: float = 3e-5
    walk_doubt: float = 1e-5
    own_doubt: float = 1e-5
    local_share: float = 0.1
    size_var: float = 0.006
    jump_share: float = 0.4
    most_jump: float = 1.0
    strays: float = 0.01
    stray_width: float = 2.0
    lean: float = 1.0
    sure: float = 5.0


class StepTimeModel:
    """Times of steps with 0 to `max_drafts` drafts."""

    def __init__(self, max_drafts: int, options: TimeOptions | None = None) -> None:
        self._options = options or TimeOptions()
        self._num_arms = max_drafts + 1
        self._places: dict[int, int] = {}  # of each size of batch
        self._mean_X: Floats = np.zeros(0)
        self._var_XX: Floats = np.zeros((0, 0))
        self._doubts_AXX: list[Floats] = []  # what a step adds, by the number of drafts it had
        self._error_X: list[float] = []  # recent mean errors, in standard deviations
        self._num_outliers_X: list[int] = []  # in a row
        self.noise_var = 0.07**2

    def knows(self, size: int) -> bool:
        """Whether anything was measured at this size of batch."""
        return size in self._places

    def times(self, size: int) -> tuple[list[float], list[list[float]]]:
        """Logarithms of the times at a size that is known, by number of drafts, and their covariance."""
        at = self._places[size]
        end = at + self._num_arms
        mean: list[float] = self._mean_X[at:end].tolist()
        var: list[list[float]] = self._var_XX[at:end, at:end].tolist()
        return mean, var

    def observe(self, size: int, num_drafts: int, step_s: float) -> bool:
        """Learn from a step; returns whether something seems to have jumped."""
        options, log_s = self._options, math.log(step_s)
        if size not in self._places:
            self._add(size, num_drafts, log_s)
        self._var_XX += self._doubts_AXX[num_drafts]
        at = self._places[size] + num_drafts
        var = float(self._var_XX[at, at])
        error = log_s - float(self._mean_X[at])
        spread = math.sqrt(var + self.noise_var)
        jumped = False
        trust = self._trust(error, spread)
        if trust < 0.5:
            # One stray step says nothing; three in a row are the new truth.
            self._num_outliers_X[at] += 1
            jumped = self._num_outliers_X[at] >= 3
        else:
            self._num_outliers_X[at] = 0
            bounded = min(error * error, 9.0 * self.noise_var)
            if var < 4.0 * self.noise_var:
                self.noise_var = min(max(self.noise_var + 0.02 * (bounded - self.noise_var), 1e-6), 0.09)
            scaled = max(-4.0, min(4.0, error / spread))
            self._error_X[at] += 0.125 * (scaled - self._error_X[at])
            jumped = abs(self._error_X[at]) > options.lean or error < -options.sure * spread
        if jumped:
            self._jump(num_drafts, error)
            self._error_X[at], self._num_outliers_X[at], trust = 0.0, 0, 1.0
            var = float(self._var_XX[at, at])
        column_X = self._var_XX[:, at].copy()
        weight = trust / (var + self.noise_var)
        self._mean_X += (weight * error) * column_X
        self._var_XX -= np.outer(weight * column_X, column_X)
        return jumped

    def _trust(self, error: float, spread: float) -> float:
        """Chance that a time with this error is none of the stray ones, which are all too long."""
        options = self._options
        scaled = error / spread
        if scaled < 2.0:
            return 1.0
        usual = (1.0 - options.strays) * math.exp(-0.5 * min(scaled * scaled, 1000.0)) / (spread * 2.5066)
        return usual / (usual + options.strays / options.stray_width)

    def _jump(self, num_drafts: int, error: float) -> None:
        square, share = error * error, self._options.jump_share
        num_sizes = len(self._places)
        self._var_XX += square
        apart_AA = np.minimum(_apart(self._num_arms, num_drafts), 1.0) * 0.5 + _others(self._num_arms, num_drafts) * 0.5
        self._var_XX += np.tile(min(square * share, self._options.most_jump) * apart_AA, (num_sizes, num_sizes))

    def _add(self, size: int, num_drafts: int, log_s: float) -> None:
        """A new size of batch: like the nearest that is known, with doubt; the first by what is known beforehand."""
        options, num_arms = self._options, self._num_arms
        place = len(self._places) * num_arms
        drafts_A = np.arange(num_arms)
        ramp_AA = np.minimum.outer(drafts_A, drafts_A).astype(np.float64)
        if not self._places:
            mean_A = options.slope * drafts_A
            self._mean_X = mean_A + (log_s - mean_A[num_drafts])
            self._var_XX = 0.01 + options.slope_var * ramp_AA + options.own_var * np.eye(num_arms)
        else:
            nearest = min(self._places, key=lambda other: (abs(other - size), other))
            at, distance = self._places[nearest], abs(nearest - size)
            old_mean_A, old_XA = self._mean_X[at : at + num_arms], self._var_XX[:, at : at + num_arms]
            level_var = min(0.05 * (1 + distance), 0.5)  # how long it takes is soon known; the ratios are what matters
            doubt_AA = level_var + min(distance, 8) * options.size_var * (0.5 * ramp_AA + 0.5 * np.eye(num_arms))
            var_XX = np.zeros((place + num_arms, place + num_arms))
            var_XX[:place, :place] = self._var_XX
            var_XX[:place, place:] = old_XA
            var_XX[place:, :place] = old_XA.T
            var_XX[place:, place:] = old_XA[at : at + num_arms] + doubt_AA
            self._mean_X = np.concatenate([self._mean_X, old_mean_A])
            self._var_XX = var_XX
        self._places[size] = place
        self._error_X += [0.0] * num_arms
        self._num_outliers_X += [0] * num_arms
        num_sizes = len(self._places)
        sizes_NN = (1.0 - options.local_share) * np.ones((num_sizes, num_sizes)) + options.local_share * np.eye(
            num_sizes
        )
        self._doubts_AXX = []
        for arm in range(num_arms):
            doubt_AA = options.walk_doubt * _apart(num_arms, arm) + options.own_doubt * _others(num_arms, arm)
            doubts_XX: Floats = (np.kron(sizes_NN, doubt_AA) + options.level_drift).astype(np.float64)
            self._doubts_AXX.append(doubts_XX)


def _apart(num_arms: int, arm: int) -> Floats:
    """Covariance of a walk that starts at `arm` and goes both ways."""
    steps_A = np.abs(np.arange(num_arms) - arm).astype(np.float64)
    is_above_A = np.arange(num_arms) > arm
    same_side_AA = np.equal.outer(is_above_A, is_above_A)
    result: Floats = np.where(same_side_AA, np.minimum.outer(steps_A, steps_A), 0.0)
    return result


def _others(num_arms: int, arm: int) -> Floats:
    """The identity without `arm`."""
    return np.diag((np.arange(num_arms) != arm).astype(np.float64))
