"""GEMMs split among programs, in the interpreter: against float64, whatever is split; and where they are taken.

That parts are added by the last program of a tile, whichever it is, is for `tests/gpu/test_linear_split_cuda.py`: the
interpreter's programs come in order.
"""

import itertools

import pytest
import torch
from torch.nn import functional

from baton.core.errors import KernelArgumentInvalid
from baton.core.numerics import Numerics
from baton.kernels.gemm import linear as linear_module
from baton.kernels.gemm.inner_sum import InnerSum
from baton.kernels.gemm.linear import linear_fast, linear_split, linear_wide
from baton.kernels.gemm.linear_split_triton import MAX_OUTPUTS, MAX_TOKENS, OUTPUTS, STEP, splits_of, stages_of
from baton.kernels.gemm.workspace import GemmWorkspace
from baton.kernels.implementation import Implementation
from baton.kernels.ops import Ops
from baton.tests.kernels.harness import assert_deterministic, relative_error, same_bits, strided

TRITON, REFERENCE = Implementation.TRITON, Implementation.REFERENCE


def values(*shape, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(dtype)


def gemm(x_TK, weight_NK, **others):
    return linear_split(x_TK, weight_NK, implementation=TRITON, **others)


@pytest.mark.parametrize("num_rows", [1, 2, 15, 16, 17, 32])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(70, 128), (64, 1024), (1, 1152), (130, 2048)])
def test_rows(num_rows, num_outputs, num_inputs):
    x_TK, weight_NK = values(num_rows, num_inputs), values(num_outputs, num_inputs, seed=1)
    wanted = x_TK.double() @ weight_NK.double().t()
    found = assert_deterministic(lambda: gemm(x_TK, weight_NK), x_TK, weight_NK)
    assert found.shape == (num_rows, num_outputs)
    assert relative_error(found, wanted) < 4e-3
    for row in range(num_rows):  # of one kind of tile, a row is its own affair
        padded = x_TK[row : row + 1].expand(num_rows, -1)
        assert same_bits(gemm(padded, weight_NK)[0], found[row])


@pytest.mark.fast
def test_counters_are_left_as_zeros_and_parts_are_all_added():
    """Whole numbers, whose sums are exact in any order."""
    x_TK, weight_NK = torch.randint(-3, 4, (5, 1024)).bfloat16(), torch.randint(-3, 4, (100, 1024)).bfloat16()
    assert splits_of(100, 1024) == 2
    workspace = GemmWorkspace(torch.device("cpu"))
    for _ in range(3):
        found = gemm(x_TK, weight_NK, workspace=workspace)
        assert same_bits(found, (x_TK.float() @ weight_NK.float().t()).bfloat16())
        assert not workspace.counters.any()


@pytest.mark.fast
def test_strided_rows_and_half_precision():
    x_TK, weight_NK = values(6, 256, dtype=torch.float16), values(80, 256, seed=1, dtype=torch.float16)
    wanted = gemm(x_TK, weight_NK)
    assert relative_error(wanted, x_TK.double() @ weight_NK.double().t()) < 1e-3
    assert same_bits(gemm(strided(x_TK), weight_NK), wanted)
    wide_NK = torch.zeros(80, 264, dtype=torch.float16)
    wide_NK[:, :256] = weight_NK
    assert same_bits(gemm(x_TK, wide_NK[:, :256]), wanted)
    single = x_TK[:1].as_strided((1, 256), (1, 1))
    assert same_bits(gemm(single, weight_NK), gemm(x_TK[:1], weight_NK))


@pytest.mark.fast
@pytest.mark.parametrize("num_inputs", [128, 2048])
def test_sums_may_stay_wide(num_inputs):
    x_TK, weight_NK = values(5, num_inputs), values(70, num_inputs, seed=1)
    wanted = x_TK.double() @ weight_NK.double().t()
    for found in (
        gemm(x_TK, weight_NK, out_dtype=torch.float32),
        linear_split(x_TK, weight_NK, out_dtype=torch.float32, implementation=REFERENCE),
        linear_wide(x_TK, weight_NK, implementation=TRITON),
        linear_wide(x_TK.repeat(MAX_TOKENS, 1), weight_NK, implementation=TRITON)[:5],
    ):
        assert found.dtype == torch.float32
        assert relative_error(found, wanted) < 1e-6
    assert same_bits(gemm(x_TK, weight_NK, out_dtype=torch.float32).bfloat16(), gemm(x_TK, weight_NK))
    with pytest.raises(KernelArgumentInvalid, match="out_dtype: is torch"):
        gemm(x_TK, weight_NK, out_dtype=torch.float16)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("implementation", "numerics"),
    [(TRITON, Numerics.DEFAULT), (REFERENCE, Numerics.DEFAULT), (REFERENCE, Numerics.INVARIANT)],
)
@pytest.mark.parametrize("num_rows", [1, 9, 40])
def test_logits_of_a_router_are_not_rounded(num_rows, implementation, numerics):
    """Neither from a narrow weight nor from a wide one."""
    x_TK, weight_NK = values(num_rows, 256), values(24, 256, seed=1, dtype=torch.float32)
    ops = Ops(numerics, implementation=implementation)
    for weight in (weight_NK, weight_NK.bfloat16()):
        found = ops.linear_wide(x_TK, weight)
        assert found.dtype == torch.float32
        assert relative_error(found, x_TK.double() @ weight.double().t()) < 1e-6


