"""Which state slots hold copies of a sequence's state at the end of a named block, and which copy is evicted first.

A *checkpoint* is the state of a prefix: all that its layers keep besides blocks, as it is when exactly the positions of
the prefix are computed. It has the name of the prefix's last block, and is dropped with that block. Its slot is one of
the pool's, but not a sequence's: free, filling (a step copies state into it), or kept under a name.

Some checkpoints are at the *end* of a prompt. Most of those are never used, or once, by the next turn of a chat. With a
checkpoint interval, those at intermediate positions count as ends, too. Others are at a *branch*: where a prompt
diverged from an earlier one, or from where two have continued. A new checkpoint evicts the least recently used end. A
branch is evicted, before any end, once `BRANCH_ROUNDS` times as many new checkpoints as there are slots were taken
since its last use. At most three quarters of the slots are branches; one more counts as an end, and evicts none of
them: otherwise a round over slightly more prompts than fit would find nothing at all. A checkpoint that a sequence is
about to begin with is never evicted.

Only steps read and write these slots, in the order in which they are launched. So a slot may be reassigned as soon as
the step that copies from it is planned: the step that overwrites it comes later, and copies at its end.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable

from baton.core.block_hash import checkpoint_name
from baton.kvcache.block_log import BlockLog

BRANCH_ROUNDS = 4  # new checkpoints per slot; a round over groups of prompts comes back to each within that number


class StateCheckpoints:
    """A mapping from names to slots.

    Args:
        slots: slots of the pool that are only for checkpoints.
        log: records every checkpoint that is added or removed, by `checkpoint_name`.
        interval: tokens between the checkpoints that a prompt leaves besides its end and its branch; 0: no others.
    """

    def __init__(self, slots: Iterable[int] = (), log: BlockLog | None = None, *, interval: int = 0) -> None:
        self._log = log
        self.interval = interval
        self._free = list(slots)
        self._free.reverse()
        self._filling: set[int] = set()
        self._kept: dict[bytes, int] = {}
        self._ends: OrderedDict[bytes, bool] = OrderedDict()  # whether it was ever used; least recently used first
        self._branches: OrderedDict[bytes, int] = OrderedDict()  # when it was last used, in `_num_taken`; same order
        self._num_taken = 0
        self._num_users: Counter[bytes] = Counter()
        self._forgotten: set[bytes] = set()
        self.num_slots = len(self._free)
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, name: bytes) -> bool:
        return name in self._kept and name not in self._forgotten

    @property
    def num_filling(self) -> int:
        """Number of slots that a step copies state into."""
        return len(self._filling)

    @property
    def num_in_use(self) -> int:
        """Number of checkpoints that sequences are about to begin with."""
        return len(self._num_users)

    def use(self, name: bytes) -> None:
        """Mark a present checkpoint as one that a sequence is about to begin with; it is not evicted until `leave`."""
        self._place(name, is_branch=name in self._branches or self._ends.pop(name))
        self._num_users[name] += 1

    def leave(self, name: bytes) -> int:
        """Release a use, once the step that copies from it is planned or will never be; return its slot."""
        assert self._num_users[name] > 0
        self._num_users[name] -= 1
        slot = self._kept[name]
        if not self._num_users[name]:
            del self._num_users[name]
            if name in self._forgotten:
                self._forgotten.remove(name)
                self._remove(name)
        return slot

    def take(self) -> int | None:
        """Take a slot for a step to copy state into, then `keep`; None if nothing can be evicted (see the module)."""
        self._num_taken += 1
        if not self._free:
            name = self._least()
            if name is None:
                return None
            self._remove(name)
        slot = self._free.pop()
        self._filling.add(slot)
        self._check()
        return slot

    def keep(self, name: bytes, slot: int, *, is_branch: bool = False) -> bool:
        """Keep a slot that has a prefix's state. False, and the slot is free, if the name already has a checkpoint."""
        self._filling.remove(slot)
        if name in self._kept:
            self._free.append(slot)
            return False
        self._kept[name] = slot
        if is_branch:
            self._place(name, is_branch=True)
        else:
            self._ends[name] = False
        if self._log is not None:
            self._log.stored(checkpoint_name(name))
        self._check()
        return True

    def drop(self, name: bytes) -> None:
        """Drop the checkpoint of an evicted block. It has no users: their blocks would be in use."""
        if name in self._forgotten:
            return
        assert name not in self._num_users
        if name in self._kept:
            self._remove(name)
            self._check()

    def give_up(self, slot: int) -> None:
        """Free a slot whose content, copied by a step, is not needed."""
        self._filling.remove(slot)
        self._free.append(slot)
        self._check()

    def forget(self, name: bytes) -> None:
        """Let no further sequence begin with a checkpoint. One that is about to may still copy from its slot."""
        if self._num_users[name]:
            self._forgotten.add(name)
        else:
            self.drop(name)

    def _least(self) -> bytes | None:
        """Return the checkpoint to evict; None if there is none."""
        for name, used_at in self._branches.items():
            if self._num_taken - used_at <= BRANCH_ROUNDS * self.num_slots:
                break
            if name not in self._num_users:
                return name
        return next((name for name in self._ends if name not in self._num_users), None)

    def _place(self, name: bytes, *, is_branch: bool) -> None:
        """Record a checkpoint as the most recently used one, as a branch if there is room for it."""
        if is_branch and (name in self._branches or len(self._branches) < self.num_slots * 3 // 4):
            self._branches[name] = self._num_taken
            self._branches.move_to_end(name)
        else:
            self._ends[name] = True

    def _remove(self, name: bytes) -> None:
        if self._branches.pop(name, None) is None:
            del self._ends[name]
        self._free.append(self._kept.pop(name))
        self.num_evicted += 1
        if self._log is not None:
            self._log.removed(checkpoint_name(name))

    def _check(self) -> None:
        # O(1), so it stays on in production: a leaked slot is lost until restart.
        assert len(self._free) + len(self._filling) + len(self._kept) == self.num_slots
