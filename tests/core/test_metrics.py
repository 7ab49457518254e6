"""Metrics of the hand-off: from what workers report to names that operators read."""

import dataclasses

import pytest

from baton.core.metrics import RouterMetrics, TransferTotals

pytestmark = pytest.mark.fast

DOCUMENTED = "bytes seconds exposed_seconds frames resent late_dropped quarantined_blocks refused".split()


def totals(worker, **more):
    zero = {field.name: 0 for field in dataclasses.fields(TransferTotals)}
    return TransferTotals(**zero | {"worker": worker, "role": "decode"} | more)


def test_every_documented_metric_is_there():
    metrics = RouterMetrics()
    metrics.watch_transfers(lambda: [totals("d0", bytes=7, transfers=2, exposed_seconds=0.5), totals("d1", corrupt=3)])
    text = metrics.render()
    for name in DOCUMENTED:
        assert f"# HELP baton_kv_transfer_{name}" in text
    assert 'baton_kv_transfer_bytes_total{role="decode",worker="d0"} 7.0' in text
    assert 'baton_kv_transfer_exposed_seconds_sum{role="decode",worker="d0"} 0.5' in text
    assert 'baton_kv_transfer_exposed_seconds_count{role="decode",worker="d0"} 2.0' in text
    assert 'baton_kv_transfer_corrupt_total{role="decode",worker="d1"} 3.0' in text
    assert 'baton_kv_transfer_quarantined_blocks{role="decode",worker="d1"} 0.0' in text


def test_metrics_are_read_when_they_are_shown():
    found = []
    metrics = RouterMetrics()
    metrics.watch_transfers(lambda: found)
    assert "d7" not in metrics.render()
    found.append(totals("d7"))
    assert 'worker="d7"' in metrics.render()


def test_heartbeats_feed_the_metrics():
    from baton.core.clock import VirtualClock
    from baton.proto import worker_pb2
    from baton.router.members import Members

    members = Members(VirtualClock())
    state = worker_pb2.WorkerState(worker_id="p0", role="prefill", epoch=1, address="a", max_model_len=9, block_size=16)
    state.inventory.transfer.MergeFrom(worker_pb2.TransferCounts(transfers=1, bytes=5, resent=2))
    members.heartbeat(state)
    (found,) = members.transfers()
    assert (found.worker, found.role, found.bytes, found.resent) == ("p0", "prefill", 5, 2)


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
