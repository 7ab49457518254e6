"""The hand-off over ZMQ and TCP: the decode worker has a ROUTER, the prefill worker a DEALER per peer.

Queues are bounded and nothing waits: a message to a full queue or a dead peer is lost and counted, and the protocol
repairs or reports it. Payloads take the raw data path where both sides have it (`raw`), and otherwise go inline: as one
flat part, because libzmq handles few large parts two to three times faster than many small ones.
"""

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence

import zmq

from baton.core.config import KVTransferConfig
from baton.core.errors import PortInUse
from baton.core.kv_transports import INLINE, RAW, data_path_order, is_one_sided
from baton.kvtransfer.protocol.preface import LISTENER_ID_BYTES, ConnectingPreface
from baton.kvtransfer.protocol.proof import NUMBER_BYTES, KvProofs
from baton.kvtransfer.protocol.transport import Delivery, PayloadDone, TransportCounts, deliveries_of
from baton.kvtransfer.transports.endless_messages import EndlessMessages
from baton.kvtransfer.transports.raw import parse_place
from baton.kvtransfer.transports.raw_receiver import RawReceiver
from baton.kvtransfer.transports.raw_sender import RawSender
from baton.kvtransfer.transports.zmq_sockets import SendBuffers, ZmqSockets
from baton.proto import kv_pb2

MAX_BATCH = 64  # maximum messages per `receive`, so that ticks and commands get their turn
MAX_BATCH_BYTES = 16 << 20
MAX_HEADERS = 32  # headers of written frames in one message
_LOST = (zmq.EAGAIN, zmq.EHOSTUNREACH)  # the queue is full, or the peer is gone
_AROUND_BYTES = 64 << 10  # a message's second part, heartbeats, and the overhead of encryption
_MAX_WARNED = 1024
_MAX_KNOWN = 4096

log = logging.getLogger(__name__)

Arrived = list[Delivery | PayloadDone]


