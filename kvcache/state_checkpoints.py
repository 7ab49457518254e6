"""Which state slots hold copies of a sequence's state at the end of a named block, and which copy is evicted first.

A *checkpoint* is the state of a prefix: all that its layers keep beside blocks, as it is when exactly the positions of
the prefix are computed. It has the name of the prefix's last block, and is dropped with that block. Its slot is one of
the pool's, none of a sequence's: free, filling (a step copies state into it), or kept under a name. What was used least
recently is evicted for a new one, but for those that a sequence is about to begin with.

Steps alone read and write these slots, in the order in which they are launched. So one may be given away as soon as
the step that copies from it is planned: the step that overwrites it comes later, and copies at its end.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable

from baton.core.block_hash import checkpoint_name
from baton.kvcache.block_log import BlockLog


class StateCheckpoints:
    """Names to slots, one slot a name.

    Args:
        slots: of the pool, for checkpoints alone.
        log: told of every checkpoint that comes or goes, by `checkpoint_name`.
    """

    def __init__(self, slots: Iterable[int] = (), log: BlockLog | None = None) -> None:
        self._log = log
        self._free = list(slots)
        self._free.reverse()
        self._filling: set[int] = set()
        self._kept: OrderedDict[bytes, int] = OrderedDict()  # what was used last is last
        self._num_users: Counter[bytes] = Counter()
        self.num_slots = len(self._free)
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, name: bytes) -> bool:
        return name in self._kept

    @property
    def num_filling(self) -> int:
        """Slots that a step copies state into."""
        return len(self._filling)

    @property
    def num_in_use(self) -> int:
        """Checkpoints that sequences are about to begin with."""
        return len(self._num_users)

    def use(self, name: bytes) -> None:
        """A sequence is about to begin with a checkpoint that is there; it is not evicted until `leave`."""
        self._kept.move_to_end(name)
        self._num_users[name] += 1

    def leave(self, name: bytes) -> int:
        """The step that copies from it is planned, or will never be; its slot."""
        assert self._num_users[name] > 0
        self._num_users[name] -= 1
        if not self._num_users[name]:
            del self._num_users[name]
        return self._kept[name]

    def take(self) -> int | None:
        """A slot for a step to copy state into, then `keep`; None: all are filling or in use."""
        if not self._free:
            name = next((name for name in self._kept if name not in self._num_users), None)
            if name is None:
                return None
            self._remove(name)
        slot = self._free.pop()
        self._filling.add(slot)
        self._check()
        return slot

    def keep(self, name: bytes, slot: int) -> bool:
        """The step is over: the slot has the state of a prefix. False, and the slot is free: the name has one."""
        self._filling.remove(slot)
        if name in self._kept:
            self._free.append(slot)
            return False
        self._kept[name] = slot
        if self._log is not None:
            self._log.stored(checkpoint_name(name))
        self._check()
        return True

    def drop(self, name: bytes) -> None:
        """The block of that name is given up. One that a sequence is about to begin with has its blocks in use."""
        assert name not in self._num_users
        if name in self._kept:
            self._remove(name)
            self._check()

    def _remove(self, name: bytes) -> None:
        self._free.append(self._kept.pop(name))
        self.num_evicted += 1
        if self._log is not None:
            self._log.removed(checkpoint_name(name))

    def _check(self) -> None:
        # O(1), so it stays on in production: a leaked slot is lost until restart.
        assert len(self._free) + len(self._filling) + len(self._kept) == self.num_slots
