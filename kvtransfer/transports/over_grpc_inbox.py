"""What arrived on one stream: a thread of the stream reads packets, and hands them to the one thread that decides.

Bounded: the thread reads on only as long as little enough waits, and gRPC's flow control stops the peer beyond that. A
payload in several packets is copied by the stream's thread, once it was decided where to.
"""

import queue
import threading
from collections.abc import Iterable, Sequence

from baton.core.errors import ProtocolError
from baton.kvtransfer.protocol.frame import Bytes, FrameHeader, decode_header
from baton.kvtransfer.protocol.transport import Delivery, MemoryPayload, PayloadDone
from baton.kvtransfer.sender.piece_cursor import PieceCursor
from baton.kvtransfer.transports.over_grpc_packet import Packet, decode_packet

MAX_WAITING = 8  # messages of one stream; so a stream keeps about as many packets in memory


class StreamPayload:
    """A payload in several packets; see `Payload`.

    Args:
        num_bytes: its size.
        inbox: told when it is there, or will never be.

    Attributes:
        num_bytes: its size.
        is_wanted: it is read, and was not discarded.
    """

    def __init__(self, num_bytes: int, inbox: "Inbox") -> None:
        self.num_bytes = num_bytes
        self.is_wanted = False
        self._inbox = inbox
        self._num_left = num_bytes
        self._cursor: PieceCursor | None = None
        self._is_decided = False
        self._is_over = False
        self._changed = threading.Condition()

    def read_into(self, pieces: Sequence[memoryview]) -> bool:
        """The stream's thread does it."""
        cursor = PieceCursor(pieces)
        assert cursor.num_left == self.num_bytes
        with self._changed:
            self.is_wanted = self._is_decided = True
            if self._is_over:
                self._inbox.put(None, PayloadDone(self, ok=False))
            else:
                self._cursor = cursor
                self._changed.notify()
        return False

    def discard(self) -> None:
        """Waits for the copy of one packet at most."""
        with self._changed:
            self._cursor, self.is_wanted, self._is_decided = None, False, True
            self._changed.notify()

    def feed(self, part: memoryview) -> bool:
        """Take the next part; waits until it is decided where to. Whether this was all.

        Raises:
            ProtocolError: it is too long.
        """
        if len(part) > self._num_left:
            raise ProtocolError(f"{len(part)} bytes where a payload lacks {self._num_left}")
        with self._changed:
            while not (self._is_decided or self._is_over):
                self._changed.wait()
            if self._cursor is not None:
                self._cursor.fill(part)
            self._num_left -= len(part)
            if self._num_left:
                return False
            self._is_over = True
            if self.is_wanted:
                self._inbox.put(None, PayloadDone(self, ok=True))
        return True

    def end(self) -> None:
        """Its stream has ended: nothing is written any more."""
        with self._changed:
            if self._is_over:
                return
            self._is_over = True
            self._cursor = None
            self._changed.notify()
            if self.is_wanted:
                self._inbox.put(None, PayloadDone(self, ok=False))


Item = Delivery | PayloadDone


class Inbox:
    """What arrived on all streams of a transport. `put` is called by many threads, `take` by one."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[tuple[StreamReader | None, Item | None]] = queue.SimpleQueue()

    def put(self, reader: "StreamReader | None", item: Item | None) -> None:
        """Append; without an item, `take` only returns."""
        self._items.put((reader, item))

    def take(self, timeout_s: float, limit: int) -> list[Item]:
        """What is there; waits for the first."""
        items: list[Item] = []
        try:
            reader, item = self._items.get(timeout_s > 0, timeout_s if timeout_s > 0 else None)
            while True:
                if reader is not None:
                    reader.release()
                is_unwanted = isinstance(item, PayloadDone) and not _is_wanted(item)
                if item is not None and not is_unwanted:
                    items.append(item)
                if len(items) == limit:
                    return items
                reader, item = self._items.get_nowait()
        except queue.Empty:
            return items


def _is_wanted(done: PayloadDone) -> bool:
    assert isinstance(done.payload, StreamPayload)
    return done.payload.is_wanted


class StreamReader:
    """Reads one stream; `run` in a thread of its own.

    Args:
        peer: whose.
        inbox: where everything goes.
        max_payload_bytes: of a frame.
        takes_frames: False on the side that connects.
    """

    def __init__(self, peer: str, inbox: Inbox, max_payload_bytes: int, *, takes_frames: bool) -> None:
        self._peer = peer
        self._inbox = inbox
        self._max_payload_bytes = max_payload_bytes
        self._takes_frames = takes_frames
        self._room = threading.Semaphore(MAX_WAITING)
        self._payload: StreamPayload | None = None
        self._is_stopped = False

    def run(self, packets: Iterable[bytes]) -> None:
        """Read until the stream ends.

        Raises:
            ProtocolError: the peer breaks the rules; nothing more is to be read from it.
        """
        try:
            for data in packets:
                if self._is_stopped:
                    return
                self._take(decode_packet(data))
        finally:
            if self._payload is not None:
                self._payload.end()

    def stop(self) -> None:
        """Write and deliver nothing any more. Any thread."""
        self._is_stopped = True
        payload = self._payload
        if payload is not None:
            payload.end()
        self._room.release()

    def release(self) -> None:
        """One of its messages was taken."""
        self._room.release()

    def _take(self, packet: Packet) -> None:
        if packet.control is not None:
            self._deliver(Delivery(self._peer, control=packet.control))
        elif not self._takes_frames:
            raise ProtocolError("a frame, where none are taken")
        elif packet.header is not None:
            self._begin(packet.header, decode_header(packet.header), packet.payload)
        elif self._payload is None:
            raise ProtocolError("a payload without a frame")
        else:
            assert packet.payload is not None
            self._go_on(self._payload, packet.payload)

    def _begin(self, head: Bytes, header: FrameHeader, part: memoryview | None) -> None:
        if self._payload is not None:
            raise ProtocolError("a frame inside another")
        size = 0 if header.is_written else header.payload_bytes
        if size > self._max_payload_bytes:
            raise ProtocolError(f"a frame of {size} bytes, {self._max_payload_bytes} are the most")
        if (part is None) != (size == 0) or len(part or ()) > size:
            raise ProtocolError(f"{len(part or ())} bytes of a payload of {size}")
        if part is None or len(part) == size:
            self._deliver(Delivery(self._peer, header=head, payload=None if part is None else MemoryPayload(part)))
            return
        self._payload = StreamPayload(size, self._inbox)
        if self._is_stopped:
            self._payload.end()
        self._deliver(Delivery(self._peer, header=head, payload=self._payload))
        self._go_on(self._payload, part)

    def _go_on(self, payload: StreamPayload, part: memoryview) -> None:
        if not part:
            raise ProtocolError("a part of a payload without bytes")
        if payload.feed(part):
            self._payload = None

    def _deliver(self, delivery: Delivery) -> None:
        self._room.acquire()
        if not self._is_stopped:
            self._inbox.put(self, delivery)
