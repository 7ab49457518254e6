"""Sigmoid gates: Triton against the reference, the reference against torch in float64, a row against itself."""

import pytest
import torch

from baton.core.errors import KernelArgumentInvalid
from baton.kernels.implementation import Implementation
from baton.kernels.pointwise.sigmoid_gate import (
    add_shared,
    add_shared_reference,
    gate_output,
    gate_output_reference,
)
from baton.tests.kernels.harness import assert_deterministic, relative_error, same_bits

pytestmark = pytest.mark.fast
TRITON, REFERENCE = Implementation.TRITON, Implementation.REFERENCE
DTYPES = pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)], ids=str)


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gates_of(num_rows, num_heads, head_dim, dtype):
    """As attention has them: each head's behind its queries."""
    return (4 * draw(num_rows, num_heads, 2, head_dim, seed=1, dtype=dtype))[:, :, 1]


def shared_case(num_rows, length, dtype):
    """Logits stand beside a router's."""
    wide = draw(num_rows, 2 * length, dtype=dtype)
    return *wide.split(length, dim=1), 2 * draw(num_rows, 40, seed=2, dtype=dtype)[:, 5:6]


@DTYPES
@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 16), (3, 32), (5, 256)])
@pytest.mark.long
def test_outputs_are_gated_as_torch_does_in_float64(num_heads, head_dim, dtype, most):
    gate_TAE = gates_of(5, num_heads, head_dim, dtype)
    mixed_TQ = draw(5, num_heads * head_dim + 8, dtype=dtype)[:, 8:]
    wanted_TQ = mixed_TQ.double() * torch.sigmoid(gate_TAE.flatten(1).double())
    for kind in (TRITON, REFERENCE):
        found_TQ = gate_output(mixed_TQ, gate_TAE, implementation=kind)
        assert found_TQ.dtype == dtype
        assert relative_error(found_TQ, wanted_TQ) < most
    assert_deterministic(lambda: gate_output(mixed_TQ, gate_TAE, implementation=TRITON))


@DTYPES
@pytest.mark.parametrize("length", [32, 100, 2048, 2100])
@pytest.mark.parametrize("is_gated", [True, False])
def test_a_shared_expert_is_added_as_torch_does_in_float64(length, is_gated, dtype, most):
    mixed_TD, shared_TD, gate_T1 = shared_case(4, length, dtype)
    weight_T1 = torch.sigmoid(gate_T1.double()) if is_gated else 1.0
    wanted_TD = mixed_TD.double() + weight_T1 * shared_TD.double()
    for kind in (TRITON, REFERENCE):
        found_TD = add_shared(mixed_TD, shared_TD, gate_T1 if is_gated else None, implementation=kind)
        assert found_TD.dtype == dtype
        assert relative_error(found_TD, wanted_TD) < most


def test_references_in_float64_are_torch():
    gate_TAE, mixed_TQ = gates_of(3, 2, 16, torch.float64), draw(3, 32, dtype=torch.float64)
    assert torch.allclose(gate_output_reference(mixed_TQ, gate_TAE), mixed_TQ * gate_TAE.flatten(1).sigmoid(), 1e-14)
    x_TD, gate_T1 = draw(3, 32, seed=3, dtype=torch.float64), draw(3, 1, seed=4, dtype=torch.float64)
    wanted_TD = x_TD + gate_T1.sigmoid() * mixed_TQ
    assert torch.allclose(add_shared_reference(x_TD, mixed_TQ, gate_T1), wanted_TD, 1e-14)


def test_a_row_depends_on_itself_alone():
    mixed_TD, shared_TD, gate_T1 = shared_case(7, 200, torch.bfloat16)
    gate_TAE, mixed_TQ = gates_of(7, 3, 64, torch.bfloat16), draw(7, 192, dtype=torch.bfloat16)
    whole_TD = add_shared(mixed_TD, shared_TD, gate_T1, implementation=TRITON)
    whole_TQ = gate_output(mixed_TQ, gate_TAE, implementation=TRITON)
    for cut in (slice(0, 1), slice(2, 6), slice(6, 7)):
        rows = mixed_TD[cut], shared_TD[cut], gate_T1[cut]
        assert same_bits(add_shared(*rows, implementation=TRITON), whole_TD[cut])
        assert same_bits(gate_output(mixed_TQ[cut], gate_TAE[cut], implementation=TRITON), whole_TQ[cut])


def test_no_row_is_no_launch():
    for kind in (TRITON, REFERENCE):
        assert gate_output(draw(0, 32), gates_of(0, 2, 16, torch.float32), implementation=kind).shape == (0, 32)
        assert add_shared(*shared_case(0, 32, torch.float32), implementation=kind).shape == (0, 32)


def test_what_does_not_fit_is_refused_by_name():
    mixed_TQ, gate_TAE = draw(2, 32), gates_of(2, 2, 16, torch.float32)
    rows, gate_T1 = [draw(2, 32)] * 2, draw(2, 1)
    assert gate_output(mixed_TQ, gate_TAE).shape == add_shared(*rows, gate_T1).shape == (2, 32)
    refused = {
        "mixed_TQ": [(mixed_TQ.double(), gate_TAE.double()), (draw(32, 2).T, gate_TAE), (mixed_TQ[0], gate_TAE)],
        "gate_TAE": [(mixed_TQ, gate_TAE[:1]), (mixed_TQ, gate_TAE[:, :1]), (mixed_TQ, gate_TAE.bfloat16())],
    }
    for name, calls in refused.items():
        for arguments in calls:
            with pytest.raises(KernelArgumentInvalid, match=name):
                gate_output(*arguments)
    for place in range(2):
        for wrong in (draw(32, 2).T, draw(2, 32).double()):
            with pytest.raises(KernelArgumentInvalid):
                add_shared(*rows[:place], wrong, *rows[place + 1 :], gate_T1)
        with pytest.raises(KernelArgumentInvalid, match="shared_TD"):
            add_shared(*rows[:place], draw(3, 32), *rows[place + 1 :], gate_T1)
    for wrong in (draw(1, 1), draw(2), draw(2, 2), gate_T1.bfloat16()):
        with pytest.raises(KernelArgumentInvalid, match="gate_T1"):
            add_shared(*rows, wrong)
