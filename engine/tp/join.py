"""Connects the ranks of a TP group: rank 0 listens, the others connect, and each end verifies the other's process.

Sockets are abstract Unix sockets: no file can leak, and no other host can connect. Only processes of the same user that
know the TP group's token can join. A foreign connection costs a moment, never the TP group.
"""

import hmac
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from typing import Final

from baton.core.errors import ProtocolError, WorkerLost
from baton.engine.tp.link import TPGroupLink, TPGroupPeer
from baton.engine.tp.plan_codec import FRAME_HEADER_BYTES, Join, PlanCodec, payload_len

_MAX_JOIN_BYTES: Final = 4096
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid

log = logging.getLogger(__name__)


class RankListener:
    """Accepts the other ranks of a TP group on rank 0.

    Attributes:
        address: for `join`.
        token: for `join`; random.
    """

    def __init__(self, codec: PlanCodec, size: int) -> None:
        self.address = f"baton-tp-group-{secrets.token_hex(12)}"
        self.token = secrets.token_hex(16)
        self._codec = codec
        self._size = size
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind("\0" + self.address)
        self._socket.listen(size)

    def accept(self, timeout_s: float, check: Callable[[], None] = lambda: None) -> TPGroupLink:
        """Rank 0's end of the link, once all ranks have joined.

        Args:
            timeout_s: until all must have joined.
            check: called several times a second; raises if a rank cannot come.

        Raises:
            WorkerLost: a rank did not join.
        """
        end_s = time.monotonic() + timeout_s
        peers: dict[int, TPGroupPeer] = {}
        try:
            while len(peers) < self._size - 1:
                check()
                if time.monotonic() > end_s:
                    missing = sorted(set(range(1, self._size)) - peers.keys())
                    raise WorkerLost(f"rank {missing[0]} of {self._size} did not join within {timeout_s:.0f} s")
                self._socket.settimeout(0.2)
                try:
                    connection, _ = self._socket.accept()
                except TimeoutError:
                    continue
                peer = self._admit(connection)
                if peer is not None and peer.rank not in peers:
                    peers[peer.rank] = peer
        except BaseException:
            for peer in peers.values():
                peer.close()
            raise
        finally:
            self.close()
        return TPGroupLink(self._codec, 0, self._size, list(peers.values()))

    def close(self) -> None:
        """Accept no more ranks."""
        self._socket.close()

    def _admit(self, connection: socket.socket) -> TPGroupPeer | None:
        """The peer that connected, if it is a rank of this TP group; else None."""
        try:
            pid, uid = _credentials(connection)
            if uid != os.getuid():
                raise ProtocolError("another user's process")
            connection.settimeout(2.0)
            header = _read_exactly(connection, FRAME_HEADER_BYTES)
            num_bytes = payload_len(header)
            if num_bytes > _MAX_JOIN_BYTES:
                raise ProtocolError(f"a first word of {num_bytes} bytes")
            join = self._codec.decode(header + _read_exactly(connection, num_bytes), 1)
            if not isinstance(join, Join) or not hmac.compare_digest(join.token, self.token):
                raise ProtocolError("no rank of this TP group")
            if not 0 < join.rank < self._size:
                raise ProtocolError(f"no rank {join.rank} in a TP group of {self._size}")
        except (ProtocolError, OSError) as error:
            log.warning("a connection to the TP group was refused: %s", error)
            connection.close()
            return None
        peer = TPGroupPeer(join.rank, connection, pid)
        peer.num_heard = 1
        return peer


def join(codec: PlanCodec, rank: int, size: int, address: str, token: str) -> TPGroupLink:
    """Connect to rank 0; returns this rank's end of the link.

    Raises:
        WorkerLost: rank 0 cannot be reached.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect("\0" + address)
        pid, uid = _credentials(connection)
        if uid != os.getuid():
            raise WorkerLost(f"rank {rank} of {size} found another user's process where rank 0 was to be")
        connection.sendall(codec.encode(Join(rank, token), 1))
    except OSError as error:
        connection.close()
        raise WorkerLost(f"rank {rank} of {size} cannot reach rank 0: {error}", rank=rank, size=size) from error
    return TPGroupLink(codec, rank, size, [TPGroupPeer(0, connection, pid)], num_told=1)


def _credentials(connection: socket.socket) -> tuple[int, int]:
    """Process id and user id of the other end, as reported by the kernel."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


def _read_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        piece = connection.recv(num_bytes - len(data))
        if not piece:
            raise ProtocolError("it ended before its first word")
        data += piece
    return data
