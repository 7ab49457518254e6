"""How a step's drafts are chosen from the MTP head's logits, for each law that a mode of verification asks for.

Kernels choose them where they choose the model's tokens (`engine.sampling.kernel_sampler`); drafts that are drawn from
a distribution which is kept are torch's everywhere.

Columns of a pruned draft head become tokens here, before anything else sees them. Drafts of greedy sequences are the
likeliest tokens under every law. The draws of DraftLaw.SAMPLED are keyed by the first position of the step and numbered
by draft; `engine.speculation.rejection` says why.

Legend: B sequences, S sampled sequences, K draft tokens, P positions of noise, C columns of the draft head,
V vocabulary (of it, and of C, those this process has), D hidden size.
"""

from dataclasses import dataclass

import torch

from baton.engine.sampling.history import HistoryLookahead
from baton.engine.sampling.kernel_sampler import draw, draw_rows, later, likeliest
from baton.engine.sampling.sampler import (
    SamplingRows,
    choose,
    draw_noise,
    edit_logits,
    looks_ahead,
    process_logits,
    wide,
)
from baton.engine.speculation.rejection import pick_among_ranks, probabilities
from baton.engine.speculation.verify import DraftLaw, DraftProbs
from baton.kernels.sampling.draft_rows import pick
from baton.kernels.sampling.noise import Purpose, uniform
from baton.kernels.sampling.rows import DrawRows
from baton.model.draft_head import HeadIds
from baton.model.model import Model
from baton.model.vocab import CutVocab


@dataclass(frozen=True, slots=True)
class Drafted:
    """One draft of each sequence.

    Attributes:
        token_B: int64, in the target's vocabulary.
        probs_SC: what the sampled sequences' were drawn from, over the head's columns, or this rank's tokens where
            ranks share the vocabulary; None if they are point masses.
    """

    token_B: torch.Tensor
    probs_SC: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSource:
    """What chance there is in one step's drafts: drawn once for all of them, or where kernels will draw it.

    Attributes:
        law: how drafts are chosen.
        sampling: the sampled sequences; None if all are greedy.
        noise_SPV: the target's noise for every position the step may choose a token for, with DraftLaw.COUPLED, where
            torch chooses.
        uniform_SK: one for each draft, with DraftLaw.SAMPLED.
        rows: how each sequence draws its next token, where kernels choose.
    """

    law: DraftLaw
    sampling: SamplingRows | None
    noise_SPV: torch.Tensor | None = None
    uniform_SK: torch.Tensor | None = None
    rows: DrawRows | None = None

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
        rows = None if model.sampling_implementation is None else draw_rows(sampling, position_B)
        if sampling is None or sampling.num_sampled == 0 or law is DraftLaw.LIKELIEST:
            return cls(law=law, sampling=sampling, rows=rows)
        if law is DraftLaw.SAMPLED:
            position_S = position_B[sampling.index_S]
            uniform_SK = uniform(sampling.seed_S, sampling.choice_S, position_S, Purpose.DRAFT, num_drafts)
            return cls(law=law, sampling=sampling, uniform_SK=uniform_SK, rows=rows)
        if rows is not None:
            return cls(law=law, sampling=sampling, rows=rows)
        # One draw for every position this step may choose a token for: drafts, verification, the next draft share it.
        num_positions = num_drafts + 1 + drafts_next
        dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
        width = model.vocab.width(model.config.vocab_size)
        noise_SPV = draw_noise(sampling, position_B, num_positions, width, dtype, model.vocab)
        return cls(law=law, sampling=sampling, noise_SPV=noise_SPV)

    def target_noise(self, num_rows: int) -> torch.Tensor | None:
        """The noise of the positions that are verified, [S, Q, V]."""
        return None if self.noise_SPV is None else self.noise_SPV[:, :num_rows]

    def draft(
        self, model: Model, hidden_BD: torch.Tensor, place: int, ahead: HistoryLookahead | None = None
    ) -> Drafted:
        """The draft that follows `place` others of this step, from the MTP output that foresees it.

        `ahead` are the tokens between those the sampling table has counted and this one, where `looks_ahead` says so.
        """
        uniform_S = None if self.uniform_SK is None else self.uniform_SK[:, place]
        if self.rows is not None and uniform_S is None:
            return Drafted(self._draw(model, hidden_BD, place, ahead), None)
        noise_S1V = None if self.noise_SPV is None else self.noise_SPV[:, place : place + 1]
        return self._choose(model, hidden_BD, noise_S1V, uniform_S, ahead)

    def draft_next(
        self, model: Model, hidden_BD: torch.Tensor, accepted_len_B: torch.Tensor, ahead: HistoryLookahead | None = None
    ) -> torch.Tensor:
        """The first draft of the step after, int64 [B]; never sampled, as only its own step could keep what from."""
        assert self.law is not DraftLaw.SAMPLED
        if self.rows is not None:
            return self._draw(model, hidden_BD, accepted_len_B + 1, ahead)
        noise_S1V = None
        if self.noise_SPV is not None and self.sampling is not None:
            place_S = accepted_len_B[self.sampling.index_S] + 1
            noise_S1V = self.noise_SPV[torch.arange(len(place_S), device=place_S.device), place_S][:, None]
        return self._choose(model, hidden_BD, noise_S1V, None, ahead).token_B

    def _draw(
        self, model: Model, hidden_BD: torch.Tensor, place: int | torch.Tensor, ahead: HistoryLookahead | None
    ) -> torch.Tensor:
        """By kernels: the draft after so many others, or so many tokens, int64 [B]."""
        assert self.rows is not None
        assert model.sampling_implementation is not None
        logits_BC, sampling = model.draft_logits(hidden_BD), self.sampling
        is_greedy = sampling is None or sampling.num_sampled == 0
        if not is_greedy and self.law is DraftLaw.COUPLED:
            return draw(
                over_vocabulary(logits_BC, model),
                later(self.rows, place),
                sampling,
                ahead,
                model.sampling_implementation,
            )
        rows = self.rows if is_greedy else likeliest(self.rows)
        if not looks_ahead(sampling):
            return model.draft_to_target(HeadIds(draw(logits_BC, rows, None, None, model.sampling_implementation)))
        return draw(over_vocabulary(logits_BC, model), rows, sampling, ahead, model.sampling_implementation)

    def _choose(
        self,
        model: Model,
        hidden_BD: torch.Tensor,
        noise_S1V: torch.Tensor | None,
        uniform_S: torch.Tensor | None,
        ahead: HistoryLookahead | None,
    ) -> Drafted:
        logits_BC = wide(model.draft_logits(hidden_BD))
        sampling, vocab = self.sampling, model.vocab
        if noise_S1V is not None:
            logits_B1V = over_vocabulary(logits_BC, model)[:, None]
            return Drafted(choose(logits_B1V, sampling, noise_S1V, ahead, vocab)[:, 0], None)
        if sampling is None or not (looks_ahead(sampling) or uniform_S is not None):
            if vocab.is_cut:
                return Drafted(vocab.argmax(over_vocabulary(logits_BC, model)), None)
            return Drafted(model.draft_to_target(HeadIds(logits_BC.argmax(dim=-1))), None)
        logits_B1V = edit_logits(over_vocabulary(logits_BC, model)[:, None], sampling, ahead)
        best_B11, likeliest_B1 = vocab.best(logits_B1V)
        if uniform_S is None:
            return Drafted(likeliest_B1[:, 0], None)
        index_S = sampling.index_S
        processed_SV = process_logits(logits_B1V[index_S], sampling, best_B11[index_S], vocab)[:, 0]
        token_S, probs_SC = _sampled(processed_SV, uniform_S, model)
        return Drafted(likeliest_B1[:, 0].index_copy(0, index_S, token_S), probs_SC)


