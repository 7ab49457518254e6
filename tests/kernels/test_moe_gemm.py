"""The experts by gathered rows: against its reference, that against loops in float64, and what must not matter."""

from dataclasses import replace

import pytest
import torch

from baton.core.errors import KernelArgumentInvalid
from baton.kernels.gemm.inner_sum import ALONE
from baton.kernels.implementation import Implementation
from baton.kernels.moe import gemm as moe_gemm
from baton.kernels.moe.gemm import Fp8ExpertWeights, Tiles, choose_tiles, experts_grouped, tiles_of
from baton.kernels.moe.held_experts import HeldExperts
from baton.kernels.moe.moe import ExpertWeights, experts
from baton.tests.kernels.harness import assert_deterministic, relative_error, same_bits, strided
from baton.tests.kernels.moe_inputs import Draw, guarded_empty, some_experts, wide_blocks, wide_rows  # noqa: F401

BOTH = [Implementation.REFERENCE, Implementation.TRITON]
REFERENCE, TRITON = BOTH
KINDS = ["bf16", "fp8"]
SIZES = {"bf16": (32, 64), "fp8": (128, 128), "ue8m0": (128, 128)}  # intermediate, hidden
F32 = torch.float32


def batch(draw, num_tokens, num_experts, num_chosen, hidden, dtype=torch.int64):
    x_TD = draw.normal(num_tokens, hidden, dtype=torch.bfloat16)
    weight_TK = draw.normal(num_tokens, num_chosen).softmax(dim=1)
    return x_TD, weight_TK, draw.experts(num_tokens, num_experts, num_chosen, dtype)


def naive(x_TD, weight_TK, expert_TK, weights):
    """Token after token in float64; float8 is rounded where the format says."""
    is_fp8 = isinstance(weights, Fp8ExpertWeights)
    gate_up = wide_blocks(weights.gate_up_EJD, weights.gate_up_scale) if is_fp8 else weights.gate_up_EJD.double()
    down = wide_blocks(weights.down_EDI, weights.down_scale) if is_fp8 else weights.down_EDI.double()
    x_TD = wide_rows(x_TD, weights.ue8m0) if is_fp8 else x_TD.double()
    out_TD = torch.zeros_like(x_TD)
    for token, experts_K in enumerate(expert_TK.tolist()):
        for choice, its in enumerate(experts_K):
            if 0 <= its < len(down):
                gate_I, up_I = (gate_up[its] @ x_TD[token]).chunk(2)
                inner_I = gate_I * gate_I.sigmoid() * up_I
                inner_I = wide_rows(inner_I, weights.ue8m0) if is_fp8 else inner_I
                out_TD[token] += weight_TK[token, choice].double() * (down[its] @ inner_I)
    return out_TD


@pytest.mark.long
@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("kind", [*KINDS, "ue8m0"])
def test_it_is_the_formula(kind, implementation, guarded_empty):  # noqa: F811
    draw = Draw(1)
    weights = draw.weights(4, *((48, 80) if kind == "bf16" else (256, 128)), kind)
    inputs = batch(draw, 9, 4, 3, weights.down_EDI.shape[1])
    inputs[2][4] = torch.tensor([-1, 2, 4])
    out_TD = assert_deterministic(lambda: experts_grouped(*inputs, weights, implementation=implementation), *inputs)
    assert out_TD.dtype == torch.bfloat16
    # bfloat16 rounds a choice's result and the sum; float8 seldom rounds the other way, where sums differ in the end.
    assert relative_error(out_TD, naive(*inputs, weights)) < 6e-3
    assert out_TD.isfinite().all()


