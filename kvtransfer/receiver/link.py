"""The link between a decode worker's loop and its KV receiver: rings, completion words, counters and a heartbeat.

All of it is in one buffer, which may be private (both sides are threads) or lie in a `SharedRegion`. Each word has one
writer. Only `reset` breaks that rule, and only when the receiver's side is known to be dead.
"""

from collections.abc import Mapping
from typing import Any

from baton.core.errors import ProtocolError

# A bounded queue of records between one producer and one consumer, and words that say which transfers are complete.
#
# Both live in a plain buffer, positions included, so that two processes can share the memory. Each position is written
# by one side only, as one aligned 64-bit store, after the bytes that it announces; that is enough on processors with
# total store order, and between threads of one interpreter. Nothing here ever waits: `push` reports a full ring. The
# consumer trusts no position and no length that the producer wrote: a producer may be killed, or be another build.


_LENGTH_BYTES = 4
_HEAD_WORD = 0  # total bytes consumed; written by the consumer
_TAIL_WORD = 8  # total bytes produced; written by the producer, on its own cache line
HEADER_BYTES = 128

Buffer = bytearray | memoryview


class Ring:
    """Length-prefixed records in a buffer of HEADER_BYTES plus the capacity. A zeroed buffer is an empty ring."""

    def __init__(self, buffer: Buffer) -> None:
        view = memoryview(buffer).cast("B")
        self.capacity_bytes = len(view) - HEADER_BYTES
        assert self.capacity_bytes > _LENGTH_BYTES
        self._words = view[:HEADER_BYTES].cast("Q")
        self._data = view[HEADER_BYTES:]

    def push(self, record: bytes) -> bool:
        """Append a record; return False, without appending, if there is no room now. Only the producer calls this."""
        size = _LENGTH_BYTES + len(record)
        assert size <= self.capacity_bytes, f"a record of {size} bytes never fits a ring of {self.capacity_bytes}"
        tail = self._words[_TAIL_WORD]
        if tail + size - self._words[_HEAD_WORD] > self.capacity_bytes:
            return False
        self._write(tail, len(record).to_bytes(_LENGTH_BYTES, "little"))
        self._write(tail + _LENGTH_BYTES, record)
        self._words[_TAIL_WORD] = tail + size
        return True

    def pop(self) -> bytes | None:
        """Remove and return the oldest record; None if there is none. Only the consumer calls this.

        Raises:
            ProtocolError: what is there cannot have been pushed; the ring is unusable from now on.
        """
        head, tail = self._words[_HEAD_WORD], self._words[_TAIL_WORD]
        if head == tail:
            return None
        length = int.from_bytes(self._read(head, _LENGTH_BYTES), "little")
        end = head + _LENGTH_BYTES + length
        if tail - head > self.capacity_bytes or end > tail:
            raise ProtocolError(
                f"a ring of {self.capacity_bytes} bytes has {length} bytes at {head} and ends at {tail}"
            )
        record = self._read(head + _LENGTH_BYTES, length)
        self._words[_HEAD_WORD] = end
        return record

    def reset(self) -> None:
        """Empty the ring. The other end must not be in use."""
        self._words[_HEAD_WORD] = self._words[_TAIL_WORD] = 0

    def _write(self, position: int, data: bytes) -> None:
        start = position % self.capacity_bytes
        before_wrap = min(len(data), self.capacity_bytes - start)
        self._data[start : start + before_wrap] = data[:before_wrap]
        self._data[: len(data) - before_wrap] = data[before_wrap:]

    def _read(self, position: int, length: int) -> bytes:
        start = position % self.capacity_bytes
        before_wrap = min(length, self.capacity_bytes - start)
        return bytes(self._data[start : start + before_wrap]) + bytes(self._data[: length - before_wrap])


class CompletionWords:
    """One 64-bit word per incoming transfer slot: the id of the transfer that is complete there, 0 for none."""

    def __init__(self, buffer: Buffer) -> None:
        self._words = memoryview(buffer).cast("B").cast("Q")

    @staticmethod
    def num_bytes(num_slots: int) -> int:
        """Return the size of the buffer."""
        return num_slots * _WORD_BYTES

    def __len__(self) -> int:
        return len(self._words)

    def set(self, slot: int, incoming_id: int) -> None:
        """Write a word. Only the KV receiver's side writes."""
        self._words[slot] = incoming_id

    def get(self, slot: int) -> int:
        """Read a word, on the engine's side; 0 for a slot that does not exist."""
        return self._words[slot] if slot < len(self._words) else 0

    def reset(self) -> None:
        """Mark nothing as complete. The other end must not be in use."""
        for slot in range(len(self._words)):
            self._words[slot] = 0


MIN_RING_BYTES = 1 << 20  # four of the largest states (messages.MAX_STATE_BYTES)
RING_BYTES_PER_SLOT = 1024
RING_BYTES_PER_BLOCK = 8  # a grant names each of its blocks with four bytes
MAX_COUNTS = 128
_WORD_BYTES = 8
_COUNTS_AT = 64
_RINGS_AT = _COUNTS_AT + MAX_COUNTS * _WORD_BYTES


class ReceiverLink:
    """Views of one buffer of `num_bytes`; a zeroed buffer is an unused link.

    Args:
        buffer: memory that starts at a multiple of eight bytes.
        num_slots: number of incoming transfers at a time.
        num_blocks: number of blocks in the pool.
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
        """Return the size of the buffer."""
        return _RINGS_AT + 2 * _ring_bytes(num_slots, num_blocks) + CompletionWords.num_bytes(num_slots)

    @property
    def num_beats(self) -> int:
        """Number of turns of the KV receiver so far; if it stands still, the receiver hangs."""
        return self._heartbeat[0]

    def beat(self) -> None:
        """Record that the KV receiver has begun a turn."""
        self._heartbeat[0] += 1

    def set_counts(self, counts: Mapping[Any, int]) -> None:
        """Publish the KV receiver's counters; always the same names in the same order."""
        assert len(counts) <= MAX_COUNTS
        for index, count in enumerate(counts.values()):
            self._counts[index] = count

    def counts(self, names: tuple[str, ...]) -> dict[str, int]:
        """Return the counters that were published last."""
        return {name: self._counts[index] for index, name in enumerate(names)}

    def reset(self) -> None:
        """Reset the link to its initial state. The KV receiver must be dead, and all its records read."""
        self.commands.reset()
        self.events.reset()
        self.words.reset()
        self._heartbeat[0] = 0
        self.set_counts(dict.fromkeys(range(MAX_COUNTS), 0))


def _ring_bytes(num_slots: int, num_blocks: int) -> int:
    sizes = (MIN_RING_BYTES, num_slots * RING_BYTES_PER_SLOT, num_blocks * RING_BYTES_PER_BLOCK)
    return HEADER_BYTES + -(-max(sizes) // _WORD_BYTES) * _WORD_BYTES
