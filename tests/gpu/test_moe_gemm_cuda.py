"""On a GPU: the MoE kernels at the sizes that are served, without waiting for the device, and from a graph."""

from dataclasses import replace

import pytest
import torch

from baton.kernels.implementation import Implementation
from baton.kernels.moe import gemm_hopper_triton
from baton.kernels.moe.align import moe_align
from baton.kernels.moe.fake_balance import ACKNOWLEDGEMENT, fake_balance_experts
from baton.kernels.moe.gemm import Fp8ExpertWeights, dequantize, experts_grouped
from baton.kernels.moe.gemm_masked import moe_gemm_masked
from baton.kernels.moe.held_experts import HeldExperts
from baton.kernels.moe.select_topk import Scoring, select_topk
from baton.tests.kernels.moe_inputs import some_experts

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
REFERENCE = Implementation.REFERENCE
FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def same_bits(left, right):
    return left.dtype == right.dtype and torch.equal(
        left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)
    )


def relative_error(found, wanted):
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def without_waiting(compute):
    """Once to compile, once where a wait is an error, once captured and replayed over poison: all the same bits."""
    compute()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        eager = compute()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = compute()
    for tensor in captured:
        tensor.view(torch.uint8).fill_(0x7F)
    graph.replay()
    torch.cuda.synchronize()
    for one, other in zip(eager, captured, strict=True):
        assert same_bits(one, other)
    return eager


