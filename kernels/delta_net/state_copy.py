"""Copies a sequence's state in one layer to another slot, as a checkpoint after the rows so far.

Legend: N slots, H key heads.
"""

import torch

from baton.kernels.delta_net import state_copy_triton
from baton.kernels.delta_net.rows import StateRows


def copy_state(parts: tuple[torch.Tensor, ...], rows: StateRows, *, in_triton: bool) -> None:
    """Copy the state slot of the one sequence of `rows` to `rows.keep_in`. Never waits for the device.

    Args:
        parts: the convolution's ring, the open tile's ring, and the state: [N, H, ...], contiguous per head.
        rows: rows of a chunk, which the slot already contains.
        in_triton: whether to use one launch instead of torch.
    """
    assert rows.keep_in is not None and len(rows.slots_B) == 1
    if in_triton:
        state_copy_triton.launch(parts, rows.slots_B, rows.keep_in)
        return
    for part_NH in parts:
        part_NH[rows.keep_in].copy_(part_NH.index_select(0, rows.slots_B)[0])
