"""Faults that hit the hand-off in a state of its protocol, at what a prefill worker sends and hears.

`FaultyTransport` stands between a PushService and its transport. At every message an `Injector` decides what goes
wrong, and counts it by the moment it hit, so that a run can show that every state of the protocol was hit. What
becomes of damaged frames is the `FlipBook`'s to know.
"""

import random
import threading
import time
from collections import Counter, deque
from enum import Enum

from baton.core.errors import BatonError
from baton.core.requests.request import AttemptKey
from baton.kvtransfer.protocol.frame import decode_header
from baton.kvtransfer.protocol.messages import parse_control
from baton.kvtransfer.protocol.transport import Delivery


class Fault(Enum):
    """What can go wrong."""

    DROP = "drop"
    REPEAT = "repeat"
    DELAY = "delay"
    FLIP = "flip"  # one bit of the message, or of the payload wherever it lies
    CANCEL = "cancel"  # the client goes away
    KILL_PREFILL = "kill prefill"
    KILL_DECODE = "kill decode"
    KILL_BOTH = "kill both"
    KILL_INCOMING = "kill incoming transfer"
    STOP_INCOMING = "stop incoming transfer"  # SIGSTOP for up to twice its lease
    STOP_PREFILL = "stop prefill"  # its push and writer threads stand still for up to twice the lease, and go on


MESSAGE_FAULTS = (Fault.DROP, Fault.REPEAT, Fault.DELAY, Fault.FLIP)
ORDERS = tuple(fault for fault in Fault if fault not in MESSAGE_FAULTS)
RARE = ("send abort", "hear abort", "hear abort_ack", "hear commit_nack", "send resume", "hear have", "hear deny")
RARE_FACTOR = 20
NEW_FACTOR = 30  # for what has not happened at a moment yet; never for damaged frames, whose rate is to be as said
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
        self.seed = seed
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._flip_rate, self._rate, self._death_rate = flip_rate, rate, death_rate
        self.header_flip_rate = flip_rate / 4  # where headers come off the wire
        self.hits = Counter()  # (moment, fault)
        self.seen = Counter()  # moment
        self.orders = deque()  # (fault, attempt, side)
        self.is_on = True

    def at(self, moment, attempt, side):
        """What goes wrong with this message; what concerns more than a message is put into `orders`."""
        with self._lock:
            self.seen[moment] += 1
            if not self.is_on:
                return None
            draw = self._random.random()
            for fault in Fault:
                chance = self._chance(fault, moment, attempt)
                if draw < chance:
                    self.hits[moment, fault] += 1
                    if fault not in MESSAGE_FAULTS:
                        self.orders.append((fault, attempt, side))
                        return None
                    return fault
                draw -= chance
        return None

    def _chance(self, fault, moment, attempt):
        if fault is Fault.FLIP and "frame" in moment:
            return self._flip_rate
        if fault is Fault.CANCEL and attempt is None:
            return 0.0
        chance = self._rate if fault in MESSAGE_FAULTS or fault is Fault.CANCEL else self._death_rate
        if not self.hits[moment, fault]:
            return chance * NEW_FACTOR
        return chance * RARE_FACTOR if moment in RARE else chance

    def stood(self, where):
        """A thread of a prefill worker stands still there."""
        with self._lock:
            self.hits[where, Fault.STOP_PREFILL] += 1

    def flip(self, data):
        """The same bytes but for one bit."""
        damaged = bytearray(data)
        with self._lock:
            damaged[self._random.randrange(len(damaged))] ^= 1 << self._random.randrange(8)
        return bytes(damaged)

    def coin(self, chance):
        """True so often."""
        with self._lock:
            return self._random.random() < chance


