"""An MoE layer for a few tokens row by row, in the interpreter: against the reference, the grouped form, and loops."""

import itertools
import json
import statistics
from pathlib import Path

import pytest
import torch

import baton
from baton.kernels.implementation import Implementation
from baton.kernels.moe import gemm as module
from baton.kernels.moe import vector_plan, vector_triton
from baton.kernels.moe.gemm import choose_tiles, experts_grouped
from baton.kernels.moe.held_experts import HeldExperts
from baton.kernels.moe.vector_plan import MAX_TOKENS, is_quicker, tiles_of
from baton.tests.kernels.harness import Guards, assert_deterministic, relative_error, same_bits, strided
from baton.tests.kernels.moe_inputs import Draw, guarded_empty, some_experts  # noqa: F401
from baton.tests.kernels.test_moe_gemm import batch, naive

pytestmark = pytest.mark.fast
REFERENCE, TRITON = Implementation.REFERENCE, Implementation.TRITON
KINDS = ["bf16", "fp8"]
F32 = torch.float32
RESULTS = Path(baton.__file__).parent / "benchmarks/results/moe-vector-h200.json"


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Whatever it would gain."""
    monkeypatch.setattr(vector_plan, "_APART", 0)


def moe_layer(x_TD, weight_TK, expert_TK, weights, dtype=None):
    """What the kernels make of checked arguments."""
    out_TD = torch.empty(x_TD.shape, dtype=dtype or x_TD.dtype)
    vector_triton.launch(x_TD, expert_TK.contiguous(), weight_TK.contiguous(), weights, out_TD)
    return out_TD


@pytest.mark.long
@pytest.mark.parametrize("kind", [*KINDS, "ue8m0"])
@pytest.mark.parametrize("num_tokens", range(1, MAX_TOKENS + 1))
def test_it_is_the_reference_and_the_formula(kind, num_tokens, guarded_empty):  # noqa: F811
    draw = Draw(num_tokens)
    sizes = ((48, 80, 4, 3), (130, 264, 9, 5)) if kind == "bf16" else ((128, 128, 4, 3), (256, 384, 9, 2))
    for inner_size, hidden, num_experts, num_chosen in sizes[num_tokens % 2 :]:
        weights = draw.weights(num_experts, inner_size, hidden, kind)
        inputs = batch(draw, num_tokens, num_experts, num_chosen, hidden)
        found = assert_deterministic(lambda i=inputs, w=weights: moe_layer(*i, w, dtype=F32), *inputs)
        wanted = experts_grouped(*inputs, weights, out_dtype=F32, implementation=REFERENCE)
        assert relative_error(found, wanted) < 1e-3
        assert relative_error(found, naive(*inputs, weights)) < 6e-3


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_ids_may_be_of_either_kind_and_rows_anywhere(kind, guarded_empty):  # noqa: F811
    draw = Draw(3)
    weights = draw.weights(5, 128, 128, kind)
    x_TD, weight_TK, expert_TK = batch(draw, 2, 5, 2, 128)
    wanted = experts_grouped(x_TD, weight_TK, expert_TK, weights, implementation=TRITON)
    found = experts_grouped(strided(x_TD), strided(weight_TK), strided(expert_TK).int(), weights, implementation=TRITON)
    assert same_bits(found, wanted)
    single = x_TD[:1].as_strided((1, 128), (1, 1)), weight_TK[:1], expert_TK[:1]
    assert same_bits(experts_grouped(*single, weights, implementation=TRITON), wanted[:1])
    wide = experts_grouped(x_TD, weight_TK, expert_TK, weights, out_dtype=F32, implementation=TRITON)
    assert same_bits(wide.bfloat16(), wanted)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_add_what_their_own_experts_make(kind, guarded_empty):  # noqa: F811
    """Ids of no expert, and of other ranks', add nothing, whatever their parts hold."""
    draw = Draw(4)
    weights = draw.weights(6, 128, 128, kind)
    inputs = batch(draw, 2, 6, 3, 128)
    inputs[2][1, 2] = -1
    whole = moe_layer(*inputs, weights, dtype=F32)
    parts = []
    for first in (0, 2, 4):
        held = HeldExperts(first, 2, 6)
        some = some_experts(weights, torch.arange(first, first + 2), held)
        parts.append(moe_layer(*inputs, some, dtype=F32))
    assert relative_error(sum(parts), whole.double()) < 1e-6
    inputs[2][0] = torch.tensor([6, 7, -1])
    assert not moe_layer(*inputs, weights)[0].any()


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_that_is_no_number_stays_none_and_alone(kind):
    draw = Draw(5)
    weights = draw.weights(4, 128, 128, kind)
    inputs = batch(draw, 3, 4, 2, 128)
    before = moe_layer(*inputs, weights)
    inputs[0][1, 5] = float("nan")
    after = moe_layer(*inputs, weights)
    assert after[1].isnan().any()
    assert same_bits(after[::2], before[::2])


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_beside_the_output_is_written(kind, guarded_empty):  # noqa: F811
    guards, draw = Guards(), Draw(6)
    sizes = ((24, 80), (100, 136)) if kind == "bf16" else ((128, 384),)
    for inner_size, hidden in sizes:
        weights = draw.weights(3, inner_size, hidden, kind)
        inputs = batch(draw, 2, 3, 2, hidden)
        out_TD = guards.empty(2, hidden)
        x_TD, weight_TK, expert_TK = map(guards.copy, inputs)
        vector_triton.launch(x_TD, expert_TK, weight_TK, weights, out_TD)
        guards.check()
        assert out_TD.isfinite().all()


