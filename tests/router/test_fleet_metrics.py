"""What the router shows of workers that come, go and come again."""

import pytest

from baton.core.clock import VirtualClock
from baton.proto import worker_pb2
from baton.router.metrics import SpanCollector
from baton.router.placement.members import FORGET_S, Members
from baton.router.worker_metrics import WORKER_METRICS, WorkerCollector

pytestmark = pytest.mark.fast


OF_FLEET = {
    "worker_up",
    "worker_heartbeat_age_seconds",
    "worker_incarnations",
    "kv_blocks",
    "num_requests_held",
    "num_kv_receives",
}


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
        inventory=worker_pb2.Inventory(**held, num_requests_held=4, num_kv_receives=3, **inventory),
    )


def shown(members):
    """All samples, but for what `test_worker_metrics` is about."""
    families = WorkerCollector(members).collect()
    return {
        (sample.name.removeprefix("baton_"), sample.labels.get("state", "")): sample.value
        for family in families
        for sample in family.samples
        if family.name.removeprefix("baton_") in OF_FLEET
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
        ("worker_incarnations_total", ""): 1,
        ("kv_blocks", "free"): 7,
        ("kv_blocks", "reserved"): 2,
        ("kv_blocks", "quarantined"): 1,
        ("num_requests_held", ""): 4,
        ("num_kv_receives", ""): 3,
    }
    for _ in range(10):
        clock.advance(0.2)
        members.expire()
    found = shown(members)
    assert found[("worker_up", "")] == 0
    assert ("kv_blocks", "reserved") not in found, "what a lost worker holds is not known"
    families = {family.name: family.samples for family in WorkerCollector(members).collect()}
    shown_of_lost = {name.removeprefix("baton_") for name, samples in families.items() if samples}
    assert shown_of_lost == {metric.name for metric in WORKER_METRICS if metric.is_of_lost}
    assert shown_of_lost == {"worker_up", "worker_heartbeat_age_seconds", "worker_incarnations"}
    members.heartbeat(state(2))
    found = shown(members)
    assert (found[("worker_up", "")], found[("worker_incarnations_total", "")]) == (1, 2)


def test_a_worker_that_does_not_come_back_keeps_its_alert():
    clock = VirtualClock()
    members = Members(clock)
    members.heartbeat(state(1))
    for _ in range(4 * int(FORGET_S) + 20):
        clock.advance(0.25)
        members.expire()
    assert members.all() == []
    assert shown(members)[("worker_up", "")] == 0
    members.dismiss_gone()
    assert ("worker_up", "") not in shown(members)


def test_checkpoints_of_state_are_shown_of_workers_that_have_room_for_them():
    members = Members(VirtualClock())
    members.heartbeat(state(1))
    names = {"state_checkpoints", "state_checkpoints_evicted"}

    def found():
        families = [one for one in WorkerCollector(members).collect() if one.name.removeprefix("baton_") in names]
        assert len(families) == 2
        return {
            (sample.name.removeprefix("baton_"), sample.labels.get("state", "")): sample.value
            for family in families
            for sample in family.samples
        }

    assert found() == {}
    counts = {"num_state_checkpoints": 3, "num_state_checkpoint_slots": 5, "num_state_checkpoints_evicted": 2}
    members.heartbeat(state(1, **counts))
    assert found() == {
        ("state_checkpoints", "held"): 3,
        ("state_checkpoints", "free"): 2,
        ("state_checkpoints_evicted_total", ""): 2,
    }


def test_lost_traces_are_counted():
    [family] = SpanCollector(lambda: 5).collect()
    assert [(sample.name, sample.value) for sample in family.samples] == [("baton_traces_dropped_total", 5)]
