"""What the queue before the workers holds and refuses, as metrics. Any thread: counts may be a step apart."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from baton.router.admission.fair_queue import FairQueue


class AdmissionCollector(Collector):
    """Shows one queue."""

    def __init__(self, queue: FairQueue) -> None:
        self._queue = queue

    def collect(self) -> Iterator[Metric]:
        """As of now."""
        waiting = GaugeMetricFamily("baton_router_requests_waiting", "Requests that wait at the router for their turn")
        waiting.add_metric((), self._queue.num_waiting)
        yield waiting
        refused = CounterMetricFamily(
            "baton_router_requests_refused", "Requests that were refused a place, by the reason", labels=("reason",)
        )
        for reason, count in tuple(self._queue.num_refused.items()):
            refused.add_metric((reason,), count)
        yield refused
