"""Linear layers without bias: y = x W^T. Legend: T rows, K inputs, N outputs."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from baton.kernels.arguments import require, require_rows, require_tensor
from baton.kernels.gemm import linear_ordered_triton, linear_split_triton, linear_vector_triton, vector_plan
from baton.kernels.gemm.inner_sum import tree_sum
from baton.kernels.gemm.workspace import GemmWorkspace, default_workspace
from baton.kernels.implementation import Implementation, uses_triton
from baton.kernels.tiles import matmul_rows, matmul_slices, wide_dtype

MAX_OWN_ROWS = linear_split_triton.MAX_TOKENS  # of `linear_fast`; the library computes GEMMs of more rows
_OWN_SLICES = 2  # for an inner dimension that no ranks share, so that few outputs fill a GPU
_KERNEL_DTYPES = (torch.bfloat16, torch.float16)
_REFERENCE_DTYPES = (*_KERNEL_DTYPES, torch.float32, torch.float64)
_WARP_OUTPUTS = 16
_ALIGNED = 16  # bytes: the smallest access of asynchronous copies


def linear_ordered(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    *,
    num_slices: int | None = None,
    out_dtype: torch.dtype | None = None,
    options: Mapping[str, Any] | None = None,
    implementation: Implementation = Implementation.AUTO,
) -> torch.Tensor:
    """Compute X W^T, [T, N], so that each element depends on its own row and output only, bit for bit.

    Args:
        x_TK: bfloat16 or float16 (the reference takes float32 and float64, too); rows may be strided.
        weight_NK: same dtype, rows contiguous.
        num_slices: 1, 2, 4 or 8, a divisor of K; None: 2 if K is even, else 1.
        out_dtype: dtype of x, or float32 where further slices are to be added.
        options: launch options in the tuned table's format; they change no bit.
        implementation: implementation to use.

    Raises:
        KernelArgumentInvalid: an argument does not fit; nothing was launched.
    """
    with_triton, num_inputs = _require_operands(x_TK, weight_NK, implementation), x_TK.shape[1]
    require(num_inputs > 0, "x_TK", "has no column")
    num_slices = math.gcd(_OWN_SLICES, num_inputs) if num_slices is None else num_slices
    fits = num_slices in (1, 2, 4, linear_ordered_triton.MAX_SLICES) and num_inputs % num_slices == 0
    require(fits, "num_slices", f"is {num_slices}: not 1, 2, 4 or 8, or no divisor of {num_inputs}")
    dtype = out_dtype or x_TK.dtype
    require(dtype in (x_TK.dtype, wide_dtype(x_TK.dtype)), "out_dtype", f"is {dtype}")
    if not with_triton:
        return tree_sum(matmul_slices(x_TK, weight_NK, num_slices).unbind()).to(dtype)
    out_TN = torch.empty(len(x_TK), len(weight_NK), dtype=dtype, device=x_TK.device)
    if out_TN.numel():
        if options is None:
            options = linear_ordered_triton.options_of(len(x_TK), len(weight_NK), num_inputs, num_slices, x_TK.device)
        fits = num_slices % options["slices"] == 0 and options["outputs"] >= _WARP_OUTPUTS * options["warps"]
        require(fits, "options", f"are not for {num_slices} slices, or leave warps without rows of the weight")
        linear_ordered_triton.launch(x_TK, weight_NK, out_TN, num_slices, options)
    return out_TN


def linear(x_TK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """Compute the library's GEMM, [T, N] in the dtype of both operands."""
    return functional.linear(x_TK, weight_NK)


def linear_split(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    workspace: GemmWorkspace | None = None,
    implementation: Implementation = Implementation.AUTO,
) -> torch.Tensor:
    """Compute X W^T of few rows and few outputs by split-K, [T, N].

    The inner dimension is split among programs of one launch; parts are added in float32, in one order, and rounded
    once. This is for GEMMs that are bound by reading the weight, and whose weight is too small for the library's tiles.

    Args:
        x_TK: bfloat16 or float16, T at most 32; rows may be strided. The reference takes any T, float32 and float64.
        weight_NK: same dtype, N at most 4,096, K a multiple of 128; rows contiguous, at multiples of 16 bytes.
        out_dtype: dtype of x, as None says, or its wide one.
        workspace: workspace of the current stream; None: the device's, which is then used on one stream only.
        implementation: implementation to use.

    Raises:
        KernelArgumentInvalid: an argument does not fit; nothing was launched.
    """
    with_triton, dtype = _require_operands(x_TK, weight_NK, implementation), out_dtype or x_TK.dtype
    require(dtype in (x_TK.dtype, wide_dtype(x_TK.dtype)), "out_dtype", f"is {dtype}")
    if not with_triton:
        return (x_TK.to(wide_dtype(x_TK.dtype)) @ weight_NK.to(wide_dtype(x_TK.dtype)).t()).to(dtype)
    require(len(x_TK) <= linear_split_triton.MAX_TOKENS, "x_TK", f"has {len(x_TK)} rows")
    require(len(weight_NK) <= linear_split_triton.MAX_OUTPUTS, "weight_NK", f"has {len(weight_NK)} rows")
    is_whole = x_TK.shape[1] > 0 and x_TK.shape[1] % linear_split_triton.STEP == 0
    require(is_whole, "x_TK", f"has {x_TK.shape[1]} columns: no multiple of {linear_split_triton.STEP}")
    require(_is_aligned(weight_NK), "weight_NK", "has rows that are not on multiples of 16 bytes")
    out_TN = torch.empty(len(x_TK), len(weight_NK), dtype=dtype, device=x_TK.device)
    if out_TN.numel():
        counters = (workspace or default_workspace(x_TK.device)).counters
        linear_split_triton.launch(x_TK, weight_NK, out_TN, counters)
    return out_TN