@pytest.mark.fast
def test_the_reference_sums_wide():
    x_TK, weight_NK = values(100, 64, dtype=torch.float64), values(9, 64, seed=1, dtype=torch.float64)
    assert relative_error(linear_split(x_TK, weight_NK, implementation=REFERENCE), x_TK @ weight_NK.t()) < 1e-15
    x_TK, weight_NK = values(3, 512), values(9, 512, seed=1)
    found = linear_split(x_TK, weight_NK, implementation=REFERENCE)
    assert same_bits(found, (x_TK.float() @ weight_NK.float().t()).bfloat16())


@pytest.mark.fast
def test_splits_give_programs_something_to_read():
    for num_outputs, num_inputs in itertools.product((1, 64, 256, 1000, 2048, 4096), (128, 512, 2048, 4096, 18_944)):
        splits, num_tiles, num_steps = (
            splits_of(num_outputs, num_inputs),
            -(-num_outputs // OUTPUTS),
            num_inputs // STEP,
        )
        assert splits == 1 or (num_tiles * splits <= 132 and num_steps >= 4 * splits)
        assert splits == 8 or num_tiles * (splits + 1) > 132 or num_steps < 4 * (splits + 1), "more had been had"
        assert stages_of(num_inputs, splits) in (4, 6)
    assert [splits_of(*shape) for shape in ((2048, 4096), (256, 2048), (4096, 12_288), (2048, 512))] == [4, 4, 2, 1]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs", "dtype", "is_split"),
    [
        (3, 256, 2048, torch.bfloat16, True),
        (MAX_TOKENS, MAX_OUTPUTS, 256, torch.bfloat16, True),
        (MAX_TOKENS + 1, 256, 256, torch.bfloat16, False),
        (3, MAX_OUTPUTS + 1, 256, torch.bfloat16, False),
        (2, 64, 192, torch.bfloat16, False),
        (2, 64, 256, torch.float32, False),
    ],
)
def test_the_library_has_what_cannot_be_split(num_rows, num_outputs, num_inputs, dtype, is_split, monkeypatch):
    calls = []
    monkeypatch.setattr(linear_module, "linear_split", lambda x, w, **_: calls.append(1) or functional.linear(x, w))
    x_TK, weight_NK = values(num_rows, num_inputs, dtype=dtype), values(num_outputs, num_inputs, seed=1, dtype=dtype)
    found = linear_fast(x_TK, weight_NK, implementation=TRITON)
    assert same_bits(found, functional.linear(x_TK, weight_NK))
    assert bool(calls) is is_split


@pytest.mark.fast
def test_a_weight_that_is_not_aligned_goes_to_the_library():
    x_TK, wide_NK = values(2, 256), values(64, 257, seed=1)
    for weight_NK in (wide_NK[:, :256], values(64 * 256 + 1, 1)[1:, 0].unflatten(0, (64, 256))):
        assert same_bits(linear_fast(x_TK, weight_NK, implementation=TRITON), functional.linear(x_TK, weight_NK))
        with pytest.raises(KernelArgumentInvalid, match="multiples of 16 bytes"):
            gemm(x_TK, weight_NK)


@pytest.mark.fast
def test_a_model_of_triton_kernels_is_built_on_it():
    x_TK, weight_NK = values(3, 256), values(64, 256, seed=1)
    added = []
    ops = Ops(Numerics.DEFAULT, InnerSum(2, lambda part: added.append(part) or 2 * part), TRITON)
    wanted = gemm(x_TK, weight_NK)
    assert same_bits(ops.linear(x_TK, weight_NK), wanted)
    assert same_bits(ops.linear_inner(x_TK, weight_NK), 2 * wanted)
    assert same_bits(added[0], wanted)


@pytest.mark.fast
def test_nothing_to_do():
    assert gemm(values(3, 128)[:0], values(5, 128)).shape == (0, 5)
    assert gemm(values(3, 128), values(5, 128)[:0]).shape == (3, 0)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("argument", "x_TK", "weight_NK"),
    [
        ("x_TK", torch.zeros(2, 128), torch.zeros(4, 128)),
        ("x_TK", torch.zeros(128, 128).bfloat16().t(), torch.zeros(4, 128).bfloat16()),
        ("x_TK", torch.zeros(2, 0).bfloat16(), torch.zeros(4, 0).bfloat16()),
        ("x_TK", torch.zeros(2, 100).bfloat16(), torch.zeros(4, 100).bfloat16()),
        ("x_TK", torch.zeros(MAX_TOKENS + 1, 128).bfloat16(), torch.zeros(4, 128).bfloat16()),
        ("weight_NK", torch.zeros(2, 128).bfloat16(), torch.zeros(MAX_OUTPUTS + 1, 128).bfloat16()),
        ("weight_NK", torch.zeros(2, 128).bfloat16(), torch.zeros(4, 129).bfloat16()),
        ("weight_NK", torch.zeros(2, 128).bfloat16(), torch.zeros(4, 128).half()),
        ("weight_NK", torch.zeros(2, 128).bfloat16(), torch.zeros(4, 130).bfloat16()[:, :128]),
    ],
)
def test_arguments_that_do_not_fit_are_named(argument, x_TK, weight_NK):
    with pytest.raises(KernelArgumentInvalid) as refused:
        gemm(x_TK, weight_NK)
    assert refused.value.fields["argument"] == argument