@pytest.mark.parametrize("kind", [*KINDS, "ue8m0"])
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 8, 15, 16, 63, 64, 65, 128])
def test_the_kernel_is_the_reference_for_any_number_of_tokens(kind, num_tokens, guarded_empty):  # noqa: F811
    draw = Draw(num_tokens)
    weights = draw.weights(2, *SIZES[kind], kind)
    inputs = batch(draw, num_tokens, 2, 1, SIZES[kind][1])
    found, wanted = (experts_grouped(*inputs, weights, out_dtype=F32, implementation=which) for which in BOTH)
    assert relative_error(found, wanted) < 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_drawn_shapes(kind, seed, guarded_empty):  # noqa: F811
    draw = Draw(100 + seed)
    num_experts = draw.choice(1, 2, 5, 9)
    num_chosen = draw.choice(1, min(2, num_experts), min(4, num_experts))
    inner_size, hidden = (
        (draw.choice(16, 72, 128), draw.choice(48, 136, 200))
        if kind == "bf16"
        else (draw.choice(128, 256), draw.choice(128, 256, 384))
    )
    weights = draw.weights(num_experts, inner_size, hidden, kind)
    x_TD, weight_TK, expert_TK = batch(
        draw, draw.choice(3, 11, 34), num_experts, num_chosen, hidden, draw.choice(torch.int32, torch.int64)
    )
    inputs = (strided(x_TD), strided(weight_TK), strided(expert_TK))
    found, wanted = (experts_grouped(*inputs, weights, out_dtype=F32, implementation=which) for which in BOTH)
    assert relative_error(found, wanted) < 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_len", [32, 64])
def test_other_tiles_give_the_same(kind, block_len, guarded_empty):  # noqa: F811
    draw = Draw(block_len)
    weights = draw.weights(2, *SIZES[kind], kind)
    inputs = batch(draw, 40, 2, 2, SIZES[kind][1])
    tiles = Tiles(block_len, 128 if kind == "fp8" else 16, 8, 2, 64, 8, 2)
    found = experts_grouped(*inputs, weights, out_dtype=F32, tiles=tiles, implementation=TRITON)
    assert relative_error(found, experts_grouped(*inputs, weights, out_dtype=F32, implementation=REFERENCE)) < 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_depends_on_itself_alone(kind):
    draw = Draw(7)
    weights = draw.weights(3, *SIZES[kind], kind)
    inputs = batch(draw, 21, 3, 2, SIZES[kind][1])
    options = {"invariant": True, "implementation": TRITON}
    whole_TD = experts_grouped(*inputs, weights, **options)
    order_T = torch.randperm(21, generator=draw.generator)
    mixed_TD = experts_grouped(*[tensor[order_T] for tensor in inputs], weights, **options)
    assert same_bits(mixed_TD, whole_TD[order_T])
    for first, last in ((0, 1), (5, 8), (20, 21)):
        part_TD = experts_grouped(*[tensor[first:last] for tensor in inputs], weights, **options)
        assert same_bits(part_TD, whole_TD[first:last])


@pytest.mark.parametrize("kind", KINDS)
def test_experts_may_have_any_order_and_tokens_that_go_nowhere_are_zero(kind):
    draw = Draw(8)
    weights = draw.weights(4, *SIZES[kind], kind)
    x_TD, weight_TK, expert_TK = batch(draw, 6, 4, 2, SIZES[kind][1])
    before_TD = experts_grouped(x_TD, weight_TK, expert_TK, weights, implementation=TRITON)
    order_E = torch.tensor([2, 0, 3, 1])
    moved = some_experts(weights, order_E)
    after_TD = experts_grouped(x_TD, weight_TK, order_E.argsort()[expert_TK], moved, implementation=TRITON)
    assert same_bits(before_TD, after_TD)
    x_TD[5, ::2] = float("nan")  # a padded token may hold anything
    expert_TK[5] = -1
    padded_TD = experts_grouped(x_TD, weight_TK, expert_TK, weights, implementation=TRITON)
    assert same_bits(padded_TD[:5], before_TD[:5])
    assert padded_TD[5].eq(0).all()