def test_programs_have_what_they_can_hold():
    for inner_size, hidden, num_chosen, is_fp8 in itertools.product(
        (64, 128, 512, 768, 1408, 2048), (128, 1024, 2048, 3584, 4096), (1, 2, 4, 6, 8, 10), (False, True)
    ):
        if not is_quicker(1, num_chosen, 256, inner_size, hidden, is_fp8=is_fp8):
            continue
        tiles = tiles_of(num_chosen, inner_size, hidden, is_fp8=is_fp8)
        assert hidden <= tiles.gated_columns
        assert inner_size <= tiles.down_columns
        assert num_chosen <= tiles.choices
        assert 2 * tiles.gated_rows * tiles.gated_columns // (32 * tiles.gated_warps) <= 128
        assert tiles.down_rows * tiles.choices * tiles.down_columns // (32 * tiles.down_warps) <= 256
        assert 128 % tiles.gated_rows == 128 % tiles.down_rows == 0, "rows of a program have one scale"


@pytest.mark.parametrize("kind", KINDS)
def test_where_it_is_taken(kind, monkeypatch):
    draw = Draw(8)
    weights = draw.weights(4, 128, 128, kind)
    calls = []
    monkeypatch.setattr(module.vector_triton, "launch", lambda *_: calls.append(1))

    def is_taken(num_tokens, **options):
        calls.clear()
        inputs = batch(draw, num_tokens, 4, 2, 128)
        experts_grouped(*inputs, weights, **{"implementation": TRITON, **options})
        return bool(calls)

    assert is_taken(1)
    assert is_taken(MAX_TOKENS)
    assert not is_taken(MAX_TOKENS + 1)
    assert not is_taken(1, invariant=True)
    assert not is_taken(1, implementation=REFERENCE)
    assert not is_taken(1, tiles=choose_tiles(4, 128, 128, kind == "fp8", 2, 2))


def test_what_is_taken_was_measured_to_be_quicker(monkeypatch):
    """Each MoE layer that was measured, drawn ones among them."""
    monkeypatch.undo()
    taken, left = [], []
    for row in json.loads(RESULTS.read_text())["rows"]:
        sizes = row["T"], row["chosen"], row["experts"], row["inner"], row["hidden"]
        gain = row["grouped_us"] / row["vector_us"]
        (taken if is_quicker(*sizes, is_fp8=row["is_fp8"]) else left).append(gain)
    assert (len(taken), len(left)) == (40, 23)
    assert min(taken) > 1.04
    assert statistics.geometric_mean(taken) > 1.4
    assert statistics.geometric_mean(left) < 1.0
