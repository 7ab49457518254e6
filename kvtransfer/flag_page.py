"""Words in host memory by which kernels say that they are done: a sequence number each, and digests behind it.

One side of a page claims a slot for each launch, and looks; a device writes, once, the digests first and the number
last. So any process that maps the memory, CUDA or not, sees that a launch has ended. A slot is given back only when its
launch is over: a word that comes late must never be taken for another launch's.
"""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from baton.kvtransfer.receiver.link import Buffer

WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class Flag:
    """A slot that was claimed, and the number that will stand there."""

    slot: int
    sequence: int


class FlagPage:
    """Views of one buffer. Any thread may claim, ask and release.

    Args:
        buffer: starts at a multiple of 64 bytes; its words are cleared.
        slot_words: of a slot, a multiple of eight: one for the number, the others for digests.
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
        """Size of the buffer."""
        return num_slots * slot_words * WORD_BYTES

    @property
    def max_digests(self) -> int:
        """That one launch may report."""
        return self._slot_words - 1

    @property
    def num_claimed(self) -> int:
        """Slots that a launch has."""
        return self.num_slots - len(self._free)

    def claim(self, count: int = 1) -> list[Flag] | None:
        """Slots for launches that will be made; None if there are not so many."""
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
        """Its launch is over, or was never made."""
        with self._lock:
            self._free.append(flag.slot)

    def offset_bytes(self, slot: int) -> int:
        """Where in the buffer a slot begins."""
        return slot * self._slot_words * WORD_BYTES

    def is_up(self, flag: Flag) -> bool:
        """Whether its launch has ended, and all that it wrote is there."""
        return self._words[flag.slot * self._slot_words] == flag.sequence

    def digests(self, flag: Flag, count: int) -> list[int]:
        """What the launch reported; only once its flag is up."""
        start = flag.slot * self._slot_words + 1
        return self._words[start : start + count].tolist()

    @staticmethod
    def raise_flag(buffer: Buffer, slot_words: int, slot: int, sequence: int, digests: Sequence[int]) -> None:
        """Say so from the CPU, as a kernel does, in a page that another `FlagPage` owns."""
        words = memoryview(buffer).cast("B").cast("Q")
        start = slot * slot_words
        for index, digest in enumerate(digests):
            words[start + 1 + index] = digest
        words[start] = sequence
