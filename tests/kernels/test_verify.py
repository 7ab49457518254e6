"""Verification of mixed batches: the kernels, interpreted, and their reference against the engine's verifiers."""

import itertools
import math
import random

import pytest
import torch

from baton.core.errors import KernelArgumentInvalid
from baton.kernels.implementation import Implementation
from baton.kernels.sampling import verify as verify_module
from baton.kernels.sampling.draft_rows import DraftRows
from baton.kernels.sampling.rows import Law
from baton.kernels.sampling.verify import NOT_FINITE, Verdict, post_verify, verify
from baton.tests.kernels.sampling_cases import drawn_rows, engine_verdict, small_tiles  # noqa: F401

TRITON, REFERENCE = Implementation.TRITON, Implementation.REFERENCE
LAWS = [Law.IDLE, Law.MATCH, Law.REJECT, Law.BLOCK, Law.FORCE, Law.SYNTHETIC, Law.MATCH, Law.BLOCK, Law.REJECT]


def mixed(seed, num_drafts, vocab_size, num_columns=0, top_k=False):
    """A batch with every law, greedy and drawn; drafts that mostly stand, some missing, some past a cap."""
    generator = torch.Generator().manual_seed(seed)
    count = len(LAWS)
    logits_BQV = (torch.randn(count, num_drafts + 1, vocab_size, generator=generator) * 2).bfloat16()
    temperatures = [1.0, 0.0, 0.8, 1.0, 0.7, 0.0, 1.2, 1.0, 1.0]
    rows = drawn_rows(generator, temperatures, top_k_B=torch.arange(count) * 3 if top_k else None)
    ids_BK = logits_BQV.float().argmax(dim=-1)[:, :num_drafts]
    others_BK = torch.randint(0, vocab_size, ids_BK.shape, generator=generator)
    ids_BK = torch.where(torch.rand(ids_BK.shape, generator=generator) < 0.3, others_BK, ids_BK)
    t2d_V = None
    if num_columns:
        d2t_C = torch.randperm(vocab_size, generator=generator)[:num_columns].sort().values
        t2d_V = torch.full((vocab_size,), -1).index_copy(0, d2t_C, torch.arange(num_columns))
    if num_drafts > 1:
        ids_BK[4, 1] = -1
    probs_NKC = torch.rand(count, num_drafts, num_columns or vocab_size, generator=generator).softmax(dim=-1)
    # What nobody may read: rows of point masses, and of sequences that are not judged by chance.
    probs_row_B = torch.tensor([-1, -1, 2, 3, -1, -1, -1, 7, -1], dtype=torch.int32)
    probs_NKC[probs_row_B < 0] = torch.nan
    drafts = DraftRows(
        ids_BK=ids_BK,
        cap_B=torch.randint(1, num_drafts + 2, (count,), generator=generator),
        law_B=torch.tensor(LAWS, dtype=torch.int32),
        by_chance=True,
        probs_NKC=probs_NKC if num_drafts else None,
        probs_row_B=probs_row_B if num_drafts else None,
        t2d_V=t2d_V if num_drafts else None,
        rates_K=torch.full((num_drafts,), 0.7, dtype=torch.float64),
        forced_len=1,
    )
    return logits_BQV, rows, drafts


def check(logits_BQV, rows, drafts):
    wanted_BQ, accepted_B = engine_verdict(logits_BQV, rows, drafts)
    for implementation in (REFERENCE, TRITON):
        counts_Q = torch.zeros(logits_BQV.shape[1], dtype=torch.int64)
        found = verify(logits_BQV, rows, drafts, counts_Q=counts_Q, implementation=implementation)
        assert found.token_ids_BQ.tolist() == wanted_BQ.tolist()
        assert found.accepted_len_B.tolist() == accepted_B.tolist()
        live_B = accepted_B[drafts.law_B >= 0]
        assert counts_Q.tolist() == torch.bincount(live_B, minlength=len(counts_Q)).tolist()


@pytest.mark.parametrize(
    ("seed", "num_drafts", "vocab_size"), [(0, 3, 100), (1, 1, 64), (2, 2, 4), (3, 0, 30), (4, 1, 71), (5, 6, 64)]
)
def test_a_mixed_batch_gets_what_the_engines_verifiers_give(seed, num_drafts, vocab_size):
    check(*mixed(seed, num_drafts, vocab_size))


