"""The listening side of the raw data path: connections whose payloads go straight into the pool.

A connection must prove the deployment's secret, or is closed. Then the sizes in its headers are trusted within limits,
and each payload waits until it is decided where it goes. A payload that stops midway keeps only its own connection
waiting.
"""

import logging
import mmap
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import zmq

from baton.core.config import KVTransferConfig
from baton.core.errors import PortInUse, ProtocolError, Unauthenticated
from baton.core.kv_transports import RAW
from baton.kvtransfer.protocol.frame import HEADER_BYTES, decode_header
from baton.kvtransfer.protocol.preface import LISTENER_ID_BYTES, AcceptingPreface
from baton.kvtransfer.protocol.proof import NUMBER_BYTES, KvProofs
from baton.kvtransfer.protocol.transport import Delivery, PayloadDone, TransportCounts
from baton.kvtransfer.sender.buffer_cursor import MAX_BUFFERS, BufferCursor
from baton.kvtransfer.transports.raw import tune_socket
from baton.proto import kv_pb2

PATIENCE = struct.pack("ll", 0, 2000)  # how long a read of a quick peer may wait (timeval)
MIN_COLD_S, MAX_COLD_S = 0.005, 1.0  # how long a peer that used it up gets none; doubled each time
COLD_BYTES = 512 << 10  # it is read when so much is there, in fewer turns than whenever data arrives


class ConnectionOwner(Protocol):
    """What a connection needs of the receiver."""

    scratch: mmap.mmap
    max_payload_bytes: int

    def fail(self, payload: "RawPayload") -> None:
        """Report at the next turn that a payload will not come."""
        ...

    def watch(self, file: int, *, is_watched: bool) -> None:
        """Set whether a connection's events are polled."""
        ...

    def end(self, connection: "RawConnection") -> None:
        """Close a connection that broke while its payload was read."""
        ...


