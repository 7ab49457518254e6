"""Chooses a step's drafts from the draft head's logits, by the law that the verification mode requires.

Kernels choose drafts wherever they sample the model's tokens (`engine.sampling.kernel_sampler`); drafts sampled from a
distribution that is kept are always computed by torch.

Columns of a pruned draft head are mapped to tokens here, before anything else sees them. Drafts of greedy sequences are
the likeliest tokens under every law. The random draws of DraftLaw.SAMPLED are keyed by the first position of the step
and numbered by draft; `engine.speculation.rejection` explains why.

Legend: B sequences, S sampled sequences, K draft tokens, P positions of noise, C columns of the draft head, V
vocabulary (of it, and of C, those this process has), D hidden size.
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
        probs_SC: distributions that the sampled sequences' drafts were drawn from, over the head's columns, or over
            this rank's tokens if ranks share the vocabulary; None if drafts are point masses.
    """

    token_B: torch.Tensor
    probs_SC: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSource:
    """The randomness of one step's drafts: drawn once for all of them, or the parameters with which kernels draw it.

    Attributes:
        law: how drafts are chosen.
        sampling: the sampled sequences; None if all are greedy.
        noise_SPV: the target's noise for every position the step may sample, with DraftLaw.COUPLED, if torch samples.
        uniform_SK: one number per draft, with DraftLaw.SAMPLED.
        rows: how each sequence draws its next token, if kernels sample.
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
        """The random draws of the step whose first token will be at `position_B`.

        Args:
            law: how drafts are chosen.
            sampling: the sampled sequences.
            position_B: int64.
            num_drafts: K.
            model: the model that drafts.
            drafts_next: the step also makes the first draft of the next step.
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
        # One draw for every position this step may sample: drafts, verification and the next draft share it.
        num_positions = num_drafts + 1 + drafts_next
        dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
        width = model.vocab.width(model.config.vocab_size)
        noise_SPV = draw_noise(sampling, position_B, num_positions, width, dtype, model.vocab)
        return cls(law=law, sampling=sampling, noise_SPV=noise_SPV)

    def target_noise(self, num_rows: int) -> torch.Tensor | None:
        """Noise of the positions to be verified, [S, Q, V]."""
        return None if self.noise_SPV is None else self.noise_SPV[:, :num_rows]

    def draft(
        self, model: Model, hidden_BD: torch.Tensor, place: int, ahead: HistoryLookahead | None = None
    ) -> Drafted:
        """The draft after `place` others of this step, from the MTP output that predicts it.

        `ahead` holds the tokens between those the sampling table has counted and this draft; needed if `looks_ahead`.
        """
        uniform_S = None if self.uniform_SK is None else self.uniform_SK[:, place]
        if self.rows is not None and uniform_S is None:
            return Drafted(self._draw(model, hidden_BD, place, ahead), None)
        noise_S1V = None if self.noise_SPV is None else self.noise_SPV[:, place : place + 1]
        return self._choose(model, hidden_BD, noise_S1V, uniform_S, ahead)

    def draft_next(
        self, model: Model, hidden_BD: torch.Tensor, accepted_len_B: torch.Tensor, ahead: HistoryLookahead | None = None
    ) -> torch.Tensor:
        """First draft of the next step, int64 [B].

        Never with DraftLaw.SAMPLED, because only the step that verifies a draft can keep its distribution.
        """
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
        """Draw by kernels the draft after `place` others, or, for a tensor, that many tokens later; int64 [B]."""
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
    """The distributions of a step's drafts, if they were sampled from any."""
    probs = [item.probs_SC for item in drafted if item.probs_SC is not None]
    return DraftProbs(torch.stack(probs, dim=1), None if model.vocab.is_cut else model.t2d()) if probs else None


def _sampled(processed_SV: torch.Tensor, uniform_S: torch.Tensor, model: Model) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample from the head's distribution under each request's own parameters; returns tokens and distributions.

    Only the head's tokens can be sampled.
    """
    vocab = model.vocab
    # If the parameters leave no token of the head, the row is all zeros, from which no verifier accepts a draft.
    if isinstance(vocab, CutVocab):
        probs_SV = probabilities(processed_SV, vocab).nan_to_num(nan=0.0)
        return pick_among_ranks(probs_SV, uniform_S, vocab), probs_SV
    processed_SC = processed_SV if model.d2t_C is None else processed_SV[:, model.d2t_C]
    probs_SC = processed_SC.softmax(dim=-1).nan_to_num(nan=0.0)
    return model.draft_to_target(HeadIds(pick(probs_SC, uniform_S))), probs_SC
