"""What one stream's last chunk says of its time and tokens, measured where the client's tokens leave: here."""

from dataclasses import dataclass

from baton.core.clock import Clock
from baton.core.telemetry.waterfall import RouterTimes
from baton.proto import inference_pb2
from baton.router.attempt.attempts import Attempts
from baton.router.attempt.timing import add_timing
from baton.router.metrics import RouterMetrics
from baton.router.placement.routing import lane_of, path_of


@dataclass(slots=True)
class _Marks:
    """One answer's chunks."""

    first_s: float = 0.0
    second_s: float | None = None
    last_s: float = 0.0
    num_tokens: int = 0


class StreamStats:
    """Marks the chunks of one stream, of one answer or several, as they are handed to gRPC."""

    def __init__(self, clock: Clock, metrics: RouterMetrics, received_s: float) -> None:
        self._clock = clock
        self._metrics = metrics
        self.received_s = received_s
        self._marks: dict[int, _Marks] = {}
        self._num_finished = 0
        self.counted = False

    def mark(self, choice: int, num_tokens: int) -> None:
        """A chunk with this many tokens leaves now."""
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
        """Counts and times for the log."""
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
        """The stats of a finished answer.

        Args:
            choice: which one.
            attempts: its own, finished.
            same_host: the workers' clock is ours, so their stamps can be compared.
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
                stats.kv_lane = lane_of(attempts.first_pair, done)
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
            if done is None:  # its report is still on the way; what landed was pushed
                stats.kv_bytes_pushed = decode.kv_bytes_landed
        return stats

    def count(self, stats: inference_pb2.RequestStats, reason: str, *, num_choices: int = 1) -> None:
        """Add a finished answer to the process's metrics; with the last one the request."""
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
