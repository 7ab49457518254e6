"""Batches for the tests of sampling and verification, and what the engine makes of them."""

import pytest
import torch

from baton.engine.sampling.sampler import SamplingRows, draw_noise
from baton.engine.speculation.rejection import RejectionVerifier
from baton.engine.speculation.verifiers import ForceVerifier, SyntheticVerifier
from baton.engine.speculation.verify import CoupledVerifier, DraftIds, DraftProbs, VerifyInputs
from baton.kernels.sampling import bounds_triton, residual_triton, sample_triton
from baton.kernels.sampling.rows import DrawRows, Law


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several chunks and tiles of a small vocabulary; integers that wrap without a word."""
    monkeypatch.setattr(sample_triton, "CHUNK", 64)
    monkeypatch.setattr(sample_triton, "GROUP", 4)
    monkeypatch.setattr(sample_triton, "PROGRAMS", 8)
    monkeypatch.setattr(bounds_triton, "TILE", 128)
    monkeypatch.setattr(bounds_triton, "LISTED", 64)
    monkeypatch.setattr(bounds_triton, "FEW", 32)
    monkeypatch.setattr(bounds_triton, "RACED", 32)
    monkeypatch.setattr(residual_triton, "SEARCHED", 4)


def sampling_of(rows):
    """The engine's rows of the same parameters."""
    index_S = (rows.temperature_B > 0).nonzero()[:, 0]
    top_k_B = torch.zeros_like(rows.seed_B) if rows.top_k_B is None else rows.top_k_B
    top_p_B = torch.ones_like(rows.temperature_B) if rows.top_p_B is None else rows.top_p_B
    cut_U = ((top_k_B[index_S] > 0) | (top_p_B[index_S] < 1)).nonzero()[:, 0]
    return SamplingRows(
        index_S=index_S,
        temperature_S=rows.temperature_B[index_S],
        top_k_S=top_k_B[index_S],
        top_p_S=top_p_B[index_S],
        seed_S=rows.seed_B[index_S],
        choice_S=rows.choice_B[index_S],
        truncated_U=cut_U if len(cut_U) else None,
        min_p_S=None if rows.min_p_B is None else rows.min_p_B[index_S],
    )


def drawn_rows(generator, temperatures, **named):
    count = len(temperatures)
    return DrawRows(
        temperature_B=torch.tensor(temperatures, dtype=torch.float64),
        seed_B=torch.randint(0, 1 << 62, (count,), generator=generator),
        choice_B=torch.randint(0, 4, (count,), generator=generator),
        position_B=torch.randint(1, 1 << 20, (count,), generator=generator),
        **named,
    )


def engine_verdict(logits_BQV, rows, drafts):
    """Each sequence by the engine's verifier of its law: tokens [B, Q] and accepted lengths [B]."""
    sampling = sampling_of(rows)
    num_rows, vocab_size = logits_BQV.shape[1:]
    rates = torch.ones(num_rows - 1) if drafts.rates_K is None else drafts.rates_K.cumprod(dim=0)
    by_law = {
        Law.MATCH: (CoupledVerifier(), False),
        Law.FORCE: (ForceVerifier(drafts.forced_len), False),
        Law.SYNTHETIC: (SyntheticVerifier(tuple(rates.tolist())), False),
    }
    noise = draw_noise(sampling, rows.position_B, num_rows, vocab_size, torch.float32)
    token_ids_BQ = torch.zeros(logits_BQV.shape[:2], dtype=torch.int64)
    accepted_len_B = torch.zeros(len(token_ids_BQ), dtype=torch.int64)
    for sequence, law in enumerate(drafts.law_B.tolist()):
        if law < 0:
            continue
        has_probs = drafts.probs_row_B is not None and int(drafts.probs_row_B[sequence]) >= 0
        verifier, probs = by_law.get(Law(law), (None, None))[0], None
        if verifier is None:
            verifier = RejectionVerifier(is_probabilistic=has_probs, block=law == Law.BLOCK)
            if has_probs:
                rows_S = drafts.probs_row_B[sampling.index_S].long().clamp(min=0)
                probs = DraftProbs(drafts.probs_NKC[rows_S], drafts.t2d_V)
        said = verifier.verify(
            VerifyInputs(
                drafts=DraftIds(drafts.ids_BK),
                draft_probs=probs,
                target_logits_BQV=logits_BQV.float().nan_to_num(),
                sampling=sampling,
                noise_SQV=noise,
                position_B=rows.position_B,
                draft_cap_B=drafts.cap_B,
            )
        )
        token_ids_BQ[sequence] = said.token_ids_BQ[sequence]
        accepted_len_B[sequence] = said.accepted_len_B[sequence]
    return token_ids_BQ, accepted_len_B
