"""Which state slots hold copies of a sequence's state at the end of a named block, and which copy is evicted first.

A *checkpoint* is the state of a prefix: all that its layers keep beside blocks, as it is when exactly the positions of
the prefix are computed. It has the name of the prefix's last block, and is dropped with that block. Its slot is one of
the pool's, none of a sequence's: free, filling (a step copies state into it), or kept under a name.

Some lie at the *end* of one prompt, and most of those are never used, or once, by the next turn of a chat; where an
interval is asked for, those on the way there count as ends, too. Others lie at a *branch*: where a prompt parted from
one before it, or where two have gone on. The end that was used least recently is evicted for a new checkpoint. A branch
is evicted once it was of no use for `BRANCH_ROUNDS` times as many new ones as there are slots, and then before any end.
Three quarters of the slots are branches at most; what would be one more counts as an end, and pushes out none of them:
else a round over a few more prompts than fit would find nothing at all. What a sequence is about to begin with is never
evicted.

Steps alone read and write these slots, in the order in which they are launched. So one may be given away as soon as
the step that copies from it is planned: the step that overwrites it comes later, and copies at its end.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable

from baton.core.block_hash import checkpoint_name
from baton.kvcache.block_log import BlockLog

BRANCH_ROUNDS = 4  # new checkpoints a slot; a round over groups of prompts comes back to each within it


class StateCheckpoints:
    """Names to slots, one slot a name.

    Args:
        slots: of the pool, for checkpoints alone.
        log: told of every checkpoint that comes or goes, by `checkpoint_name`.
        interval: tokens between those that a prompt leaves beside its end and its branch; 0: it leaves no others.
    """

    def __init__(self, slots: Iterable[int] = (), log: BlockLog | None = None, *, interval: int = 0) -> None:
        self._log = log
        self.interval = interval
        self._free = list(slots)
        self._free.reverse()
        self._filling: set[int] = set()
        self._kept: dict[bytes, int] = {}
        self._ends: OrderedDict[bytes, bool] = OrderedDict()  # whether one went on from it; what was used last is last
        self._branches: OrderedDict[bytes, int] = OrderedDict()  # when it was used, in `_num_taken`; likewise
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
        """Slots that a step copies state into."""
        return len(self._filling)

    @property
    def num_in_use(self) -> int:
        """Checkpoints that sequences are about to begin with."""
        return len(self._num_users)

    def use(self, name: bytes) -> None:
        """A sequence is about to begin with a checkpoint that is there; it is not evicted until `leave`."""
        self._place(name, is_branch=name in self._branches or self._ends.pop(name))
        self._num_users[name] += 1

    def leave(self, name: bytes) -> int:
        """The step that copies from it is planned, or will never be; its slot."""
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
        """A slot for a step to copy state into, then `keep`; None: there is no room, see the module."""
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
        """The step is over: the slot has the state of a prefix. False, and the slot is free: the name has one."""
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
        """The block of that name is given up. One that a sequence is about to begin with has its blocks in use."""
        if name in self._forgotten:
            return
        assert name not in self._num_users
        if name in self._kept:
            self._remove(name)
            self._check()

    def give_up(self, slot: int) -> None:
        """What a step copied into a slot is of no use."""
        self._filling.remove(slot)
        self._free.append(slot)
        self._check()

    def forget(self, name: bytes) -> None:
        """No sequence may begin with it any more. One that is about to may still copy from its slot."""
        if self._num_users[name]:
            self._forgotten.add(name)
        else:
            self.drop(name)

    def _least(self) -> bytes | None:
        """What is evicted; None: nothing is."""
        for name, used_at in self._branches.items():
            if self._num_taken - used_at <= BRANCH_ROUNDS * self.num_slots:
                break
            if name not in self._num_users:
                return name
        return next((name for name in self._ends if name not in self._num_users), None)

    def _place(self, name: bytes, *, is_branch: bool) -> None:
        """The one used last, of the branches if there is room for it."""
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
