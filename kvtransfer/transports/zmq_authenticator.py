"""Who may send messages on ZMQ sockets: libzmq asks (ZAP, RFC 27) before it takes the first one of a connection.

Without that a stranger's messages would lie in memory before anything here sees them, and libzmq bounds neither the
parts of a message nor the connections. The proof that counts is in HELLO (`proof`); this one only keeps the memory of
a listening side to those who know the deployment's secret.
"""

import hmac
from collections.abc import Sequence
from typing import Protocol

import zmq

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
