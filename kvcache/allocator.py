"""Bookkeeping for the fixed pool of KV blocks that one worker owns.

A block holds `block_size` consecutive positions of one sequence, for every layer. This module deals in block
*indices*; the tensors they index live in `kvcache.pool`. Only the worker's scheduling loop calls it, so it takes no
lock. A block is free, reserved or quarantined: never two of these, never none.
"""

from collections import deque
from dataclasses import dataclass


class OutOfBlocks(Exception):
    """The pool cannot cover a reservation now; it may once a sequence finishes."""

    def __init__(self, num_wanted: int, num_free: int) -> None:
        super().__init__(f"wanted {num_wanted} KV blocks, {num_free} are free")
        self.num_wanted = num_wanted
        self.num_free = num_free


@dataclass(frozen=True, slots=True)
class BlockTable:
    """The blocks reserved for one sequence, in token order."""

    blocks: tuple[int, ...]
    block_size: int

    @property
    def capacity_len(self) -> int:
        """Positions the table has room for."""
        return len(self.blocks) * self.block_size

    def slot(self, position: int) -> int:
        """Flat index of `position` in the pool viewed as [num_blocks * block_size, ...]."""
        assert 0 <= position < self.capacity_len
        block, offset = divmod(position, self.block_size)
        return self.blocks[block] * self.block_size + offset


class BlockAllocator:
    """Hands out block tables and takes them back."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0
        assert block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = deque(range(num_blocks))
        self._reserved: set[int] = set()
        self._quarantined: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that a reservation made now could use."""
        return len(self._free)

    @property
    def num_reserved(self) -> int:
        """Blocks held by sequences and landings."""
        return len(self._reserved)

    @property
    def num_quarantined(self) -> int:
        """Blocks that a fenced peer might still write."""
        return len(self._quarantined)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` positions occupy."""
        assert num_tokens > 0
        return -(-num_tokens // self.block_size)

    def reserve(self, num_tokens: int) -> BlockTable:
        """Reserve room for `num_tokens` positions, all of it or none.

        Raises:
            OutOfBlocks: fewer blocks are free than wanted. Nothing was reserved.
        """
        num_wanted = self.num_blocks_for(num_tokens)
        if num_wanted > self.num_free:
            raise OutOfBlocks(num_wanted, self.num_free)
        blocks = tuple(self._free.popleft() for _ in range(num_wanted))
        self._reserved.update(blocks)
        self._check()
        return BlockTable(blocks, self.block_size)

    def release(self, table: BlockTable) -> None:
        """Return every block of `table`. Releasing a table twice is a bug in the caller."""
        assert self._reserved.issuperset(table.blocks)
        self._reserved.difference_update(table.blocks)
        self._free.extend(table.blocks)
        self._check()

    def quarantine(self, table: BlockTable) -> None:
        """Set reserved blocks apart until it is proved that nobody writes them any more."""
        assert self._reserved.issuperset(table.blocks)
        self._reserved.difference_update(table.blocks)
        self._quarantined.update(table.blocks)
        self._check()

    def release_quarantined(self, table: BlockTable) -> None:
        """Free quarantined blocks; the caller holds the evidence that their writer is done or gone."""
        assert self._quarantined.issuperset(table.blocks)
        self._quarantined.difference_update(table.blocks)
        self._free.extend(table.blocks)
        self._check()

    def _check(self) -> None:
        # O(1), so it stays on in production: a leaked block is lost until restart.
        held = len(self._reserved) + len(self._quarantined)
        assert len(self._free) + held == self.num_blocks
