"""The activation of SwiGLU: silu(gate) * up. Legend: T rows, R with padding, I intermediate size, J = 2 I, G groups.

Source: Shazeer 2020, "GLU Variants Improve Transformer".
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from baton.kernels.arguments import require, require_rows, require_tensor
from baton.kernels.gemm.quantize_fp8 import GROUP_LEN, quantize_fp8_reference
from baton.kernels.implementation import Implementation, uses_triton
from baton.kernels.memo import Memo, signature
from baton.kernels.pointwise import silu_mul_triton
from baton.kernels.tiles import wide_dtype

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_FORMS: Memo[bool] = Memo()  # checked calls, and whether Triton computes them


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute [..., I] from [..., 2 I], gate first, in the same dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def silu_mul_invariant(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute the same with operations that round alike in the vector body and the scalar tail of a CPU loop."""
    gate, up = gate_up.to(wide_dtype(gate_up.dtype)).chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)


@dataclass(frozen=True, slots=True)
class GatedRows:
    """Result of `silu_mul_fused`.

    Attributes:
        rows: [T, I] in the dtype of the input, or [R, I] float8.
        scale_GR: float32 scales of the float8 rows.
    """

    rows: torch.Tensor
    scale_GR: torch.Tensor | None


def silu_mul_fused(
    gate_up_TJ: torch.Tensor,
    *,
    num_padded: int | None = None,
    ue8m0: bool = False,
    implementation: Implementation = Implementation.AUTO,
) -> GatedRows:
    """Compute `silu_mul` and optional quantization in one launch. A row's result depends on that row alone.

    Rounding is as in `silu_mul`: silu(gate) in float32, rounded; times up, rounded; float8 is made from rounded rows.

    Args:
        gate_up_TJ: gate first; bfloat16, float16 or float32. Rows may be strided.
        num_padded: return so many float8 rows, at least T, with a scale for each 128 columns (`quantize_fp8`); those
            beyond T are zeros with scale 1. I is a multiple of 128. None: rows are not quantized.
        ue8m0: whether scales are rounded up to powers of two.
        implementation: implementation to use.

    Raises:
        KernelArgumentInvalid: an argument does not fit.
    """
    key = signature(gate_up_TJ), num_padded, implementation
    in_triton = _FORMS.find(key)
    if in_triton is None:
        _check(gate_up_TJ, num_padded)
        in_triton = _FORMS.keep(key, uses_triton(gate_up_TJ.device, implementation))
    if in_triton:
        return GatedRows(*silu_mul_triton.launch(gate_up_TJ, num_padded, ue8m0=ue8m0))
    rows_TI = silu_mul(gate_up_TJ)
    if num_padded is None:
        return GatedRows(rows_TI, None)
    return GatedRows(*quantize_fp8_reference(rows_TI, ue8m0=ue8m0, num_padded=num_padded))


def _check(gate_up_TJ: torch.Tensor, num_padded: int | None) -> None:
    require_tensor("gate_up_TJ", gate_up_TJ, [None, None], _DTYPES)
    require_rows("gate_up_TJ", gate_up_TJ)
    num_rows, double = gate_up_TJ.shape
    require(double > 0 and double % 2 == 0, "gate_up_TJ", f"has rows of {double}, which are no two halves")
    if num_padded is not None:
        length = double // 2
        require(length % GROUP_LEN == 0, "num_padded", f"rows of {length} are no multiple of {GROUP_LEN}")
        require(num_padded >= num_rows, "num_padded", f"is below the {num_rows} rows there are")
