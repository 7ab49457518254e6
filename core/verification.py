"""How draft tokens are verified: the choice of an operator or a benchmark, checked once.

The modes themselves are implemented elsewhere (`engine.speculation.verify`, `engine.speculation.rejection`,
`engine.speculation.verifiers`).
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from baton.core.errors import ConfigInvalid


class VerificationMode(StrEnum):
    """What decides whether a draft is accepted."""

    COUPLED = "coupled"  # the target's own draw, fixed in advance by its noise: the same tokens as without speculation
    REJECTION = "rejection"  # rejection sampling: the same distribution as without speculation, but other tokens
    GREEDY = "greedy"  # the likeliest token; for batches that are all greedy
    SYNTHETIC = "synthetic"  # random acceptance at given rates, for benchmarks
    FORCE = "force"  # a given number of drafts, for benchmarks


class DraftSampleMethod(StrEnum):
    """How `rejection` gets the drafts of sampled requests."""

    PROBABILISTIC = "probabilistic"  # drawn from the MTP head's own distribution, which verification then needs
    GREEDY = "greedy"  # the head's likeliest token, a point mass


MADE_UP_MODES = (VerificationMode.SYNTHETIC, VerificationMode.FORCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationConfig:
    """A verification mode and its parameters.

    Attributes:
        mode: the mode.
        draft_sample_method: for `rejection`.
        block: for `rejection` with probabilistic drafts: verify drafts as a block, which accepts at least as many.
        acceptance_rates: for `synthetic`: the probability that draft i and all before it are accepted, for each i.
        forced_len: for `force`: number of accepted drafts.

    Raises:
        ConfigInvalid: the rates are not probabilities or increase, or the length is negative.
    """

    mode: VerificationMode = VerificationMode.COUPLED
    draft_sample_method: DraftSampleMethod = DraftSampleMethod.PROBABILISTIC
    block: bool = True
    acceptance_rates: tuple[float, ...] = ()
    forced_len: int = 0

    def __post_init__(self) -> None:
        last = 1.0
        for rate in self.acceptance_rates:
            if not (math.isfinite(rate) and 0.0 <= rate <= last):
                message = f"acceptance_rates: {self.acceptance_rates} must lie in 0 ... 1 and never rise"
                raise ConfigInvalid(message, keys=["acceptance_rates"])
            last = rate
        if self.forced_len < 0:
            raise ConfigInvalid(f"forced_len: {self.forced_len} is negative", keys=["forced_len"])

    def of_lookup(self) -> "VerificationConfig":
        """The configuration for looked-up drafts, which are point masses."""
        return replace(self, draft_sample_method=DraftSampleMethod.GREEDY)

    @classmethod
    def synthetic(cls, *acceptance_rates: float) -> "VerificationConfig":
        """Accept draft i, together with all before it, at the i-th rate."""
        return cls(mode=VerificationMode.SYNTHETIC, acceptance_rates=acceptance_rates)

    @classmethod
    def synthetic_mean(cls, mean_accepted_len: float, num_drafts: int) -> "VerificationConfig":
        """Accept lengths with this mean and minimal variance: the whole numbers on either side of the mean.

        Raises:
            ConfigInvalid: the mean is not in 0 ... num_drafts.
        """
        if not 0.0 <= mean_accepted_len <= num_drafts:
            message = f"mean_accepted_len: {mean_accepted_len} is not in 0 ... {num_drafts}"
            raise ConfigInvalid(message, keys=["mean_accepted_len"])
        return cls.synthetic(*(min(1.0, max(0.0, mean_accepted_len - place)) for place in range(num_drafts)))

    @classmethod
    def force(cls, forced_len: int) -> "VerificationConfig":
        """Accept exactly `forced_len` drafts, as far as a sequence may have so many."""
        return cls(mode=VerificationMode.FORCE, forced_len=forced_len)

    def require_servable(self) -> None:
        """Check that the emitted tokens are the model's.

        Raises:
            ConfigInvalid: the mode fakes acceptance.
        """
        if self.mode in MADE_UP_MODES:
            raise refuse_made_up(self.mode.value)

    def require_fits(self, num_draft_tokens: int) -> None:
        """Check the mode's parameters against the maximum number of drafts per step.

        Raises:
            ConfigInvalid: there are rates for fewer drafts, or more forced drafts than that.
        """
        num_rates = len(self.acceptance_rates)
        if self.mode is VerificationMode.SYNTHETIC and num_rates < num_draft_tokens:
            message = f"acceptance_rates: {num_rates} given for {num_draft_tokens} draft tokens"
            raise ConfigInvalid(message, keys=["acceptance_rates"])
        if self.mode is VerificationMode.FORCE and self.forced_len > num_draft_tokens:
            message = f"forced_len: {self.forced_len} of {num_draft_tokens} draft tokens"
            raise ConfigInvalid(message, keys=["forced_len"])


def refuse_made_up(mode: str) -> ConfigInvalid:
    """Build the error for a mode that only benchmarks may use."""
    message = f"verification: {mode} emits drafts whatever the model says of them; it is for benchmarks, never served"
    return ConfigInvalid(message, keys=["verification"])
