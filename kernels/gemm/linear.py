"""Products with a weight: y = x W^T, no bias. Legend: T rows, K inputs, N outputs."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from baton.kernels.arguments import require, require_rows, require_tensor
from baton.kernels.gemm import linear_ordered_triton
from baton.kernels.gemm.inner_sum import tree_sum
from baton.kernels.implementation import Implementation, uses_triton
from baton.kernels.tiles import product_rows, product_slices, wide_dtype

_OWN_SLICES = 2  # of a product whose inner dimension no ranks share: so that few outputs occupy a GPU
_KERNEL_DTYPES = (torch.bfloat16, torch.float16)
_REFERENCE_DTYPES = (*_KERNEL_DTYPES, torch.float32, torch.float64)
_WARP_OUTPUTS = 16


def linear_ordered(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    *,
    num_slices: int | None = None,
    out_dtype: torch.dtype | None = None,
    options: Mapping[str, Any] | None = None,
    implementation: Implementation = Implementation.AUTO,
) -> torch.Tensor:
    """The product x W^T, [T, N]; a row and an output depend on themselves alone, bit for bit.

    Args:
        x_TK: bfloat16 or float16 (the reference takes float32 and float64, too); rows may be strided.
        weight_NK: of the same dtype, rows contiguous.
        num_slices: 1, 2, 4 or 8, a divisor of K; None: 2 if K is even.
        out_dtype: x's, or float32 where further slices are to be added.
        options: of the launch, as in the tuned table; they change no bit.
        implementation: which form computes.

    Raises:
        KernelArgumentInvalid: an argument does not fit; nothing was launched.
    """
    with_triton = uses_triton(x_TK.device, implementation)
    require_tensor("x_TK", x_TK, (None, None), _KERNEL_DTYPES if with_triton else _REFERENCE_DTYPES)
    require_rows("x_TK", x_TK)
    num_inputs = x_TK.shape[1]
    require_tensor("weight_NK", weight_NK, (None, num_inputs), (x_TK.dtype,), x_TK.device)
    require_rows("weight_NK", weight_NK)
    require(num_inputs > 0, "x_TK", "has no column")
    num_slices = math.gcd(_OWN_SLICES, num_inputs) if num_slices is None else num_slices
    fits = num_slices in (1, 2, 4, linear_ordered_triton.MAX_SLICES) and num_inputs % num_slices == 0
    require(fits, "num_slices", f"is {num_slices}: not 1, 2, 4 or 8, or no divisor of {num_inputs}")
    dtype = out_dtype or x_TK.dtype
    require(dtype in (x_TK.dtype, wide_dtype(x_TK.dtype)), "out_dtype", f"is {dtype}")
    if not with_triton:
        return tree_sum(product_slices(x_TK, weight_NK, num_slices).unbind()).to(dtype)
    out_TN = torch.empty(len(x_TK), len(weight_NK), dtype=dtype, device=x_TK.device)
    if out_TN.numel():
        if options is None:
            options = linear_ordered_triton.options_of(len(x_TK), len(weight_NK), num_inputs, num_slices, x_TK.device)
        fits = num_slices % options["slices"] == 0 and options["outputs"] >= _WARP_OUTPUTS * options["warps"]
        require(fits, "options", f"are not for {num_slices} slices, or leave warps without rows of the weight")
        linear_ordered_triton.launch(x_TK, weight_NK, out_TN, num_slices, options)
    return out_TN


def linear(x_TK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """The library's product, [T, N] in the dtype of both operands."""
    return functional.linear(x_TK, weight_NK)


def linear_invariant(x_TK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """The same, each row independent of the rows beside it (`kernels.tiles`)."""
    return product_rows(x_TK, weight_NK)