def linear_vector(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, *, implementation: Implementation = Implementation.AUTO
) -> torch.Tensor:
    """Compute X W^T of one or two rows, [T, N] in the dtype of both operands: added in float32, rounded once.

    This is for GEMMs that are bound by reading the weight: the kernel reads it row by row, without tensor cores.

    Args:
        x_TK: bfloat16 or float16, T at most 2; rows may be strided. The reference takes any T, float32 and float64.
        weight_NK: same dtype, K a multiple of 128 and at most 8,192; rows contiguous, at multiples of 16 bytes.
        implementation: implementation to use.

    Raises:
        KernelArgumentInvalid: an argument does not fit; nothing was launched.
    """
    with_triton, num_inputs = _require_operands(x_TK, weight_NK, implementation), x_TK.shape[1]
    if not with_triton:
        return (x_TK.to(wide_dtype(x_TK.dtype)) @ weight_NK.to(wide_dtype(x_TK.dtype)).t()).to(x_TK.dtype)
    require(len(x_TK) <= vector_plan.MAX_TOKENS, "x_TK", f"has {len(x_TK)} rows")
    fits = 0 < num_inputs <= vector_plan.MAX_INPUTS and num_inputs % vector_plan.GROUP_LEN == 0
    require(fits, "x_TK", f"has {num_inputs} columns: more than {vector_plan.MAX_INPUTS}, or no multiple of 128")
    require(_is_aligned(weight_NK), "weight_NK", "has rows that are not on multiples of 16 bytes")
    out_TN = torch.empty(len(x_TK), len(weight_NK), dtype=x_TK.dtype, device=x_TK.device)
    if out_TN.numel():
        linear_vector_triton.launch(x_TK, weight_NK, out_TN)
    return out_TN


def linear_fast(x_TK: torch.Tensor, weight_NK: torch.Tensor, *, implementation: Implementation) -> torch.Tensor:
    """Compute X W^T by `linear_vector` or `linear_split` where these apply and are faster, else by the library."""
    (num_tokens, num_inputs), num_outputs = x_TK.shape, len(weight_NK)
    if _are_read_in_steps(x_TK, weight_NK):
        if vector_plan.is_quicker(num_tokens, num_outputs, num_inputs, is_fp8=False):
            return linear_vector(x_TK, weight_NK, implementation=implementation)
        if _are_few(num_tokens, num_outputs):
            return linear_split(x_TK, weight_NK, implementation=implementation)
    return linear(x_TK, weight_NK)


def linear_wide(x_TK: torch.Tensor, weight_NK: torch.Tensor, *, implementation: Implementation) -> torch.Tensor:
    """Compute X W^T, [T, N] in the wide dtype of both operands, whose products are exact in it: rounded in sums alone.

    Tensor cores add products of bfloat16 and float16 in float32, so operands need not be widened.
    """
    wide = wide_dtype(x_TK.dtype)
    if _are_read_in_steps(x_TK, weight_NK) and _are_few(len(x_TK), len(weight_NK)):
        return linear_split(x_TK, weight_NK, out_dtype=wide, implementation=implementation)
    if x_TK.dtype in _KERNEL_DTYPES and x_TK.device.type == "cuda":
        return torch.mm(x_TK, weight_NK.t(), out_dtype=wide)
    return linear(x_TK.to(wide), weight_NK.to(wide))


def _require_operands(x_TK: torch.Tensor, weight_NK: torch.Tensor, implementation: Implementation) -> bool:
    """Check the operands, and return whether Triton computes their GEMM."""
    with_triton = uses_triton(x_TK.device, implementation)
    require_tensor("x_TK", x_TK, (None, None), _KERNEL_DTYPES if with_triton else _REFERENCE_DTYPES)
    require_rows("x_TK", x_TK)
    require_tensor("weight_NK", weight_NK, (None, x_TK.shape[1]), (x_TK.dtype,), x_TK.device)
    require_rows("weight_NK", weight_NK)
    return with_triton


def _are_read_in_steps(x_TK: torch.Tensor, weight_NK: torch.Tensor) -> bool:
    is_whole = x_TK.dtype in _KERNEL_DTYPES and x_TK.shape[1] % linear_split_triton.STEP == 0
    return is_whole and _is_aligned(weight_NK)


def _are_few(num_tokens: int, num_outputs: int) -> bool:
    return num_tokens <= linear_split_triton.MAX_TOKENS and num_outputs <= linear_split_triton.MAX_OUTPUTS


def _is_aligned(weight_NK: torch.Tensor) -> bool:
    size = weight_NK.element_size()
    return weight_NK.data_ptr() % _ALIGNED == 0 and weight_NK.stride(0) * size % _ALIGNED == 0


def linear_invariant(x_TK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """Compute X W^T so that each row is independent of other rows (`kernels.tiles`)."""
    return matmul_rows(x_TK, weight_NK)
