"""The seam between the hand-off and whatever moves bytes: a control channel, and lanes that carry payloads.

A transport promises little: a message arrives whole or not at all, perhaps late, twice or out of order. The protocol
copes. It refuses to block on a dead peer, and to know what a message means.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.kvtransfer.frame import Bytes
from baton.proto import kv_pb2


class Payload(Protocol):
    """The payload of a frame that arrived; it lives until it was read or discarded."""

    @property
    def num_bytes(self) -> int:
        """Its size."""
        ...

    def read_into(self, pieces: Sequence[memoryview]) -> bool:
        """Bring it into `pieces`, which are as large together. True: it is there. False: `PayloadDone` follows."""
        ...

    def discard(self) -> None:
        """Not wanted, or, while it is being read, no longer: after this nothing of it is written anywhere."""
        ...


class MemoryPayload:
    """A payload that came in a message."""

    def __init__(self, data: Bytes) -> None:
        self._data = memoryview(data)

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return len(self._data)

    def read_into(self, pieces: Sequence[memoryview]) -> bool:
        """Copy it."""
        start = 0
        for piece in pieces:
            piece[:] = self._data[start : start + len(piece)]
            start += len(piece)
        assert start == len(self._data)
        return True

    def discard(self) -> None:
        """The message goes with the delivery."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """What arrived: a control message, or a frame's header and payload.

    Attributes:
        peer: the name to answer to. On the side that connects, the address; on the side that listens, an opaque name.
        control: of a control message.
        header: of a frame.
        payload: of a frame, unless its header says that it is in the pool already.
    """

    peer: str
    control: Bytes | None = None
    header: Bytes | None = None
    payload: Payload | None = None


@dataclass(frozen=True, slots=True)
class PayloadDone:
    """A payload that was being read is there; or it is not, and never will be: its connection ended."""

    payload: Payload
    ok: bool


class Transport(Protocol):
    """Driven by exactly one thread; only `wake` may be called from others.

    Attributes:
        address: where peers reach this side; empty on a side that only connects.
    """

    address: str

    def send(self, peer: str, message: bytes) -> None:
        """Post a control message; it is lost if the peer is gone or its queue is full."""
        ...

    def send_frame(self, peer: str, header: bytes, payload: Sequence[memoryview], lane: str) -> None:
        """Post a frame. Its payload's memory is read until it has left; there is none if it is written already."""
        ...

    def unpin(self, peer: str, match: Callable[[bytes], bool]) -> None:
        """Read no memory any more of frames whose headers match: drop those not begun, copy the one half sent."""
        ...

    def offers(self) -> list[kv_pb2.LaneOffer]:
        """Lanes of its own that a listening side serves."""
        ...

    def open_lane(self, peer: str, offer: kv_pb2.LaneOffer) -> str:
        """Open a lane that a peer offered; empty, or why that is not possible."""
        ...

    def problem(self, peer: str) -> str:
        """Why `peer` can never be talked to, as one sentence; empty if it may be."""
        ...

    def receive(self, timeout_s: float) -> list[Delivery | PayloadDone]:
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


def delivery_of(peer: str, parts: Sequence[Bytes]) -> Delivery:
    """What a message of one part (control) or two (a frame) is."""
    if len(parts) == 1:
        return Delivery(peer, control=parts[0])
    payload = MemoryPayload(parts[1]) if len(parts[1]) else None
    return Delivery(peer, header=parts[0], payload=payload)
