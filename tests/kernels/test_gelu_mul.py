"""GeGLU's gate: Triton against the reference, the reference against float64 and transformers."""

import pytest
import torch

from baton.core.errors import KernelArgumentInvalid
from baton.core.numerics import Numerics
from baton.kernels.implementation import Implementation
from baton.kernels.ops import Ops
from baton.kernels.pointwise import gelu_mul_triton
from baton.kernels.pointwise.gelu_mul import gelu_mul, gelu_mul_fused, gelu_mul_invariant
from baton.tests.kernels.harness import Guards, assert_deterministic, relative_error, same_bits, strided

pytestmark = pytest.mark.fast
TRITON, REFERENCE = Implementation.TRITON, Implementation.REFERENCE


def values(*shape, seed=0, dtype=torch.bfloat16):
    return (2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def in_float64(gate_up_TJ):
    """From the paper: x Phi(x) by tanh, whose 1 + tanh(y) is 2 sigmoid(2 y), which does not cancel below 0."""
    gate_TI, up_TI = gate_up_TJ.double().chunk(2, dim=1)
    y_TI = (2 / torch.pi) ** 0.5 * (gate_TI + 0.044715 * gate_TI**3)
    return gate_TI * torch.sigmoid(2 * y_TI) * up_TI


@pytest.mark.filterwarnings("ignore:overflow")  # NumPy's, in the interpreter
def test_the_formula_in_float32():
    gate_up_TJ = values(6, 512, dtype=torch.float32) * 20  # where the exponential overflows and vanishes, too
    for kind in (TRITON, REFERENCE):
        assert relative_error(gelu_mul_fused(gate_up_TJ, implementation=kind), in_float64(gate_up_TJ)) < 1e-6
    assert relative_error(gelu_mul_invariant(gate_up_TJ), in_float64(gate_up_TJ)) < 1e-6


def test_triton_is_as_the_reference():
    """Below -2 torch's own 1 + tanh cancels in float32, and the formula is the judge."""
    for num_rows, length in ((1, 64), (3, 128), (2, 2176), (5, 768), (1, 100), (2, 1)):
        gate_up_TJ = values(num_rows, 2 * length)
        found_TI, wanted_TI = (gelu_mul_fused(gate_up_TJ, implementation=kind) for kind in (TRITON, REFERENCE))
        assert found_TI.dtype == wanted_TI.dtype == torch.bfloat16
        assert same_bits(wanted_TI, gelu_mul(gate_up_TJ))
        is_exact_TI = gate_up_TJ[:, :length] > -2
        # Another exponential may round a value to the one beside it, seldom.
        assert (found_TI != wanted_TI)[is_exact_TI].float().mean() < 0.01
        assert torch.allclose(found_TI[is_exact_TI].float(), wanted_TI[is_exact_TI].float(), rtol=2**-7)
        assert torch.allclose(found_TI.double(), in_float64(gate_up_TJ), rtol=2**-7, atol=1e-30)


def test_as_gemma_of_transformers():
    activations = pytest.importorskip("transformers.activations")
    gate_up_TJ = values(4, 256, dtype=torch.float32)
    gate_TI, up_TI = gate_up_TJ.chunk(2, dim=1)
    wanted_TI = activations.ACT2FN["gelu_pytorch_tanh"](gate_TI) * up_TI
    assert torch.allclose(gelu_mul_fused(gate_up_TJ, implementation=TRITON), wanted_TI, atol=1e-5)


def test_a_row_depends_on_itself_alone():
    gate_up_TJ = values(16, 2 * 300)
    whole_TI = gelu_mul_fused(gate_up_TJ, implementation=TRITON)
    invariant_TI = gelu_mul_invariant(gate_up_TJ)
    for num_rows in (1, 2, 7, 15):
        assert same_bits(gelu_mul_fused(gate_up_TJ[:num_rows], implementation=TRITON), whole_TI[:num_rows])
        assert same_bits(gelu_mul_invariant(gate_up_TJ[-num_rows:]), invariant_TI[-num_rows:])


def test_strides_and_two_runs():
    plain_TJ = values(5, 2 * 1100)
    wanted_TI = gelu_mul_fused(plain_TJ, implementation=TRITON)
    gate_up_TJ = strided(plain_TJ)
    found_TI = assert_deterministic(lambda: gelu_mul_fused(gate_up_TJ, implementation=TRITON), gate_up_TJ)
    assert same_bits(found_TI, wanted_TI)
    assert gelu_mul_fused(plain_TJ[:0], implementation=TRITON).shape == (0, 1100)


def test_nothing_beside_the_result_is_written():
    gate_up_TJ = values(5, 2 * 1100)
    guards = Guards()
    out_TI = guards.empty(5, 1100)
    gelu_mul_triton._gelu_mul_kernel[(2, 5)](gate_up_TJ, gate_up_TJ.stride(0), out_TI, I=1100, C=1024, EARLY=False)
    guards.check()
    assert same_bits(out_TI, gelu_mul_fused(gate_up_TJ, implementation=TRITON))


def test_which_form_a_model_gets():
    gate_up_TJ = values(3, 256)
    forms = {
        Ops(Numerics.DEFAULT): gelu_mul(gate_up_TJ),
        Ops(Numerics.INVARIANT): gelu_mul_invariant(gate_up_TJ),
        Ops(Numerics.DEFAULT, implementation=TRITON): gelu_mul_triton.launch(gate_up_TJ),
        Ops(Numerics.INVARIANT, implementation=TRITON): gelu_mul_triton.launch(gate_up_TJ),
    }
    for ops, wanted_TI in forms.items():
        assert same_bits(ops.gelu_mul(gate_up_TJ), wanted_TI)
        assert ops.gelu_mul(gate_up_TJ[None]).shape == (1, 3, 128)


@pytest.mark.parametrize(
    "gate_up",
    [values(2, 2, 128), values(2, 127), values(2, 0), values(128, 2).T, torch.ones(2, 4, dtype=torch.int32)],
)
def test_what_does_not_fit_is_refused_by_name(gate_up):
    with pytest.raises(KernelArgumentInvalid, match="gate_up"):
        gelu_mul_fused(gate_up)
