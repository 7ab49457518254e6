"""What an operator may set of logs and traces, and the process-wide parts that follow from it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from baton.core.clock import Clock
from baton.core.errors import ConfigInvalid
from baton.core.telemetry.span import Attribute, Tracer
from baton.core.telemetry.span_queue import SpanQueue, SpanWriter

LogFormat = Literal["text", "json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    """Off by default.

    Attributes:
        log_format: of every process's log.
        trace_file: spans are appended to it, on each process's own host; empty: none.
        trace_endpoint: OTLP over HTTP; empty: none.
        trace_share: of requests whose clients say nothing of tracing, so many are traced, 0 ... 1.
    """

    log_format: LogFormat = "text"
    trace_file: str = ""
    trace_endpoint: str = ""
    trace_share: float = 1.0

    @property
    def has_traces(self) -> bool:
        """Whether spans go anywhere."""
        return bool(self.trace_file or self.trace_endpoint)

    def check(self) -> None:
        """Refuse what contradicts itself.

        Raises:
            ConfigInvalid: two destinations.
        """
        if self.trace_file and self.trace_endpoint:
            message = "trace_file and trace_endpoint: spans go to one place; a collector can write a file, too"
            raise ConfigInvalid(message, keys=["trace_file", "trace_endpoint"])


class Telemetry:
    """A process's traces. `tracer` is None where there are none; `close` writes what is left.

    Args:
        config: from the operator.
        service: "router", "prefill", "decode".
        clock: the process's.
        about: worker id and the like, said with every span.

    Raises:
        ConfigInvalid: a destination that cannot be written to.
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
        """Requests whose spans here were lost."""
        return 0 if self._queue is None else self._queue.num_dropped

    def close(self) -> None:
        """Write what is left. Safe to call twice."""
        if self._queue is not None:
            self._queue.close()


def _writer(config: TelemetryConfig, resource: Mapping[str, Attribute]) -> SpanWriter:
    if config.trace_file:
        from baton.core.telemetry.span_file import SpanFile

        return SpanFile(Path(config.trace_file), resource)
    from baton.core.telemetry.span_otlp import SpanOtlp

    return SpanOtlp(config.trace_endpoint, resource)
