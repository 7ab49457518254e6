"""Workloads of the hand-off benchmark: shapes of a request's KV, and the blocks of each request.

Block ids are scattered at random and derived from (seed, request), so that sender and receiver know them without
communicating.
"""

from dataclasses import dataclass

import numpy as np

POOL_BLOCKS = 160
_SOURCE, _TARGET = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KVWorkload:
    """One request: `num_blocks` blocks in each of `num_layers` layers."""

    name: str
    num_blocks: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: str = "bfloat16"
    element_bytes: int = 2

    @property
    def block_bytes(self) -> int:
        """Bytes of K and V of one block in one layer."""
        return 2 * self.num_kv_heads * self.block_size * self.head_dim * self.element_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of K and V of one request in one layer."""
        return self.num_blocks * self.block_bytes

    @property
    def request_bytes(self) -> int:
        """Bytes of K and V of one request."""
        return self.num_layers * self.layer_bytes

    @property
    def prompt_len(self) -> int:
        """Positions of one request."""
        return self.num_blocks * self.block_size

    @property
    def pool_shape(self) -> tuple[int, int, int]:
        """Shape of a pool as bytes: [layers, blocks, bytes of a block]."""
        return self.num_layers, POOL_BLOCKS, self.block_bytes

    def source_blocks(self, seed: int, index: int) -> tuple[int, ...]:
        """The sender's blocks of request `index`, in order."""
        return self._draw(seed, index, _SOURCE)

    def target_blocks(self, seed: int, index: int) -> tuple[int, ...]:
        """The receiver's blocks of request `index`, in order."""
        return self._draw(seed, index, _TARGET)

    def _draw(self, seed: int, index: int, side: int) -> tuple[int, ...]:
        generator = np.random.default_rng((seed, index, side))
        return tuple(generator.permutation(POOL_BLOCKS)[: self.num_blocks].tolist())


# a and b have the shape of Qwen3-8B in bfloat16 (36 layers, 8 KV heads of 128): 64 KiB a block and layer.
WORKLOADS = {
    workload.name: workload
    for workload in (
        KVWorkload(name="a", num_blocks=64, num_layers=36, num_kv_heads=8, head_dim=128),
        KVWorkload(name="b", num_blocks=4, num_layers=36, num_kv_heads=8, head_dim=128),
        KVWorkload(name="c", num_blocks=16, num_layers=4, num_kv_heads=2, head_dim=32),
    )
}
