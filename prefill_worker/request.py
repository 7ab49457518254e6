"""What a prefill worker knows of a request besides its sequence."""

import functools
from dataclasses import dataclass, field

from baton.core.requests.request import AttemptKey
from baton.core.telemetry.span import SERVER, Attribute, SpanBatch, TraceContext, Tracer
from baton.engine.sequence import Phase, Sequence
from baton.kvtransfer.sender.service import DecodePeer
from baton.proto import worker_pb2
from baton.worker.stream_mux import EventSink

PrefillStream = EventSink[worker_pb2.PrefillEvent]


@dataclass(slots=True, eq=False)
class PrefillRequest:
    """One request.

    Attributes:
        sequence: its sequence in the engine.
        peer: the decode worker that its KV goes to.
        stream: stream to the router.
        reserved_s: when the decode worker was asked for room; 0 before.
        granted_s: when the decode worker granted it; 0 before.
        handed_off_s: when its prompt was computed, including the MTP pass; 0 before.
        error: why it failed; empty if it did not.
        seen: the phase in which `PushLine` last saw it, and since when.
    """

    sequence: Sequence
    peer: DecodePeer
    stream: PrefillStream
    reserved_s: float = 0.0
    granted_s: float = 0.0
    handed_off_s: float = 0.0
    error: str = ""
    seen: tuple[Phase, float] | None = field(default=None, repr=False)

    @property
    def key(self) -> AttemptKey:
        """Identity of the attempt."""
        return self.sequence.key

    @property
    def num_blocks(self) -> int:
        """Number of blocks that it holds."""
        table = self.sequence.table
        return 0 if table is None else len(table.blocks)

    @property
    def waits_for_peer(self) -> bool:
        """Whether the decode worker has to act next."""
        return self.sequence.phase not in (Phase.WAITING, Phase.READY, Phase.RUNNING)


def trace_prefill(tracer: Tracer, request: PrefillRequest, now_s: float) -> None:
    """Have the spans of a traced request made. The request must not change any more."""
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
