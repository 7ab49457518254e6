"""What the router shows of workers that come, go and come again."""

import pytest

from baton.core.clock import VirtualClock
from baton.core.fleet_metrics import FleetCollector, SpanCollector
from baton.proto import worker_pb2
from baton.router.fleet import fleet_totals
from baton.router.members import Members

pytestmark = pytest.mark.fast


def state(epoch, **inventory):
    held = {"num_blocks": 10, "num_blocks_free": 7, "num_blocks_reserved": 2, "num_blocks_quarantined": 1}
    return worker_pb2.WorkerState(
        worker_id="d",
        role="decode",
        epoch=epoch,
        address="a:1",
        kv_address="tcp://a:2",
        max_model_len=8,
        block_size=16,
        inventory=worker_pb2.Inventory(**held, num_attends=4, num_landings=3, **inventory),
    )


def shown(members):
    families = FleetCollector(lambda: fleet_totals(members)).collect()
    return {
        (sample.name.removeprefix("baton_"), sample.labels.get("state", "")): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_worker_is_up_with_what_it_holds_until_it_is_lost_and_counts_its_lives():
    clock = VirtualClock()
    members = Members(clock)
    members.heartbeat(state(1))
    clock.advance(0.25)
    found = shown(members)
    assert found == {
        ("worker_up", ""): 1,
        ("worker_heartbeat_age_seconds", ""): 0.25,
        ("worker_lives_total", ""): 1,
        ("kv_blocks", "free"): 7,
        ("kv_blocks", "reserved"): 2,
        ("kv_blocks", "quarantined"): 1,
        ("num_requests_held", ""): 4,
        ("num_landings", ""): 3,
    }
    for _ in range(10):
        clock.advance(0.2)
        members.expire()
    found = shown(members)
    assert found[("worker_up", "")] == 0
    assert ("kv_blocks", "reserved") not in found, "what a lost worker holds is not known"
    members.heartbeat(state(2))
    found = shown(members)
    assert (found[("worker_up", "")], found[("worker_lives_total", "")]) == (1, 2)


def test_lost_traces_are_counted():
    [family] = SpanCollector(lambda: 5).collect()
    assert [(sample.name, sample.value) for sample in family.samples] == [("baton_traces_dropped_total", 5)]
