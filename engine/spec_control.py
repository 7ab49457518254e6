"""How many drafts the next step makes, chosen by measurement: what `--mtp auto` is.

The controller knows step times (of this batch size, for each k) and acceptance (of each draft position, given that
those before it stood) and answers the k with the most expected tokens per second. It tries other k now and then: the
time that trials are expected to lose is a budget, a small share of all time. It reads no clock, draws no random number
and touches no tensor: equal observations give equal answers.

Model. `E_k = 1 + c_1 + c_1 c_2 + ...` tokens per sequence and step; `t_k` seconds; rate `E_k / t_k`. Each `c_j` and
`t_k` is a scalar Kalman filter whose variance grows while it is not observed, and at once when what is observed moves
away from it. Times are relative to their batch bucket's common scale, which the k in use moves: a machine that gets
slower does not make every other k look fast. A trial is of the k that is most plausibly better than the one in use, in
standard deviations, and only within the budget.

Legend: k drafts of a step, j draft position from 0, c_j acceptance of position j where it was tested.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

MAX_TIME_S = 1e6  # a step longer than this is a broken clock
MIN_VAR = 1e-12
LATE = 4  # steps after which a trial's result is not waited for any more
GUESSED_SLOPE = 0.15  # of step time per draft, before anything is known


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlOptions:
    """Constants of the controller; variances are of relative values.

    Attributes:
        margin: how much better another k must look before it is used.
        trial_share: share of all time that trials are expected to lose, all k together.
        first_trials: loss allowed to the first trials, in steps; half of it again after a change was seen.
        grant_every: steps between two such allowances.
        plausible: a k that is worse by this many standard deviations is not tried,
        worth_trying: nor one that so many of them would make better by less than this.
        least_cost: what a trial is charged at least, in steps.
        rate_drift: growth of an acceptance's variance per step, where it is observed.
        rate_doubt: the same where it is not.
        time_drift: growth of a step time's variance per step, where it is observed.
        time_doubt: the same where it is not.
        drift_limit: what moves faster than this per step is one k's own time, not everybody's.
        jump_doubt: of the square of a jump, what is added to the variance of every other k.
        alarm: mean error of an acceptance, in standard deviations, that is taken for a jump.
        reach: buckets on either side that hear of a trial.
        neighbour_var: variance of a ratio of times between two buckets next to each other.
        decide_every: steps between two decisions, while the batch stays alike.
    """

    margin: float = 0.01
    trial_share: float = 0.005
    first_trials: float = 4.0
    plausible: float = 2.5
    rate_drift: float = 4e-6
    rate_doubt: float = 4e-4
    time_drift: float = 1e-6
    time_doubt: float = 6e-5
    decide_every: int = 2
    least_cost: float = 0.002
    drift_limit: float = 0.0005
    jump_doubt: float = 0.25
    worth_trying: float = 0.015
    reach: int = 3
    neighbour_var: float = 0.003
    grant_every: int = 400
    alarm: float = 3.0


class _Rate:
    """Acceptance of one draft position, given that those before it stood."""

    __slots__ = ("error", "mean", "step", "var")

    def __init__(self, mean: float) -> None:
        self.mean = mean
        self.var = 0.08
        self.step = 0
        self.error = 0.0  # recent mean of what was observed less what was expected, in standard deviations

    def var_at(self, step: int, options: ControlOptions) -> float:
        """Variance now: doubt grows with the time since it was last observed."""
        age = step - self.step
        return self.var + (options.rate_doubt * age if age > 1 else 0.0)

    def observe(self, num_tested: int, num_accepted: int, step: int, options: ControlOptions) -> bool:
        """Learn from a step; returns whether it looks as if the rate has jumped."""
        var = self.var_at(step, options) + options.rate_drift
        self.step = step
        spread = max(self.mean * (1.0 - self.mean), 0.03)
        error = num_accepted / num_tested - self.mean
        gain = var / (var + spread / num_tested)
        # A step weighs in the detector by what it saw, at most as 8 trials do.
        weight = min(num_tested, 8) / 32.0
        scaled = error * math.sqrt(num_tested / spread)
        self.error += math.sqrt(weight) * (max(-4.0, min(4.0, scaled)) - self.error * math.sqrt(weight))
        jumped = abs(self.error) > options.alarm
        if jumped:
            var += error * error + 0.01
            gain = var / (var + spread / num_tested)
            self.error = 0.0
        self.mean = max(0.001, min(0.999, self.mean + gain * error))
        self.var = max(var * (1.0 - gain), MIN_VAR)
        return jumped


class _Arm:
    """Step time of one k at one bucket of batch sizes, relative to the bucket's scale."""

    __slots__ = ("error", "is_guess", "num_outliers", "num_seen", "relative", "step", "tried_step", "var")

    def __init__(self, relative: float, var: float, step: int, *, is_guess: bool) -> None:
        self.relative = relative
        self.is_guess = is_guess  # nobody has measured it at any batch size
        self.var = var
        self.step = step
        self.error = 0.0
        self.num_outliers = 0
        self.num_seen = 0
        self.tried_step = -LATE

    def is_tried(self, step: int) -> bool:
        """Whether a trial's result is still to come; one that has not come for long never will."""
        return self.tried_step > self.step and step - self.tried_step < LATE


