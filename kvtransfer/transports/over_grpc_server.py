"""The listening end: a gRPC server whose streams feed one inbox.

A thread of gRPC's pool reads a stream of frames. A stream of Controls has two: the pool's sends what waits in its
send queue, and one here reads. A peer that connects again under its name takes the place of its connection before,
which this end may believe alive.
"""

import hmac
import logging
import re
import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc

from baton.core.config import KVTransferConfig
from baton.core.errors import PermissionDenied, PortInUse, ProtocolError
from baton.kvtransfer.protocol.proof import connection_pass
from baton.kvtransfer.protocol.transport import TransportCounts
from baton.kvtransfer.transports.over_grpc_inbox import Inbox, StreamReader
from baton.kvtransfer.transports.over_grpc_options import (
    BULK,
    KIND_KEY,
    MAX_NAME_LEN,
    MAX_STREAMS,
    NAME,
    NAME_KEY,
    PASS_KEY,
    SCHEME,
    SERVICE,
    channel_options,
    listener_credentials,
)
from baton.kvtransfer.transports.over_grpc_send_queue import SendQueue
from baton.proto.roles import ALLOWED, require_roles, roles_of

STOP_S = 5.0
_NAME = re.compile(f"[0-9a-zA-Z_.-]{{1,{MAX_NAME_LEN}}}")

log = logging.getLogger(__name__)


class GrpcServer:
    """Serves `KvTransfer.Exchange`.

    Args:
        bind: `grpc://HOST:PORT`, PORT 0 for a free one.
        config: limits, times and keys.
        inbox: where everything that arrives goes.
        counts: of the transport.

    Attributes:
        address: where it listens.

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
        self._streams: dict[tuple[str, bool], _Stream] = {}  # by name, and whether nothing is answered on it
        self._is_closed = False
        credentials = listener_credentials(config)
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
        if not hmac.compare_digest(shown, self._pass):  # before a name is believed, which would end another's stream
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
        stream = _Stream(name, metadata.get(KIND_KEY) == BULK, context, self._inbox, self._config)
        with self._lock:
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

    def _read(self, stream: "_Stream", packets: Iterator[bytes]) -> None:
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

    def _refuse(self, name: str, why: str) -> None:
        with self._lock:
            self._counts.connections_refused += 1
        log.warning("the stream of %s is ended: %s", name, why)


class _Stream:
    """One stream of a peer."""

    def __init__(
        self, name: str, is_bulk: bool, context: grpc.ServicerContext, inbox: Inbox, config: KVTransferConfig
    ) -> None:
        self.name = name
        self.is_bulk = is_bulk
        self.key = name, is_bulk
        self.refused = ""
        self.send_queue = SendQueue(0)
        self.reader = StreamReader(name, inbox, config.max_frame_bytes, takes_frames=True)
        self._context = context

    def stop(self) -> None:
        """End both directions. Any thread, any number of times."""
        self.send_queue.close()
        self.reader.stop()
        if not self.refused:
            self._context.cancel()  # type: ignore[no-untyped-call]
