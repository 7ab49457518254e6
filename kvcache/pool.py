"""The tensors that hold KV blocks.

Shapes: L layers, N blocks, H KV heads, S positions per block, D head_dim. A head range of a block is contiguous, so
that tensor-parallel peers of different size can exchange it in one piece.

Block N (one past the last) is the *scratch block*: padding rows write there, so that a step never branches on
whether a row is real, and nothing ever reads it.
"""

import torch

from baton.kvcache.layout import KVLayout


class KVPool:
    """K and V of every block, one tensor [L, 2, N + 1, H, S, D]."""

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        assert num_blocks > 0
        self.layout = layout
        self.num_blocks = num_blocks
        shape = (layout.num_layers, 2, num_blocks + 1, layout.num_kv_heads, layout.block_size, layout.head_dim)
        # Zeroed, not empty: attention masks scores, and 0 * NaN from stale memory would still be NaN.
        self.data_L2NHSD = torch.zeros(shape, dtype=layout.dtype, device=device)

    @property
    def scratch_slot(self) -> int:
        """First slot of the scratch block."""
        return self.num_blocks * self.layout.block_size

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer, each a view [N + 1, H, S, D]."""
        return self.data_L2NHSD[layer, 0], self.data_L2NHSD[layer, 1]


def num_blocks_for_memory(layout: KVLayout, memory_bytes: int) -> int:
    """Blocks that fit into `memory_bytes`, the scratch block taken off."""
    return memory_bytes // layout.bytes_per_block - 1