def over_vocabulary(logits_NC: torch.Tensor, model: Model) -> torch.Tensor:
    """A draft head's logits over the target's vocabulary [N, V]; -inf for tokens it does not have."""
    if model.draft_columns_C is None:
        return logits_NC
    width = model.vocab.width(model.config.vocab_size)
    logits_NV = logits_NC.new_full((len(logits_NC), width), -torch.inf)
    return logits_NV.index_copy(1, model.draft_columns_C, logits_NC)


def stack_probs(drafted: list[Drafted], model: Model) -> DraftProbs | None:
    """The distributions of a step's drafts, if they were drawn from any."""
    probs = [item.probs_SC for item in drafted if item.probs_SC is not None]
    return DraftProbs(torch.stack(probs, dim=1), None if model.vocab.is_cut else model.t2d()) if probs else None


def _sampled(processed_SV: torch.Tensor, uniform_S: torch.Tensor, model: Model) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws from the head's distribution under each request's own parameters, and that; the head's tokens are all."""
    vocab = model.vocab
    # Where parameters leave no token of the head, there is nothing to draw: zeros, which no verifier accepts from.
    if isinstance(vocab, CutVocab):
        probs_SV = probabilities(processed_SV, vocab).nan_to_num(nan=0.0)
        return pick_among_ranks(probs_SV, uniform_S, vocab), probs_SV
    processed_SC = processed_SV if model.d2t_C is None else processed_SV[:, model.d2t_C]
    probs_SC = processed_SC.softmax(dim=-1).nan_to_num(nan=0.0)
    return model.draft_to_target(HeadIds(pick(probs_SC, uniform_S))), probs_SC
