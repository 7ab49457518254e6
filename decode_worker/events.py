"""What a decode worker says about a sequence's tokens."""

from collections.abc import Sequence

from baton.core.logprobs import TokenLogprobs
from baton.core.request import FinishReason
from baton.decode_worker.recompute import Computed
from baton.decode_worker.sequence import DecodeSequence
from baton.decode_worker.times import decode_start, local_start
from baton.proto import worker_pb2
from baton.proto.wire import logprobs_to_proto


def token_event(
    sequence: DecodeSequence,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    reason: FinishReason | None,
    now_s: float,
) -> worker_pb2.DecodeEvent:
    """The tokens that follow what `sequence` has; with its times if they are the first, its counts if the last."""
    event = worker_pb2.DecodeEvent()  # filled in place, which takes half the time of the constructor
    tokens = event.tokens
    tokens.index = sequence.request.num_forced + sequence.num_output
    tokens.token_ids.extend(token_ids)
    if logprobs:
        tokens.logprobs.extend(logprobs_to_proto(report) for report in logprobs)
    if not sequence.times.first_s:
        sequence.times.first_s = now_s
        tokens.start.CopyFrom(_start(sequence))
    if reason is not None:
        tokens.finish_reason = reason.value
        tokens.stats.CopyFrom(_stats(sequence))
    return event


def first_token_event(
    sequence: DecodeSequence, token: int, computed: Computed, reason: FinishReason | None
) -> worker_pb2.DecodeEvent:
    """The first token of a prompt that was computed here, as a prefill worker says it."""
    times, logprobs = sequence.times, computed.logprobs
    first = worker_pb2.FirstToken(
        token=token,
        finish_reason=reason.value if reason else "",
        queue_ms=1e3 * (times.computing_s - times.attended_s),
        prefill_ms=1e3 * (computed.now_s - times.computing_s),
        received_ns=int(1e9 * times.attended_s),
        sent_ns=int(1e9 * computed.now_s),
        logprobs=None if logprobs is None else logprobs_to_proto(logprobs),
        index=sequence.request.num_forced,
    )
    return worker_pb2.DecodeEvent(first_token=first)


def prompt_logprobs_event(reports: Sequence[TokenLogprobs]) -> worker_pb2.DecodeEvent:
    """Reports on prompt tokens."""
    tokens = [logprobs_to_proto(report) for report in reports]
    return worker_pb2.DecodeEvent(prompt_logprobs=worker_pb2.PromptLogprobs(tokens=tokens))


def _start(sequence: DecodeSequence) -> worker_pb2.DecodeStart:
    if sequence.is_local:
        return local_start(sequence.times)
    assert sequence.sealed is not None
    return decode_start(sequence.times, sequence.sealed)


def _stats(sequence: DecodeSequence) -> worker_pb2.DecodeStats:
    counts, sealed = sequence.counts, sequence.sealed
    assert sealed is not None or sequence.is_local
    return worker_pb2.DecodeStats(
        num_verify_steps=counts.num_verify_steps,
        num_draft_tokens=counts.num_draft_tokens,
        num_accepted_tokens=counts.num_accepted_tokens,
        num_emitted_tokens=counts.num_emitted_tokens,
        kv_bytes_landed=0 if sealed is None else sealed.bytes_landed,
        kv_bytes_landed_before_prefill_end=0 if sealed is None else sealed.bytes_landed_before_prefill_end,
        handoff_ms=sequence.handoff_ms,
    )
