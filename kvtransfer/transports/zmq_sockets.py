"""The ZMQ sockets of one transport, with their limits and timeouts, the waker, and the keys if there are any."""

import hmac
import logging
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import zmq
import zmq.auth
import zmq.utils.z85

from baton.core.config import KVTransferConfig
from baton.core.errors import ConfigInvalid
from baton.core.files import file_state
from baton.kvtransfer.protocol.proof import connection_pass

_ADDRESS = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_MAX_REQUESTS = 64  # in one turn
_USER = "baton"


class PeerAdmission(Protocol):
    """The credentials that sockets present, and the check of those that peers present."""

    is_encrypted: bool

    def renew(self) -> bool:
        """Return whether connections have to be reopened."""
        ...

    def arm(self, socket: "zmq.Socket[bytes]", *, is_server: bool) -> None:
        """Set what a socket presents or requires when it binds or connects from now on."""
        ...

    def admits(self, mechanism: bytes, credentials: Sequence[bytes]) -> bool:
        """Return whether a connection may send messages."""
        ...


class PlainAdmission:
    """A password derived from the deployment's secret, sent in clear like everything else on these connections.

    Args:
        password: password of the deployment (`proof.connection_pass`).
    """

    is_encrypted = False

    def __init__(self, password: str) -> None:
        self._password = password

    def renew(self) -> bool:
        """Return False: it never changes."""
        return False

    def arm(self, socket: "zmq.Socket[bytes]", *, is_server: bool) -> None:
        """See `PeerAdmission`."""
        if is_server:
            socket.set(zmq.PLAIN_SERVER, 1)
        else:
            socket.set(zmq.PLAIN_USERNAME, _USER.encode())
            socket.set(zmq.PLAIN_PASSWORD, self._password.encode())

    def admits(self, mechanism: bytes, credentials: Sequence[bytes]) -> bool:
        """See `PeerAdmission`."""
        if mechanism != b"PLAIN" or len(credentials) != 2:
            return False
        return hmac.compare_digest(credentials[1], self._password.encode())


