"""A request's spans at the router, made once it has ended: the request, what it waited for here, and its attempts.

Workers add theirs below the attempt's, whose identity follows from the request's (`trace_context.attempt_of`).
"""

import functools
import random
from collections.abc import Callable, Sequence

from baton.core.clock import Clock
from baton.core.errors import BatonError
from baton.core.requests.request import GenerationRequest
from baton.core.telemetry.span import SERVER, Attribute, SpanBatch, Tracer
from baton.core.telemetry.trace_context import CURRENT_TRACE, INCOMING, TraceContext, attempt_of, new_trace, parse
from baton.router.attempt.attempts import Attempts
from baton.router.attempt.stats import StreamStats
from baton.router.placement.policy import Pair


class RequestTracing:
    """Begins and ends the trace of each request.

    Args:
        tracer: of this process.
        clock: of the router.
        is_near: whether a pair's clocks are ours.
    """

    def __init__(self, tracer: Tracer, clock: Clock, is_near: Callable[[Pair | None], bool]) -> None:
        self._tracer = tracer
        self._clock = clock
        self._is_near = is_near

    def begin(self) -> TraceContext | None:
        """The span of the request that runs now; None if its client wants none recorded, or by chance."""
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
        """The request has ended, well or by `error`; its spans will be made. None of these changes any more."""
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
