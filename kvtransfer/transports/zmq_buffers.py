"""Memory for payloads that libzmq sends without a copy of its own: used again once it has left.

New memory for each would cost the kernel's clearing of its pages, which takes as long as the copy into it.
"""

import mmap
from collections import deque
from collections.abc import Sequence

import zmq

MIN_BYTES = 64 << 10  # smaller ones are cheaper to copy than to track
_ROUND_BYTES = 256 << 10


class SendBuffers:
    """Gathers payloads.

    Args:
        max_bytes: that are kept for the next time.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._used: deque[tuple[mmap.mmap, zmq.MessageTracker]] = deque()  # in the order of sending

    def gather(self, payload: Sequence[memoryview]) -> "bytes | zmq.Frame":
        """One flat part that holds a copy of the payload."""
        size = sum(map(len, payload))
        if size < MIN_BYTES:
            return b"".join(payload)
        buffer = self._take(size)
        view = memoryview(buffer)[:size]
        start = 0
        for piece in payload:
            view[start : start + len(piece)] = piece
            start += len(piece)
        frame = zmq.Frame(view, track=True, copy=False)
        assert isinstance(frame.tracker, zmq.MessageTracker)
        if self._num_bytes <= self._max_bytes:
            self._used.append((buffer, frame.tracker))
        else:
            self._num_bytes -= len(buffer)
        return frame

    def _take(self, size: int) -> mmap.mmap:
        if self._used and self._used[0][1].done:
            buffer, _ = self._used.popleft()
            if len(buffer) >= size:
                return buffer
            self._num_bytes -= len(buffer)
        buffer = mmap.mmap(-1, -(-size // _ROUND_BYTES) * _ROUND_BYTES)
        self._num_bytes += len(buffer)
        return buffer
