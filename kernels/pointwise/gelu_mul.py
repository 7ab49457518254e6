"""The gate of GeGLU: gelu(gate) * up, as Gemma has it. Legend: T rows, I intermediate size.

Source: Shazeer 2020, "GLU Variants Improve Transformer"; Hendrycks and Gimpel 2016, "Gaussian Error Linear Units": its
approximation by tanh, transformers' `gelu_pytorch_tanh`.
"""

import torch
from torch.nn import functional

from baton.kernels.arguments import require, require_rows, require_tensor
from baton.kernels.implementation import Implementation, uses_triton
from baton.kernels.pointwise import gelu_mul_triton
from baton.kernels.tiles import wide_dtype

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SLOPE, _CUBE = 0.7978845608028654, 0.044715  # the square root of 2 / pi; the paper's factor


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[..., 2 I], gate first -> [..., I], same dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def gelu_mul_invariant(gate_up: torch.Tensor) -> torch.Tensor:
    """The same from operations that do not tell the vector body from the scalar tail."""
    gate, up = gate_up.to(wide_dtype(gate_up.dtype)).chunk(2, dim=-1)
    # 1 + tanh(y) is 2 / (1 + exp(-2 y)).
    y = _SLOPE * (gate + _CUBE * gate * gate * gate)
    return (gate / (1 + torch.exp(-2 * y)) * up).to(gate_up.dtype)


def gelu_mul_fused(gate_up: torch.Tensor, *, implementation: Implementation = Implementation.AUTO) -> torch.Tensor:
    """`gelu_mul` in one launch. A row's result depends on that row alone.

    Rounding as in `gelu_mul`: gelu(gate) in float32, rounded; the product rounded.

    Args:
        gate_up: [T, 2 I], gate first; bfloat16, float16 or float32. Rows may be strided.
        implementation: see there.

    Returns:
        [T, I], same dtype.

    Raises:
        KernelArgumentInvalid: an argument does not fit.
    """
    require_tensor("gate_up", gate_up, [None, None], _DTYPES)
    require_rows("gate_up", gate_up)
    double = gate_up.shape[1]
    require(double > 0 and double % 2 == 0, "gate_up", f"has rows of {double}, which are no two halves")
    if uses_triton(gate_up.device, implementation):
        return gelu_mul_triton.launch(gate_up)
    return gelu_mul(gate_up)