def blocks(shape):
    values = torch.empty(shape, dtype=FP8, device=CUDA)
    for part in values:
        part.copy_(torch.randn(part.shape, device=CUDA))
    groups = (shape[0], -(-shape[1] // 128), shape[2] // 128)
    return values, (torch.rand(groups, device=CUDA) + 0.5) / shape[2] ** 0.5


def weights_of(num_experts, inner_size, hidden, kind):
    gate_up, gate_up_scale = blocks((num_experts, 2 * inner_size, hidden))
    down, down_scale = blocks((num_experts, hidden, inner_size))
    if kind in ("fp8", "ue8m0"):
        return Fp8ExpertWeights(gate_up, gate_up_scale, down, down_scale, ue8m0=kind == "ue8m0")
    from baton.kernels.moe.moe import ExpertWeights

    wide = torch.empty(gate_up.shape, dtype=torch.bfloat16, device=CUDA)
    wide_down = torch.empty(down.shape, dtype=torch.bfloat16, device=CUDA)
    for its in range(num_experts):
        wide[its] = dequantize(gate_up[its], gate_up_scale[its])
        wide_down[its] = dequantize(down[its], down_scale[its])
    return ExpertWeights(wide, wide_down)


@pytest.mark.parametrize("kind", ["bf16", "fp8", "ue8m0"])
@pytest.mark.parametrize(("num_experts", "inner_size", "hidden"), [(128, 768, 2048), (256, 512, 2048), (8, 384, 1024)])
def test_the_moe_output_is_its_reference_and_a_row_depends_on_itself(kind, num_experts, inner_size, hidden):
    torch.backends.cuda.matmul.allow_tf32 = False
    weights = weights_of(num_experts, inner_size, hidden, kind)
    for num_tokens in (1, 7, 16, 65, 300):
        x_TD = torch.randn(num_tokens, hidden, device=CUDA).bfloat16()
        weight_TK, expert_TK = select_topk(torch.randn(num_tokens, num_experts, device=CUDA), 8, renormalise=True)
        expert_TK[-1, 3] = -1
        inputs = x_TD, weight_TK, expert_TK, weights
        (found_TD,) = without_waiting(lambda: (experts_grouped(*inputs),))  # noqa: B023
        assert relative_error(found_TD, experts_grouped(*inputs, implementation=REFERENCE)) < 1e-2
        (whole_TD,) = without_waiting(lambda: (experts_grouped(*inputs, invariant=True),))  # noqa: B023
        assert relative_error(whole_TD, found_TD) < 1e-2
        part = slice(num_tokens // 2, num_tokens // 2 + 1)
        alone_TD = experts_grouped(x_TD[part], weight_TK[part], expert_TK[part], weights, invariant=True)
        assert same_bits(alone_TD, whole_TD[part])


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize(("inner_size", "hidden"), [(512, 2048), (384, 1024)])
def test_a_shared_expert_is_one_more_choice(kind, inner_size, hidden):
    """Chosen, weighed and computed with the others; as an expert that no flag names, up to the tiles."""
    torch.backends.cuda.matmul.allow_tf32 = False
    weights = replace(weights_of(257, inner_size, hidden, kind), has_shared=True)
    for num_tokens in (1, 2, 7, 64, 300):
        x_TD = torch.randn(num_tokens, hidden, device=CUDA).bfloat16()
        rows_TX = torch.randn(num_tokens, 264, device=CUDA).bfloat16()
        router = {"renormalise": True, "has_shared": True, "gate_T1": rows_TX[:, 256:257]}
        weight_TK, expert_TK = without_waiting(lambda: select_topk(rows_TX[:, :256], 8, **router))  # noqa: B023
        wanted_TK, theirs_TK = select_topk(rows_TX[:, :256], 8, **router, implementation=REFERENCE)
        assert torch.equal(expert_TK, theirs_TK)
        assert torch.allclose(weight_TK, wanted_TK, rtol=1e-5)
        inputs = x_TD, weight_TK, expert_TK
        (found_TD,) = without_waiting(lambda: (experts_grouped(*inputs, weights),))  # noqa: B023
        assert relative_error(found_TD, experts_grouped(*inputs, weights, implementation=REFERENCE)) < 1e-2
        assert relative_error(found_TD, experts_grouped(*inputs, replace(weights, has_shared=False))) < 1e-2


def both_forms(inputs, monkeypatch, **options):
    """By warps that are specialized, and by the other form: memory that either gets is full of NaN before."""
    found = []
    for is_specialized in (True, False):
        monkeypatch.setattr(gemm_hopper_triton, "fits", lambda *_, is_it=is_specialized: is_it)
        # More than any layer here takes: what the allocator hands out next.
        poison = torch.full((1 << 28,), 0xFF, dtype=torch.uint8, device=CUDA)
        del poison
        (out_TD,) = without_waiting(lambda: (experts_grouped(*inputs, **options),))
        found.append(out_TD)
    return found


@pytest.mark.parametrize(("inner_size", "hidden"), [(128, 256), (512, 2048), (384, 1024), (2048, 7168)])
@pytest.mark.parametrize("counts", [[1, 63, 64, 65, 0, 127], [128, 129, 0, 192, 193, 1], [0, 0, 0, 0, 0, 300]])
def test_chunks_by_specialized_warps_have_the_bits_of_the_other_form(counts, inner_size, hidden, monkeypatch):
    weights = weights_of(len(counts), inner_size, hidden, "fp8")
    expert_T = torch.arange(len(counts), device=CUDA).repeat_interleave(torch.tensor(counts, device=CUDA))
    expert_TK = expert_T[torch.randperm(len(expert_T), device=CUDA)][:, None]
    x_TD = torch.randn(len(expert_TK), hidden, device=CUDA).bfloat16()
    x_TD[3] = float("nan")  # one token's; no other's business
    weight_TK = torch.rand(expert_TK.shape, device=CUDA)
    found_TD, wanted_TD = both_forms((x_TD, weight_TK, expert_TK, weights), monkeypatch)
    is_finite_T = torch.arange(len(x_TD), device=CUDA) != 3
    assert found_TD[is_finite_T].isfinite().all()
    assert same_bits(found_TD[is_finite_T], wanted_TD[is_finite_T])
    reference_TD = experts_grouped(x_TD, weight_TK, expert_TK, weights, implementation=REFERENCE)
    assert relative_error(found_TD[is_finite_T], reference_TD[is_finite_T]) < 1e-2


@pytest.mark.parametrize("seed", range(6))
def test_drawn_chunks_by_specialized_warps(seed, monkeypatch):
    draw = torch.Generator().manual_seed(seed)

    def drawn(*values):
        return values[int(torch.randint(len(values), (), generator=draw))]

    num_experts, num_chosen = drawn(8, 33, 256), drawn(1, 4, 8)
    weights = weights_of(num_experts, drawn(128, 512, 768), drawn(512, 2048, 2560), drawn("fp8", "ue8m0"))
    num_tokens = drawn(5, 130, 1000, 3001)
    x_TD = torch.randn(num_tokens, weights.down_EDI.shape[1], device=CUDA).bfloat16()
    logits_TE = torch.randn(num_tokens, num_experts, device=CUDA) + 2 * torch.randn(num_experts, device=CUDA)
    weight_TK, expert_TK = logits_TE.softmax(dim=1).topk(num_chosen, dim=1)
    expert_TK[num_tokens // 2, 0] = -1
    held = drawn(None, HeldExperts(num_experts // 4, num_experts // 2, num_experts))
    if held is not None:
        weights = some_experts(weights, slice(held.first, held.first + held.count), held)
    dtype = drawn(torch.bfloat16, torch.float32)
    assert same_bits(*both_forms((x_TD, weight_TK, expert_TK, weights), monkeypatch, out_dtype=dtype))


@pytest.mark.parametrize(
    ("num_experts", "num_outputs", "num_inputs"), [(128, 1536, 2048), (32, 4096, 7168), (5, 192, 384)]
)
@pytest.mark.parametrize("num_rows", [4, 16, 64, 100])
def test_the_masked_gemm_is_its_reference(num_experts, num_outputs, num_inputs, num_rows):
    b_ENK, b_scale = blocks((num_experts, num_outputs, num_inputs))
    masked_m_E = torch.randint(0, num_rows + 1, (num_experts,), dtype=torch.int32, device=CUDA)
    masked_m_E[1] = 0
    is_row_EM = torch.arange(num_rows, device=CUDA) < masked_m_E[:, None]
    a_EMK = torch.randn(num_experts, num_rows, num_inputs, device=CUDA).bfloat16()
    a_EMK[~is_row_EM] = float("nan")
    before_EMN = torch.full((num_experts, num_rows, num_outputs), 7.0, dtype=torch.bfloat16, device=CUDA)
    wanted_EMN = moe_gemm_masked(
        a_EMK, masked_m_E, b_ENK, b_scale=b_scale, out_EMN=before_EMN.clone(), implementation=REFERENCE
    )
    for options in ({}, {"swap_ab": False}, {"num_sms": 7}, {"invariant": True}):
        out_EMN = before_EMN.clone()
        moe_gemm_masked(a_EMK, masked_m_E, b_ENK, b_scale=b_scale, out_EMN=out_EMN, **options)
        assert same_bits(out_EMN[~is_row_EM], before_EMN[~is_row_EM])
        assert relative_error(out_EMN[is_row_EM], wanted_EMN[is_row_EM]) < 1e-2

    def compute():
        out_EMN.copy_(before_EMN)
        return (moe_gemm_masked(a_EMK, masked_m_E, b_ENK, b_scale=b_scale, out_EMN=out_EMN).clone(),)

    (again_EMN,) = without_waiting(compute)
    assert same_bits(again_EMN[~is_row_EM], before_EMN[~is_row_EM])


@pytest.mark.parametrize("num_experts", [128, 256])
@pytest.mark.parametrize("num_tokens", [1, 64, 256, 3000])
def test_routing_is_its_reference(num_tokens, num_experts):
    logits_TE = torch.randn(num_tokens, num_experts, device=CUDA).bfloat16()  # which tie often
    logits_TE[0, ::3] = float("nan")
    grouped = {"scoring": Scoring.SIGMOID, "num_groups": 8, "num_kept_groups": 4, "scaling": 2.5}
    weight_TK, expert_TK = without_waiting(lambda: select_topk(logits_TE, 8, renormalise=True))
    wanted_weight_TK, wanted_TK = select_topk(logits_TE, 8, renormalise=True, implementation=REFERENCE)
    assert torch.equal(expert_TK, wanted_TK)
    assert torch.allclose(weight_TK, wanted_weight_TK, rtol=1e-5)
    weight_TK, _ = select_topk(logits_TE, 8, renormalise=True, **grouped)
    wanted_weight_TK, _ = select_topk(logits_TE, 8, renormalise=True, implementation=REFERENCE, **grouped)
    assert torch.allclose(weight_TK, wanted_weight_TK, rtol=1e-4)

    def align():
        found = moe_align(expert_TK, num_experts)
        used = found.block_expert.ge(0).repeat_interleave(16, output_size=len(found.rows))
        return found.block_expert, torch.where(used, found.rows, -1)

    block_expert, rows = without_waiting(align)
    wanted = moe_align(expert_TK, num_experts, implementation=REFERENCE)
    assert torch.equal(block_expert, wanted.block_expert)
    assert torch.equal(rows, wanted.rows)


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("num_tokens", [1, 64])
def test_ranks_that_hold_whole_experts_make_the_moe_output_together(num_tokens, kind):
    weights = weights_of(128, 384, 1024, kind)
    x_TD = torch.randn(num_tokens, 1024, device=CUDA).bfloat16()
    weight_TK, expert_TK = torch.randn(num_tokens, 128, device=CUDA).softmax(dim=1).topk(8, dim=1)
    total_TD = torch.zeros(num_tokens, 1024, device=CUDA)
    for rank in range(4):
        held = HeldExperts.of_rank(128, rank, 4)
        part = some_experts(weights, slice(held.first, held.first + held.count), held)
        (part_TD,) = without_waiting(
            lambda part=part: (experts_grouped(x_TD, weight_TK, expert_TK, part, out_dtype=torch.float32),)
        )
        total_TD += part_TD
    wanted_TD = experts_grouped(x_TD, weight_TK, expert_TK, weights, out_dtype=torch.float32)
    assert relative_error(total_TD, wanted_TD) < 6e-3


def test_the_balanced_pattern_is_its_reference():
    options = {"num_experts": 256, "ep_size": 8, "dp_rank": 3, "dp_size": 4, "benchmark": ACKNOWLEDGEMENT}
    results = []
    for which in (Implementation.TRITON, REFERENCE):
        expert_TK = torch.zeros(200, 8, dtype=torch.int64, device=CUDA)
        weight_TK = torch.zeros(200, 8, device=CUDA)
        fake_balance_experts(expert_TK, weight_TK, implementation=which, **options)
        assert weight_TK.eq(1).all()
        results.append(expert_TK)
    assert torch.equal(*results)
