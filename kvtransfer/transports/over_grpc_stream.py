"""One gRPC stream of frames: its packets and options, what is sent next, and what has arrived."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import grpc

from baton.core.config import KVTransferConfig
from baton.core.errors import ConfigInvalid, ProtocolError
from baton.core.tls_files import TlsFiles, TlsWatch
from baton.kvtransfer.protocol.frame import HEADER_BYTES, Bytes, FrameHeader, decode_header
from baton.kvtransfer.protocol.transport import Delivery, MemoryPayload, PayloadDone
from baton.kvtransfer.sender.buffer_cursor import BufferCursor
from baton.proto.secure_channel import SecureChannels, server_credentials

PART_BYTES = 1 << 20  # part of a payload in one packet; measured as the fastest
_CONTROL, _HEADER, _PAYLOAD = (number << 3 | 2 for number in (1, 2, 3))  # tags of length-delimited fields
_MAX_VARINT_BYTES = 5


@dataclass(frozen=True, slots=True)
class Packet:
    """The content of one packet."""

    control: Bytes | None = None
    header: Bytes | None = None
    payload: memoryview | None = None


def encode_control_packet(message: bytes) -> bytes:
    """Encode a packet with a Control."""
    return _prefix(_CONTROL, len(message)) + message


def encode_frame_packet(header: bytes | None, part: Sequence[Bytes]) -> bytes:
    """Encode a packet with the next part of a payload, gathered; the first one of a frame also has its header."""
    size = sum(map(len, part))
    head = b"" if header is None else _prefix(_HEADER, len(header)) + header
    return b"".join((head, _prefix(_PAYLOAD, size), *part) if size else (head,))


def decode_packet(data: bytes) -> Packet:
    """Decode a packet; its payload is not copied.

    Raises:
        ProtocolError: it is none of the three kinds.
    """
    view = memoryview(data)
    found: dict[int, memoryview] = {}
    start = 0
    while start < len(view):
        tag = view[start]
        size, start = _varint(view, start + 1)
        is_in_order = all(tag > before for before in found)
        if tag not in (_CONTROL, _HEADER, _PAYLOAD) or not is_in_order or size > len(view) - start:
            raise ProtocolError("not a packet, or one with fields that do not go together")
        found[tag] = view[start : start + size]
        start += size
    control, header, payload = (found.get(tag) for tag in (_CONTROL, _HEADER, _PAYLOAD))
    if not found or (control is not None and len(found) > 1):
        raise ProtocolError("a packet holds a Control or a part of a frame")
    if header is not None and len(header) != HEADER_BYTES:
        raise ProtocolError(f"a frame header of {len(header)} bytes in a packet")
    return Packet(control, None if header is None else bytes(header), payload)


def _prefix(tag: int, size: int) -> bytes:
    prefix = bytearray([tag])
    while size >= 128:
        prefix.append(size & 127 | 128)
        size >>= 7
    prefix.append(size)
    return bytes(prefix)


def _varint(view: memoryview, start: int) -> tuple[int, int]:
    """Return the number at `start`, and where it ends."""
    value = 0
    for index, byte in enumerate(view[start : start + _MAX_VARINT_BYTES]):
        value |= (byte & 127) << 7 * index
        if byte < 128:
            return value, start + index + 1
    raise ProtocolError("a packet ends in a number")


MAX_WAITING = 8  # messages of one stream, and so about the number of packets that a stream keeps in memory


class StreamPayload:
    """A payload in several packets; see `Payload`.

    Args:
        num_bytes: size of the payload.
        inbox: told when the payload is complete, or will never be.

    Attributes:
        num_bytes: size of the payload.
        is_wanted: whether it is read and was not discarded.
    """

    def __init__(self, num_bytes: int, inbox: "Inbox") -> None:
        self.num_bytes = num_bytes
        self.is_wanted = False
        self._inbox = inbox
        self._num_left = num_bytes
        self._cursor: BufferCursor | None = None
        self._is_decided = False
        self._is_over = False
        self._changed = threading.Condition()

    def read_into(self, pieces: Sequence[memoryview]) -> bool:
        """Set the target; the stream's thread does the reading."""
        cursor = BufferCursor(pieces)
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
        """Drop the payload; waits for the copy of one packet at most."""
        with self._changed:
            self._cursor, self.is_wanted, self._is_decided = None, False, True
            self._changed.notify()

    def feed(self, part: memoryview) -> bool:
        """Take the next part, after waiting for the decision where to write it; return whether it was the last.

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
        """Note that the stream has ended: nothing is written any more."""
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
    """What arrived on all streams of a transport. Many threads call `put`, one calls `take`."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[tuple[StreamReader | None, Item | None]] = queue.SimpleQueue()

    def put(self, reader: "StreamReader | None", item: Item | None) -> None:
        """Append an item; without one, `take` only returns."""
        self._items.put((reader, item))

    def take(self, timeout_s: float, limit: int) -> list[Item]:
        """Return what is there; wait for the first item."""
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
    """Reads one stream; `run` runs on its own thread.

    Args:
        peer: the peer that sends.
        inbox: receives everything that arrives.
        max_payload_bytes: maximum payload of a frame.
        takes_frames: whether frames are accepted; False on the connecting side.
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
            ProtocolError: the peer breaks the rules; nothing more should be read from it.
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
        """Write and deliver nothing any more. Any thread may call this."""
        self._is_stopped = True
        payload = self._payload
        if payload is not None:
            payload.end()
        self._room.release()

    def release(self) -> None:
        """Note that one of its messages was taken."""
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


SERVICE, NAME = "baton.v1.KvTransfer", "Exchange"
METHOD = f"/{SERVICE}/{NAME}"
SCHEME = "grpc://"
NAME_KEY = "baton-peer"  # metadata: the name of the connection's owner
PASS_KEY = "baton-pass"  # metadata: `proof.connection_pass`
KIND_KEY, BULK = "baton-stream", "bulk"  # metadata of a stream on which nothing is sent back
MAX_NAME_LEN = 64
MAX_STREAMS = 256  # two for each peer
MAX_QUEUED = 4096  # maximum number of messages that wait to be sent to a peer
MAX_MESSAGE_BYTES = PART_BYTES + (64 << 10)  # large enough for controls, too (messages.MAX_STATE_BYTES)
LOOKAHEAD_BYTES = 4 << 20  # bytes that a stream may send before the receiver asks for them

Options = list[tuple[str, int | str]]


def channel_options(config: KVTransferConfig) -> Options:
    """Return the options for either end: bounded messages, no compression, and pings that detect a dead connection."""
    lease_ms = max(1000, int(config.lease_s * 1e3))
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.http2.max_frame_size", PART_BYTES),  # fewer and larger pieces to join
        ("grpc.http2.write_buffer_size", PART_BYTES),
        ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
        ("grpc.keepalive_time_ms", lease_ms),
        ("grpc.keepalive_timeout_ms", lease_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", lease_ms // 2),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def client_channels(config: KVTransferConfig) -> SecureChannels:
    """Make the opener of channels, encrypted if certificates are configured; later channels use the current files.

    Raises:
        ConfigInvalid: the files do not match, or cannot be read.
    """
    files = tls_files(config)
    if files.is_on and not files.ca_file:
        raise ConfigInvalid("tls_cert_file without tls_ca_file: peers' certificates could not be checked")
    return SecureChannels(files)


def listener_credentials(config: KVTransferConfig) -> grpc.ServerCredentials | None:
    """Return credentials that follow changes of the files; None without encryption.

    With a CA, clients must present a certificate that it signed.

    Raises:
        ConfigInvalid: the files do not match, or cannot be read.
    """
    files = tls_files(config)
    return server_credentials(TlsWatch(files)) if files.is_on else None


def tls_files(config: KVTransferConfig) -> TlsFiles:
    """Return the TLS files of the hand-off."""
    return TlsFiles(
        cert_file=config.tls_cert_file,
        key_file=config.tls_key_file,
        ca_file=config.tls_ca_file,
        server_name=config.tls_server_name,
    )


class _Frame:
    __slots__ = ("cursor", "header", "is_begun")

    def __init__(self, header: bytes, payload: Sequence[memoryview]) -> None:
        self.header = header
        self.cursor = BufferCursor(payload)
        self.is_begun = False


class GrpcSendQueue:
    """A queue whose iteration yields packets, and waits for more until `close`.

    Args:
        max_bytes: maximum payload bytes in the queue.
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
        """Number of frames whose memory may still be read."""
        with self._changed:
            return sum(not frame.cursor.is_kept for frame in self._frames)

    def put(self, message: bytes) -> bool:
        """Append a Control; False if there is no room, or the stream is closed."""
        with self._changed:
            if self._is_closed or len(self._controls) >= MAX_QUEUED:
                return False
            self._controls.append(message)
            self._changed.notify()
        return True

    def put_frame(self, header: bytes, payload: Sequence[memoryview]) -> bool:
        """Append a frame; False if there is no room, or the stream is closed."""
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
        """Drop matching frames that were not begun, and copy one that was; return how many were dropped."""
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
        """End the iteration; no payload is read any more. Return how many frames were dropped."""
        with self._changed:
            num_dropped = len(self._frames)
            self._frames.clear()
            self._controls.clear()
            self._num_bytes = 0
            self._is_closed = True
            self._changed.notify_all()
        return num_dropped

    def __iter__(self) -> Iterator[bytes]:
        """Yield packets."""
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


def _part(cursor: BufferCursor) -> tuple[list[Bytes], int]:
    """Return the pieces of the next part of a payload, and its size."""
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
