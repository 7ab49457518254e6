"""Each finding of the doctor, one by one."""

import json
import socket
import sys

import pytest

from baton.cluster import cli
from baton.cluster.doctor import doctor
from baton.cluster.outcome import ExitCode, Output, exit_code_of, format_table, next_step, run_command
from baton.cluster.ray.actors import error_from_ray
from baton.core import errors
from baton.proto import admin_pb2, worker_pb2

pytestmark = pytest.mark.fast


def test_without_prefill_workers_it_depends_whether_there_were_any():
    status = admin_pb2.StatusReply()
    assert list(doctor.check_prefill(status)) == []
    status.local_prefill.only_way = True
    assert [found.level for found in doctor.check_prefill(status)] == ["ok"]
    status.workers.add().state.role = "prefill"  # that died
    (found,) = doctor.check_prefill(status)
    assert (found.level, "--undo" in found.next) == ("warn", False)
    drained = status.workers.add(alive=True, draining=True).state
    drained.role, drained.worker_id = "prefill", "p1"
    (found,) = doctor.check_prefill(status)
    assert found.level == "warn" and "`baton drain p1 --undo`" in found.next


def test_versions_are_compared_with_the_tested_ones():
    assert doctor.check_package("ray", ("2.60.0",)).level == "ok"
    assert doctor.check_package("ray", ("2.0.0",)).level == "fail"
    assert doctor.check_package("grpcio", ("1.0.0",)).level == "warn"
    missing = doctor.check_package("no-such-distribution", ("1.0",))
    assert (missing.level, missing.next) == ("fail", "pip install no-such-distribution==1.0")


def test_a_stray_token_without_a_mode_is_a_trap(tmp_path):
    token = tmp_path / "auth_token"
    assert doctor.check_ray_auth(None, token).level == "ok"
    token.write_text("secret")
    assert doctor.check_ray_auth(None, token).level == "warn"
    assert doctor.check_ray_auth("token", token).level == "ok"
    assert doctor.check_ray_auth("disabled", token).level == "warn"
    assert "secret" not in str(doctor.check_ray_auth(None, token))


def test_limits():
    assert doctor.check_open_files(1024).level == "warn"
    assert doctor.check_open_files(65536).level == "ok"
    assert doctor.check_open_files(-1).detail == "unlimited"


def test_shared_memory(tmp_path):
    assert doctor.check_shm(tmp_path / "none").level == "warn"
    assert doctor.check_shm(tmp_path).level == "ok"


def test_a_port_in_use_is_a_warning():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert doctor.check_port(listener.getsockname()[1]).level == "warn"
    assert doctor.check_port(0).level == "ok"


def test_graphs_that_could_not_be_captured_are_told():
    state = worker_pb2.WorkerState(worker_id="d0", inventory=worker_pb2.Inventory())
    status = admin_pb2.StatusReply(workers=[admin_pb2.WorkerStatus(alive=True, state=state)])
    assert doctor.check_graphs(status) == []
    graphs = status.workers[0].state.inventory.graphs
    graphs.num_captured, graphs.num_steps_replayed, graphs.num_steps_eager["too wide"] = 3, 40, 2
    [fine] = doctor.check_graphs(status)
    assert (fine.level, fine.detail) == ("ok", "3 captured; steps: 40 replayed, 2 too wide")
    graphs.failed["verify 4 x 3"] = "no memory"
    [found] = doctor.check_graphs(status)
    assert found.level == "warn"
    assert found.detail.endswith("1 not captured, such as verify 4 x 3: no memory")
    assert found.next
    status.workers[0].alive = False
    assert doctor.check_graphs(status) == []


