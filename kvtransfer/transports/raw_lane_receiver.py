"""The listening end of the raw lane: connections whose payloads go straight into the pool.

A connection says who it is, or is closed; then its headers are believed as far as sizes go, and each payload waits
until somebody decides where it goes. A payload that stops in the middle keeps its own connection waiting and no other.
"""

import hmac
import logging
import mmap
import socket
import time
from collections.abc import Callable

import zmq

from baton.core.config import KVTransferConfig
from baton.core.errors import PortInUse, ProtocolError
from baton.core.kv_transports import RAW
from baton.kvtransfer.protocol.transport import Delivery, PayloadDone, TransportCounts
from baton.kvtransfer.transports.raw_lane import PREFACE_BYTES, decode_preface, new_token
from baton.kvtransfer.transports.raw_lane_connection import RawConnection, RawPayload
from baton.proto import kv_pb2

MAX_CONNECTIONS = 512
MAX_STREAMS_PER_PEER = 8
MAX_ACCEPTS = 16  # in one turn
REST_S = 0.5  # after there was no file number for a connection
SAY_EVERY_S = 10.0
_SCRATCH_BYTES = 8 << 20

log = logging.getLogger(__name__)


class RawReceiver:
    """The lane from every peer.

    Args:
        host: to listen at, numeric.
        config: limits and times.
        poller: asked for readiness; events for this lane's files go to `ready`.
        counts: of the transport.
        is_known: whether a name is one of a peer of the control channel.

    Attributes:
        scratch: where unwanted bytes go.
        max_payload_bytes: of a frame.

    Raises:
        PortInUse: there is no listening at that host.
    """

    def __init__(
        self,
        host: str,
        config: KVTransferConfig,
        poller: zmq.Poller,
        counts: TransportCounts,
        is_known: Callable[[str], bool],
    ) -> None:
        self.max_payload_bytes = config.max_frame_bytes
        self._config = config
        self._poller = poller
        self._counts = counts
        self._is_known = is_known
        self._token = new_token()
        self._connections: dict[int, RawConnection] = {}
        self._failed: list[RawPayload] = []
        self._rests_until_s: float | None = None
        self._said_s = float("-inf")
        self.scratch = mmap.mmap(-1, _SCRATCH_BYTES)  # for bytes that nobody wants; the kernel does not even write them
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, 0), family=family, backlog=128)
        except OSError as error:
            raise PortInUse(f"cannot listen at {host}: {error.strerror}", address=host) from error
        self._listener.setblocking(False)
        self._listener_file = self._listener.fileno()
        self._poller.register(self._listener_file, zmq.POLLIN)

    @property
    def offer(self) -> kv_pb2.LaneOffer:
        """What peers need."""
        host, port = self._listener.getsockname()[:2]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return kv_pb2.LaneOffer(lane=RAW, raw=kv_pb2.RawOffer(address=address, token=self._token))

    def ready(self, file: int) -> list[Delivery | PayloadDone]:
        """Go on with a connection, or take new ones."""
        if file == self._listener_file:
            self._accept()
            return []
        connection = self._connections.get(file)
        return [] if connection is None else self._run(connection)

    def take_failed(self) -> list[Delivery | PayloadDone]:
        """Payloads whose connection ended outside `ready`."""
        failed, self._failed = self._failed, []
        return [PayloadDone(payload, ok=False) for payload in failed if payload.is_wanted]

    def tick(self) -> None:
        """Close connections that never said who they are, and take new ones again after a rest."""
        now_s = time.monotonic()
        if self._rests_until_s is not None and now_s >= self._rests_until_s:
            self._rests_until_s = None
            self._poller.register(self._listener_file, zmq.POLLIN)
        for connection in list(self._connections.values()):
            if not connection.peer and now_s - connection.since_s > max(1.0, self._config.lease_s):
                self._refuse(connection, "it said nothing")

    def drop(self, peer: str) -> None:
        """Close a peer's connections."""
        for connection in [each for each in self._connections.values() if each.peer == peer]:
            self._close(connection)

    def close(self) -> None:
        """Close everything; nothing is written to pools any more."""
        for connection in list(self._connections.values()):
            self._close(connection)
        self._poller.unregister(self._listener_file)
        self._listener.close()
        self.scratch.close()

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTS):
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue  # the peer went away while it waited
            except OSError as error:  # no file numbers left: the poller would say at once that the peer still waits
                self._rest(error)
                return
            if len(self._connections) >= MAX_CONNECTIONS:
                self._counts.connections_refused += 1
                accepted.close()
                continue
            connection = RawConnection(accepted, self._config, self)
            self._connections[connection.file] = connection
            self._poller.register(connection.file, zmq.POLLIN)

    def _rest(self, error: OSError) -> None:
        """Take no connection for a while; those that are open go on."""
        self._counts.connections_refused += 1
        now_s = time.monotonic()
        self._rests_until_s = now_s + REST_S
        self._poller.register(self._listener_file, 0)
        if now_s - self._said_s >= SAY_EVERY_S:
            self._said_s = now_s
            log.warning("cannot take connections, and looks again every %g s: %s", REST_S, error.strerror)

    def _run(self, connection: RawConnection) -> list[Delivery | PayloadDone]:
        try:
            if not connection.peer:
                self._greet(connection)
                return []
            return connection.advance()
        except ProtocolError as error:
            self._refuse(connection, error.message)
        except OSError as error:
            log.debug("the raw lane from %s ended: %s", connection.peer, error)
            self._close(connection)
        return self.take_failed()

    def _greet(self, connection: RawConnection) -> None:
        preface = connection.read_head(PREFACE_BYTES)
        if preface is None:
            return
        found = decode_preface(preface)
        if found is None or not hmac.compare_digest(found[0], self._token):
            raise ProtocolError("a raw connection without the token")
        peer = found[1].decode("latin-1")
        if not self._is_known(peer):
            raise ProtocolError("a raw connection of a peer without a control channel")
        same = [each for each in self._connections.values() if each.peer == peer]
        if len(same) >= MAX_STREAMS_PER_PEER:
            self._close(same[0])  # the oldest: most likely dead at the other end
        connection.welcome(peer)

    def _refuse(self, connection: RawConnection, why: str) -> None:
        self._counts.connections_refused += 1
        log.warning("a raw connection from %s is closed: %s", connection.peer or "a stranger", why)
        self._close(connection)

    def _close(self, connection: RawConnection) -> None:
        del self._connections[connection.file]
        payload = connection.close()
        if payload is not None:
            self._counts.payloads_cut += 1
            if payload.is_wanted:
                self.fail(payload)

    def fail(self, payload: RawPayload) -> None:
        """Say at the next turn that a payload will not come."""
        self._failed.append(payload)

    def watch(self, file: int, *, is_watched: bool) -> None:
        """Whether a connection's events are wanted now."""
        self._poller.register(file, zmq.POLLIN if is_watched else 0)

    def end(self, connection: RawConnection) -> None:
        """Close a connection that broke while its payload was read."""
        if connection.file in self._connections:
            self._close(connection)
