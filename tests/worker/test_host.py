"""The gRPC host: whoever cannot be reached any more must not live on unnoticed."""

import time

import pytest

from baton.core.errors import Overloaded
from baton.proto import worker_pb2
from baton.worker.gate import Gate
from baton.worker.host import WorkerHost

pytestmark = pytest.mark.fast


def wait_for(condition, timeout_s=5.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_a_host_that_cannot_start_says_so():
    def register(server):
        raise KeyError("broken")

    host = WorkerHost("127.0.0.1", register, worker_pb2.WorkerState, "", pytest.fail)
    with pytest.raises(KeyError, match="broken"):
        host.start()
    host.close()


def test_heartbeats_that_break_end_the_worker():
    fatal = []

    def state():
        raise ZeroDivisionError

    host = WorkerHost("127.0.0.1", lambda server: None, state, "127.0.0.1:1", fatal.append)
    host.start()
    wait_for(lambda: fatal)
    assert isinstance(fatal[0], ZeroDivisionError)
    host.close()


def test_a_router_that_is_away_is_no_failure():
    fatal = []
    host = WorkerHost("127.0.0.1", lambda server: None, worker_pb2.WorkerState, "127.0.0.1:1", fatal.append)
    host.start()
    time.sleep(0.6)
    host.close()
    assert fatal == []


def test_a_gate_counts_at_the_door():
    gate = Gate("full", 2)
    gate.enter()
    gate.enter()
    with pytest.raises(Overloaded, match="full"):
        gate.enter()
    gate.leave()
    gate.enter()
    assert gate.num_inside == 2
