"""How the two sides of a hand-off prove to each other, in HELLO, that they are of one deployment. Sans I/O.

A HELLO holds a number of its own, and the challenge that the decode worker gave to this connection; its proof is a
digest of all of it, keyed by what the workers of a deployment share. The HELLO_REPLY holds the same of itself and of
that number. The first HELLO has no challenge: the answer is one, and nothing else, and nothing is kept for it. So
neither an epoch, nor an address, nor anything that was heard before on another connection lets a stranger in; and a
proof of one side is none of the other. A challenge grows old, and a HELLO that was taken is not taken again.
"""

import hashlib
import hmac
import struct
from typing import Final

from baton.proto import kv_pb2

CHALLENGE_S: Final = 30.0  # the one before is still taken, so that none is refused that was given out just now
NUMBER_BYTES: Final = 16
PROOF_BYTES: Final = 32
_U64: Final = struct.Struct("<Q")


def connection_pass(key: bytes) -> str:
    """What a connection shows before anything of it is read or kept; who reads the network can show it, too.

    It bounds what a stranger costs. What lets a peer in is its HELLO.

    Args:
        key: see `KvProofs`.
    """
    return hmac.digest(key, b"baton kv connection", hashlib.sha256).hex()


class KvProofs:
    """Makes and checks them, for both sides.

    Args:
        key: what the workers of a deployment share.
    """

    def __init__(self, key: bytes) -> None:
        assert key, "there is no hand-off without a key"
        self._key = key

    # The prefill side

    def number(self, address: str, epoch: int, sent_ns: int) -> bytes:
        """The number of one HELLO: no other process can tell it before, and no other HELLO has it."""
        return self._mac(b"number", _U64.pack(epoch), _U64.pack(sent_ns), address.encode())[:NUMBER_BYTES]

    def prove_hello(self, hello: kv_pb2.Hello) -> None:
        """Complete a HELLO."""
        hello.proof = self._of_hello(hello)

    def is_proved(self, reply: kv_pb2.HelloReply, number: bytes) -> bool:
        """Whether this is the answer of a decode worker of the deployment to the HELLO with this number."""
        return hmac.compare_digest(reply.proof, self._of_reply(reply, number))

    # The decode side

    def challenge(self, epoch: int, peer: str, now_s: float) -> bytes:
        """What a connection to this incarnation has to prove now."""
        return self._challenge(epoch, peer, int(now_s // CHALLENGE_S))

    def has_challenge(self, hello: kv_pb2.Hello, epoch: int, peer: str, now_s: float) -> bool:
        """Whether a HELLO answers what this connection was asked, not too long ago."""
        period = int(now_s // CHALLENGE_S)
        given = [self._challenge(epoch, peer, at) for at in (period, period - 1)]
        return any([hmac.compare_digest(hello.challenge, each) for each in given])

    def knows_key(self, hello: kv_pb2.Hello) -> bool:
        """Whether a HELLO was made by a worker of the deployment."""
        return len(hello.number) == NUMBER_BYTES and hmac.compare_digest(hello.proof, self._of_hello(hello))

    def prove_reply(self, reply: kv_pb2.HelloReply, number: bytes) -> None:
        """Complete an answer."""
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