def test_what_kv_pools_hold_is_told():
    def states(*kinds):
        workers = [worker_pb2.WorkerState(worker_id=f"w{at}", kv_dtype=kind) for at, kind in enumerate(kinds)]
        return admin_pb2.StatusReply(workers=[admin_pb2.WorkerStatus(alive=True, state=state) for state in workers])

    assert list(doctor.check_kv_dtype(states(""))) == []
    [fine] = doctor.check_kv_dtype(states("float8_e4m3fn", "float8_e4m3fn", ""))
    assert (fine.level, fine.detail) == ("ok", "float8_e4m3fn at every worker")
    [mixed] = doctor.check_kv_dtype(states("float8_e4m3fn", "bfloat16"))
    assert (mixed.level, mixed.detail) == ("warn", "bfloat16 at w1; float8_e4m3fn at w0")
    assert "--kv-cache-dtype" in mixed.next


def test_what_one_handoff_can_carry_is_told():
    def found_of(limit_len, *, alive=True):
        inventory = worker_pb2.Inventory(max_handoff_len=limit_len)
        state = worker_pb2.WorkerState(worker_id="d0", max_model_len=1000, inventory=inventory)
        worker = admin_pb2.WorkerStatus(alive=alive, state=state)
        return list(doctor.check_staging(admin_pb2.StatusReply(workers=[worker])))

    assert found_of(0) == [], "pools of host memory are not staged"
    assert found_of(10, alive=False) == []
    for enough in (1000, 2000):
        [fine] = found_of(enough)
        assert (fine.name, fine.level, fine.next) == ("KV staging of d0", "ok", "")
        assert f"up to {enough} positions" in fine.detail
    [small] = found_of(999)
    assert (small.name, small.level) == ("KV staging of d0", "warn")
    assert "up to 999 positions" in small.detail and "up to 1000" in small.detail
    assert "--kv-staging-mib" in small.next and "/dev/shm" in small.next


def test_a_worker_that_is_silent_is_told_and_exits_4(monkeypatch, capsys):
    status = admin_pb2.StatusReply()
    for name, alive, draining in (("decode-0", True, False), ("decode-1", False, False), ("decode-2", False, True)):
        state = worker_pb2.WorkerState(worker_id=name, role="decode")
        status.workers.add(state=state, alive=alive, draining=draining, heartbeat_age_s=42.25)
    monkeypatch.setattr(doctor, "fetch_status", lambda address: status)
    monkeypatch.setattr(doctor, "wires", lambda *_: ())
    monkeypatch.setattr(doctor, "check_all", lambda port: ())
    code = doctor.doctor(Output(as_json=True), grpc_port=50051, selftest=False, address="127.0.0.1:1")
    (found,) = [one for one in json.loads(capsys.readouterr().out)["findings"] if one["level"] != "ok"]
    assert (code, found["name"], found["level"]) == (ExitCode.PARTIAL, "worker decode-1", "warn")
    assert "42.2 s" in found["detail"]
    assert found["next"] == "`baton runbook hung-tp-group --worker decode-1`"


def test_a_worker_that_answers_nothing_is_told():
    state = worker_pb2.WorkerState(worker_id="d0")
    status = admin_pb2.StatusReply(workers=[admin_pb2.WorkerStatus(alive=True, state=state)])
    assert list(doctor.check_fitness(status)) == []
    status.workers[0].unfit, status.workers[0].unfit_reason = True, "RequestDeadlineExceeded: late"
    [found] = doctor.check_fitness(status)
    assert (found.name, found.level) == ("worker d0", "warn")
    assert "RequestDeadlineExceeded: late" in found.detail
    assert "hung-tp-group --worker d0" in found.next


def test_foreign_names_are_not_ours(monkeypatch):
    from pathlib import Path

    assert all(doctor.check_name(name).level == "ok" for name in doctor.FOREIGN_NAMES)
    monkeypatch.syspath_prepend(str(Path(doctor.__file__).parents[2]))
    assert all(doctor.check_name(name).level == "fail" for name in doctor.FOREIGN_NAMES)