class ZmqTransport:
    """A `Transport` over ZMQ.

    Args:
        bind: `tcp://HOST:PORT` to listen on, PORT 0 for a free one; None for the side that connects.
        config: limits and times; the defaults if None.

    Raises:
        PortInUse: the address cannot be bound.
        ConfigInvalid: the CURVE keys cannot be used.
    """

    def __init__(self, bind: str | None = None, config: KVTransferConfig | None = None) -> None:
        self._config = config or KVTransferConfig()
        self.counts = TransportCounts()
        self.address = ""
        self._sockets = ZmqSockets(self._config)
        self._poller = self._sockets.poller
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        self._names: dict[zmq.Socket[bytes], str] = {}
        self._senders: dict[str, RawSender] = {}
        self._buffers = SendBuffers(self._config.window_bytes)
        self._written: dict[str, list[bytes]] = {}  # headers that wait to be batched, by peer
        # On the listening side: the connection that has a routing id, by routing id, least recently heard first. A
        # peer's name combines both, so that a connection that takes over a routing id, which is in clear, is another
        # peer and has proved nothing.
        self._known: dict[str, int] = {}
        self._warned: set[str] = set()
        self._secret = secrets.token_hex(8)
        self._proofs = KvProofs(bytes.fromhex(self._config.key))
        self._router: zmq.Socket[bytes] | None = None
        self._receiver: RawReceiver | None = None
        self._endless: EndlessMessages | None = None
        self._is_unbound = False  # while keys change; the port may not be free before a later try
        if bind is not None:
            self._listen(bind)

    def send(self, peer: str, message: bytes) -> None:
        """Post without waiting; the connecting side connects to a new peer."""
        self._post_written(peer)  # a COMMIT comes after the frames that it is about
        self._post(peer, [message])

    def send_frame(self, peer: str, header: bytes, payload: Sequence[memoryview], data_path: str) -> None:
        """Send over the raw data path if it is requested and open; else send a copy of the payload inline.

        Headers of written frames are batched, and sent with the next `receive`: a message costs more than a header.
        """
        if is_one_sided(data_path):
            headers = self._written.setdefault(peer, [])
            headers.append(header)
            if len(headers) == MAX_HEADERS:
                self._post_written(peer)
            return
        if data_path == RAW and payload:
            sender = self._senders.get(peer)
            if sender is not None and sender.send(header, payload):
                return
            self.counts.frames_fallen_back += 1
        self._post(peer, [header, self._buffers.gather(payload)])

    def unpin(self, peer: str, match: Callable[[bytes], bool]) -> None:
        """See `Transport.unpin`; only the raw data path reads payloads late."""
        if peer in self._senders:
            self._senders[peer].unpin(match)

    def num_pinned(self, peer: str) -> int:
        """Return the number of frames in the raw data path's queue."""
        return self._senders[peer].num_pinned if peer in self._senders else 0

    def offers(self) -> list[kv_pb2.DataPathOffer]:
        """Return the raw data path's offer, unless everything must be encrypted."""
        return [] if self._receiver is None else [self._receiver.offer]

    def open_data_path(self, peer: str, offer: kv_pb2.DataPathOffer) -> str:
        """Begin to connect; payloads go inline until the other side has answered."""
        if offer.data_path != RAW:
            return f"the zmq transport has no data path {offer.data_path!r}"
        if self._sockets.is_encrypted:
            return "the raw data path is not encrypted, and curve_key_file asks for encryption"
        if len(offer.raw.listener_id) != LISTENER_ID_BYTES:
            return "the offer of the raw data path is not of this version: it has no listener_id"
        if self._router is not None or peer not in self._dealers:
            return "there is no connection to that peer"
        try:
            place = parse_place(offer.raw.address, peer)
        except ValueError as error:
            return f"the offer of the raw data path: {error}"
        if peer in self._senders:
            self._senders.pop(peer).close()
        name = self._routing_id(peer)
        listener_id = offer.raw.listener_id

        def new_preface() -> ConnectingPreface:
            return ConnectingPreface(self._proofs, listener_id, name, secrets.token_bytes(NUMBER_BYTES))

        self._senders[peer] = RawSender(place, new_preface, self._config, self._poller, self.counts)
        return ""

    def data_path_of(self, peer: str) -> str:
        """Return raw once the other side has answered, else inline."""
        return RAW if peer in self._senders and self._senders[peer].is_open else INLINE

    def problem(self, peer: str) -> str:
        """Connect, on the connecting side; return why not, or empty. An address is untrusted: a bad one is no bug."""
        if self._router is not None or peer in self._dealers:
            return ""
        if not peer.startswith("tcp://"):
            found = f"{peer[:100]!r} is no tcp:// address"
        else:
            try:
                self._connect(peer)
                return ""
            except zmq.ZMQError as error:
                found = f"cannot connect to {peer[:100]!r}: {error.strerror}"
        if found not in self._warned and len(self._warned) < _MAX_WARNED:
            self._warned.add(found)
            log.warning("%s", found)
        return found

    def receive(self, timeout_s: float) -> Arrived:
        """Receive at most MAX_BATCH messages, or about MAX_BATCH_BYTES, of each connection."""
        for peer in tuple(self._written):
            self._post_written(peer)
        if self._sockets.keys_changed() or self._is_unbound:
            self._follow_keys()
        arrived: Arrived = []
        for data_path in self._senders.values():
            data_path.tick()
        if self._receiver is not None:
            self._receiver.tick()
            arrived += self._receiver.take_failed()
        is_empty = True
        for source, events in self._poller.poll(0 if arrived else max(0, int(timeout_s * 1e3))):
            if self._sockets.attend(source):
                continue
            if isinstance(source, int):
                arrived += self._raw_ready(source, events)
            elif self._endless is not None and source is self._endless.monitor:
                self._endless.attend()
            else:
                is_empty &= self._take_all(source, arrived)
        if self._endless is not None:
            self.counts.connections_refused += self._endless.look(time.monotonic(), is_empty=is_empty)
        self.counts.connections_refused += self._sockets.take_num_refused()
        return arrived

    def wake(self) -> None:
        """Wake the receiving thread. Any thread may call this; at most one wake is pending."""
        self._sockets.wake()

    def welcome(self, peer: str) -> None:
        """Do nothing: connections that prove nothing keep no peer out."""

    def drop(self, peer: str) -> None:
        """Close the connections to a peer; on the listening side, those of its raw data path."""
        self._written.pop(peer, None)
        if peer in self._senders:
            self._senders.pop(peer).close()
        if self._receiver is not None:
            self._receiver.drop(peer)
        if self._router is not None and self._current(_routing_id_of(peer)) == peer:
            del self._known[_routing_id_of(peer)]
        socket = self._dealers.pop(peer, None)
        if socket is not None:
            self._poller.unregister(socket)
            del self._names[socket]
            socket.close(linger=0)

    def close(self) -> None:
        """Close every socket; nothing lingers."""
        for sender in self._senders.values():
            sender.close()
        self._senders = {}
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        self._sockets.close()

    def _listen(self, bind: str) -> None:
        self._router = self._sockets.network_socket(zmq.ROUTER, is_server=True)
        self._router.set(zmq.ROUTER_MANDATORY, 1)
        # A peer that reconnects under its name takes over from a connection that only this end believes to be alive.
        self._router.set(zmq.ROUTER_HANDOVER, 1)
        self._endless = EndlessMessages(self._router, self._sockets.max_message_bytes + _AROUND_BYTES)
        self._poller.register(self._endless.monitor, zmq.POLLIN)
        try:
            self._router.bind(bind)
        except zmq.ZMQError as error:
            self.close()
            raise PortInUse(f"cannot listen on {bind}: {error.strerror}", address=bind) from error
        endpoint = self._router.get(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self.address = endpoint.rstrip(b"\0").decode()
        self._poller.register(self._router, zmq.POLLIN)
        if RAW not in data_path_order(self._config.transport):
            return
        if self._sockets.is_encrypted:
            log.info("no raw data path: it is not encrypted, and curve_key_file asks for encryption")
        else:
            host = self.address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
            self._receiver = RawReceiver(host, self._config, self._poller, self.counts, self._proofs, self._current)

    def _follow_keys(self) -> None:
        """Reconnect every connection with the new keys; messages in transit are lost, and requested again."""
        for peer, dealer in self._dealers.items():
            self._sockets.rearm(dealer, is_server=False)
            dealer.disconnect(peer)
            dealer.connect(peer)
        if self._router is None:
            return
        if not self._is_unbound:
            self._router.unbind(self.address)
            self._is_unbound = True
        self._sockets.rearm(self._router, is_server=True)
        try:
            self._router.bind(self.address)
        except zmq.ZMQError as error:
            log.debug("%s is not free again yet: %s", self.address, error)
            return
        self._is_unbound = False
        log.info("the CURVE key has changed: connections are made again with the new one")

    def _connect(self, peer: str) -> None:
        socket = self._sockets.network_socket(zmq.DEALER, is_server=False)
        try:
            socket.set(zmq.ROUTING_ID, self._routing_id(peer))
            socket.set(zmq.RECONNECT_IVL_MAX, 1000)
            socket.connect(peer)
        except zmq.ZMQError:
            socket.close(linger=0)
            raise
        self._dealers[peer] = socket
        self._names[socket] = peer
        self._poller.register(socket, zmq.POLLIN)

    def _routing_id(self, peer: str) -> bytes:
        """Return a name per peer that stays the same while this process lives: a new connection replaces the old."""
        return hashlib.sha256(f"{self._secret} {peer}".encode()).hexdigest()[:16].encode()

    def _post_written(self, peer: str) -> None:
        headers = self._written.pop(peer, None)
        if headers:
            self._post(peer, [b"".join(headers), b""])

    def _post(self, peer: str, parts: "Sequence[bytes | zmq.Frame]") -> None:
        if self._router is None and self.problem(peer):
            self.counts.messages_lost += 1
            return
        try:
            if self._router is not None:
                routing_id = _routing_id_of(peer)
                if self._current(routing_id) != peer:
                    self.counts.messages_lost += 1
                    return
                self._router.send_multipart([routing_id.encode("latin-1"), *parts], zmq.DONTWAIT)
            else:
                self._dealers[peer].send_multipart(parts, zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno not in _LOST:
                raise
            self.counts.messages_lost += 1

    def _raw_ready(self, file: int, events: int) -> Arrived:
        if self._receiver is not None:
            return self._receiver.ready(file)
        for sender in self._senders.values():
            sender.ready(file, events)
        return []

    def _take_all(self, socket: "zmq.Socket[bytes]", arrived: Arrived) -> bool:
        """Receive messages of one socket; return whether it has no more."""
        messages: list[list[zmq.Frame]] = []
        num_bytes, is_empty = 0, False
        while len(messages) < MAX_BATCH and num_bytes <= MAX_BATCH_BYTES:  # so that no socket keeps the others waiting
            try:
                messages.append(socket.recv_multipart(zmq.DONTWAIT, copy=False))
            except zmq.Again:
                is_empty = True
                break
            num_bytes += len(messages[-1][-1])
        if messages and self._endless is not None:
            self._endless.attend()  # else a new connection could be mistaken for a former one
        for parts in messages:
            buffers = [part.buffer for part in parts]
            if socket is self._router:
                peer = self._know(bytes(buffers.pop(0)).decode("latin-1"), parts[-1])
            else:
                peer = self._names[socket]
            deliveries = deliveries_of(peer, buffers)
            self.counts.messages_refused += not deliveries
            arrived += deliveries
        return is_empty

    def _know(self, routing_id: str, part: zmq.Frame) -> str:
        """Return the name of the peer that a message came from."""
        assert self._endless is not None
        number, before = self._endless.took(part), self._current(routing_id)
        self._known.pop(routing_id, None)
        self._known[routing_id] = number
        if len(self._known) > _MAX_KNOWN:
            del self._known[next(iter(self._known))]
        name = f"{routing_id}.{number}"
        if self._receiver is not None and before not in ("", name):
            self._receiver.drop(before)  # its payloads have no owner any more
        return name

    def _current(self, routing_id: str) -> str:
        """Return the name of the peer that has a routing id; empty if none is known."""
        return f"{routing_id}.{self._known[routing_id]}" if routing_id in self._known else ""


def _routing_id_of(peer: str) -> str:
    return peer.rpartition(".")[0]
