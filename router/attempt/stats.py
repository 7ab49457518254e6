"""Computes the statistics in a stream's last chunk, from times taken where tokens leave for the client."""

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.core.clock import Clock
from baton.core.errors import BatonError
from baton.core.requests.request import GenerationRequest
from baton.core.telemetry.span import (
    CURRENT_TRACE,
    INCOMING,
    SERVER,
    Attribute,
    SpanBatch,
    TraceContext,
    Tracer,
    attempt_of,
    new_trace,
    parse,
)
from baton.core.telemetry.waterfall import DecodeTimes, PrefillTimes, RouterTimes, first_token, second_token
from baton.proto import inference_pb2, worker_pb2
from baton.router.attempt.attempts import Attempts
from baton.router.attempt.request_run import RequestRun
from baton.router.metrics import RouterMetrics
from baton.router.placement.policy import Pair
from baton.router.placement.routing import data_path_of, path_of


def prefill_times(first: worker_pb2.FirstToken) -> PrefillTimes:
    """Convert the message's times to seconds."""
    return PrefillTimes(
        received_s=first.received_ns / 1e9,
        queue_s=first.queue_ms / 1e3,
        incoming_s=first.grant_wait_ms / 1e3,
        prefill_s=first.prefill_ms / 1e3,
        first_s=first.sent_ns / 1e9,
    )


def decode_times(runs: Sequence[RequestRun], prompt_len: int) -> DecodeTimes | None:
    """Times of the attempt that emitted the second token; None if no attempt did.

    If a later attempt started with the first token as its forced prefix, its prefill worker emitted the second token.
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
    """Fill in the breakdown of the times to the first and second token.

    Args:
        stats: filled in place; its `prompt_len` is the request's own.
        router: times measured in this process.
        first: the first token of the attempt that gave the client its first token.
        runs: all attempts, in order.
        shared_clock: whether this process and the workers read the same clock.
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


@dataclass(slots=True)
class _Marks:
    """Times and counts of one answer's chunks."""

    first_s: float = 0.0
    second_s: float | None = None
    last_s: float = 0.0
    num_tokens: int = 0


class StreamStats:
    """Times the chunks of one request's answers as they are handed to gRPC."""

    def __init__(self, clock: Clock, metrics: RouterMetrics, received_s: float) -> None:
        self._clock = clock
        self._metrics = metrics
        self.received_s = received_s
        self._marks: dict[int, _Marks] = {}
        self._num_finished = 0
        self.counted = False

    def mark(self, choice: int, num_tokens: int) -> None:
        """Record that a chunk with this many tokens leaves now."""
        now_s = self._clock.now_s()
        marks = self._marks.get(choice)
        if marks is None:
            marks = self._marks[choice] = _Marks()
        if marks.num_tokens == 0:
            marks.first_s = now_s
            self._metrics.ttft_s.observe(now_s - self.received_s)
        else:
            self._metrics.itl_s.observe(now_s - marks.last_s)
        marks.last_s = now_s
        marks.num_tokens += num_tokens
        if marks.second_s is None and marks.num_tokens > 1:
            marks.second_s = now_s
        self._metrics.generation_tokens.inc(num_tokens)

    def line(self, prompt_len: int) -> str:
        """Format counts and times for the log."""
        now_s = self._clock.now_s()
        num_tokens = sum(marks.num_tokens for marks in self._marks.values())
        firsts = [marks.first_s for marks in self._marks.values() if marks.num_tokens]
        first = f", first token {1e3 * (min(firsts) - self.received_s):.1f} ms" if firsts else ""
        return (
            f"{prompt_len} prompt tokens, {num_tokens} output tokens{first}, {1e3 * (now_s - self.received_s):.1f} ms"
        )

    def first_s(self, choice: int) -> float:
        """When the answer's first token left; 0 if none did."""
        return self._marks[choice].first_s if choice in self._marks else 0.0

    def summary(self, choice: int, attempts: Attempts, *, same_host: bool) -> inference_pb2.RequestStats:
        """Build the statistics of a finished answer.

        Args:
            choice: index of the answer.
            attempts: the answer's attempts, finished.
            same_host: whether the workers share this host's clock, so that their timestamps can be compared.
        """
        assert attempts.first is not None
        first, run = attempts.first, attempts.run
        done, decode = run.prefill_done, run.decode_stats
        marks = self._marks[choice]
        num_later = marks.num_tokens - 1
        stats = inference_pb2.RequestStats(
            prompt_len=attempts.request.prompt_len,
            output_len=marks.num_tokens,
            seed=run.request.sampling.seed,
            prefill_worker=run.prefill_worker,
            decode_worker=run.decode_worker,
            ttft_ms=1e3 * (marks.first_s - self.received_s),
            tpot_ms=1e3 * (marks.last_s - marks.first_s) / num_later if num_later else 0.0,
            kv_bytes_pushed=done.kv_bytes_pushed if done is not None else 0,
            num_cached_tokens=first.num_cached_tokens,
            num_handoff_retries=attempts.num_retries,
            num_migrations=attempts.num_migrations,
            num_forced_tokens=attempts.num_forced,
            path=path_of(run),
        )
        if attempts.first_pair is not None:
            stats.routing = attempts.first_pair.routing
            stats.num_expected_cached_tokens = attempts.first_pair.expected_cached_len
            if run.decode_worker and not run.is_local:
                stats.kv_data_path = data_path_of(attempts.first_pair, done)
        router = RouterTimes(
            received_s=self.received_s,
            asked_s=next(run.started_s for run in attempts.runs if run.first is first),
            first_s=marks.first_s,
            second_s=marks.second_s,
        )
        add_timing(stats, router, first, attempts.runs, shared_clock=same_host)
        if decode is not None:
            stats.num_verify_steps = decode.num_verify_steps
            stats.num_draft_tokens = decode.num_draft_tokens
            stats.num_accepted_tokens = decode.num_accepted_tokens
            stats.num_decode_tokens = decode.num_emitted_tokens
            stats.kv_bytes_landed_before_prefill_end = decode.kv_bytes_landed_before_prefill_end
            stats.handoff_ms = decode.handoff_ms
            if done is None:  # prefill's report is still on its way; the bytes received are those pushed
                stats.kv_bytes_pushed = decode.kv_bytes_landed
        return stats

    def count(self, stats: inference_pb2.RequestStats, reason: str, *, num_choices: int = 1) -> None:
        """Add a finished answer to the router's metrics, and the request with its last answer."""
        self._num_finished += 1
        metrics = self._metrics
        metrics.answers.labels(stats.path).inc()
        if self._num_finished == num_choices:
            self.counted = True
            metrics.requests_finished.labels(reason).inc()
            metrics.e2e_s.observe(self._clock.now_s() - self.received_s)
            metrics.queue_s.observe((stats.router_ms + stats.queue_ms) / 1e3)
            metrics.prompt_tokens.inc(stats.prompt_len)
            metrics.cached_tokens.inc(stats.num_cached_tokens)
            metrics.expected_cached_tokens.inc(stats.num_expected_cached_tokens)