class RawConnection:
    """One connection, from its preface to its end.

    Attributes:
        file: file descriptor.
        peer: name of the control channel that it belongs to; empty until the preface is complete.
        since_s: when it was accepted.
        preface: its preface.
    """

    def __init__(
        self,
        accepted: socket.socket,
        preface: AcceptingPreface,
        config: KVTransferConfig,
        owner: "ConnectionOwner",
    ) -> None:
        self.file = accepted.fileno()
        self.peer = ""
        self.since_s = time.monotonic()
        self.preface = preface
        self._owner = owner
        self._socket = accepted
        self._head = bytearray()
        self._payload: RawPayload | None = None
        self._cold_s = MIN_COLD_S
        self._cold_until_s = 0.0
        self._low_water_bytes = 1
        tune_socket(accepted, config)
        accepted.settimeout(None)  # every call specifies whether it waits
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, PATIENCE)

    def read_head(self, size: int) -> bytes | None:
        """Return the next `size` bytes once all of them have arrived.

        Raises:
            OSError: the connection has ended.
        """
        self._head += self._receive(size - len(self._head))
        if len(self._head) < size:
            return None
        head = bytes(self._head)
        self._head.clear()
        return head

    def greet(self) -> None:
        """Send the challenge of the preface.

        Raises:
            OSError: the connection has ended.
        """
        self._send(self.preface.challenge)

    def hear(self) -> bytes:
        """Continue with the preface; return the acceptance once the other side has proved itself, else nothing.

        Raises:
            OSError: the connection has ended.
            ProtocolError: the bytes are no preface.
            Unauthenticated: the other side does not know the deployment's secret.
        """
        return self.preface.take(self._receive(self.preface.num_wanted))

    def welcome(self, peer: str, acceptance: bytes) -> None:
        """Accept frames from here on.

        Raises:
            OSError: the connection has ended.
        """
        self.peer = peer
        self._send(acceptance)

    def _receive(self, max_bytes: int) -> bytes:
        """Return what has arrived, which may be nothing.

        Raises:
            OSError: the connection has ended.
        """
        try:
            data = self._socket.recv(max_bytes, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""
        if not data:
            raise ConnectionResetError("the peer has closed it")
        return data

    def _send(self, message: bytes) -> None:
        """Send a message of the preface; a new connection has room for both.

        Raises:
            OSError: the connection has ended, or takes nothing.
        """
        if self._socket.send(message, socket.MSG_DONTWAIT) != len(message):
            raise ConnectionResetError("the peer takes nothing")

    def advance(self) -> list[Delivery | PayloadDone]:
        """Read what has arrived.

        Raises:
            OSError: the connection has ended.
            ProtocolError: the bytes are not a header, or are one that no peer may send.
        """
        if self._payload is not None:
            payload = self._payload
            if not payload.pull():
                return []
            self._payload = None
            return [PayloadDone(payload, ok=True)] if payload.is_wanted else []
        head = self.read_head(HEADER_BYTES)
        if head is None:
            return []
        header = decode_header(head)
        if header.is_written or not header.payload_bytes:
            return [Delivery(self.peer, header=head)]
        if header.payload_bytes > self._owner.max_payload_bytes:
            raise ProtocolError(
                f"a frame of {header.payload_bytes} bytes, {self._owner.max_payload_bytes} are the most"
            )
        self._payload = RawPayload(self, header.payload_bytes)
        self._owner.watch(self.file, is_watched=False)  # until it is decided where the payload goes
        return [Delivery(self.peer, header=head, payload=self._payload)]

    def close(self) -> "RawPayload | None":
        """Close the socket; return the payload that was in progress, if there was one."""
        payload, self._payload = self._payload, None
        self._owner.watch(self.file, is_watched=False)
        self._socket.close()
        return payload

    def begin(self, payload: "RawPayload") -> bool:
        """Read what is there of a payload that was accepted or discarded."""
        if self._payload is not payload:  # the connection has ended meanwhile
            if payload.is_wanted:
                self._owner.fail(payload)
            return False
        try:
            is_done = payload.pull()
        except OSError:
            self._owner.end(self)
            return False
        if is_done:
            self._payload = None
        self._owner.watch(self.file, is_watched=True)
        return is_done

    def pull_into(self, cursor: BufferCursor) -> bool:
        """Read into the pool; return whether the payload is complete.

        Raises:
            OSError: the connection has ended.
        """
        is_patient = time.monotonic() >= self._cold_until_s
        while cursor.num_left:
            buffers = cursor.buffers()
            wanted = cursor.num_left if len(buffers) < MAX_BUFFERS else sum(map(len, buffers))
            try:
                flags = socket.MSG_WAITALL if is_patient else socket.MSG_DONTWAIT
                num_read = self._socket.recvmsg_into(buffers, 0, flags)[0]
            except BlockingIOError:
                num_read = -1
            if num_read == 0:
                raise ConnectionResetError("the peer has closed it")
            cursor.advance(max(0, num_read))
            if num_read < wanted:
                if is_patient:
                    self._cold_until_s = time.monotonic() + self._cold_s
                    self._cold_s = min(2 * self._cold_s, MAX_COLD_S)
                self._rest(min(cursor.num_left, COLD_BYTES))
                return False
        if is_patient:
            self._cold_s = MIN_COLD_S
        self._rest(1)
        return True

    def _rest(self, num_bytes: int) -> None:
        """Become readable only when that many bytes are there, or the connection has ended."""
        if num_bytes != self._low_water_bytes:
            self._low_water_bytes = num_bytes
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)

    def pull_away(self, num_left: int) -> int:
        """Discard received bytes; return how many.

        Raises:
            OSError: the connection has ended.
        """
        size = min(num_left, len(self._owner.scratch))
        try:
            flags = socket.MSG_TRUNC | socket.MSG_DONTWAIT  # for TCP: count the bytes without copying them
            num_read = self._socket.recv_into(self._owner.scratch, size, flags)
        except BlockingIOError:
            return 0
        if num_read == 0:
            raise ConnectionResetError("the peer has closed it")
        self._rest(1)
        return num_read


