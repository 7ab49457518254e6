"""The hand-off over gRPC, for networks that pass only HTTP/2 or require TLS: two `KvTransfer.Exchange` calls per peer.

Payloads go inline, in packets of about 1 MiB (`over_grpc_stream`). A stream that breaks loses what was in transit; it
is reopened, and the protocol asks for what is missing.
"""

import hmac
import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import grpc

from baton.core.config import KVTransferConfig
from baton.core.errors import PermissionDenied, PortInUse, ProtocolError
from baton.kvtransfer.protocol.proof import connection_pass
from baton.kvtransfer.protocol.transport import Delivery, PayloadDone, TransportCounts
from baton.kvtransfer.transports.over_grpc_stream import (
    BULK,
    KIND_KEY,
    MAX_NAME_LEN,
    MAX_STREAMS,
    METHOD,
    NAME,
    NAME_KEY,
    PASS_KEY,
    SCHEME,
    SERVICE,
    GrpcSendQueue,
    Inbox,
    StreamReader,
    channel_options,
    client_channels,
    listener_credentials,
)
from baton.proto import kv_pb2
from baton.proto.roles import ALLOWED, require_roles, roles_of
from baton.proto.secure_channel import SecureChannels

MIN_RETRY_S, MAX_RETRY_S = 0.05, 1.0
MAX_CHANNELS = 2  # the other stream may still use the previous channel

log = logging.getLogger(__name__)


class GrpcClient:
    """The connection to one peer.

    Args:
        peer: address of the peer.
        name: name of this side, on all connections to the peer.
        config: limits and times.
        channels: opens channels; after the certificates have changed, streams are reopened on a new one.
        inbox: receives everything that arrives.
        counts: counters of the transport.
    """

    def __init__(
        self,
        peer: str,
        name: str,
        config: KVTransferConfig,
        channels: SecureChannels,
        inbox: Inbox,
        counts: TransportCounts,
    ) -> None:
        self._counts = counts
        options = channel_options(config)
        options += [
            ("grpc.max_reconnect_backoff_ms", int(MAX_RETRY_S * 1e3)),
            ("grpc.initial_reconnect_backoff_ms", 100),
        ]
        self._secure = channels
        self._target = peer.removeprefix(SCHEME)
        self._options = options
        self._version = channels.version
        self._channels = [channels.open(self._target, options)]
        shown = ((PASS_KEY, connection_pass(bytes.fromhex(config.key))), (NAME_KEY, name))

        def open_control() -> _Stream:
            reader = StreamReader(peer, inbox, 0, takes_frames=False)
            return _Stream(self._newest(), shown, GrpcSendQueue(0), reader)

        def open_bulk() -> _Stream:
            return _Stream(self._newest(), (*shown, (KIND_KEY, BULK)), GrpcSendQueue(2 * config.window_bytes), None)

        self._control = _Link(peer, open_control, counts)
        self._bulk = _Link(peer, open_bulk, counts)

    @property
    def num_pinned(self) -> int:
        """Number of frames whose memory may still be read."""
        return self._bulk.send_queue.num_pinned

    def send(self, message: bytes) -> None:
        """Post a Control."""
        self._counts.messages_lost += not self._control.send_queue.put(message)

    def send_frame(self, header: bytes, payload: Sequence[memoryview]) -> None:
        """Post a frame; beyond twice the window it is dropped."""
        self._counts.frames_dropped += not self._bulk.send_queue.put_frame(header, payload)

    def unpin(self, match: Callable[[bytes], bool]) -> None:
        """See `Transport.unpin`."""
        self._counts.frames_dropped += self._bulk.send_queue.unpin(match)

    def tick(self) -> None:
        """Reopen broken streams."""
        self._control.tick()
        self._bulk.tick()

    def close(self) -> None:
        """End both streams; no payload is read any more."""
        self._control.close()
        self._bulk.close()
        for channel in self._channels:
            channel.close()

    def _newest(self) -> grpc.Channel:
        version = self._secure.version
        if version != self._version:
            self._version = version
            self._channels.append(self._secure.open(self._target, self._options))
            for channel in self._channels[:-MAX_CHANNELS]:
                channel.close()
            del self._channels[:-MAX_CHANNELS]
        return self._channels[-1]


