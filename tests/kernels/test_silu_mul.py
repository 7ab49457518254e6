"""SwiGLU's gate with what stands behind it: Triton against the reference, the reference against float64."""

import pytest
import torch

from baton.core.errors import KernelArgumentInvalid
from baton.kernels.gemm.quantize_fp8 import quantize_fp8_reference
from baton.kernels.implementation import Implementation
from baton.kernels.pointwise import silu_mul_triton
from baton.kernels.pointwise.silu_mul import silu_mul, silu_mul_fused
from baton.tests.kernels.harness import Guards, assert_deterministic, relative_error, same_bits, strided

ROWS = [1, 2, 7, 8, 15, 16, 63, 64, 65, 128]
FEW = ROWS[:6]
TRITON, REFERENCE = Implementation.TRITON, Implementation.REFERENCE


def values(*shape, seed=0, dtype=torch.bfloat16):
    return (2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def assert_close(found, wanted):
    """Another exponential may round a value to the one beside it, seldom."""
    assert found.dtype == wanted.dtype == torch.bfloat16
    assert torch.allclose(found.float(), wanted.float(), rtol=2**-7, atol=1e-6)
    assert (found != wanted).float().mean() < 0.01


@pytest.mark.fast
def test_triton_is_as_the_reference():
    for num_rows, length in ((1, 64), (3, 128), (2, 384), (2, 2176), (5, 768), (1, 100)):
        gate_up_TJ = values(num_rows, 2 * length)
        found, wanted = (silu_mul_fused(gate_up_TJ, implementation=kind).rows for kind in (TRITON, REFERENCE))
        assert_close(found, wanted)
        assert same_bits(wanted, silu_mul(gate_up_TJ))


@pytest.mark.filterwarnings("ignore:overflow")  # NumPy's, in the interpreter
def test_the_formula_in_float32():
    gate_up_TJ = values(6, 512, dtype=torch.float32) * 20  # where the exponential overflows and vanishes, too
    gate_TI, up_TI = gate_up_TJ.double().chunk(2, dim=1)
    wanted_TI = gate_TI * torch.sigmoid(gate_TI) * up_TI
    for kind in (TRITON, REFERENCE):
        assert relative_error(silu_mul_fused(gate_up_TJ, implementation=kind).rows, wanted_TI) < 1e-6


@pytest.mark.parametrize("counts", [FEW, pytest.param(ROWS, marks=pytest.mark.slow)])
def test_a_row_depends_on_itself_alone(counts):
    most = counts[-1]
    gate_up_TJ = values(most, 256)
    whole = silu_mul_fused(gate_up_TJ, num_padded=most, implementation=TRITON)
    for num_rows in counts[:-1]:
        cut = slice(most - num_rows, most) if num_rows % 2 else slice(0, num_rows)
        found = silu_mul_fused(gate_up_TJ[cut], num_padded=num_rows, implementation=TRITON)
        assert same_bits(found.rows, whole.rows[cut]), num_rows
        assert same_bits(found.scale_GR, whole.scale_GR[:, cut])


def test_any_division_into_programs_gives_the_same():
    gate_up_TJ = values(3, 1536)
    wanted = silu_mul_triton.launch(gate_up_TJ, 5)
    for groups, num_warps in ((1, 1), (2, 2), (4, 4), (8, 4), (32, 8)):
        options = {"groups": groups, "num_warps": num_warps}
        found = silu_mul_triton.launch(gate_up_TJ, 5, options=options)
        assert all(same_bits(one, other) for one, other in zip(found, wanted, strict=True)), groups


@pytest.mark.parametrize("ue8m0", [False, True])
def test_float8_is_as_if_made_afterwards(ue8m0):
    for num_rows, length, num_padded in ((1, 128, 4), (5, 640, 5), (6, 768, 16)):
        gate_up_TJ = values(num_rows, 2 * length)
        gate_up_TJ[0, :128] = 0
        found = silu_mul_fused(gate_up_TJ, num_padded=num_padded, ue8m0=ue8m0, implementation=TRITON)
        rows_TI = silu_mul_fused(gate_up_TJ, implementation=TRITON).rows
        wanted_RI, scale_GR = quantize_fp8_reference(rows_TI, ue8m0=ue8m0, num_padded=num_padded)
        assert same_bits(found.rows, wanted_RI)
        assert same_bits(found.scale_GR, scale_GR)
        assert found.rows[0, :128].float().eq(0).all()


def test_strides_guards_and_two_runs():
    plain_TJ = values(5, 600)
    wanted = silu_mul_fused(plain_TJ, implementation=TRITON).rows
    gate_up_TJ = strided(plain_TJ)
    found = assert_deterministic(lambda: silu_mul_fused(gate_up_TJ, implementation=TRITON).rows, gate_up_TJ)
    assert same_bits(found, wanted)
    guards = Guards()
    out_TI = guards.empty(5, 300)
    silu_mul_triton._silu_mul_kernel[(8,)](
        gate_up_TJ, gate_up_TJ.stride(0), out_TI, out_TI, 5, 5, I=300, G=3, N=2, C=128, QUANTIZE=False, UE8M0=False,
        PTX=False, EARLY=False,
    )  # fmt: skip
    guards.check()
    assert same_bits(out_TI[:, :256], wanted[:, :256])
    assert silu_mul_fused(plain_TJ[:0], implementation=TRITON).rows.shape == (0, 300)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("gate_up_TJ", {"gate_up_TJ": values(2, 2, 128)}),
        ("gate_up_TJ", {"gate_up_TJ": values(2, 127)}),
        ("gate_up_TJ", {"gate_up_TJ": values(128, 2).T}),
        ("num_padded", {"gate_up_TJ": values(2, 128), "num_padded": 2}),
        ("num_padded", {"num_padded": 1}),
    ],
)
def test_what_does_not_fit_is_refused_by_name(argument, changes):
    with pytest.raises(KernelArgumentInvalid, match=argument):
        silu_mul_fused(**{"gate_up_TJ": values(2, 256)} | changes)
