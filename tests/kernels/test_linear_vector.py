"""GEMMs of one or two tokens without tensor cores, in the interpreter: against float64, and where they are taken."""

import itertools
import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import baton
from baton.core.errors import KernelArgumentInvalid
from baton.core.numerics import Numerics
from baton.kernels.gemm import linear as linear_module
from baton.kernels.gemm import linear_vector_triton
from baton.kernels.gemm.fp8 import linear_fp8
from baton.kernels.gemm.fp8_plan import GemmPlan, SwapAB, plan_of
from baton.kernels.gemm.fp8_weight import quantize_weight
from baton.kernels.gemm.inner_sum import InnerSum
from baton.kernels.gemm.linear import linear_fast, linear_vector
from baton.kernels.gemm.vector_plan import MAX_INPUTS, MAX_TOKENS, columns_of, is_quicker, tile_of
from baton.kernels.implementation import Implementation
from baton.kernels.ops import Ops
from baton.tests.kernels.harness import Guards, assert_deterministic, relative_error, same_bits, strided

TRITON, REFERENCE = Implementation.TRITON, Implementation.REFERENCE
VECTOR, TENSOR_CORES = GemmPlan(vector=True, fused=True), GemmPlan(fused=True)
CLOSE = 4e-3  # one rounding to bfloat16
RESULTS = Path(baton.__file__).parent / "benchmarks/results/linear-vector-h200.json"


