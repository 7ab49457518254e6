"""The ZMQ sockets of one transport: their limits and times, the one that wakes, and the keys if there are any."""

import mmap
import os
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import zmq

from baton.core.config import KVTransferConfig
from baton.kvtransfer.protocol.proof import connection_pass
from baton.kvtransfer.transports.zmq_authenticator import Admission, ConnectionAuthenticator, CurveKeys, PlainAdmission

HIGH_WATER_MESSAGES = 4096  # above what a window allows (frame.FRAME_OVERHEAD_BYTES), so that credits are the limit
_MIN_MESSAGE_BYTES = 1 << 20  # control messages must fit even where frames are small
_HEADROOM_BYTES = 64 << 10
_MIN_HEARTBEAT_TIMEOUT_S = 1.0


class ZmqSockets:
    """Makes sockets, and polls them.

    Args:
        config: limits, times and keys.

    Attributes:
        poller: of all of them; others may register files there.
        is_encrypted: every network socket is.

    Raises:
        ConfigInvalid: the keys cannot be used.
    """

    def __init__(self, config: KVTransferConfig) -> None:
        self._config = config
        self._admission: Admission = (
            CurveKeys(Path(config.curve_key_file))
            if config.curve_key_file
            else PlainAdmission(connection_pass(bytes.fromhex(config.key)))
        )
        self.is_encrypted = self._admission.is_encrypted
        self.poller = zmq.Poller()
        self._context = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, 4096)
        self._connection_authenticator: ConnectionAuthenticator | None = None
        self._num_refused = 0
        self._wake_lock = threading.Lock()
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # cheaper to poll than a pair of sockets
        self.poller.register(self._waker, zmq.POLLIN)
        self._is_woken = False

    def network_socket(self, kind: int, *, is_server: bool) -> "zmq.Socket[bytes]":
        """A socket that takes no message beyond the limit, and notices a connection that is dead at one end only."""
        socket = self._socket(kind)
        socket.set(zmq.MAXMSGSIZE, max(self._config.max_frame_bytes, _MIN_MESSAGE_BYTES) + _HEADROOM_BYTES)
        timeout_ms = int(max(self._config.lease_s, _MIN_HEARTBEAT_TIMEOUT_S) * 1e3)
        socket.set(zmq.HEARTBEAT_IVL, timeout_ms // 2)
        socket.set(zmq.HEARTBEAT_TIMEOUT, timeout_ms)
        socket.set(zmq.HEARTBEAT_TTL, timeout_ms)
        socket.set(zmq.HANDSHAKE_IVL, timeout_ms)
        if is_server and self._connection_authenticator is None:
            self._connection_authenticator = ConnectionAuthenticator(self._context, self._admission)
            self.poller.register(self._connection_authenticator.socket, zmq.POLLIN)
        self._admission.arm(socket, is_server=is_server)
        return socket

    def keys_changed(self) -> bool:
        """Whether there are new keys, for which `rearm` has not been called."""
        return self._admission.renew()

    def rearm(self, socket: "zmq.Socket[bytes]", *, is_server: bool) -> None:
        """Encrypt what a socket binds or connects to from now on with the newest keys."""
        self._admission.arm(socket, is_server=is_server)

    def attend(self, source: "zmq.Socket[bytes] | int") -> bool:
        """Do what a readable socket or file asks for, if it is one of those that carry no messages of peers."""
        if source == self._waker:
            with self._wake_lock:
                self._is_woken = False
                os.eventfd_read(self._waker)
            return True
        if self._connection_authenticator is not None and source is self._connection_authenticator.socket:
            self._num_refused += self._connection_authenticator.answer()
            return True
        return False

    def take_num_refused(self) -> int:
        """How many were turned away since the last call."""
        num_refused, self._num_refused = self._num_refused, 0
        return num_refused

    def wake(self) -> None:
        """Any thread; at most one wake is pending."""
        with self._wake_lock:
            if not self._is_woken and self._waker >= 0:
                self._is_woken = True
                os.eventfd_write(self._waker, 1)

    def close(self) -> None:
        """Close every socket; nothing lingers."""
        with self._wake_lock:
            if self._waker >= 0:
                os.close(self._waker)
                self._waker = -1
        self._context.destroy(linger=0)

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDHWM, HIGH_WATER_MESSAGES)
        socket.set(zmq.RCVHWM, HIGH_WATER_MESSAGES)
        return socket


# Memory for payloads that libzmq sends without a copy of its own: used again once it has left.
#
# New memory for each would cost the kernel's clearing of its pages, which takes as long as the copy into it.


MIN_BYTES = 64 << 10  # smaller ones are cheaper to copy than to track
_ROUND_BYTES = 256 << 10


class SendBuffers:
    """Gathers payloads.

    Args:
        max_bytes: that are kept for the next time.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._used: deque[tuple[mmap.mmap, zmq.MessageTracker]] = deque()  # in the order of sending

    def gather(self, payload: Sequence[memoryview]) -> "bytes | zmq.Frame":
        """One flat part that holds a copy of the payload."""
        size = sum(map(len, payload))
        if size < MIN_BYTES:
            return b"".join(payload)
        buffer = self._take(size)
        view = memoryview(buffer)[:size]
        start = 0
        for piece in payload:
            view[start : start + len(piece)] = piece
            start += len(piece)
        frame = zmq.Frame(view, track=True, copy=False)
        assert isinstance(frame.tracker, zmq.MessageTracker)
        if self._num_bytes <= self._max_bytes:
            self._used.append((buffer, frame.tracker))
        else:
            self._num_bytes -= len(buffer)
        return frame

    def _take(self, size: int) -> mmap.mmap:
        if self._used and self._used[0][1].done:
            buffer, _ = self._used.popleft()
            if len(buffer) >= size:
                return buffer
            self._num_bytes -= len(buffer)
        buffer = mmap.mmap(-1, -(-size // _ROUND_BYTES) * _ROUND_BYTES)
        self._num_bytes += len(buffer)
        return buffer
