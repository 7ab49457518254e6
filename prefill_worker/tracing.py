"""A request's spans at a prefill worker, made when the worker has forgotten it."""

import functools

from baton.core.span import SERVER, Attribute, SpanBatch, Tracer
from baton.core.trace_context import TraceContext
from baton.prefill_worker.scheduler import PrefillSequence


def trace_prefill(tracer: Tracer, sequence: PrefillSequence, now_s: float) -> None:
    """Have them made; nothing for a request that is not traced. The sequence does not change any more."""
    parent = sequence.request.trace
    if parent is not None:
        tracer.put(functools.partial(_make, parent.child(), sequence, now_s))


def _make(context: TraceContext, sequence: PrefillSequence, now_s: float, batch: SpanBatch) -> None:
    marks, chunks = sequence.marks_s, sequence.chunks
    about: dict[str, Attribute] = {
        "request_id": sequence.key.request_id,
        "attempt": sequence.key.attempt,
        "decode_worker": sequence.peer,
        "prompt_len": sequence.request.prompt_len,
        "num_cached_tokens": sequence.num_cached,
    }
    batch.add(context, "prefill", marks["submitted"], now_s, kind=SERVER, error=sequence.error, attributes=about)
    batch.child(context, "prefill.queue", marks["submitted"], marks.get("reserved", now_s))
    batch.child(context, "landing.wait", marks.get("reserved", 0.0), marks.get("granted", now_s))
    for start_s, end_s, first, length in chunks:
        batch.child(context, "prefill.chunk", start_s, end_s, {"first": first, "num_tokens": length})
    first_s = chunks[-1][1] if chunks and not sequence.num_left else 0.0
    batch.child(context, "prefill.mtp", first_s, marks.get("handed over", 0.0))
    batch.child(context, "push.exposed", marks.get("handed over", 0.0), now_s)
