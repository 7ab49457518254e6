"""RMSNorm as in Qwen3: x / sqrt(mean(x^2) + eps) * weight, computed in float32 (float64 for float64).

The weight is a plain factor, without the (1 + w) of Gemma and Qwen3-Next, unless `plus_one` is set, which rounds once,
after the weight.

Source: Zhang and Sennrich 2019; transformers `Qwen3RMSNorm`.
Legend: ... any leading dimensions, T rows, D normalised size, G groups of 128 columns, R rows including padding.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from baton.kernels.arguments import require, require_rows, require_tensor
from baton.kernels.gemm.quantize_fp8 import GROUP_LEN, quantize_fp8_reference
from baton.kernels.implementation import Implementation, uses_triton
from baton.kernels.memo import Memo, signature
from baton.kernels.pointwise import rms_norm_triton
from baton.kernels.tiles import ordered_sum, wide_dtype

MAX_LEN = 16_384  # longest row that one program holds
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_FORMS: Memo[bool] = Memo()  # checked calls, and whether Triton computes them


def rms_norm(x: torch.Tensor, weight_D: torch.Tensor, eps: float, *, plus_one: bool = False) -> torch.Tensor:
    """Normalise [..., D] over the last dimension, in the dtype of `x`."""
    wide = x.to(wide_dtype(x.dtype))
    mean_square = wide.square().mean(dim=-1, keepdim=True)
    return _weighted(wide * torch.rsqrt(mean_square + eps), weight_D, x.dtype, plus_one)


def rms_norm_invariant(x: torch.Tensor, weight_D: torch.Tensor, eps: float, *, plus_one: bool = False) -> torch.Tensor:
    """Compute the same with a sum in fixed order."""
    wide = x.to(wide_dtype(x.dtype))
    mean_square = ordered_sum(wide.square()) / x.shape[-1]
    return _weighted(wide * torch.rsqrt(mean_square + eps), weight_D, x.dtype, plus_one)


def _weighted(wide: torch.Tensor, weight_D: torch.Tensor, dtype: torch.dtype, plus_one: bool) -> torch.Tensor:
    return (wide * (1 + weight_D.to(wide.dtype))).to(dtype) if plus_one else wide.to(dtype) * weight_D


@dataclass(frozen=True, slots=True)
class NormedRows:
    """Result of `rms_norm_fused`.

    Attributes:
        rows: [T, D] in the dtype of `x`, or [R, D] float8.
        sum_TD: `x + residual`, if there was a residual.
        scale_GR: float32 scales of the float8 rows.
    """

    rows: torch.Tensor
    sum_TD: torch.Tensor | None
    scale_GR: torch.Tensor | None


def rms_norm_fused(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    *,
    residual_TD: torch.Tensor | None = None,
    gate_TD: torch.Tensor | None = None,
    plus_one: bool = False,
    wide_sum: bool = False,
    quantize: bool = False,
    num_padded: int | None = None,
    implementation: Implementation = Implementation.AUTO,
) -> NormedRows:
    """Compute a norm with optional residual, gate and quantization in one launch. A row depends on that row alone.

    Rounding, where `to` converts to the dtype of `x`: `to(wide * rsqrt(mean + eps))`, then times the weight, rounded
    again; with `plus_one` rounded once, after the multiplication by (1 + w) in float32. The gate is multiplied in
    float32 and the result rounded; float8 is made from these rounded rows, as by a separate launch.

    Args:
        x_TD: bfloat16, float16 or float32; rows may be strided.
        weight_D: same dtype.
        eps: added to the mean square.
        residual_TD: added first; the sum is rounded, returned, and normalised as rounded.
        gate_TD: the rows are multiplied by `silu(gate)` last (Qwen3-Next's gated norm).
        plus_one: multiply by 1 + w (Gemma, Qwen3-Next).
        wide_sum: normalise the sum as it was before rounding.
        quantize: return float8 rows with a scale for each 128 columns (`quantize_fp8`); D is a multiple of 128.
        num_padded: with `quantize`, number of rows to return, at least T; those beyond T are zeros with scale 1.
        implementation: implementation to use.

    Raises:
        KernelArgumentInvalid: an argument does not fit.
    """
    key = (
        signature(x_TD), signature(weight_D), signature(residual_TD), signature(gate_TD), quantize, num_padded,
        implementation,
    )  # fmt: skip
    in_triton = _FORMS.find(key)
    if in_triton is None:
        _check(x_TD, weight_D, residual_TD, gate_TD, quantize, num_padded)
        in_triton = _FORMS.keep(key, uses_triton(x_TD.device, implementation))
    num_rows = len(x_TD) if num_padded is None else num_padded
    if in_triton:
        found = rms_norm_triton.launch(
            x_TD, weight_D, eps, residual_TD, gate_TD, num_rows, plus_one=plus_one, wide_sum=wide_sum, quantize=quantize
        )
        return NormedRows(*found)
    sum_TD, wide_TD = None, x_TD.float()
    if residual_TD is not None:
        wide_TD = wide_TD + residual_TD.float()
        sum_TD = wide_TD.to(x_TD.dtype)
        wide_TD = wide_TD if wide_sum else sum_TD.float()
    wide_TD = wide_TD * torch.rsqrt(wide_TD.square().mean(dim=-1, keepdim=True) + eps)
    rows_TD = (wide_TD * (1 + weight_D.float())).to(x_TD.dtype) if plus_one else wide_TD.to(x_TD.dtype) * weight_D
    if gate_TD is not None:
        rows_TD = (rows_TD.float() * functional.silu(gate_TD.float())).to(x_TD.dtype)
    if not quantize:
        return NormedRows(rows_TD, sum_TD, None)
    rows_RD, scale_GR = quantize_fp8_reference(rows_TD, num_padded=num_rows)
    return NormedRows(rows_RD, sum_TD, scale_GR)


def _check(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    residual_TD: torch.Tensor | None,
    gate_TD: torch.Tensor | None,
    quantize: bool,
    num_padded: int | None,
) -> None:
    require_tensor("x_TD", x_TD, [None, None], _DTYPES)
    require_rows("x_TD", x_TD)
    num_rows, length = x_TD.shape
    require(0 < length <= MAX_LEN, "x_TD", f"has rows of {length}, not of 1 to {MAX_LEN}")
    require_tensor("weight_D", weight_D, [length], [x_TD.dtype], x_TD.device)
    require_rows("weight_D", weight_D)
    for name, tensor in (("residual_TD", residual_TD), ("gate_TD", gate_TD)):
        if tensor is not None:
            require_tensor(name, tensor, [num_rows, length], [x_TD.dtype], x_TD.device)
            require_rows(name, tensor)
    require(not quantize or length % GROUP_LEN == 0, "quantize", f"rows of {length} are no multiple of {GROUP_LEN}")
    require(num_padded is None or quantize, "num_padded", "is of use with quantize alone")
    require(num_padded is None or num_padded >= num_rows, "num_padded", f"is below the {num_rows} rows there are")
