"""What the router's prefix index holds and missed, as metrics. Any thread: counts may be a step apart."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from baton.router.placement.prefix_index import PrefixIndex


class PrefixCollector(Collector):
    """Shows one index."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    def collect(self) -> Iterator[Metric]:
        """As of now."""
        blocks = GaugeMetricFamily(
            "baton_prefix_index_blocks", "Cached blocks that the router has heard of", labels=("worker",)
        )
        for incarnation in self._index.incarnations():
            blocks.add_metric((incarnation.worker_id,), self._index.num_names_of(incarnation))
        yield blocks
        counts = (
            ("gaps", "Changes of a prefix cache that the router has missed and asked for", self._index.num_gaps),
            ("ignored", "Cached blocks that the router's index had no room for", self._index.num_ignored),
        )
        for name, text, count in counts:
            counter = CounterMetricFamily(f"baton_prefix_index_{name}", text)
            counter.add_metric((), count)
            yield counter
