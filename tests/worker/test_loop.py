"""The loop thread: commands in order, wake-ups, and a failure that cannot be missed."""

import threading
import time
from collections import deque

import pytest

from baton.core.errors import Overloaded
from baton.worker.loop import LoopThread

pytestmark = pytest.mark.fast


def wait_for(condition, timeout_s=5.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "timed out"
        time.sleep(0.001)


def test_commands_run_in_order_on_the_loop_thread():
    seen = []
    loop = LoopThread("test", lambda: 60.0, pytest.fail)
    loop.start()
    for number in range(100):
        loop.post(lambda number=number: seen.append((number, threading.current_thread().name)))
    wait_for(lambda: len(seen) == 100)
    assert seen == [(number, "test") for number in range(100)]
    loop.close()


def test_a_wake_up_ends_the_idle_wait():
    steps = []
    loop = LoopThread("test", lambda: steps.append(None) or 60.0, pytest.fail)
    loop.start()
    wait_for(lambda: len(steps) == 1)
    loop.wake()
    wait_for(lambda: len(steps) >= 2)
    loop.close()


def test_it_sleeps_as_long_as_a_turn_says_and_not_where_it_says_0():
    told = deque([0.0, 0.0, 0.001, 0.0, 60.0])
    loop = LoopThread("test", told.popleft, pytest.fail)
    loop.start()
    wait_for(lambda: not told)  # not behind the first that sleeps
    loop.close()


def test_an_escaped_exception_stops_the_loop_and_is_reported():
    failures = []

    def step():
        raise KeyError("lost")

    loop = LoopThread("test", step, failures.append)
    loop.start()
    wait_for(lambda: failures)
    assert isinstance(failures[0], KeyError)
    loop.close()


def test_a_full_inbox_refuses():
    loop = LoopThread("test", lambda: 60.0, pytest.fail, max_commands=2)
    loop.post(lambda: None)
    loop.post(lambda: None)
    with pytest.raises(Overloaded):
        loop.post(lambda: None)
