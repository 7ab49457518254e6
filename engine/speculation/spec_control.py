"""Chooses how the next step drafts, and how many drafts it makes, by measurement: `auto` for k and for the method.

The controller models step times (`StepTimeModel`: per batch size and number of drafts) and acceptance
(`AcceptanceModel`: per draft position, given that those before it were accepted), each with its uncertainty. It returns
the k with the most expected tokens per second. It occasionally tries another k; the time that such trials are expected
to lose is budgeted to a small share of all time. It reads no clock, draws no random number and touches no tensor: the
same observations give the same answers.

`E_k = 1 + c_1 + c_1 c_2 + ...` tokens per sequence and step; `t_k` seconds; rate `E_k / t_k`. Another k is used if its
rate looks better by a margin. A trial is of a k that may plausibly be better than the one in use, measured in standard
deviations: of those, the one that has waited longest relative to its cost, and only within the budget.

Legend: k drafts of a step, j draft position from 0, c_j acceptance of position j where it was tested.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

LEAST_VAR = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceOptions:
    """Constants of the acceptance model.

    Attributes:
        mean: prior mean of every position.
        var: prior variance of every position.
        likeness: correlation of what moves two adjacent positions.
        drift: growth of the variance per step.
        doubt: additional growth for a position that was not tested.
        shared_doubt: additional growth of what moves all untested positions together.
        most_var: upper bound of the variance, at which nothing is known.
        lean: mean error, in standard deviations, that counts as a jump.
    """

    mean: float = 0.6
    var: float = 0.08
    likeness: float = 0.8
    drift: float = 4e-6
    doubt: float = 1e-4
    shared_doubt: float = 1e-4
    most_var: float = 0.12
    lean: float = 3.0


class AcceptanceModel:
    """Estimates the acceptance of up to `max_drafts` drafts."""

    def __init__(self, max_drafts: int, options: AcceptanceOptions | None = None) -> None:
        self._options = options = options or AcceptanceOptions()
        places = range(max_drafts)
        self._likeness = [[options.likeness ** abs(i - j) for j in places] for i in places]
        self.mean = [options.mean for _ in places]
        self.var = [[options.var * value for value in row] for row in self._likeness]
        self._error = [0.0 for _ in places]  # recent mean of errors, in standard deviations

    def observe(self, tested: Sequence[int], accepted: Sequence[int]) -> bool:
        """Learn from a step; returns whether some acceptance rate seems to have jumped.

        Args:
            tested: per position, number of sequences in which it was proposed and all before it were accepted.
            accepted: of those, the number in which it was accepted.
        """
        num_tested = 0
        while num_tested < min(len(tested), len(self.mean)) and tested[num_tested] > 0:
            num_tested += 1
        self._doubt(num_tested)
        jumped = False
        for place in range(num_tested):
            jumped |= self._learn(place, tested[place], accepted[place])
        return jumped

    def _doubt(self, num_tested: int) -> None:
        options = self._options
        size = len(self.mean)
        doubted = [place for place in range(num_tested, size) if self.var[place][place] < options.most_var]
        for i, row in enumerate(self.var):
            likeness = self._likeness[i]
            for j in range(size):
                row[j] += options.drift * likeness[j]
        for i in doubted:
            row, likeness = self.var[i], self._likeness[i]
            row[i] += options.doubt
            for j in doubted:
                row[j] += options.shared_doubt * likeness[j]

    def _learn(self, place: int, num_tested: int, num_accepted: int) -> bool:
        options, mean = self._options, self.mean[place]
        spread = max(mean * (1.0 - mean), 0.03)
        error = num_accepted / num_tested - mean
        # A step counts in the detector by the number of its tests, but at most as 8.
        weight = math.sqrt(min(num_tested, 8) / 32.0)
        scaled = error * math.sqrt(num_tested / spread)
        self._error[place] += weight * (max(-4.0, min(4.0, scaled)) - self._error[place] * weight)
        jumped = abs(self._error[place]) > options.lean
        if jumped:
            added = min(error * error + 0.01, options.most_var)
            for row, likeness in zip(self.var, self._likeness, strict=True):
                for j, value in enumerate(likeness):
                    row[j] += added * value
            self._error[place] = 0.0
        column = [row[place] for row in self.var]
        gain = 1.0 / (column[place] + spread / num_tested)
        for i, value in enumerate(column):
            self.mean[i] = max(0.001, min(0.999, self.mean[i] + gain * value * error))
            row = self.var[i]
            for j, other in enumerate(column):
                row[j] -= gain * value * other
            row[i] = max(row[i], LEAST_VAR)
        return jumped


Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeOptions:
    """Constants of the step-time model; variances are of logarithms.

    Attributes:
        slope: prior growth of the logarithm with each draft.
        slope_var: prior variance of that growth from one draft to the next.
        own_var: additional prior variance of each time by itself.
        level_drift: growth per step of the variance that all times share.
        walk_doubt: growth of the variance of ratios between adjacent k, per step that measures neither.
        own_doubt: additional growth for each time by itself.
        local_share: the part of these doubts that belongs to each batch size alone.
        size_var: variance of a ratio between adjacent batch sizes.
        jump_share: share of a squared jump that is added as doubt to other times; the rest moves all of them.
        most_jump: upper bound of that doubt.
        strays: fraction of times that are outliers.
        stray_width: range of logarithms over which outliers spread.
        lean: mean error, in standard deviations, that counts as a jump.
        sure: single error, in standard deviations, that counts as a jump if the time was shorter than expected.
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
    """Estimates the times of steps with 0 to `max_drafts` drafts."""

    def __init__(self, max_drafts: int, options: TimeOptions | None = None) -> None:
        self._options = options or TimeOptions()
        self._num_arms = max_drafts + 1
        self._places: dict[int, int] = {}  # by batch size
        self._mean_X: Floats = np.zeros(0)
        self._var_XX: Floats = np.zeros((0, 0))
        self._doubts_AXX: list[Floats] = []  # variance that a step adds, by its number of drafts
        self._error_X: list[float] = []  # recent mean errors, in standard deviations
        self._num_outliers_X: list[int] = []  # in a row
        self.noise_var = 0.07**2

    def knows(self, size: int) -> bool:
        """Whether anything was measured at this batch size."""
        return size in self._places

    def times(self, size: int) -> tuple[list[float], list[list[float]]]:
        """Logarithms of the times at a known batch size, by number of drafts, and their covariance."""
        at = self._places[size]
        end = at + self._num_arms
        mean: list[float] = self._mean_X[at:end].tolist()
        var: list[list[float]] = self._var_XX[at:end, at:end].tolist()
        return mean, var

    def guess(self, size: int) -> list[float]:
        """Logarithms of the times at any batch size, by number of drafts: from the nearest known size, or the prior."""
        if not self._places:
            return [self._options.slope * num_drafts for num_drafts in range(self._num_arms)]
        at = self._places[size if size in self._places else self._nearest(size)]
        mean: list[float] = self._mean_X[at : at + self._num_arms].tolist()
        return mean

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
            # A single outlier says nothing; three in a row are accepted as a change.
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
        """Probability that a time with this error is not an outlier; outliers are always too long."""
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

    def _nearest(self, size: int) -> int:
        return min(self._places, key=lambda other: (abs(other - size), other))

    def _add(self, size: int, num_drafts: int, log_s: float) -> None:
        """Add a batch size: copied from the nearest known one, with added doubt; the first one from the prior."""
        options, num_arms = self._options, self._num_arms
        place = len(self._places) * num_arms
        drafts_A = np.arange(num_arms)
        ramp_AA = np.minimum.outer(drafts_A, drafts_A).astype(np.float64)
        if not self._places:
            mean_A = options.slope * drafts_A
            self._mean_X = mean_A + (log_s - mean_A[num_drafts])
            self._var_XX = 0.01 + options.slope_var * ramp_AA + options.own_var * np.eye(num_arms)
        else:
            nearest = self._nearest(size)
            at, distance = self._places[nearest], abs(nearest - size)
            old_mean_A, old_XA = self._mean_X[at : at + num_arms], self._var_XX[:, at : at + num_arms]
            level_var = min(0.05 * (1 + distance), 0.5)  # the level is soon known; the ratios matter
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
    """Covariance of a random walk that starts at `arm` and goes both ways."""
    steps_A = np.abs(np.arange(num_arms) - arm).astype(np.float64)
    is_above_A = np.arange(num_arms) > arm
    same_side_AA = np.equal.outer(is_above_A, is_above_A)
    result: Floats = np.where(same_side_AA, np.minimum.outer(steps_A, steps_A), 0.0)
    return result


