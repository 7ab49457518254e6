"""Who may send messages on ZMQ sockets: libzmq asks (ZAP, RFC 27) before it takes the first one of a connection.

Without that a stranger's messages would lie in memory before anything here sees them, and libzmq bounds neither the
parts of a message nor the connections. The proof that counts is in HELLO (`proof`); this one only keeps the memory of
a listening side to those who know the deployment's secret.
"""

import hmac
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import zmq
import zmq.auth
import zmq.utils.z85

from baton.core.errors import ConfigInvalid
from baton.core.files import file_state

_ADDRESS = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_MAX_REQUESTS = 64  # in one turn
_USER = "baton"


class Admission(Protocol):
    """What sockets show, and whom they admit."""

    is_encrypted: bool

    def renew(self) -> bool:
        """Whether connections have to be made anew."""
        ...

    def arm(self, socket: "zmq.Socket[bytes]", *, is_server: bool) -> None:
        """Set what a socket shows or asks for when it binds or connects from now on."""
        ...

    def admits(self, mechanism: bytes, credentials: Sequence[bytes]) -> bool:
        """Whether a connection may send messages."""
        ...


class PlainAdmission:
    """A password made from the deployment's secret, in clear as everything else on these connections.

    Args:
        password: of the deployment (`proof.connection_pass`).
    """

    is_encrypted = False

    def __init__(self, password: str) -> None:
        self._password = password

    def renew(self) -> bool:
        """It never changes."""
        return False

    def arm(self, socket: "zmq.Socket[bytes]", *, is_server: bool) -> None:
        """See `Admission`."""
        if is_server:
            socket.set(zmq.PLAIN_SERVER, 1)
        else:
            socket.set(zmq.PLAIN_USERNAME, _USER.encode())
            socket.set(zmq.PLAIN_PASSWORD, self._password.encode())

    def admits(self, mechanism: bytes, credentials: Sequence[bytes]) -> bool:
        """See `Admission`."""
        if mechanism != b"PLAIN" or len(credentials) != 2:
            return False
        return hmac.compare_digest(credentials[1], self._password.encode())


class ConnectionAuthenticator:
    """Answers libzmq; `answer` is to be called when its socket is readable.

    Args:
        context: of the sockets it answers for.
        admission: whom to admit.

    Attributes:
        socket: to be polled.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", admission: Admission) -> None:
        self._admission = admission
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.socket.set(zmq.LINGER, 0)
        self.socket.bind(_ADDRESS)

    def answer(self) -> int:
        """Answer what was asked; how many were turned away."""
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


# CURVE on ZMQ sockets: everything is encrypted, and only holders of the deployment's key get in.
#
# One key pair serves a deployment: every worker has the file, a listening side admits no client with another key. The
# raw lane knows no encryption, so it is not to be had together with this. A file that changes is read again:
# connections are then made anew, those of a host whose file is still the old one wait until it has the new one, and
# what was lost on the way is asked for again.


CHECK_S = 0.5  # the file is looked at no more often

log = logging.getLogger(__name__)


class CurveKeys:
    """The key pair of a deployment, as `zmq.auth.create_certificates` writes it.

    Args:
        path: of the file with the secret key.

    Raises:
        ConfigInvalid: it holds no key pair, or this libzmq knows no CURVE.
    """

    is_encrypted = True

    def __init__(self, path: Path) -> None:
        if not zmq.has("curve"):
            raise ConfigInvalid(
                "curve_key_file is set, but this libzmq was built without CURVE", keys=["curve_key_file"]
            )
        self._state = file_state(path)  # before it is read: what replaces it meanwhile is another one
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
        """Whether the file holds another key pair than when it was last looked at; then that one is in use.

        It is looked at no more often than every CHECK_S. What cannot be used is logged once and not taken.
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
        """Holders of the key."""
        return mechanism == b"CURVE" and list(credentials) == [zmq.utils.z85.decode(self._public)]
