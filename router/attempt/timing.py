"""What a request's attempts and marks say of its time, for `core.telemetry.waterfall` and the last chunk's stats."""

from collections.abc import Sequence

from baton.core.telemetry.waterfall import DecodeTimes, PrefillTimes, RouterTimes, first_token, second_token
from baton.proto import inference_pb2, worker_pb2
from baton.router.attempt.request_run import RequestRun


def prefill_times(first: worker_pb2.FirstToken) -> PrefillTimes:
    """From the message."""
    return PrefillTimes(
        received_s=first.received_ns / 1e9,
        queue_s=first.queue_ms / 1e3,
        incoming_s=first.grant_wait_ms / 1e3,
        prefill_s=first.prefill_ms / 1e3,
        first_s=first.sent_ns / 1e9,
    )


def decode_times(runs: Sequence[RequestRun], prompt_len: int) -> DecodeTimes | None:
    """Of the attempt that gave the second token; None if none did.

    A later attempt may have prefilled the first token behind the prompt, and then its prefill worker gave the second.
    """
    for run in runs:
        start, first, num_before = run.decode_start, run.first, run.request.prompt_len - prompt_len
        if first is None:
            continue
        first_s = first.sent_ns / 1e9
        if num_before == 1:
            return DecodeTimes(
                first_s=first_s,
                draft_s=0.0,
                transfer_s=0.0,
                landed_s=first_s,
                verification_s=0.0,
                admission_s=0.0,
                step_s=0.0,
            )
        if num_before == 0 and start is not None:
            return DecodeTimes(
                first_s=first_s,
                draft_s=start.draft_ms / 1e3,
                transfer_s=start.transfer_ms / 1e3,
                landed_s=start.landed_ns / 1e9,
                verification_s=start.verification_ms / 1e3,
                admission_s=start.admission_ms / 1e3,
                step_s=start.step_ms / 1e3,
            )
    return None


def add_timing(
    stats: inference_pb2.RequestStats,
    router: RouterTimes,
    first: worker_pb2.FirstToken,
    runs: Sequence[RequestRun],
    *,
    shared_clock: bool,
) -> None:
    """Fill in the parts of the times to the first and the second token.

    Args:
        stats: filled in place.
        router: readings of this process.
        first: of the attempt whose first token left.
        runs: all attempts, in order; `stats.prompt_len` is the request's own.
        shared_clock: this process and the workers read one clock.
    """
    prefill = prefill_times(first)
    parts = first_token(router, prefill, shared_clock=shared_clock)
    stats.shared_clock = shared_clock
    stats.router_ms = 1e3 * parts.router_s
    stats.queue_ms, stats.grant_wait_ms, stats.prefill_ms = first.queue_ms, first.grant_wait_ms, first.prefill_ms
    stats.publish_ms = 1e3 * parts.publish_s
    decode = decode_times(runs, stats.prompt_len)
    if decode is None or router.second_s is None:
        return
    second = second_token(router, prefill, decode, shared_clock=shared_clock)
    assert second is not None
    stats.second.total_ms = 1e3 * (router.second_s - router.received_s)
    stats.second.retry_ms = 1e3 * second.retry_s
    stats.second.draft_ms = 1e3 * second.draft_s
    stats.second.transfer_ms = 1e3 * second.transfer_s
    stats.second.verification_ms = 1e3 * second.verification_s
    stats.second.admission_ms = 1e3 * second.admission_s
    stats.second.step_ms = 1e3 * second.step_s
    stats.second.publish_ms = 1e3 * second.publish_s
