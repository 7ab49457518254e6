"""Which connection a message to a listening ZMQ socket came by; closes those that send one without end.

A routing id is in clear, and who shows it takes it over: it says nothing of who is at the other end. So connections
are numbered, and a number is no other's.

libzmq shows no part of a message before the last one has come, and its bound is one of parts: a message of endless
parts would be collected until memory is used up. So the bytes that the kernel has received for a connection are
compared with what came out of it. It refuses to know what messages mean.
"""

import array
import contextlib
import fcntl
import logging
import os
import socket
import struct
import termios
from collections.abc import Iterator
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

LOOK_S = 0.02  # between looks: a look costs some microseconds for each connection
SAY_EVERY_S = 10.0
_SO_COOKIE = 57  # a number that no other socket of this machine has; Python does not name it
_COOKIE_BYTES = 8
_RESET = struct.pack("ii", 1, 0)  # when it is closed: no end that waits for the peer
_RECEIVED = struct.Struct("<Q")
_RECEIVED_AT = 128  # tcpi_bytes_received in struct tcp_info

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Connection:
    """One that was accepted.

    Attributes:
        cookie: of its socket; its file number may be another's by now.
        number: of the connection.
        mark_bytes: received when its last message was known to be out.
        has_spoken: a message of it came out since the last look.
        suspected: how many messages of all connections had come out when more was received than a message has; None:
            it was not.
    """

    cookie: bytes
    number: int
    mark_bytes: int = 0
    has_spoken: bool = False
    suspected: int | None = None


class EndlessMessages:
    """See the module. Driven by the thread of the socket.

    Args:
        listener: not bound yet.
        max_message_bytes: of one message on the wire, with all that is around it.

    Attributes:
        monitor: readable when `attend` has something to do.
    """

    def __init__(self, listener: "zmq.Socket[bytes]", max_message_bytes: int) -> None:
        self.monitor: zmq.Socket[bytes] = listener.get_monitor_socket(zmq.EVENT_ACCEPTED)
        self._max_message_bytes = max_message_bytes
        self._connections: dict[int, _Connection] = {}
        self._num_accepted = 0
        self._num_taken = 0
        self._was_empty = False
        self._look_s = self._say_s = float("-inf")

    def attend(self) -> None:
        """Note connections that were accepted."""
        while self.monitor.poll(0):
            file = int(recv_monitor_message(self.monitor)["value"])
            self._accept(file)

    def took(self, part: zmq.Frame) -> int:
        """A message came out, of which `part` is one of its own; the number of its connection.

        `attend` must have been called since: a file number may have become another connection's.
        """
        self._num_taken += 1
        file = int(part.get(zmq.SRCFD))
        connection = self._connections.get(file) or self._accept(file)
        connection.has_spoken = True
        return connection.number

    def _accept(self, file: int) -> _Connection:
        self._num_accepted += 1
        connection = self._connections[file] = _Connection(_cookie(file), self._num_accepted)
        return connection

    def look(self, now_s: float, *, is_empty: bool) -> int:
        """Close what sends without end; how many were closed.

        Args:
            now_s: of a monotonic clock.
            is_empty: the socket had no further message just now.
        """
        self._was_empty |= is_empty
        if now_s < self._look_s:
            return 0
        self._look_s = now_s + LOOK_S
        endless = [file for file, connection in tuple(self._connections.items()) if self._is_endless(file, connection)]
        self._was_empty = False
        num_closed = sum(_shut(file, self._connections.pop(file).cookie) for file in endless)
        if num_closed and now_s >= self._say_s:
            self._say_s = now_s + SAY_EVERY_S
            log.warning(
                "closed %d connections whose message had more than %d bytes", num_closed, self._max_message_bytes
            )
        return num_closed

    def _is_endless(self, file: int, connection: _Connection) -> bool:
        """Whether more was read of one message than a message has.

        What was received beyond that may be the next messages, which are on their way through libzmq. So it is only
        suspected until the socket was empty, or had a turn for each connection, and none of this one's came out.
        """
        num_bytes = _num_received(file)
        if num_bytes is None:
            del self._connections[file]
            return False
        if connection.has_spoken:
            connection.has_spoken, connection.suspected, connection.mark_bytes = False, None, num_bytes
            return False
        if num_bytes - connection.mark_bytes <= self._max_message_bytes:
            return False
        if connection.suspected is None:
            if num_bytes - _num_unread(file) - connection.mark_bytes > self._max_message_bytes:
                connection.suspected = self._num_taken
            return False
        return self._was_empty or self._num_taken - connection.suspected > len(self._connections)


@contextlib.contextmanager
def _borrowed(file: int) -> Iterator[socket.socket]:
    """The socket with this number, which stays libzmq's.

    Raises:
        OSError: it is none any more.
    """
    borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=file)  # of IPv6, too: no address is asked
    try:
        yield borrowed
    finally:
        borrowed.detach()


def _cookie(file: int) -> bytes:
    """Of a socket; empty if it is none any more."""
    try:
        with _borrowed(file) as borrowed:
            return borrowed.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, _COOKIE_BYTES)
    except OSError:
        return b""


def _num_received(file: int) -> int | None:
    """Bytes that a connection has received so far; None if it has ended, or the system does not tell."""
    try:
        with _borrowed(file) as borrowed:
            info = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + _RECEIVED.size)
            return int(_RECEIVED.unpack_from(info, _RECEIVED_AT)[0])
    except (OSError, struct.error):
        return None


def _num_unread(file: int) -> int:
    """Of them, those that libzmq has not read."""
    unread = array.array("i", [0])
    try:
        fcntl.ioctl(file, termios.FIONREAD, unread)
    except OSError:
        return 0
    return unread[0]


def _shut(file: int, cookie: bytes) -> bool:
    """End a connection, which libzmq then closes; not if the number is another socket's by now."""
    try:
        own = os.dup(file)
    except OSError:
        return False
    try:
        with _borrowed(own) as borrowed:
            is_meant = _cookie(own) == cookie
            if is_meant:
                borrowed.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                borrowed.shutdown(socket.SHUT_RDWR)
            return is_meant
    except OSError:
        return False
    finally:
        os.close(own)