class RawPayload:
    """A payload that is still in its socket; see `Payload`.

    Attributes:
        num_bytes: size of the payload.
        is_wanted: whether it is read and was not discarded.
    """

    def __init__(self, connection: RawConnection, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.is_wanted = False
        self._connection = connection
        self._cursor: BufferCursor | None = None
        self._num_left = num_bytes  # of a discarded payload

    def read_into(self, pieces: Sequence[memoryview]) -> bool:
        """Read what is there, and continue as more arrives."""
        self._cursor = BufferCursor(pieces)
        assert self._cursor.num_left == self.num_bytes
        self.is_wanted = True
        return self._connection.begin(self)

    def discard(self) -> None:
        """Drop the payload: the pieces are not accessed after this, whatever still arrives."""
        was_decided = self.is_wanted
        if self._cursor is not None:
            self._num_left = self._cursor.num_left
        self._cursor = None
        self.is_wanted = False
        if not was_decided:
            self._connection.begin(self)

    def pull(self) -> bool:
        """Continue to read; return whether the payload is complete.

        Raises:
            OSError: the connection has ended.
        """
        if self._cursor is not None:
            return self._connection.pull_into(self._cursor)
        self._num_left -= self._connection.pull_away(self._num_left)
        return self._num_left == 0


MAX_CONNECTIONS = 512
MAX_STREAMS_PER_PEER = 8
MAX_ACCEPTS = 16  # in one turn
REST_S = 0.5  # pause after no file descriptor was left for a connection
SAY_EVERY_S = 10.0
_SCRATCH_BYTES = 8 << 20

log = logging.getLogger(__name__)


class RawReceiver:
    """The raw data path from every peer.

    Args:
        host: numeric address to listen at.
        config: limits and times.
        poller: polled by the caller; events of this data path's files go to `ready`.
        counts: counters of the transport.
        proofs: proofs of the deployment.
        name_of: returns the name of the peer that presents this name on the control channel; empty if there is none.

    Attributes:
        scratch: memory for unwanted bytes.
        max_payload_bytes: maximum payload of a frame.

    Raises:
        PortInUse: listening at that host is not possible.
    """

    def __init__(
        self,
        host: str,
        config: KVTransferConfig,
        poller: zmq.Poller,
        counts: TransportCounts,
        proofs: KvProofs,
        name_of: Callable[[str], str],
    ) -> None:
        self.max_payload_bytes = config.max_frame_bytes
        self._config = config
        self._poller = poller
        self._counts = counts
        self._proofs = proofs
        self._name_of = name_of
        self._listener_id = secrets.token_bytes(LISTENER_ID_BYTES)
        self._connections: dict[int, RawConnection] = {}
        self._failed: list[RawPayload] = []
        self._rests_until_s: float | None = None
        self._said_s = float("-inf")
        self.scratch = mmap.mmap(-1, _SCRATCH_BYTES)  # for unwanted bytes; the kernel does not even write them
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, 0), family=family, backlog=128)
        except OSError as error:
            raise PortInUse(f"cannot listen at {host}: {error.strerror}", address=host) from error
        self._listener.setblocking(False)
        self._listener_file = self._listener.fileno()
        self._poller.register(self._listener_file, zmq.POLLIN)

    @property
    def offer(self) -> kv_pb2.DataPathOffer:
        """The offer for peers."""
        host, port = self._listener.getsockname()[:2]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return kv_pb2.DataPathOffer(data_path=RAW, raw=kv_pb2.RawOffer(address=address, listener_id=self._listener_id))

    def ready(self, file: int) -> list[Delivery | PayloadDone]:
        """Continue with a connection, or accept new ones."""
        if file == self._listener_file:
            self._accept()
            return []
        connection = self._connections.get(file)
        return [] if connection is None else self._run(connection)

    def take_failed(self) -> list[Delivery | PayloadDone]:
        """Return the payloads whose connection ended outside `ready`."""
        failed, self._failed = self._failed, []
        return [PayloadDone(payload, ok=False) for payload in failed if payload.is_wanted]

    def tick(self) -> None:
        """Close connections that have proved nothing in time, and accept new ones again after a pause."""
        now_s = time.monotonic()
        if self._rests_until_s is not None and now_s >= self._rests_until_s:
            self._rests_until_s = None
            self._poller.register(self._listener_file, zmq.POLLIN)
        for connection in list(self._connections.values()):
            if not connection.peer and now_s - connection.since_s > max(1.0, self._config.lease_s):
                self._refuse(connection, "it proved nothing in time")

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
                continue  # the peer disconnected while it waited
            except OSError as error:  # no file descriptors left: the poller would report the waiting peer at once
                self._rest(error)
                return
            if len(self._connections) >= MAX_CONNECTIONS:
                # The one that has had longest to prove itself goes, so that who holds as many as there may be keeps no
                # peer out. None that has proved itself does.
                self._counts.connections_refused += 1
                unproved = next((each for each in self._connections.values() if not each.peer), None)
                if unproved is None:
                    accepted.close()
                    continue
                self._close(unproved)
            preface = AcceptingPreface(self._proofs, self._listener_id, secrets.token_bytes(NUMBER_BYTES))
            connection = RawConnection(accepted, preface, self._config, self)
            self._connections[connection.file] = connection
            self._poller.register(connection.file, zmq.POLLIN)
            try:
                connection.greet()
            except OSError as error:
                log.debug("a raw connection ended as it began: %s", error)
                self._close(connection)

    def _rest(self, error: OSError) -> None:
        """Accept no connection for a while; those that are open go on."""
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
        except (ProtocolError, Unauthenticated) as error:
            self._refuse(connection, error.message)
        except OSError as error:
            log.debug("the raw data path from %s ended: %s", connection.peer, error)
            self._close(connection)
        return self.take_failed()

    def _greet(self, connection: RawConnection) -> None:
        acceptance = connection.hear()
        if not acceptance:
            return
        peer = self._name_of(connection.preface.name.decode("latin-1"))
        if not peer:
            raise ProtocolError("a raw connection of a peer without a control channel")
        same = [each for each in self._connections.values() if each.peer == peer]
        if len(same) >= MAX_STREAMS_PER_PEER:
            self._close(same[0])  # the oldest is most likely dead at the other end
        connection.welcome(peer, acceptance)

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
        """Report at the next turn that a payload will not come."""
        self._failed.append(payload)

    def watch(self, file: int, *, is_watched: bool) -> None:
        """Set whether a connection's events are polled."""
        self._poller.register(file, zmq.POLLIN if is_watched else 0)

    def end(self, connection: RawConnection) -> None:
        """Close a connection that broke while its payload was read."""
        if connection.file in self._connections:
            self._close(connection)
