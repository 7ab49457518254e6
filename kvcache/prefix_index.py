"""Which blocks hold KV that has a name, and which of them may be given up first.

It knows names and block indices, not tokens or tensors, and counts no references: the allocator does, and tells it
when a block is no longer in use (`rest`), or is again (`wake`). Only blocks that rest may be given up, the one
that has rested longest first.

Where layers keep a recurrent state, blocks alone are of no use: what a prompt may share ends at a checkpoint
(`kvcache.state_checkpoints`), which goes with its block.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from baton.kvcache.block_log import BlockLog
from baton.kvcache.state_checkpoints import StateCheckpoints


class PrefixIndex:
    """Names to blocks, one block a name and one name a block.

    Args:
        log: told of every name that comes or goes.
        checkpoints: of sequences with state; None: they have none.
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
        """Whether a block has this name."""
        return name in self._blocks

    @property
    def num_resting(self) -> int:
        """Named blocks that are not in use."""
        return len(self._resting)

    def is_resting(self, block: int) -> bool:
        """Whether it is named and not in use."""
        return block in self._resting

    def match(self, names: Sequence[bytes]) -> tuple[int, ...]:
        """Blocks that a prompt may begin with, in order; the caller must take them before anything else."""
        found = self.run(names)
        if self.checkpoints is None:
            return found
        num_found = len(found)
        while num_found and names[num_found - 1] not in self.checkpoints:
            num_found -= 1
        return found[:num_found]

    def run(self, names: Iterable[bytes]) -> tuple[int, ...]:
        """Blocks of the longest run of names from the first on."""
        found = []
        for name in names:
            block = self._blocks.get(name)
            if block is None:
                break
            found.append(block)
        return tuple(found)

    def add(self, name: bytes, block: int) -> bool:
        """Give a block in use its name. False, and nothing changes, if another block has it or it has another."""
        assert not self.is_resting(block)
        if name in self._blocks or block in self._names:
            return False
        self._blocks[name] = block
        self._names[block] = name
        if self._log is not None:
            self._log.stored(name)
        return True

    def take_over(self, name: bytes, block: int) -> int | None:
        """Move the name of a resting block to one in use that holds the same; the block that rested, free from now on.

        None, and nothing changes, where the name's block is in use, or the other one has a name.
        """
        old = self._blocks[name]
        if not self.is_resting(old) or block in self._names:
            return None
        del self._resting[old], self._names[old]
        self._blocks[name] = block
        self._names[block] = name
        return old

    def forget(self, block: int) -> None:
        """What a block in use holds is not to be shared any more: its name goes, and a checkpoint of that name."""
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
        """The block is no longer in use. False if it has no name, so that nothing is worth keeping."""
        if block not in self._names:
            return False
        assert block not in self._resting
        self._resting[block] = None
        return True

    def wake(self, block: int) -> None:
        """A resting block is in use again."""
        del self._resting[block]

    def evict(self) -> int:
        """Take the name of the block that has rested longest, and the block."""
        block, _ = self._resting.popitem(last=False)
        name = self._names.pop(block)
        del self._blocks[name]
        self.num_evicted += 1
        if self.checkpoints is not None:
            self.checkpoints.drop(name)
        if self._log is not None:
            self._log.removed(name)
        return block
