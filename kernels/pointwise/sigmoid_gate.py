"""Sigmoid gates: of attention outputs, with one gate per element, and of a shared expert, with one gate per token.

A row's result depends on that row alone, and is rounded once. Legend: T rows, D hidden size, A heads, E their size, Q =
A E.

Source: Qwen3-Next and Qwen3.5 (gated attention, gated shared expert).
"""

import torch

from baton.kernels.arguments import require, require_rows, require_tensor
from baton.kernels.implementation import Implementation, uses_triton
from baton.kernels.memo import Memo, open_signature
from baton.kernels.pointwise import sigmoid_gate_triton
from baton.kernels.tiles import wide_dtype

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_FORMS: Memo[bool] = Memo()  # checked calls, and whether Triton computes them


def _inverse(x: torch.Tensor) -> torch.Tensor:
    """Compute 1 / sigmoid(x) without torch's sigmoid, which on a CPU rounds by place in the batch (`kernels.tiles`)."""
    return 1 + torch.exp(-x)


def gate_output_reference(mixed_TQ: torch.Tensor, gate_TAE: torch.Tensor) -> torch.Tensor:
    """Multiply outputs by the sigmoid of their gates, [T, Q]."""
    wide = wide_dtype(mixed_TQ.dtype)
    return (mixed_TQ.to(wide) / _inverse(gate_TAE.flatten(1).to(wide))).to(mixed_TQ.dtype)


def gate_output(
    mixed_TQ: torch.Tensor, gate_TAE: torch.Tensor, *, implementation: Implementation = Implementation.AUTO
) -> torch.Tensor:
    """Compute `gate_output_reference` in one launch.

    Args:
        mixed_TQ: bfloat16, float16 or float32; rows may be strided.
        gate_TAE: same dtype; rows and heads may be strided.
        implementation: implementation to use.

    Raises:
        KernelArgumentInvalid: an argument does not fit.
    """
    key = "output", open_signature(mixed_TQ), open_signature(gate_TAE), len(mixed_TQ) == len(gate_TAE), implementation
    in_triton = _FORMS.find(key)
    if in_triton is None:
        require_tensor("mixed_TQ", mixed_TQ, [None, None], _DTYPES)
        num_rows, length = mixed_TQ.shape
        require_tensor("gate_TAE", gate_TAE, [num_rows, None, None], [mixed_TQ.dtype], mixed_TQ.device)
        num_gates = gate_TAE.shape[1] * gate_TAE.shape[2]
        require(num_gates == length, "gate_TAE", f"has rows of {num_gates}, mixed_TQ of {length}")
        require_rows("mixed_TQ", mixed_TQ)
        require_rows("gate_TAE", gate_TAE)
        in_triton = _FORMS.keep(key, uses_triton(mixed_TQ.device, implementation))
    if not in_triton:
        return gate_output_reference(mixed_TQ, gate_TAE)
    return sigmoid_gate_triton.launch_output(mixed_TQ, gate_TAE)


def add_shared_reference(mixed_TD: torch.Tensor, shared_TD: torch.Tensor, gate_T1: torch.Tensor | None) -> torch.Tensor:
    """Add the shared expert's output, times the sigmoid of each row's logit if there is one, to the MoE output."""
    wide = wide_dtype(mixed_TD.dtype)
    shared_TD = shared_TD.to(wide)
    if gate_T1 is not None:
        shared_TD = shared_TD / _inverse(gate_T1.to(wide))
    return (mixed_TD.to(wide) + shared_TD).to(mixed_TD.dtype)


def add_shared(
    mixed_TD: torch.Tensor,
    shared_TD: torch.Tensor,
    gate_T1: torch.Tensor | None,
    *,
    implementation: Implementation = Implementation.AUTO,
) -> torch.Tensor:
    """Compute `add_shared_reference` in one launch.

    Args:
        mixed_TD: MoE output, bfloat16, float16 or float32; rows may be strided, as may those of the next two.
        shared_TD: output of the shared expert, same dtype.
        gate_T1: logits of its gate, same dtype; None: it has no gate.
        implementation: implementation to use.

    Raises:
        KernelArgumentInvalid: an argument does not fit.
    """
    rows = [mixed_TD, shared_TD, *([] if gate_T1 is None else [gate_T1])]
    are_even = len({len(row) for row in rows}) == 1
    key = "shared", *map(open_signature, rows), are_even, implementation
    in_triton = _FORMS.find(key)
    if in_triton is None:
        require_tensor("mixed_TD", mixed_TD, [None, None], _DTYPES)
        require_rows("mixed_TD", mixed_TD)
        require_tensor("shared_TD", shared_TD, mixed_TD.shape, [mixed_TD.dtype], mixed_TD.device)
        require_rows("shared_TD", shared_TD)
        if gate_T1 is not None:
            require_tensor("gate_T1", gate_T1, [len(mixed_TD), 1], [mixed_TD.dtype], mixed_TD.device)
        in_triton = _FORMS.keep(key, uses_triton(mixed_TD.device, implementation))
    if not in_triton:
        return add_shared_reference(mixed_TD, shared_TD, gate_T1)
    return sigmoid_gate_triton.launch_shared(mixed_TD, shared_TD, gate_T1)
