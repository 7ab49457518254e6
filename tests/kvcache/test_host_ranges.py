"""Ranges of host blocks against a model of itself."""

import random

import pytest

from baton.kvcache.host_ranges import HostRange, HostRanges

pytestmark = pytest.mark.fast


def test_ranges_alive_together_share_no_block():
    rng = random.Random(0)
    ranges = HostRanges(40)
    alive = []
    num_refused = 0
    for _ in range(3_000):
        taken = ranges.take(rng.randint(1, 9)) if rng.random() < 0.6 else None
        if taken is not None:
            alive.append(taken)
        elif alive:
            num_refused += 1
            ranges.give_back(alive.pop(rng.randrange(len(alive))))
        blocks = [block for item in alive for block in range(item.first, item.first + item.length)]
        assert len(blocks) == len(set(blocks)) == ranges.num_used
        assert all(0 <= block < 40 for block in blocks)
    assert num_refused > 100
    for item in alive:
        ranges.give_back(item)
    assert ranges.take(40) == HostRange(0, 40), "neighbours become one again"


def test_first_fit_and_what_does_not_fit():
    ranges = HostRanges(10)
    first, second, third = (ranges.take(3) for _ in range(3))
    ranges.give_back(second)
    assert ranges.take(4) is None, "four are free, but not side by side"
    assert ranges.take(2) == HostRange(3, 2)
    ranges.give_back(first)
    assert ranges.take(3) == first
    assert third == HostRange(6, 3)
    assert HostRanges(0).take(1) is None


def test_giving_back_twice_is_caught():
    ranges = HostRanges(4)
    taken = ranges.take(2)
    ranges.give_back(taken)
    with pytest.raises(AssertionError):
        ranges.give_back(taken)
