"""Counts and logs connections to a TLS port that never make a call.

gRPC tells a server that a handshake begins, and later about calls, but nothing about a handshake that fails. So this
module counts the difference: connections that began without a first call from a new peer in time. Causes are a wrong or
missing certificate, a client without TLS, or a probe that only connects.
"""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

GRACE_S: Final = 5.0
SAY_EVERY_S: Final = 10.0
MAX_PEERS: Final = 8192

log = logging.getLogger(__name__)


class Handshakes:
    """The handshakes of one port. `begun` is called on gRPC's threads, all other methods on one thread.

    Args:
        port: the port's name.
        on_lost: called with the number of further connections that made no call.
        now_s: clock.
    """

    def __init__(self, port: str, on_lost: Callable[[int], None], now_s: Callable[[], float] = time.monotonic) -> None:
        self._port = port
        self._on_lost = on_lost
        self._now_s = now_s
        self._lock = threading.Lock()
        self._waiting: deque[float] = deque()
        self._peers: OrderedDict[str, None] = OrderedDict()
        self._num_unsaid = 0
        self._said_s = -SAY_EVERY_S

    def begun(self) -> None:
        """Record that a connection begins."""
        with self._lock:
            self._waiting.append(self._now_s())

    def called(self, peer: str) -> None:
        """Record a call from this address, whose handshake therefore succeeded."""
        if peer in self._peers:
            self._peers.move_to_end(peer)
            return
        self._peers[peer] = None
        if len(self._peers) > MAX_PEERS:
            self._peers.popitem(last=False)
        with self._lock:
            if self._waiting:
                self._waiting.popleft()

    def tick(self) -> None:
        """Count connections that have waited too long as lost."""
        now_s = self._now_s()
        num_lost = 0
        with self._lock:
            while self._waiting and now_s - self._waiting[0] >= GRACE_S:
                self._waiting.popleft()
                num_lost += 1
        if num_lost:
            self._on_lost(num_lost)
            self._num_unsaid += num_lost
        if self._num_unsaid and now_s - self._said_s >= SAY_EVERY_S:
            self._said_s = now_s
            log.warning(
                "%d connections to the %s port came to no call: a missing, wrong or expired certificate, a client "
                "without TLS, or a probe",
                self._num_unsaid,
                self._port,
            )
            self._num_unsaid = 0