class RequestTracing:
    """Begins and ends the trace of each request.

    Args:
        tracer: this process's tracer.
        clock: the router's clock.
        is_near: whether a pair's workers share this host's clock.
    """

    def __init__(self, tracer: Tracer, clock: Clock, is_near: Callable[[Pair | None], bool]) -> None:
        self._tracer = tracer
        self._clock = clock
        self._is_near = is_near

    def begin(self) -> TraceContext | None:
        """Begin the current request's span; None if its client asked for none, or it was not sampled."""
        header = INCOMING.get()
        incoming = parse(header) if header else None
        if incoming is None and self._tracer.share < 1.0 and random.random() >= self._tracer.share:
            CURRENT_TRACE.set("")
            return None
        context = new_trace() if incoming is None else incoming.child()
        CURRENT_TRACE.set(context.trace_id)
        return context if context.is_sampled else None

    def end(
        self,
        request: GenerationRequest,
        shown_id: str,
        answers: Sequence[Attempts],
        stats: StreamStats,
        error: BaseException | None,
    ) -> None:
        """Hand an ended request to the tracer, which builds its spans later; the arguments must no longer change."""
        if request.trace is not None:
            why = "" if error is None else _why(error)
            self._tracer.put(
                functools.partial(
                    self._make, request.trace, request, shown_id, answers, stats, why, self._clock.now_s()
                )
            )

    def _make(
        self,
        context: TraceContext,
        request: GenerationRequest,
        shown_id: str,
        answers: Sequence[Attempts],
        stats: StreamStats,
        error: str,
        end_s: float,
        batch: SpanBatch,
    ) -> None:
        about: dict[str, Attribute] = {
            "request_id": shown_id,
            "worker_request_id": request.key.request_id,
            "prompt_len": request.prompt_len,
            "num_answers": len(answers),
        }
        batch.add(context, "request", stats.received_s, end_s, kind=SERVER, error=error, attributes=about)
        started = [attempts.runs[0].started_s for attempts in answers if attempts.runs]
        if started:
            batch.child(context, "router.queue", stats.received_s, min(started))
        for choice, attempts in enumerate(answers):
            self._attempts(batch, context, choice, attempts, stats, end_s)

    def _attempts(
        self, batch: SpanBatch, root: TraceContext, choice: int, attempts: Attempts, stats: StreamStats, end_s: float
    ) -> None:
        for at, run in enumerate(attempts.runs):
            key = run.request.key
            context = attempt_of(root, key.request_id, key.attempt)
            later = attempts.runs[at + 1 :]
            about: dict[str, Attribute] = {
                "attempt": key.attempt,
                "choice": choice,
                "prefill_worker": run.prefill_worker,
                "decode_worker": run.decode_worker,
            }
            error = "it was tried again" if later else ""
            run_end_s = later[0].started_s if later else end_s
            batch.add(context, "attempt", run.started_s, run_end_s, error=error, attributes=about)
            if run.first is not None and run.first is attempts.first and self._is_near(attempts.first_pair):
                batch.child(context, "first_token.publish", run.first.sent_ns / 1e9, stats.first_s(choice))


def _why(error: BaseException) -> str:
    return f"{type(error).__name__}: {error.message}" if isinstance(error, BatonError) else "RequestCancelled"
