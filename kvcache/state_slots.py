"""Bookkeeping for the state slots that one worker owns: what a sequence keeps besides its blocks (`kvcache.layout`).

A sequence has one slot, or none if its layout has no state. A slot is in exactly one of three states: free, held or
quarantined. Nothing is zeroed when a slot changes hands: a new sequence reads nothing that it has not written. Only
`kvcache.allocator` calls this, so that a sequence has both its blocks and its slot, or neither.
"""

from collections import deque


class StateSlots:
    """Hands out slots 0 ... num_slots - 1 and takes them back."""

    def __init__(self, num_slots: int) -> None:
        assert num_slots >= 0
        self.num_slots = num_slots
        self._free = deque(range(num_slots))
        self._held: set[int] = set()
        self._quarantined: set[int] = set()

    @property
    def num_free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Number of slots of sequences and incoming transfers."""
        return len(self._held)

    @property
    def num_quarantined(self) -> int:
        """Number of slots that a fenced peer might still write."""
        return len(self._quarantined)

    def take(self) -> int:
        """Take a free slot; there must be one."""
        slot = self._free.popleft()
        self._held.add(slot)
        self._check()
        return slot

    def give_back(self, slot: int) -> None:
        """Free a slot. Freeing it twice is a bug in the caller."""
        self._held.remove(slot)
        self._free.append(slot)
        self._check()

    def quarantine(self, slot: int) -> None:
        """Set a slot apart until it is proved that no process writes it any more."""
        self._held.remove(slot)
        self._quarantined.add(slot)
        self._check()

    def give_back_quarantined(self, slot: int) -> None:
        """Free a quarantined slot; the caller holds the evidence that its writer is done or gone."""
        self._quarantined.remove(slot)
        self._free.append(slot)
        self._check()

    def _check(self) -> None:
        # O(1), so it stays on in production: a leaked slot is lost until restart.
        assert len(self._free) + len(self._held) + len(self._quarantined) == self.num_slots
