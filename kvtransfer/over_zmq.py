"""The hand-off over ZMQ and TCP: a ROUTER where landings are, a DEALER for each peer where pushes start.

Queues are bounded and nothing waits: a message for a full queue or a dead peer is lost and counted, which the protocol
repairs or reports. One message is one or two parts; a frame's payload is one flat part, because libzmq handles few
large parts two to three times faster than many small ones.
"""

import hashlib
import logging
import secrets
import threading
from collections.abc import Callable, Sequence

import zmq

from baton.core.config import KVTransferConfig
from baton.core.errors import PortInUse
from baton.kvtransfer.frame import Bytes
from baton.kvtransfer.transport import Delivery, PayloadDone, TransportCounts, delivery_of
from baton.proto import kv_pb2

HIGH_WATER_MESSAGES = 4096  # above what a window allows (frame.FRAME_OVERHEAD_BYTES), so that credits are the limit
MAX_BATCH = 64  # messages a `receive` returns at most, so that ticks and commands get their turn
MAX_BATCH_BYTES = 16 << 20
_COPY_BELOW_BYTES = 64 << 10
_MIN_MESSAGE_BYTES = 1 << 20  # control messages must fit even where frames are small
_HEADROOM_BYTES = 64 << 10
_MIN_HEARTBEAT_TIMEOUT_S = 1.0
_MAX_WARNED = 1024
_LOST = (zmq.EAGAIN, zmq.EHOSTUNREACH)  # a full queue, a peer that is gone

log = logging.getLogger(__name__)


