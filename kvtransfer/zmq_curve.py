"""CURVE on ZMQ sockets: everything is encrypted, and only holders of the deployment's key get in.

One key pair serves a deployment: every worker has the file, a listening side admits no client with another key. The
raw lane knows no encryption, so it is not to be had together with this.
"""

from pathlib import Path

import zmq
import zmq.auth
import zmq.utils.z85

from baton.core.errors import ConfigInvalid

_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"
_MAX_REQUESTS = 64  # in one turn


class CurveKeys:
    """The key pair of a deployment, as `zmq.auth.create_certificates` writes it.

    Args:
        path: of the file with the secret key.

    Raises:
        ConfigInvalid: it holds no key pair, or this libzmq knows no CURVE.
    """

    def __init__(self, path: Path) -> None:
        if not zmq.has("curve"):
            raise ConfigInvalid(
                "curve_key_file is set, but this libzmq was built without CURVE", keys=["curve_key_file"]
            )
        try:
            self._public, secret = zmq.auth.load_certificate(path)
        except (OSError, ValueError) as error:
            raise ConfigInvalid(f"curve_key_file {path}: {error}", keys=["curve_key_file"]) from error
        if secret is None:
            raise ConfigInvalid(f"curve_key_file {path} holds no secret key", keys=["curve_key_file"])
        self._secret = secret

    def arm(self, socket: "zmq.Socket[bytes]", *, is_server: bool) -> None:
        """Encrypt a socket that is not connected yet."""
        socket.set(zmq.CURVE_PUBLICKEY, self._public)
        socket.set(zmq.CURVE_SECRETKEY, self._secret)
        if is_server:
            socket.set(zmq.CURVE_SERVER, 1)
        else:
            socket.set(zmq.CURVE_SERVERKEY, self._public)

    def doorman(self, context: "zmq.Context[zmq.Socket[bytes]]") -> "zmq.Socket[bytes]":
        """The socket on which libzmq asks whom to admit; `answer` is to be called when it is readable."""
        socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        socket.set(zmq.LINGER, 0)
        socket.bind(_ZAP_ADDRESS)
        return socket

    def answer(self, doorman: "zmq.Socket[bytes]") -> int:
        """Answer what was asked; how many were turned away."""
        num_refused = 0
        for _ in range(_MAX_REQUESTS):
            try:
                version, number, _, _, _, mechanism, *keys = doorman.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                break
            is_ours = mechanism == b"CURVE" and keys == [zmq.utils.z85.decode(self._public)]
            status = (b"200", b"OK") if is_ours else (b"400", b"another key")
            doorman.send_multipart([_ZAP_VERSION, number, *status, b"", b""])
            num_refused += not is_ours
            assert version == _ZAP_VERSION
        return num_refused
