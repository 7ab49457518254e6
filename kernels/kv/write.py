"""Writes new K and V rows into a layer's blocks.

Legend: T tokens, N blocks, H KV heads, S positions per block, D head size.
"""

import torch


def kv_write(
    key_THD: torch.Tensor,
    value_THD: torch.Tensor,
    slots_T: torch.Tensor,
    key_NHSD: torch.Tensor,
    value_NHSD: torch.Tensor,
) -> None:
    """Write row t to flat slot `slots_T[t]` (int64, block * S + offset), in the pool's dtype.

    Padding rows share the scratch slot; which of them remains there is undefined, and nothing reads it.
    """
    block_size = key_NHSD.shape[2]
    block_T = slots_T // block_size
    offset_T = slots_T % block_size
    key_NHSD[block_T, :, offset_T] = key_THD.to(key_NHSD.dtype)
    value_NHSD[block_T, :, offset_T] = value_THD.to(value_NHSD.dtype)