def values(*shape, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(dtype)


def gemm(x_TK, weight_NK):
    return linear_vector(x_TK, weight_NK, implementation=TRITON)


@pytest.mark.fast
@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("num_inputs", [128, 512, 640, 2048, 3712, MAX_INPUTS])
def test_rows(num_rows, num_inputs):
    for num_outputs in (1, 70):
        x_TK, weight_NK = values(num_rows, num_inputs), values(num_outputs, num_inputs, seed=1)
        found = assert_deterministic(lambda x=x_TK, w=weight_NK: gemm(x, w), x_TK, weight_NK)
        assert found.shape == (num_rows, num_outputs)
        assert relative_error(found, x_TK.double() @ weight_NK.double().t()) < CLOSE
        for row in range(num_rows):
            assert same_bits(gemm(x_TK[row : row + 1], weight_NK)[0], found[row])


@pytest.mark.fast
def test_whole_numbers_are_added_exactly():
    x_TK, weight_NK = torch.randint(-3, 4, (2, 1152)).bfloat16(), torch.randint(-3, 4, (37, 1152)).bfloat16()
    assert same_bits(gemm(x_TK, weight_NK), (x_TK.float() @ weight_NK.float().t()).bfloat16())


@pytest.mark.fast
def test_strided_rows_and_half_precision():
    x_TK, weight_NK = values(2, 256, dtype=torch.float16), values(80, 256, seed=1, dtype=torch.float16)
    wanted = gemm(x_TK, weight_NK)
    assert relative_error(wanted, x_TK.double() @ weight_NK.double().t()) < 1e-3
    assert same_bits(gemm(strided(x_TK), weight_NK), wanted)
    wide_NK = torch.zeros(80, 264, dtype=torch.float16)
    wide_NK[:, :256] = weight_NK
    assert same_bits(gemm(x_TK, wide_NK[:, :256]), wanted)
    single = x_TK[:1].as_strided((1, 256), (1, 1))
    assert same_bits(gemm(single, weight_NK), gemm(x_TK[:1], weight_NK))


@pytest.mark.fast
@pytest.mark.parametrize("is_fp8", [False, True])
def test_nothing_beyond_rows_is_read_or_written(is_fp8):
    """What lies behind a row is no number, and what lies behind the output is watched."""
    guards = Guards()
    for num_rows, num_outputs, num_inputs in itertools.product((1, 2), (3, 70), (128, 640, 1152)):
        x_TK = torch.full((num_rows, num_inputs + 1024), math.nan, dtype=torch.bfloat16)[:, :num_inputs]
        x_TK.copy_(values(num_rows, num_inputs))
        weight_NK = values(num_outputs, num_inputs, seed=1)
        weight = quantize_weight(weight_NK) if is_fp8 else guards.copy(weight_NK)
        out_TN = guards.empty(num_rows, num_outputs)
        linear_vector_triton.launch(x_TK, weight, out_TN)
        guards.check()
        wanted = linear_fp8(x_TK, weight, plan=TENSOR_CORES, implementation=TRITON) if is_fp8 else x_TK @ weight_NK.t()
        assert relative_error(out_TN, wanted.double()) < 2 * CLOSE


@pytest.mark.fast
@pytest.mark.parametrize("ue8m0", [False, True])
def test_float8_is_what_the_other_form_makes(ue8m0):
    """Tokens are made float8 bit by bit as there; only sums are added in another order."""
    for num_rows, num_outputs, num_inputs in ((1, 300, 384), (2, 260, 1024), (1, 140, 2048)):
        x_TK, weight = values(num_rows, num_inputs), quantize_weight(values(num_outputs, num_inputs, seed=1).float())
        weight.scales_BG.mul_(torch.rand(weight.scales_BG.shape) + 0.5)  # each block its own
        weight = replace(weight, ue8m0=ue8m0)
        found, wanted = (linear_fp8(x_TK, weight, plan=plan, implementation=TRITON) for plan in (VECTOR, TENSOR_CORES))
        assert relative_error(found, wanted.double()) < 1e-3
        assert same_bits(linear_fp8(strided(x_TK), weight, plan=VECTOR, implementation=TRITON), found)


@pytest.mark.fast
def test_a_gemm_that_is_capped_has_another_form(monkeypatch):
    x_TK, weight = values(1, 256), quantize_weight(values(64, 256, seed=1).float())
    assert plan_of("linear_fp8", 1, 64, 256, SwapAB.AUTO, can_swap=True, device_index=None) == VECTOR
    wanted = linear_fp8(x_TK, weight, implementation=TRITON)
    launched = []
    with monkeypatch.context() as patched:
        patched.setattr(linear_vector_triton, "launch", lambda *_, **__: launched.append(1))
        for others in ({"num_sms": 1}, {"swap_ab": "on"}, {"invariant": True}):
            found = linear_fp8(x_TK, weight, implementation=TRITON, **others)
            assert relative_error(found, wanted.double()) < 1e-3
    assert not launched
    with pytest.raises(KernelArgumentInvalid, match="of vectors"):
        linear_fp8(x_TK, weight, plan=VECTOR, num_sms=1, implementation=TRITON)
    with pytest.raises(KernelArgumentInvalid, match="of vectors"):
        linear_fp8(values(3, 256), weight, plan=VECTOR, implementation=TRITON)


@pytest.mark.fast
def test_the_reference_sums_wide():
    x_TK, weight_NK = values(100, 64, dtype=torch.float64), values(9, 64, seed=1, dtype=torch.float64)
    assert relative_error(linear_vector(x_TK, weight_NK, implementation=REFERENCE), x_TK @ weight_NK.t()) < 1e-15
    x_TK, weight_NK = values(3, 512), values(9, 512, seed=1)
    found = linear_vector(x_TK, weight_NK, implementation=REFERENCE)
    assert same_bits(found, (x_TK.float() @ weight_NK.float().t()).bfloat16())


@pytest.mark.fast
def test_a_program_has_all_columns_of_its_rows():
    for num_inputs, is_fp8 in itertools.product(range(128, MAX_INPUTS + 1, 128), (False, True)):
        tile = tile_of(num_inputs, is_fp8=is_fp8)
        assert num_inputs <= tile.columns == columns_of(num_inputs) < max(2 * num_inputs, 513)
        assert all(number & (number - 1) == 0 for number in (tile.outputs, tile.columns, tile.warps))
        assert 16 <= tile.outputs * tile.columns // (32 * tile.warps) <= 64, "values of a thread"
        assert 128 % tile.outputs == 0, "rows of a program have one scale"


@pytest.mark.fast
@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs", "dtype", "is_vector"),
    [
        (1, 50_000, 2048, torch.bfloat16, True),
        (1, 8, MAX_INPUTS, torch.bfloat16, True),
        (1, 8, MAX_INPUTS + 128, torch.bfloat16, False),
        (2, 8, 4096, torch.bfloat16, True),
        (2, 8, 4224, torch.bfloat16, False),
        (MAX_TOKENS + 1, 8, 256, torch.bfloat16, False),
        (1, 64, 192, torch.bfloat16, False),
        (1, 64, 256, torch.float32, False),
        (0, 64, 256, torch.bfloat16, False),
    ],
)
def test_where_it_is_taken(num_rows, num_outputs, num_inputs, dtype, is_vector, monkeypatch):
    calls = []
    monkeypatch.setattr(linear_module, "linear_split", lambda x, w, **_: functional.linear(x, w))
    monkeypatch.setattr(linear_module, "linear_vector", lambda x, w, **_: calls.append(1) or functional.linear(x, w))
    x_TK, weight_NK = torch.zeros(num_rows, num_inputs, dtype=dtype), torch.zeros(num_outputs, num_inputs, dtype=dtype)
    assert linear_fast(x_TK, weight_NK, implementation=TRITON).shape == (num_rows, num_outputs)
    assert bool(calls) is is_vector


