"""A sequence's spans at a decode worker, its incoming transfer's among them, made when the worker has given it up."""

import functools

from baton.core.telemetry.span import SERVER, Attribute, SpanBatch, Tracer
from baton.core.telemetry.trace_context import TraceContext
from baton.decode_worker.request import DecodeRequest
from baton.decode_worker.times import landed_s


def trace_decode(tracer: Tracer, request: DecodeRequest, now_s: float, error: str) -> None:
    """Have them made; nothing for a request that is not traced. What they tell does not change any more.

    `error` is empty if the sequence finished.
    """
    parent = request.sequence.request.trace
    if parent is not None:
        tracer.put(functools.partial(_make, parent.child(), request, now_s, error))


def _make(context: TraceContext, request: DecodeRequest, now_s: float, error: str, batch: SpanBatch) -> None:
    sequence, times, complete = request.sequence, request.times, request.complete
    counts = sequence.counts
    about: dict[str, Attribute] = {
        "request_id": sequence.key.request_id,
        "attempt": sequence.key.attempt,
        "num_output": len(sequence.token_ids),
        "num_preemptions": sequence.num_preemptions,
    }
    batch.add(context, "decode", times.attended_s, now_s, kind=SERVER, error=error, attributes=about)
    if request.is_local:
        batch.child(context, "decode.queue", times.attended_s, times.computing_s)
        batch.child(context, "decode.prefill", times.computing_s, times.admitted_s)
    elif complete is None:
        batch.child(context, "incoming", times.granted_s, now_s)
    else:
        batch.child(context, "incoming", times.granted_s, landed_s(complete), {"bytes_landed": complete.bytes_landed})
        batch.child(context, "transfer.verification", landed_s(complete), complete.completed_s)
        batch.child(context, "decode.admission", complete.completed_s, times.admitted_s)
    batch.child(context, "decode.first_step", times.admitted_s, times.first_s)
    steps = {
        "num_verify_steps": counts.num_verify_steps,
        "num_draft_tokens": counts.num_draft_tokens,
        "num_accepted_tokens": counts.num_accepted_tokens,
        "num_emitted_tokens": counts.num_emitted_tokens,
    }
    batch.child(context, "decode.steps", times.first_s, now_s, steps)
