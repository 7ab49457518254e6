"""When a worker that Ray has given up is started again, under virtual time."""

import pytest

from baton.cluster.ray.restarts import FIRST_WAIT_S, MAX_STARTS, MAX_WAIT_S, WINDOW_S, Restarts

pytestmark = pytest.mark.fast


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def restarts(clock):
    return Restarts(clock)


def test_waits_double_up_to_a_bound_and_each_start_is_named_once(clock, restarts):
    waits_s = []
    for _ in range(MAX_STARTS):
        assert restarts.died("decode-0")
        start_s = clock.now_s
        while not restarts.due():
            clock.now_s += 0.25
            assert clock.now_s < start_s + 2 * MAX_WAIT_S
        waits_s.append(clock.now_s - start_s)
        assert restarts.due() == []
    assert waits_s[:4] == [FIRST_WAIT_S, 2 * FIRST_WAIT_S, 4 * FIRST_WAIT_S, 8 * FIRST_WAIT_S]
    assert max(waits_s) == MAX_WAIT_S
    assert not restarts.died("decode-0")
    assert restarts.due() == []


def die(restarts, num=MAX_STARTS):
    """So many deaths, a start after each."""
    for _ in range(num):
        assert restarts.died("decode-0")
        restarts._due_s.clear()


def test_a_death_that_is_told_twice_counts_once(clock, restarts):
    for _ in range(2 * MAX_STARTS):
        assert restarts.died("decode-0")
    clock.now_s += FIRST_WAIT_S
    assert restarts.due() == ["decode-0"]


def test_who_is_given_up_has_no_start_left_over(clock, restarts):
    die(restarts)
    assert not restarts.died("decode-0")
    clock.now_s += MAX_WAIT_S
    assert restarts.due() == []


def test_what_is_long_ago_does_not_count(clock, restarts):
    die(restarts)
    clock.now_s += WINDOW_S
    assert restarts.died("decode-0")
    clock.now_s += FIRST_WAIT_S
    assert restarts.due() == ["decode-0"]


def test_workers_count_for_themselves_and_one_that_is_not_wanted_is_forgotten(clock, restarts):
    die(restarts)
    assert not restarts.died("decode-0")
    assert restarts.died("decode-1")
    restarts.forget("decode-1")
    restarts.forget("decode-0")
    clock.now_s += MAX_WAIT_S
    assert restarts.due() == []
    assert restarts.died("decode-0")