@pytest.mark.fast
def test_what_is_taken_was_measured_to_be_quicker():
    """Each shape that was measured, among them drawn ones: the time of what was there before over that of this."""
    gains = {}
    for row in json.loads(RESULTS.read_text())["rows"]:
        tile = tile_of(row["K"], is_fp8=row["is_fp8"])
        name = f"{tile.outputs}/{tile.columns}/{tile.warps}"
        if is_quicker(row["M"], row["N"], row["K"], is_fp8=row["is_fp8"]) and name in row["us"]:
            gains.setdefault((row["M"], row["is_fp8"]), []).append(row["before_us"] / row["us"][name])
    assert {kind: len(found) for kind, found in gains.items()} == {(1, False): 56, (2, False): 37, (1, True): 31}
    for kind, least, mean in (((1, False), 0.95, 1.4), ((2, False), 0.94, 1.25), ((1, True), 1.1, 1.6)):
        assert min(gains[kind]) > least
        assert statistics.geometric_mean(gains[kind]) > mean


@pytest.mark.fast
def test_a_weight_that_is_not_aligned_goes_to_the_library():
    x_TK, wide_NK = values(1, 256), values(64, 257, seed=1)
    for weight_NK in (wide_NK[:, :256], values(64 * 256 + 1, 1)[1:, 0].unflatten(0, (64, 256))):
        assert same_bits(linear_fast(x_TK, weight_NK, implementation=TRITON), functional.linear(x_TK, weight_NK))
        with pytest.raises(KernelArgumentInvalid, match="multiples of 16 bytes"):
            gemm(x_TK, weight_NK)


@pytest.mark.fast
def test_a_model_of_triton_kernels_is_built_on_it():
    x_TK, weight_NK = values(1, 256), values(64, 256, seed=1)
    added = []
    ops = Ops(Numerics.DEFAULT, InnerSum(2, lambda part: added.append(part) or 2 * part), TRITON)
    wanted = gemm(x_TK, weight_NK)
    assert same_bits(ops.linear(x_TK, weight_NK), wanted)
    assert same_bits(ops.linear_inner(x_TK, weight_NK), 2 * wanted)
    assert same_bits(added[0], wanted)


@pytest.mark.fast
def test_nothing_to_do():
    assert gemm(values(2, 128)[:0], values(5, 128)).shape == (0, 5)
    assert gemm(values(2, 128), values(5, 128)[:0]).shape == (2, 0)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("argument", "x_TK", "weight_NK"),
    [
        ("x_TK", torch.zeros(2, 128), torch.zeros(4, 128)),
        ("x_TK", torch.zeros(128, 128).bfloat16().t(), torch.zeros(4, 128).bfloat16()),
        ("x_TK", torch.zeros(2, 0).bfloat16(), torch.zeros(4, 0).bfloat16()),
        ("x_TK", torch.zeros(2, 100).bfloat16(), torch.zeros(4, 100).bfloat16()),
        ("x_TK", torch.zeros(MAX_TOKENS + 1, 128).bfloat16(), torch.zeros(4, 128).bfloat16()),
        ("x_TK", torch.zeros(1, MAX_INPUTS + 128).bfloat16(), torch.zeros(4, MAX_INPUTS + 128).bfloat16()),
        ("weight_NK", torch.zeros(2, 128).bfloat16(), torch.zeros(4, 129).bfloat16()),
        ("weight_NK", torch.zeros(2, 128).bfloat16(), torch.zeros(4, 128).half()),
        ("weight_NK", torch.zeros(2, 128).bfloat16(), torch.zeros(4, 130).bfloat16()[:, :128]),
    ],
)
def test_arguments_that_do_not_fit_are_named(argument, x_TK, weight_NK):
    with pytest.raises(KernelArgumentInvalid) as refused:
        gemm(x_TK, weight_NK)
    assert refused.value.fields["argument"] == argument
