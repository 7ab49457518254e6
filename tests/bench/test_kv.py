"""The harness of `baton bench kv`: options, memory checks, rows, promises, and one real cell of the plain systems."""

import dataclasses
import json
import os
import sys

import numpy as np
import pytest

from baton.bench import result
from baton.bench.kv_bench import cell as kv_cell
from baton.bench.kv_bench import kv
from baton.bench.kv_bench import memory as kv_memory
from baton.bench.kv_bench import step as kv_step
from baton.bench.kv_bench.kv import checks
from baton.bench.kv_bench.options import read_faults, read_options, read_pace_s
from baton.bench.kv_bench.workloads import POOL_BLOCKS, WORKLOADS, KVWorkload
from baton.bench.kv_systems.faces import TransferCell
from baton.bench.kv_systems.registry import SYSTEMS
from baton.bench.plot import require_plot
from baton.bench.processes import parse_summary, tree_cpu_s
from baton.core.errors import ConfigInvalid, PackageMissing
from baton.core.kv_transports import KV_TRANSPORTS

SMALL = KVWorkload(name="small", num_blocks=5, num_layers=3, num_kv_heads=1, head_dim=8)
QUICK = kv_cell.Effort(warm_requests=1, burst_s=0.0, burst_requests=3, paced_s=0.0, paced_requests=2)


@pytest.mark.fast
def test_the_workloads_are_the_documented_ones():
    sizes = {name: (w.num_blocks, w.num_layers, w.block_bytes) for name, w in WORKLOADS.items()}
    assert sizes == {"a": (64, 36, 64 << 10), "b": (4, 36, 64 << 10), "c": (16, 4, 4 << 10)}
    assert WORKLOADS["a"].request_bytes == 64 * 36 * (64 << 10)
    drawn = [WORKLOADS["a"].source_blocks(3, index) for index in range(20)]
    assert all(len(set(blocks)) == 64 and max(blocks) < POOL_BLOCKS for blocks in drawn)
    assert len(set(drawn)) == 20
    assert WORKLOADS["a"].source_blocks(3, 7) == drawn[7] != WORKLOADS["a"].target_blocks(3, 7)


@pytest.fixture
def moved():
    """A source and a target pool after two requests were copied as they should be."""
    source, target = (kv_memory.allocate(SMALL.pool_shape, shared=shared) for shared in (False, True))
    kv_memory.fill(source, 9)
    kv_memory.poison(target)
    requests = [(SMALL.source_blocks(9, index), SMALL.target_blocks(9, index)) for index in range(2)]
    for sources, targets in requests:
        target[:, list(targets)] = source[:, list(sources)]
    return source, target, requests


@pytest.mark.fast
def test_a_right_pool_passes(moved):
    _, target, requests = moved
    assert kv_memory.check(target, 9, requests) == len({t for _, ts in requests for t in ts}) * 3 * SMALL.block_bytes


@pytest.mark.fast
@pytest.mark.parametrize("damage", ["bit", "swap", "stray", "missing", "layer"])
def test_any_wrong_byte_is_found(moved, damage):
    source, target, requests = moved
    (sources, targets) = requests[-1]
    if damage == "bit":
        target[2, targets[0], 17] ^= 1
    elif damage == "swap":
        target[1, [targets[0], targets[1]]] = target[1, [targets[1], targets[0]]]
    elif damage == "stray":
        untouched = next(block for block in range(POOL_BLOCKS) if not any(block in ts for _, ts in requests))
        target[0, untouched, 5] = 0
    elif damage == "missing":
        target[2, targets[3]] = kv_memory.POISON
    else:
        target[0, targets[2]] = source[1, sources[2]]
    with pytest.raises(kv_memory.WrongBytes):
        kv_memory.check(target, 9, requests)


