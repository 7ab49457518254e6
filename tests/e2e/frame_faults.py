"""What goes wrong with the frames of one prefill worker, as ordered; and by which proxy it reaches whom.

It stands between the push service and its transport, and never touches what the two do with each other's memory: a
frame that is sent late, or again, is a copy.
"""

import time
from collections import deque

from baton.kvtransfer.protocol.transport import Delivery

KINDS = ("drop", "repeat", "swap", "late", "flip", "contradict")


class FrameFaults:
    """A transport with faults on order; see `Transport`.

    Args:
        inner: the real one.
        ways: of addresses to those of the proxies before them.
    """

    def __init__(self, inner, ways):
        self._inner = inner
        self._ways = ways
        self._names = {way: address for address, way in ways.items()}
        self._kind, self._every, self._num_left, self._late_s = None, 1, 0, 0.0
        self._num_frames = 0
        self._held = deque()  # (due_s, frame)
        self._swapped = None
        self.num_hits = 0

    def set(self, kind=None, every=1, most=0, late_s=0.0):
        """From the next frame on: every so many frames, at most so many."""
        assert kind is None or kind in KINDS
        self._kind, self._every, self._num_left, self._late_s = kind, every, most, late_s

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def _way(self, peer):
        return self._ways.get(peer, peer)

    def send(self, peer, message):
        self._inner.send(self._way(peer), message)

    def send_frame(self, peer, header, payload, data_path):
        peer = self._way(peer)
        self._num_frames += 1
        is_hit = self._kind is not None and self._num_left > 0 and self._num_frames % self._every == 0
        if is_hit and payload:
            self._num_left -= 1
            self.num_hits += 1
            self._hit(peer, header, payload, data_path)
        else:
            self._inner.send_frame(peer, header, payload, data_path)
        if not is_hit and self._swapped is not None:
            frame, self._swapped = self._swapped, None
            self._inner.send_frame(*frame)

    def _hit(self, peer, header, payload, data_path):
        copy = bytearray(b"".join(payload))
        frame = peer, header, [memoryview(copy)], data_path
        match self._kind:
            case "repeat":
                self._inner.send_frame(peer, header, payload, data_path)
                self._inner.send_frame(*frame)
            case "swap" if self._swapped is None:
                self._swapped = frame
                self._held.append((time.monotonic() + 0.1, None))  # if no other frame follows
            case "late":
                self._inner.send_frame(peer, header, payload, data_path)
                self._held.append((time.monotonic() + self._late_s, frame))
            case "flip":
                copy[len(copy) // 2] ^= 4
                self._inner.send_frame(*frame)
            case "contradict":
                # The same place once more, with other content.
                self._inner.send_frame(peer, header, payload, data_path)
                copy[len(copy) // 2] ^= 4
                self._inner.send_frame(*frame)
            case "swap":
                self._inner.send_frame(peer, header, payload, data_path)

    def receive(self, timeout_s):
        while self._held and self._held[0][0] <= time.monotonic():
            _, frame = self._held.popleft()
            if frame is None:
                frame, self._swapped = self._swapped, None
            if frame is not None:
                self._inner.send_frame(*frame)
        return [
            Delivery(self._names.get(item.peer, item.peer), item.control, item.header, item.payload)
            if isinstance(item, Delivery)
            else item
            for item in self._inner.receive(timeout_s)
        ]

    def unpin(self, peer, match):
        self._inner.unpin(self._way(peer), match)

    def num_pinned(self, peer):
        return self._inner.num_pinned(self._way(peer))

    def open_data_path(self, peer, offer):
        return self._inner.open_data_path(self._way(peer), offer)

    def data_path_of(self, peer):
        return self._inner.data_path_of(self._way(peer))

    def problem(self, peer):
        return self._inner.problem(self._way(peer))

    def drop(self, peer):
        self._inner.drop(self._way(peer))
