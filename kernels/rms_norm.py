"""RMSNorm as Qwen3 has it: x / sqrt(mean(x^2) + eps) * weight, computed in float32 (float64 for float64).

Source: Zhang and Sennrich 2019; transformers `Qwen3RMSNorm`. The weight multiplies plainly, without the (1 + w) of
Gemma and Qwen3-Next. Legend: ... any leading dimensions, D normalised size.
"""

import torch

from baton.kernels.tiles import ordered_sum, wide_dtype


def rms_norm(x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """[..., D] normalised over the last dimension, in the dtype of `x`."""
    wide = x.to(wide_dtype(x.dtype))
    mean_square = wide.square().mean(dim=-1, keepdim=True)
    return (wide * torch.rsqrt(mean_square + eps)).to(x.dtype) * weight_D


def rms_norm_invariant(x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """The same with a sum in fixed order."""
    wide = x.to(wide_dtype(x.dtype))
    mean_square = ordered_sum(wide.square()) / x.shape[-1]
    return (wide * torch.rsqrt(mean_square + eps)).to(x.dtype) * weight_D