def test_drafts_of_a_smaller_head_are_judged_by_its_probabilities():
    check(*mixed(4, 2, 90, num_columns=30))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 30))
def test_many_mixed_batches(seed):
    check(*mixed(seed, seed % 4, 40 + 17 * (seed % 5), num_columns=20 * (seed % 2), top_k=seed % 3 == 0))


def test_rows_past_the_last_usable_draft_are_not_read():
    logits_BQV, rows, drafts = mixed(5, 2, 30)
    wanted = verify(logits_BQV, rows, drafts, implementation=TRITON)
    for sequence, cap in enumerate(drafts.cap_B.tolist()):
        logits_BQV[sequence, cap + 1 :] = torch.nan
    found = verify(logits_BQV, rows, drafts, implementation=TRITON)
    assert torch.equal(found.token_ids_BQ, wanted.token_ids_BQ)
    assert torch.equal(found.accepted_len_B, wanted.accepted_len_B)


def test_coupled_tokens_are_those_without_drafts():
    """Row by row with the same noise: speculation changes no token, only how many come at once."""
    logits_BQV, rows, drafts = mixed(6, 2, 30)
    matching = DraftRows(ids_BK=drafts.ids_BK, cap_B=drafts.cap_B, law_B=torch.zeros_like(drafts.law_B))
    found = verify(logits_BQV, rows, matching, implementation=TRITON)
    for place in range(3):
        alone = DraftRows(
            ids_BK=drafts.ids_BK[:, :0].contiguous(), cap_B=drafts.cap_B * 0, law_B=torch.zeros_like(drafts.law_B)
        )
        later = drawn_rows(torch.Generator(), rows.temperature_B.tolist())
        later = type(rows)(
            temperature_B=later.temperature_B,
            seed_B=rows.seed_B,
            choice_B=rows.choice_B,
            position_B=rows.position_B + place,
        )
        single = verify(logits_BQV[:, place : place + 1].contiguous(), later, alone, implementation=TRITON)
        is_emitted_B = found.accepted_len_B >= place
        assert torch.equal(found.token_ids_BQ[is_emitted_B, place], single.token_ids_BQ[is_emitted_B, 0])


def test_the_law_of_one_draft_is_the_targets(monkeypatch):
    """Every draft times every pair of draws, of a grid on which all borders lie: exact, for both ways of judging."""
    p_V, q_V = torch.tensor([3, 3, 1, 1]) / 8, torch.full((4,), 0.25)
    grid = [(place + 0.5) / 8 for place in range(8)]
    logits_BQV = torch.stack([p_V.log(), torch.zeros(4)])[None].float()
    rows = drawn_rows(torch.Generator(), [1.0])
    draws = {}
    monkeypatch.setattr(verify_module._Sequence, "_uniforms", lambda self, count, purpose: draws[purpose])
    for law in (Law.REJECT, Law.BLOCK):
        mass_V = torch.zeros(4)
        for draft, first, second in itertools.product(range(4), grid, grid):
            draws.update({1: [first], 2: [second]})
            drafts = DraftRows(
                ids_BK=torch.tensor([[draft]]),
                cap_B=torch.ones(1, dtype=torch.int64),
                law_B=torch.tensor([law], dtype=torch.int32),
                by_chance=True,
                probs_NKC=q_V[None, None],
                probs_row_B=torch.zeros(1, dtype=torch.int32),
            )
            token = int(verify(logits_BQV, rows, drafts, implementation=REFERENCE).token_ids_BQ[0, 0])
            mass_V[token] += float(q_V[draft]) / 64
        assert torch.allclose(mass_V, p_V, atol=1e-6)


@pytest.mark.fast
def test_post_verify_says_where_sequences_stand():
    verdict = Verdict(torch.tensor([[5, 6, 7], [8, 0, 0], [9, 4, 0]]), torch.tensor([2, 0, 1]))
    for implementation in (TRITON, REFERENCE):
        logits_BQV = torch.zeros(3, 3, 5, dtype=torch.bfloat16)
        after = post_verify(verdict, torch.tensor([10, 20, 30]), logits_BQV, implementation=implementation)
        assert after.last_token_B.tolist() == [7, 8, 4]
        assert after.length_B.tolist() == [13, 21, 32]
        assert after.last_row_B.tolist() == [2, 3, 7]
        assert after.told_len_B.tolist() == [2, 0, 1]


