"""Which workers there are, whether they are heard of, and whether what they hold belongs to somebody.

Unlike `core.worker_metrics` this shows lost workers too, until the router forgets them; what those held is unknown, so
their blocks and requests are left out.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTotals:
    """One worker as the router knows it.

    Attributes:
        worker: its name.
        role: of it.
        is_up: heard of within the time that makes a worker lost.
        heartbeat_age_s: since it was last heard of.
        num_lives: of it that the router has seen.
        num_blocks: of its KV pool, by state: free, reserved, quarantined; they add up to the pool.
        num_held: requests, in any state, that it has not let go of.
        num_landings: granted (decode) or pushed into (prefill) and not yet over.
    """

    worker: str
    role: str
    is_up: bool
    heartbeat_age_s: float
    num_lives: int
    num_blocks: dict[str, int]
    num_held: int
    num_landings: int


LABELS: Final = ("worker", "role")


class FleetCollector(Collector):
    """Turns the router's table into metrics by worker and role."""

    def __init__(self, read: Callable[[], Iterable[FleetTotals]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """As of now, and of the last heartbeats."""
        up = GaugeMetricFamily("baton_worker_up", "1 while a worker is heard of, 0 once it is lost", labels=LABELS)
        age = GaugeMetricFamily("baton_worker_heartbeat_age_seconds", "Since a worker was last heard of", labels=LABELS)
        lives = CounterMetricFamily("baton_worker_lives", "Lives of a worker that the router has seen", labels=LABELS)
        blocks = GaugeMetricFamily("baton_kv_blocks", "KV blocks of a worker, by state", labels=(*LABELS, "state"))
        held = GaugeMetricFamily("baton_num_requests_held", "Requests a worker has not let go of", labels=LABELS)
        landings = GaugeMetricFamily("baton_num_landings", "Hand-offs under way at a worker", labels=LABELS)
        for item in self._read():
            labels = (item.worker, item.role)
            up.add_metric(labels, item.is_up)
            age.add_metric(labels, item.heartbeat_age_s)
            lives.add_metric(labels, item.num_lives)
            if item.is_up:
                for state, num in item.num_blocks.items():
                    blocks.add_metric((*labels, state), num)
                held.add_metric(labels, item.num_held)
                landings.add_metric(labels, item.num_landings)
        yield from (up, age, lives, blocks, held, landings)


class SpanCollector(Collector):
    """Of a router that traces: requests whose spans were lost."""

    def __init__(self, num_dropped: Callable[[], int]) -> None:
        self._num_dropped = num_dropped

    def collect(self) -> Iterator[Metric]:
        """As of now."""
        text = "Requests whose spans the router lost"
        yield CounterMetricFamily("baton_traces_dropped", text, value=self._num_dropped())
