"""The tensors that hold one rank's KV blocks.

Shapes: L layers, N blocks, H KV heads of this rank, P parts (K, V), S positions per block, D head_dim. A head range of
a block is contiguous, K and V together, so that peers exchange it in one piece.

Block N (one past the last) is the *scratch block*: padding rows write there, so that a step never branches on whether a
row is real, and nothing ever reads it. The last state slot is scratch in the same way.
"""

import numpy as np
import torch

from baton.kvcache.geometry import LayerGeometry, PoolGeometry
from baton.kvcache.layout import ITEM_BYTES, KVLayout

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class KVPool:
    """All blocks of one rank.

    Args:
        layout: layout of the worker.
        num_blocks: number of blocks, without the scratch block.
        device: device of the memory.
        rank: rank in its tensor-parallel group.
        size: size of that group.
        num_state_slots: number of state slots, without the scratch slot; for a layout with state.
        num_checkpoints: how many of them, at the end, hold checkpoints of cached prefixes; the others belong to
            sequences.
        memory: zeroed bytes on the CPU to use, for instance shared with another process; own memory if None.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        device: torch.device,
        *,
        rank: int = 0,
        size: int = 1,
        num_state_slots: int = 0,
        num_checkpoints: int = 0,
        memory: memoryview | None = None,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        assert 0 <= num_checkpoints < max(num_state_slots, 1)
        self.num_state_slots = num_state_slots
        self.num_checkpoints = num_checkpoints
        self.dtype = TORCH_DTYPES[layout.dtype]
        self.geometry = PoolGeometry(layout, num_blocks, rank, size, num_state_slots=num_state_slots)
        if memory is None:
            # Zeroed, not empty: attention masks scores, and 0 * NaN from stale memory would still be NaN.
            self.data_bytes = torch.zeros(self.geometry.num_bytes, dtype=torch.uint8, device=device)
        else:
            assert device.type == "cpu"
            assert len(memory) == self.geometry.num_bytes
            self.data_bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self.device = self.data_bytes.device  # with its index, which threads that select it need
        self._layers = tuple(self._view(layer) for layer in range(layout.num_layers))
        self._state_NX = [self._slots(layer) for layer in self.geometry.layers if layer.blocks_per_slot]

    @property
    def scratch_slot(self) -> int:
        """First slot of the scratch block."""
        return self.num_blocks * self.layout.block_size

    @property
    def num_sequence_slots(self) -> int:
        """Number of state slots for sequences."""
        return self.num_state_slots - self.num_checkpoints

    @property
    def checkpoint_slots(self) -> range:
        """The state slots behind those of sequences."""
        return range(self.num_sequence_slots, self.num_state_slots)

    @property
    def num_kv_heads(self) -> int:
        """KV heads of this rank."""
        return self.geometry.layer(self.layout.layers.index(self.layout.attention)).num_heads

    @property
    def bytes_view(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """The memory of a pool on the CPU; not a copy."""
        view: np.ndarray[tuple[int], np.dtype[np.uint8]] = self.data_bytes.numpy()
        return view

    def blocks(self, layer: int) -> torch.Tensor:
        """Return one layer of any kind, a view [N + 1, H, P, S, D].

        For a layer in state slots, N + 1 are the blocks of all slots, `blocks_per_slot` of each, and S is the ring, or
        the MAX_BLOCK_SIZE rows of it in a block.
        """
        return self._layers[layer]

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of an attention layer, each a view [N + 1, H, S, D]."""
        blocks_NHPSD = self._layers[layer]
        return blocks_NHPSD[:, :, 0], blocks_NHPSD[:, :, 1]

    def copy_state(self, source: int, target: int) -> None:
        """Copy a state slot, in every layer that lies in it. Never waits for the device."""
        assert source != target and 0 <= min(source, target) <= max(source, target) < self.num_state_slots
        for state_NX in self._state_NX:
            state_NX[target].copy_(state_NX[source])

    def _slots(self, layer: LayerGeometry) -> torch.Tensor:
        data = self.data_bytes[layer.offset_bytes : layer.offset_bytes + layer.num_bytes]
        return data.view(-1, layer.blocks_per_slot * layer.block_bytes)

    def _view(self, layer: int) -> torch.Tensor:
        g = self.geometry.layer(layer)
        flat = self.data_bytes[g.offset_bytes : g.offset_bytes + g.num_bytes].view(
            TORCH_DTYPES[self.layout.layers[layer].dtype]
        )
        return flat.view(g.num_blocks, g.num_heads, g.num_parts, g.rows_per_block, -1)


def num_blocks_for_memory(layout: KVLayout, memory_bytes: int, num_state_slots: int = 0) -> int:
    """Return how many blocks fit `memory_bytes` beside that many state slots, without the scratch block and slot."""
    return (memory_bytes - (num_state_slots + 1) * layout.bytes_per_state_slot) // layout.bytes_per_block - 1