class _Bucket:
    """What is known of batches of about one size."""

    __slots__ = ("arms", "in_use", "name", "scale_s")

    def __init__(self, name: int, arms: list[_Arm], scale_s: float, in_use: int) -> None:
        self.name = name
        self.arms = arms
        self.scale_s = scale_s  # 0: nothing was measured here yet
        self.in_use = in_use


class SpeculationControl:
    """Chooses k for steps of up to `max_drafts` drafts.

    Args:
        max_drafts: the largest k, 0 to 16.
        options: constants.
    """

    def __init__(self, max_drafts: int, options: ControlOptions | None = None) -> None:
        assert 0 <= max_drafts <= 16
        self.max_drafts = max_drafts
        self._options = options or ControlOptions()
        self._rates = [_Rate(0.6) for _ in range(max_drafts)]
        self._buckets: dict[int, _Bucket] = {}
        self._step = 0
        self._noise_var = 0.05**2
        self._elapsed_s = 0.0
        self._spent_s = [0.0] * (max_drafts + 1)  # by trials of each k
        self._allowed_s = 0.0
        self._last_grant_step = 0
        self._last: tuple[int, tuple[float, ...]] = (-1, ())  # bucket and shares of the last decision
        self._kept = 0  # its k, for so many steps more:
        self._num_kept = 0
        self.num_trials = 0
        self.num_switches = 0

    def choose(self, batch_size: int, num_capable: Sequence[int] | None = None) -> int:
        """The k of the next step.

        Results of steps that were chosen before may still be outstanding.

        Args:
            batch_size: its sequences.
            num_capable: of those, the ones that may use draft j, for each j that any of them may; all, if None.
        """
        assert batch_size >= 1
        shares = (1.0,) * self.max_drafts
        if num_capable is not None:
            shares = tuple(number / batch_size for number in num_capable[: self.max_drafts])
        if not shares:
            return 0
        name = bucket_of(batch_size)
        if self._last == (name, shares) and self._num_kept > 0:
            self._num_kept -= 1
            return self._kept
        bucket = self._bucket(name)
        k, in_use = self._decide(bucket, shares)
        self._last, self._kept = (name, shares), in_use
        self._num_kept = self._options.decide_every - 1 if k == in_use else 0
        return k

    def observe(
        self, *, batch_size: int, num_drafts: int, step_s: float, tested: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Learn from a step.

        Args:
            batch_size: sequences of the step.
            num_drafts: its k.
            step_s: how long it took; a value that cannot be is ignored.
            tested: of each draft position, sequences in which it was proposed and all before it stood.
            accepted: of those, where it stood.
        """
        assert 0 <= num_drafts <= self.max_drafts
        self._step += 1
        for rate, num_tested, num_accepted in zip(self._rates, tested, accepted, strict=False):
            if num_tested > 0 and rate.observe(num_tested, num_accepted, self._step, self._options):
                self._grant_trials(step_s)
        if 0.0 < step_s < MAX_TIME_S:  # not NaN either
            self._observe_time(self._bucket(bucket_of(batch_size)), num_drafts, step_s)

    def expected_tokens(self, num_drafts: int) -> float:
        """Tokens that a step with this k is expected to emit per sequence."""
        tokens = stands = 1.0
        for rate in self._rates[:num_drafts]:
            stands *= rate.mean
            tokens += stands
        return tokens

    def expected_step_s(self, batch_size: int, num_drafts: int) -> float:
        """Seconds that a step is expected to take; 0 where nothing is known yet."""
        bucket = self._bucket(bucket_of(batch_size))
        return bucket.scale_s * bucket.arms[num_drafts].relative

    # Times.

    def _observe_time(self, bucket: _Bucket, k: int, step_s: float) -> None:
        options = self._options
        arm = bucket.arms[k]
        if bucket.scale_s <= 0.0:
            bucket.scale_s = step_s / arm.relative
            if self._elapsed_s == 0.0:
                self._allowed_s = options.first_trials * step_s
        expected_s = bucket.scale_s * arm.relative
        noise_var = self._noise_var
        jumped = False
        error = step_s / expected_s - 1.0
        self._elapsed_s += min(step_s, 4.0 * expected_s)
        age = self._step - arm.step
        arm.step = self._step
        arm.num_seen += 1
        var = arm.var + (options.time_doubt * age if age > 1 else options.time_drift)
        spread = math.sqrt(noise_var + var)
        if abs(error) > 6.0 * spread:
            # One stray step says nothing; three in a row are the new truth.
            arm.num_outliers += 1
            if arm.num_outliers < 3:
                return
            jumped = True
        else:
            self._noise_var += 0.02 * (min(error * error, 9.0 * noise_var) - noise_var)
            self._noise_var = min(max(self._noise_var, 1e-6), 0.09)
            scaled = error / spread
            arm.error += 0.125 * (max(-4.0, min(4.0, scaled)) - arm.error)
            jumped = abs(arm.error) > 1.0  # four times the deviation of such a mean
        arm.num_outliers = 0
        if jumped:
            var += error * error
            arm.error = 0.0
            self._doubt_others(bucket, arm, error)
            self._grant_trials(step_s)
        gain = var / (var + noise_var)
        factor = max(0.05, 1.0 + gain * error)
        arm.var = max(var * (1.0 - gain), MIN_VAR)
        if k == bucket.in_use and arm.num_seen > 3:
            # Slow drift is the machine's or the load's and moves every k; what is faster is this k's own, until others
            # show it too.
            common = max(1.0 - options.drift_limit, min(1.0 + options.drift_limit, factor))
            bucket.scale_s *= common
            arm.relative *= factor / common
        else:
            arm.relative *= factor
            self._tell_neighbours(bucket, k, step_s)
            if arm.num_seen <= 3:
                arm.is_guess = False
                _guess_again(bucket.arms)

    def _tell_neighbours(self, bucket: _Bucket, k: int, step_s: float) -> None:
        """What a trial says of the ratio to the k in use holds, with doubt, at batch sizes nearby too."""
        options, used = self._options, bucket.in_use
        if k == used:
            return
        ratio = step_s / (bucket.scale_s * bucket.arms[used].relative)
        for name, other in self._buckets.items():
            distance = abs(name - bucket.name)
            if other is bucket or distance > options.reach:
                continue
            arm = other.arms[k]
            age = self._step - arm.step
            var = arm.var + (options.time_doubt * age if age > 1 else options.time_drift)
            base = other.arms[used]
            base_var = base.var + options.time_doubt * (self._step - base.step)
            gain = var / (var + self._noise_var + base_var + options.neighbour_var * distance * distance)
            error = ratio * base.relative / arm.relative - 1.0
            arm.relative *= max(0.05, 1.0 + gain * error)
            arm.var = var * (1.0 - gain)
            arm.step = self._step

    def _doubt_others(self, bucket: _Bucket, arm: _Arm, error: float) -> None:
        """The arm has jumped: the others may have, or not. Those used next will show it."""
        options = self._options
        for other in bucket.arms:
            if other is not arm:
                other.var += min(options.jump_doubt * error * error, 0.25)

    def _grant_trials(self, step_s: float) -> None:
        """Something has changed: look around at once, but not at every change of a restless load."""
        if self._step - self._last_grant_step >= self._options.grant_every and 0.0 < step_s < MAX_TIME_S:
            self._last_grant_step = self._step
            self._allowed_s += 0.5 * self._options.first_trials * step_s

    def _bucket(self, name: int) -> _Bucket:
        bucket = self._buckets.get(name)
        if bucket is None:
            bucket = self._new_bucket(name)
            self._buckets[name] = bucket
        return bucket

    def _new_bucket(self, name: int) -> _Bucket:
        """Like the nearest batch size that was seen, with doubt; the very first by a guess."""
        known = [other for other, bucket in self._buckets.items() if bucket.scale_s > 0.0]
        if not known:
            arms = [_Arm(1.0 + GUESSED_SLOPE * k, 0.09, self._step, is_guess=True) for k in range(self.max_drafts + 1)]
            return _Bucket(name, arms, 0.0, min(1, self.max_drafts))
        nearest = min(known, key=lambda other: (abs(other - name), other))
        old = self._buckets[nearest]
        doubt = min(0.005 * abs(nearest - name), 0.04)
        arms = [_Arm(arm.relative, arm.var + doubt, arm.step, is_guess=arm.is_guess) for arm in old.arms]
        return _Bucket(name, arms, 0.0, old.in_use)

    # Decisions.

    def _decide(self, bucket: _Bucket, shares: tuple[float, ...]) -> tuple[int, int]:
        """The next step's k, and the k that is in use where that is none but a trial."""
        options, step = self._options, self._step
        in_use = min(bucket.in_use, len(shares))
        if bucket.scale_s <= 0.0:
            return in_use, in_use
        arms, rates = bucket.arms[: len(shares) + 1], self._rates
        tokens, stands = [1.0], 1.0
        for share, rate in zip(shares, rates, strict=False):
            stands *= rate.mean
            tokens.append(tokens[-1] + share * stands)
        speed = [count / arm.relative for count, arm in zip(tokens, arms, strict=True)]
        best = max(range(len(speed)), key=speed.__getitem__)
        if best != in_use and speed[best] > speed[in_use] * (1.0 + options.margin):
            self.num_switches += 1
            bucket.in_use = in_use = best
        # Each k has a share of its own: cheap trials of one as good as another would use up a common budget for ever.
        share_s = (self._allowed_s + options.trial_share * self._elapsed_s) / self.max_drafts
        rate_vars = [rate.var_at(step, options) for rate in rates]
        slope_in_use = self._slopes(tokens, in_use)
        found, found_step, found_cost_s = in_use, step + 1, 0.0
        for k, arm in enumerate(arms):
            if k == in_use:
                continue
            gap = max(0.0, 1.0 - speed[k] / speed[in_use])
            cost_s = max(gap, options.least_cost) * arm.relative * bucket.scale_s
            if arm.step >= found_step or cost_s > share_s - self._spent_s[k] or arm.is_tried(step):
                continue
            var = arm.var + options.time_doubt * (step - arm.step) + arms[in_use].var
            slope = self._slopes(tokens, k)
            for ours, theirs, rate_var in zip(slope, slope_in_use, rate_vars, strict=True):
                var += (ours - theirs) ** 2 * rate_var
            if options.plausible * math.sqrt(var) - gap > options.worth_trying:
                found, found_step, found_cost_s = k, arm.step, cost_s
        if found != in_use:
            self._spent_s[found] += found_cost_s
            self.num_trials += 1
            arms[found].tried_step = step
        return found, in_use

    def _slopes(self, tokens: list[float], k: int) -> list[float]:
        """Relative change of E_k with each acceptance."""
        total = tokens[k]
        return [(total - tokens[j]) / (rate.mean * total) if j < k else 0.0 for j, rate in enumerate(self._rates)]


def _guess_again(arms: list[_Arm]) -> None:
    """Put the arms that nobody has measured on the line through the nearest two that somebody has."""
    seen = [k for k, arm in enumerate(arms) if not arm.is_guess]
    if len(seen) == len(arms):
        return
    for k, arm in enumerate(arms):
        if not arm.is_guess:
            continue
        near, *others = sorted(seen, key=lambda other: abs(other - k))
        base = arms[near].relative
        slope = (arms[others[0]].relative - base) / (others[0] - near) if others else GUESSED_SLOPE * base
        arm.relative = base + max(slope, 0.0) * (k - near) if k > near else base / (1.0 + GUESSED_SLOPE * (near - k))


def bucket_of(batch_size: int) -> int:
    """Number of the bucket of a batch size: 1, 2, 3, 4, 5-6, 7-8, 9-12, 13-16, ... two for each doubling."""
    if batch_size <= 2:
        return 2 * (batch_size - 1)
    power = (batch_size - 1).bit_length()  # 2^(power-1) < batch_size <= 2^power
    upper_half = batch_size > 3 << (power - 2)
    return 2 * power - (0 if upper_half else 1)
