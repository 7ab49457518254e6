"""Mutual proof, in HELLO, that both sides of a hand-off belong to one deployment. It does no I/O.

A HELLO holds a number of its own and the challenge that the decode worker gave to this connection. Its proof is a
digest of the whole message, keyed with the secret that the workers of a deployment share. The HELLO_REPLY proves itself
the same way, together with the HELLO's number.

The first HELLO has no challenge. The reply to it is a challenge and nothing else, and the decode worker keeps no state
for it. So neither an epoch, nor an address, nor anything overheard on another connection lets a stranger in, and a
proof made by one side is not valid for the other. A challenge expires, and a HELLO that was accepted is not accepted
again.
"""

import hashlib
import hmac
import struct
from typing import Final

from baton.proto import kv_pb2

CHALLENGE_S: Final = 30.0  # the previous challenge stays valid, so that one given out just before the change works
NUMBER_BYTES: Final = 16
PROOF_BYTES: Final = 32
_U64: Final = struct.Struct("<Q")


def connection_pass(key: bytes) -> str:
    """Return the password that a ZMQ connection or a gRPC stream shows before any of its data is read or kept.

    It bounds the resources that a stranger can use. It does not authenticate: an eavesdropper can replay it, and HELLO
    is what admits a peer.

    Args:
        key: see `KvProofs`.
    """
    return hmac.digest(key, b"baton kv connection", hashlib.sha256).hex()


class KvProofs:
    """Makes and checks proofs, for both sides.

    Args:
        key: the secret that the workers of a deployment share.
    """

    def __init__(self, key: bytes) -> None:
        assert key, "there is no hand-off without a key"
        self._key = key

    # Both sides of a raw connection

    def connection_proof(self, label: bytes, *said: bytes) -> bytes:
        """Return the proof of one side of a connection, over all that was said on it (`protocol.preface`)."""
        return self._mac(label, *said)

    # The prefill worker's side

    def number(self, address: str, epoch: int, sent_ns: int) -> bytes:
        """Return the number of one HELLO: unique to it, and not predictable by another process."""
        return self._mac(b"number", _U64.pack(epoch), _U64.pack(sent_ns), address.encode())[:NUMBER_BYTES]

    def prove_hello(self, hello: kv_pb2.Hello) -> None:
        """Add the proof to a HELLO."""
        hello.proof = self._of_hello(hello)

    def is_proved(self, reply: kv_pb2.HelloReply, number: bytes) -> bool:
        """Return whether this is the reply of a decode worker of the deployment to the HELLO with this number."""
        return hmac.compare_digest(reply.proof, self._of_reply(reply, number))

    # The decode worker's side

    def challenge(self, epoch: int, peer: str, now_s: float) -> bytes:
        """Return the challenge that a connection to this incarnation must answer now."""
        return self._challenge(epoch, peer, int(now_s // CHALLENGE_S))

    def has_challenge(self, hello: kv_pb2.Hello, epoch: int, peer: str, now_s: float) -> bool:
        """Return whether a HELLO answers a recent challenge to this connection."""
        period = int(now_s // CHALLENGE_S)
        given = [self._challenge(epoch, peer, at) for at in (period, period - 1)]
        return any([hmac.compare_digest(hello.challenge, each) for each in given])

    def knows_key(self, hello: kv_pb2.Hello) -> bool:
        """Return whether a HELLO was made by a worker of the deployment."""
        return len(hello.number) == NUMBER_BYTES and hmac.compare_digest(hello.proof, self._of_hello(hello))

    def prove_reply(self, reply: kv_pb2.HelloReply, number: bytes) -> None:
        """Add the proof to a HELLO_REPLY."""
        reply.proof = self._of_reply(reply, number)

    def _challenge(self, epoch: int, peer: str, period: int) -> bytes:
        place = _U64.pack(epoch) + struct.pack("<q", period)
        return self._mac(b"challenge", place, peer.encode())[:NUMBER_BYTES]

    def _of_hello(self, hello: kv_pb2.Hello) -> bytes:
        bare = kv_pb2.Hello()
        bare.CopyFrom(hello)
        bare.ClearField("proof")
        return self._mac(b"hello", bare.SerializeToString(deterministic=True))

    def _of_reply(self, reply: kv_pb2.HelloReply, number: bytes) -> bytes:
        bare = kv_pb2.HelloReply()
        bare.CopyFrom(reply)
        bare.ClearField("proof")
        return self._mac(b"reply", number, bare.SerializeToString(deterministic=True))

    def _mac(self, label: bytes, *parts: bytes) -> bytes:
        joined = b"".join(_U64.pack(len(part)) + part for part in (b"baton kv " + label, *parts))
        return hmac.digest(self._key, joined, hashlib.sha256)
