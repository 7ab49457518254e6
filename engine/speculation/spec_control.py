"""How many drafts the next step makes, chosen by measurement: what `--num-speculative-tokens auto` is.

The controller knows step times (`step_time_model`: of each size of batch and number of drafts) and acceptance
(`acceptance_model`: of each draft position, given that those before it stood), each with how sure it is, and answers
the k with the most expected tokens per second. It tries other k now and then: the time that trials are expected to lose
is a budget, a small share of all time. It reads no clock, draws no random number and touches no tensor: equal
observations give equal answers.

`E_k = 1 + c_1 + c_1 c_2 + ...` tokens per sequence and step; `t_k` seconds; rate `E_k / t_k`. Another k is used when
it looks better by a margin. A trial is of a k that may plausibly be better than the one in use, in standard deviations:
of those, the one that has waited longest for its cost, and only within the budget.

Legend: k drafts of a step, j draft position from 0, c_j acceptance of position j where it was tested.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.engine.speculation.acceptance_model import AcceptanceModel, AcceptanceOptions
from baton.engine.step.time_model import StepTimeModel, TimeOptions

MAX_TIME_S = 1e6  # a step longer than this is a broken clock,
MIN_TIME_S = 1e-9  # and one shorter, too
LATE = 4  # steps after which a trial's result is not waited for any more


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlOptions:
    """Constants of the controller.

    Attributes:
        margin: how much better another k must look before it is used.
        trial_share: share of all time that trials are expected to lose, all k together; each k has an equal part of it,
        borrow: and may use so many parts while others leave theirs.
        first_trials: loss allowed to the first trials, in steps; so much again after a change was seen.
        grant_every: steps between two such allowances.
        plausible: a k that is worse by this many standard deviations is not tried,
        worth_trying: nor one that so many of them would make better by less than this.
        least_cost: what a trial is charged at least, in steps.
        hope: standard deviations by which a trial may turn out better, where it is asked whether it is affordable.
        patience: the larger, the less it matters what a trial costs, and the more how long a k has waited for one.
        surprise: how much better a k must look, when it comes into use, to say that something has changed.
        times: of the model of step times.
        acceptance: of the model of acceptance.
    """

    margin: float = 0.003
    trial_share: float = 0.005
    first_trials: float = 2.0
    grant_every: int = 400
    plausible: float = 3.5
    worth_trying: float = 0.015
    least_cost: float = 0.002
    hope: float = 1.0
    borrow: float = 2.0
    patience: float = 0.1
    surprise: float = 0.1
    times: TimeOptions = field(default_factory=TimeOptions)
    acceptance: AcceptanceOptions = field(default_factory=AcceptanceOptions)


class _Bucket:
    """Of batches of about one size: the k in use, and when each k was last seen and tried."""

    __slots__ = ("in_use", "seen_step", "tried_step")

    def __init__(self, in_use: int, num_arms: int) -> None:
        self.in_use = in_use
        self.seen_step = [-1] * num_arms
        self.tried_step = [-LATE] * num_arms

    def is_tried(self, k: int, step: int) -> bool:
        """Whether a trial's result is still to come; one that has not come for long never will."""
        return self.tried_step[k] > self.seen_step[k] and step - self.tried_step[k] < LATE


