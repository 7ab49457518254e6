"""The hand-off over ZMQ and TCP: a ROUTER where landings are, a DEALER for each peer where pushes start.

Queues are bounded and nothing waits: a message for a full queue or a dead peer is lost and counted, which the protocol
repairs or reports. One message is one or two parts; a frame's payload is one flat part, because libzmq handles few
large parts two to three times faster than many small ones.
"""

import errno
import secrets
import threading
from collections.abc import Sequence

import zmq

from baton.core.errors import PortInUse
from baton.kvtransfer.frame import Bytes
from baton.kvtransfer.transport import Delivery

HIGH_WATER_MESSAGES = 4096  # above what a window allows (frame.FRAME_OVERHEAD_BYTES), so that credits are the limit
MAX_BATCH = 64  # messages a `receive` returns at most, so that ticks and commands get their turn
MAX_BATCH_BYTES = 16 << 20
_COPY_BELOW_BYTES = 64 << 10
# A full queue; a peer that is gone; addresses that are none. A peer's name is data, so it cannot be a bug here.
_LOST = (zmq.EAGAIN, zmq.EHOSTUNREACH, zmq.EINVAL, zmq.EPROTONOSUPPORT, errno.ENODEV)


class ZmqTransport:
    """See `Transport`.

    Args:
        bind: `tcp://HOST:PORT` to listen on, PORT 0 for a free one; None for the side that connects.

    Raises:
        PortInUse: the address cannot be bound.
    """

    def __init__(self, bind: str | None = None) -> None:
        self.num_lost = 0
        self.address = ""
        self._context = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, 4096)
        self._poller = zmq.Poller()
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        self._names: dict[zmq.Socket[bytes], str] = {}
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

    def send(self, peer: str, parts: Sequence[Bytes]) -> None:
        """Post without waiting; a peer never heard of is connected to, on the side that connects."""
        copy = len(parts[-1]) < _COPY_BELOW_BYTES
        try:
            if self._router is not None:
                self._router.send_multipart([peer.encode("latin-1"), *parts], zmq.DONTWAIT, copy=copy)
            else:
                self._dealer(peer).send_multipart(parts, zmq.DONTWAIT, copy=copy)
        except zmq.ZMQError as error:
            if error.errno not in _LOST:
                raise
            self.num_lost += 1

    def receive(self, timeout_s: float) -> list[Delivery]:
        """Up to MAX_BATCH messages, or about MAX_BATCH_BYTES."""
        deliveries: list[Delivery] = []
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
                num_bytes += len(delivery.parts[-1])
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

    def _listen(self, bind: str) -> None:
        self._router = self._socket(zmq.ROUTER)
        self._router.set(zmq.ROUTER_MANDATORY, 1)
        try:
            self._router.bind(bind)
        except zmq.ZMQError as error:
            self.close()
            raise PortInUse(f"cannot listen on {bind}: {error.strerror}", address=bind) from error
        endpoint = self._router.get(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self.address = endpoint.rstrip(b"\0").decode()
        self._poller.register(self._router, zmq.POLLIN)

    def _dealer(self, peer: str) -> "zmq.Socket[bytes]":
        socket = self._dealers.get(peer)
        if socket is None:
            socket = self._socket(zmq.DEALER)
            socket.set(zmq.ROUTING_ID, secrets.token_hex(8).encode())
            socket.set(zmq.RECONNECT_IVL_MAX, 1000)
            try:
                socket.connect(peer)
            except zmq.ZMQError:
                socket.close(linger=0)
                raise
            self._dealers[peer] = socket
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
            return Delivery(bytes(buffers[0]).decode("latin-1"), buffers[1:])
        return Delivery(self._names[socket], buffers)
