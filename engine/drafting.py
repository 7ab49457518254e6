"""How a step's drafts are chosen from the MTP head's logits, for each law that a mode of verification asks for.

Columns of a pruned draft head become tokens here, before anything else sees them. Drafts of greedy sequences are the
likeliest tokens under every law. The draws of DraftLaw.SAMPLED are keyed by the first position of the step and numbered
by draft; `engine.rejection` says why.

Legend: B sequences, S sampled sequences, K draft tokens, P positions of noise, C columns of the draft head,
V vocabulary, D hidden size.
"""

from dataclasses import dataclass

import torch

from baton.engine.history import Lookahead
from baton.engine.philox import Purpose, uniform
from baton.engine.rejection import pick
from baton.engine.sampler import SamplingRows, choose, draw_noise, edit_logits, looks_ahead, process_logits
from baton.engine.verify import DraftLaw, DraftProbs
from baton.model.draft_head import HeadIds
from baton.model.model import Model


@dataclass(frozen=True, slots=True)
class Drafted:
    """One draft of each sequence.

    Attributes:
        token_B: int64, in the target's vocabulary.
        probs_SC: what the sampled sequences' were drawn from; None if they are point masses.
    """

    token_B: torch.Tensor
    probs_SC: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSource:
    """What chance there is in one step's drafts, drawn once for all of them.

    Attributes:
        law: how drafts are chosen.
        sampling: the sampled sequences; None if all are greedy.
        noise_SPV: the target's noise for every position the step may choose a token for, with DraftLaw.COUPLED.
        uniform_SK: one for each draft, with DraftLaw.SAMPLED.
    """

    law: DraftLaw
    sampling: SamplingRows | None
    noise_SPV: torch.Tensor | None = None
    uniform_SK: torch.Tensor | None = None

    @classmethod
    def of_step(
        cls,
        law: DraftLaw,
        sampling: SamplingRows | None,
        position_B: torch.Tensor,
        num_drafts: int,
        model: Model,
        *,
        drafts_next: bool = True,
    ) -> "DraftSource":
        """The draws of the step whose first token will stand at `position_B`.

        Args:
            law: how drafts are chosen.
            sampling: the sampled sequences.
            position_B: int64.
            num_drafts: K.
            model: that drafts.
            drafts_next: the step also makes the first draft of the one after.
        """
        if sampling is None or sampling.num_sampled == 0 or law is DraftLaw.LIKELIEST:
            return cls(law=law, sampling=sampling)
        if law is DraftLaw.SAMPLED:
            position_S = position_B[sampling.index_S]
            uniform_SK = uniform(sampling.seed_S, sampling.choice_S, position_S, Purpose.DRAFT, num_drafts)
            return cls(law=law, sampling=sampling, uniform_SK=uniform_SK)
        # One draw for every position this step may choose a token for: drafts, verification, the next draft share it.
        num_positions = num_drafts + 1 + drafts_next
        dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
        noise_SPV = draw_noise(sampling, position_B, num_positions, model.config.vocab_size, dtype)
        return cls(law=law, sampling=sampling, noise_SPV=noise_SPV)

    def target_noise(self, num_rows: int) -> torch.Tensor | None:
        """The noise of the positions that are verified, [S, Q, V]."""
        return None if self.noise_SPV is None else self.noise_SPV[:, :num_rows]

    def draft(self, model: Model, hidden_BD: torch.Tensor, place: int, ahead: Lookahead | None = None) -> Drafted:
        """The draft that follows `place` others of this step, from the MTP output that foresees it.

        `ahead` are the tokens between those the sampling table has counted and this one, where `looks_ahead` says so.
        """
        noise_S1V = None if self.noise_SPV is None else self.noise_SPV[:, place : place + 1]
        uniform_S = None if self.uniform_SK is None else self.uniform_SK[:, place]
        return self._choose(model, hidden_BD, noise_S1V, uniform_S, ahead)

    def draft_next(
        self, model: Model, hidden_BD: torch.Tensor, accepted_len_B: torch.Tensor, ahead: Lookahead | None = None
    ) -> torch.Tensor:
        """The first draft of the step after, int64 [B]; never sampled, as only its own step could keep what from."""
        assert self.law is not DraftLaw.SAMPLED
        noise_S1V = None
        if self.noise_SPV is not None and self.sampling is not None:
            place_S = accepted_len_B[self.sampling.index_S] + 1
            noise_S1V = self.noise_SPV[torch.arange(len(place_S), device=place_S.device), place_S][:, None]
        return self._choose(model, hidden_BD, noise_S1V, None, ahead).token_B

    def _choose(
        self,
        model: Model,
        hidden_BD: torch.Tensor,
        noise_S1V: torch.Tensor | None,
        uniform_S: torch.Tensor | None,
        ahead: Lookahead | None,
    ) -> Drafted:
        logits_BC = model.draft_logits(hidden_BD)
        sampling = self.sampling
        if noise_S1V is not None:
            return Drafted(choose(over_vocabulary(logits_BC, model)[:, None], sampling, noise_S1V, ahead)[:, 0], None)
        if sampling is None or not (looks_ahead(sampling) or uniform_S is not None):
            return Drafted(model.draft_to_target(HeadIds(logits_BC.argmax(dim=-1))), None)
        logits_BV = edit_logits(over_vocabulary(logits_BC, model)[:, None], sampling, ahead)[:, 0]
        likeliest = Drafted(logits_BV.argmax(dim=-1), None)
        return likeliest if uniform_S is None else _sampled(logits_BV, likeliest, sampling, uniform_S, model)


def over_vocabulary(logits_NC: torch.Tensor, model: Model) -> torch.Tensor:
    """A draft head's logits over the target's vocabulary [N, V]; -inf for tokens it does not have."""
    if model.d2t_C is None:
        return logits_NC
    logits_NV = logits_NC.new_full((len(logits_NC), model.config.vocab_size), -torch.inf)
    return logits_NV.index_copy(1, model.d2t_C, logits_NC)


def stack_probs(drafted: list[Drafted], model: Model) -> DraftProbs | None:
    """The distributions of a step's drafts, if they were drawn from any."""
    probs = [item.probs_SC for item in drafted if item.probs_SC is not None]
    return DraftProbs(torch.stack(probs, dim=1), model.t2d()) if probs else None


def _sampled(
    logits_BV: torch.Tensor, likeliest: Drafted, sampling: SamplingRows, uniform_S: torch.Tensor, model: Model
) -> Drafted:
    """Draws from the head's distribution under each request's own parameters; the head's tokens are all there is."""
    processed_SV = process_logits(logits_BV[sampling.index_S][:, None], sampling)[:, 0]
    processed_SC = processed_SV if model.d2t_C is None else processed_SV[:, model.d2t_C]
    # Where parameters leave no token of the head, there is nothing to draw: zeros, which no verifier accepts from.
    probs_SC = processed_SC.softmax(dim=-1).nan_to_num(nan=0.0)
    token_S = model.draft_to_target(HeadIds(pick(probs_SC, uniform_S)))
    return Drafted(likeliest.token_B.index_copy(0, sampling.index_S, token_S), probs_SC)
