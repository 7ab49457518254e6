"""Creates the verifier for a verification configuration, by kernels or by torch."""

import itertools
from dataclasses import dataclass, replace

import torch

from baton.core.verification import DraftSampleMethod, VerificationConfig, VerificationMode
from baton.engine.sampling.sampler import choose
from baton.engine.speculation.kernel_verifier import KernelVerifier
from baton.engine.speculation.rejection import RejectionVerifier
from baton.engine.speculation.verify import (
    CoupledVerifier,
    DraftLaw,
    GreedyVerifier,
    Verified,
    Verifier,
    VerifyInputs,
    emit,
    usable_drafts,
)
from baton.kernels.implementation import Implementation
from baton.kernels.sampling.noise import SYNTHETIC_SEED, Purpose, uniform
from baton.kernels.sampling.rows import Law
from baton.model.model import Model


@dataclass(frozen=True, slots=True)
class SyntheticVerifier:
    """Accepts drafts at random with given probabilities, for greedy sequences too.

    Attributes:
        acceptance_rates: probability that draft i and all before it are accepted, for each i; never increasing.
    """

    acceptance_rates: tuple[float, ...]

    @property
    def draft_law(self) -> DraftLaw:
        """Same as in the default mode."""
        return DraftLaw.COUPLED

    def verify(self, inputs: VerifyInputs) -> Verified:
        """Accept draft i if draws 0 ... i accept; keyed by place in the batch, as greedy requests have no seeds."""
        num_sequences, num_drafts = inputs.drafts.ids_BK.shape
        assert num_drafts <= len(self.acceptance_rates)
        place_B = torch.arange(num_sequences, device=inputs.position_B.device)
        seed_B = torch.full_like(place_B, SYNTHETIC_SEED)
        u_BK = uniform(seed_B, place_B, inputs.position_B, Purpose.SYNTHETIC, num_drafts)
        stands_BK = torch.ones_like(u_BK, dtype=torch.int64)
        for place, rate in enumerate(conditional_rates(self.acceptance_rates[:num_drafts])):
            stands_BK[:, place] = u_BK[:, place] < rate
        return _accept_made_up(inputs, stands_BK.cumprod(dim=1).sum(dim=1))


@dataclass(frozen=True, slots=True)
class ForceVerifier:
    """Accepts `forced_len` drafts of every sequence that has that many, else all it has."""

    forced_len: int

    @property
    def draft_law(self) -> DraftLaw:
        """Same as in the default mode."""
        return DraftLaw.COUPLED

    def verify(self, inputs: VerifyInputs) -> Verified:
        """See the class."""
        return _accept_made_up(inputs, torch.full_like(inputs.draft_cap_B, self.forced_len))


@dataclass(frozen=True, slots=True)
class MixedVerifier:
    """Verifies sampled drafts and point-mass drafts in one step, each as in a batch of its own kind.

    Attributes:
        drawn: verifier of drafts sampled from distributions.
        points: verifier of point-mass drafts.
        is_point_B: bool, sequences whose drafts are point masses.
    """

    drawn: Verifier
    points: Verifier
    is_point_B: torch.Tensor

    @property
    def draft_law(self) -> DraftLaw:
        """Same as of the sampled drafts."""
        return self.drawn.draft_law

    def verify(self, inputs: VerifyInputs) -> Verified:
        """See the class."""
        drawn, points = self.drawn.verify(inputs), self.points.verify(replace(inputs, draft_probs=None))
        return Verified(
            token_ids_BQ=torch.where(self.is_point_B[:, None], points.token_ids_BQ, drawn.token_ids_BQ),
            accepted_len_B=torch.where(self.is_point_B, points.accepted_len_B, drawn.accepted_len_B),
        )


def conditional_rates(acceptance_rates: tuple[float, ...]) -> tuple[float, ...]:
    """Probability of each draft once all before it are accepted; 0 after one that never is."""
    pairs = itertools.pairwise((1.0, *acceptance_rates))
    return tuple(rate / last if last > 0 else 0.0 for last, rate in pairs)


def _accept_made_up(inputs: VerifyInputs, wanted_len_B: torch.Tensor) -> Verified:
    accepted_len_B = torch.minimum(wanted_len_B, usable_drafts(inputs.drafts, inputs.draft_cap_B))
    ahead = inputs.drafts.valid_ids()
    chosen_BQ = choose(inputs.target_logits_BQV, inputs.sampling, inputs.noise_SQV, ahead, inputs.vocab)
    return emit(inputs.drafts, accepted_len_B, chosen_BQ)


def verifier_for(model: Model, config: VerificationConfig, num_draft_tokens: int) -> Verifier:
    """The verifier for a model's steps with up to `num_draft_tokens` drafts.

    Raises:
        ConfigInvalid: the configuration does not fit that many drafts.
    """
    if model.sampling_implementation is None:
        return make_verifier(config, num_draft_tokens)
    return make_kernel_verifier(config, num_draft_tokens, model.sampling_implementation, model.device)


def make_kernel_verifier(
    config: VerificationConfig, num_draft_tokens: int, implementation: Implementation, device: torch.device
) -> Verifier:
    """The verifier that uses kernels.

    Raises:
        ConfigInvalid: as `make_verifier`.
    """
    of_torch = make_verifier(config, num_draft_tokens)
    law, forced_len = Law.MATCH, 0
    rates: tuple[float, ...] = ()
    match of_torch:
        case RejectionVerifier(is_probabilistic=is_probabilistic, block=block):
            law = Law.BLOCK if is_probabilistic and block else Law.REJECT
        case SyntheticVerifier(acceptance_rates):
            law, rates = Law.SYNTHETIC, conditional_rates(acceptance_rates)
        case ForceVerifier(forced_len):
            law = Law.FORCE
    return KernelVerifier(law, of_torch.draft_law, implementation, device, rates=rates, forced_len=forced_len)


def make_verifier(config: VerificationConfig, num_draft_tokens: int) -> Verifier:
    """The verifier that uses torch.

    Raises:
        ConfigInvalid: the configuration does not fit that many drafts.
    """
    config.require_fits(num_draft_tokens)
    match config.mode:
        case VerificationMode.COUPLED:
            return CoupledVerifier()
        case VerificationMode.GREEDY:
            return GreedyVerifier()
        case VerificationMode.REJECTION:
            is_probabilistic = config.draft_sample_method is DraftSampleMethod.PROBABILISTIC
            return RejectionVerifier(is_probabilistic=is_probabilistic, block=config.block)
        case VerificationMode.SYNTHETIC:
            return SyntheticVerifier(config.acceptance_rates)
        case VerificationMode.FORCE:
            return ForceVerifier(config.forced_len)
