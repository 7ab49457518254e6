"""Faults that hit the hand-off in a state of its protocol: what a prefill worker sends and hears is where they strike.

`FaultyTransport` stands between a PushService and its transport. At every message an `Injector` decides what goes
wrong, and counts it by the moment it hit, so that a run can show that every state of the protocol was hit.
"""

import random
import threading
import time
from collections import Counter, deque
from enum import Enum

from baton.core.errors import BatonError
from baton.core.request import AttemptKey
from baton.kvtransfer.frame import decode_header
from baton.kvtransfer.messages import parse_control
from baton.kvtransfer.transport import Delivery


class Fault(Enum):
    """What can go wrong at a message."""

    DROP = "drop"
    REPEAT = "repeat"
    DELAY = "delay"
    FLIP = "flip"  # one bit of the message, or of the payload wherever it lies
    CANCEL = "cancel"  # the client goes away
    KILL_PREFILL = "kill prefill"
    KILL_DECODE = "kill decode"
    KILL_LANDING = "kill landing"
    STOP_LANDING = "stop landing"


MESSAGE_FAULTS = (Fault.DROP, Fault.REPEAT, Fault.DELAY, Fault.FLIP)
RARE = ("send abort", "hear abort", "hear abort_ack", "hear commit_nack", "send resume", "hear have", "hear deny")
DELAY_S = 0.05


class Injector:
    """One random source for a whole run; any thread.

    Args:
        seed: of it.
        flip_rate: of frames.
        rate: of each other fault of a message, at each message; more often at rare ones.
        death_rate: of each fault that ends or stops a process, at each message.
    """

    def __init__(self, seed, *, flip_rate=1e-3, rate=1e-3, death_rate=2e-5):
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._flip_rate, self._rate, self._death_rate = flip_rate, rate, death_rate
        self.hits = Counter()  # (moment, fault)
        self.seen = Counter()  # moment
        self.orders = deque()  # (fault, attempt, side)
        self.flipped_frames = 0
        self.is_on = True

    def at(self, moment, attempt, side):
        """What goes wrong with this message; what concerns more than a message is put into `orders`."""
        with self._lock:
            self.seen[moment] += 1
            if not self.is_on:
                return None
            draw = self._random.random()
            rate = self._rate * (20 if moment in RARE else 1)
            rates = {fault: rate for fault in MESSAGE_FAULTS}
            if "frame" in moment:
                rates[Fault.FLIP] = self._flip_rate
            if attempt is not None:
                rates[Fault.CANCEL] = rate
            for fault in (Fault.KILL_PREFILL, Fault.KILL_DECODE, Fault.KILL_LANDING, Fault.STOP_LANDING):
                rates[fault] = self._death_rate * (20 if moment in RARE else 1)
            for fault, chance in rates.items():
                if draw < chance:
                    self.hits[moment, fault] += 1
                    if fault not in MESSAGE_FAULTS:
                        self.orders.append((fault, attempt, side))
                        return None
                    return fault
                draw -= chance
        return None

    def flip(self, data):
        """The same bytes but for one bit."""
        damaged = bytearray(data)
        with self._lock:
            damaged[self._random.randrange(len(damaged))] ^= 1 << self._random.randrange(8)
        return bytes(damaged)


class FaultyTransport:
    """A transport with faults; see `Transport`.

    Args:
        inner: the real one; owned from here on.
        injector: decides.
        damage: called with the header and attempt of a frame whose payload is in
            the decode worker's pool already; flips a bit there.
    """

    def __init__(self, inner, injector, damage):
        self._inner = inner
        self._injector = injector
        self._damage = damage
        self._attempts = {}  # landing id to attempt
        self._held = deque()  # (due_s, call)
        self.side = None

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def send(self, peer, message):
        kind, attempt = self._about(message)
        fault = self._injector.at(f"send {kind}", attempt, self.side)
        if fault is Fault.FLIP:
            message = self._injector.flip(message)
        if fault is Fault.DELAY:
            self._held.append((time.monotonic() + DELAY_S, lambda: self._inner.send(peer, message)))
        elif fault is not Fault.DROP:
            self._inner.send(peer, message)
        if fault is Fault.REPEAT:
            self._inner.send(peer, message)

    def send_frame(self, peer, header, payload, lane):
        what = decode_header(header)
        attempt = self._attempts.get(what.landing_id)
        fault = self._injector.at("send first frame" if what.seq == 0 else "send frame", attempt, self.side)
        if fault is Fault.FLIP:
            header, payload = self._flip(what, attempt, header, payload)
        if fault is Fault.DROP:
            return
        if fault in (Fault.DELAY, Fault.REPEAT):  # later, the source may be reused
            kept = [memoryview(b"".join(payload))] if payload else []
            self._held.append((time.monotonic() + DELAY_S, lambda: self._inner.send_frame(peer, header, kept, lane)))
            if fault is Fault.DELAY:
                return
        self._inner.send_frame(peer, header, payload, lane)

    def receive(self, timeout_s):
        while self._held and self._held[0][0] <= time.monotonic():
            self._held.popleft()[1]()
        arrived = []
        for item in self._inner.receive(timeout_s):
            if not isinstance(item, Delivery) or item.control is None:
                arrived.append(item)
                continue
            kind, attempt = self._about(item.control)
            fault = self._injector.at(f"hear {kind}", attempt, self.side)
            if fault is Fault.FLIP:
                item = Delivery(item.peer, control=self._injector.flip(item.control))
            if fault is Fault.REPEAT:
                arrived.append(item)
            if fault not in (Fault.DROP, Fault.DELAY):
                arrived.append(item)
        return arrived

    def _flip(self, what, attempt, header, payload):
        self._injector.flipped_frames += 1
        if payload:
            return header, [memoryview(self._injector.flip(b"".join(payload)))]
        if self._damage(what, attempt):
            return header, payload
        return self._injector.flip(header), payload

    def _about(self, message):
        try:
            control = parse_control(message)
        except BatonError:
            return "damaged", None
        kind = control.WhichOneof("message")
        about = getattr(control, kind)
        attempt = None
        if "attempt" in about.DESCRIPTOR.fields_by_name and about.HasField("attempt"):
            attempt = AttemptKey(about.attempt.request_id, about.attempt.attempt)
        landing_id = getattr(about, "landing_id", 0)
        if kind == "grant":
            self._attempts[landing_id] = attempt
        return kind, attempt or self._attempts.get(landing_id)
