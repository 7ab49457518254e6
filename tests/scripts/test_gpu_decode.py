"""The run on GPU machines, with stages that are none: each has its limit, and none stops the next."""

import json
import os
import subprocess
import sys
import time

import pytest

from baton.scripts import gpu_decode
from baton.scripts.gpu_decode import ROOT, Stage, run_all, stages_for

pytestmark = pytest.mark.fast


def stage(name, code, limit_s=20.0, table=""):
    return Stage(name, ("-c", code), limit_s, table)


def summary(out):
    return {item["name"]: item for item in json.loads((out / "summary.json").read_text())["stages"]}


@pytest.mark.long
def test_a_stage_that_fails_or_hangs_never_stops_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_decode, "TERM_GRACE_S", 0.5)
    child = tmp_path / "child"
    hang = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f"p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        f"open({str(child)!r}, 'w').write(str(p.pid)); print('so far', flush=True); time.sleep(60)"
    )
    stages = [
        stage("fails", "raise SystemExit('no: it broke')"),
        stage("hangs", hang, 1.0),
        stage("kills itself", "import os; os.kill(os.getpid(), 9)"),
        stage("table", "print('noise'); print('{\"rows\": [1]}')", table="table.json"),
        stage("no table", "print('nothing')", table="none.json"),
        stage("long", "print('x' * 1000000); print('the end')"),
    ]
    outcomes = run_all(stages, tmp_path / "out", 60.0)
    assert [outcome.status for outcome in outcomes] == ["failed", "timeout", "failed", "ok", "failed", "ok"]
    found = summary(tmp_path / "out")
    assert found["fails"]["code"] == 1
    assert "no: it broke" in found["fails"]["errors"][-1]
    assert found["table"]["last"] == []
    assert found["kills itself"]["code"] == -9
    assert json.loads((tmp_path / "out" / "table.json").read_text()) == {"rows": [1]}
    assert not (tmp_path / "out" / "none.json").exists()
    log = (tmp_path / "out" / "stages.log").read_text()
    assert "so far" in log
    assert "the end" in log
    assert len(log) < 2 * gpu_decode.MAX_LOG_BYTES
    end_s = time.monotonic() + 5.0
    while is_alive(int(child.read_text())):
        assert time.monotonic() < end_s, "what a stage started is left"
        time.sleep(0.02)


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.long
def test_results_are_there_as_soon_as_a_stage_ends_and_the_whole_run_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_decode, "TERM_GRACE_S", 0.5)
    out = tmp_path / "out"
    look = f"import json; print(len(json.load(open({str(out / 'summary.json')!r}))['stages']))"
    stages = [
        stage("first", "print(1)"),
        stage("looks", look),
        stage("slow", "import time; time.sleep(30)"),
        stage("late", "print(2)"),
    ]
    begin_s = time.monotonic()
    run_all(stages, out, 4.0)
    assert time.monotonic() - begin_s < 20.0
    found = summary(out)
    assert found["looks"]["last"][0] == "1"
    assert found["slow"]["status"] == "timeout"
    assert found["late"]["status"] == "skipped"


@pytest.mark.long
def test_the_command_line_and_its_code(tmp_path):
    file = tmp_path / "stages.json"
    values = [
        {"name": "good", "command": ["-c", "print(5)"], "limit_s": 20},
        {"name": "bad", "command": ["-c", "raise SystemExit(3)"], "limit_s": 20},
    ]
    file.write_text(json.dumps(values))
    command = [sys.executable, "scripts/gpu_decode.py", "--out", str(tmp_path / "out"), "--stages", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 4, done.stderr
    assert "bad: failed (code 3" in done.stdout
    done = subprocess.run([*command, "--only", "good"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_every_gpu_test_is_in_a_stage_and_every_file_named_is_there():
    files = {f"tests/gpu/{path.name}" for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    named = [argument for stage in stages_for(1) for argument in stage.command if argument.startswith("tests/gpu/test")]
    assert sorted(named) == sorted(files)
    for num_gpus in (1, 2):
        stages = stages_for(num_gpus)
        assert len({stage.name for stage in stages}) == len(stages)
        assert sum(bool(stage.table) for stage in stages) + 2 <= 8  # what comes back from a machine
        for stage in stages:
            for argument in stage.command:
                assert not argument.startswith("tests/") or os.path.exists(ROOT / argument), argument
    words = [word for stage in stages_for(2) for word in stage.command]
    for path in (ROOT / "tests" / "gpu").glob("test_*.py"):
        if gpu_decode.NEEDS_TWO in path.read_text():
            assert f"tests/gpu/{path.name}" in words
