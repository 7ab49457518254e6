"""Which blocks of a worker are in this rank's pool, and under which index there.

Where every rank keeps its part of every sequence, a worker has one pool of B blocks, of which each rank's pool holds
its heads. Where sequences have owners (`model.dealt_rows`) it has as many pools as ranks: blocks r * B to (r + 1) * B -
1 are rank r's alone, and a block table's numbers say whose its sequence is. The null block is one past them all, and
lies in every rank's pool. Owns this numbering alone, without tensors' memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what receives KV has no torch
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBlocks:
    """Numbers of blocks, at one rank.

    Attributes:
        num_blocks: B, of each rank's pool.
        rank: this one; 0 where there is one pool.
        num_pools: that sequences lie in.
    """

    num_blocks: int
    rank: int = 0
    num_pools: int = 1

    @property
    def null_block(self) -> int:
        """What unused entries of block tables name."""
        return self.num_blocks * self.num_pools

    def owner(self, blocks: Sequence[int]) -> int:
        """The rank whose pool holds them all; there is at least one."""
        owner = blocks[0] // self.num_blocks
        assert 0 <= owner < self.num_pools
        assert all(block // self.num_blocks == owner for block in blocks), "a sequence lies in one rank's pool"
        return owner

    def own(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """Their indices in this rank's pool; none if it is another's that holds them."""
        if self.num_pools == 1:
            return tuple(blocks)
        owner, indices = self.at_owner(blocks)
        return indices if owner == self.rank else ()

    def at_owner(self, blocks: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """The rank whose pool holds them all, and their indices there; there is at least one."""
        owner = self.owner(blocks)
        first = owner * self.num_blocks
        return owner, tuple(block - first for block in blocks)

    def are_of_one(self, blocks: Sequence[int]) -> bool:
        """Whether one rank's pool holds them all; there is at least one."""
        return len({block // self.num_blocks for block in blocks}) == 1

    def own_tables(self, tables_BM: "torch.Tensor") -> "torch.Tensor":
        """Tables of sequences of this rank -> the same of indices in its pool, of which the null block is the last."""
        return (tables_BM - self.rank * self.num_blocks).clamp(max=self.num_blocks)
