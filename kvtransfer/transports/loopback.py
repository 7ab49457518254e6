"""A transport inside one process, with faults on demand. Shipped for tests, Baton's and its users'.

A hub knows its members by name. `on_message`, if given, sees every message in transit and decides what arrives: it may
drop, repeat, damage or delay it; `Faults` does so at random. A hub can also deliver payloads late and in parts, as
sockets do.
"""

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence

from baton.kvtransfer.protocol.frame import Bytes
from baton.kvtransfer.protocol.transport import Delivery, MemoryPayload, PayloadDone, TransportCounts, deliveries_of
from baton.proto import kv_pb2

Parts = list[bytes]
OnMessage = Callable[[str, str, Parts], list[Parts]]
OnPayload = Callable[[str, str, int], int]
MAX_QUEUED = 16_384


class LoopbackHub:
    """The network; any number of `LoopbackTransport`s join it.

    Args:
        on_message: called as (sender, receiver, parts); returns the messages that arrive instead, in order.
        on_payload: called as (sender, receiver, num_bytes) for each payload that is read; returns how many of its bytes
            arrive before its connection ends, and they arrive later. Without it, payloads arrive at once.
    """

    def __init__(self, on_message: OnMessage | None = None, on_payload: OnPayload | None = None) -> None:
        self.on_message = on_message
        self.on_payload = on_payload
        self._members: dict[str, LoopbackTransport] = {}
        self._lock = threading.Lock()

    def join(self, address: str) -> "LoopbackTransport":
        """Add a member; it replaces one of the same name, as a restarted process does."""
        member = LoopbackTransport(self, address)
        with self._lock:
            self._members[address] = member
        return member

    def leave(self, member: "LoopbackTransport") -> None:
        """Remove a member; messages to it are lost from now on."""
        with self._lock:
            if self._members.get(member.address) is member:
                del self._members[member.address]

    def carry(self, sender: str, receiver: str, parts: Parts) -> bool:
        """Put a message into the receiver's queue, by way of the hook; False if no member has that name."""
        arriving = [parts] if self.on_message is None else self.on_message(sender, receiver, parts)
        with self._lock:
            member = self._members.get(receiver)
        if member is None:
            return False
        for message in arriving:
            member.put(sender, message)
        return True


class LoopbackTransport:
    """One member of a hub; see `Transport`."""

    def __init__(self, hub: LoopbackHub, address: str) -> None:
        self.address = address
        self.counts = TransportCounts()
        self._hub = hub
        self._arrived: deque[tuple[str, Parts]] = deque()
        self._late: deque[_LatePayload] = deque()
        self._wake = threading.Event()

    def put(self, sender: str, parts: Parts) -> None:
        """Queue an arrival. Any thread may call this."""
        if len(self._arrived) < MAX_QUEUED:
            self._arrived.append((sender, parts))
        else:
            self.counts.messages_lost += 1
        self._wake.set()

    def send(self, peer: str, message: bytes) -> None:
        """Carry a control message."""
        self._carry(peer, [bytes(message)])

    def send_frame(self, peer: str, header: bytes, payload: Sequence[memoryview], data_path: str) -> None:
        """Carry the header and a copy of the payload."""
        self._carry(peer, [bytes(header), b"".join(payload)])

    def unpin(self, peer: str, match: Callable[[bytes], bool]) -> None:
        """Do nothing: payloads are copies."""

    def num_pinned(self, peer: str) -> int:
        """Return 0: payloads are copies."""
        return 0

    def offers(self) -> list[kv_pb2.DataPathOffer]:
        """Return no offers: payloads are in the messages."""
        return []

    def open_data_path(self, peer: str, offer: kv_pb2.DataPathOffer) -> str:
        """Refuse: there is no data path."""
        return f"the loopback transport has no data path {offer.data_path!r}"

    def data_path_of(self, peer: str) -> str:
        """Return the only data path."""
        return "inline"

    def problem(self, peer: str) -> str:
        """Return no problem: every name may join later."""
        return ""

    def receive(self, timeout_s: float) -> list[Delivery | PayloadDone]:
        """Return what arrived so far."""
        if not self._arrived and not self._late:
            self._wake.wait(timeout_s)
        self._wake.clear()
        arrived: list[Delivery | PayloadDone] = []
        while self._late:
            late = self._late.popleft()
            if not late.is_discarded:
                is_whole = late.finish()
                self.counts.payloads_cut += not is_whole
                arrived.append(PayloadDone(late, is_whole))
        while self._arrived:
            sender, parts = self._arrived.popleft()
            deliveries = deliveries_of(sender, parts)
            self.counts.messages_refused += not deliveries
            arrived += [self._with_late_payload(delivery, parts) for delivery in deliveries]
        return arrived

    def wake(self) -> None:
        """End the wait."""
        self._wake.set()

    def welcome(self, peer: str) -> None:
        """Do nothing: there is nothing to keep."""

    def drop(self, peer: str) -> None:
        """Do nothing: there is nothing to close."""

    def close(self) -> None:
        """Leave the hub; messages in transit are lost."""
        self._hub.leave(self)
        self._arrived.clear()
        self._late.clear()

    def _carry(self, peer: str, parts: Parts) -> None:
        if not self._hub.carry(self.address, peer, parts):
            self.counts.messages_lost += 1

    def _with_late_payload(self, delivery: Delivery, parts: Parts) -> Delivery:
        if delivery.payload is None or self._hub.on_payload is None:
            return delivery
        num_arriving = self._hub.on_payload(delivery.peer, self.address, len(parts[1]))
        return Delivery(
            delivery.peer, header=delivery.header, payload=_LatePayload(parts[1], num_arriving, self._late.append)
        )


