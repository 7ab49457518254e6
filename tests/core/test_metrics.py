"""Metrics of the hand-off: from what workers report to names that operators read."""

import dataclasses

import pytest

from baton.core.distribution import Distribution
from baton.core.errors import MalformedMessage
from baton.core.metrics import RouterMetrics, TransferTotals

pytestmark = pytest.mark.fast

DOCUMENTED = "bytes seconds exposed_seconds frames resent late_dropped quarantined_blocks refused".split()


def totals(worker, **more):
    zero = {field.name: 0 for field in dataclasses.fields(TransferTotals)} | {"seconds": None, "exposed_seconds": None}
    return TransferTotals(**zero | {"worker": worker, "role": "decode"} | more)


def test_every_documented_metric_is_there():
    metrics = RouterMetrics()
    times = Distribution((0.1, 1.0), (1, 2, 1), 5.5)
    silent = totals("d1", corrupt=3, seconds=None, exposed_seconds=None)  # it reports no times
    metrics.watch_transfers(lambda: [totals("d0", bytes=7, seconds=times, exposed_seconds=times), silent])
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


def test_metrics_are_read_when_they_are_shown():
    found = []
    metrics = RouterMetrics()
    metrics.watch_transfers(lambda: found)
    assert "d7" not in metrics.render()
    found.append(totals("d7"))
    assert 'worker="d7"' in metrics.render()


def test_no_time_is_a_summary():
    """A summary without quantiles says a mean alone, and tools that read percentiles skip it."""
    metrics = RouterMetrics()
    metrics.watch_transfers(lambda: [totals("d0")])
    metrics.watch_workers(lambda: [])
    kinds = {family.name: family.type for family in metrics.registry.collect()}
    assert "summary" not in kinds.values()
    times = [name for name in kinds if name.endswith("_seconds") and kinds[name] not in ("gauge", "counter")]
    assert {kinds[name] for name in times} == {"histogram"}
    wanted = {"kv_transfer_seconds", "kv_transfer_exposed_seconds", "request_queue_time_seconds"}
    assert {f"baton_{name}" for name in wanted | {"e2e_request_latency_seconds"}} <= set(times)


def test_heartbeats_feed_the_metrics():
    from baton.core.clock import VirtualClock
    from baton.proto import worker_pb2
    from baton.router.members import Members

    members = Members(VirtualClock())
    state = worker_pb2.WorkerState(worker_id="p0", role="prefill", epoch=1, address="a", max_model_len=9, block_size=16)
    state.inventory.transfer.MergeFrom(worker_pb2.TransferCounts(transfers=1, bytes=5, resent=2))
    times = worker_pb2.Distribution(bounds=[0.5], counts=[0, 1], total=2.0)
    state.inventory.transfer.transfer_times.CopyFrom(times)
    members.heartbeat(state)
    (found,) = members.transfers()
    assert (found.worker, found.role, found.bytes, found.resent) == ("p0", "prefill", 5, 2)
    assert (found.seconds, found.exposed_seconds) == (Distribution((0.5,), (0, 1), 2.0), None)
    state.inventory.transfer.exposed_times.MergeFrom(worker_pb2.Distribution(bounds=[0.5], counts=[1]))
    with pytest.raises(MalformedMessage):
        members.heartbeat(state)


def test_what_one_thread_feeds_reads_as_prometheus_own():
    from prometheus_client import CollectorRegistry, Counter, Histogram
    from prometheus_client.exposition import generate_latest

    from baton.core.loop_metrics import LoopCounter, LoopHistogram

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
