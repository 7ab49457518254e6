"""Tells which connection a message to a listening ZMQ socket came by, and closes connections with endless messages.

A routing id travels in clear, and any connection that presents it takes it over, so it does not identify the peer. So
connections are numbered, and a number is never reused.

libzmq delivers no part of a message before the last one has arrived, and it limits only the size of a part: a message
with endless parts would be collected until memory is used up. So the number of bytes that the kernel has received for a
connection is compared with what libzmq delivered from it. This module does not know what messages mean.
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

LOOK_S = 0.02  # between checks: one costs some microseconds per connection
SAY_EVERY_S = 10.0
_SO_COOKIE = 57  # socket option: a number unique among the sockets of this machine; Python does not define it
_COOKIE_BYTES = 8
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER value: close at once, without waiting for the peer
_RECEIVED = struct.Struct("<Q")
_RECEIVED_AT = 128  # tcpi_bytes_received in struct tcp_info

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Connection:
    """A connection that was accepted.

    Attributes:
        cookie: cookie of its socket; its file descriptor may be another socket's by now.
        number: number of the connection.
        mark_bytes: bytes received when its last message was known to be delivered.
        has_spoken: whether one of its messages was delivered since the last check.
        suspected: how many messages of all connections had been delivered when it had received more than a message's
            size; None: it has not.
    """

    cookie: bytes
    number: int
    mark_bytes: int = 0
    has_spoken: bool = False
    suspected: int | None = None


class EndlessMessages:
    """Numbers connections, and closes those with endless messages. Driven by the thread of the socket.

    Args:
        listener: the listening socket, not bound yet.
        max_message_bytes: maximum size of one message on the wire, with all overhead.

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
        """Record connections that were accepted."""
        while self.monitor.poll(0):
            file = int(recv_monitor_message(self.monitor)["value"])
            self._accept(file)

    def took(self, part: zmq.Frame) -> int:
        """Record that a message was delivered, of which `part` is one part; return the number of its connection.

        `attend` must have been called since: a file descriptor may have become another connection's.
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
        """Close connections with endless messages; return how many were closed.

        Args:
            now_s: time of a monotonic clock.
            is_empty: whether the socket just had no further message.
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
        """Return whether more of one message was read than a message may have.

        Bytes beyond that may belong to the next messages, which are on their way through libzmq. So the connection is
        only suspected until the socket was empty, or had a turn for each connection, and delivered nothing from this
        one.
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
    """Yield the socket with this file descriptor, which libzmq keeps.

    Raises:
        OSError: it is not a socket any more.
    """
    borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=file)  # also for IPv6: no address is read
    try:
        yield borrowed
    finally:
        borrowed.detach()


def _cookie(file: int) -> bytes:
    """Return the cookie of a socket; empty if it is not a socket any more."""
    try:
        with _borrowed(file) as borrowed:
            return borrowed.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, _COOKIE_BYTES)
    except OSError:
        return b""


def _num_received(file: int) -> int | None:
    """Return how many bytes a connection has received; None if it has ended, or the system does not report it."""
    try:
        with _borrowed(file) as borrowed:
            info = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + _RECEIVED.size)
            return int(_RECEIVED.unpack_from(info, _RECEIVED_AT)[0])
    except (OSError, struct.error):
        return None


def _num_unread(file: int) -> int:
    """Return how many received bytes libzmq has not read."""
    unread = array.array("i", [0])
    try:
        fcntl.ioctl(file, termios.FIONREAD, unread)
    except OSError:
        return 0
    return unread[0]


def _shut(file: int, cookie: bytes) -> bool:
    """Shut a connection down, which libzmq then closes; not if the descriptor is another socket's by now."""
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
