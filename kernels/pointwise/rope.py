"""Rotary position embedding of halves (NeoX) or neighbours. Legend: T tokens, H heads, D head size, F frequencies.

Angles are float32 as in transformers, because models were trained that way; a float64 model gets float64 angles. The
rotation is computed in the angles' dtype and rounded once (transformers rounds cos and sin to bfloat16 first).

Source: Su et al. 2021; transformers `Qwen3RotaryEmbedding`.
"""

import torch

from baton.kernels.tiles import wide_dtype


def rope_inverse_frequencies(head_dim: int, theta: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Frequencies theta ** (-2 i / D) for i = 0 ... F - 1, in the wide dtype of `dtype`."""
    # Always computed on the CPU: a GPU rounds pow differently.
    steps_F = torch.arange(0, head_dim, 2).to(wide_dtype(dtype)) / head_dim
    return (1.0 / theta**steps_F).to(device)


def rope_angles(positions_T: torch.Tensor, inverse_F: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute cosines and sines [T, F] of integer positions."""
    angles_TF = positions_T.to(inverse_F.dtype)[:, None] * inverse_F
    return angles_TF.cos(), angles_TF.sin()


def rope(x_THD: torch.Tensor, cos_TF: torch.Tensor, sin_TF: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
    """Rotate the first 2 F columns of every head of every token; the result has the dtype of `x_THD`.

    Columns that are rotated together are F apart; with `interleaved` they are neighbours. Columns keep their order.
    """
    turning_THR, rest_THX = x_THD.tensor_split([2 * cos_TF.shape[1]], dim=-1)
    if interleaved:
        left_THF, right_THF = turning_THR.to(cos_TF.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    else:
        left_THF, right_THF = turning_THR.to(cos_TF.dtype).chunk(2, dim=-1)
    cos_T1F, sin_T1F = cos_TF[:, None], sin_TF[:, None]
    turned = [left_THF * cos_T1F - right_THF * sin_T1F, right_THF * cos_T1F + left_THF * sin_T1F]
    turned_THR = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    turned_THR = turned_THR.to(x_THD.dtype)
    return torch.cat([turned_THR, rest_THX], dim=-1) if rest_THX.shape[-1] else turned_THR
