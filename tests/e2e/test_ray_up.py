"""`ray up` for real, on hosts of network namespaces; then every worker killed, stopped and unplugged, and the head.

What runs is the campaign's program, in namespaces of its own: `python -m baton.tests.e2e.ray_faults` does ten rounds.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.kvtransfer.receiver.supervisor import MODULE as RECEIVER
from baton.tests.e2e import doors
from baton.tests.e2e.hosts import why_not
from baton.tests.e2e.ray_faults import KINDS

MAX_PAUSE_S = 60.0  # a stream may hang no longer, whatever else this machine does; a quiet one stays below 3 s
LIMIT_S = 2400


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
def test_a_cluster_loses_every_worker_and_the_head_and_no_stream_notices(tmp_path):
    why = why_not()
    if why:
        pytest.skip(why)
    out = tmp_path / "faults.json"
    command = [sys.executable, "-P", "-m", "baton.tests.e2e.ray_faults", "--rounds", "1", "--out", str(out)]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=os.environ | {"PATH": path})
    assert out.exists(), done.stderr[-4000:]
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 3 * len(KINDS) + 1
    for row in rows:
        assert row["num_equal"] == row["num_streams"], row
        assert row["num_newcomers_equal"] == row["num_newcomers"], row
        assert not row["held"], row
        assert max(row["pauses_s"]) < MAX_PAUSE_S, row
    head = rows[-1]
    assert head["worker"] == "head"
    assert head["is_same_incarnations"]
    assert head["num_moved"] == 0
    assert head["runbook"] == 0, head
    assert head["is_scaled"], head
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
def test_every_port_of_a_cluster_is_declared_and_what_is_rays_asks_for_its_token():
    why = why_not()
    if why:
        pytest.skip(why)
    command = [sys.executable, "-P", "-m", "baton.tests.e2e.ray_doors"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    rays = [door for door in found["doors"] if door["is_rays"]]
    assert {door["host"] for door in rays} == {"head", "host-prefill-0", "host-decode-0"}
    for door in found["doors"]:
        assert door["is_declared"], door
    assert found["ended"] == [], "a stranger's knock ended a listener"
    for door in found["doors"]:
        if door["address"] == "127.0.0.1":
            continue
        if RECEIVER in door["process"]:
            doors.assert_keeps_kv_shut(door, door["kv"])
        else:
            at = doors.ListeningSocket(door["process"], "", door["host"], door["port"])
            doors.assert_refused(at, door["answers"])
        if door["is_rays"] and "RuntimeEnvAgent" not in door["process"]:  # which speaks HTTP, and asks for the token
            assert doors.is_shut(door["answers"]), door
    assert any(door["kv"] for door in found["doors"]), "KV ports were knocked at as such"
    assert "PONG" not in found["redis"], found["redis"]