def _others(num_arms: int, arm: int) -> Floats:
    """The identity matrix without `arm`."""
    return np.diag((np.arange(num_arms) != arm).astype(np.float64))


MAX_TIME_S = 1e6  # a longer step means a broken clock,
MIN_TIME_S = 1e-9  # and so does a shorter one
LATE = 4  # steps after which a trial's result is no longer expected


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlOptions:
    """Constants of the controller.

    Attributes:
        margin: how much better another arm must look before it is used.
        trial_share: share of all time that trials may be expected to lose; every arm gets an equal part of it.
        first_trials: loss allowed to the first trials, in steps; granted again after a change was detected.
        grant_every: minimum number of steps between two such grants.
        plausible: an arm that looks worse by more than this many standard deviations is not tried.
        worth_trying: nor one that so many standard deviations would make better by less than this.
        least_cost: minimum charge for a trial, in steps.
        foreign_cost: minimum charge for a trial of another method than the one in use, so that few steps go to trials
            of a method that finds nothing.
        least_gain: gain over no drafts that a method's drafts must show, if the method is chosen by measurement.
        paid: number of consecutive steps of another method whose drafts must show that gain before it is used: with one
            sequence, a single draft accepted by chance says nothing.
        hope: number of standard deviations by which a trial may turn out better, when judging whether it is affordable.
        borrow: parts of the budget that one arm may use while others leave theirs.
        patience: the larger, the less a trial's cost matters, and the more how long the arm has waited.
        surprise: how much better an arm must look, when it comes into use, to indicate that something changed.
        probe_every: number of steps without drafts after which one that may not be a trial makes one draft, since it
            shows acceptance, if no time.
        times: options of the step-time models.
        acceptance: options of the acceptance models.
    """

    margin: float = 0.003
    trial_share: float = 0.005
    first_trials: float = 2.0
    grant_every: int = 400
    plausible: float = 3.5
    worth_trying: float = 0.015
    least_cost: float = 0.002
    foreign_cost: float = 1.0
    least_gain: float = 0.015
    paid: int = 2
    hope: float = 1.0
    borrow: float = 2.0
    patience: float = 0.1
    surprise: float = 0.1
    probe_every: int = 256
    times: TimeOptions = field(default_factory=TimeOptions)
    acceptance: AcceptanceOptions = field(default_factory=AcceptanceOptions)


