"""Faults on the way of frames, by probability: a transport that loses some, and damages the payloads of some.

Only frames suffer; control messages pass. On a lane where the sender writes the pool itself the message behind a write
is what can be lost, and damage shows to the receiver as it would anywhere: what lies in its pool is not what the header
says. Without a digest nothing checks such a write, so that pair is refused.
"""

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence

from baton.kvtransfer.protocol.frame import decode_header, encode_header
from baton.kvtransfer.protocol.transport import Delivery, PayloadDone, Transport, TransportCounts
from baton.proto import kv_pb2


class FaultyTransport:
    """A transport as another one, with faults; see `Transport`.

    Attributes:
        num_faults: how often each kind was done.
    """

    def __init__(self, inner: Transport, faults: Mapping[str, float], seed: int) -> None:
        self.num_faults = dict.fromkeys(faults, 0)
        self.address = inner.address
        self.counts: TransportCounts = inner.counts
        self._inner = inner
        self._faults = faults
        self._random = random.Random(seed)

    def send_frame(self, peer: str, header: bytes, payload: Sequence[memoryview], lane: str) -> None:
        """Post a frame, or lose it, or post it with another payload than its check says."""
        if self._strikes("drop"):
            return
        if self._strikes("corrupt"):
            header = _damaged(header)
        self._inner.send_frame(peer, header, payload, lane)

    def _strikes(self, kind: str) -> bool:
        strikes = self._random.random() < self._faults.get(kind, 0.0)
        if strikes:
            self.num_faults[kind] += 1
        return strikes

    # The rest is the other one's.

    def send(self, peer: str, message: bytes) -> None:
        """As it does."""
        self._inner.send(peer, message)

    def unpin(self, peer: str, match: Callable[[bytes], bool]) -> None:
        """As it does."""
        self._inner.unpin(peer, match)

    def num_pinned(self, peer: str) -> int:
        """As it says."""
        return self._inner.num_pinned(peer)

    def offers(self) -> list[kv_pb2.LaneOffer]:
        """As it says."""
        return self._inner.offers()

    def open_lane(self, peer: str, offer: kv_pb2.LaneOffer) -> str:
        """As it does."""
        return self._inner.open_lane(peer, offer)

    def lane_of(self, peer: str) -> str:
        """As it says."""
        return self._inner.lane_of(peer)

    def problem(self, peer: str) -> str:
        """As it says."""
        return self._inner.problem(peer)

    def receive(self, timeout_s: float) -> list[Delivery | PayloadDone]:
        """As it does."""
        return self._inner.receive(timeout_s)

    def wake(self) -> None:
        """As it does."""
        self._inner.wake()

    def drop(self, peer: str) -> None:
        """As it does."""
        self._inner.drop(peer)

    def close(self) -> None:
        """As it does."""
        self._inner.close()


def _damaged(data: bytes) -> bytes:
    """A header whose check fits a payload that differs by a bit."""
    header = decode_header(data)
    if header.payload_digest is not None:
        return encode_header(dataclasses.replace(header, payload_digest=header.payload_digest ^ 1))
    if header.payload_crc is not None:
        return encode_header(dataclasses.replace(header, payload_crc=header.payload_crc ^ 1))
    return data
