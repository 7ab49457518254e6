"""The router's own metrics under their public names, including the delay of its event loop.

Each instance owns its registry, so tests can run several.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from baton.core import errors
from baton.core.distribution import Buckets


class LoopHistogram(Collector):
    """A histogram without labels; `observe` must be called from one thread only."""

    def __init__(self, name: str, text: str, buckets: Sequence[float], registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self._buckets = Buckets(buckets)
        self.observe = self._buckets.observe
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the current counts."""
        found = self._buckets.read()
        family = HistogramMetricFamily(self._name, self._text)
        num = 0
        rows: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, map(float, found.bounds)), "+Inf"), found.counts, strict=True):
            num += count
            rows.append((bound, num))
        family.add_metric((), rows, found.total)
        yield family


class LoopCounter(Collector):
    """A counter without labels; `inc` must be called from one thread only."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self._num = 0
        registry.register(self)

    def inc(self, num: int = 1) -> None:
        """Add `num` to the counter."""
        self._num += num

    def collect(self) -> Iterator[Metric]:
        """Yield the current count."""
        yield CounterMetricFamily(self._name, self._text, value=self._num)


TTFT_BUCKETS_S: Final = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96)
ITL_BUCKETS_S: Final = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048)
LAG_BUCKETS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)

E2E_BUCKETS_S: Final = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 102.4, 204.8, 409.6)


class RouterMetrics:
    """The router's counters and histograms. Callers update the named attributes and read with `render` or `total`."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.ttft_s = LoopHistogram(
            "baton_time_to_first_token_seconds",
            "From the request's arrival to its first token",
            buckets=TTFT_BUCKETS_S,
            registry=self._registry,
        )
        self.itl_s = LoopHistogram(
            "baton_inter_token_latency_seconds",
            "Between two chunks of one stream after the first; a chunk holds what one step emitted, or several",
            buckets=ITL_BUCKETS_S,
            registry=self._registry,
        )
        self.event_loop_lag = LoopHistogram(
            "baton_event_loop_lag_seconds",
            "How much later than it should the router's event loop came to its clock tick: all streams wait so long",
            buckets=LAG_BUCKETS_S,
            registry=self._registry,
        )
        self.e2e_s = LoopHistogram(
            "baton_e2e_request_latency_seconds",
            "From a request's arrival to its last token; of requests that ended well",
            buckets=E2E_BUCKETS_S,
            registry=self._registry,
        )
        self.queue_s = LoopHistogram(
            "baton_request_queue_time_seconds",
            "From a request's arrival to where the worker that reads its prompt begins with it; likewise",
            buckets=TTFT_BUCKETS_S,
            registry=self._registry,
        )
        self.num_streams_open = Gauge("baton_num_streams_open", "Requests open at the router", registry=self._registry)
        self.requests_finished = self._counter("requests_finished", "Requests that ended well", "reason")
        self.answers = self._counter("answers", "Answers that ended well: split, local or prefill", "path")
        self.requests_failed = self._counter("requests_failed", "Requests that ended with an error", "error")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests")
        self.cached_tokens = self._counter("cached_tokens", "Prompt tokens whose KV the prefill worker had already")
        self.expected_cached_tokens = self._counter(
            "expected_cached_tokens", "Prompt tokens whose KV the router thought that it had"
        )
        self.generation_tokens = LoopCounter(
            "baton_generation_tokens", "Tokens streamed to clients", registry=self._registry
        )
        self.handoff_retries = self._counter("handoff_retries", "Attempts after a failed hand-off")
        self.retries_refused = self._counter("retries_refused", "Such attempts that the retry budget did not allow")
        self.migrations = self._counter("migrations", "Answers that went on elsewhere after a lost worker", "cause")

    def render(self) -> str:
        """Render all metrics in Prometheus' text format."""
        return generate_latest(self._registry).decode("utf-8")

    @property
    def registry(self) -> CollectorRegistry:
        """The registry, for an exporter."""
        return self._registry

    def total(self, name: str) -> int:
        """Sum a counter over its labels; `name` is the attribute's name."""
        family = f"baton_{name}"
        metrics = (metric for metric in self._registry.collect() if metric.name == family)
        samples = (sample for metric in metrics for sample in metric.samples if sample.name == f"{family}_total")
        return int(sum(sample.value for sample in samples))

    def ended_with_errors(self) -> tuple[int, int]:
        """Count requests that failed, and those that were invalid, refused, or cancelled by their clients."""
        failed = clients = 0
        for family in self.requests_failed.collect():
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    is_own = is_clients(sample.labels["error"])
                    failed, clients = failed + int(sample.value) * (not is_own), clients + int(sample.value) * is_own
        return failed, clients

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"baton_{name}", text, labels, registry=self._registry)


class SpanCollector(Collector):
    """Counts requests whose spans were lost, at a router that traces."""

    def __init__(self, num_dropped: Callable[[], int]) -> None:
        self._num_dropped = num_dropped

    def collect(self) -> Iterator[Metric]:
        """Yield the current count."""
        text = "Requests whose spans the router lost"
        yield CounterMetricFamily("baton_traces_dropped", text, value=self._num_dropped())


def is_clients(kind: str) -> bool:
    """Whether the client caused an error, given by its name: invalid request, access refused or request cancelled."""
    own = (errors.InvalidRequest, errors.AccessRefused, errors.RequestCancelled)
    found = getattr(errors, kind, None)
    return isinstance(found, type) and issubclass(found, own)