class FaultyTransport:
    """A transport with faults; see `Transport`.

    Args:
        inner: the real one; owned from here on.
        injector: decides.
        book: of damaged frames.
        damage: called with the header and attempt of a frame whose payload is in
            the decode worker's pool already; flips a bit there.
        sends_at_once: `inner` copies every frame when it is sent, so that a header damaged here is damaged on the way.
        side: the prefill worker.
    """

    def __init__(self, inner, injector, book, damage, sends_at_once, side):
        self._inner = inner
        self._injector = injector
        self._book = book
        self._damage = damage
        self._sends_at_once = sends_at_once
        self._side = side
        self._attempts = {}  # incoming transfer id, with its epoch, to attempt
        self._prompt_lens = {}
        self._held = deque()  # (due_s, call)

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def send(self, peer, message):
        kind, attempt = self._about(message)
        fault = self._injector.at(f"send {kind}", attempt, self._side)
        if fault is Fault.FLIP:
            message = self._flip_control(message)
        if fault is Fault.DELAY:
            self._held.append((time.monotonic() + DELAY_S, lambda: self._inner.send(peer, message)))
        elif fault is not Fault.DROP:
            self._inner.send(peer, message)
        if fault is Fault.REPEAT:
            self._inner.send(peer, message)

    def send_frame(self, peer, header, payload, data_path):
        what = decode_header(header)
        attempt = self._attempts.get((what.d_epoch, what.incoming_id))
        is_last = what.end == self._prompt_lens.get(attempt) and what.layer == self._side.last_layer
        moment = "send first frame" if what.seq == 0 else "send last frame" if is_last else "send frame"
        fault = self._injector.at(moment, attempt, self._side)
        self._book.num_frames += 1
        if fault is Fault.FLIP:
            header, payload = self._flip_frame(what, attempt, header, payload, peer)
        if fault is Fault.DROP:
            return
        if fault in (Fault.DELAY, Fault.REPEAT):  # later, the source may be reused
            kept = [memoryview(b"".join(payload))] if payload else []
            self._held.append(
                (time.monotonic() + DELAY_S, lambda: self._inner.send_frame(peer, header, kept, data_path))
            )
            if fault is Fault.DELAY:
                return
        self._inner.send_frame(peer, header, payload, data_path)

    def unpin(self, peer, match):
        self._book.unsent(self._side.epoch, peer, match)
        self._inner.unpin(peer, match)

    def drop(self, peer):
        self._book.unsent(self._side.epoch, peer, lambda _: True)
        self._inner.drop(peer)

    def close(self):
        self._book.unsent(self._side.epoch, None, lambda _: True)
        self._inner.close()

    def receive(self, timeout_s):
        self._side.stand_still("between messages")
        while self._held and self._held[0][0] <= time.monotonic():
            self._held.popleft()[1]()
        arrived = []
        for item in self._inner.receive(timeout_s):
            if not isinstance(item, Delivery) or item.control is None:
                arrived.append(item)
                continue
            kind, attempt = self._about(item.control)
            fault = self._injector.at(f"hear {kind}", attempt, self._side)
            if fault is Fault.FLIP:
                item = Delivery(item.peer, control=self._flip_control(item.control))
            if fault is Fault.REPEAT:
                arrived.append(item)
            if fault not in (Fault.DROP, Fault.DELAY):
                arrived.append(item)
        return arrived

    def _flip_control(self, message):
        flipped = self._injector.flip(message)
        try:
            parse_control(flipped)
        except BatonError:
            self._book.num_controls_refused += 1
        else:
            self._book.controls_believed.append(flipped)
        return flipped

    def _flip_frame(self, what, attempt, header, payload, peer):
        """One bit of the payload; of the header sometimes, and where the payload is gone."""
        is_header = self._sends_at_once and self._injector.coin(0.25)
        if not is_header and payload:
            payload = [memoryview(self._injector.flip(b"".join(payload)))]
            self._book.add(header, "payload", self._side.epoch, peer, what.d_epoch, attempt)
        elif not is_header and self._damage(what, attempt):
            self._book.add(header, "pool", self._side.epoch, peer, what.d_epoch, attempt)
        else:
            header = self._injector.flip(header)
            self._book.add(header, "header", self._side.epoch, peer, what.d_epoch, attempt)
        return header, payload

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
        incoming = getattr(about, "epoch", 0), getattr(about, "incoming_id", 0)
        if kind == "grant":
            self._attempts[incoming] = attempt
        if kind == "reserve":
            self._prompt_lens[attempt] = about.prompt_len
        return kind, attempt or self._attempts.get(incoming)
