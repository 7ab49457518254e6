"""What became of the router's canaries, and who is unfit, as metrics. Any thread: counts may be a step apart."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from baton.router.placement.canaries import Canaries
from baton.router.placement.canary import CanaryWatch
from baton.router.placement.members import Members


class CanaryCollector(Collector):
    """Shows one router's."""

    def __init__(self, canaries: Canaries, watch: CanaryWatch, members: Members) -> None:
        self._canaries = canaries
        self._watch = watch
        self._members = members

    def collect(self) -> Iterator[Metric]:
        """As of now; a canary counts for each worker that it was sent to."""
        sent = CounterMetricFamily(
            "baton_canaries",
            "The router's own requests to idle workers, by how they ended",
            labels=("worker", "role", "outcome"),
        )
        for labels, count in tuple(self._canaries.counts.items()):
            sent.add_metric(labels, count)
        unfit = GaugeMetricFamily(
            "baton_worker_unfit",
            "1 while a live worker answers neither canaries nor clients, else 0",
            labels=("worker", "role"),
        )
        for member in self._members.all():
            if member.alive:
                unfit.add_metric((member.state.worker_id, member.state.role), self._watch.is_unfit(member.incarnation))
        yield from (sent, unfit)