class _Link:
    """A stream that is reopened when it has ended."""

    def __init__(self, peer: str, make: Callable[[], "_Stream"], counts: TransportCounts) -> None:
        self._peer = peer
        self._make = make
        self._counts = counts
        self._retry_s = MIN_RETRY_S
        self._retry_at_s = 0.0
        self._warned_of = ""
        self._stream = make()

    @property
    def send_queue(self) -> GrpcSendQueue:
        """Send queue of the current stream; closed if the stream has ended."""
        return self._stream.send_queue

    def tick(self) -> None:
        """Record that the stream has ended, or open the next one."""
        now_s = time.monotonic()
        if not self._stream.has_ended:
            if now_s > self._retry_at_s + MAX_RETRY_S:
                self._retry_s = MIN_RETRY_S
        elif not self._stream.is_buried:
            self._stream.is_buried = True
            self._counts.frames_dropped += self.send_queue.close()
            self._counts.data_paths_failed += 1
            self._retry_at_s = now_s + self._retry_s
            self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)
            if self._stream.why != self._warned_of:
                self._warned_of = self._stream.why
                log.warning("the stream to %s ended: %s", self._peer, self._warned_of)
        elif now_s >= self._retry_at_s:
            self._stream = self._make()

    def close(self) -> None:
        """End the stream."""
        self._counts.frames_dropped += self.send_queue.close()
        self._stream.cancel()