@pytest.mark.fast
def test_options_are_checked_by_name():
    assert read_pace_s("4ms") == pytest.approx(0.004)
    assert read_pace_s("500us") == pytest.approx(0.0005)
    assert read_pace_s("0") == 0
    assert read_faults("drop=0.01,corrupt=1e-3") == {"drop": 0.01, "corrupt": 0.001}
    assert read_faults("") == {}
    assert read_options(systems="memcpy,grpc-plain").systems == ("memcpy", "grpc-plain")
    for wrong in (
        {"systems": "pigeon"},
        {"workloads": "a,z"},
        {"gil_load": "some"},
        {"digest": "maybe"},
        {"pace": "4"},
        {"pace": "2s"},
        {"faults": "burn=0.1"},
        {"faults": "drop=7"},
        {"faults": "drop=0.1", "systems": "memcpy"},
        {"faults": "corrupt=0.1", "digest": "off"},
        {"rounds": 0},
        {"seconds": 0},
        {"what": "nothing"},
    ):
        with pytest.raises(ConfigInvalid):
            read_options(**wrong)


@pytest.mark.fast
def test_a_peer_that_is_missing_is_refused_by_name_or_left_out(monkeypatch):
    missing = dataclasses.replace(SYSTEMS["nixl-tcp"], needs="no_such_package")
    monkeypatch.setitem(SYSTEMS, "nixl-tcp", missing)
    with pytest.raises(PackageMissing, match="no_such_package"):
        read_options(systems="memcpy,nixl-tcp")
    options = read_options()
    assert "nixl-tcp" not in options.systems
    assert any("no_such_package" in sentence for sentence in options.left_out)


@pytest.mark.fast
def test_a_plot_without_matplotlib_is_refused_before_measuring(monkeypatch, tmp_path):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PackageMissing, match="matplotlib"):
        require_plot(tmp_path / "kv.png")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    require_plot(tmp_path / "kv.png")
    for path in (tmp_path / "kv.txt", tmp_path / "none" / "kv.png"):
        with pytest.raises(ConfigInvalid):
            require_plot(path)


@pytest.mark.fast
def test_a_row_has_medians_with_least_and_greatest():
    samples = [kv_cell.Sample(gbps=value, exposed_ms=[value, value + 1], submit_us=5.0) for value in (2.0, 1.0, 4.0)]
    row = kv.as_row(TransferCell(system="memcpy", workload=SMALL, seed=0), samples)
    assert (row["gbps"], row["gbps_min"], row["gbps_max"]) == (2.0, 1.0, 4.0)
    assert (row["exposed_p50_ms"], row["exposed_p50_ms_max"]) == (2.5, 4.5)
    assert "cpu_s_per_gb" not in row
    assert row["num_rounds"] == 3


def row_of(system, workload, gbps, **more):
    return {"system": system, "workload": workload, "gil_load": "none", "gbps": gbps, "layer_ms": 0.5, **more}


@pytest.mark.fast
def test_promises_compare_rows_of_one_run():
    rows = [
        row_of("memcpy", "a", 10.0),
        row_of("shm", "a", 9.5, digest=False, exposed_p50_ms=1.0),
        row_of("shm", "a", 4.0, digest=True, exposed_p50_ms=1.2),
        row_of("shm", "a", 9.0, digest=False, gil_load="inside"),
        row_of("shm", "a", 9.2, digest=False, gil_load="outside"),
        row_of("tcp", "b", 1.0, digest=False),
        row_of("nixl-tcp", "b", 1.0),
    ]
    found = {check["name"]: check for check in checks(rows)}
    assert found["shm to memcpy on a"]["holds"]
    assert not found["shm +digest to memcpy on a"]["holds"]
    assert found["shm on a: busy thread inside to outside"]["holds"]
    assert found["shm exposed p50 ms on a"]["at_most"] == pytest.approx(1.1)
    assert not found["shm +digest exposed p50 ms on a"]["holds"]
    assert not found["tcp to nixl-tcp on b"]["holds"]
    assert "tcp to mooncake-tcp on b" not in found


@pytest.mark.fast
def test_the_result_says_where_it_was_measured():
    data = json.loads(json.dumps(result.result("kv", [{"system": "x"}], rounds=1)))
    assert list(data) == ["bench", "hardware", "versions", "commit", "rounds", "rows"]
    assert data["hardware"]["num_cores"] == os.cpu_count()
    assert {"python", "torch"} <= data["versions"].keys()


@pytest.mark.fast
def test_cpu_time_of_a_process_is_seen_from_outside():
    before_s = tree_cpu_s(os.getpid())
    np.random.default_rng(0).integers(0, 9, size=3_000_000).sum()
    assert 0.001 < tree_cpu_s(os.getpid()) - before_s < 10


