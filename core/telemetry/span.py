"""Trace contexts, and spans that are built after they have ended.

Workers and router record times anyway. When a traced request has ended, a function that builds spans from them is put
into a queue, and a thread calls many such functions at a time: in a batch the same code takes a third of the time that
it takes alone, between other work. So tracing adds nothing to a step or a token, and little to a request.
"""

import random
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol
from zlib import crc32

HEADER: Final = "traceparent"
_HEX: Final = "0123456789abcdef"
_SAMPLED: Final = 1
_SPREAD: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1

# The current call's traceparent header, and its trace. Servers set the first.
INCOMING: Final[ContextVar[str]] = ContextVar("incoming_traceparent", default="")
CURRENT_TRACE: Final[ContextVar[str]] = ContextVar("current_trace", default="")


class TraceContext(NamedTuple):
    """A span of a trace, as hex. Immutable; a tuple, because several are made for each traced request.

    Attributes:
        trace_id: 32 digits.
        span_id: 16 digits.
        is_sampled: whether spans are recorded.
        parent_id: id of the parent span; empty if there is none, or it is unknown.
    """

    trace_id: str
    span_id: str
    is_sampled: bool = True
    parent_id: str = ""

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{int(self.is_sampled):02x}"

    def child(self) -> "TraceContext":
        """Make a new child span."""
        return TraceContext(self.trace_id, new_span_id(), self.is_sampled, self.span_id)

    def named_child(self, name: str) -> "TraceContext":
        """The child span of this name; always the same one."""
        span_id = int(self.span_id, 16) ^ (crc32(name.encode()) + 1) * _SPREAD & _MASK
        return TraceContext(self.trace_id, f"{span_id or 1:016x}", self.is_sampled, self.span_id)


def new_span_id() -> str:
    """A random id, not zero."""
    return f"{random.getrandbits(64) or 1:016x}"


def new_trace() -> TraceContext:
    """Start a new trace."""
    return TraceContext(f"{random.getrandbits(128) or 1:032x}", new_span_id())


def parse_sampled(traceparent: str) -> TraceContext | None:
    """Parse a header; None if it is invalid, or if the trace is not sampled."""
    context = parse(traceparent) if traceparent else None
    return context if context is not None and context.is_sampled else None


def parse(traceparent: str) -> TraceContext | None:
    """Parse a header; None if it is invalid."""
    version, trace_id, span_id, flags = traceparent[:2], traceparent[3:35], traceparent[36:52], traceparent[53:55]
    if len(traceparent) < 55 or traceparent[:55] != f"{version}-{trace_id}-{span_id}-{flags}":
        return None
    if (version + trace_id + span_id + flags).strip(_HEX):  # what remains starts with a non-hex character
        return None
    if version == "ff" or traceparent[55:56] not in ("", "-") or (version == "00" and len(traceparent) > 55):
        return None
    if not trace_id.strip("0") or not span_id.strip("0"):
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))


def from_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The header in a call's metadata; empty if there is none."""
    for key, value in metadata or ():
        if key == HEADER:
            return value if isinstance(value, str) else value.decode("ascii", "replace")
    return ""


def of_attempt(root: TraceContext | None, request_id: str, attempt: int) -> str:
    """The header that a worker gets with one attempt at a request; empty if the request is not traced."""
    return "" if root is None else str(attempt_of(root, request_id, attempt))


def attempt_of(root: TraceContext, request_id: str, attempt: int) -> TraceContext:
    """The span of one attempt at a request."""
    return root.named_child(f"{request_id}/{attempt}")


Attribute = str | int | float | bool
INTERNAL: Final = 1
SERVER: Final = 2
NOTHING: Final[Mapping[str, Attribute]] = MappingProxyType({})


class Span(NamedTuple):
    """One operation that took time.

    Attributes:
        context: the span's own identity.
        name: name of the operation.
        start_ns: Unix time by the system's clock.
        end_ns: likewise.
        kind: INTERNAL or SERVER.
        attributes: further attributes.
        error: why the operation failed; empty if it did not.
    """

    context: TraceContext
    name: str
    start_ns: int
    end_ns: int
    kind: int = INTERNAL
    attributes: Mapping[str, Attribute] = NOTHING
    error: str = ""


class SpanBatch:
    """Collects spans; each names its own context, which names its parent.

    Args:
        offset_ns: offset from the process's clock to Unix time.
    """

    def __init__(self, offset_ns: int) -> None:
        self._offset_ns = offset_ns
        self.spans: list[Span] = []

    def add(
        self,
        context: TraceContext,
        name: str,
        start_s: float,
        end_s: float,
        *,
        kind: int = INTERNAL,
        error: str = "",
        attributes: Mapping[str, Attribute] = NOTHING,
    ) -> None:
        """Add a span that has ended; both times are on the process's clock."""
        start_ns = int(1e9 * start_s) + self._offset_ns
        end_ns = max(start_ns, int(1e9 * end_s) + self._offset_ns)
        self.spans.append(Span(context, name, start_ns, end_ns, kind, attributes, error))

    def child(
        self,
        parent: TraceContext,
        name: str,
        start_s: float,
        end_s: float,
        attributes: Mapping[str, Attribute] = NOTHING,
    ) -> None:
        """Add a child span; none if either time is 0, which means that the operation was not reached."""
        if start_s and end_s:
            self.add(parent.child(), name, start_s, end_s, attributes=attributes)


Make = Callable[[SpanBatch], None]


class Tracer(Protocol):
    """Accepts functions that build spans; never waits.

    Attributes:
        share: share of the requests whose trace begins here that is recorded, 0 ... 1.
    """

    share: float

    def put(self, make: Make) -> None:
        """Have `make` called on another thread, and its spans exported; the data it reads must no longer change."""
        ...