class _Stream:
    """One stream, from its start to its end.

    Attributes:
        send_queue: what waits to be sent.
        has_ended: whether the stream is over.
        is_buried: whether its end was recorded.
        why: why it ended.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        metadata: tuple[tuple[str, str], ...],
        send_queue: GrpcSendQueue,
        reader: StreamReader | None,
    ) -> None:
        self.send_queue = send_queue
        self.has_ended = False
        self.is_buried = False
        self.why = ""
        self._reader = reader
        exchange = channel.stream_stream(METHOD, None, None)  # bytes as they are
        self._call = exchange(iter(send_queue), metadata=metadata)
        if reader is None:
            assert isinstance(self._call, grpc.Future)
            self._call.add_done_callback(self._ended)
        else:
            threading.Thread(target=self._read, args=(reader,), name="kv-grpc-read", daemon=True).start()

    def cancel(self) -> None:
        """End the stream."""
        if self._reader is not None:
            self._reader.stop()
        self._call.cancel()  # type: ignore[no-untyped-call]

    def _ended(self, _: object) -> None:
        self.why = f"{self._call.code().name}: {self._call.details()}"
        self.has_ended = True

    def _read(self, reader: StreamReader) -> None:
        try:
            reader.run(self._call)
            self.why = "the peer ended it"
        except grpc.RpcError as error:
            self.why = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else str(error)
        except ProtocolError as error:
            self.why = error.message
            self._call.cancel()  # type: ignore[no-untyped-call]
        finally:
            self.has_ended = True


STOP_S = 5.0
LOOK_S = 0.1  # between checks for streams that proved nothing
_NAME = re.compile(f"[0-9a-zA-Z_.-]{{1,{MAX_NAME_LEN}}}")


class GrpcServer:
    """Serves `KvTransfer.Exchange`.

    Args:
        bind: `grpc://HOST:PORT`, PORT 0 for a free one.
        config: limits, times and keys.
        inbox: receives everything that arrives.
        counts: counters of the transport.

    Attributes:
        address: address where it listens.

    Raises:
        PortInUse: the address cannot be bound.
        ConfigInvalid: the certificates cannot be used.
    """

    def __init__(self, bind: str, config: KVTransferConfig, inbox: Inbox, counts: TransportCounts) -> None:
        self._config = config
        self._pass = connection_pass(bytes.fromhex(config.key)).encode()
        self._inbox = inbox
        self._counts = counts
        self._lock = threading.Lock()
        self._streams: dict[tuple[str, bool], _ServedStream] = {}  # by peer, and whether it is a bulk stream
        self._peers: dict[tuple[str, str], _ServedPeer] = {}  # by the presented name, and the connection
        self._num_peers = 0
        self._look_s = 0.0
        self._is_closed = False
        credentials = listener_credentials(config)
        self._is_encrypted = credentials is not None
        options = [*channel_options(config), ("grpc.so_reuseport", 0)]
        self._pool = futures.ThreadPoolExecutor(MAX_STREAMS, "kv-grpc-send")
        self._server = grpc.server(self._pool, options=options, maximum_concurrent_rpcs=MAX_STREAMS)
        handler = grpc.stream_stream_rpc_method_handler(self._exchange)  # without serializers: bytes as they are
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {NAME: handler}),))
        target = bind.removeprefix(SCHEME)
        try:
            port = (
                self._server.add_insecure_port(target)
                if credentials is None
                else self._server.add_secure_port(target, credentials)
            )
        except RuntimeError as error:
            self._server.stop(None)
            raise PortInUse(f"cannot listen on {bind}", address=bind) from error
        self.address = f"{SCHEME}{target.rpartition(':')[0]}:{port}"
        self._server.start()

    def send(self, peer: str, message: bytes) -> None:
        """Post a Control; it is lost if the peer is not connected."""
        with self._lock:
            stream = self._streams.get((peer, False))
        self._counts.messages_lost += stream is None or not stream.send_queue.put(message)

    def welcome(self, peer: str) -> None:
        """Keep the streams of a peer."""
        with self._lock:
            for served in self._peers.values():
                served.is_welcome |= served.name == peer

    def tick(self) -> None:
        """End streams whose peer has proved nothing within a lease, because the number of streams is limited."""
        now_s = time.monotonic()
        if now_s < self._look_s:
            return
        self._look_s = now_s + LOOK_S
        limit_s = max(1.0, self._config.lease_s)
        with self._lock:
            late = [stream for stream in self._streams.values() if stream.is_late(now_s - limit_s)]
            for stream in late:  # so that one which takes long to end is refused, and counted, once
                del self._streams[stream.key]
        for stream in late:
            self._refuse(stream.name, "its peer has proved nothing")
            stream.stop()

    def drop(self, peer: str) -> None:
        """End a peer's streams."""
        with self._lock:
            streams = [self._streams.pop((peer, is_bulk), None) for is_bulk in (False, True)]
        for stream in streams:
            if stream is not None:
                stream.stop()

    def close(self) -> None:
        """End every stream; nothing is written any more."""
        with self._lock:
            self._is_closed = True
            streams = list(self._streams.values())
            self._streams.clear()
        for stream in streams:
            stream.stop()
        self._server.stop(None).wait(STOP_S)
        self._pool.shutdown(wait=False)

    def _exchange(self, packets: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        metadata: dict[str, Any] = dict(context.invocation_metadata())
        shown = str(metadata.get(PASS_KEY, "")).encode()
        if not hmac.compare_digest(shown, self._pass):  # before a name that could end another's stream is trusted
            self._refuse(context.peer(), "it does not know the deployment's secret")
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the stream does not show that it is of this deployment")
        name = str(metadata.get(NAME_KEY, ""))
        if not _NAME.fullmatch(name):
            self._refuse(context.peer(), "a stream without a name")
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"no {NAME_KEY} in the metadata")
        try:
            require_roles(roles_of(context), ALLOWED[SERVICE], SERVICE)
        except PermissionDenied as error:
            self._refuse(context.peer(), error.message)
            context.abort(grpc.StatusCode.PERMISSION_DENIED, error.message)
        with self._lock:
            peer = self._peer(name, context)
            stream = _ServedStream(peer, metadata.get(KIND_KEY) == BULK, context, self._inbox, self._config)
            before = self._streams.pop(stream.key, None)
            if not self._is_closed:
                self._streams[stream.key] = stream
        if before is not None:
            before.stop()
        if not context.add_callback(stream.stop) or self._is_closed:
            stream.stop()
        if stream.is_bulk:
            self._read(stream, packets)
        else:
            threading.Thread(target=self._read, args=(stream, packets), name="kv-grpc-read", daemon=True).start()
            yield from stream.send_queue
        if stream.refused:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, stream.refused)

    def _peer(self, name: str, context: grpc.ServicerContext) -> "_ServedPeer":
        """Return the peer that a new stream belongs to. Call it with the lock held.

        Without encryption, an eavesdropper can present a name that it has read. So there a peer is all streams that
        present one name over one connection: another connection replaces none of them, and has proved nothing.
        """
        key = name, "" if self._is_encrypted else context.peer()
        if key not in self._peers:
            self._num_peers += 1
            self._peers[key] = _ServedPeer(key, f"{name}.{self._num_peers}")
        self._peers[key].num_streams += 1
        return self._peers[key]

    def _read(self, stream: "_ServedStream", packets: Iterator[bytes]) -> None:
        try:
            stream.reader.run(packets)
        except ProtocolError as error:
            stream.refused = error.message
            self._refuse(stream.name, error.message)
        except grpc.RpcError as error:
            log.debug("the stream of %s ended: %s", stream.name, error)
        finally:
            stream.stop()
            with self._lock:
                if self._streams.get(stream.key) is stream:
                    del self._streams[stream.key]
                stream.peer.num_streams -= 1
                if not stream.peer.num_streams:
                    del self._peers[stream.peer.key]

    def _refuse(self, name: str, why: str) -> None:
        with self._lock:
            self._counts.connections_refused += 1
        log.warning("the stream of %s is ended: %s", name, why)


@dataclass(slots=True)
class _ServedPeer:
    """A peer, as long as it has streams.

    Attributes:
        key: its key in the table of peers.
        name: name that no other peer has, before or after.
        is_welcome: whether it has proved its identity.
    """

    key: tuple[str, str]
    name: str
    num_streams: int = 0
    is_welcome: bool = False