@pytest.mark.fast
def test_the_summary_of_system_calls_is_read():
    text = """% time     seconds  usecs/call     calls    errors syscall
------ ----------- ----------- --------- --------- ----------------
 90.00    0.001358          14        97           clock_nanosleep
 10.00    0.000158          14        12         3 futex
------ ----------- ----------- --------- --------- ----------------
100.00    0.001358          14       109         3 total
"""
    assert parse_summary(text) == {"clock_nanosleep": 97, "futex": 12}


@pytest.mark.parametrize("system", ["memcpy", "grpc-plain"])
def test_a_real_cell_moves_checked_bytes(system):
    cell = TransferCell(system=system, workload=SMALL, seed=1, pace_s=0.0 if system == "memcpy" else 0.001)
    sample = kv_cell.measure(cell, QUICK)
    assert sample.gbps > 0
    assert sample.checked_bytes > 5 * 3 * SMALL.block_bytes
    assert len(sample.exposed_ms) == (0 if system == "memcpy" else 2)
    assert all(exposed_ms > 0 for exposed_ms in sample.exposed_ms)


def own_cells():
    """(transport, data path) of all that can run here."""
    for name, declared in KV_TRANSPORTS.items():
        if declared.memory != "GPU" and not declared.problem:
            yield pytest.param(name, declared.data_path, marks=[] if name in ("shm", "tcp") else [pytest.mark.slow])


@pytest.mark.parametrize(("system", "data_path"), list(own_cells()))
def test_a_real_cell_of_our_own_hands_over_checked_bytes(system, data_path):
    sample = kv_cell.measure(TransferCell(system=system, workload=SMALL, seed=1, digest=True, pace_s=0.001), QUICK)
    assert sample.gbps > 0
    assert sample.checked_bytes > 5 * 3 * SMALL.block_bytes
    assert sample.data_path == data_path
    assert sample.counts["frames_corrupt"] == 0
    assert all(0 < exposed_ms < 1000 for exposed_ms in sample.exposed_ms)


@pytest.mark.parametrize("system", ["tcp", pytest.param("shm", marks=pytest.mark.slow)])
def test_faults_cost_time_and_no_byte(system):
    faults = {"drop": 0.1, "corrupt": 0.1}
    cell = TransferCell(system=system, workload=SMALL, seed=1, digest=True, pace_s=0.0, faults=faults)
    sample = kv_cell.measure(cell, dataclasses.replace(QUICK, burst_requests=12))
    assert sample.counts["faults_drop"] > 0
    assert sample.counts["faults_corrupt"] > 0
    assert sample.counts["frames_corrupt"] > 0


def test_steps_with_and_without_a_writer_are_compared():
    cell = TransferCell(system="grpc-plain", workload=dataclasses.replace(SMALL, num_layers=2), seed=1)
    options = dataclasses.replace(read_options(systems="grpc-plain"), seconds=0.001)
    steps = kv_step.measure_steps(cell, options, 0)
    row = kv_step.as_step_row(cell, [steps])
    assert row["num_steps"] == 4
    assert row["step_off_ms"] > 1
    assert 0.5 < row["step_ratio"] < 4
    assert 0 < row["submit_us"] <= row["submit_p99_us"]


def test_a_cell_that_fails_says_why():
    with pytest.raises(kv_cell.CellFailed, match="no-such-system"):
        with kv_cell.open_cell(TransferCell(system="grpc-plain", workload=SMALL, seed=1)) as pair:
            pair.sender.ask("no-such-system")
    with pytest.raises(kv_cell.CellFailed, match=r"non-negative|negative"):
        kv_cell.measure(TransferCell(system="memcpy", workload=SMALL, seed=-1), QUICK)


def test_the_command_prints_one_object(capsys, monkeypatch, tmp_path):
    from baton.cluster import cli

    arguments = "bench kv --systems memcpy --workloads c --rounds 2 --seconds 0.01 --no-calls --json".split()
    monkeypatch.setattr(sys, "argv", ["baton", *arguments])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    data = json.loads(capsys.readouterr().out)
    assert exit.value.code == 0
    assert (data["bench"], data["rounds"], data["failures"]) == ("kv", 2, [])
    (row,) = data["rows"]
    assert {"system", "workload", "gil_load", "gbps", "gbps_min", "gbps_max", "cpu_s_per_gb"} <= row.keys()
