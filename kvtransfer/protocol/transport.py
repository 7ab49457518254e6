"""The interface between the hand-off and what moves bytes: a control channel, and data paths that carry payloads.

A transport promises little: a message arrives whole or not at all, perhaps late, twice or out of order, and a payload
may be cut off. The protocol handles all of these. A transport never blocks on a dead peer, keeps only bounded memory
for each peer, and does not know what a message means.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.kvtransfer.protocol.frame import HEADER_BYTES, Bytes
from baton.proto import kv_pb2


class Payload(Protocol):
    """The payload of a frame that arrived; valid until it is read or discarded.

    The receiver must call `read_into` or `discard` soon: until then nothing more is read from the same connection.
    """

    @property
    def num_bytes(self) -> int:
        """Size of the payload."""
        ...

    def read_into(self, pieces: Sequence[memoryview]) -> bool:
        """Read it into `pieces`, whose total size matches. True: it is there. False: `PayloadDone` follows."""
        ...

    def discard(self) -> None:
        """Drop the payload, also while it is being read. After this, none of it is written anywhere."""
        ...


class MemoryPayload:
    """A payload that arrived within a message."""

    def __init__(self, data: Bytes) -> None:
        self._data: memoryview | None = memoryview(data)
        self.num_bytes = len(data)

    def read_into(self, pieces: Sequence[memoryview]) -> bool:
        """Copy the payload into `pieces`."""
        assert self._data is not None, "a payload is read once"
        start = 0
        for piece in pieces:
            piece[:] = self._data[start : start + len(piece)]
            start += len(piece)
        assert start == self.num_bytes
        self._data = None
        return True

    def discard(self) -> None:
        """Drop the reference to the message."""
        self._data = None


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message that arrived: a control message, or a frame's header and payload.

    Attributes:
        peer: the name to reply to. On the connecting side it is the address; on the listening side, an opaque name.
        control: a control message; its memory does not change while the delivery is referenced.
        header: a frame's header; of the right size, otherwise not checked.
        payload: a frame's payload; None if the header says that it is already in the pool.
    """

    peer: str
    control: Bytes | None = None
    header: Bytes | None = None
    payload: Payload | None = None


@dataclass(frozen=True, slots=True)
class PayloadDone:
    """The end of a payload that was being read: `ok`, or never complete because its connection ended.

    Never sent for a payload that was discarded.
    """

    payload: Payload
    ok: bool


@dataclass(slots=True)
class TransportCounts:
    """Counters of faults, and of how payloads travelled. They only grow.

    Attributes:
        messages_lost: messages posted here and dropped because the peer was gone or its queue full.
        messages_refused: messages that arrived in no format that this transport knows.
        connections_refused: wrong key or proof, unknown peer, bad header, too many, or too slow to prove themselves.
        payloads_cut: frames whose connection ended before their payload.
        data_paths_failed: data paths that could not be opened, or broke; payloads then travel inline.
        frames_fallen_back: frames that were meant for another data path and went inline.
        frames_dropped: frames dropped unsent because their memory was reclaimed or their connection broke.
    """

    messages_lost: int = 0
    messages_refused: int = 0
    connections_refused: int = 0
    payloads_cut: int = 0
    data_paths_failed: int = 0
    frames_fallen_back: int = 0
    frames_dropped: int = 0


class Transport(Protocol):
    """A transport endpoint, driven by exactly one thread; other threads may call only `wake`.

    Attributes:
        address: where peers reach this side; empty on a side that only connects.
        counts: its `TransportCounts`.
    """

    address: str
    counts: TransportCounts

    def send(self, peer: str, message: bytes) -> None:
        """Post a control message; it is lost if the peer is gone or its queue is full."""
        ...

    def send_frame(self, peer: str, header: bytes, payload: Sequence[memoryview], data_path: str) -> None:
        """Post a frame. The payload's memory is read until the frame has been sent; a written frame has no payload.

        If `data_path` is not open to that peer, or broke, the payload goes inline. Headers of written frames may be
        held back and batched until the next `receive` or `send`.
        """
        ...

    def unpin(self, peer: str, match: Callable[[bytes], bool]) -> None:
        """Stop reading the memory of frames whose headers match: drop those not begun, copy one that is half sent."""
        ...

    def num_pinned(self, peer: str) -> int:
        """Return the number of frames whose memory may still be read."""
        ...

    def offers(self) -> list[kv_pb2.DataPathOffer]:
        """Return the data paths, besides inline, that a listening side serves itself."""
        ...

    def open_data_path(self, peer: str, offer: kv_pb2.DataPathOffer) -> str:
        """Open a data path that a peer offered. Return why that failed, or empty. Never waits for the peer."""
        ...

    def data_path_of(self, peer: str) -> str:
        """Return the data path that a frame posted now would actually take."""
        ...

    def problem(self, peer: str) -> str:
        """Return why this side can never communicate with `peer`, as one sentence; empty if it can."""
        ...

    def receive(self, timeout_s: float) -> list[Delivery | PayloadDone]:
        """Return what arrived, waiting at most `timeout_s` for the first, or not at all after `wake`. Also sends."""
        ...

    def wake(self) -> None:
        """Make the `receive` in progress, or the next one, return soon."""
        ...

    def welcome(self, peer: str) -> None:
        """Keep a peer's connections beyond a lease: it has proved its identity to this listening side."""
        ...

    def drop(self, peer: str) -> None:
        """Close the connections to a peer that is not used any more. Its payload memory is not read any more."""
        ...

    def close(self) -> None:
        """Release sockets and threads. Unsent messages are lost, and no payload memory is read or written any more."""
        ...


def deliveries_of(peer: str, parts: Sequence[Bytes]) -> list[Delivery]:
    """Parse a multipart message: one part is a control message; two are a frame, or several that are already written.

    Return an empty list for anything else.
    """
    if len(parts) == 1:
        return [Delivery(peer, control=parts[0])]
    if len(parts) != 2 or not len(parts[0]) or len(parts[0]) % HEADER_BYTES:
        return []
    headers = [parts[0][start : start + HEADER_BYTES] for start in range(0, len(parts[0]), HEADER_BYTES)]
    if not len(parts[1]):
        return [Delivery(peer, header=header) for header in headers]
    return [Delivery(peer, header=headers[0], payload=MemoryPayload(parts[1]))] if len(headers) == 1 else []
