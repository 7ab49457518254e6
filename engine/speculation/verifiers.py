"""From the verification that was configured to what does it: kernels, or torch."""

import torch

from baton.core.verification import DraftSampleMethod, VerificationConfig, VerificationMode
from baton.engine.speculation.kernel_verifier import KernelVerifier
from baton.engine.speculation.rejection import RejectionVerifier
from baton.engine.speculation.synthetic import ForceVerifier, SyntheticVerifier, conditional_rates
from baton.engine.speculation.verify import CoupledVerifier, GreedyVerifier, Verifier
from baton.kernels.implementation import Implementation
from baton.kernels.sampling.choice import Law
from baton.model.model import Model


def verifier_for(model: Model, config: VerificationConfig, num_draft_tokens: int) -> Verifier:
    """The verifier of a model's steps with up to `num_draft_tokens` drafts.

    Raises:
        ConfigInvalid: the configuration does not fit so many.
    """
    if model.choosing is None:
        return make_verifier(config, num_draft_tokens)
    return make_kernel_verifier(config, num_draft_tokens, model.choosing, model.device)


def make_kernel_verifier(
    config: VerificationConfig, num_draft_tokens: int, implementation: Implementation, device: torch.device
) -> Verifier:
    """The one by kernels.

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
    """The one by torch.

    Raises:
        ConfigInvalid: the configuration does not fit so many drafts.
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
