"""Experts that lie over ranks: parts of any number of ranks add up to the MoE output, and foreign rows cost nothing."""

import pytest
import torch

from baton.core.numerics import Numerics
from baton.kernels import tiles
from baton.kernels.gemm.inner_sum import InnerSum, tree_sum
from baton.kernels.implementation import Implementation
from baton.kernels.moe import gemm as moe_gemm
from baton.kernels.moe import gemm_triton as moe_gemm_triton
from baton.kernels.moe import moe
from baton.kernels.moe.gemm import experts_grouped
from baton.kernels.moe.held_experts import HeldExperts
from baton.kernels.moe.moe import ExpertWeights
from baton.kernels.ops import Ops
from baton.tests.kernels.harness import relative_error, same_bits
from baton.tests.kernels.moe_inputs import Draw, guarded_empty, some_experts  # noqa: F401
from baton.tests.kernels.test_moe_gemm import BOTH, F32, KINDS, SIZES, TRITON, batch, naive

pytestmark = pytest.mark.fast
NUM_EXPERTS, NUM_CHOSEN = 12, 3
FORMS = ["default, every expert on every row", "default, sorted", "invariant", "invariant, by tiles"]


def parts_of(weights, size):
    """What each of `size` ranks holds."""
    for rank in range(size):
        held = HeldExperts.of_rank(NUM_EXPERTS, rank, size)
        yield some_experts(weights, list(held.numbers), held)


def over_ranks(numerics, weights, size, inputs, implementation=Implementation.REFERENCE):
    """Every rank's MoE layer: what each gives to be added is recorded, then added, and given to each."""
    given = []

    def record(x):
        given.append(x)
        return x

    for part in parts_of(weights, size):
        Ops(numerics, InnerSum(size, record), implementation).experts(*inputs, part, True)
    assert len(given) == size
    assert len({x.shape for x in given}) == 1  # or ranks could not exchange them
    total = tree_sum(given)
    ops = Ops(numerics, InnerSum(size, lambda _: total), implementation)
    return given, [ops.experts(*inputs, part, True) for part in parts_of(weights, size)]


@pytest.fixture(params=FORMS)
def numerics(request, monkeypatch):
    """Of one of the forms that torch computes, which is then the only one."""
    if "by tiles" in request.param:
        monkeypatch.setattr(tiles, "has_cpu_rules", lambda device: False)
    most = 1 << 30 if "every" in request.param else -1
    monkeypatch.setattr(moe, "_MAX_DENSE_WORK", most)
    return Numerics.INVARIANT if "invariant" in request.param else Numerics.DEFAULT


def plain_inputs(num_tokens, dtype):
    draw = Draw(num_tokens)
    scale = 1 if dtype == torch.float64 else 0.25
    weights = ExpertWeights(
        scale * draw.normal(NUM_EXPERTS, 48, 32, dtype=dtype), scale * draw.normal(NUM_EXPERTS, 32, 24, dtype=dtype)
    )
    weight_TK = draw.normal(num_tokens, NUM_CHOSEN, dtype=tiles.wide_dtype(dtype)).softmax(dim=1)
    return (
        draw.normal(num_tokens, 32, dtype=dtype),
        weight_TK,
        draw.experts(num_tokens, NUM_EXPERTS, NUM_CHOSEN),
    ), weights


@pytest.mark.parametrize("size", [1, 2, 4, 12])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 70])  # of one, most ranks have nothing to compute
@pytest.mark.long
def test_ranks_make_the_moe_output_together(num_tokens, size, numerics):
    inputs, weights = plain_inputs(num_tokens, torch.float64)
    _, outputs = over_ranks(numerics, weights, size, inputs)
    wanted_TD = naive(*inputs, weights)
    for mixed_TD in outputs:
        assert relative_error(mixed_TD, wanted_TD) < 1e-12 if num_tokens else mixed_TD.shape == (0, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 4, 12])
@pytest.mark.long
def test_invariant_numerics_have_the_bits_of_one_rank(size, dtype, monkeypatch):
    inputs, weights = plain_inputs(70, dtype)
    for by_tiles in (False, True):
        if by_tiles:
            monkeypatch.setattr(tiles, "has_cpu_rules", lambda device: False)
        wanted_TD = Ops(Numerics.INVARIANT).experts(*inputs, weights, True)
        for mixed_TD in over_ranks(Numerics.INVARIANT, weights, size, inputs)[1]:
            assert torch.equal(mixed_TD, wanted_TD)


def test_what_no_expert_of_a_rank_was_chosen_for_is_zero_whatever_else_is_not_finite(numerics):
    inputs, weights = plain_inputs(9, torch.float64)
    inputs[2][:] = torch.tensor([0, 1, 2])
    inputs[0][4] = float("nan")
    given, _ = over_ranks(numerics, weights, 4, inputs)
    assert given[0].isnan().any()
    assert all(part.eq(0).all() for part in given[1:])


