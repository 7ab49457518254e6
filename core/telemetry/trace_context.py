"""W3C trace context: who caused what, as one line of text that travels with a request.

`traceparent` is `00-TRACE-SPAN-FLAGS` in lower-case hex (https://www.w3.org/TR/trace-context/). What a client sends is
taken if it is valid, and a malformed one is ignored, as the recommendation asks.
"""

import random
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Final, NamedTuple
from zlib import crc32

HEADER: Final = "traceparent"
_HEX: Final = "0123456789abcdef"
_SAMPLED: Final = 1
_SPREAD: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1

# What the call that runs now was sent with, and the trace that it belongs to; front doors set the first.
INCOMING: Final[ContextVar[str]] = ContextVar("incoming_traceparent", default="")
CURRENT_TRACE: Final[ContextVar[str]] = ContextVar("current_trace", default="")


class TraceContext(NamedTuple):
    """A span of a trace, as hex. Immutable; a tuple, because several are made for each traced request.

    Attributes:
        trace_id: 32 digits.
        span_id: 16 digits.
        is_sampled: whether spans are recorded.
        parent_id: the span above it; empty if there is none, or it is not known.
    """

    trace_id: str
    span_id: str
    is_sampled: bool = True
    parent_id: str = ""

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{int(self.is_sampled):02x}"

    def child(self) -> "TraceContext":
        """A new span below this one."""
        return TraceContext(self.trace_id, new_span_id(), self.is_sampled, self.span_id)

    def named_child(self, name: str) -> "TraceContext":
        """The span of this name below this one; the same one whenever asked."""
        span_id = int(self.span_id, 16) ^ (crc32(name.encode()) + 1) * _SPREAD & _MASK
        return TraceContext(self.trace_id, f"{span_id or 1:016x}", self.is_sampled, self.span_id)


def new_span_id() -> str:
    """Random, not zero."""
    return f"{random.getrandbits(64) or 1:016x}"


def new_trace() -> TraceContext:
    """A trace that begins here."""
    return TraceContext(f"{random.getrandbits(128) or 1:032x}", new_span_id())


def parse_sampled(traceparent: str) -> TraceContext | None:
    """The context in a header; None if it is none, or if nothing is to be recorded."""
    context = parse(traceparent) if traceparent else None
    return context if context is not None and context.is_sampled else None


def parse(traceparent: str) -> TraceContext | None:
    """The context in a header; None if it is none."""
    version, trace_id, span_id, flags = traceparent[:2], traceparent[3:35], traceparent[36:52], traceparent[53:55]
    if len(traceparent) < 55 or traceparent[:55] != f"{version}-{trace_id}-{span_id}-{flags}":
        return None
    if (version + trace_id + span_id + flags).strip(_HEX):  # what is left begins with a character that is no digit
        return None
    if version == "ff" or traceparent[55:56] not in ("", "-") or (version == "00" and len(traceparent) > 55):
        return None
    if not trace_id.strip("0") or not span_id.strip("0"):
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))


def from_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The header among a call's metadata; empty if it is not there."""
    for key, value in metadata or ():
        if key == HEADER:
            return value if isinstance(value, str) else value.decode("ascii", "replace")
    return ""


def of_attempt(root: TraceContext | None, request_id: str, attempt: int) -> str:
    """The header that a worker is given with one attempt at a request; empty for a request that is not traced."""
    return "" if root is None else str(attempt_of(root, request_id, attempt))


def attempt_of(root: TraceContext, request_id: str, attempt: int) -> TraceContext:
    """The span of one attempt at a request."""
    return root.named_child(f"{request_id}/{attempt}")
