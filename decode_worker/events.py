"""What a decode worker says about a sequence's tokens."""

from baton.core.requests.logprobs import TokenLogprobs
from baton.decode_worker.request import DecodeRequest
from baton.decode_worker.times import decode_start, local_start
from baton.engine.engine import Published
from baton.proto import worker_pb2
from baton.proto.wire import logprobs_to_proto


def token_event(request: DecodeRequest, made: Published, now_s: float) -> worker_pb2.DecodeEvent:
    """Decoded tokens; with the request's times if they are the first, its counts if they are the last."""
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
    """The first token of a prompt that was computed here, as a prefill worker says it."""
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
    """Reports on prompt tokens."""
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
