"""Acceptance that is made up, so that benchmarks with random weights speculate as a trained model would.

What is emitted are drafts that the target may never have chosen: refused while serving (`core.verification`). The work
is that of the real thing: the target's choice is made at every row.

Legend: B sequences, K draft tokens.
"""

import itertools
from dataclasses import dataclass

import torch

from baton.engine.sampling.sampler import choose
from baton.engine.speculation.verify import DraftLaw, Verified, VerifyInputs, emit, usable_drafts
from baton.kernels.sampling.noise import SYNTHETIC_SEED, Purpose, uniform


@dataclass(frozen=True, slots=True)
class SyntheticVerifier:
    """Accepts by chance, greedy sequences too.

    Attributes:
        acceptance_rates: chance that draft i and all before it stand, for each i; they never rise.
    """

    acceptance_rates: tuple[float, ...]

    @property
    def draft_law(self) -> DraftLaw:
        """As the default mode's."""
        return DraftLaw.COUPLED

    def verify(self, inputs: VerifyInputs) -> Verified:
        """Draft i stands if draws 0 ... i do; keyed by place in the batch, as greedy requests have no seeds."""
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
    """Accepts `forced_len` drafts of every sequence that has so many."""

    forced_len: int

    @property
    def draft_law(self) -> DraftLaw:
        """As the default mode's."""
        return DraftLaw.COUPLED

    def verify(self, inputs: VerifyInputs) -> Verified:
        """See the class."""
        return _accept_made_up(inputs, torch.full_like(inputs.draft_cap_B, self.forced_len))


def conditional_rates(acceptance_rates: tuple[float, ...]) -> tuple[float, ...]:
    """Chance of each draft once all before it stand; 0 after one that never does."""
    pairs = itertools.pairwise((1.0, *acceptance_rates))
    return tuple(rate / last if last > 0 else 0.0 for last, rate in pairs)


def _accept_made_up(inputs: VerifyInputs, wanted_len_B: torch.Tensor) -> Verified:
    accepted_len_B = torch.minimum(wanted_len_B, usable_drafts(inputs.drafts, inputs.draft_cap_B))
    ahead = inputs.drafts.valid_ids()
    chosen_BQ = choose(inputs.target_logits_BQV, inputs.sampling, inputs.noise_SQV, ahead, inputs.vocab)
    return emit(inputs.drafts, accepted_len_B, chosen_BQ)
