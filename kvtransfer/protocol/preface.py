"""The preface of a raw connection: both sides prove that they belong to one deployment. It does no I/O.

The accepting side sends a challenge. The connecting side answers with a number of its own, the name of its control
channel and a proof. The accepting side replies with its proof, and frames may follow. Challenge and number are random
and new on every connection. A proof is an HMAC of the listener's id and of every message so far, keyed with the secret
that the workers of a deployment share (`protocol.proof`). So a message that was read on the network is worthless on any
other connection, and the secret is never sent.

Each side takes a bounded number of bytes, and refuses at the first that cannot be right. The frames that follow are not
authenticated: an attacker who can insert packets into the connection can still change them.
"""

import hmac
import struct
from typing import Final

from baton.core.errors import ProtocolError, Unauthenticated
from baton.kvtransfer.protocol.proof import NUMBER_BYTES, PROOF_BYTES, KvProofs

MAGIC: Final = b"KVR2"
READY: Final = MAGIC + b" ok\n"
LISTENER_ID_BYTES: Final = 16
MAX_NAME_BYTES: Final = 255  # of a ZMQ routing id
_CHALLENGE: Final = struct.Struct(f"<{len(MAGIC)}s{NUMBER_BYTES}s")
_CLAIM: Final = struct.Struct(f"<{len(MAGIC)}s{NUMBER_BYTES}sB{MAX_NAME_BYTES}s")  # the answer without its proof
CHALLENGE_BYTES: Final = _CHALLENGE.size
ANSWER_BYTES: Final = _CLAIM.size + PROOF_BYTES
ACCEPTANCE_BYTES: Final = len(READY) + PROOF_BYTES
_CONNECT, _ACCEPT = b"connect", b"accept"  # labels of the two proofs, so that neither is valid as the other


class _Incoming:
    """Collects one message of known size that begins with known bytes."""

    def __init__(self, size: int, start: bytes) -> None:
        self._size = size
        self._start = start
        self._data = bytearray()

    @property
    def num_wanted(self) -> int:
        """Number of bytes that it still lacks."""
        return self._size - len(self._data)

    def take(self, data: bytes) -> bytes:
        """Add bytes; return the message once it is complete, else nothing.

        Raises:
            ProtocolError: it is another message.
        """
        assert len(data) <= self.num_wanted, "no more is read than the preface has"
        self._data += data
        if not self._start.startswith(self._data[: len(self._start)]):
            raise ProtocolError(f"a raw connection that does not speak {MAGIC.decode()}")
        return b"" if self.num_wanted else bytes(self._data)

    def shut(self) -> None:
        """Want nothing more."""
        self._size = len(self._data)


class AcceptingPreface:
    """The preface on the listening side.

    Args:
        proofs: proofs of the deployment.
        listener_id: id of this incarnation of the listener, which its offer names.
        number: NUMBER_BYTES random bytes, never used before.

    Attributes:
        challenge: the message to send first.
        name: name of the control channel that the other side has proved to speak for; empty before.
    """

    def __init__(self, proofs: KvProofs, listener_id: bytes, number: bytes) -> None:
        assert len(listener_id) == LISTENER_ID_BYTES
        self.challenge = _CHALLENGE.pack(MAGIC, number)
        self.name = b""
        self._proofs = proofs
        self._listener_id = listener_id
        self._answer = _Incoming(ANSWER_BYTES, MAGIC)

    @property
    def num_wanted(self) -> int:
        """The most bytes to read next; 0 once it is decided."""
        return self._answer.num_wanted

    def take(self, data: bytes) -> bytes:
        """Take what the other side has sent; return the acceptance once it has proved itself, else nothing.

        Raises:
            ProtocolError: it is no answer of this version.
            Unauthenticated: its proof is not that of the deployment for this connection.
        """
        try:
            answer = self._answer.take(data)
            return self._accept(answer) if answer else b""
        except (ProtocolError, Unauthenticated):
            self._answer.shut()
            raise

    def _accept(self, answer: bytes) -> bytes:
        claim, proof = answer[: _CLAIM.size], answer[_CLAIM.size :]
        said = (self._listener_id, self.challenge, claim)
        if not hmac.compare_digest(proof, self._proofs.connection_proof(_CONNECT, *said)):
            raise Unauthenticated("a raw connection that does not prove the deployment's secret", reason="unknown")
        _, _, name_len, name = _CLAIM.unpack(claim)
        if not name_len:
            raise ProtocolError("a raw connection without a name")
        self.name = name[:name_len]
        return READY + self._proofs.connection_proof(_ACCEPT, *said)


class ConnectingPreface:
    """The preface on the connecting side.

    Args:
        proofs: proofs of the deployment.
        listener_id: id of the listener, from its offer.
        name: name of this side's control channel at the other side.
        number: NUMBER_BYTES random bytes, never used before.

    Attributes:
        is_accepted: whether the other side has proved itself and accepts frames.
    """

    def __init__(self, proofs: KvProofs, listener_id: bytes, name: bytes, number: bytes) -> None:
        assert len(listener_id) == LISTENER_ID_BYTES and 0 < len(name) <= MAX_NAME_BYTES
        self.is_accepted = False
        self._proofs = proofs
        self._listener_id = listener_id
        self._claim = _CLAIM.pack(MAGIC, number, len(name), name)
        self._said: tuple[bytes, ...] = ()  # what the proofs cover; empty before the challenge
        self._incoming = _Incoming(CHALLENGE_BYTES, MAGIC)

    @property
    def num_wanted(self) -> int:
        """The most bytes to read next; 0 once it is decided."""
        return self._incoming.num_wanted

    def take(self, data: bytes) -> bytes:
        """Take what the other side has sent; return the answer once the challenge is complete, else nothing.

        Raises:
            ProtocolError: it is no message of this version.
            Unauthenticated: its proof is not that of the deployment for this connection.
        """
        try:
            message = self._incoming.take(data)
            if not message:
                return b""
            if not self._said:
                return self._answer(message)
            self._check(message)
        except (ProtocolError, Unauthenticated):
            self._incoming.shut()
            raise
        self.is_accepted = True
        return b""

    def _answer(self, challenge: bytes) -> bytes:
        self._said = (self._listener_id, challenge, self._claim)
        self._incoming = _Incoming(ACCEPTANCE_BYTES, READY)
        return self._claim + self._proofs.connection_proof(_CONNECT, *self._said)

    def _check(self, acceptance: bytes) -> None:
        proof = acceptance[len(READY) :]
        if not hmac.compare_digest(proof, self._proofs.connection_proof(_ACCEPT, *self._said)):
            raise Unauthenticated("the listener does not prove the deployment's secret", reason="unknown")
