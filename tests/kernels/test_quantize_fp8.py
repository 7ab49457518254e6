"""Quantization to float8 per group of 128: the kernel in the interpreter, the reference, and weights in blocks."""

import math

import pytest
import torch

from baton.core.errors import KernelArgumentInvalid
from baton.kernels.gemm import quantize_fp8_triton
from baton.kernels.gemm.fp8_weight import Fp8Weight, quantize_weight
from baton.kernels.gemm.quantize_fp8 import dequantize_fp8, quantize_fp8
from baton.kernels.implementation import Implementation
from baton.tests.kernels.harness import Guards, assert_deterministic, same_bits, strided

TRITON = Implementation.TRITON
ROWS = [1, 2, 7, 8, 15, 16, 63, 64, 65, 128]


def values(num_rows, K, seed=0, dtype=torch.bfloat16):
    """Rows of very different sizes, with a group of zeros and one of tiny values."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, K, generator=generator)
    x *= torch.exp2(torch.randint(-20, 20, (num_rows, K // 128, 1), generator=generator).float()).expand(
        -1, -1, 128
    ).reshape(num_rows, K)  # fmt: skip
    x[0, :128] = 0
    x[-1, -128:] = 1e-30
    return x.to(dtype)


def assert_same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert same_bits(one, other)


def neighbours(x):
    """Float8 values of float64 ones by a search in all of them: to the nearest, ties to even, saturated."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    distance = (x.abs().clamp(max=448)[..., None] - codes).abs()
    nearest = distance.amin(-1, keepdim=True)
    is_even = torch.arange(127) % 2 == 0
    rank = torch.where(distance == nearest, torch.where(is_even, 0, 1), 2)
    return codes[rank.argmin(-1)] * x.sign()


@pytest.mark.fast
@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("num_rows", [1, 7, 16])
@pytest.mark.long
def test_the_kernel_has_the_references_bits(num_rows, ue8m0):
    x = values(num_rows, 256, num_rows)
    found = assert_deterministic(lambda: quantize_fp8(x, ue8m0=ue8m0, implementation=TRITON), x)
    assert_same(found, quantize_fp8(x, ue8m0=ue8m0))


@pytest.mark.parametrize(
    ("num_rows", "tile"),
    [(num_rows, (8, 2, 4)) for num_rows in ROWS] + [(7, (1, 1, 1)), (7, (4, 2, 1)), (65, (32, 2, 8)), (9, (4, 8, 4))],
)
def test_every_tile_has_the_references_bits_and_writes_nothing_else(num_rows, tile):
    x = values(num_rows, 384, num_rows)
    guards = Guards()
    padded = num_rows + 3
    q = guards.empty(padded, 384, dtype=torch.float8_e4m3fn)
    scales = guards.empty(3, padded, dtype=torch.float32)
    quantize_fp8_triton.launch(guards.copy(x), q, scales, ue8m0=False, tile=tile)
    guards.check()
    wanted_q, wanted_scales = quantize_fp8(x)
    assert same_bits(q[:num_rows], wanted_q)
    assert same_bits(scales[:, :num_rows].contiguous(), wanted_scales)
    assert q[num_rows:].float().eq(0).all()
    assert scales[:, num_rows:].eq(1).all()


@pytest.mark.fast
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_and_strided_rows(dtype):
    x = strided(values(9, 256, 3, torch.bfloat16).float().clamp(-1e4, 1e4).to(dtype))
    assert_same(quantize_fp8(x, implementation=TRITON), quantize_fp8(x.contiguous()))


@pytest.mark.fast
@pytest.mark.parametrize("implementation", [TRITON, Implementation.REFERENCE])
def test_special_values(implementation):
    x = torch.ones(4, 256, dtype=torch.bfloat16)
    x[0, 3] = float("nan")
    x[1, 130] = float("inf")
    x[2, :128] = 0
    q, scales = quantize_fp8(x, implementation=implementation)
    wide = dequantize_fp8(q, scales)
    assert wide[0].isnan().nonzero().flatten().tolist() == [3], "a NaN stays where it is"
    assert wide[0, 4] == 1
    assert wide[1, 128:].isnan().any() and not wide[1, :128].isnan().any()
    assert wide[2, :128].eq(0).all() and 0 < scales[0, 2] < 1e-9
    assert wide[3].eq(1).all()


@pytest.mark.fast
@pytest.mark.long
def test_the_reference_against_float64_and_its_bound():
    x = values(3, 256, 5)
    q, scales = quantize_fp8(x)
    group = x.double().view(3, 2, 128)
    exact = group.abs().amax(-1).clamp(min=1e-10) / 448
    torch.testing.assert_close(scales.t().double(), exact, rtol=3e-7, atol=0)
    wanted = neighbours(x.float().view(3, 2, 128) * (1 / scales.t())[..., None])
    assert torch.equal(q.double(), wanted.view(3, 256))
    error = (dequantize_fp8(q, scales).double() - x.double()).abs().view(3, 2, 128)
    assert (error <= torch.maximum(group.abs() * 2**-4, exact[..., None] * 2**-10) * 1.001).all()


