"""The seam between the hand-off and whatever moves bytes: a control channel, and data paths that carry payloads.

A transport promises little: a message arrives whole or not at all, perhaps late, twice or out of order, and a payload
may end in the middle. The protocol copes. It refuses to block on a dead peer, to keep more than bounded memory for one,
and to know what a message means.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.kvtransfer.protocol.frame import HEADER_BYTES, Bytes
from baton.proto import kv_pb2


class Payload(Protocol):
    """The payload of a frame that arrived; it lives until it was read or discarded.

    One of the two must be called soon: until then nothing more is taken from the connection it came by.
    """

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
        self._data: memoryview | None = memoryview(data)
        self.num_bytes = len(data)

    def read_into(self, pieces: Sequence[memoryview]) -> bool:
        """Copy it."""
        assert self._data is not None, "a payload is read once"
        start = 0
        for piece in pieces:
            piece[:] = self._data[start : start + len(piece)]
            start += len(piece)
        assert start == self.num_bytes
        self._data = None
        return True

    def discard(self) -> None:
        """Give the message back."""
        self._data = None


@dataclass(frozen=True, slots=True)
class Delivery:
    """What arrived: a control message, or a frame's header and payload.

    Attributes:
        peer: the name to answer to. On the side that connects, the address; on the side that listens, an opaque name.
        control: of a control message; memory that stays as it is while the delivery is referenced.
        header: of a frame; of the right size, and otherwise not looked at.
        payload: of a frame, unless it has none, because its header says that it is in the pool already.
    """

    peer: str
    control: Bytes | None = None
    header: Bytes | None = None
    payload: Payload | None = None


@dataclass(frozen=True, slots=True)
class PayloadDone:
    """A payload that was being read is there; or it is not, and never will be: its connection ended.

    Never sent for a payload that was discarded.
    """

    payload: Payload
    ok: bool


@dataclass(slots=True)
class TransportCounts:
    """What went wrong, and how payloads travelled. They only grow.

    Attributes:
        messages_lost: posted, and thrown away here: the peer was gone or its queue full.
        messages_refused: arrived, and fit no form that this transport speaks.
        connections_refused: wrong key or token, unknown peer, bad header, too many, or too slow to say who they are.
        payloads_cut: frames whose connection ended before their payload.
        data_paths_failed: data paths that could not be opened, or broke; payloads then travel inline.
        frames_fallen_back: frames for another data path that went inline.
        frames_dropped: frames that were dropped unsent, because their memory is wanted back or their connection broke.
    """

    messages_lost: int = 0
    messages_refused: int = 0
    connections_refused: int = 0
    payloads_cut: int = 0
    data_paths_failed: int = 0
    frames_fallen_back: int = 0
    frames_dropped: int = 0


class Transport(Protocol):
    """Driven by exactly one thread; only `wake` may be called from others.

    Attributes:
        address: where peers reach this side; empty on a side that only connects.
        counts: see there.
    """

    address: str
    counts: TransportCounts

    def send(self, peer: str, message: bytes) -> None:
        """Post a control message; it is lost if the peer is gone or its queue is full."""
        ...

    def send_frame(self, peer: str, header: bytes, payload: Sequence[memoryview], data_path: str) -> None:
        """Post a frame. Its payload's memory is read until it has left; there is none if it is written already.

        If `data_path` is not open to that peer, or broke, the payload goes inline. The header of a written frame may
        wait for others until the next `receive` or `send`.
        """
        ...

    def unpin(self, peer: str, match: Callable[[bytes], bool]) -> None:
        """Read no memory any more of frames whose headers match: drop those not begun, copy the one half sent."""
        ...

    def num_pinned(self, peer: str) -> int:
        """Frames whose memory may still be read."""
        ...

    def offers(self) -> list[kv_pb2.DataPathOffer]:
        """Data paths of its own that a listening side serves, beside inline."""
        ...

    def open_data_path(self, peer: str, offer: kv_pb2.DataPathOffer) -> str:
        """Open a data path that a peer offered; empty, or why that is not possible. Never waits for the peer."""
        ...

    def data_path_of(self, peer: str) -> str:
        """The data path that a frame posted now would really take."""
        ...

    def problem(self, peer: str) -> str:
        """Why `peer` can never be talked to, as one sentence; empty if it may be."""
        ...

    def receive(self, timeout_s: float) -> list[Delivery | PayloadDone]:
        """What arrived; waits for the first at most `timeout_s`, and not at all after a `wake`. Sends, too."""
        ...

    def wake(self) -> None:
        """Make the `receive` in progress, or the next one, return soon."""
        ...

    def welcome(self, peer: str) -> None:
        """A peer of the listening side has proved who it is: its connections are kept beyond a lease."""
        ...

    def drop(self, peer: str) -> None:
        """Close what leads to a peer that is no longer talked to. Its payload memory is not read any more."""
        ...

    def close(self) -> None:
        """Give sockets and threads back. What was not sent yet is lost, and no payload memory is read or written."""
        ...


def deliveries_of(peer: str, parts: Sequence[Bytes]) -> list[Delivery]:
    """What a message is: of one part a control message, of two a frame, or several that are written already.

    Empty if it is none of these.
    """
    if len(parts) == 1:
        return [Delivery(peer, control=parts[0])]
    if len(parts) != 2 or not len(parts[0]) or len(parts[0]) % HEADER_BYTES:
        return []
    headers = [parts[0][start : start + HEADER_BYTES] for start in range(0, len(parts[0]), HEADER_BYTES)]
    if not len(parts[1]):
        return [Delivery(peer, header=header) for header in headers]
    return [Delivery(peer, header=headers[0], payload=MemoryPayload(parts[1]))] if len(headers) == 1 else []
