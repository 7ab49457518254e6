"""The metrics of one process, under their public names; each instance owns its registry, so tests run several.

Names keep vLLM's meanings under `baton_`. Only what is fed is defined here.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from baton.core.distribution import Distribution
from baton.core.loop_metrics import LoopCounter, LoopHistogram
from baton.core.worker_metrics import WorkerCollector, WorkerTotals, cumulative

TTFT_BUCKETS_S: Final = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96)
ITL_BUCKETS_S: Final = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048)
LAG_BUCKETS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)

E2E_BUCKETS_S: Final = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 102.4, 204.8, 409.6)


class RouterMetrics:
    """What the router counts. Feeding is by the named attributes; reading is `render` or `total`."""

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
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry).decode("utf-8")

    def watch_transfers(self, read: Callable[[], Iterable["TransferTotals"]]) -> None:
        """Show what workers report of the hand-off; `read` is called whenever the metrics are, on any thread."""
        self._registry.register(TransferCollector(read))

    def watch_workers(self, read: Callable[[], Iterable[WorkerTotals]]) -> None:
        """Show what workers report of themselves, likewise."""
        self._registry.register(WorkerCollector(read))

    @property
    def registry(self) -> CollectorRegistry:
        """For an exporter."""
        return self._registry

    def total(self, name: str) -> int:
        """Sum of a counter over its labels; `name` as in the attributes."""
        family = f"baton_{name}"
        metrics = (metric for metric in self._registry.collect() if metric.name == family)
        samples = (sample for metric in metrics for sample in metric.samples if sample.name == f"{family}_total")
        return int(sum(sample.value for sample in samples))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"baton_{name}", text, labels, registry=self._registry)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTotals:
    """What one life of one worker says of the hand-off (proto/worker.proto: TransferCounts)."""

    worker: str
    role: str
    bytes: int
    seconds: Distribution | None
    exposed_seconds: Distribution | None
    frames: int
    resent: int
    late_dropped: int
    corrupt: int
    quarantined_blocks: int
    fallbacks: int
    credit_stall_seconds: float
    refused: int


_COUNTERS: Final = (
    ("bytes", "KV pushed (prefill) or landed (decode)"),
    ("frames", "Frames pushed or landed"),
    ("resent", "Frames pushed again"),
    ("late_dropped", "Frames that no landing wanted any more"),
    ("corrupt", "Frames that failed their check"),
    ("fallbacks", "Times that a worse lane was used than should work"),
    ("credit_stall_seconds", "Time in which frames were ready and the window was full"),
    ("refused", "Connections and HELLOs to decode workers without the deployment's secret"),
)
_HISTOGRAMS: Final = (
    ("seconds", "From the first frame to the seal"),
    ("exposed_seconds", "From the end of the prefill to the seal"),
)


class TransferCollector(Collector):
    """Turns the reports of all workers into `baton_kv_transfer_*`, by worker and role."""

    def __init__(self, read: Callable[[], Iterable[TransferTotals]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """As of the last heartbeats. A worker's counters begin at 0 again with each life."""
        labels = ("worker", "role")
        found = tuple(self._read())
        for name, text in _COUNTERS:
            counter = CounterMetricFamily(f"baton_kv_transfer_{name}", text, labels=labels)
            for item in found:
                counter.add_metric((item.worker, item.role), getattr(item, name))
            yield counter
        for name, text in _HISTOGRAMS:
            histogram = HistogramMetricFamily(f"baton_kv_transfer_{name}", text, labels=labels)
            for item in found:
                times: Distribution | None = getattr(item, name)
                if times is not None:
                    histogram.add_metric((item.worker, item.role), cumulative(times), times.total)
            yield histogram
        gauge = GaugeMetricFamily(
            "baton_kv_transfer_quarantined_blocks", "Blocks that somebody might still write", labels=labels
        )
        for item in found:
            gauge.add_metric((item.worker, item.role), item.quarantined_blocks)
        yield gauge