@pytest.mark.fast
def test_powers_of_two_move_the_scale_alone():
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1), dtype=torch.bfloat16)
    q, scales = quantize_fp8(x)
    for exponent in (-9, 4):
        moved_q, moved_scales = quantize_fp8(x * 2.0**exponent)
        assert same_bits(q, moved_q)
        assert torch.equal(moved_scales, scales * 2.0**exponent)


@pytest.mark.fast
def test_scales_of_ue8m0_are_the_next_powers_of_two():
    x = values(8, 256, 6)
    _, plain = quantize_fp8(x)
    _, raised = quantize_fp8(x, ue8m0=True)
    for one, other in zip(plain.flatten().tolist(), raised.flatten().tolist(), strict=True):
        assert other == 2.0 ** math.ceil(math.log2(one))


@pytest.mark.fast
def test_rows_that_only_pad_are_zeros_with_scale_one():
    x = values(5, 256, 7)
    for implementation in (TRITON, Implementation.REFERENCE):
        q, scales = quantize_fp8(x, pad_to=4, implementation=implementation)
        assert q.shape == (8, 256) and scales.shape == (2, 8)
        assert_same((q[:5], scales[:, :5].contiguous()), quantize_fp8(x))
        assert q[5:].float().eq(0).all() and scales[:, 5:].eq(1).all()


@pytest.mark.fast
def test_no_rows_at_all():
    q, scales = quantize_fp8(torch.empty(0, 256, dtype=torch.bfloat16), implementation=TRITON)
    assert q.shape == (0, 256) and scales.shape == (2, 0)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("argument", "arguments"),
    [
        ("x_TK", {"x_TK": torch.zeros(2, 200, dtype=torch.bfloat16)}),
        ("x_TK", {"x_TK": torch.zeros(256, dtype=torch.bfloat16)}),
        ("x_TK", {"x_TK": torch.zeros(2, 256, dtype=torch.int32)}),
        ("x_TK", {"x_TK": torch.zeros(256, 256, dtype=torch.bfloat16).t()}),
        ("pad_to", {"x_TK": torch.zeros(2, 256, dtype=torch.bfloat16), "pad_to": 0}),
    ],
)
def test_what_does_not_fit_is_refused_by_name(argument, arguments):
    with pytest.raises(KernelArgumentInvalid, match=rf"^{argument}:"):
        quantize_fp8(**arguments)


@pytest.mark.fast
def test_a_weight_is_scaled_by_blocks():
    weight = torch.randn(200, 640, generator=torch.Generator().manual_seed(2)) * torch.linspace(0.01, 3, 640)
    found = quantize_weight(weight.to(torch.bfloat16))
    wide = weight.to(torch.bfloat16).double()
    assert (found.num_outputs, found.num_inputs) == (200, 640)
    assert found.scales_BG.shape == (2, 5) and found.scales_BG.stride() == (8, 1)
    for block in range(2):
        for group in range(5):
            rows, columns = slice(128 * block, 128 * block + 128), slice(128 * group, 128 * group + 128)
            largest = wide[rows, columns].abs().max()
            assert math.isclose(found.scales_BG[block, group], largest / 448, rel_tol=1e-6)
    error = (found.dequantize().double() - wide).abs()
    assert (error <= wide.abs() * 2**-4 + 3 / 448 * 2**-9).all()
    assert found.num_bytes == 200 * 640 + 2 * 8 * 4


@pytest.mark.fast
def test_a_weight_in_pieces_is_the_weight_at_once(monkeypatch):
    weight = torch.randn(300, 256, generator=torch.Generator().manual_seed(3))
    whole = quantize_weight(weight)
    monkeypatch.setattr("baton.kernels.gemm.fp8_weight._ROWS_AT_ONCE", 128)
    parts = quantize_weight(weight)
    assert same_bits(whole.values_NK, parts.values_NK)
    assert torch.equal(whole.scales_BG, parts.scales_BG)


@pytest.mark.fast
def test_a_weight_that_does_not_fit_is_refused():
    values_NK = torch.zeros(200, 256).to(torch.float8_e4m3fn)
    with pytest.raises(KernelArgumentInvalid, match=r"^scales_BG:"):
        Fp8Weight.of(values_NK, torch.ones(1, 2))
    with pytest.raises(KernelArgumentInvalid, match=r"^values_NK:"):
        Fp8Weight.of(values_NK[:, :200], torch.ones(2, 2))
    with pytest.raises(KernelArgumentInvalid, match=r"^weight_NK:"):
        quantize_weight(torch.zeros(64, 100))
