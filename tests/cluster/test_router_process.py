"""A router that dies, as its parent sees it: started again on the same ports, and not for ever. No Ray, no gRPC."""

import os
import signal
import sys
import time

import pytest

from baton.cluster import router_process
from baton.cluster.router_process import RouterProcess
from baton.core.errors import RouterLost
from baton.core.inside import DeploymentSecret

pytestmark = pytest.mark.fast

LISTENS = """
import json, os, signal, sys
print(json.dumps({ports!r}), flush=True)
"""
SERVES = LISTENS + "sys.stdin.read()"
# Blocked before it listens: a handler may come too early, or before a read that then waits for ever.
DRAINS = f"""
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
{LISTENS}
signal.sigwait([signal.SIGTERM])
"""


class Clock:
    """Virtual."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def make(tmp_path):
    made, clock = [], Clock()

    def make(body):
        told = []

        def command_of(had):
            told.append(dict(had))
            return [sys.executable, "-S", "-c", body.format(ports={"grpc_port": 41, "http_port": 42})]

        process = RouterProcess(command_of, tmp_path, DeploymentSecret.new(), clock)
        process.told, process.clock = told, clock
        made.append(process)
        return process

    yield make
    for process in made:
        process.stop()


def until(process, is_so):
    """Check it until something is so; its next start comes at once. While it runs, however slowly, no time passes."""
    deadline_s = time.monotonic() + 60.0
    while not is_so():
        process.check()
        if process.pid is None:
            process.clock.now_s += 0.05
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def test_it_comes_back_on_the_ports_that_it_had(make, caplog):
    process = make(SERVES)
    assert process.wait_ports(30.0) == {"grpc_port": 41, "http_port": 42}
    dead = process.pid
    os.kill(dead, signal.SIGKILL)
    until(process, lambda: "the router listens again" in caplog.text)
    assert process.pid not in (None, dead)
    assert process.told == [{}, {"grpc_port": 41, "http_port": 42}]
    assert "the router was ended by SIGKILL" in caplog.text


@pytest.mark.long
def test_it_comes_back_at_once_and_then_ever_later(make):
    process = make(SERVES)
    process.wait_ports(30.0)
    waits = []
    for _ in range(4):
        os.kill(process.pid, signal.SIGKILL)
        process._process.wait()
        process.check()
        assert process.pid is None
        died_s = process.clock.now_s
        until(process, lambda: process.pid is not None)
        waits.append(process.clock.now_s - died_s)
        until(process, process._hear)
    assert waits == sorted(waits)
    assert waits[0] < 0.3, "a first death is nobody's loop"


@pytest.mark.long
def test_one_that_keeps_dying_is_given_up_with_its_last_words(make):
    process = make(LISTENS + "print('out of luck', file=sys.stderr); os._exit(7)")
    with pytest.raises(RouterLost, match=r"ended 9 times within 60 s.*code 7: out of luck") as lost:
        until(process, lambda: False)
    assert lost.value.fields["exit_code"] == 7
    assert len(process.told) == 1 + router_process.MAX_STARTS


@pytest.mark.long
def test_one_that_dies_now_and_then_is_never_given_up(make):
    process = make(SERVES)
    process.wait_ports(30.0)
    for _ in range(2 * router_process.MAX_STARTS):
        os.kill(process.pid, signal.SIGKILL)
        process._process.wait()
        until(process, lambda: process.pid is not None and not process.has_ended)
        process.clock.now_s += router_process.WINDOW_S


@pytest.mark.long
def test_one_that_listens_for_a_while_between_deaths_comes_back_at_once(make):
    process = make(SERVES)
    process.wait_ports(30.0)
    for _ in range(router_process.MAX_STARTS + 2):
        os.kill(process.pid, signal.SIGKILL)
        process._process.wait()
        process.check()
        died_s = process.clock.now_s
        until(process, lambda: process.pid is not None)
        assert process.clock.now_s - died_s < 0.3
        until(process, process._hear)
        process.check()
        process.clock.now_s += router_process.STEADY_S
        process.check()


def test_one_that_was_told_to_drain_is_not_started_again(make):
    process = make(DRAINS)
    process.wait_ports(30.0)
    process.drain()
    process._process.wait(30.0)
    for _ in range(10):
        process.check()
        process.clock.now_s += 10.0
    assert process.has_ended
    assert len(process.told) == 1
