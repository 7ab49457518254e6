"""Configuration of logs and traces, and a process's span queue."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol

from baton.core.clock import Clock
from baton.core.errors import ConfigInvalid
from baton.core.telemetry.span import Attribute, Make, Span, SpanBatch, Tracer

MAX_REQUESTS: Final = 1 << 13
FLUSH_S: Final = 0.5
MAX_BATCH: Final = 128  # requests

log = logging.getLogger(__name__)


class SpanWriter(Protocol):
    """A destination of spans; used by one thread."""

    def write(self, spans: Sequence[Span]) -> bool:
        """Write spans; return whether they were accepted."""
        ...

    def close(self) -> None:
        """Close the destination."""
        ...


class SpanQueue:
    """A `Tracer` that builds and writes spans on its own thread, from construction on; `close` writes what is left.

    Args:
        writer: the destination, owned by the queue.
        clock: clock of the spans' times.
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
        """Add a function to the queue, from any thread; never waits."""
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


LogFormat = Literal["text", "json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    """Configuration of logs and traces; traces are off by default.

    Attributes:
        log_format: format of every process's log.
        trace_file: file that spans are appended to, on each process's own host; empty: none.
        trace_endpoint: OTLP endpoint over HTTP; empty: none.
        trace_share: share of traced requests among those whose clients do not decide it, 0 ... 1.
    """

    log_format: LogFormat = "text"
    trace_file: str = ""
    trace_endpoint: str = ""
    trace_share: float = 1.0

    @property
    def has_traces(self) -> bool:
        """Whether spans are written anywhere."""
        return bool(self.trace_file or self.trace_endpoint)

    def check(self) -> None:
        """Refuse a contradictory configuration.

        Raises:
            ConfigInvalid: there are two destinations.
        """
        if self.trace_file and self.trace_endpoint:
            message = "trace_file and trace_endpoint: spans go to one place; a collector can write a file, too"
            raise ConfigInvalid(message, keys=["trace_file", "trace_endpoint"])


class Telemetry:
    """A process's traces. `tracer` is None if there are none; `close` writes what is left.

    Args:
        config: the operator's configuration.
        service: "router", "prefill" or "decode".
        clock: the process's clock.
        about: worker id and the like, added to every span.

    Raises:
        ConfigInvalid: a destination cannot be written to.
        PackageMissing: OTLP without OpenTelemetry.
    """

    def __init__(
        self, config: TelemetryConfig, service: str, clock: Clock, about: Mapping[str, Attribute] | None = None
    ) -> None:
        config.check()
        self.tracer: Tracer | None = None
        self._queue: SpanQueue | None = None
        if config.has_traces:
            resource = {"service.namespace": "baton", "service.name": f"baton-{service}", **(about or {})}
            self._queue = SpanQueue(_writer(config, resource), clock, config.trace_share)
            self.tracer = self._queue

    @property
    def num_dropped(self) -> int:
        """Number of requests whose spans were lost in this process."""
        return 0 if self._queue is None else self._queue.num_dropped

    def close(self) -> None:
        """Write what is left. Safe to call twice."""
        if self._queue is not None:
            self._queue.close()


def _writer(config: TelemetryConfig, resource: Mapping[str, Attribute]) -> SpanWriter:
    if config.trace_file:
        from baton.core.telemetry.span_export import SpanFile

        return SpanFile(Path(config.trace_file), resource)
    from baton.core.telemetry.span_export import SpanOtlp

    return SpanOtlp(config.trace_endpoint, resource)
