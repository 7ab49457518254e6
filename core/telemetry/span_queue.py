"""Between those who end traced requests and where their spans are written: a bounded queue and one thread.

A full queue or a destination that does not take them loses spans, never a request: what is lost is counted, and logged
once.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from baton.core.clock import Clock
from baton.core.telemetry.span import Make, Span, SpanBatch

MAX_REQUESTS: Final = 1 << 13
FLUSH_S: Final = 0.5
MAX_BATCH: Final = 128  # requests

log = logging.getLogger(__name__)


class SpanWriter(Protocol):
    """A destination; used by one thread."""

    def write(self, spans: Sequence[Span]) -> bool:
        """Whether it took them."""
        ...

    def close(self) -> None:
        """Nothing follows."""
        ...


class SpanQueue:
    """A `Tracer`. Begins when made; `close` writes what is left.

    Args:
        writer: owned from here on.
        clock: whose readings make the spans.
        share: see `Tracer`.
        unix_ns: the system's clock.
    """

    def __init__(
        self, writer: SpanWriter, clock: Clock, share: float = 1.0, unix_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self.share = share
        self._writer = writer
        self._clock = clock
        self._unix_ns = unix_ns
        self._makes: deque[Make] = deque()
        self._stopping = threading.Event()
        self.num_dropped = 0  # requests, or parts of one
        self._thread = threading.Thread(target=self._run, name="span-export", daemon=True)
        self._thread.start()

    def put(self, make: Make) -> None:
        """Any thread; never waits."""
        if len(self._makes) >= MAX_REQUESTS:
            self._drop(1, "the queue is full")
        else:
            self._makes.append(make)

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is left, and end. Safe to call twice."""
        self._stopping.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stopping.wait(FLUSH_S):
            self._flush()
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        while self._makes:
            makes = [self._makes.popleft() for _ in range(min(MAX_BATCH, len(self._makes)))]
            batch = SpanBatch(self._unix_ns() - int(1e9 * self._clock.now_s()))
            for make in makes:
                make(batch)
            if batch.spans and not self._writer.write(batch.spans):
                self._drop(len(makes), "they could not be written")

    def _drop(self, num: int, why: str) -> None:
        if not self.num_dropped:
            log.warning("spans are lost: %s", why)
        self.num_dropped += num
