"""Bookkeeping for the fixed pool of KV blocks that one worker owns.

A block holds `block_size` consecutive positions of one sequence, for every layer. This module deals in block *indices*;
the tensors that they index are in `kvcache.pool`. Only the worker's scheduling loop calls it, so it takes no lock. A
block is in exactly one of four states: free, evictable (*resting*), reserved or quarantined.

With a prefix index, full blocks get their block hash as a name and are shared: a reserved block may be in several
tables, and sequences that share it only read it. A named block that leaves its last table becomes evictable: it keeps
its content, and is evicted only when a reservation finds no free block.

Where sequences keep state, each table also has a state slot; a sequence has both or neither.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from baton.kvcache.prefix_index import PrefixIndex
from baton.kvcache.state_checkpoints import StateCheckpoints
from baton.kvcache.state_slots import StateSlots


class OutOfBlocks(Exception):
    """The pool cannot cover a reservation now; it may once a sequence finishes."""

    def __init__(self, num_wanted: int, num_free: int) -> None:
        super().__init__(f"wanted {num_wanted} KV blocks, {num_free} are free")
        self.num_wanted = num_wanted
        self.num_free = num_free


@dataclass(frozen=True, slots=True)
class BlockTable:
    """The blocks and state slot reserved for one sequence.

    Attributes:
        blocks: block indices, in token order.
        block_size: positions per block.
        state_slot: slot of what its layers keep besides blocks; None if its layout has no state.
    """

    blocks: tuple[int, ...]
    block_size: int
    state_slot: int | None = None

    @property
    def capacity_len(self) -> int:
        """Number of positions that fit the table."""
        return len(self.blocks) * self.block_size

    def slot(self, position: int) -> int:
        """Return the flat index of `position` in the pool viewed as [num_blocks * block_size, ...]."""
        assert 0 <= position < self.capacity_len
        block, offset = divmod(position, self.block_size)
        return self.blocks[block] * self.block_size + offset


class BlockAllocator:
    """Hands out block tables and takes them back.

    Args:
        num_blocks: number of blocks in the pool.
        block_size: positions per block.
        index: tracks the content of named blocks; without one no block is ever shared. It has checkpoints if, and only
            if, tables have state.
        num_state_slots: number of state slots, for a layout with state; every table has one of them.
        first: number of the first block; those of other pools come before it (`kvcache.rank_blocks`).
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        index: PrefixIndex | None = None,
        *,
        num_state_slots: int = 0,
        first: int = 0,
    ) -> None:
        assert num_blocks > 0
        assert block_size > 0
        self.state_slots = StateSlots(num_state_slots)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.index = (
            PrefixIndex(checkpoints=StateCheckpoints() if num_state_slots else None) if index is None else index
        )
        assert (self.index.checkpoints is not None) == self._has_state
        self._free = deque(range(first, first + num_blocks))
        self._num_tables: dict[int, int] = {}  # of each reserved block
        self._quarantined: set[int] = set()

    @property
    def num_free(self) -> int:
        """Number of blocks that a reservation made now could use, including evictable ones."""
        return len(self._free) + self.index.num_resting

    @property
    def num_reserved(self) -> int:
        """Number of blocks held by sequences and incoming transfers."""
        return len(self._num_tables)

    @property
    def num_quarantined(self) -> int:
        """Number of blocks that a fenced peer might still write."""
        return len(self._quarantined)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that `num_tokens` positions occupy."""
        assert num_tokens > 0
        return -(-num_tokens // self.block_size)

    def num_missing(self, num_tokens: int, shared: Sequence[int] = ()) -> int:
        """Return how many blocks must become free before `reserve` with these arguments succeeds; 0 if it would now.

        If no state slot is free, it is at least 1: a table has to be released.
        """
        num_missing = self._num_missing_blocks(num_tokens, shared)
        return max(num_missing, 1) if self._has_state and not self.state_slots.num_free else num_missing

    def _num_missing_blocks(self, num_tokens: int, shared: Sequence[int]) -> int:
        num_fresh = self.num_blocks_for(num_tokens) - len(shared)
        num_woken = sum(self.index.is_resting(block) for block in shared)
        return max(0, num_fresh - (self.num_free - num_woken))

    @property
    def _has_state(self) -> bool:
        return self.state_slots.num_slots > 0

    def reserve(self, num_tokens: int, shared: Sequence[int] = ()) -> BlockTable:
        """Reserve room for `num_tokens` positions, all of it or none.

        Args:
            num_tokens: number of positions, >= 1.
            shared: named blocks for the first of them, to be only read; just matched in the index.

        Raises:
            OutOfBlocks: fewer blocks are free than needed. Nothing was reserved.
        """
        if self.num_missing(num_tokens, shared):
            raise OutOfBlocks(
                self.num_blocks_for(num_tokens) - len(shared),
                self.num_free - sum(self.index.is_resting(block) for block in shared),
            )
        blocks = self._take(num_tokens, shared)
        return BlockTable(blocks, self.block_size, self.state_slots.take() if self._has_state else None)

    def _take(self, num_tokens: int, shared: Sequence[int] = ()) -> tuple[int, ...]:
        num_fresh = self.num_blocks_for(num_tokens) - len(shared)
        assert num_fresh >= 0
        for block in shared:
            if block not in self._num_tables:
                self.index.wake(block)  # before anything is evicted
            self._num_tables[block] = self._num_tables.get(block, 0) + 1
        fresh = tuple(self._free.popleft() if self._free else self.index.evict() for _ in range(num_fresh))
        self._num_tables |= dict.fromkeys(fresh, 1)
        self._check()
        return (*shared, *fresh)

    def grow(self, table: BlockTable, num_tokens: int) -> BlockTable:
        """Extend a table to `num_tokens` positions in all; return it unchanged if it already has as many.

        The new table begins with the blocks of the old one, which must not be used any more.

        Raises:
            OutOfBlocks: fewer blocks are free than needed. The old table stays valid.
        """
        assert self._num_tables.keys() >= set(table.blocks)
        num_fresh = self.num_blocks_for(num_tokens) - len(table.blocks)
        if num_fresh <= 0:
            return table
        if num_fresh > self.num_free:
            raise OutOfBlocks(num_fresh, self.num_free)
        fresh = self._take(num_fresh * self.block_size)
        return BlockTable((*table.blocks, *fresh), self.block_size, table.state_slot)

    def release(self, table: BlockTable) -> None:
        """Return every block of `table`. Releasing a table twice is a bug in the caller."""
        assert self._num_tables.keys() >= set(table.blocks)
        # From the end: the block that has been evictable longest is evicted first, and a block is useless without those
        # before it.
        for block in reversed(table.blocks):
            self._num_tables[block] -= 1
            if self._num_tables[block] == 0:
                del self._num_tables[block]
                if not self.index.rest(block):
                    self._free.append(block)
        if table.state_slot is not None:
            self.state_slots.give_back(table.state_slot)
        self._check()

    def name(self, name: bytes, block: int) -> None:
        """Give a block in use its name, unless another block has it.

        With state, a sequence that found rows without a checkpoint computes them again, in its own blocks. These
        replace evictable blocks with the same names, so that a prefix ages as a whole.
        """
        if self.index.add(name, block) or self.index.checkpoints is None or block in self.index:
            return
        old = self.index.take_over(name, block)
        if old is not None:
            self._free.append(old)
        self._check()

    def forget(self, table: BlockTable) -> None:
        """Stop sharing the content of a table's blocks."""
        for block in table.blocks:
            self.index.forget(block)

    def quarantine(self, table: BlockTable) -> None:
        """Set reserved blocks apart until it is proved that no process writes them. Shared blocks are never written."""
        assert all(self._num_tables.get(block) == 1 and block not in self.index for block in table.blocks)
        for block in table.blocks:
            del self._num_tables[block]
        self._quarantined.update(table.blocks)
        if table.state_slot is not None:
            self.state_slots.quarantine(table.state_slot)
        self._check()

    def release_quarantined(self, table: BlockTable) -> None:
        """Free quarantined blocks; the caller holds the evidence that their writer is done or gone."""
        assert self._quarantined.issuperset(table.blocks)
        self._quarantined.difference_update(table.blocks)
        self._free.extend(table.blocks)
        if table.state_slot is not None:
            self.state_slots.give_back_quarantined(table.state_slot)
        self._check()

    def _check(self) -> None:
        # O(1), so it stays on in production: a leaked block is lost until restart.
        held = len(self._num_tables) + len(self._quarantined)
        assert self.num_free + held == self.num_blocks
