"""On a GPU: sampling and verification of big rows give the reference's tokens, wait for nothing, are capturable."""

import pytest
import torch

from baton.kernels.implementation import Implementation
from baton.kernels.sampling import sample_triton
from baton.kernels.sampling.draft_rows import DraftRows
from baton.kernels.sampling.logit_edits import Edits, edit_rows
from baton.kernels.sampling.logprobs import logprobs_topk
from baton.kernels.sampling.rows import DrawRows, Law
from baton.kernels.sampling.sample import sample
from baton.kernels.sampling.verify import NOT_FINITE, post_verify, told_lengths, verify

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
REFERENCE = Implementation.REFERENCE
VOCAB = 151_936
LAWS = (Law.MATCH, Law.MATCH, Law.REJECT, Law.BLOCK, Law.FORCE, Law.SYNTHETIC, Law.IDLE, Law.REJECT)


def generator(seed=0):
    return torch.Generator(device=CUDA).manual_seed(seed)


def rows_of(count, greedy=(), **named):
    temperature_B = torch.ones(count, dtype=torch.float64, device=CUDA)
    for place in greedy:
        temperature_B[place] = 0
    place_B = torch.arange(count, device=CUDA)
    return DrawRows(
        temperature_B=temperature_B, seed_B=place_B * 7919 + 3, choice_B=place_B % 3, position_B=place_B + 5, **named
    )  # fmt: skip


