"""Quantization of activations to float8 (e4m3) per row and group of 128 columns.

A group's scale is max(|x|, 1e-10) / 448, so that its largest element becomes the largest float8. Elements are divided
by the scale (multiplied by its reciprocal), rounded to nearest even and saturated. Scales are stored K-major, [K / 128,
T], as the GEMMs that read them require.

Special values: a NaN stays NaN and does not affect the scale of its group; an infinity makes its group NaN once it is
dequantized; a group of zeros gets a tiny scale. Padding rows are zeros with scale 1. K must be a multiple of 128.

Legend: T rows, R rows including padding, K columns, G groups.
Source: the 1 x 128 scheme of DeepSeek-V3 (section 3.3); e8m0 scales as in OCP's microscaling formats.
"""

from dataclasses import dataclass

import torch

from baton.kernels.arguments import require, require_rows, require_tensor
from baton.kernels.gemm import quantize_fp8_triton
from baton.kernels.implementation import Implementation, uses_triton

DTYPE = torch.float8_e4m3fn
GROUP_LEN = 128
LARGEST = 448.0
TINIEST = 1e-10  # lower bound of a group's largest element
ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Rows:
    """Rows that whatever made them has quantized, for the GEMM that reads them: R of them, T and padding.

    Attributes:
        values_RK: float8 [R, K].
        scales_GR: float32 [K / 128, R].
        num_rows: T.
        plain_TK: the rows before they were quantized, for others that read them; None: there are none.
    """

    values_RK: torch.Tensor
    scales_GR: torch.Tensor
    num_rows: int
    plain_TK: torch.Tensor | None = None


def quantize_fp8(
    x_TK: torch.Tensor,
    *,
    ue8m0: bool = False,
    pad_to: int = 1,
    implementation: Implementation = Implementation.AUTO,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize to float8 values [T', K] and float32 scales [K / 128, T'], the same bits in both implementations.

    Args:
        x_TK: bfloat16, float16 or float32; rows may be strided, columns must be contiguous.
        ue8m0: whether scales are rounded up to powers of two.
        pad_to: T' is T rounded up to a multiple of it.
        implementation: implementation to use.

    Raises:
        KernelArgumentInvalid: an argument does not fit.
    """
    require_tensor("x_TK", x_TK, [None, None], ACTIVATIONS)
    require_rows("x_TK", x_TK)
    require(x_TK.shape[1] % GROUP_LEN == 0, "x_TK", f"its {x_TK.shape[1]} columns are no multiple of {GROUP_LEN}")
    require(pad_to >= 1, "pad_to", f"is {pad_to}, not positive")
    if not uses_triton(x_TK.device, implementation):
        return quantize_fp8_reference(x_TK, ue8m0=ue8m0, num_padded=-(-len(x_TK) // pad_to) * pad_to)
    return quantize_unchecked(x_TK, ue8m0=ue8m0, pad_to=pad_to)


def quantize_unchecked(x_TK: torch.Tensor, *, ue8m0: bool, pad_to: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize with Triton, for callers that have checked the arguments."""
    num_rows, K = x_TK.shape
    num_padded = -(-num_rows // pad_to) * pad_to
    q_TK = torch.empty(num_padded, K, dtype=DTYPE, device=x_TK.device)
    scales_GT = torch.empty(K // GROUP_LEN, num_padded, dtype=torch.float32, device=x_TK.device)
    if num_padded and K:
        quantize_fp8_triton.launch(x_TK, q_TK, scales_GT, ue8m0=ue8m0)
    return q_TK, scales_GT


def quantize_fp8_reference(
    x_TK: torch.Tensor, *, ue8m0: bool = False, num_padded: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `quantize_fp8` in torch; rows beyond those of `x_TK`, up to `num_padded`, are padding."""
    num_rows, K = x_TK.shape
    x_TGL = x_TK.to(torch.float32).reshape(num_rows, K // GROUP_LEN, GROUP_LEN)
    q_TGL, scales_TG = quantize_groups(x_TGL, (2,), ue8m0=ue8m0)
    num_padded = num_rows if num_padded is None else num_padded
    q_TK = torch.zeros(num_padded, K, dtype=DTYPE, device=x_TK.device)
    q_TK[:num_rows] = q_TGL.reshape(num_rows, K)
    scales_GT = torch.ones(K // GROUP_LEN, num_padded, dtype=torch.float32, device=x_TK.device)
    scales_GT[:, :num_rows] = scales_TG.t()
    return q_TK, scales_GT


def quantize_groups(
    x: torch.Tensor, dims: tuple[int, ...], *, ue8m0: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize float32 `x` in groups that span `dims` -> float8 values, and scales without those dimensions."""
    largest = torch.where(x.isnan(), 0.0, x.abs()).amax(dims, keepdim=True)
    scales = largest.clamp(min=TINIEST) * (1.0 / LARGEST)
    if ue8m0:
        scales = raise_scales(scales)
    scaled = x * (1.0 / scales)
    # Clamp first: not every version of torch saturates.
    q = torch.where(scaled.isnan(), scaled, scaled.clamp(-LARGEST, LARGEST)).to(DTYPE)
    return q, scales.squeeze(dims)


def raise_scales(scales: torch.Tensor) -> torch.Tensor:
    """Round positive float32 scales up to powers of two (e8m0 has no others)."""
    return ((scales.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def dequantize_fp8(q_TK: torch.Tensor, scales_GT: torch.Tensor) -> torch.Tensor:
    """Multiply values by their scales, float32 [T, K]."""
    num_rows, K = q_TK.shape
    wide_TGL = q_TK.to(torch.float32).reshape(num_rows, K // GROUP_LEN, GROUP_LEN)
    return (wide_TGL * scales_GT.t()[:, :, None]).reshape(num_rows, K)
