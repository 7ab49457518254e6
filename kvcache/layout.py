"""What the bytes of a KV pool mean: shapes, dtype, and the hash two peers compare before they exchange a frame.

Shape legend of this room: L layers, N blocks, H KV heads, S positions per block (block_size), D head_dim.
"""

import hashlib
from dataclasses import dataclass

import torch

DTYPE_NAMES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The layout of one worker's pool.

    Attributes:
        model_hash: identity of config and checkpoint; KV of different weights never mixes.
        num_layers: trunk layers, plus one for the MTP layer when drafts are made.
        num_kv_heads: of the whole model.
        head_dim: elements per head.
        block_size: positions per block.
        dtype: one of DTYPE_NAMES.
    """

    model_hash: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def bytes_per_position(self) -> int:
        """K and V of one position in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        """K and V of one block in every layer."""
        return self.bytes_per_position * self.block_size * self.num_layers

    @property
    def hash(self) -> bytes:
        """sha256 of every field; equal hashes mean that frames may be exchanged as they are."""
        fields = (
            self.model_hash,
            self.num_layers,
            self.num_kv_heads,
            self.head_dim,
            self.block_size,
            DTYPE_NAMES[self.dtype],
        )
        return hashlib.sha256(repr(fields).encode()).digest()
