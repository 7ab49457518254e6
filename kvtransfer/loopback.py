"""A transport inside one process, with faults on demand. Shipped for tests, Baton's and its users'.

A hub knows its members by name. `on_message`, if given, sees every message on its way and decides what arrives: it may
drop, repeat, damage or hold back.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence

from baton.kvtransfer.transport import Delivery, PayloadDone, delivery_of
from baton.proto import kv_pb2

Parts = list[bytes]
OnMessage = Callable[[str, str, Parts], list[Parts]]
MAX_QUEUED = 16_384


class LoopbackHub:
    """The network; any number of `LoopbackTransport`s join it.

    Args:
        on_message: called as (sender, receiver, parts); returns the messages that arrive instead, in order.
    """

    def __init__(self, on_message: OnMessage | None = None) -> None:
        self.on_message = on_message
        self._members: dict[str, LoopbackTransport] = {}
        self._lock = threading.Lock()

    def join(self, address: str) -> "LoopbackTransport":
        """A new member; it replaces one of the same name, as a restarted process does."""
        member = LoopbackTransport(self, address)
        with self._lock:
            self._members[address] = member
        return member

    def leave(self, member: "LoopbackTransport") -> None:
        """Take a member out; messages to it are lost from now on."""
        with self._lock:
            if self._members.get(member.address) is member:
                del self._members[member.address]

    def carry(self, sender: str, receiver: str, parts: Parts) -> None:
        """Bring a message to the receiver's queue, by way of the hook."""
        arriving = [parts] if self.on_message is None else self.on_message(sender, receiver, parts)
        with self._lock:
            member = self._members.get(receiver)
        if member is not None:
            for message in arriving:
                member.put(delivery_of(sender, message))


class LoopbackTransport:
    """One member of a hub; see `Transport`."""

    def __init__(self, hub: LoopbackHub, address: str) -> None:
        self.address = address
        self._hub = hub
        self._arrived: deque[Delivery] = deque(maxlen=MAX_QUEUED)
        self._wake = threading.Event()

    def put(self, delivery: Delivery) -> None:
        """Queue an arrival. Any thread."""
        if len(self._arrived) < MAX_QUEUED:
            self._arrived.append(delivery)
        self._wake.set()

    def send(self, peer: str, message: bytes) -> None:
        """Carry it."""
        self._hub.carry(self.address, peer, [message])

    def send_frame(self, peer: str, header: bytes, payload: Sequence[memoryview], lane: str) -> None:
        """Carry the header and a copy of the payload."""
        self._hub.carry(self.address, peer, [header, b"".join(payload)])

    def unpin(self, peer: str, match: Callable[[bytes], bool]) -> None:
        """Payloads are copies."""

    def offers(self) -> list[kv_pb2.LaneOffer]:
        """None: payloads are in the messages."""
        return []

    def open_lane(self, peer: str, offer: kv_pb2.LaneOffer) -> str:
        """There is none."""
        return f"no lane {offer.lane}"

    def problem(self, peer: str) -> str:
        """Every name may join later."""
        return ""

    def receive(self, timeout_s: float) -> list[Delivery | PayloadDone]:
        """What arrived so far."""
        if not self._arrived:
            self._wake.wait(timeout_s)
        self._wake.clear()
        deliveries: list[Delivery | PayloadDone] = []
        while self._arrived:
            deliveries.append(self._arrived.popleft())
        return deliveries

    def wake(self) -> None:
        """End the wait."""
        self._wake.set()

    def drop(self, peer: str) -> None:
        """There is nothing to close."""

    def close(self) -> None:
        """Leave the hub."""
        self._hub.leave(self)