class SpeculationControl:
    """Chooses k for steps of up to `max_drafts` drafts.

    Args:
        max_drafts: the largest k, 0 to 16.
        options: constants.
    """

    def __init__(self, max_drafts: int, options: ControlOptions | None = None) -> None:
        assert 0 <= max_drafts <= 16
        self.max_drafts = max_drafts
        self._options = options = options or ControlOptions()
        self._times = StepTimeModel(max_drafts, options.times)
        self._acceptance = AcceptanceModel(max_drafts, options.acceptance)
        self._buckets: dict[int, _Bucket] = {}
        self._step = 0
        self._elapsed_s = 0.0
        self._spent_s = [0.0] * (max_drafts + 1)  # by trials of each k
        self._allowed_s = 0.0
        self._last_grant_step = 0

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
        return self._decide(name, self._bucket(name), shares)

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
        if self.max_drafts == 0:
            return
        self._step += 1
        jumped = self._acceptance.observe(tested, accepted)
        if MIN_TIME_S < step_s < MAX_TIME_S:  # not NaN either
            name = bucket_of(batch_size)
            self._bucket(name).seen_step[num_drafts] = self._step
            jumped |= self._times.observe(name, num_drafts, step_s)
            usual_s = self.expected_step_s(batch_size, num_drafts)
            if self._elapsed_s == 0.0:
                self._allowed_s = self._options.first_trials * usual_s
            self._elapsed_s += min(step_s, 4.0 * usual_s)
            if jumped:
                self._grant_trials(usual_s)

    def _grant_trials(self, usual_s: float) -> None:
        """Something has changed: look around at once, but not at every change of a restless load."""
        if self._step - self._last_grant_step >= self._options.grant_every:
            self._last_grant_step = self._step
            self._allowed_s += self._options.first_trials * usual_s

    def expected_tokens(self, num_drafts: int) -> float:
        """Tokens that a step with this k is expected to emit per sequence."""
        tokens = stands = 1.0
        for rate in self._acceptance.mean[:num_drafts]:
            stands *= rate
            tokens += stands
        return tokens

    def expected_step_s(self, batch_size: int, num_drafts: int) -> float:
        """Seconds that a step is expected to take; 0 where nothing is known yet."""
        name = bucket_of(batch_size)
        if not self._times.knows(name):
            return 0.0
        mean, _ = self._times.times(name)
        return math.exp(min(mean[num_drafts], 50.0))

    def _bucket(self, name: int) -> _Bucket:
        """As new: with the k of the nearest."""
        bucket = self._buckets.get(name)
        if bucket is None:
            in_use = min(1, self.max_drafts)
            if self._buckets:
                in_use = self._buckets[min(self._buckets, key=lambda other: (abs(other - name), other))].in_use
            bucket = self._buckets[name] = _Bucket(in_use, self.max_drafts + 1)
        return bucket

    def _decide(self, name: int, bucket: _Bucket, shares: tuple[float, ...]) -> int:
        """The k in use, another one from now on if that is better, or a trial."""
        options = self._options
        in_use = min(bucket.in_use, len(shares))
        if not self._times.knows(name):
            return in_use
        log_s, time_var = self._times.times(name)
        # More drafts never take less time; what is in use is known best.
        known = log_s[in_use]
        log_s = [min(log, known) if k < in_use else max(log, known) for k, log in enumerate(log_s)]
        tokens, stands = [1.0], 1.0
        for share, rate in zip(shares, self._acceptance.mean, strict=False):
            stands *= rate
            tokens.append(tokens[-1] + share * stands)
        speed = [math.log(count) - log for count, log in zip(tokens, log_s, strict=False)]
        best = max(range(len(speed)), key=speed.__getitem__)
        if best != in_use and speed[best] > speed[in_use] + options.margin:
            if speed[best] > speed[in_use] + options.surprise:
                self._grant_trials(math.exp(min(log_s[best], 50.0)))
            bucket.in_use = in_use = best
        return self._find_trial(bucket, in_use, tokens, log_s, speed, time_var)

    def _find_trial(
        self,
        bucket: _Bucket,
        in_use: int,
        tokens: list[float],
        log_s: list[float],
        speed: list[float],
        time_var: list[list[float]],
    ) -> int:
        options, step = self._options, self._step
        # Each k has a part of its own: cheap trials of one as good as another would use up a common budget for ever.
        budget_s = self._allowed_s + options.trial_share * self._elapsed_s
        part_s = budget_s / self.max_drafts
        whole_left_s = budget_s - sum(self._spent_s)
        slope_in_use = self._slopes(tokens, in_use)
        # What is in use is measured before it is doubted.
        found, found_score, found_cost_s = in_use, 0.0, 0.0
        for k, log in enumerate(log_s[: len(tokens)]):
            age = step - bucket.seen_step[k]
            if k == in_use or bucket.seen_step[k] >= bucket.seen_step[in_use] or bucket.is_tried(k, step):
                continue
            gap = max(0.0, 1.0 - math.exp(speed[k] - speed[in_use]))
            cost_s = max(gap, options.least_cost) * math.exp(min(log, 50.0))
            spent_s = self._spent_s[k]
            left_s = max(part_s - spent_s, min(options.borrow * part_s - spent_s, whole_left_s))
            score = age / (gap + options.patience)
            if left_s <= 0.0 or score <= found_score:
                continue
            var = time_var[k][k] + time_var[in_use][in_use] - 2.0 * time_var[k][in_use]
            slope = [ours - theirs for ours, theirs in zip(self._slopes(tokens, k), slope_in_use, strict=True)]
            for ours, row in zip(slope, self._acceptance.var, strict=True):
                if ours:
                    var += ours * sum([value * theirs for value, theirs in zip(row, slope, strict=True)])
            spread = math.sqrt(max(var, 0.0))
            hoped = max(0.0, 1.0 - math.exp(speed[k] + options.hope * spread - speed[in_use]))
            if hoped * math.exp(min(log, 50.0)) > left_s:
                continue
            if options.plausible * spread - gap > options.worth_trying:
                found, found_score, found_cost_s = k, score, cost_s
        if found != in_use:
            self._spent_s[found] += found_cost_s
            bucket.tried_step[found] = step
        return found

    def _slopes(self, tokens: list[float], k: int) -> list[float]:
        """Relative change of E_k with each acceptance."""
        total = tokens[k]
        return [(total - tokens[j]) / (rate * total) if j < k else 0.0 for j, rate in enumerate(self._acceptance.mean)]


def bucket_of(batch_size: int) -> int:
    """Number of the bucket of a batch size: 1, 2, 3, 4, 5-6, 7-8, 9-12, 13-16, ... two for each doubling."""
    if batch_size <= 2:
        return 2 * (batch_size - 1)
    power = (batch_size - 1).bit_length()  # 2^(power-1) < batch_size <= 2^power
    upper_half = batch_size > 3 << (power - 2)
    return 2 * power - (0 if upper_half else 1)