@pytest.mark.parametrize("implementation", BOTH)
def test_slices_of_the_intermediate_size_add_up(implementation):
    draw = Draw(9)
    weights = draw.weights(3, 64, 64, "bf16")
    inputs = batch(draw, 5, 3, 2, 64)
    whole_TD = experts_grouped(*inputs, weights, out_dtype=F32, implementation=implementation)
    total_TD = torch.zeros_like(whole_TD)
    for rank in range(2):
        cut = slice(32 * rank, 32 * rank + 32)
        gate_EID, up_EID = weights.gate_up_EJD.chunk(2, dim=1)
        gate_up_EJD = torch.cat([gate_EID[:, cut], up_EID[:, cut]], dim=1)
        part = ExpertWeights(gate_up_EJD, weights.down_EDI[:, :, cut].contiguous())
        total_TD += experts_grouped(*inputs, part, out_dtype=F32, implementation=implementation)
    assert relative_error(total_TD, whole_TD) < 5e-3


@pytest.mark.fast
@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.long
def test_it_takes_the_place_of_the_experts_of_a_layer(implementation):
    draw = Draw(10)
    weights = draw.weights(5, 32, 64, "bf16")
    inputs = batch(draw, 8, 5, 2, 64)
    wanted_TD = experts(*inputs, weights, True, ALONE)
    assert relative_error(experts_grouped(*inputs, weights, implementation=implementation), wanted_TD) < 1e-2


@pytest.mark.fast
@pytest.mark.filterwarnings("ignore:All-NaN slice")  # NumPy's, under the interpreter
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.long
def test_a_token_that_is_no_number_stays_none_and_alone(kind):
    draw = Draw(11)
    weights = draw.weights(2, *SIZES[kind], kind)
    inputs = batch(draw, 3, 2, 1, SIZES[kind][1])
    before_TD = experts_grouped(*inputs, weights, implementation=TRITON)
    inputs[0][1, 3] = float("nan")
    for which in BOTH:
        after_TD = experts_grouped(*inputs, weights, implementation=which)
        assert after_TD[1].isnan().all()
        assert relative_error(after_TD[::2], before_TD[::2]) < 1e-2


@pytest.mark.fast
def test_no_token_and_no_choice():
    weights = Draw(0).weights(2, 16, 32, "bf16")
    for num_tokens, num_chosen in ((0, 2), (3, 0)):
        shape = (num_tokens, num_chosen)
        inputs = torch.zeros(num_tokens, 32, dtype=torch.bfloat16), torch.zeros(shape), torch.zeros(shape).long()
        for which in BOTH:
            assert experts_grouped(*inputs, weights, implementation=which).eq(0).all()


@pytest.mark.fast
def test_tiles_come_from_the_table_and_invariant_ones_from_no_batch(monkeypatch):
    row = {name: 16 * place for place, name in enumerate(Tiles.__slots__, 1)}
    asked = []
    monkeypatch.setattr(moe_gemm.tuning, "find", lambda *key, **options: asked.append(key) or row)
    choose_tiles.cache_clear()
    assert choose_tiles(128, 768, 2048, True, 520, 8) == tiles_of(row)
    assert asked == [("moe_gemm", "fp8 128x768x2048", 65, None)]
    for kind in (False, True):
        assert choose_tiles(128, 768, 2048, kind, None, 8).block_len == 16
    assert len(asked) == 1
    choose_tiles.cache_clear()


@pytest.mark.fast
@pytest.mark.parametrize("sizes", [(256, 512, 2048), (128, 768, 2048), (64, 1408, 2048)], ids=str)
@pytest.mark.parametrize("num_tokens", [512, 1024, 4096, 16_384])
def test_a_chunk_of_a_prompt_reads_weights_a_few_times_only(sizes, num_tokens):
    """Tables are of decode steps: their blocks of 16 rows made a chunk of 4,096 read every weight eight times."""
    mean = num_tokens * 8 / sizes[0]
    for is_fp8, largest in ((True, 32), (False, 128)):
        block_len = choose_tiles(*sizes, is_fp8, num_tokens * 8, 8).block_len
        assert min(mean / 2, largest) <= block_len <= max(2 * mean, 16)