class ConnectionAuthenticator:
    """Answers libzmq's authentication requests; call `answer` when its socket is readable.

    Args:
        context: context of the sockets that it answers for.
        admission: decides which peers to admit.

    Attributes:
        socket: socket to poll.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", admission: PeerAdmission) -> None:
        self._admission = admission
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.socket.set(zmq.LINGER, 0)
        self.socket.bind(_ADDRESS)

    def answer(self) -> int:
        """Answer pending requests; return how many connections were refused."""
        num_refused = 0
        for _ in range(_MAX_REQUESTS):
            try:
                version, number, _, _, _, mechanism, *credentials = self.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                break
            is_admitted = self._admission.admits(mechanism, credentials)
            status = (b"200", b"OK") if is_admitted else (b"400", b"not of this deployment")
            self.socket.send_multipart([_VERSION, number, *status, b"", b""])
            num_refused += not is_admitted
            assert version == _VERSION
        return num_refused


# CURVE on ZMQ sockets: everything is encrypted, and only holders of the deployment's key are admitted.
#
# One key pair serves a deployment: every worker has the file, and a listening side admits no client with another key.
# The raw data path has no encryption, so it is not available together with this. A file that changes is read again:
# connections are then reopened, those from a host that still has the old file wait until it has the new one, and what
# was lost in transit is requested again.


CHECK_S = 0.5  # the file is checked no more often

log = logging.getLogger(__name__)


class CurveKeys:
    """The key pair of a deployment, in the format of `zmq.auth.create_certificates`.

    Args:
        path: file with the secret key.

    Raises:
        ConfigInvalid: the file holds no key pair, or this libzmq has no CURVE.
    """

    is_encrypted = True

    def __init__(self, path: Path) -> None:
        if not zmq.has("curve"):
            raise ConfigInvalid(
                "curve_key_file is set, but this libzmq was built without CURVE", keys=["curve_key_file"]
            )
        self._state = file_state(path)  # before the file is read, so that a later replacement is noticed
        try:
            self._public, secret = zmq.auth.load_certificate(path)
        except (OSError, ValueError) as error:
            raise ConfigInvalid(f"curve_key_file {path}: {error}", keys=["curve_key_file"]) from error
        if secret is None:
            raise ConfigInvalid(f"curve_key_file {path} holds no secret key", keys=["curve_key_file"])
        self._secret = secret
        self._path = path
        self._checked_s = time.monotonic()

    def renew(self) -> bool:
        """Switch to the key pair in the file if it has changed; return whether it has.

        The file is checked no more often than every CHECK_S. An unusable file is logged once and not used.
        """
        now_s = time.monotonic()
        if now_s - self._checked_s < CHECK_S:
            return False
        self._checked_s = now_s
        state = file_state(self._path)
        if state == self._state:
            return False
        self._state = state
        try:
            public, secret = zmq.auth.load_certificate(self._path)
        except (OSError, ValueError):
            public, secret = self._public, None
        if secret is None:
            log.error("the changed curve_key_file %s holds no key pair; the one before stays in use", self._path)
            return False
        is_new = (public, secret) != (self._public, self._secret)
        self._public, self._secret = public, secret
        return is_new

    def arm(self, socket: "zmq.Socket[bytes]", *, is_server: bool) -> None:
        """Encrypt what a socket binds or connects to from now on."""
        socket.set(zmq.CURVE_PUBLICKEY, self._public)
        socket.set(zmq.CURVE_SECRETKEY, self._secret)
        if is_server:
            socket.set(zmq.CURVE_SERVER, 1)
        else:
            socket.set(zmq.CURVE_SERVERKEY, self._public)

    def admits(self, mechanism: bytes, credentials: Sequence[bytes]) -> bool:
        """Return whether the connection holds the key."""
        return mechanism == b"CURVE" and list(credentials) == [zmq.utils.z85.decode(self._public)]


HIGH_WATER_MESSAGES = 4096  # more than a window allows (frame.FRAME_OVERHEAD_BYTES), so that credits are the limit
_MIN_MESSAGE_BYTES = 1 << 20  # control messages must fit even where frames are small
_HEADROOM_BYTES = 64 << 10
_MIN_HEARTBEAT_TIMEOUT_S = 1.0


class ZmqSockets:
    """Makes sockets, and polls them.

    Args:
        config: limits, times and keys.

    Attributes:
        poller: polls all of them; others may register files there.
        is_encrypted: whether every network socket is encrypted.

    Raises:
        ConfigInvalid: the keys cannot be used.
    """

    def __init__(self, config: KVTransferConfig) -> None:
        self._config = config
        self._admission: PeerAdmission = (
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

    @property
    def max_message_bytes(self) -> int:
        """Maximum size of a message from a peer."""
        return max(self._config.max_frame_bytes, _MIN_MESSAGE_BYTES) + _HEADROOM_BYTES

    def network_socket(self, kind: int, *, is_server: bool) -> "zmq.Socket[bytes]":
        """Make a socket that accepts no message beyond the limit, and detects a connection that is dead at one end."""
        socket = self._socket(kind)
        socket.set(zmq.MAXMSGSIZE, self.max_message_bytes)  # per part
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
        """Return whether there are new keys, for which `rearm` has not been called."""
        return self._admission.renew()

    def rearm(self, socket: "zmq.Socket[bytes]", *, is_server: bool) -> None:
        """Encrypt what a socket binds or connects to from now on with the newest keys."""
        self._admission.arm(socket, is_server=is_server)

    def attend(self, source: "zmq.Socket[bytes] | int") -> bool:
        """Handle a readable socket or file that carries no messages of peers; return whether it is one."""
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
        """Return how many connections were refused since the last call."""
        num_refused, self._num_refused = self._num_refused, 0
        return num_refused

    def wake(self) -> None:
        """Wake the polling thread. Any thread may call this; at most one wake is pending."""
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


# Memory for payloads that libzmq sends without copying: reused once it has been sent.
#
# New memory for each payload would make the kernel clear its pages, which takes as long as the copy into it.


MIN_BYTES = 64 << 10  # smaller payloads are cheaper to copy than to track
_ROUND_BYTES = 256 << 10


class SendBuffers:
    """Gathers payloads into reused buffers.

    Args:
        max_bytes: bytes of buffers to keep for reuse.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._used: deque[tuple[mmap.mmap, zmq.MessageTracker]] = deque()  # in the order of sending

    def gather(self, payload: Sequence[memoryview]) -> "bytes | zmq.Frame":
        """Return one flat part that holds a copy of the payload."""
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