class ZmqTransport:
    """See `Transport`.

    Args:
        bind: `tcp://HOST:PORT` to listen on, PORT 0 for a free one; None for the side that connects.
        config: limits and times; the defaults if not given.

    Raises:
        PortInUse: the address cannot be bound.
    """

    def __init__(self, bind: str | None = None, config: KVTransferConfig | None = None) -> None:
        self._config = config or KVTransferConfig()
        self.counts = TransportCounts()
        self.address = ""
        self._context = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, 4096)
        self._poller = zmq.Poller()
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        self._names: dict[zmq.Socket[bytes], str] = {}
        self._warned: set[str] = set()  # about peers that could not be connected to
        self._token = secrets.token_hex(8)
        self._router: zmq.Socket[bytes] | None = None
        self._wake_lock = threading.Lock()
        name = f"inproc://wake-{secrets.token_hex(8)}"
        self._waker = self._socket(zmq.PAIR)
        self._waker.bind(name)
        self._poller.register(self._waker, zmq.POLLIN)
        self._wake_sender = self._socket(zmq.PAIR)
        self._wake_sender.connect(name)
        self._is_woken = False
        if bind is not None:
            self._listen(bind)

    def send(self, peer: str, message: bytes) -> None:
        """Post without waiting; a peer never heard of is connected to, on the side that connects."""
        self._post(peer, [message])

    def send_frame(self, peer: str, header: bytes, payload: Sequence[memoryview], lane: str) -> None:
        """The payload goes along as one flat part."""
        self._post(peer, [header, payload[0] if len(payload) == 1 else b"".join(payload)])

    def unpin(self, peer: str, match: Callable[[bytes], bool]) -> None:
        """Posted memory is libzmq's until it has left."""

    def offers(self) -> list[kv_pb2.LaneOffer]:
        """None: payloads are in the messages."""
        return []

    def open_lane(self, peer: str, offer: kv_pb2.LaneOffer) -> str:
        """There is none."""
        return f"no lane {offer.lane}"

    def num_pinned(self, peer: str) -> int:
        """Posted memory is libzmq's."""
        return 0

    def lane_of(self, peer: str) -> str:
        """The only one."""
        return "inline"

    def _post(self, peer: str, parts: Sequence[Bytes]) -> None:
        copy = len(parts[-1]) < _COPY_BELOW_BYTES
        if self._router is None and self.problem(peer):
            self.counts.messages_lost += 1
            return
        try:
            if self._router is not None:
                self._router.send_multipart([peer.encode("latin-1"), *parts], zmq.DONTWAIT, copy=copy)
            else:
                self._dealers[peer].send_multipart(parts, zmq.DONTWAIT, copy=copy)
        except zmq.ZMQError as error:
            if error.errno not in _LOST:
                raise
            self.counts.messages_lost += 1

    def problem(self, peer: str) -> str:
        """Connects, on the side that does: an address is data, so nothing about it can be a bug here."""
        if self._router is not None or peer in self._dealers:
            return ""
        if not peer.startswith("tcp://"):
            found = f"{peer[:100]!r} is no tcp:// address"
        else:
            try:
                self._dealers[peer] = self._connect(peer)
                return ""
            except zmq.ZMQError as error:
                found = f"cannot connect to {peer[:100]!r}: {error.strerror}"
        if found not in self._warned and len(self._warned) < _MAX_WARNED:
            self._warned.add(found)
            log.warning("%s", found)
        return found

    def receive(self, timeout_s: float) -> list[Delivery | PayloadDone]:
        """Up to MAX_BATCH messages, or about MAX_BATCH_BYTES."""
        deliveries: list[Delivery | PayloadDone] = []
        num_bytes = 0
        for socket, _ in self._poller.poll(max(0, int(timeout_s * 1e3))):
            if socket is self._waker:
                with self._wake_lock:
                    self._is_woken = False
                    self._waker.recv(zmq.DONTWAIT)
                continue
            while (
                len(deliveries) < MAX_BATCH
                and num_bytes < MAX_BATCH_BYTES
                and (delivery := self._take(socket)) is not None
            ):
                deliveries.append(delivery)
                num_bytes += 0 if delivery.payload is None else delivery.payload.num_bytes
        return deliveries

    def wake(self) -> None:
        """Any thread; at most one wake is pending."""
        with self._wake_lock:
            if not self._is_woken and not self._wake_sender.closed:
                self._is_woken = True
                self._wake_sender.send(b"", zmq.DONTWAIT)

    def drop(self, peer: str) -> None:
        """Close the connection to a peer; on the listening side there is none to close."""
        socket = self._dealers.pop(peer, None)
        if socket is not None:
            self._poller.unregister(socket)
            del self._names[socket]
            socket.close(linger=0)

    def close(self) -> None:
        """Close every socket; nothing lingers."""
        with self._wake_lock:
            self._context.destroy(linger=0)

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDHWM, HIGH_WATER_MESSAGES)
        socket.set(zmq.RCVHWM, HIGH_WATER_MESSAGES)
        return socket

    def _network_socket(self, kind: int) -> "zmq.Socket[bytes]":
        """A socket that takes no message beyond the limit, and notices a connection that is dead at one end only."""
        socket = self._socket(kind)
        socket.set(zmq.MAXMSGSIZE, max(self._config.max_frame_bytes, _MIN_MESSAGE_BYTES) + _HEADROOM_BYTES)
        timeout_ms = int(max(self._config.lease_s, _MIN_HEARTBEAT_TIMEOUT_S) * 1e3)
        socket.set(zmq.HEARTBEAT_IVL, timeout_ms // 2)
        socket.set(zmq.HEARTBEAT_TIMEOUT, timeout_ms)
        socket.set(zmq.HEARTBEAT_TTL, timeout_ms)
        return socket

    def _listen(self, bind: str) -> None:
        self._router = self._network_socket(zmq.ROUTER)
        self._router.set(zmq.ROUTER_MANDATORY, 1)
        # A peer that comes again by its name takes over from a connection that only this end believes alive.
        self._router.set(zmq.ROUTER_HANDOVER, 1)
        try:
            self._router.bind(bind)
        except zmq.ZMQError as error:
            self.close()
            raise PortInUse(f"cannot listen on {bind}: {error.strerror}", address=bind) from error
        endpoint = self._router.get(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self.address = endpoint.rstrip(b"\0").decode()
        self._poller.register(self._router, zmq.POLLIN)

    def _connect(self, peer: str) -> "zmq.Socket[bytes]":
        socket = self._network_socket(zmq.DEALER)
        try:
            # One name for each peer as long as this process lives, so that a new connection replaces the old one there.
            socket.set(zmq.ROUTING_ID, hashlib.sha256(f"{self._token} {peer}".encode()).hexdigest()[:16].encode())
            socket.set(zmq.RECONNECT_IVL_MAX, 1000)
            socket.connect(peer)
        except zmq.ZMQError:
            socket.close(linger=0)
            raise
        self._names[socket] = peer
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def _take(self, socket: "zmq.Socket[bytes]") -> Delivery | None:
        try:
            parts = socket.recv_multipart(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return None
        buffers = [part.buffer for part in parts]
        if socket is self._router:
            return delivery_of(bytes(buffers[0]).decode("latin-1"), buffers[1:]) or Delivery("")
        return delivery_of(self._names[socket], buffers) or Delivery("")
