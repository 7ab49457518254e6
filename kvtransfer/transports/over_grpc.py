"""The hand-off over gRPC, where nothing but HTTP/2 passes or TLS is demanded: `KvTransfer.Exchange`, twice a peer.

Payloads go inline, in packets of about 1 MiB (`over_grpc_packet`). A stream that breaks loses what was on its way; it
is made again, and the protocol asks for what is missing.
"""

import logging
import re
import secrets
from collections.abc import Callable, Sequence

from baton.core.config import KVTransferConfig
from baton.kvtransfer.protocol.transport import Delivery, PayloadDone, TransportCounts
from baton.kvtransfer.transports.over_grpc_client import GrpcClient
from baton.kvtransfer.transports.over_grpc_inbox import Inbox
from baton.kvtransfer.transports.over_grpc_options import SCHEME, client_channels
from baton.kvtransfer.transports.over_grpc_server import GrpcServer
from baton.proto import kv_pb2
from baton.proto.secure_channel import SecureChannels

MAX_BATCH = 64  # of what a `receive` returns, so that ticks and commands get their turn
_ADDRESS = re.compile(SCHEME + r"[^\s/]{1,255}:\d{1,5}")

log = logging.getLogger(__name__)


class GrpcTransport:
    """See `Transport`.

    Args:
        bind: `grpc://HOST:PORT` to listen on, PORT 0 for a free one; None for the side that connects.
        config: limits and times; the defaults if not given.

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
        """Post without waiting; a peer never heard of is connected to, on the side that connects."""
        if self._server is not None:
            self._server.send(peer, message)
        elif self.problem(peer):
            self.counts.messages_lost += 1
        else:
            self._clients[peer].send(message)

    def send_frame(self, peer: str, header: bytes, payload: Sequence[memoryview], lane: str) -> None:
        """Only the side that connects sends frames."""
        assert self._server is None
        if self.problem(peer):
            self.counts.frames_dropped += 1
        else:
            self._clients[peer].send_frame(header, payload)

    def unpin(self, peer: str, match: Callable[[bytes], bool]) -> None:
        """Payloads are gathered when gRPC asks for the next packet."""
        if peer in self._clients:
            self._clients[peer].unpin(match)

    def num_pinned(self, peer: str) -> int:
        """Frames that wait, or have left in part."""
        return self._clients[peer].num_pinned if peer in self._clients else 0

    def offers(self) -> list[kv_pb2.LaneOffer]:
        """None: where only HTTP/2 passes, payloads go inline."""
        return []

    def open_lane(self, peer: str, offer: kv_pb2.LaneOffer) -> str:
        """There is none."""
        return f"the grpc transport has no lane {offer.lane!r}"

    def lane_of(self, peer: str) -> str:
        """The only one."""
        return "inline"

    def problem(self, peer: str) -> str:
        """Connects, on the side that does."""
        if self._server is not None or peer in self._clients:
            return ""
        if not _ADDRESS.fullmatch(peer):
            return f"{peer[:100]!r} is no {SCHEME} address"
        self._clients[peer] = GrpcClient(peer, self._name, self._config, self._channels, self._inbox, self.counts)
        return ""

    def receive(self, timeout_s: float) -> list[Delivery | PayloadDone]:
        """Up to MAX_BATCH messages."""
        for client in self._clients.values():
            client.tick()
        arrived = self._inbox.take(timeout_s, MAX_BATCH)
        self.counts.payloads_cut += sum(isinstance(item, PayloadDone) and not item.ok for item in arrived)
        return arrived

    def wake(self) -> None:
        """Any thread."""
        self._inbox.put(None, None)

    def drop(self, peer: str) -> None:
        """End the stream."""
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