GOOD = Draw(0).weights(2, 16, 32, "bf16")
NARROW_FP8 = Fp8ExpertWeights(
    torch.zeros(2, 64, 32).to(torch.float8_e4m3fn), torch.zeros(2, 1, 1),
    torch.zeros(2, 32, 32).to(torch.float8_e4m3fn), torch.zeros(2, 1, 1),
)  # fmt: skip
GOOD_FP8 = Draw(0).weights(2, 128, 128, "fp8")


@pytest.mark.fast
@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("x_TD", {"x_TD": torch.zeros(3, dtype=torch.bfloat16)}),
        ("x_TD", {"x_TD": torch.zeros(3, 32)}),
        ("weight_TK", {"weight_TK": torch.zeros(3, 1)}),
        ("weight_TK", {"weight_TK": torch.zeros(3, 2).bfloat16()}),
        ("expert_TK", {"expert_TK": torch.zeros(2, 2).long()}),
        ("expert_TK", {"expert_TK": torch.zeros(3, 2)}),
        ("weights.down_EDI", {"weights": ExpertWeights(GOOD.gate_up_EJD, GOOD.down_EDI.float())}),
        ("weights.down_EDI", {"weights": ExpertWeights(GOOD.gate_up_EJD, GOOD.down_EDI[:, :-1])}),
        ("weights.down_EDI", {"weights": ExpertWeights(GOOD.gate_up_EJD, GOOD.down_EDI.mT.contiguous().mT)}),
        ("weights.gate_up_EJD", {"weights": ExpertWeights(GOOD.gate_up_EJD[:, :-2], GOOD.down_EDI)}),
        ("x_TD", {"weights": NARROW_FP8}),
        ("out_dtype", {"out_dtype": torch.int64}),
        ("out_dtype", {"out_dtype": torch.float16}),
        ("weights.held", {"weights": replace(GOOD, held=HeldExperts(0, 1, 4))}),
        ("weights.held", {"weights": replace(GOOD, held=HeldExperts(-1, 2, 4))}),
        ("weights.held", {"weights": replace(GOOD, held=HeldExperts(3, 2, 4))}),
    ],
)
def test_bad_arguments_are_named(argument, change):
    arguments = {
        "x_TD": torch.zeros(3, 32, dtype=torch.bfloat16),
        "weight_TK": torch.zeros(3, 2),
        "expert_TK": torch.zeros(3, 2).long(),
        "weights": GOOD,
    }
    for which in BOTH if argument == "out_dtype" else [TRITON]:
        with pytest.raises(KernelArgumentInvalid, match=f"^{argument}: "):
            experts_grouped(**{**arguments, **change}, implementation=which)


@pytest.mark.fast
@pytest.mark.parametrize("name", ["gate_up_scale", "down_scale"])
def test_scales_of_another_shape_are_named(name):
    fields = {field: getattr(GOOD_FP8, field) for field in GOOD_FP8.__slots__}
    weights = Fp8ExpertWeights(**{**fields, name: torch.zeros(2, 3, 1)})
    with pytest.raises(KernelArgumentInvalid, match=f"^weights.{name}: "):
        experts_grouped(torch.zeros(1, 128, dtype=torch.bfloat16), torch.zeros(1, 1), torch.zeros(1, 1).long(), weights)


@pytest.mark.fast
@pytest.mark.parametrize("tiles", [Tiles(16, 64, 4, 3, 128, 4, 3), Tiles(16, 128, 4, 3, 256, 4, 3)])
def test_tiles_that_cut_groups_are_refused(tiles):
    inputs = torch.zeros(1, 128, dtype=torch.bfloat16), torch.zeros(1, 1), torch.zeros(1, 1).long()
    with pytest.raises(KernelArgumentInvalid, match=r"^tiles: "):
        experts_grouped(*inputs, GOOD_FP8, tiles=tiles, implementation=TRITON)
