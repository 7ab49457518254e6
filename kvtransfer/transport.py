"""The seam between the hand-off and whatever moves bytes: messages of a few parts, to and from named peers.

A transport promises little: a message arrives whole or not at all, perhaps late, twice or out of order. The protocol
copes. It refuses to block on a dead peer, and to know what a message means.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.kvtransfer.frame import Bytes


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message that arrived.

    Attributes:
        peer: the name to answer to. On the side that connects, the address; on the side that listens, an opaque name.
        parts: memory that stays as it is while the delivery is referenced.
    """

    peer: str
    parts: Sequence[Bytes]


class Transport(Protocol):
    """Driven by exactly one thread; only `wake` may be called from others.

    Attributes:
        address: where peers reach this side; empty on a side that only connects.
    """

    address: str

    def send(self, peer: str, parts: Sequence[Bytes]) -> None:
        """Post a message; it is lost if the peer is gone or its queue is full. Parts must not change afterwards."""
        ...

    def problem(self, peer: str) -> str:
        """Why `peer` can never be talked to, as one sentence; empty if it may be."""
        ...

    def receive(self, timeout_s: float) -> list[Delivery]:
        """What arrived; waits for the first at most `timeout_s`, and not at all after a `wake`."""
        ...

    def wake(self) -> None:
        """Make the `receive` in progress, or the next one, return soon."""
        ...

    def drop(self, peer: str) -> None:
        """Close what leads to a peer that is no longer talked to."""
        ...

    def close(self) -> None:
        """Give sockets and threads back. What was not sent yet is lost."""
        ...