@pytest.mark.long
@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "num_tokens"), [(2, 9), (4, 1)])
def test_grouped_gemms_of_ranks_add_up(size, num_tokens, kind, implementation, guarded_empty):  # noqa: F811
    draw = Draw(size)
    weights = draw.weights(NUM_EXPERTS, *SIZES[kind], kind)
    inputs = batch(draw, num_tokens, NUM_EXPERTS, NUM_CHOSEN, SIZES[kind][1])
    options = {"out_dtype": F32, "implementation": implementation}
    parts = [experts_grouped(*inputs, part, **options) for part in parts_of(weights, size)]
    assert relative_error(sum(parts), naive(*inputs, weights)) < 6e-3
    for held, part_TD in zip((part.held for part in parts_of(weights, size)), parts, strict=True):
        is_own_TK = (inputs[2] >= held.first) & (inputs[2] < held.first + held.count)
        assert part_TD[~is_own_TK.any(dim=1)].eq(0).all()
        left_out_TK = torch.where(is_own_TK, inputs[2], -1)  # the same, said by ids that are no expert's
        assert same_bits(
            part_TD,
            experts_grouped(*inputs[:2], left_out_TK, weights, tiles=tiles_of(held, inputs, weights), **options),
        )


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_of_a_model_add_float32_and_round_once(kind):
    draw = Draw(5)
    weights = draw.weights(NUM_EXPERTS, *SIZES[kind], kind)
    inputs = batch(draw, 3, NUM_EXPERTS, NUM_CHOSEN, SIZES[kind][1])
    given, outputs = over_ranks(Numerics.DEFAULT, weights, 2, inputs, TRITON)
    assert {part_TD.dtype for part_TD in given} == {F32}
    wanted_TD = experts_grouped(*inputs, weights, out_dtype=F32, implementation=TRITON)
    for mixed_TD in outputs:
        assert same_bits(mixed_TD, tree_sum(given).bfloat16())
        assert relative_error(mixed_TD, wanted_TD) < 6e-3


def tiles_of(held, inputs, weights):
    """Those that the rank takes."""
    num_experts, hidden, inner_size = weights.down_EDI.shape
    rows = -(-inputs[2].numel() * held.count // num_experts)
    is_fp8 = hasattr(weights, "down_scale")
    return moe_gemm.choose_tiles(held.count, inner_size, hidden, is_fp8, rows, NUM_CHOSEN)


@pytest.mark.long
def test_rows_of_foreign_experts_have_no_block_and_their_parts_are_not_read(monkeypatch):
    """Nothing but the sum of a launch's programs knows of them, and those end at once."""
    draw = Draw(2)
    weights = draw.weights(NUM_EXPERTS, *SIZES["bf16"], "bf16")
    inputs, seen, plain = batch(draw, 9, NUM_EXPERTS, NUM_CHOSEN, SIZES["bf16"][1]), [], moe_gemm_triton.launch

    def launch(gemm, *arguments):
        seen.append((gemm.alignment, gemm.tiles.block_len))
        return plain(gemm, *arguments)

    monkeypatch.setattr(moe_gemm_triton, "launch", launch)
    for part in parts_of(weights, 4):
        experts_grouped(*inputs, part, implementation=TRITON)
    counts = inputs[2].flatten().bincount(minlength=NUM_EXPERTS).view(4, -1)
    for (alignment, block_len), counts_E in zip(seen, counts, strict=True):
        assert int((alignment.block_expert >= 0).sum()) == int((-(-counts_E // block_len)).sum())
    assert moe_gemm_triton.sum_constants(3, 3, 64, HeldExperts(3, 3, 12))["SOME"]
    assert not moe_gemm_triton.sum_constants(12, 3, 64, None)["SOME"]


@pytest.mark.long
@pytest.mark.parametrize(("num_tokens", "wanted"), [(1, 2), (64, 128), (65, 130)])
def test_tiles_are_chosen_for_the_rows_that_a_rank_gets(num_tokens, wanted, monkeypatch):
    weights = Draw(3).weights(4, 16, 32, "bf16")
    part, asked = some_experts(weights, [2], HeldExperts(2, 1, 4)), []
    plain = moe_gemm.choose_tiles
    monkeypatch.setattr(moe_gemm, "choose_tiles", lambda *key: asked.append(key) or plain(*key))
    monkeypatch.setattr(moe_gemm.vector_plan, "MAX_TOKENS", 0)  # which have other tiles
    inputs = torch.zeros(num_tokens, 32).bfloat16(), torch.ones(num_tokens, 8), torch.zeros(num_tokens, 8).long()
    experts_grouped(*inputs, part, implementation=Implementation.TRITON)
    assert asked[0][0] == 1
    assert asked[0][4] == wanted
    assert plain(*asked[0]).block_len <= max(16, wanted)


def test_experts_are_dealt_to_ranks_in_order():
    ranks = [HeldExperts.of_rank(12, rank, 4) for rank in range(4)]
    assert [number for held in ranks for number in held.numbers] == list(range(12))
    assert {(held.count, held.num_all) for held in ranks} == {(3, 12)}
