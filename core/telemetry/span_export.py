"""Destinations of spans: a file of JSON lines, or an OTLP endpoint through the optional OpenTelemetry package."""

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from baton.core.errors import ConfigInvalid, PackageMissing
from baton.core.telemetry.span import SERVER, Attribute, Span

SCOPE = "baton"
_ERROR = 2


class SpanFile:
    """A `SpanWriter` that appends to a file.

    Args:
        path: the file.
        resource: attributes of the process that the spans are from.

    Raises:
        ConfigInvalid: the file cannot be opened.
    """

    def __init__(self, path: Path, resource: Mapping[str, Attribute]) -> None:
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigInvalid(f"trace_file: cannot write {path}: {error.strerror}", keys=["trace_file"]) from error
        about = f'{{"attributes":[{_attributes(resource)}]}}'
        scope = f'{{"scope":{{"name":"{SCOPE}"}},"spans":['
        self._before = f'{{"resourceSpans":[{{"resource":{about},"scopeSpans":[{scope}'

    def write(self, spans: Sequence[Span]) -> bool:
        """Write one line; return False if the disk does not take all of it."""
        data = f"{self._before}{','.join(map(_span, spans))}]}}]}}]}}\n".encode()
        try:
            return os.write(self._fd, data) == len(data)
        except OSError:
            return False

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


# Formatted by hand, in a third of the time of a tree of dictionaries. Only hex, numbers and names from this code are
# inserted unescaped.


def _span(span: Span) -> str:
    context = span.context
    status = f',"status":{{"code":{_ERROR},"message":{json.dumps(span.error)}}}' if span.error else ""
    return (
        f'{{"traceId":"{context.trace_id}","spanId":"{context.span_id}","parentSpanId":"{context.parent_id}",'
        f'"name":"{span.name}","kind":{span.kind},"startTimeUnixNano":"{span.start_ns}",'
        f'"endTimeUnixNano":"{span.end_ns}","attributes":[{_attributes(span.attributes)}]{status}}}'
    )


def _attributes(values: Mapping[str, Attribute]) -> str:
    return ",".join([f'{{"key":"{key}","value":{{{_value(value)}}}}}' for key, value in values.items()])


def _value(value: Attribute) -> str:
    if isinstance(value, str):
        return f'"stringValue":{json.dumps(value)}'
    if isinstance(value, bool):
        return f'"boolValue":{"true" if value else "false"}'
    if isinstance(value, int):
        return f'"intValue":"{value}"'
    return f'"doubleValue":{value if math.isfinite(value) else 0.0}'


TRACES_PATH = "/v1/traces"


class SpanOtlp:
    """A `SpanWriter` that sends to an OTLP endpoint.

    Args:
        endpoint: http(s)://HOST:PORT; an address with a path is used as it is.
        resource: attributes of the process that the spans are from.

    Raises:
        ConfigInvalid: the endpoint is not such an address.
        PackageMissing: OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str, resource: Mapping[str, Attribute]) -> None:
        url = urlsplit(endpoint)
        if url.scheme not in ("http", "https") or not url.netloc:
            raise ConfigInvalid(f"trace_endpoint: {endpoint!r} is no http:// address", keys=["trace_endpoint"])
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
        except ImportError as error:
            message = "--trace-endpoint needs OpenTelemetry: pip install 'baton-pd[otel]', or use --trace-file"
            raise PackageMissing(message, package="opentelemetry-exporter-otlp-proto-http") from error
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)  # the queue counts lost spans
        self._exporter: Any = OTLPSpanExporter(
            endpoint=endpoint if url.path.strip("/") else endpoint.rstrip("/") + TRACES_PATH
        )
        self._resource = Resource(dict(resource))

    def write(self, spans: Sequence[Span]) -> bool:
        """Send one request; return False if the collector did not accept it, after the exporter's own retries."""
        result = self._exporter.export([self._readable(span) for span in spans])
        return bool(result.name == "SUCCESS")

    def close(self) -> None:
        """Shut the exporter down."""
        self._exporter.shutdown()

    def _readable(self, span: Span) -> Any:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        def context(span_id: str) -> SpanContext:
            flags = TraceFlags(TraceFlags.SAMPLED)
            return SpanContext(int(span.context.trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=flags)

        return ReadableSpan(
            name=span.name,
            context=context(span.context.span_id),
            parent=context(span.context.parent_id) if span.context.parent_id else None,
            resource=self._resource,
            attributes=dict(span.attributes),
            kind=SpanKind.SERVER if span.kind == SERVER else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=InstrumentationScope("baton"),
        )
