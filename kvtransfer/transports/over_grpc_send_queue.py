"""What waits to be sent on one stream: gRPC's own thread takes it packet by packet, and gathers payloads as it does.

Bounded in messages and in bytes. Controls go before payloads. Memory of a frame is read under the lock only, so that
after `unpin` none is.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from baton.kvtransfer.protocol.frame import Bytes
from baton.kvtransfer.sender.piece_cursor import PieceCursor
from baton.kvtransfer.transports.over_grpc_options import MAX_QUEUED
from baton.kvtransfer.transports.over_grpc_packet import PART_BYTES, encode_control_packet, encode_frame_packet


class _Frame:
    __slots__ = ("cursor", "header", "is_begun")

    def __init__(self, header: bytes, payload: Sequence[memoryview]) -> None:
        self.header = header
        self.cursor = PieceCursor(payload)
        self.is_begun = False


class SendQueue:
    """Iterate over it to get packets; the iteration waits for more until `close`.

    Args:
        max_bytes: of payloads.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._controls: deque[bytes] = deque()
        self._frames: deque[_Frame] = deque()
        self._num_bytes = 0
        self._is_closed = False
        self._changed = threading.Condition()

    @property
    def num_pinned(self) -> int:
        """Frames whose memory may still be read."""
        with self._changed:
            return sum(not frame.cursor.is_kept for frame in self._frames)

    def put(self, message: bytes) -> bool:
        """Append a Control; False if there is no room, or nobody takes it any more."""
        with self._changed:
            if self._is_closed or len(self._controls) >= MAX_QUEUED:
                return False
            self._controls.append(message)
            self._changed.notify()
        return True

    def put_frame(self, header: bytes, payload: Sequence[memoryview]) -> bool:
        """Append a frame; False if there is no room, or nobody takes it any more."""
        frame = _Frame(header, payload)
        with self._changed:
            num_bytes = self._num_bytes + frame.cursor.num_left
            if self._is_closed or len(self._frames) >= MAX_QUEUED or num_bytes > self._max_bytes:
                return False
            self._num_bytes = num_bytes
            self._frames.append(frame)
            self._changed.notify()
        return True

    def unpin(self, match: Callable[[bytes], bool]) -> int:
        """Drop matching frames that were not begun, copy the one that was; how many were dropped."""
        with self._changed:
            kept: deque[_Frame] = deque()
            for frame in self._frames:
                if not match(frame.header):
                    kept.append(frame)
                elif frame.is_begun:
                    frame.cursor.keep()
                    kept.append(frame)
            num_dropped = len(self._frames) - len(kept)
            self._frames = kept
            self._num_bytes = sum(frame.cursor.num_left for frame in kept)
        return num_dropped

    def close(self) -> int:
        """End the iteration; no payload is read any more. How many frames were dropped."""
        with self._changed:
            num_dropped = len(self._frames)
            self._frames.clear()
            self._controls.clear()
            self._num_bytes = 0
            self._is_closed = True
            self._changed.notify_all()
        return num_dropped

    def __iter__(self) -> Iterator[bytes]:
        """Packets."""
        while (packet := self._next()) is not None:
            yield packet

    def _next(self) -> bytes | None:
        with self._changed:
            while not (self._controls or self._frames or self._is_closed):
                self._changed.wait()
            if self._is_closed:
                return None
            if self._controls:
                return encode_control_packet(self._controls.popleft())
            frame = self._frames[0]
            header = None if frame.is_begun else frame.header
            frame.is_begun = True
            part, size = _part(frame.cursor)
            packet = encode_frame_packet(header, part)
            frame.cursor.advance(size)
            self._num_bytes -= size
            if not frame.cursor.num_left:
                self._frames.popleft()
            return packet


def _part(cursor: PieceCursor) -> tuple[list[Bytes], int]:
    """The pieces of the next part of a payload, and its size."""
    pieces: list[Bytes] = []
    size = 0
    for piece in cursor.buffers(PART_BYTES):
        if size + len(piece) > PART_BYTES:
            piece = memoryview(piece)[: PART_BYTES - size]
        pieces.append(piece)
        size += len(piece)
        if size == PART_BYTES:
            break
    return pieces, size
