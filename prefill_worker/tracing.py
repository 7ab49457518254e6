"""A request's spans at a prefill worker, made when the worker has forgotten it."""

import functools

from baton.core.telemetry.span import SERVER, Attribute, SpanBatch, Tracer
from baton.core.telemetry.trace_context import TraceContext
from baton.prefill_worker.request import PrefillRequest


def trace_prefill(tracer: Tracer, request: PrefillRequest, now_s: float) -> None:
    """Have them made; nothing for a request that is not traced. It does not change any more."""
    parent = request.sequence.request.trace
    if parent is not None:
        tracer.put(functools.partial(_make, parent.child(), request, now_s))


def _make(context: TraceContext, request: PrefillRequest, now_s: float, batch: SpanBatch) -> None:
    sequence = request.sequence
    about: dict[str, Attribute] = {
        "request_id": sequence.key.request_id,
        "attempt": sequence.key.attempt,
        "decode_worker": request.peer.worker_id,
        "prompt_len": sequence.request.prompt_len,
        "num_cached_tokens": sequence.num_cached,
    }
    batch.add(context, "prefill", sequence.submitted_s, now_s, kind=SERVER, error=request.error, attributes=about)
    batch.child(context, "prefill.queue", sequence.submitted_s, request.reserved_s or now_s)
    batch.child(context, "grant.wait", request.reserved_s, request.granted_s or now_s)
    for start_s, end_s, first, length in sequence.chunks:
        batch.child(context, "prefill.chunk", start_s, end_s, {"first": first, "num_tokens": length})
    batch.child(context, "prefill.mtp", sequence.first_token_s, request.handed_off_s)
    batch.child(context, "push.exposed", request.handed_off_s, now_s)
