"""GEMMs of one order of sums, in the interpreter: against float64, against themselves, and over ranks.

The interpreter shows how slices are cut and added, and what is read; a step's sum is numpy's. That the tensor cores
keep the promise is for `tests/gpu/test_invariant_cuda.py`.
"""

import itertools

import pytest
import torch

from baton.core.errors import KernelArgumentInvalid
from baton.core.numerics import Numerics
from baton.kernels.gemm.inner_sum import InnerSum, tree_sum
from baton.kernels.gemm.linear import linear_ordered
from baton.kernels.gemm.linear_ordered_triton import options_of, rule
from baton.kernels.gemm.slices import num_slices
from baton.kernels.implementation import Implementation
from baton.kernels.ops import Ops
from baton.tests.kernels.harness import assert_deterministic, relative_error, same_bits, strided

TRITON, REFERENCE = Implementation.TRITON, Implementation.REFERENCE
ROWS = (1, 2, 7, 8, 15, 16, 63, 64, 65, 128)


def values(*shape, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(dtype)


def gemm(x_TK, weight_NK, **options):
    return linear_ordered(x_TK, weight_NK, implementation=TRITON, **options)


@pytest.mark.parametrize("num_rows", ROWS)
def test_rows(num_rows):
    x_TK, weight_NK = values(num_rows, 130), values(70, 130, seed=1)
    wanted = x_TK.double() @ weight_NK.double().t()
    found = assert_deterministic(lambda: gemm(x_TK, weight_NK), x_TK, weight_NK)
    assert relative_error(found, wanted) < 4e-3
    whole_TN = gemm(values(128, 130), weight_NK)
    assert same_bits(found, gemm(x_TK, weight_NK, options=rule(4096, 70, 2)))
    if num_rows == 128:
        for first, end in ((0, 1), (3, 5), (60, 70), (127, 128)):
            assert same_bits(gemm(x_TK[first:end], weight_NK), whole_TN[first:end])


@pytest.mark.long
@pytest.mark.parametrize("slices", [1, 2, 4, 8])
def test_slices_are_a_tree_however_many_a_program_has(slices):
    """Whole numbers, so that a slice's sum is exact; slices of unlike sizes, so that the order of their sum shows."""
    generator = torch.Generator().manual_seed(3)
    cut = 192 // slices
    size_K = (2.0 ** (9 * (torch.arange(slices) % 3))).repeat_interleave(cut)
    x_TK = torch.randint(-64, 65, (5, 192), generator=generator).bfloat16()
    weight_NK = (torch.randint(-64, 65, (40, 192), generator=generator) * size_K).bfloat16()
    parts = [x_TK[:, at : at + cut].float() @ weight_NK[:, at : at + cut].float().t() for at in range(0, 192, cut)]
    assert slices <= 2 or not torch.equal(tree_sum(parts), sum(parts))
    wanted = tree_sum(parts)
    for own, outputs in itertools.product([own for own in (1, 2, 4, 8) if own <= slices], (64, 128)):
        options = {"outputs": outputs, "slices": own, "warps": 4, "stages": 2}
        found = gemm(x_TK, weight_NK, num_slices=slices, out_dtype=torch.float32, options=options)
        assert same_bits(found, wanted), (own, outputs)


@pytest.mark.fast
def test_order_shows_in_the_bits():
    """The comparison above can fail: the same numbers in another order give other bits."""
    x_TK, weight_NK = values(9, 512), values(64, 512, seed=1)
    eight, two = (gemm(x_TK, weight_NK, num_slices=count, out_dtype=torch.float32) for count in (8, 2))
    assert not torch.equal(eight, two)
    assert relative_error(eight, two) < 1e-6


def test_strided_rows_and_half_precision():
    x_TK, weight_NK = values(6, 96, dtype=torch.float16), values(80, 96, seed=1, dtype=torch.float16)
    wanted = gemm(x_TK, weight_NK)
    assert relative_error(wanted, x_TK.double() @ weight_NK.double().t()) < 1e-3
    assert same_bits(gemm(strided(x_TK), strided(weight_NK)), wanted)
    single = x_TK[:1].as_strided((1, 96), (1, 1))
    assert same_bits(gemm(single, weight_NK), wanted[:1])


@pytest.mark.parametrize("size", [2, 4, 8])
def test_ranks_round_as_one(size):
    """Inner dimensions and outputs over ranks, by the operations that a model is built on."""
    x_TK, weight_NK = values(5, 256), values(48, 256, seed=1)
    alone = Ops(Numerics.INVARIANT, implementation=TRITON)
    inner_TN, outer_TN = alone.linear_inner(x_TK, weight_NK), alone.linear(x_TK, weight_NK)
    assert num_slices(256) == 8
    sums = []
    ops = Ops(Numerics.INVARIANT, InnerSum(size, lambda part: sums.append(part) or part), TRITON)
    width = 256 // size
    for rank in range(size):
        own = slice(rank * width, (rank + 1) * width)
        ops.linear_inner(x_TK[:, own], weight_NK[:, own].contiguous())
        rows = slice(rank * 48 // size, (rank + 1) * 48 // size)
        assert same_bits(ops.linear(x_TK, weight_NK[rows]), outer_TN[:, rows].contiguous())
    assert same_bits(tree_sum(sums).bfloat16(), inner_TN)


@pytest.mark.fast
def test_the_reference_adds_the_same_tree():
    x_TK, weight_NK = values(5, 64, dtype=torch.float64), values(9, 64, seed=1, dtype=torch.float64)
    found = linear_ordered(x_TK, weight_NK, num_slices=8, implementation=REFERENCE)
    assert relative_error(found, x_TK @ weight_NK.t()) < 1e-14


@pytest.mark.fast
def test_nothing_to_do():
    assert gemm(values(3, 64)[:0], values(5, 64)).shape == (0, 5)
    assert gemm(values(3, 64), values(5, 64)[:0]).shape == (3, 0)


@pytest.mark.fast
def test_options_fill_a_gpu_and_never_change_what_is_added():
    for num_tokens, num_outputs, slices in itertools.product((1, 64, 65, 2048), (48, 4096, 24_576), (1, 2, 8)):
        options = options_of(num_tokens, num_outputs, 4096, slices, torch.device("cpu"))
        assert slices % options["slices"] == 0
        assert options["outputs"] >= 16 * options["warps"]
    assert rule(16, 4096, 8)["slices"] == 2  # 64 tiles of outputs times 4
    assert rule(16, 24_576, 2)["slices"] == 2
    assert rule(4096, 4096, 8)["slices"] == 8


@pytest.mark.fast
@pytest.mark.parametrize(
    ("argument", "x_TK", "weight_NK", "options"),
    [
        ("x_TK", torch.zeros(2, 64), torch.zeros(4, 64), {}),
        ("x_TK", torch.zeros(2, 64).bfloat16().t(), torch.zeros(4, 2).bfloat16(), {}),
        ("x_TK", torch.zeros(2, 0).bfloat16(), torch.zeros(4, 0).bfloat16(), {}),
        ("weight_NK", torch.zeros(2, 64).bfloat16(), torch.zeros(4, 65).bfloat16(), {}),
        ("weight_NK", torch.zeros(2, 64).bfloat16(), torch.zeros(4, 64).half(), {}),
        ("num_slices", torch.zeros(2, 64).bfloat16(), torch.zeros(4, 64).bfloat16(), {"num_slices": 3}),
        ("num_slices", torch.zeros(2, 60).bfloat16(), torch.zeros(4, 60).bfloat16(), {"num_slices": 8}),
        ("out_dtype", torch.zeros(2, 64).bfloat16(), torch.zeros(4, 64).bfloat16(), {"out_dtype": torch.float16}),
        (
            "options",
            torch.zeros(2, 64).bfloat16(),
            torch.zeros(4, 64).bfloat16(),
            {"options": {"outputs": 64, "slices": 2, "warps": 8, "stages": 2}},
        ),
    ],
)
def test_arguments_that_do_not_fit_are_named(argument, x_TK, weight_NK, options):
    with pytest.raises(KernelArgumentInvalid) as refused:
        gemm(x_TK, weight_NK, **options)
    assert refused.value.fields["argument"] == argument
