"""Words in host memory by which kernels report that they are done: a sequence number each, followed by digests.

One side of a page claims a slot for each launch, and reads it. A device writes it once, the digests first and the
number last. So any process that maps the memory, with CUDA or without, sees that a launch has ended. A slot is released
only when its launch is over: a late word must never be taken for another launch's.
"""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from baton.kvtransfer.receiver.link import Buffer

WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class Flag:
    """A claimed slot, and the number that will be written there."""

    slot: int
    sequence: int


class FlagPage:
    """Views of one buffer. Any thread may claim, read and release slots.

    Args:
        buffer: memory that starts at a multiple of 64 bytes; its words are cleared.
        slot_words: words per slot, a multiple of eight: one for the number, the others for digests.
    """

    def __init__(self, buffer: Buffer, slot_words: int) -> None:
        assert slot_words > 0
        assert slot_words % 8 == 0
        self._words = memoryview(buffer).cast("B").cast("Q")
        self._slot_words = slot_words
        self.num_slots = len(self._words) // slot_words
        for slot in range(self.num_slots):
            self._words[slot * slot_words] = 0
        self._free = deque(range(self.num_slots))
        self._sequence = 0
        self._lock = threading.Lock()

    @staticmethod
    def num_bytes(num_slots: int, slot_words: int) -> int:
        """Return the size of the buffer."""
        return num_slots * slot_words * WORD_BYTES

    @property
    def max_digests(self) -> int:
        """Maximum number of digests that one launch may report."""
        return self._slot_words - 1

    @property
    def num_claimed(self) -> int:
        """Number of slots in use."""
        return self.num_slots - len(self._free)

    def claim(self, count: int = 1) -> list[Flag] | None:
        """Claim slots for future launches; None if not enough are free."""
        with self._lock:
            if len(self._free) < count:
                return None
            flags = []
            for _ in range(count):
                self._sequence += 1
                flag = Flag(self._free.popleft(), self._sequence)
                self._words[flag.slot * self._slot_words] = 0
                flags.append(flag)
            return flags

    def release(self, flag: Flag) -> None:
        """Release a slot whose launch is over, or was never made."""
        with self._lock:
            self._free.append(flag.slot)

    def offset_bytes(self, slot: int) -> int:
        """Return the offset of a slot in the buffer."""
        return slot * self._slot_words * WORD_BYTES

    def is_up(self, flag: Flag) -> bool:
        """Return whether the slot's launch has ended, and all that it wrote is there."""
        return self._words[flag.slot * self._slot_words] == flag.sequence

    def digests(self, flag: Flag, count: int) -> list[int]:
        """Return the digests that the launch reported; only valid once its flag is up."""
        start = flag.slot * self._slot_words + 1
        return self._words[start : start + count].tolist()

    @staticmethod
    def raise_flag(buffer: Buffer, slot_words: int, slot: int, sequence: int, digests: Sequence[int]) -> None:
        """Raise a flag from the CPU, as a kernel does, in a page that another `FlagPage` owns."""
        words = memoryview(buffer).cast("B").cast("Q")
        start = slot * slot_words
        for index, digest in enumerate(digests):
            words[start + 1 + index] = digest
        words[start] = sequence