def batch(seed, count=16, num_drafts=3, num_columns=5000):
    random = generator(seed)
    logits_BQV = torch.randn(count, num_drafts + 1, VOCAB, device=CUDA, generator=random).mul_(5).bfloat16()
    d2t_C = torch.arange(num_columns, device=CUDA) * VOCAB // num_columns
    t2d_V = torch.full((VOCAB,), -1, dtype=torch.int32, device=CUDA)
    t2d_V[d2t_C] = torch.arange(num_columns, dtype=torch.int32, device=CUDA)
    ids_BK = logits_BQV[:, :num_drafts].argmax(dim=-1)
    ids_BK[::3, 1] = d2t_C[7]
    drafts = DraftRows(
        ids_BK=ids_BK,
        cap_B=torch.full((count,), num_drafts, device=CUDA),
        law_B=torch.tensor(LAWS * (count // 8), dtype=torch.int32, device=CUDA),
        by_chance=True,
        probs_NKC=torch.randn(count, num_drafts, num_columns, device=CUDA, generator=random).softmax(dim=-1),
        probs_row_B=torch.where(torch.arange(count, device=CUDA) % 8 == 2, -1, torch.arange(count, device=CUDA)).int(),
        t2d_V=t2d_V,
        rates_K=torch.full((num_drafts,), 0.7, dtype=torch.float64, device=CUDA),
        forced_len=2,
    )
    return logits_BQV, rows_of(count, greedy=(0,)), drafts


@pytest.mark.parametrize("seed", range(3))
def test_a_mixed_batch_gets_the_references_tokens(seed):
    logits_BQV, rows, drafts = batch(seed)
    wanted = verify(logits_BQV, rows, drafts, implementation=REFERENCE)
    found = verify(logits_BQV, rows, drafts)
    assert found.token_ids_BQ.tolist() == wanted.token_ids_BQ.tolist()
    assert found.accepted_len_B.tolist() == wanted.accepted_len_B.tolist()


@pytest.mark.parametrize("scale", [1.0, 5.0])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 1.0, 0), (50, 0.9, 0), (0, 0.9, 0), (3000, 0.5, 0.01)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sampled_tokens_are_the_references(scale, top_k, top_p, min_p, dtype):
    count = 24
    logits_BV = torch.randn(count, VOCAB, device=CUDA, generator=generator()).mul_(scale).to(dtype)
    rows = rows_of(
        count,
        greedy=(3,),
        top_k_B=torch.full((count,), top_k, device=CUDA) if top_k else None,
        top_p_B=torch.full((count,), top_p, dtype=torch.float64, device=CUDA) if top_p < 1 else None,
        min_p_B=torch.full((count,), min_p, dtype=torch.float64, device=CUDA) if min_p else None,
    )
    wanted_B = sample(logits_BV, rows, implementation=REFERENCE)
    assert sample(logits_BV, rows).tolist() == wanted_B.tolist()


def test_a_token_is_the_same_in_any_batch():
    logits_BV = torch.randn(64, VOCAB, device=CUDA, generator=generator()).bfloat16()
    rows = rows_of(64, top_p_B=torch.full((64,), 0.95, dtype=torch.float64, device=CUDA))
    whole = sample(logits_BV, rows).tolist()
    for place in (0, 31, 63):
        names = ("temperature_B", "seed_B", "choice_B", "position_B", "top_p_B")
        one = DrawRows(**{name: getattr(rows, name)[place : place + 1] for name in names})
        assert sample(logits_BV[place : place + 1], one).tolist() == [whole[place]]


@pytest.mark.parametrize("count", [1, 16])
@pytest.mark.parametrize(
    ("top_p", "min_p", "equal"), [(0.9, 0, False), (0.2, 0, False), (1.0, 0.02, False), (0.9, 0, True)]
)
def test_flat_rows_and_rows_of_equals_get_the_references_tokens(count, top_p, min_p, equal):
    """Their border lies behind any list."""
    logits_BV = torch.randn(count, VOCAB, device=CUDA, generator=generator(4)).bfloat16()
    if equal:
        logits_BV.fill_(0.5)
    rows = rows_of(
        count,
        top_p_B=torch.full((count,), top_p, dtype=torch.float64, device=CUDA),
        min_p_B=torch.full((count,), min_p, dtype=torch.float64, device=CUDA) if min_p else None,
    )
    wanted_B = sample(logits_BV, rows, implementation=REFERENCE)
    assert sample(logits_BV, rows).tolist() == wanted_B.tolist()


@pytest.mark.parametrize("num_equal", [3, 4, 8, 64])
@pytest.mark.parametrize("count", [3, 200])
def test_rows_whose_mass_lies_in_one_chunk_get_the_references_tokens(count, num_equal):
    """What was nominated may not be what wins; then some of the chunk is raced again."""
    logits_BV = torch.full((count, VOCAB), -30.0, device=CUDA).bfloat16()
    logits_BV[:, 8192 + 4 * torch.arange(num_equal, device=CUDA)] = 0.0
    rows = rows_of(count)
    wanted_B = sample(logits_BV, rows, implementation=REFERENCE)
    assert sample(logits_BV, rows).tolist() == wanted_B.tolist()


@pytest.mark.parametrize("vocab_size", [VOCAB, 50_257, 1_001])
def test_what_a_program_takes_changes_no_bit(monkeypatch, vocab_size):
    logits_BQV = torch.randn(8, 1, vocab_size, device=CUDA, generator=generator(5)).mul_(4).bfloat16()
    top_k_B = torch.tensor([0, 50] * 4, device=CUDA)
    rows = rows_of(8, top_k_B=top_k_B, top_p_B=torch.full((8,), 0.9, dtype=torch.float64, device=CUDA))
    found = []
    for programs in (1, 1 << 30):
        monkeypatch.setattr(sample_triton, "PROGRAMS", programs)
        scan = sample_triton.launch_scan(logits_BQV, rows, None, None)
        reports = logprobs_topk(logits_BQV[:, 0], torch.zeros(8, dtype=torch.int64, device=CUDA), 5)
        found.append((scan.values, scan.maxima, sample(logits_BQV[:, 0], rows), reports))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("num_programs", [1, 1 << 30])
@pytest.mark.parametrize("vocab_size", [VOCAB, 50_258])
def test_programs_of_many_chunks_and_of_one_find_the_references_tokens(monkeypatch, vocab_size, num_programs):
    """Rows without cuts are read two numbers at a time, chunk after chunk by one program, or each chunk by its own."""
    monkeypatch.setattr(sample_triton, "PROGRAMS", num_programs)
    logits_BV = torch.randn(8, vocab_size, device=CUDA, generator=generator(8)).mul_(3).bfloat16()
    rows = rows_of(8, greedy=(2, 5))
    assert sample(logits_BV, rows).tolist() == sample(logits_BV, rows, implementation=REFERENCE).tolist()
    if vocab_size == VOCAB:
        logits_BQV, rows, drafts = batch(11)
        wanted = verify(logits_BQV, rows, drafts, implementation=REFERENCE)
        found = verify(logits_BQV, rows, drafts)
        assert found.token_ids_BQ.tolist() == wanted.token_ids_BQ.tolist()
        assert found.accepted_len_B.tolist() == wanted.accepted_len_B.tolist()


def test_verifications_close_behind_each_other_keep_apart():
    """In a graph: scan, residual and decision each begin before the launch before has ended. Numbers change between."""
    batches = [batch(seed) for seed in range(4)]
    verify(*batches[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [verify(*each) for each in batches]
    for _ in range(3):
        for logits_BQV, rows, _ in batches:
            logits_BQV.mul_(0.75)
            rows.seed_B.add_(1)
        for _ in range(3):  # the last of one replay is close before the first of the next
            graph.replay()
        torch.cuda.synchronize()
        for each, found in zip(batches, captured, strict=True):
            wanted = verify(*each, implementation=REFERENCE)
            assert found.token_ids_BQ.tolist() == wanted.token_ids_BQ.tolist()
            assert found.accepted_len_B.tolist() == wanted.accepted_len_B.tolist()


def test_a_mixed_batch_whose_rows_are_cut_gets_the_references_tokens():
    logits_BQV, rows, drafts = batch(7)
    cut = {
        "top_k_B": torch.tensor([0, 40] * 8, device=CUDA),
        "top_p_B": torch.full((16,), 0.9, dtype=torch.float64, device=CUDA),
    }
    rows = rows_of(16, greedy=(0,), **cut)
    wanted = verify(logits_BQV, rows, drafts, implementation=REFERENCE)
    found = verify(logits_BQV, rows, drafts)
    assert found.token_ids_BQ.tolist() == wanted.token_ids_BQ.tolist()
    assert found.accepted_len_B.tolist() == wanted.accepted_len_B.tolist()


@pytest.mark.parametrize("num_top", [0, 5, 32])
def test_reports_of_equals_are_in_order_of_ids(num_top):
    logits_NV = torch.randn(4, VOCAB, device=CUDA, generator=generator(6)).bfloat16()
    logits_NV[1] = 0.25
    logits_NV[2, 3:] = -torch.inf
    token_N = torch.tensor([0, 7, 5, VOCAB - 1], device=CUDA)
    wanted_NX = logprobs_topk(logits_NV, token_N, num_top, implementation=REFERENCE)
    found_NX = logprobs_topk(logits_NV, token_N, num_top)
    assert torch.equal(found_NX[:, num_top + 1 :], wanted_NX[:, num_top + 1 :])
    assert torch.allclose(found_NX, wanted_NX, atol=1e-5)


def test_reports_and_edits_are_the_references():
    logits_BQV = torch.randn(4, 2, VOCAB, device=CUDA, generator=generator()).bfloat16()
    token_N = torch.arange(8, device=CUDA) * 1000
    flat_NV = logits_BQV.flatten(0, 1)
    wanted_NX = logprobs_topk(flat_NV, token_N, 20, implementation=REFERENCE)
    found_NX = logprobs_topk(flat_NV, token_N, 20)
    assert torch.equal(found_NX[:, 21:], wanted_NX[:, 21:])
    assert torch.allclose(found_NX, wanted_NX, atol=1e-5)
    edits = Edits(
        sequence_P=torch.tensor([2, 0], device=CUDA),
        drafts_BK=torch.tensor([[1], [2], [3], [4]], device=CUDA),
        bias_ids_PW=torch.tensor([[5], [VOCAB - 1]], device=CUDA),
        bias_values_PW=torch.tensor([[2.0], [-3.0]], dtype=torch.float64, device=CUDA),
        penalties_P3=torch.tensor([[1.2, 0.5, 0.1], [1, 0, 0]], dtype=torch.float64, device=CUDA),
        counts_NX=torch.randint(0, 3, (3, VOCAB), device=CUDA, generator=generator()).int(),
        in_prompt_NX=torch.zeros(3, VOCAB, dtype=torch.bool, device=CUDA),
        slot_P=torch.tensor([2, 0], device=CUDA),
    )
    wanted, found = edit_rows(logits_BQV, edits, implementation=REFERENCE), edit_rows(logits_BQV, edits)
    assert torch.allclose(found.logits_EV, wanted.logits_EV, atol=1e-5)
    assert torch.equal(found.place_R, wanted.place_R)


@pytest.mark.parametrize("is_cut", [False, True])
def test_nothing_waits_and_a_graph_replays_the_same(is_cut):
    logits_BQV, rows, drafts = batch(9)
    if is_cut:
        rows = rows_of(16, greedy=(0,), top_k_B=torch.full((16,), 40, device=CUDA))
    counts_Q = torch.zeros(4, dtype=torch.int64, device=CUDA)
    length_B = torch.arange(16, device=CUDA)
    verify(logits_BQV, rows, drafts, counts_Q=counts_Q)
    torch.cuda.synchronize()
    counts_Q.zero_()
    torch.cuda.set_sync_debug_mode("error")
    try:
        eager = verify(logits_BQV, rows, drafts, counts_Q=counts_Q)
        after = post_verify(eager, length_B, logits_BQV)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    live_B = eager.accepted_len_B[drafts.law_B >= 0]
    assert counts_Q.tolist() == torch.bincount(live_B, minlength=4).tolist()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = verify(logits_BQV, rows, drafts, counts_Q=counts_Q)
        again = post_verify(captured, length_B, logits_BQV)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured.token_ids_BQ, eager.token_ids_BQ)
    assert torch.equal(captured.accepted_len_B, eager.accepted_len_B)
    assert torch.equal(again.last_row_B, after.last_row_B)
    assert torch.equal(after.told_len_B, told_lengths(eager.accepted_len_B, logits_BQV))
    logits_BQV[3, 0] = torch.nan
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(again.told_len_B, told_lengths(captured.accepted_len_B, logits_BQV))
    assert again.told_len_B[3] >= NOT_FINITE
    assert int(captured.token_ids_BQ.min()) >= 0
    assert int(captured.token_ids_BQ.max()) < logits_BQV.shape[2]
