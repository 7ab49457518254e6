"""A supervisor that dies, stands still or gives up, as its parent sees it. The supervisor is a script; no Ray."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from baton.client.access import Access
from baton.cluster import supervisor_process
from baton.cluster.supervisor_process import Order, SupervisorProcess
from baton.core.config import ServeConfig
from baton.core.errors import RayUnavailable, WorkerLost, WorkerStartFailed
from baton.core.inside import DeploymentSecret

SCRIPT = """
import json, os, sys, time
order = json.loads(sys.stdin.readline())
assert bool(order["ray_address"]) == bool(order["roster"])
print(json.dumps({"event": "session", "host": "h", "ray_address": "r:1"}), flush=True)
%s
"""
SERVES = """
roster = order["roster"] or {"roles": {"decode-0": "decode"}, "placed_by": [], "per_gpu": 1}
print(json.dumps({"event": "adopted" if order["roster"] else "ready", "worker": {}, "workers": []}), flush=True)
print(json.dumps({"event": "roster", "roster": roster}), flush=True)
print(json.dumps({"event": "serving"}), flush=True)
sys.stdin.read()
"""
FAILS = 'print(json.dumps({"event": "failed", "error": %r}), flush=True)'


@pytest.fixture
def make(tmp_path, monkeypatch):
    made = []

    def make(body):
        def popen(command, **more):
            return subprocess.Popen([sys.executable, "-c", SCRIPT % body], **more)

        fake = type("fake", (), {"Popen": staticmethod(popen), "PIPE": subprocess.PIPE})
        fake.TimeoutExpired = subprocess.TimeoutExpired
        monkeypatch.setattr(supervisor_process, "subprocess", fake)
        order = Order(
            config=ServeConfig.from_mapping({}),
            name="baton-x",
            access=Access(),
            admin_port=1,
            directory=tmp_path,
            secret=DeploymentSecret.new(),
        )
        supervisor = SupervisorProcess(order, lambda event: supervisor.heard.append(event["event"]))
        supervisor.heard = []
        made.append(supervisor)
        return supervisor

    yield make
    for supervisor in made:
        supervisor.stop()


def start(supervisor):
    supervisor.start(30.0)
    supervisor.wait_serving(time.monotonic() + 30.0, lambda: None)


def wait_for(supervisor, event, timeout_s=30.0):
    deadline_s = time.monotonic() + timeout_s
    while event not in supervisor.heard:
        supervisor.check()
        assert time.monotonic() < deadline_s, supervisor.heard
        time.sleep(0.02)


def test_one_that_dies_is_followed_by_one_that_is_told_the_roster(make):
    supervisor = make(SERVES)
    start(supervisor)
    assert supervisor.host == "h"
    assert supervisor.heard == ["session", "ready", "roster", "serving"]
    pid = supervisor.pid
    os.kill(pid, signal.SIGKILL)
    wait_for(supervisor, "adopted")
    assert supervisor.pid != pid


def test_one_that_stands_still_is_killed(make, monkeypatch):
    supervisor = make(SERVES)
    start(supervisor)
    stuck = supervisor._process
    monkeypatch.setattr(supervisor_process, "STUCK_S", 0.0)
    supervisor.check()
    monkeypatch.setattr(supervisor_process, "STUCK_S", 60.0)
    assert stuck.returncode == -signal.SIGKILL
    wait_for(supervisor, "adopted")


def test_the_first_ones_error_is_raised(make):
    wire = WorkerStartFailed("no room", worker_id="decode-0").to_wire()
    supervisor = make(FAILS % wire)
    with pytest.raises(WorkerStartFailed, match="no room"):
        start(supervisor)


def test_the_first_one_that_says_nothing_is_a_failed_start(make):
    with pytest.raises(WorkerStartFailed, match="ended with code 7"):
        start(make("sys.exit(7)"))


def test_a_role_without_a_worker_ends_it_and_a_missing_head_does_not(make):
    supervisor = make(SERVES)
    start(supervisor)
    for kind in (RayUnavailable, WorkerLost):
        line = json.dumps({"event": "failed", "error": kind("why").to_wire()}) + "\n"
        with supervisor._out_path.open("a") as file:
            file.write(line)
        if kind is WorkerLost:
            with pytest.raises(WorkerLost, match="why"):
                supervisor.check()
        else:
            supervisor.check()


def test_what_a_library_prints_ends_nothing(make, caplog):
    supervisor = make('print("(autoscaler +3s) noise"); print("[1]", file=sys.stderr)' + SERVES)
    start(supervisor)
    assert supervisor.heard == ["session", "ready", "roster", "serving"]
    assert "(autoscaler +3s) noise" in caplog.text


def test_a_supervisors_stdout_is_for_its_events():
    script = (
        "import os; from baton.cluster import supervisor; supervisor.keep_stdout(); "
        "print('noise', flush=True); os.system('echo noise'); supervisor.say('serving', at=1)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [{"event": "serving", "at": 1}]
    assert done.stderr.count("noise") == 2


def test_the_end_is_told_by_closing_stdin(make):
    supervisor = make(SERVES)
    start(supervisor)
    process = supervisor._process
    supervisor.stop()
    assert process.returncode == 0
    assert supervisor.pid is None
    supervisor.stop()
