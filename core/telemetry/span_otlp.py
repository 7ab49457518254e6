"""Spans to an OTLP collector over HTTP, by OpenTelemetry's own exporter: `pip install 'baton-pd[otel]'`.

The exporter reads the usual variables beside the address (OTEL_EXPORTER_OTLP_HEADERS, _CERTIFICATE, _TIMEOUT ...).
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from baton.core.errors import ConfigInvalid, PackageMissing
from baton.core.telemetry.span import SERVER, Attribute, Span

TRACES_PATH = "/v1/traces"


class SpanOtlp:
    """A `SpanWriter`.

    Args:
        endpoint: http(s)://HOST:PORT; with a path, exactly this one.
        resource: of whose spans these are.

    Raises:
        ConfigInvalid: that is no such address.
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
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)  # what is lost is counted by the queue
        self._exporter: Any = OTLPSpanExporter(
            endpoint=endpoint if url.path.strip("/") else endpoint.rstrip("/") + TRACES_PATH
        )
        self._resource = Resource(dict(resource))

    def write(self, spans: Sequence[Span]) -> bool:
        """One request; False if the collector did not take it, after the exporter's own retries."""
        result = self._exporter.export([self._readable(span) for span in spans])
        return bool(result.name == "SUCCESS")

    def close(self) -> None:
        """Nothing follows."""
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
