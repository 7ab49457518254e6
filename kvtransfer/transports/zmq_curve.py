"""CURVE on ZMQ sockets: everything is encrypted, and only holders of the deployment's key get in.

One key pair serves a deployment: every worker has the file, a listening side admits no client with another key. The
raw lane knows no encryption, so it is not to be had together with this. A file that changes is read again: connections
are then made anew, those of a host whose file is still the old one wait until it has the new one, and what was lost on
the way is asked for again.
"""

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import zmq
import zmq.auth
import zmq.utils.z85

from baton.core.errors import ConfigInvalid
from baton.core.file_state import file_state

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
