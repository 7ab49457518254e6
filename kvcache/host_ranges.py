"""Allocates host blocks for the KV of preempted sequences: contiguous runs, first fit.

A run crosses between host and device in one copy per layer, so a sequence's blocks are contiguous. Like
`kvcache.allocator` this module deals in indices; the memory is in `engine.kv_offload`. One thread uses it.
"""

import bisect
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class HostRange:
    """Host blocks `first` ... `first + length - 1`."""

    first: int
    length: int


class HostRanges:
    """Allocates ranges of `num_blocks` host blocks; never any if that is 0."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 0
        self.num_blocks = num_blocks
        self._free = [HostRange(0, num_blocks)] if num_blocks else []  # in order, no two adjacent
        self._num_free = num_blocks

    @property
    def num_used(self) -> int:
        """Number of allocated host blocks."""
        return self.num_blocks - self._num_free

    def take(self, length: int) -> HostRange | None:
        """Allocate the first run of `length` free blocks; None if there is none."""
        assert length > 0
        for place, free in enumerate(self._free):
            if free.length >= length:
                rest = HostRange(free.first + length, free.length - length)
                self._free[place : place + 1] = [rest] if rest.length else []
                self._num_free -= length
                return HostRange(free.first, length)
        return None

    def give_back(self, taken: HostRange) -> None:
        """Free a range whose content is no longer needed. Freeing a range twice is a bug in the caller."""
        place = bisect.bisect(self._free, taken)
        before = self._free[place - 1] if place else None
        after = self._free[place] if place < len(self._free) else None
        assert before is None or before.first + before.length <= taken.first
        assert after is None or taken.first + taken.length <= after.first
        self._num_free += taken.length
        first, end, start, stop = taken.first, taken.first + taken.length, place, place
        if before is not None and before.first + before.length == first:
            first, start = before.first, place - 1
        if after is not None and after.first == end:
            end, stop = after.first + after.length, place + 1
        self._free[start:stop] = [HostRange(first, end - first)]
