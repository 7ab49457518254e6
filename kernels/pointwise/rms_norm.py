"""RMSNorm as in Qwen3: x / sqrt(mean(x^2) + eps) * weight, computed in float32 (float64 for float64).

The weight is a plain factor, without the (1 + w) of Gemma and Qwen3-Next, unless `plus_one` is set, which rounds once,
after the weight.

Source: Zhang and Sennrich 2019; transformers `Qwen3RMSNorm`.
Legend: ... any leading dimensions, T rows, D normalised size, G groups of 128 columns, R rows including padding.
"""

from dataclasses import dataclass

import torch

from baton.kernels.arguments import require, require_rows, require_tensor
from baton.kernels.gemm.quantize_fp8 import GROUP_LEN, quantize_fp8_reference
from baton.kernels.implementation import Implementation, uses_triton
from baton.kernels.memo import Memo, signature
from baton.kernels.moe.summands import Added, Summands, add_up
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
        kept_TD: the rows before they were quantized, if they were to be kept.
    """

    rows: torch.Tensor
    sum_TD: torch.Tensor | None
    scale_GR: torch.Tensor | None = None
    kept_TD: torch.Tensor | None = None


def rms_norm_fused(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    *,
    residual_TD: Added | None = None,
    plus_one: bool = False,
    num_padded: int | None = None,
    ue8m0: bool = False,
    keep: bool = False,
    implementation: Implementation = Implementation.AUTO,
) -> NormedRows:
    """Compute a norm with optional residual and quantization in one launch. A row depends on that row alone.

    Rounding, where `to` converts to the dtype of `x`: `to(wide * rsqrt(mean + eps))`, then times the weight, rounded
    again; with `plus_one` rounded once, after the multiplication by (1 + w) in float32. Float8 is made from these
    rounded rows, to the bits of a separate launch.

    Args:
        x_TD: bfloat16, float16 or float32; rows may be strided.
        weight_D: same dtype.
        eps: added to the mean square.
        residual_TD: added first; the sum is rounded, returned, and normalised as rounded. `Summands`, of the dtype of
            `x`, are added up before that, to the bits of `add_up`.
        plus_one: multiply by 1 + w (Gemma, Qwen3-Next).
        num_padded: return so many float8 rows, at least T, with a scale for each 128 columns (`quantize_fp8`); those
            beyond T are zeros with scale 1. D is a multiple of 128. None: rows are not quantized.
        ue8m0: whether scales are rounded up to powers of two.
        keep: return them as they were before they were quantized, too.
        implementation: implementation to use.

    Raises:
        KernelArgumentInvalid: an argument does not fit.
    """
    added = residual_TD.signature if isinstance(residual_TD, Summands) else signature(residual_TD)
    key = signature(x_TD), signature(weight_D), added, num_padded, keep, implementation
    in_triton = _FORMS.find(key)
    if in_triton is None:
        _check(x_TD, weight_D, residual_TD, num_padded, keep)
        in_triton = _FORMS.keep(key, uses_triton(x_TD.device, implementation))
    if in_triton:
        found = rms_norm_triton.launch(
            x_TD, weight_D, eps, residual_TD, num_padded, plus_one=plus_one, keep=keep, ue8m0=ue8m0
        )
        return NormedRows(*found)
    sum_TD, wide_TD = None, x_TD.float()
    if isinstance(residual_TD, Summands):
        residual_TD = add_up(residual_TD, implementation=implementation)
    if residual_TD is not None:
        wide_TD = wide_TD + residual_TD.float()
        sum_TD = wide_TD.to(x_TD.dtype)
        wide_TD = sum_TD.float()
    wide_TD = wide_TD * torch.rsqrt(wide_TD.square().mean(dim=-1, keepdim=True) + eps)
    rows_TD = (wide_TD * (1 + weight_D.float())).to(x_TD.dtype) if plus_one else wide_TD.to(x_TD.dtype) * weight_D
    if num_padded is None:
        return NormedRows(rows_TD, sum_TD)
    rows_RD, scale_GR = quantize_fp8_reference(rows_TD, ue8m0=ue8m0, num_padded=num_padded)
    return NormedRows(rows_RD, sum_TD, scale_GR, rows_TD if keep else None)


def _check(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    residual_TD: Added | None,
    num_padded: int | None,
    keep: bool,
) -> None:
    require_tensor("x_TD", x_TD, [None, None], _DTYPES)
    require_rows("x_TD", x_TD)
    num_rows, length = x_TD.shape
    require(0 < length <= MAX_LEN, "x_TD", f"has rows of {length}, not of 1 to {MAX_LEN}")
    require_tensor("weight_D", weight_D, [length], [x_TD.dtype], x_TD.device)
    require_rows("weight_D", weight_D)
    if isinstance(residual_TD, Summands):
        residual_TD.check("residual_TD", x_TD)
    elif residual_TD is not None:
        require_tensor("residual_TD", residual_TD, [num_rows, length], [x_TD.dtype], x_TD.device)
        require_rows("residual_TD", residual_TD)
    require(num_padded is not None or not keep, "keep", "is of use for quantized rows alone")
    if num_padded is not None:
        require(length % GROUP_LEN == 0, "num_padded", f"rows of {length} are no multiple of {GROUP_LEN}")
        require(num_padded >= num_rows, "num_padded", f"is below the {num_rows} rows there are")
