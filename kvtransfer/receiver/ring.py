"""A bounded queue of records between one producer and one consumer, and words that say what is complete.

Both live in a plain buffer, positions included, so that they can be put into memory that two processes share. Each
position is written by one side only, as one aligned 64-bit store, after the bytes it announces; that is enough on
processors with total store order and between threads of one interpreter. Nothing here ever waits: a full ring says so.
The consumer believes no position and no length that the producer wrote: a producer may be killed, or be another build.
"""

from baton.core.errors import ProtocolError

_WORD_BYTES = 8
_LENGTH_BYTES = 4
_HEAD_WORD = 0  # bytes ever consumed; written by the consumer
_TAIL_WORD = 8  # bytes ever produced; written by the producer, on a cache line of its own
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
        """Append a record; False, and nothing appended, if there is no room now. Only the producer calls this."""
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
        """Take the oldest record; None if there is none. Only the consumer calls this.

        Raises:
            ProtocolError: what lies there cannot have been pushed; the ring is of no use any more.
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
        """Make it empty. Nobody may be at the other end."""
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
    """One 64-bit word for each incoming transfer slot: the id of the incoming transfer sealed there, 0 for none."""

    def __init__(self, buffer: Buffer) -> None:
        self._words = memoryview(buffer).cast("B").cast("Q")

    @staticmethod
    def num_bytes(num_slots: int) -> int:
        """Size of the buffer."""
        return num_slots * _WORD_BYTES

    def __len__(self) -> int:
        return len(self._words)

    def set(self, slot: int, incoming_id: int) -> None:
        """Only the incoming transfer side writes."""
        self._words[slot] = incoming_id

    def get(self, slot: int) -> int:
        """The engine's side reads; 0 for a slot that is none."""
        return self._words[slot] if slot < len(self._words) else 0

    def reset(self) -> None:
        """Nothing is complete. Nobody may be at the other end."""
        for slot in range(len(self._words)):
            self._words[slot] = 0
