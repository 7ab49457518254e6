"""What a decode worker says about a sequence's tokens."""

from collections.abc import Sequence

from baton.core.logprobs import TokenLogprobs
from baton.core.request import FinishReason
from baton.decode_worker.scheduler import DecodeSequence
from baton.decode_worker.times import decode_start
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
        assert sequence.sealed is not None
        sequence.times.first_s = now_s
        tokens.start.CopyFrom(decode_start(sequence.times, sequence.sealed))
    if reason is not None:
        tokens.finish_reason = reason.value
        tokens.stats.CopyFrom(_stats(sequence))
    return event


def _stats(sequence: DecodeSequence) -> worker_pb2.DecodeStats:
    counts, sealed = sequence.counts, sequence.sealed
    assert sealed is not None
    return worker_pb2.DecodeStats(
        num_verify_steps=counts.num_verify_steps,
        num_draft_tokens=counts.num_draft_tokens,
        num_accepted_tokens=counts.num_accepted_tokens,
        num_emitted_tokens=counts.num_emitted_tokens,
        kv_bytes_landed=sealed.bytes_landed,
        kv_bytes_landed_before_prefill_end=sealed.bytes_landed_before_prefill_end,
        handoff_ms=sequence.handoff_ms,
    )
