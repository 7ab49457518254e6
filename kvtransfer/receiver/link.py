"""What joins a decode worker's loop to its KV receiver: rings, completion words, counts, a heartbeat: one buffer.

The buffer may be private (both sides are threads) or lie in a `SharedRegion`. Each word has one writer. Only `reset`
breaks that rule, and only when the incoming transfer's side is known to be dead.
"""

from collections.abc import Mapping
from typing import Any

from baton.kvtransfer.receiver.ring import HEADER_BYTES, Buffer, CompletionWords, Ring

MIN_RING_BYTES = 1 << 20  # four of the largest states (messages.MAX_STATE_BYTES)
RING_BYTES_PER_SLOT = 1024
RING_BYTES_PER_BLOCK = 8  # a grant names each of its blocks with four
MAX_COUNTS = 128
_WORD_BYTES = 8
_COUNTS_AT = 64
_RINGS_AT = _COUNTS_AT + MAX_COUNTS * _WORD_BYTES


class ReceiverLink:
    """Views of one buffer of `num_bytes`; a zeroed one is a link on which nothing was said yet.

    Args:
        buffer: starts at a multiple of eight bytes.
        num_slots: incoming transfers at a time.
        num_blocks: of the pool.
    """

    def __init__(self, buffer: Buffer, num_slots: int, num_blocks: int) -> None:
        view = memoryview(buffer).cast("B")
        assert len(view) >= self.num_bytes(num_slots, num_blocks)
        ring_bytes = _ring_bytes(num_slots, num_blocks)
        self._heartbeat = view[:_WORD_BYTES].cast("Q")
        self._counts = view[_COUNTS_AT:_RINGS_AT].cast("Q")
        self.commands = Ring(view[_RINGS_AT : _RINGS_AT + ring_bytes])
        self.events = Ring(view[_RINGS_AT + ring_bytes : _RINGS_AT + 2 * ring_bytes])
        words_at = _RINGS_AT + 2 * ring_bytes
        self.words = CompletionWords(view[words_at : words_at + CompletionWords.num_bytes(num_slots)])

    @staticmethod
    def num_bytes(num_slots: int, num_blocks: int) -> int:
        """Size of the buffer."""
        return _RINGS_AT + 2 * _ring_bytes(num_slots, num_blocks) + CompletionWords.num_bytes(num_slots)

    @property
    def num_beats(self) -> int:
        """Turns of the incoming transfer so far: it hangs if this stands still."""
        return self._heartbeat[0]

    def beat(self) -> None:
        """The incoming transfer has begun a turn."""
        self._heartbeat[0] += 1

    def set_counts(self, counts: Mapping[Any, int]) -> None:
        """The incoming transfer publishes its counts; always the same names in the same order."""
        assert len(counts) <= MAX_COUNTS
        for index, count in enumerate(counts.values()):
            self._counts[index] = count

    def counts(self, names: tuple[str, ...]) -> dict[str, int]:
        """What was published last."""
        return {name: self._counts[index] for index, name in enumerate(names)}

    def reset(self) -> None:
        """As new. The incoming transfer is dead, and everything it said was read."""
        self.commands.reset()
        self.events.reset()
        self.words.reset()
        self._heartbeat[0] = 0
        self.set_counts(dict.fromkeys(range(MAX_COUNTS), 0))


def _ring_bytes(num_slots: int, num_blocks: int) -> int:
    sizes = (MIN_RING_BYTES, num_slots * RING_BYTES_PER_SLOT, num_blocks * RING_BYTES_PER_BLOCK)
    return HEADER_BYTES + -(-max(sizes) // _WORD_BYTES) * _WORD_BYTES
