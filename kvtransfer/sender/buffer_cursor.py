"""A position in a list of memory pieces that are sent, or filled, one after the other."""

from collections.abc import Iterable

from baton.kvtransfer.protocol.frame import Bytes

MAX_BUFFERS = 1024  # IOV_MAX on Linux, the most buffers that a system call takes


class BufferCursor:
    """The rest of `pieces`. Their memory is accessed only through what `buffers` returns, and by `fill` and `keep`.

    Attributes:
        num_left: number of bytes left.
        is_kept: whether the rest is a copy.
    """

    __slots__ = ("_index", "_pieces", "is_kept", "num_left")

    def __init__(self, pieces: Iterable[Bytes]) -> None:
        self._pieces: list[Bytes] = [piece for piece in pieces if len(piece)]
        self._index = 0
        self.is_kept = False
        self.num_left = sum(map(len, self._pieces))

    def buffers(self, limit: int = MAX_BUFFERS) -> list[Bytes]:
        """Return the next pieces, for one system call."""
        return self._pieces[self._index : self._index + limit]

    def advance(self, num_bytes: int) -> None:
        """Move forward by `num_bytes`."""
        assert 0 <= num_bytes <= self.num_left
        self.num_left -= num_bytes
        while num_bytes:
            piece = self._pieces[self._index]
            if num_bytes < len(piece):
                self._pieces[self._index] = memoryview(piece)[num_bytes:]
                return
            num_bytes -= len(piece)
            self._index += 1

    def fill(self, data: memoryview) -> int:
        """Copy as much of `data` into the pieces as fits, and move past it; return the number of bytes copied."""
        taken = 0
        for piece in self._pieces[self._index :]:
            part = data[taken : taken + len(piece)]
            memoryview(piece)[: len(part)] = part
            taken += len(part)
            if taken == len(data):
                break
        self.advance(taken)
        return taken

    def keep(self) -> None:
        """Copy the rest, so that the pieces' memory is not accessed any more."""
        if not self.is_kept:
            self._pieces = [b"".join(self._pieces[self._index :])]
            self._index = 0
            self.is_kept = True
