"""Which blocks of a worker are in this rank's pool, and their indices there.

If every rank keeps its part of every sequence, a worker has one pool of B blocks, of which each rank's pool holds its
heads. If sequences have owners (`model.dealt_rows`), it has as many pools as ranks: blocks r * B to (r + 1) * B - 1
belong to rank r only, so the numbers in a block table identify the owner. The null block is one past them all, and lies
in every rank's pool. This module handles only this numbering, not tensors' memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the KV receiver has no torch
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBlocks:
    """Numbers of blocks, at one rank.

    Attributes:
        num_blocks: B, the blocks of each rank's pool.
        rank: this rank; 0 if there is one pool.
        num_pools: number of pools that hold sequences.
    """

    num_blocks: int
    rank: int = 0
    num_pools: int = 1

    @property
    def null_block(self) -> int:
        """The block that unused entries of block tables name."""
        return self.num_blocks * self.num_pools

    def owner(self, blocks: Sequence[int]) -> int:
        """Return the rank whose pool holds all of these blocks; there is at least one."""
        owner = blocks[0] // self.num_blocks
        assert 0 <= owner < self.num_pools
        assert all(block // self.num_blocks == owner for block in blocks), "a sequence lies in one rank's pool"
        return owner

    def own(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """Return the blocks' indices in this rank's pool; empty if another rank's pool holds them."""
        if self.num_pools == 1:
            return tuple(blocks)
        owner, indices = self.at_owner(blocks)
        return indices if owner == self.rank else ()

    def at_owner(self, blocks: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """Return the rank whose pool holds all of these blocks, and their indices there; there is at least one."""
        owner = self.owner(blocks)
        first = owner * self.num_blocks
        return owner, tuple(block - first for block in blocks)

    def are_of_one(self, blocks: Sequence[int]) -> bool:
        """Return whether one rank's pool holds all of these blocks; there is at least one."""
        return len({block // self.num_blocks for block in blocks}) == 1

    def own_tables(self, tables_BM: "torch.Tensor") -> "torch.Tensor":
        """Convert tables of this rank's sequences to indices in its pool, where the null block is the last."""
        return (tables_BM - self.rank * self.num_blocks).clamp(max=self.num_blocks)