class _Bucket:
    """State of batches of similar size: the arm in use, and when each arm was last seen and tried."""

    __slots__ = ("in_use", "seen_step", "tried_step")

    def __init__(self, in_use: int, num_arms: int) -> None:
        self.in_use = in_use
        self.seen_step = [-1] * num_arms
        self.tried_step = [-LATE] * num_arms

    def is_tried(self, arm: int, step: int) -> bool:
        """Whether a trial's result is still outstanding; after `LATE` steps it is no longer expected."""
        return self.tried_step[arm] > self.seen_step[arm] and step - self.tried_step[arm] < LATE


@dataclass(slots=True)
class _Outlook:
    """What is expected of each arm at one batch size, while one of them is in use.

    Attributes:
        tokens: expected tokens of each arm.
        log_s: logarithm of its step time.
        speed: logarithm of tokens per time.
    """

    tokens: list[float]
    log_s: list[float]
    speed: list[float]


class SpeculationControl:
    """Chooses the method and k of steps of up to `max_drafts` drafts.

    The choice is among *arms*: arm 0 makes no drafts, arm m * max_drafts + k makes k drafts by method m; so with one
    method an arm is its k. The methods share arm 0 and nothing else: each has its own acceptance and times. Across
    methods, times are compared relative to those of arm 0: if the machine becomes slower, the times of the method in
    use follow, and those of the others do not.

    Args:
        max_drafts: the largest k, 0 to 16.
        options: constants.
        num_methods: number of methods that make drafts, at least 1.
        chooses_method: whether to find out, too, if drafts pay off at all, and by which method.
        first_arm: arm in use before anything is known.
    """

    def __init__(
        self,
        max_drafts: int,
        options: ControlOptions | None = None,
        *,
        num_methods: int = 1,
        chooses_method: bool = False,
        first_arm: int = 1,
    ) -> None:
        assert 0 <= max_drafts <= 16
        assert num_methods >= 1
        self.max_drafts = max_drafts
        self.num_arms = num_methods * max_drafts + 1
        self._method_A = [max(0, arm - 1) // max(1, max_drafts) for arm in range(self.num_arms)]
        self._drafts_A = [arm - method * max_drafts for arm, method in enumerate(self._method_A)]
        assert num_methods == 1 or chooses_method
        self._chooses_method = chooses_method
        self._first_arm = min(first_arm, max_drafts)
        self._options = options = options or ControlOptions()
        self._times_M = [StepTimeModel(max_drafts, options.times) for _ in range(num_methods)]
        self._acceptance_M = [AcceptanceModel(max_drafts, options.acceptance) for _ in range(num_methods)]
        self._num_paid_M = [0] * num_methods  # steps in a row whose drafts gained something
        self._drafted_step_M = [0] * num_methods  # when it last made drafts, or was chosen to as a probe
        self._buckets: dict[int, _Bucket] = {}
        self._step = 0
        self._elapsed_s = 0.0
        self._spent_s = [0.0] * self.num_arms  # by trials of each arm
        self._allowed_s = 0.0
        self._last_grant_step = 0

    def method_of(self, arm: int) -> int:
        """The method that makes an arm's drafts; 0 for arm 0."""
        return self._method_A[arm]

    def drafts_of(self, arm: int) -> int:
        """Number of drafts of a step with this arm."""
        return self._drafts_A[arm]

    def arm_of(self, method: int, num_drafts: int) -> int:
        """The arm of a method and its k."""
        return method * self.max_drafts + num_drafts if num_drafts else 0

    def choose(
        self,
        batch_size: int,
        num_capable: Sequence[int] | None = None,
        allowed: Collection[int] | None = None,
        *,
        tries: bool = True,
    ) -> int:
        """The arm of the next step.

        Results of steps that were chosen before may still be outstanding.

        Args:
            batch_size: number of sequences.
            num_capable: for each draft j that any sequence may use, the number of sequences that may use it; None: all.
            allowed: arms to choose among, besides arm 0; None: all.
            tries: whether the step may be a trial; False if its time would say nothing. Then it is a rare probe of
                acceptance at most, with one draft where no drafts are in use.
        """
        assert batch_size >= 1
        shares = (1.0,) * self.max_drafts
        if num_capable is not None:
            shares = tuple(number / batch_size for number in num_capable[: self.max_drafts])
        if not shares:
            return 0
        arms = [
            arm
            for arm in range(self.num_arms)
            if arm == 0 or (self.drafts_of(arm) <= len(shares) and (allowed is None or arm in allowed))
        ]
        name = bucket_of(batch_size)
        return self._decide(name, self._bucket(name), shares, arms, tries=tries)

    def in_use(self, batch_size: int) -> int:
        """The arm used for steps of this batch size, apart from trials."""
        return self._bucket(bucket_of(batch_size)).in_use

    def observe(
        self, *, batch_size: int, num_drafts: int, step_s: float, tested: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Learn from a step.

        Args:
            batch_size: sequences of the step.
            num_drafts: its arm, which with one method is its k.
            step_s: how long it took; impossible values are ignored.
            tested: per draft position, number of sequences in which it was proposed and all before it were accepted.
            accepted: of those, the number in which it was accepted.
        """
        arm = num_drafts
        assert 0 <= arm < self.num_arms
        if self.max_drafts == 0:
            return
        self._step += 1
        method, jumped = self.method_of(arm), False
        if arm:
            self._drafted_step_M[method] = self._step
            has_paid = sum(accepted) > self._options.least_gain * batch_size
            self._num_paid_M[method] = self._num_paid_M[method] + 1 if has_paid else 0
        for other, acceptance in enumerate(self._acceptance_M):
            was_run = other == method and arm > 0
            jumped |= acceptance.observe(tested if was_run else (), accepted if was_run else ())
        if MIN_TIME_S < step_s < MAX_TIME_S:  # not NaN either
            name = bucket_of(batch_size)
            self._bucket(name).seen_step[arm] = self._step
            for other, times in enumerate(self._times_M):
                if arm == 0 or other == method:
                    jumped |= times.observe(name, self.drafts_of(arm), step_s)
            usual_s = self.expected_step_s(batch_size, arm)
            if self._elapsed_s == 0.0:
                self._allowed_s = self._options.first_trials * usual_s
            self._elapsed_s += min(step_s, 4.0 * usual_s)
            if jumped:
                self._grant_trials(usual_s)

    def _grant_trials(self, usual_s: float) -> None:
        """Allow new trials at once after a change, but not at every change of an unsteady load."""
        if self._step - self._last_grant_step >= self._options.grant_every:
            self._last_grant_step = self._step
            self._allowed_s += self._options.first_trials * usual_s

    def expected_tokens(self, num_drafts: int) -> float:
        """Expected tokens per sequence of a step with this arm."""
        tokens = stands = 1.0
        for rate in self._acceptance_M[self.method_of(num_drafts)].mean[: self.drafts_of(num_drafts)]:
            stands *= rate
            tokens += stands
        return tokens

    def expected_step_s(self, batch_size: int, num_drafts: int) -> float:
        """Expected seconds of a step with this arm; 0 while its method has not been measured."""
        name, times = bucket_of(batch_size), self._times_M[self.method_of(num_drafts)]
        if not times.knows(name):
            return 0.0
        mean, _ = times.times(name)
        return math.exp(min(mean[self.drafts_of(num_drafts)], 50.0))

    def _bucket(self, name: int) -> _Bucket:
        """The bucket of this number; a new one takes the arm of the nearest."""
        bucket = self._buckets.get(name)
        if bucket is None:
            in_use = self._first_arm
            if self._buckets:
                in_use = self._buckets[min(self._buckets, key=lambda other: (abs(other - name), other))].in_use
            bucket = self._buckets[name] = _Bucket(in_use, self.num_arms)
        return bucket

    def _decide(self, name: int, bucket: _Bucket, shares: tuple[float, ...], arms: list[int], *, tries: bool) -> int:
        """The arm in use, after switching it if another is better, or a trial."""
        options = self._options
        in_use = bucket.in_use
        if self.drafts_of(in_use) > len(shares):
            in_use = self.arm_of(self.method_of(in_use), len(shares))
        in_use = in_use if in_use in arms else 0
        outlook = self._outlook(name, in_use, shares)
        speed = outlook.speed
        candidates = [arm for arm in arms if self._may_be_used(in_use, arm)]
        is_timed = self._times_M[self.method_of(in_use)].knows(name)
        if not is_timed:
            # All steps of this size had chunks so far, so only acceptance is known: if drafts are rejected, fewer are
            # better; if those of probes are accepted, one is.
            candidates = [
                arm
                for arm in candidates
                if arm in (0, in_use) or self._is_part_of(arm, in_use) or (not in_use and self.drafts_of(arm) == 1)
            ]
        best = max(candidates, key=speed.__getitem__)
        if best != in_use and speed[best] > speed[in_use] + options.margin:
            if is_timed and speed[best] > speed[in_use] + options.surprise:
                self._grant_trials(math.exp(min(outlook.log_s[best], 50.0)))
            bucket.in_use = in_use = best
        if tries and is_timed:
            return self._find_trial(name, bucket, in_use, outlook, arms)
        return in_use or self._find_probe(arms)

    def _find_probe(self, arms: list[int]) -> int:
        """One draft of the method that made none for longest, if it is time for that; else arm 0."""
        if self._step - max(self._drafted_step_M) < self._options.probe_every:
            return 0
        first = [arm for arm in arms if self.drafts_of(arm) == 1]
        found = min(first, key=lambda arm: self._drafted_step_M[self.method_of(arm)], default=0)
        if found:
            self._drafted_step_M[self.method_of(found)] = self._step
        return found

    def _is_part_of(self, arm: int, other: int) -> bool:
        """Whether an arm means fewer drafts of the same method than another."""
        return self.method_of(arm) == self.method_of(other) and self.drafts_of(arm) < self.drafts_of(other)

    def _outlook(self, name: int, in_use: int, shares: tuple[float, ...]) -> _Outlook:
        mine = self.method_of(in_use)
        mean = self._times_M[mine].guess(name)
        # More drafts never take less time, and the arm in use is known best.
        known = mean[self.drafts_of(in_use)]
        none_s = min(mean[0], known)
        tokens, log_s = [1.0], [none_s]
        for method, times in enumerate(self._times_M):
            if method == mine:
                own = [min(log, known) if k < self.drafts_of(in_use) else max(log, known) for k, log in enumerate(mean)]
            elif times.knows(name):
                other, _ = times.times(name)
                own = [none_s + max(0.0, log - other[0]) for log in other]
            else:  # the prior
                own = [none_s + self._options.times.slope * k for k in range(len(mean))]
            log_s += own[1:]
            stands, count = 1.0, 1.0
            for place, rate in enumerate(self._acceptance_M[method].mean):
                stands *= rate
                count += (shares[place] if place < len(shares) else 0.0) * stands
                tokens.append(count)
        speed = [math.log(count) - log for count, log in zip(tokens, log_s, strict=True)]
        if self._chooses_method:
            speed[0] += self._options.least_gain
        return _Outlook(tokens, log_s, speed)

    def _find_trial(self, name: int, bucket: _Bucket, in_use: int, outlook: _Outlook, arms: list[int]) -> int:
        options, step = self._options, self._step
        log_s, speed = outlook.log_s, outlook.speed
        # Each arm has its own part: cheap trials of an equally good arm would use up a common budget for ever.
        budget_s = self._allowed_s + options.trial_share * self._elapsed_s
        part_s = budget_s / (self.num_arms - 1)
        whole_left_s = budget_s - sum(self._spent_s)
        var_MAA = [times.times(name)[1] if times.knows(name) else None for times in self._times_M]
        # Measure the arm in use before trying others.
        found, found_score, found_cost_s = in_use, 0.0, 0.0
        for arm in arms:
            age = step - bucket.seen_step[arm]
            if arm == in_use or bucket.seen_step[arm] >= bucket.seen_step[in_use] or bucket.is_tried(arm, step):
                continue
            gap = max(0.0, 1.0 - math.exp(speed[arm] - speed[in_use]))
            least_cost = options.foreign_cost if self._is_foreign(in_use, arm) else options.least_cost
            arm_s = math.exp(min(log_s[arm], 50.0))
            cost_s = max(gap, least_cost) * arm_s
            spent_s = self._spent_s[arm]
            left_s = max(part_s - spent_s, min(options.borrow * part_s - spent_s, whole_left_s))
            score = age / (gap + options.patience)
            if left_s <= 0.0 or score <= found_score:
                continue
            spread = math.sqrt(max(self._var(var_MAA, in_use, arm, outlook.tokens), 0.0))
            hoped = max(0.0, 1.0 - math.exp(speed[arm] + options.hope * spread - speed[in_use]))
            if hoped * arm_s > left_s:
                continue
            if options.plausible * spread - gap > options.worth_trying:
                found, found_score, found_cost_s = arm, score, cost_s
        if found != in_use:
            self._spent_s[found] += found_cost_s
            bucket.tried_step[found] = step
        return found

    def _is_foreign(self, in_use: int, arm: int) -> bool:
        """Whether an arm belongs to a method not in use, if methods are chosen by measurement."""
        is_used = in_use > 0 and self.method_of(in_use) == self.method_of(arm)
        return self._chooses_method and arm > 0 and not is_used

    def _may_be_used(self, in_use: int, arm: int) -> bool:
        return not self._is_foreign(in_use, arm) or self._num_paid_M[self.method_of(arm)] >= self._options.paid

    def _var(self, var_MAA: Sequence[list[list[float]] | None], in_use: int, arm: int, tokens: list[float]) -> float:
        """Variance of the log speed ratio of two arms; `var_MAA` is the covariance of each method's times."""
        total = 0.0
        for method, (var, acceptance) in enumerate(zip(var_MAA, self._acceptance_M, strict=True)):
            # Between two arms of a method, or between an arm and arm 0, which all methods share.
            ours, theirs = (item if item == 0 or self.method_of(item) == method else 0 for item in (arm, in_use))
            if ours == theirs:
                continue
            a, b = self.drafts_of(ours), self.drafts_of(theirs)
            if var is not None:
                total += var[a][a] + var[b][b] - 2.0 * var[a][b]
            else:
                total += self._options.times.slope_var * abs(a - b) + 2.0 * self._options.times.own_var
            places = range(self.max_drafts)
            slope = [
                self._slope(acceptance, tokens, ours, place) - self._slope(acceptance, tokens, theirs, place)
                for place in places
            ]
            for one, row in zip(slope, acceptance.var, strict=True):
                if one:
                    total += one * sum([value * other for value, other in zip(row, slope, strict=True)])
        return total

    def _slope(self, acceptance: AcceptanceModel, tokens: list[float], arm: int, place: int) -> float:
        """Relative change of an arm's tokens per change of one acceptance rate of its method."""
        if place >= self.drafts_of(arm):
            return 0.0
        before = tokens[arm - self.drafts_of(arm) + place] if place else 1.0
        return (tokens[arm] - before) / (acceptance.mean[place] * tokens[arm])


def bucket_of(batch_size: int) -> int:
    """Bucket number of a batch size: 1, 2, 3, 4, 5-6, 7-8, 9-12, 13-16, ..., two for each doubling."""
    if batch_size <= 2:
        return 2 * (batch_size - 1)
    power = (batch_size - 1).bit_length()  # 2^(power-1) < batch_size <= 2^power
    upper_half = batch_size > 3 << (power - 2)
    return 2 * power - (0 if upper_half else 1)
