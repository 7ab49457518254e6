"""Metrics that one thread feeds with every chunk of every stream: prometheus_client's own take a lock for each bucket.

Any thread may read them, and may then find the newest value in the count and not yet in the sum.
"""

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from baton.core.distribution import Buckets


class LoopHistogram(Collector):
    """A histogram without labels; `observe` is for one thread."""

    def __init__(self, name: str, text: str, buckets: Sequence[float], registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self._buckets = Buckets(buckets)
        self.observe = self._buckets.observe
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """As of now."""
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
    """A counter without labels; `inc` is for one thread."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self._num = 0
        registry.register(self)

    def inc(self, num: int = 1) -> None:
        """So many more."""
        self._num += num

    def collect(self) -> Iterator[Metric]:
        """As of now."""
        yield CounterMetricFamily(self._name, self._text, value=self._num)
