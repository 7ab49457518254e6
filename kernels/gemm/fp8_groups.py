"""Rows in float8 (e4m3) with one scale for each 128 columns: the definition that fused epilogues and products share.

A group's scale is max(largest magnitude, 1e-10) * (1 / 448), so that its largest value becomes 448; a value is
multiplied by the inverse of the scale in float32, rounded once, and saturated. A NaN stays one and does not scale its
neighbours. Scales lie group by group, [groups, rows], as the products read them. Rows that only fill up a batch are
zeros with scale 1: a scale of 0 would turn what they meet into NaN. Legend: T rows, K columns, G groups, C columns of
a group, R rows with those that fill up.
"""

import torch

GROUP_LEN = 128
LARGEST = 448.0
SMALLEST = 1e-10
DTYPE = torch.float8_e4m3fn


def quantize_groups(x_TK: torch.Tensor, num_rows: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference: float8 [R, K] and scales float32 [K / 128, R], where R is `num_rows`, or T if None."""
    wide_TGC = x_TK.float().unflatten(1, (-1, GROUP_LEN))
    largest_TG = torch.where(wide_TGC.isnan(), 0.0, wide_TGC.abs()).amax(dim=2)
    scale_TG = largest_TG.clamp(min=SMALLEST) * (1 / LARGEST)
    scaled_TGC = (wide_TGC * scale_TG.reciprocal()[..., None]).clamp(-LARGEST, LARGEST)
    rows_TK = scaled_TGC.flatten(1).to(DTYPE)
    if num_rows is None or num_rows == len(x_TK):
        return rows_TK, scale_TG.T.contiguous()
    padded_RK = torch.zeros(num_rows, x_TK.shape[1], dtype=DTYPE, device=x_TK.device)
    padded_RK[: len(x_TK)] = rows_TK
    scale_GR = torch.ones(scale_TG.shape[1], num_rows, dtype=torch.float32, device=x_TK.device)
    scale_GR[:, : len(x_TK)] = scale_TG.T
    return padded_RK, scale_GR
