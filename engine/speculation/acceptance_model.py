"""How likely each draft stands if those before it did, learnt from accepted lengths, with how sure that is.

One Kalman filter over the acceptance of all positions. What moves one of them is likely to move the others too: text
that is easy for the first draft is easy for the fourth. Positions that are not tested become doubtful with every step;
errors that lean to one side are a jump, after which all are doubted.

Legend: K positions, c_j acceptance of position j where it was tested.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_VAR = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceOptions:
    """Constants.

    Attributes:
        mean: of every position, before anything is known,
        var: and its variance.
        likeness: correlation of what moves two positions next to each other.
        drift: growth of the variance per step.
        doubt: the same of a position that was not tested, beside that,
        shared_doubt: and of what moves all of those together.
        most_var: no variance is larger; nothing at all is known then.
        lean: mean error, in standard deviations, that is taken for a jump.
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
    """Acceptance of up to `max_drafts` drafts."""

    def __init__(self, max_drafts: int, options: AcceptanceOptions | None = None) -> None:
        self._options = options = options or AcceptanceOptions()
        places = range(max_drafts)
        self._likeness = [[options.likeness ** abs(i - j) for j in places] for i in places]
        self.mean = [options.mean for _ in places]
        self.var = [[options.var * value for value in row] for row in self._likeness]
        self._error = [0.0 for _ in places]  # recent mean of errors, in standard deviations

    def observe(self, tested: Sequence[int], accepted: Sequence[int]) -> bool:
        """Learn from a step; returns whether some acceptance seems to have jumped.

        Args:
            tested: of each position, sequences in which it was proposed and all before it stood.
            accepted: of those, where it stood.
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
        # A step weighs in the detector by what it saw, at most as 8 trials do.
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