class _ServedStream:
    """One stream of a peer."""

    def __init__(
        self, peer: _ServedPeer, is_bulk: bool, context: grpc.ServicerContext, inbox: Inbox, config: KVTransferConfig
    ) -> None:
        self.peer = peer
        self.name = name = peer.name
        self.is_bulk = is_bulk
        self.key = name, is_bulk
        self._since_s = time.monotonic()
        self.refused = ""
        self.send_queue = GrpcSendQueue(0)
        self.reader = StreamReader(name, inbox, config.max_frame_bytes, takes_frames=True)
        self._context = context

    def is_late(self, since_s: float) -> bool:
        """Return whether the stream existed at that time and its peer has proved nothing yet."""
        return not self.peer.is_welcome and self._since_s < since_s

    def stop(self) -> None:
        """End both directions. Any thread may call this, any number of times."""
        self.send_queue.close()
        self.reader.stop()
        if not self.refused:
            self._context.cancel()  # type: ignore[no-untyped-call]


MAX_BATCH = 64  # maximum length of a `receive`'s result, so that ticks and commands get their turn
_ADDRESS = re.compile(SCHEME + r"[^\s/]{1,255}:\d{1,5}")


class GrpcTransport:
    """A `Transport` over gRPC.

    Args:
        bind: `grpc://HOST:PORT` to listen on, PORT 0 for a free one; None for the side that connects.
        config: limits and times; the defaults if None.

    Raises:
        PortInUse: the address cannot be bound.
        ConfigInvalid: the certificates cannot be used.
    """

    def __init__(self, bind: str | None = None, config: KVTransferConfig | None = None) -> None:
        self._config = config or KVTransferConfig()
        self.counts = TransportCounts()
        self.address = ""
        self._name = secrets.token_hex(16)
        self._inbox = Inbox()
        self._clients: dict[str, GrpcClient] = {}
        self._server: GrpcServer | None = None
        self._channels = SecureChannels()
        if bind is None:
            self._channels = client_channels(self._config)
        else:
            self._server = GrpcServer(bind, self._config, self._inbox, self.counts)
            self.address = self._server.address

    def send(self, peer: str, message: bytes) -> None:
        """Post without waiting; the connecting side connects to a new peer."""
        if self._server is not None:
            self._server.send(peer, message)
        elif self.problem(peer):
            self.counts.messages_lost += 1
        else:
            self._clients[peer].send(message)

    def send_frame(self, peer: str, header: bytes, payload: Sequence[memoryview], data_path: str) -> None:
        """Post a frame; only the connecting side sends frames."""
        assert self._server is None
        if self.problem(peer):
            self.counts.frames_dropped += 1
        else:
            self._clients[peer].send_frame(header, payload)

    def unpin(self, peer: str, match: Callable[[bytes], bool]) -> None:
        """See `Transport.unpin`; payloads are gathered when gRPC asks for the next packet."""
        if peer in self._clients:
            self._clients[peer].unpin(match)

    def num_pinned(self, peer: str) -> int:
        """Return the number of frames that wait, or were sent in part."""
        return self._clients[peer].num_pinned if peer in self._clients else 0

    def offers(self) -> list[kv_pb2.DataPathOffer]:
        """Return no offers: where only HTTP/2 passes, payloads go inline."""
        return []

    def open_data_path(self, peer: str, offer: kv_pb2.DataPathOffer) -> str:
        """Refuse: there is no data path."""
        return f"the grpc transport has no data path {offer.data_path!r}"

    def data_path_of(self, peer: str) -> str:
        """Return the only data path."""
        return "inline"

    def problem(self, peer: str) -> str:
        """Connect to the peer, on the connecting side; return why that is not possible, or empty."""
        if self._server is not None or peer in self._clients:
            return ""
        if not _ADDRESS.fullmatch(peer):
            return f"{peer[:100]!r} is no {SCHEME} address"
        self._clients[peer] = GrpcClient(peer, self._name, self._config, self._channels, self._inbox, self.counts)
        return ""

    def receive(self, timeout_s: float) -> list[Delivery | PayloadDone]:
        """Return up to MAX_BATCH messages."""
        if self._server is not None:
            self._server.tick()
        for client in self._clients.values():
            client.tick()
        arrived = self._inbox.take(timeout_s, MAX_BATCH)
        self.counts.payloads_cut += sum(isinstance(item, PayloadDone) and not item.ok for item in arrived)
        return arrived

    def wake(self) -> None:
        """Wake the receiving thread. Any thread may call this."""
        self._inbox.put(None, None)

    def welcome(self, peer: str) -> None:
        """See `Transport.welcome`."""
        if self._server is not None:
            self._server.welcome(peer)

    def drop(self, peer: str) -> None:
        """End the peer's streams."""
        if self._server is not None:
            self._server.drop(peer)
        elif peer in self._clients:
            self._clients.pop(peer).close()

    def close(self) -> None:
        """End every stream."""
        for client in self._clients.values():
            client.close()
        self._clients = {}
        if self._server is not None:
            self._server.close()
