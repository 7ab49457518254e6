"""HELLOs and answers that tests make by hand, with the proofs of the deployment that a test run is."""

import itertools

from baton.core.config import KVTransferConfig
from baton.kvtransfer.protocol.proof import KvProofs

PROOFS = KvProofs(bytes.fromhex(KVTransferConfig().key))
OTHER_PROOFS = KvProofs(b"another deployment's")
_sent_ns = itertools.count(1)


def prove(hello, d_epoch, peer, now_s=0.0, proofs=PROOFS):
    """Make a HELLO one that this incarnation of a decode worker believes, over the connection that it calls `peer`."""
    hello.sent_ns = hello.sent_ns or next(_sent_ns)
    return prove_challenge(hello, proofs.challenge(d_epoch, peer, now_s), proofs)


def prove_challenge(hello, challenge, proofs=PROOFS):
    """The same for a challenge that was heard."""
    hello.number = proofs.number("d", hello.epoch, hello.sent_ns)
    hello.challenge = challenge
    proofs.prove_hello(hello)
    return hello


def prove_reply(reply, hello, proofs=PROOFS):
    """Make it an answer that the sender of this HELLO believes."""
    proofs.prove_reply(reply, hello.number)
    return reply
