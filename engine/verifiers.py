"""From the verification that was configured to what does it."""

from baton.core.verification import DraftSampleMethod, VerificationConfig, VerificationMode
from baton.engine.rejection import RejectionVerifier
from baton.engine.synthetic import ForceVerifier, SyntheticVerifier
from baton.engine.verify import CoupledVerifier, GreedyVerifier, Verifier


def make_verifier(config: VerificationConfig, num_draft_tokens: int) -> Verifier:
    """The verifier of steps with up to `num_draft_tokens` drafts.

    Raises:
        ConfigInvalid: the configuration does not fit so many.
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
