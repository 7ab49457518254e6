"""Metrics of the hand-off: from what workers report to names that operators read."""

import pytest

from baton.core.clock import VirtualClock
from baton.core.errors import MalformedMessage
from baton.proto import worker_pb2
from baton.router.metrics import RouterMetrics
from baton.router.placement.members import Members
from baton.router.worker_metrics import WorkerCollector

pytestmark = pytest.mark.fast

DOCUMENTED = "bytes seconds exposed_seconds frames resent late_dropped quarantined_blocks refused".split()


def state(worker, role="decode", **transfer):
    state = worker_pb2.WorkerState(
        worker_id=worker, role=role, epoch=1, address="a", kv_address="tcp://a", max_model_len=9, block_size=16
    )
    state.inventory.num_blocks = 1
    state.inventory.transfer.MergeFrom(worker_pb2.TransferCounts(**transfer))
    return state


@pytest.fixture
def members():
    return Members(VirtualClock())


@pytest.fixture
def metrics(members):
    found = RouterMetrics()
    found.registry.register(WorkerCollector(members))
    return found


def test_every_documented_metric_is_there(members, metrics):
    times = worker_pb2.Distribution(bounds=(0.1, 1.0), counts=(1, 2, 1), total=5.5)
    members.heartbeat(state("d0", bytes=7, transfer_times=times, exposed_times=times))
    members.heartbeat(state("d1", corrupt=3))  # it reports no times
    text = metrics.render()
    for name in DOCUMENTED:
        assert f"# HELP baton_kv_transfer_{name}" in text
    assert 'baton_kv_transfer_bytes_total{role="decode",worker="d0"} 7.0' in text
    for name in ("seconds", "exposed_seconds"):
        assert f"# TYPE baton_kv_transfer_{name} histogram" in text
        for bound, num in (("0.1", 1), ("1.0", 3), ("+Inf", 4)):
            assert f'baton_kv_transfer_{name}_bucket{{le="{bound}",role="decode",worker="d0"}} {num}.0' in text
        assert f'baton_kv_transfer_{name}_sum{{role="decode",worker="d0"}} 5.5' in text
        assert f'baton_kv_transfer_{name}_count{{role="decode",worker="d0"}} 4.0' in text
        assert f'{name}_bucket{{le="0.1",role="decode",worker="d1"}}' not in text
    assert 'baton_kv_transfer_corrupt_total{role="decode",worker="d1"} 3.0' in text
    assert 'baton_kv_transfer_quarantined_blocks{role="decode",worker="d1"} 0.0' in text


def test_metrics_are_read_when_they_are_shown(members, metrics):
    assert "d7" not in metrics.render()
    members.heartbeat(state("d7"))
    assert 'worker="d7"' in metrics.render()


def test_no_time_is_a_summary(members, metrics):
    """A summary without quantiles says a mean alone, and tools that read percentiles skip it."""
    members.heartbeat(state("d0"))
    kinds = {family.name: family.type for family in metrics.registry.collect()}
    assert "summary" not in kinds.values()
    times = [name for name in kinds if name.endswith("_seconds") and kinds[name] not in ("gauge", "counter")]
    assert {kinds[name] for name in times} == {"histogram"}
    wanted = {"kv_transfer_seconds", "kv_transfer_exposed_seconds", "request_queue_time_seconds"}
    assert {f"baton_{name}" for name in wanted | {"e2e_request_latency_seconds"}} <= set(times)


def test_heartbeats_feed_the_metrics(members, metrics):
    said = state("p0", "prefill", transfers=1, bytes=5, resent=2)
    said.inventory.transfer.transfer_times.MergeFrom(worker_pb2.Distribution(bounds=[0.5], counts=[0, 1], total=2.0))
    members.heartbeat(said)
    text = metrics.render()
    its = 'role="prefill",worker="p0"}'
    assert f"baton_kv_transfer_bytes_total{{{its} 5.0" in text
    assert f"baton_kv_transfer_resent_total{{{its} 2.0" in text
    assert f"baton_kv_transfer_seconds_sum{{{its} 2.0" in text
    assert f"baton_kv_transfer_exposed_seconds_sum{{{its}" not in text
    said.inventory.transfer.exposed_times.MergeFrom(worker_pb2.Distribution(bounds=[0.5], counts=[1]))
    with pytest.raises(MalformedMessage):
        members.heartbeat(said)


def test_what_one_thread_feeds_reads_as_prometheus_own():
    from prometheus_client import CollectorRegistry, Counter, Histogram
    from prometheus_client.exposition import generate_latest

    from baton.router.metrics import LoopCounter, LoopHistogram

    values, bounds = (0.0, 0.005, 0.0051, 0.4, 7.0, 1e9), (0.005, 0.01, 1.28)
    own, theirs = CollectorRegistry(), CollectorRegistry()
    pairs = [
        (LoopHistogram("baton_x_seconds", "text", bounds, own), LoopCounter("baton_y", "text", own)),
        (
            Histogram("baton_x_seconds", "text", buckets=bounds, registry=theirs),
            Counter("baton_y", "text", registry=theirs),
        ),
    ]
    for histogram, counter in pairs:
        for value in values:
            histogram.observe(value)
        counter.inc()
        counter.inc(3)
    wanted = [line for line in generate_latest(theirs).decode().splitlines() if "_created" not in line]
    assert generate_latest(own).decode().splitlines() == wanted
