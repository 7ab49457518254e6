"""A causal convolution over a few positions of each channel, then SiLU; recent inputs are stored by position.

Inputs lie in a ring, position p in row p mod ring, so what a rejected row wrote is overwritten before it is read.
Before position 0 there are zeros.

Source: transformers `Qwen3NextGatedDeltaNet`; Dao 2024 (causal-conv1d).
Legend: B sequences, L rows of each, H key heads, X channels of one, W positions that an output sees, N slots, R ring.
"""

import torch

from baton.kernels.arguments import require
from baton.kernels.delta_net.rows import StateRows
from baton.kernels.tiles import wide_dtype


def causal_conv(
    x_BLHX: torch.Tensor, weight_HWX: torch.Tensor, kept_NHRX: torch.Tensor, rows: StateRows
) -> torch.Tensor:
    """Compute silu(sum over j of w_j x_(p - W + 1 + j)), [B, L, H, X] in the wide dtype; rows are independent.

    Args:
        x_BLHX: inputs, in the dtype of the ring.
        weight_HWX: taps; the last one is for the row itself.
        kept_NHRX: ring of stored inputs, read before the rows are written to it.
        rows: positions and slots of the rows.

    Raises:
        KernelArgumentInvalid: there are so many decode rows that they would overwrite inputs that the next step reads.
    """
    num_rows, num_before, ring = rows.num_rows, weight_HWX.shape[1] - 1, kept_NHRX.shape[2]
    is_chunk = rows.start is not None
    require(is_chunk or num_rows + num_before - 1 <= ring, "x_BLHX", f"has {num_rows} rows for a ring of {ring}")
    before_J = torch.arange(-num_before, 0, device=x_BLHX.device)
    position_BJ = rows.positions_B[:, None] + before_J
    found_BJHX = kept_NHRX[rows.slots_B[:, None], :, position_BJ % ring]
    found_BJHX = torch.where((position_BJ >= 0)[..., None, None], found_BJHX, 0)
    seen_BYHX = torch.cat([found_BJHX, x_BLHX], dim=1).to(wide_dtype(x_BLHX.dtype))
    out_BLHX = seen_BYHX[:, :num_rows] * weight_HWX[:, 0]
    for tap in range(1, num_before + 1):
        out_BLHX = out_BLHX + seen_BYHX[:, tap : tap + num_rows] * weight_HWX[:, tap]
    num_kept = min(num_rows, num_before) if is_chunk else num_rows
    slot_BL, row_BL = rows.places(ring, num_kept)
    kept_NHRX[slot_BL, :, row_BL] = x_BLHX[:, num_rows - num_kept :]
    return out_BLHX / (1 + torch.exp(-out_BLHX))