@pytest.mark.parametrize(("level", "code"), [("ok", 0), ("warn", 4), ("fail", 3)])
def test_the_worst_finding_decides_the_exit_code(level, code, capsys, monkeypatch):
    findings = [doctor.Finding("one", "ok", "fine"), doctor.Finding("two", level, "seen", "do this")]
    monkeypatch.setattr(doctor, "check_all", lambda port: iter(findings))
    monkeypatch.setattr(sys, "argv", ["baton", "doctor", "--json"])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == code
    data = json.loads(capsys.readouterr().out)
    assert [finding["level"] for finding in data["findings"]] == ["ok", level]


def test_a_deployment_listens_at_its_own_port_and_that_is_no_warning(monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert [finding.level for finding in doctor.check_all(port) if finding.name == "grpc port"] == ["warn"]
    assert not [finding for finding in doctor.check_all(None) if finding.name == "grpc port"]
    asked = []
    monkeypatch.setattr(doctor, "fetch_status", lambda address: admin_pb2.StatusReply())
    monkeypatch.setattr(doctor, "wires", lambda *_: ())
    monkeypatch.setattr(doctor, "check_all", lambda port: asked.append(port) or ())
    for address in (None, "127.0.0.1:1"):
        doctor.doctor(Output(as_json=True), grpc_port=50051, selftest=False, address=address)
    assert asked == [50051, None]


def test_every_check_finds_something_here():
    findings = list(doctor.check_all(0))
    assert {"python", "torch", "ray", "devices", "grpc port", "ray auth", "shared memory"} <= {f.name for f in findings}
    assert all(finding.detail for finding in findings)
    assert all(finding.next for finding in findings if finding.level != "ok")


def test_every_error_has_an_exit_code_and_a_next_step():
    def kinds(kind):
        return {kind}.union(*(kinds(child) for child in kind.__subclasses__()))

    for kind in kinds(errors.BatonError):
        error = kind("it broke")
        assert next_step(error)
        code = exit_code_of(error)
        if kind is errors.ConfigInvalid or issubclass(kind, errors.InvalidRequest):
            assert code is ExitCode.USAGE
        elif issubclass(kind, (errors.StartupError, errors.PreconditionUnmet)):
            assert code is ExitCode.PRECONDITION
        elif kind is errors.RequestDeadlineExceeded:
            assert code is ExitCode.TIMEOUT
        else:
            assert code is ExitCode.FAILED


def test_a_worker_that_timed_out_is_looked_for_on_the_cluster_first():
    """A worker for which no host has room has written no error that could be read."""
    assert "`ray status`" in next_step(errors.WorkerStartFailed("late", timed_out=True))
    assert "own error above" in next_step(errors.WorkerStartFailed("prefill-0 did not start"))


def test_a_worker_that_timed_out_exits_as_a_timeout():
    assert exit_code_of(errors.WorkerStartFailed("late", timed_out=True)) is ExitCode.TIMEOUT


def test_json_is_printed_once(capsys):
    output = Output(True)
    output.emit({"a": 1})
    output.fail(errors.WorkerLost("gone"))
    assert capsys.readouterr().out == '{"a": 1}\n'


def test_what_libraries_print_is_no_result(capsys):
    def body(output):
        print("a library's chatter")
        output.emit({"a": 1})
        return ExitCode.OK

    assert run_command(True, body) is ExitCode.OK
    captured = capsys.readouterr()
    assert captured.out == '{"a": 1}\n'
    assert "chatter" in captured.err


def test_what_ray_passes_on_becomes_the_workers_own_error():
    wire = errors.ModelMissing("no config.json", path="/m").to_wire()
    error = error_from_ray(f"The actor died\n\x1b[36mray::A\x1b[39m\n  File x\nRuntimeError: baton-error {wire}")
    assert isinstance(error, errors.ModelMissing)
    assert error.fields == {"path": "/m"}
    assert error_from_ray("trace\nValueError: odd\n\n") == "ValueError: odd"
    assert error_from_ray("") == "it said nothing"


def test_tables_line_up():
    text = format_table(("name", "n"), [("a", "1"), ("long name", "10")])
    assert text.splitlines() == ["name        n", "a           1", "long name  10"]
    assert format_table(("name",), []) == "name"
