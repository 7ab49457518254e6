"""The activation of SwiGLU: silu(gate) * up. Legend: T rows, I intermediate size, E experts, M rows of each, G groups.

Source: Shazeer 2020, "GLU Variants Improve Transformer".
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from baton.kernels.arguments import require, require_rows, require_tensor
from baton.kernels.gemm.quantize_fp8 import DTYPE, GROUP_LEN, quantize_fp8_reference
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
        rows: [T, I] or [E, M, I], in the dtype of the input or float8.
        scale: float32 scales of float8 rows, [I / 128, R] or [E, I / 128, M].
    """

    rows: torch.Tensor
    scale: torch.Tensor | None


def silu_mul_fused(
    gate_up: torch.Tensor,
    *,
    num_rows_E: torch.Tensor | None = None,
    quantize: bool = False,
    num_padded: int | None = None,
    implementation: Implementation = Implementation.AUTO,
) -> GatedRows:
    """Compute `silu_mul` and optional quantization in one launch. A row's result depends on that row alone.

    Rounding is as in `silu_mul`: silu(gate) in float32, rounded; times up, rounded; float8 is made from rounded rows.

    Args:
        gate_up: [T, 2 I], or [E, M, 2 I] with a mask, gate first; bfloat16, float16 or float32. Rows may be strided.
        num_rows_E: int32 or int64 [E], on the device: number of rows of each expert; more than M counts as M, less than
            0 as 0. Other rows are neither read nor written.
        quantize: whether to return float8 rows with a scale for each 128 columns (`quantize_fp8`); I is a multiple of
            128.
        num_padded: with `quantize` and no mask, number of rows to return, at least T; those beyond T are zeros with
            scale 1.
        implementation: implementation to use.

    Raises:
        KernelArgumentInvalid: an argument does not fit.
    """
    key = signature(gate_up), signature(num_rows_E), quantize, num_padded, implementation
    in_triton = _FORMS.find(key)
    if in_triton is None:
        _check(gate_up, num_rows_E, quantize, num_padded)
        in_triton = _FORMS.keep(key, uses_triton(gate_up.device, implementation))
    if in_triton:
        return GatedRows(*silu_mul_triton.launch(gate_up, num_rows_E, num_padded, quantize=quantize))
    if num_rows_E is None:
        rows = silu_mul(gate_up)
        return GatedRows(*quantize_fp8_reference(rows, num_padded=num_padded)) if quantize else GatedRows(rows, None)
    return _masked(gate_up, num_rows_E, quantize)


def _masked(gate_up_EMJ: torch.Tensor, num_rows_E: torch.Tensor, quantize: bool) -> GatedRows:
    """Compute the reference with a mask; may wait for the device."""
    num_experts, num_rows, double = gate_up_EMJ.shape
    dtype = DTYPE if quantize else gate_up_EMJ.dtype
    rows_EMI = torch.empty(num_experts, num_rows, double // 2, dtype=dtype, device=gate_up_EMJ.device)
    shape = (num_experts, double // 2 // GROUP_LEN, num_rows)
    scale_EGM = torch.empty(shape, dtype=torch.float32, device=gate_up_EMJ.device) if quantize else None
    for expert, count in enumerate(num_rows_E.clamp(0, num_rows).tolist()):
        rows_MI = silu_mul(gate_up_EMJ[expert, :count])
        if scale_EGM is not None:
            rows_MI, scale_EGM[expert, :, :count] = quantize_fp8_reference(rows_MI)
        rows_EMI[expert, :count] = rows_MI
    return GatedRows(rows_EMI, scale_EGM)


def _check(gate_up: torch.Tensor, num_rows_E: torch.Tensor | None, quantize: bool, num_padded: int | None) -> None:
    require_tensor("gate_up", gate_up, [None] * (2 if num_rows_E is None else 3), _DTYPES)
    require_rows("gate_up", gate_up)
    double = gate_up.shape[-1]
    require(double > 0 and double % 2 == 0, "gate_up", f"has rows of {double}, which are no two halves")
    if num_rows_E is not None:
        require_tensor("num_rows_E", num_rows_E, [gate_up.shape[0]], [torch.int32, torch.int64], gate_up.device)
        require_rows("num_rows_E", num_rows_E)
        require(num_padded is None, "num_padded", "is of no use with num_rows_E")
    require(
        not quantize or double // 2 % GROUP_LEN == 0,
        "quantize",
        f"rows of {double // 2} are no multiple of {GROUP_LEN}",
    )
    require(num_padded is None or quantize, "num_padded", "is of use with quantize alone")
    enough = num_padded is None or num_padded >= len(gate_up)
    require(enough, "num_padded", f"is below the {len(gate_up)} rows there are")
