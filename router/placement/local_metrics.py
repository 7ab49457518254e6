"""Which way prompts were sent, and why, as metrics. Any thread: counts may be a step apart."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from baton.router.placement.local_prefill import LocalPrefill


class LocalPrefillCollector(Collector):
    """Shows one router's choices."""

    def __init__(self, local: LocalPrefill) -> None:
        self._local = local

    def collect(self) -> Iterator[Metric]:
        """As of now."""
        chosen = CounterMetricFamily(
            "baton_prefill_choices",
            "Attempts whose prompt went to a prefill worker (split) or to the decode worker (local), by the reason",
            labels=("path", "reason"),
        )
        for (path, reason), count in tuple(self._local.choices.items()):
            chosen.add_metric((path, reason), count)
        yield chosen
