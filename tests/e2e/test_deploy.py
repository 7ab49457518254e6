"""Every metric, label and label value that deploy/ names is one that a served deployment shows."""

import json
import re

import pytest
from prometheus_client.samples import Sample

from baton.client import BatonClient
from baton.cluster.commands.top import top
from baton.cluster.outcome import ExitCode, Output
from baton.core.clock import VirtualClock
from baton.proto import worker_pb2
from baton.router.placement.members import Members
from baton.router.worker_metrics import WorkerCollector
from baton.tests.deploy.files import expressions
from baton.tests.deploy.promql import parse
from baton.tests.e2e.test_metrics import Reader, Running, is_settled, prompt_of, read_all, total

PROMETHEUS_OWN = {"up": {"job", "instance"}}


@pytest.fixture(scope="module")
def running():
    deployment = Running()
    with BatonClient(deployment.address) as client:
        read_all(client, 4)
        Reader(client, (1,) * 5000, max_tokens=5).join(30.0)
    yield deployment
    deployment.close()


def with_graphs():
    """What only a GPU shows."""
    state = worker_pb2.WorkerState(
        worker_id="d", role="decode", epoch=1, address="a", kv_address="tcp://a", max_model_len=9, block_size=16
    )
    graphs = {"num_captured": 3, "failed": {"a": "b"}, "num_steps_replayed": 9, "num_steps_eager": {"too wide": 1}}
    state.inventory.num_blocks = 1
    state.inventory.graphs.CopyFrom(worker_pb2.GraphCounts(**graphs))
    members = Members(VirtualClock())
    members.heartbeat(state)
    for family in WorkerCollector(members).collect():
        if "graph" in family.name:
            yield from family.samples


@pytest.fixture(scope="module")
def shown(running):
    """Label values by label, by series name."""
    running.wait(is_settled)
    found = {}
    served = [Sample(name, dict(labels), value) for name, labels in (running.scrape()) for value in (0.0,)]
    for sample in (*served, *with_graphs()):
        labels = found.setdefault(sample.name, {})
        for label, value in sample.labels.items():
            labels.setdefault(label, set()).add(value)
    return found


@pytest.mark.parametrize(("where", "expression"), expressions().items())
def test_what_an_expression_names_is_shown(where, expression, shown):
    parsed = parse(expression)
    labels = {name for own in PROMETHEUS_OWN.values() for name in own}
    for selector in parsed.selectors:
        if selector.name in PROMETHEUS_OWN:
            assert {label for label, _, _ in selector.matchers} <= PROMETHEUS_OWN[selector.name]
            continue
        assert selector.name in shown, f"{where}: no series {selector.name}"
        have = shown[selector.name]
        labels |= have.keys()
        for label, operator, value in selector.matchers:
            if label in PROMETHEUS_OWN["up"]:
                continue  # Prometheus adds it to every series
            assert label in have, f"{where}: {selector.name} has no label {label}"
            if operator == "=":
                assert value in have[label], f"{where}: {label}={value} of {selector.name}"
            elif operator == "=~":
                assert any(re.fullmatch(value, each) for each in have[label])
    assert parsed.grouping <= labels, f"{where}: groups by what is no label"


def test_blocks_by_state_are_the_pool_and_none_is_held_without_a_request(running):
    found = running.wait(lambda found: is_settled(found) and total(found, "num_requests_held") == 0)
    for worker in ("prefill-0", "decode-0"):
        assert total(found, "kv_blocks", worker=worker, state="free") > 0
        assert total(found, "kv_blocks", worker=worker, state="reserved") == 0
        assert total(found, "kv_blocks", worker=worker, state="quarantined") == 0
        assert total(found, "num_kv_receives", worker=worker) == 0
        assert total(found, "worker_up", worker=worker) == 1
        assert total(found, "worker_heartbeat_age_seconds", worker=worker) < 1.5
        assert total(found, "worker_incarnations_total", worker=worker) == 1


def test_top_shows_what_is_decoded_meanwhile(running, capsys):
    with BatonClient(running.address) as client:
        readers = [Reader(client, prompt_of(at), max_tokens=400, ignore_eos=True) for at in range(3)]
        running.wait(lambda found: total(found, "num_requests_running", role="decode") == 3)
        assert top(running.address, Output(True), interval_s=0.5) is ExitCode.OK
        for reader in readers:
            reader.join(60.0)
    data = json.loads(capsys.readouterr().out)
    prefill, decode = sorted(data["workers"], key=lambda worker: worker["role"], reverse=True)
    assert (prefill["worker"], decode["worker"]) == ("prefill-0", "decode-0")
    assert 1 <= data["requests"]["running"] <= 3
    assert data["tokens_per_s"] > 0
    assert decode["tokens_per_s"] > 0
    assert 0 <= decode["acceptance"] <= 1
    assert 0 <= decode["kv_use"] < 1
    [path] = data["paths"]
    assert path["has_met"]