@pytest.mark.fast
@pytest.mark.parametrize("num_rows", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_host_is_told_of_what_was_chosen_from_numbers_that_are_not_finite(num_rows, dtype):
    rng, generator = random.Random(f"{num_rows} {dtype}"), torch.Generator().manual_seed(num_rows)
    wide_BQV = torch.randn(150, num_rows, 9, generator=generator).to(dtype)
    logits_BQV = wide_BQV[:, :, :5]
    accepted_len_B = torch.randint(0, num_rows, (150,), generator=generator)
    wanted = accepted_len_B.tolist()
    for sequence in range(0, 150, 2):
        place = rng.randrange(num_rows)
        wrong = rng.choice([math.nan, math.inf, -math.inf])  # the last is what a rank has without a token of its own
        logits_BQV[sequence, place] = wrong
        wanted[sequence] += NOT_FINITE * (place <= wanted[sequence] and wrong != -math.inf)
    assert max(wanted) >= NOT_FINITE > num_rows > min(wanted)
    verdict = Verdict(torch.zeros(150, num_rows, dtype=torch.int64), accepted_len_B)
    for implementation in (TRITON, REFERENCE):
        after = post_verify(verdict, accepted_len_B, logits_BQV, implementation=implementation)
        assert after.told_len_B.tolist() == wanted
        assert torch.equal(after.length_B, 2 * accepted_len_B + 1), "a sequence stands where it would anyway"


@pytest.mark.parametrize("implementation", [TRITON, REFERENCE])
@pytest.mark.parametrize("fill", [math.nan, math.inf, -math.inf])
@pytest.mark.filterwarnings("ignore:All-NaN")  # of numpy, in the interpreter
def test_of_rows_that_are_not_finite_some_token_is_chosen(fill, implementation):
    """An id outside of the vocabulary would be read from outside of the embedding by what is launched next."""
    logits_BQV, rows, drafts = mixed(11, 3, 100)
    logits_BQV[::2] = fill
    logits_BQV[1::2, :, 40:] = fill
    found = verify(logits_BQV, rows, drafts, implementation=implementation)
    assert 0 <= int(found.token_ids_BQ.min()) <= int(found.token_ids_BQ.max()) < 100
    assert 0 <= int(found.accepted_len_B.min()) <= int(found.accepted_len_B.max()) <= 3


@pytest.mark.fast
@pytest.mark.parametrize("implementation", [TRITON, REFERENCE])
def test_a_verdict_without_a_row_is_refused(implementation):
    nothing, zero_B = torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(KernelArgumentInvalid, match="token_ids_BQ"):
        post_verify(Verdict(nothing, zero_B), zero_B, torch.zeros(2, 0, 5), implementation=implementation)
    verdict = Verdict(torch.zeros(2, 1, dtype=torch.int64), zero_B)
    for logits_BQV in (torch.zeros(2, 2, 5), torch.zeros(2, 1, 0), torch.zeros(2, 1, 5, dtype=torch.int32)):
        with pytest.raises(KernelArgumentInvalid, match="logits_BQV"):
            post_verify(verdict, zero_B, logits_BQV, implementation=implementation)


@pytest.mark.fast
def test_arguments_that_do_not_fit_are_named():
    logits_BQV, rows, drafts = mixed(7, 1, 10)
    fields = {name: getattr(drafts, name) for name in DraftRows.__dataclass_fields__}
    for name, wrong in (
        ("ids_BK", drafts.ids_BK.int()),
        ("cap_B", drafts.cap_B[:2]),
        ("law_B", drafts.law_B.long()),
        ("probs_NKC", drafts.probs_NKC[..., :4].contiguous()),
        ("probs_row_B", None),
        ("t2d_V", torch.zeros(3, dtype=torch.int64)),
    ):
        with pytest.raises(KernelArgumentInvalid, match=name):
            verify(logits_BQV, rows, DraftRows(**{**fields, name: wrong}), implementation=TRITON)
    with pytest.raises(KernelArgumentInvalid, match="counts_Q"):
        verify(logits_BQV, rows, drafts, counts_Q=torch.zeros(5, dtype=torch.int64), implementation=TRITON)
