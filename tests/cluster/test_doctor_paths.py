"""The matrix of KV paths that `baton doctor --address` shows, from what workers report."""

import importlib.util
import json
import os
import sys

import pytest

from baton.cluster import cli
from baton.cluster.doctor import doctor
from baton.cluster.doctor.wires import format_paths, paths
from baton.proto import admin_pb2, worker_pb2

pytestmark = pytest.mark.fast


def worker(name, role, *, kv_address="", alive=True, path=None):
    inventory = worker_pb2.Inventory()
    for item in path or ():
        inventory.transfer.paths.append(item)
    state = worker_pb2.WorkerState(worker_id=name, role=role, kv_address=kv_address, inventory=inventory)
    return admin_pb2.WorkerStatus(state=state, alive=alive)


@pytest.fixture
def status():
    fast = worker_pb2.KvPath(kv_address="tcp://a", data_path="shm", gbps=9.5, round_trip_ms=0.12, transfers=3, bytes=99)
    slow = worker_pb2.KvPath(kv_address="tcp://b", data_path="inline", why="shm: another host; raw: refused")
    none = worker_pb2.KvPath(kv_address="tcp://a", data_path="", why="nvlink: no GPU")
    workers = [
        worker("prefill-0", "prefill", path=[fast, slow]),
        worker("prefill-1", "prefill", path=[none]),
        worker("prefill-2", "prefill", alive=False),
        worker("decode-0", "decode", kv_address="tcp://a"),
        worker("decode-1", "decode", kv_address="tcp://b"),
        worker("decode-2", "decode", kv_address="tcp://c", alive=False),
    ]
    return admin_pb2.StatusReply(workers=workers)


def test_every_live_pair_has_a_path(status):
    found = {(path.prefill, path.decode): path for path in paths(status)}
    assert set(found) == {(f"prefill-{p}", f"decode-{d}") for p in (0, 1) for d in (0, 1)}
    first = found["prefill-0", "decode-0"]
    assert (first.data_path, first.gbps, first.round_trip_ms, first.transfers) == ("shm", 9.5, 0.12, 3)
    assert found["prefill-0", "decode-1"].gbps is None
    assert found["prefill-1", "decode-0"].is_broken
    assert not found["prefill-1", "decode-1"].has_met
    assert not found["prefill-1", "decode-1"].is_broken


def test_the_matrix_says_data_path_rate_latency_and_why_not_better(status):
    text = format_paths(paths(status))
    assert "shm 9.5 GB/s 0.12 ms" in text
    assert "NONE" in text
    assert "prefill-0 to decode-1: shm: another host; raw: refused" in text
    assert text.splitlines()[0].split() == ["KV", "path", "decode-0", "decode-1"]
    assert format_paths([]).startswith("no pair")


def test_doctor_warns_about_a_pair_without_a_data_path(status, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "check_all", lambda port: iter([doctor.Finding("one", "ok", "fine")]))
    monkeypatch.setattr(doctor, "fetch_status", lambda address: status)
    monkeypatch.setattr(doctor, "wires", lambda address, status, ca_file: iter(()))
    monkeypatch.setattr(sys, "argv", ["baton", "doctor", "--address", "127.0.0.1:1", "--json"])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    data = json.loads(capsys.readouterr().out)
    assert (exit.value.code, data["exit_code"]) == (4, 4)
    assert len(data["paths"]) == 4
    broken = [finding for finding in data["findings"] if finding["level"] == "warn"]
    silent = ["worker prefill-2", "worker decode-2"]
    assert [finding["name"] for finding in broken] == [*silent, "KV prefill-1 to decode-0"]


def test_a_deployment_that_does_not_answer_is_a_finding_beside_those_of_this_machine(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "check_all", lambda port: iter([doctor.Finding("one", "ok", "fine")]))
    monkeypatch.setattr(sys, "argv", ["baton", "doctor", "--address", "127.0.0.1:1", "--json"])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == 3
    said = capsys.readouterr()
    data = json.loads(said.out)
    assert data["error"] == "StartupError"
    assert [(one["name"], one["level"]) for one in data["findings"]] == [("one", "ok"), ("deployment", "fail")]
    assert "baton doctor" not in said.err + data["next"], "it was that"
    assert "certificate" not in said.err, "nothing listens there"


def test_transports_of_this_machine_are_named(monkeypatch):
    finding = doctor.check_transports()
    assert finding.level == "ok"
    assert "tcp, zmq, grpc" in finding.detail
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    usable, _, absent = doctor.check_transports().detail.partition(" (")
    assert "shm: /dev/shm is not writable" in absent
    assert "nixl: install baton-pd[nixl]" in absent
    assert not {"shm", "nixl"} & set(usable.split(", "))
