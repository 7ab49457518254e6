"""One connection of the raw lane, as its listening end sees it: preface, then headers and payloads.

Reads wait for a few milliseconds at most, and only where the peer was quick the last time: data that is on its way
comes in one system call then, and a peer that stops keeps nobody waiting.
"""

import mmap
import socket
import struct
import time
from collections.abc import Sequence
from typing import Protocol

from baton.core.config import KVTransferConfig
from baton.core.errors import ProtocolError
from baton.kvtransfer.protocol.frame import HEADER_BYTES, decode_header
from baton.kvtransfer.protocol.transport import Delivery, PayloadDone
from baton.kvtransfer.sender.piece_cursor import MAX_BUFFERS, PieceCursor
from baton.kvtransfer.transports.raw_lane import READY, tune_socket

PATIENCE = struct.pack("ll", 0, 2000)  # a read of a quick peer waits so long, and not longer (timeval)
MIN_COLD_S, MAX_COLD_S = 0.005, 1.0  # so long a peer that used up that patience gets none; doubled each time
COLD_BYTES = 512 << 10  # and is read when so much is there, which costs fewer turns than whenever something is


class ConnectionOwner(Protocol):
    """What a connection needs of the receiver."""

    scratch: mmap.mmap
    max_payload_bytes: int

    def fail(self, payload: "RawPayload") -> None:
        """Say at the next turn that a payload will not come."""
        ...

    def watch(self, file: int, *, is_watched: bool) -> None:
        """Whether a connection's events are wanted now."""
        ...

    def end(self, connection: "RawConnection") -> None:
        """Close a connection that broke while its payload was read."""
        ...


class RawConnection:
    """One connection, from its preface to its end.

    Attributes:
        file: its number.
        peer: name of the control channel it belongs to; empty before the preface.
        since_s: when it was made.
    """

    def __init__(self, accepted: socket.socket, config: KVTransferConfig, owner: "ConnectionOwner") -> None:
        self.file = accepted.fileno()
        self.peer = ""
        self.since_s = time.monotonic()
        self._owner = owner
        self._socket = accepted
        self._head = bytearray()
        self._payload: RawPayload | None = None
        self._cold_s = MIN_COLD_S
        self._cold_until_s = 0.0
        self._low_water_bytes = 1
        tune_socket(accepted, config)
        accepted.settimeout(None)  # every call says itself whether it waits
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, PATIENCE)

    def read_head(self, size: int) -> bytes | None:
        """The next `size` bytes once they are all there.

        Raises:
            OSError: the connection has ended.
        """
        try:
            data = self._socket.recv(size - len(self._head), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        if not data:
            raise ConnectionResetError("the peer has closed it")
        self._head += data
        if len(self._head) < size:
            return None
        head = bytes(self._head)
        self._head.clear()
        return head

    def welcome(self, peer: str) -> None:
        """Take frames from here on.

        Raises:
            OSError: the connection has ended.
        """
        self.peer = peer
        self._socket.send(READY, socket.MSG_DONTWAIT)

    def advance(self) -> list[Delivery | PayloadDone]:
        """Read on.

        Raises:
            OSError: the connection has ended.
            ProtocolError: what came is no header, or one that no peer may send.
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
        """Give the socket back; the payload that was under way, if there was one."""
        payload, self._payload = self._payload, None
        self._owner.watch(self.file, is_watched=False)
        self._socket.close()
        return payload

    def begin(self, payload: "RawPayload") -> bool:
        """Its fate is decided: read what is there."""
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

    def pull_into(self, cursor: PieceCursor) -> bool:
        """Read into the pool; whether that is all.

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
        """Be readable only when so much is there, or the connection has ended."""
        if num_bytes != self._low_water_bytes:
            self._low_water_bytes = num_bytes
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)

    def pull_away(self, num_left: int) -> int:
        """Throw bytes away; how many.

        Raises:
            OSError: the connection has ended.
        """
        size = min(num_left, len(self._owner.scratch))
        try:
            flags = socket.MSG_TRUNC | socket.MSG_DONTWAIT  # of TCP: count, and do not copy
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
        num_bytes: its size.
        is_wanted: it is read, and not discarded.
    """

    def __init__(self, connection: RawConnection, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.is_wanted = False
        self._connection = connection
        self._cursor: PieceCursor | None = None
        self._num_left = num_bytes  # of a discarded one

    def read_into(self, pieces: Sequence[memoryview]) -> bool:
        """Read what is there, and go on as more arrives."""
        self._cursor = PieceCursor(pieces)
        assert self._cursor.num_left == self.num_bytes
        self.is_wanted = True
        return self._connection.begin(self)

    def discard(self) -> None:
        """The pieces are not touched after this, whatever is still to come."""
        was_decided = self.is_wanted
        if self._cursor is not None:
            self._num_left = self._cursor.num_left
        self._cursor = None
        self.is_wanted = False
        if not was_decided:
            self._connection.begin(self)

    def pull(self) -> bool:
        """Go on; whether this was all of it.

        Raises:
            OSError: the connection has ended.
        """
        if self._cursor is not None:
            return self._connection.pull_into(self._cursor)
        self._num_left -= self._connection.pull_away(self._num_left)
        return self._num_left == 0
