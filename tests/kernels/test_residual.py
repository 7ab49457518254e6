"""What drafts leave over: the draw after a rejected draft, where little or nothing is left; interpreted kernels."""

import pytest
import torch

from baton.kernels.implementation import Implementation
from baton.kernels.sampling import residual_triton
from baton.kernels.sampling.draft_rows import DraftRows
from baton.kernels.sampling.rows import Law
from baton.kernels.sampling.verify import verify
from baton.tests.kernels.sampling_cases import drawn_rows, engine_verdict, small_tiles  # noqa: F401

TRITON, REFERENCE = Implementation.TRITON, Implementation.REFERENCE


def drafts_of(ids_BK, law, probs_NKC=None, probs_row_B=None, t2d_V=None):
    """All of them may be accepted."""
    count, num_drafts = ids_BK.shape
    laws = law if isinstance(law, list) else [law] * count
    return DraftRows(
        ids_BK=ids_BK,
        cap_B=torch.full((count,), num_drafts),
        law_B=torch.tensor(laws, dtype=torch.int32),
        by_chance=True,
        probs_NKC=probs_NKC,
        probs_row_B=None if probs_row_B is None else torch.tensor(probs_row_B, dtype=torch.int32),
        t2d_V=t2d_V,
    )


def check(logits_BQV, rows, drafts):
    """The accepted lengths, once kernels and reference agree."""
    wanted = verify(logits_BQV, rows, drafts, implementation=REFERENCE)
    found = verify(logits_BQV, rows, drafts, implementation=TRITON)
    assert found.token_ids_BQ.tolist() == wanted.token_ids_BQ.tolist()
    assert found.accepted_len_B.tolist() == wanted.accepted_len_B.tolist()
    return wanted.accepted_len_B


@pytest.mark.parametrize("law", [Law.REJECT, pytest.param(Law.BLOCK, marks=pytest.mark.slow)])
def test_after_a_point_mass_its_token_is_never_drawn(law):
    """The draft has most of a chunk; what is left there and elsewhere is drawn as often as the reference draws it."""
    generator = torch.Generator().manual_seed(int(law))
    count, vocab_size = 10, 140
    logits_BQV = torch.randn(count, 2, vocab_size, generator=generator)
    ids_B1 = torch.randint(0, vocab_size, (count, 1), generator=generator)
    logits_BQV[:, 0].scatter_(1, ids_B1, 5.0)
    rows = drawn_rows(generator, [1.0] * count)
    accepted_B = check(logits_BQV, rows, drafts_of(ids_B1, law))
    assert 0 < int(accepted_B.sum()) < count
    token_ids_BQ = verify(logits_BQV, rows, drafts_of(ids_B1, law), implementation=TRITON).token_ids_BQ
    assert not (token_ids_BQ[accepted_B == 0, 0] == ids_B1[accepted_B == 0, 0]).any()


def test_a_chunk_of_which_a_draft_is_all_is_passed_over():
    """Cut by top-k, or masked: the draft is the only token of its chunk, and the first or the last of the row."""
    generator = torch.Generator().manual_seed(3)
    count, vocab_size = 8, 192
    logits_BQV = torch.full((count, 2, vocab_size), -torch.inf)
    logits_BQV[:, :, 70:80] = torch.randn(count, 2, 10, generator=generator)
    ids_B1 = torch.tensor([0, vocab_size - 1] * (count // 2))[:, None]
    logits_BQV[:, 0].scatter_(1, ids_B1, 1.0)
    logits_BQV[::4, 0, 100:] = -4.0  # of these top-k leaves the draft, and no other token of its chunk
    top_k_B = torch.tensor([3, 0, 0, 4] * (count // 4))
    rows = drawn_rows(generator, [1.0] * count, top_k_B=top_k_B)
    assert int(check(logits_BQV, rows, drafts_of(ids_B1, Law.REJECT)).sum()) < count


def test_a_draft_that_is_masked_leaves_everything_over():
    generator = torch.Generator().manual_seed(4)
    logits_BQV = torch.randn(8, 2, 130, generator=generator)
    logits_BQV[:, :, 5:60] = -torch.inf
    drafts = drafts_of(torch.full((8, 1), 7), Law.REJECT)
    assert not check(logits_BQV, drawn_rows(generator, [0.7] * 8), drafts).any()


def test_where_nothing_is_left_over_the_target_is_drawn_from():
    """Drafts that claim to be likelier than the target has any token: half of them fall, and leave nothing."""
    generator = torch.Generator().manual_seed(5)
    logits_BQV = torch.randn(8, 2, 130, generator=generator)
    probs_BKC = 2 * logits_BQV[:, :1].softmax(dim=-1)
    ids_B1 = torch.randint(0, 130, (8, 1), generator=generator)
    drafts = drafts_of(ids_B1, Law.REJECT, probs_BKC, list(range(8)))
    accepted_B = check(logits_BQV, drawn_rows(generator, [1.0] * 8), drafts)
    assert 0 < int(accepted_B.sum()) < 8


def test_sequences_may_share_a_row_of_probabilities(monkeypatch):
    """Those that are not judged by chance have no say in it; programs take several chunks each."""
    monkeypatch.setattr(residual_triton, "PROGRAMS", 4)
    generator = torch.Generator().manual_seed(6)
    laws = [Law.BLOCK, Law.MATCH, Law.REJECT, Law.REJECT, Law.BLOCK, Law.BLOCK, Law.REJECT]
    count, num_drafts, vocab_size = len(laws), 2, 200
    logits_BQV = (torch.randn(count, num_drafts + 1, vocab_size, generator=generator) * 2).bfloat16()
    probs_NKC = torch.randn(3, num_drafts, vocab_size, generator=generator).mul_(2).softmax(dim=-1)
    ids_BK = logits_BQV[:, :num_drafts].float().argmax(dim=-1)
    drafts = drafts_of(ids_BK, laws, probs_NKC, [1, 1, 1, -1, 0, 1, 0])
    rows = drawn_rows(generator, [1.0, 1.0, 1.0, 1.0, 0.8, 1.0, 0.0])
    token_ids_BQ, accepted_B = engine_verdict(logits_BQV, rows, drafts)
    found = verify(logits_BQV, rows, drafts, implementation=TRITON)
    assert found.token_ids_BQ.tolist() == token_ids_BQ.tolist()
    assert found.accepted_len_B.tolist() == accepted_B.tolist()


@pytest.mark.parametrize("law", [pytest.param(Law.REJECT, marks=pytest.mark.slow), Law.BLOCK])
def test_seven_drafts_of_a_smaller_head(law):
    generator = torch.Generator().manual_seed(7)
    count, num_drafts, vocab_size, num_columns = 4, 7, 150, 40
    logits_BQV = torch.randn(count, num_drafts + 1, vocab_size, generator=generator)
    d2t_C = torch.randperm(vocab_size, generator=generator)[:num_columns].sort().values
    t2d_V = torch.full((vocab_size,), -1).index_copy(0, d2t_C, torch.arange(num_columns)).int()
    logits_BQV[..., d2t_C] += 2.0
    probs_NKC = logits_BQV[:, :num_drafts, d2t_C].mul(0.9).softmax(dim=-1)
    ids_BK = d2t_C[probs_NKC.flatten(0, 1).multinomial(1, generator=generator)].view(count, num_drafts)
    drafts = drafts_of(ids_BK, law, probs_NKC, list(range(count)), t2d_V)
    accepted_B = check(logits_BQV, drawn_rows(generator, [1.0] * count), drafts)
    assert 0 < int(accepted_B.sum()) < count * num_drafts
