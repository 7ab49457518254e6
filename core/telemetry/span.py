"""Spans that are made when they are over, and where they go.

Workers and router note moments anyway. What makes spans of them is put into a queue when a traced request has ended,
and a thread calls it, many at a time: in a batch the same code takes a third of the time that it takes alone, between
other things. So tracing adds nothing to a step or a token, and little to a request.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from baton.core.telemetry.trace_context import TraceContext

Attribute = str | int | float | bool
INTERNAL: Final = 1
SERVER: Final = 2
NOTHING: Final[Mapping[str, Attribute]] = MappingProxyType({})


class Span(NamedTuple):
    """One thing that took time.

    Attributes:
        context: its own identity.
        name: of what was done.
        start_ns: of the system's clock, as Unix time.
        end_ns: likewise.
        kind: INTERNAL or SERVER.
        attributes: more about it.
        error: not empty: it failed, and why.
    """

    context: TraceContext
    name: str
    start_ns: int
    end_ns: int
    kind: int = INTERNAL
    attributes: Mapping[str, Attribute] = NOTHING
    error: str = ""


class SpanBatch:
    """Where spans are put; each names its own context, and that its parent.

    Args:
        offset_ns: from readings of the process's clock to Unix time.
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
        """A span that is over; both moments are readings of the process's clock."""
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
        """A span below another one; none if either moment is 0, which is to say that it did not come to that."""
        if start_s and end_s:
            self.add(parent.child(), name, start_s, end_s, attributes=attributes)


Make = Callable[[SpanBatch], None]


class Tracer(Protocol):
    """Takes what makes spans; never waits.

    Attributes:
        share: of the requests whose trace begins here, so many are to be recorded, 0 ... 1.
    """

    share: float

    def put(self, make: Make) -> None:
        """Have it called, on another thread, and what it added exported. What it reads must not change any more."""
        ...