class _LatePayload:
    """A payload of which some bytes arrive now, and the others never or at the next `receive`."""

    def __init__(self, data: Bytes, num_arriving: int, on_read: Callable[["_LatePayload"], None]) -> None:
        self.num_bytes = len(data)
        self.is_discarded = False
        self._data = memoryview(data)
        self._num_arriving = num_arriving
        self._on_read = on_read
        self._pieces: Sequence[memoryview] = ()

    def read_into(self, pieces: Sequence[memoryview]) -> bool:
        """Read half of what arrives; the rest follows."""
        assert sum(len(piece) for piece in pieces) == self.num_bytes
        self._pieces = pieces
        self._fill(min(self._num_arriving, self.num_bytes) // 2)
        self._on_read(self)
        return False

    def discard(self) -> None:
        """Write nothing any more."""
        self.is_discarded = True
        self._pieces = ()

    def finish(self) -> bool:
        """Write what arrives; return whether it is complete."""
        if self._num_arriving >= self.num_bytes:
            return MemoryPayload(self._data).read_into(self._pieces)
        self._fill(self._num_arriving)
        return False

    def _fill(self, num_bytes: int) -> None:
        start = 0
        for piece in self._pieces:
            stop = min(start + len(piece), num_bytes)
            if stop > start:
                piece[: stop - start] = self._data[start:stop]
            start += len(piece)


class Faults:
    """Random faults, to be a hub's `on_message` and `on_payload`. The same seed gives the same faults.

    Args:
        seed: random seed.
        drop: probability that a message is lost.
        repeat: probability that it arrives twice.
        flip: probability that one of its bits is wrong.
        truncate: probability that its last part lacks some bytes.
        hold: probability that the next one overtakes it.
        cut: probability that a payload's connection ends before it.
    """

    def __init__(
        self,
        seed: int,
        *,
        drop: float = 0.0,
        repeat: float = 0.0,
        flip: float = 0.0,
        truncate: float = 0.0,
        hold: float = 0.0,
        cut: float = 0.0,
    ) -> None:
        self.num_faults = 0
        self._chances = {"drop": drop, "repeat": repeat, "flip": flip, "truncate": truncate, "hold": hold, "cut": cut}
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._held: list[tuple[str, str, Parts]] = []
        self._cut_pairs: set[frozenset[str]] = set()

    def partition(self, one: str, other: str) -> None:
        """Lose everything between two members from now on."""
        self._cut_pairs.add(frozenset((one, other)))

    def heal(self) -> None:
        """End every partition."""
        self._cut_pairs.clear()

    def on_message(self, sender: str, receiver: str, parts: Parts) -> list[Parts]:
        """See `LoopbackHub`."""
        with self._lock:
            held = [entry for entry in self._held if entry[:2] == (sender, receiver)]
            self._held = [entry for entry in self._held if entry[:2] != (sender, receiver)]
            overtaken = [message for _, _, message in held]
            if frozenset((sender, receiver)) in self._cut_pairs:
                return []
            if self._strikes("drop"):
                return overtaken
            if self._strikes("hold"):
                self._held.append((sender, receiver, parts))
                return overtaken
            if self._strikes("flip"):
                parts = self._flipped(parts)
            if self._strikes("truncate"):
                parts = [*parts[:-1], parts[-1][: self._random.randrange(max(1, len(parts[-1])))]]
            copies = 2 if self._strikes("repeat") else 1
            return [parts] * copies + overtaken

    def on_payload(self, sender: str, receiver: str, num_bytes: int) -> int:
        """See `LoopbackHub`."""
        with self._lock:
            return self._random.randrange(num_bytes) if self._strikes("cut") else num_bytes

    def _strikes(self, kind: str) -> bool:
        is_hit = self._random.random() < self._chances[kind]
        self.num_faults += is_hit
        return is_hit

    def _flipped(self, parts: Parts) -> Parts:
        index = self._random.choice([index for index, part in enumerate(parts) if part] or [0])
        damaged = bytearray(parts[index])
        if damaged:
            damaged[self._random.randrange(len(damaged))] ^= 1 << self._random.randrange(8)
        return [*parts[:index], bytes(damaged), *parts[index + 1 :]]
