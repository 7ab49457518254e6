"""What a decode worker knows of a request besides its sequence."""

import functools
from dataclasses import dataclass
from typing import Final

from baton.core.requests.request import AttemptKey, TokenLogprobs
from baton.core.telemetry.span import SERVER, Attribute, SpanBatch, TraceContext, Tracer
from baton.engine.engine import Published
from baton.engine.sequence import Sequence
from baton.kvtransfer.receiver.service import Completed
from baton.proto import worker_pb2
from baton.proto.wire import logprobs_to_proto
from baton.worker.stream_mux import EventSink

MAX_DRAFT_MS: Final = 1e9


@dataclass(slots=True)
class RequestTimes:
    """Times on the worker's clock, in seconds; 0 for what has not happened.

    Attributes:
        attended_s: when the router opened the stream.
        granted_s: when blocks were granted.
        computing_s: for a prompt computed here, when its first chunk was begun.
        first_token_s: for a prompt computed here, when its first token was known.
        admitted_s: when it began to take part in steps.
        first_s: when the first step's tokens were ready.
    """

    attended_s: float = 0.0
    granted_s: float = 0.0
    computing_s: float = 0.0
    first_token_s: float = 0.0
    admitted_s: float = 0.0
    first_s: float = 0.0


def landed_s(complete: Completed) -> float:
    """Return when everything that is verified had arrived, or when the transfer was complete if that is not known."""
    return complete.complete_s or complete.completed_s


def draft_s(complete: Completed) -> float:
    """Return the prefill worker's time from the first token to the hand-off; 0 if it is no valid duration."""
    draft_ms = complete.state.draft_ms
    return draft_ms / 1e3 if 0 <= draft_ms < MAX_DRAFT_MS else 0.0  # false for a NaN, too


def decode_start(times: RequestTimes, complete: Completed) -> worker_pb2.DecodeStart:
    """Build the breakdown of the time until the first decoded tokens."""
    here_s, draft = landed_s(complete), draft_s(complete)
    return worker_pb2.DecodeStart(
        draft_ms=1e3 * draft,
        transfer_ms=1e3 * (here_s - complete.prefill_end_s - draft),
        landed_ns=int(1e9 * here_s),
        verification_ms=1e3 * (complete.completed_s - here_s),
        admission_ms=1e3 * (times.admitted_s - complete.completed_s),
        step_ms=1e3 * (times.first_s - times.admitted_s),
    )


def local_start(times: RequestTimes) -> worker_pb2.DecodeStart:
    """Build the same for a prompt computed here, without a hand-off."""
    return worker_pb2.DecodeStart(
        draft_ms=1e3 * (times.admitted_s - times.first_token_s),
        landed_ns=int(1e9 * times.admitted_s),
        step_ms=1e3 * (times.first_s - times.admitted_s),
    )


DecodeStream = EventSink[worker_pb2.DecodeEvent]


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """One request.

    Attributes:
        sequence: its sequence in the engine.
        stream: stream to the router.
        complete: the transfer that brought its KV; None before, and if its prompt is computed here.
        granted_s: when it had blocks for its KV; 0 before.
        first_s: when its first decoded tokens were ready; 0 before.
    """

    sequence: Sequence
    stream: DecodeStream
    complete: Completed | None = None
    granted_s: float = 0.0
    first_s: float = 0.0

    @property
    def key(self) -> AttemptKey:
        """Identity of the attempt."""
        return self.sequence.key

    @property
    def is_local(self) -> bool:
        """Whether its prompt is computed here."""
        return not self.sequence.is_received

    @property
    def times(self) -> RequestTimes:
        """The times of its stages."""
        sequence = self.sequence
        decoding_s = sequence.decoding_s
        if self.is_local and decoding_s:
            # A prompt's row decodes before the host knows its first token.
            decoding_s = max(decoding_s, sequence.first_token_s)
        return RequestTimes(
            attended_s=sequence.submitted_s,
            granted_s=self.granted_s,
            computing_s=sequence.computing_s,
            first_token_s=sequence.first_token_s,
            admitted_s=decoding_s,
            first_s=self.first_s,
        )

    @property
    def handoff_ms(self) -> float:
        """Time from the first token to the first decode step, or until its KV was complete if it never decoded."""
        times = self.times
        if self.is_local:
            return 1e3 * max(0.0, times.admitted_s - times.first_token_s) if times.admitted_s else 0.0
        if self.complete is None:
            return 0.0
        return 1e3 * max(0.0, (times.admitted_s or self.complete.completed_s) - self.complete.prefill_end_s)


def trace_decode(tracer: Tracer, request: DecodeRequest, now_s: float, error: str) -> None:
    """Have the spans of a traced request made. What they report must not change any more.

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


def token_event(request: DecodeRequest, made: Published, now_s: float) -> worker_pb2.DecodeEvent:
    """Build an event with decoded tokens; the first has the request's times, the last its counts."""
    event = worker_pb2.DecodeEvent()  # filled in place, which takes half the time of the constructor
    tokens = event.tokens
    sequence = made.sequence
    tokens.index = sequence.num_output - len(made.token_ids)
    tokens.token_ids.extend(made.token_ids)
    if made.logprobs:
        tokens.logprobs.extend(logprobs_to_proto(report) for report in made.logprobs)
    if not request.first_s:
        request.first_s = now_s
        tokens.start.CopyFrom(_start(request))
    if made.reason is not None:
        tokens.finish_reason = made.reason.value
        tokens.stats.CopyFrom(_stats(request))
    return event


def first_token_event(request: DecodeRequest, made: Published) -> worker_pb2.DecodeEvent:
    """Build the event for the first token of a prompt computed here, as a prefill worker would."""
    sequence = request.sequence
    first = worker_pb2.FirstToken(
        token=made.token_ids[0],
        finish_reason=made.reason.value if made.reason else "",
        queue_ms=1e3 * (sequence.computing_s - sequence.submitted_s),
        prefill_ms=1e3 * (sequence.first_token_s - sequence.computing_s),
        received_ns=int(1e9 * sequence.submitted_s),
        sent_ns=int(1e9 * sequence.first_token_s),
        num_cached_tokens=sequence.num_cached,
        logprobs=logprobs_to_proto(made.logprobs[0]) if made.logprobs else None,
        index=sequence.request.num_forced,
    )
    return worker_pb2.DecodeEvent(first_token=first)


def prompt_logprobs_event(reports: tuple[TokenLogprobs, ...]) -> worker_pb2.DecodeEvent:
    """Build the event with the log-probabilities of prompt tokens."""
    tokens = [logprobs_to_proto(report) for report in reports]
    return worker_pb2.DecodeEvent(prompt_logprobs=worker_pb2.PromptLogprobs(tokens=tokens))


def _start(request: DecodeRequest) -> worker_pb2.DecodeStart:
    if request.complete is None:
        return local_start(request.times)
    return decode_start(request.times, request.complete)


def _stats(request: DecodeRequest) -> worker_pb2.DecodeStats:
    counts, complete = request.sequence.counts, request.complete
    return worker_pb2.DecodeStats(
        num_verify_steps=counts.num_verify_steps,
        num_draft_tokens=counts.num_draft_tokens,
        num_accepted_tokens=counts.num_accepted_tokens,
        num_emitted_tokens=counts.num_emitted_tokens - request.is_local,
        kv_bytes_landed=0 if complete is None else complete.bytes_landed,
        kv_bytes_landed_before_prefill_end=0 if complete is None else complete.bytes_landed_before_prefill_end,
        handoff_ms=request.handoff_ms,
    )
