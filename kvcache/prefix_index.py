"""Tracks which blocks hold named KV, and which of them may be evicted first.

It knows names (block hashes) and block indices, not tokens or tensors, and counts no references: the allocator does,
and reports when a block is no longer in use (`rest`), or is again (`wake`). Only blocks not in use are evictable, least
recently used first.

Where layers keep a recurrent state, blocks alone are not enough: a shareable prefix ends at a checkpoint
(`kvcache.state_checkpoints`), which is dropped with its block.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from baton.kvcache.block_log import BlockLog
from baton.kvcache.state_checkpoints import StateCheckpoints


class PrefixIndex:
    """A one-to-one mapping between names and blocks.

    Args:
        log: records every name that is added or removed.
        checkpoints: checkpoints of sequences with state; None: sequences have no state.
    """

    def __init__(self, log: BlockLog | None = None, checkpoints: StateCheckpoints | None = None) -> None:
        self.checkpoints = checkpoints
        self._log = log
        self._blocks: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}
        self._resting: OrderedDict[int, None] = OrderedDict()
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._names

    def has(self, name: bytes) -> bool:
        """Return whether a block has this name."""
        return name in self._blocks

    @property
    def num_resting(self) -> int:
        """Number of evictable blocks: named and not in use."""
        return len(self._resting)

    def is_resting(self, block: int) -> bool:
        """Return whether a block is evictable: named and not in use."""
        return block in self._resting

    def match(self, names: Sequence[bytes]) -> tuple[int, ...]:
        """Return the blocks that a prompt may begin with, in order; the caller must take them before anything else."""
        found = self.run(names)
        if self.checkpoints is None:
            return found
        num_found = len(found)
        while num_found and names[num_found - 1] not in self.checkpoints:
            num_found -= 1
        return found[:num_found]

    def run(self, names: Iterable[bytes]) -> tuple[int, ...]:
        """Return the blocks of the longest run of names from the first on."""
        found = []
        for name in names:
            block = self._blocks.get(name)
            if block is None:
                break
            found.append(block)
        return tuple(found)

    def add(self, name: bytes, block: int) -> bool:
        """Name a block in use. False, and nothing changes, if another block has the name or it has another name."""
        assert not self.is_resting(block)
        if name in self._blocks or block in self._names:
            return False
        self._blocks[name] = block
        self._names[block] = name
        if self._log is not None:
            self._log.stored(name)
        return True

    def take_over(self, name: bytes, block: int) -> int | None:
        """Move the name of an evictable block to one in use with the same content; return the old block, now free.

        None, and nothing changes, if the name's block is in use, or the other one has a name.
        """
        old = self._blocks[name]
        if not self.is_resting(old) or block in self._names:
            return None
        del self._resting[old], self._names[old]
        self._blocks[name] = block
        self._names[block] = name
        return old

    def forget(self, block: int) -> None:
        """Stop sharing the content of a block in use: remove its name, and the checkpoint of that name."""
        assert not self.is_resting(block)
        name = self._names.pop(block, None)
        if name is None:
            return
        del self._blocks[name]
        if self.checkpoints is not None:
            self.checkpoints.forget(name)
        if self._log is not None:
            self._log.removed(name)

    def rest(self, block: int) -> bool:
        """Make a block evictable that is not used any more. False if it has no name: then nothing is worth keeping."""
        if block not in self._names:
            return False
        assert block not in self._resting
        self._resting[block] = None
        return True

    def wake(self, block: int) -> None:
        """Mark an evictable block as in use again."""
        del self._resting[block]

    def evict(self) -> int:
        """Evict the block that has been evictable longest, and return it."""
        block, _ = self._resting.popitem(last=False)
        name = self._names.pop(block)
        del self._blocks[name]
        self.num_evicted += 1
        if self.checkpoints is not None:
            self.checkpoints.drop(name)
        if self._log is not None:
            self._log.removed(name)
        return block
