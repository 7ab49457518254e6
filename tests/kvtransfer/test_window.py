"""How much may be in flight, and which frames were seen."""

import itertools
import random

import pytest

from baton.kvtransfer.receiver.table import MAX_AHEAD, SeqSet
from baton.kvtransfer.sender.table import MAX_SAMPLES, RATE_MEMORY_S, Window

pytestmark = pytest.mark.fast
MIB = 1 << 20


def run_path(window, rate, round_trip_s, two_layers, limit, num_rounds=12):
    """A path that credits what was posted after a round trip, no faster than its rate."""
    now_s, sizes = 0.0, []
    for _ in range(num_rounds):
        size = window.size_bytes(two_layers, round_trip_s, limit, now_s)
        sizes.append(size)
        window.posted(size, now_s)
        now_s += round_trip_s + size / rate
        window.credited(size, now_s)
    return sizes


def test_a_window_begins_with_two_layers_and_grows_to_twice_what_the_path_holds():
    sizes = run_path(Window(), rate=1e9, round_trip_s=0.02, two_layers=2 * MIB, limit=1 << 40)
    assert sizes[0] == 2 * MIB
    assert all(later >= sooner for sooner, later in itertools.pairwise(sizes))
    assert sizes[-1] == pytest.approx(2 * 1e9 * 0.02 / 2, rel=0.2)  # stop and wait sees half of the rate at best


def test_a_window_never_exceeds_the_limit_nor_shrinks_below_two_layers():
    assert max(run_path(Window(), rate=1e9, round_trip_s=0.02, two_layers=2 * MIB, limit=3 * MIB)) == 3 * MIB
    assert run_path(Window(), rate=1e6, round_trip_s=1e-4, two_layers=2 * MIB, limit=1 << 40)[-1] == 2 * MIB


def test_what_is_lost_is_no_sign_of_speed_and_old_speed_is_forgotten():
    window = Window()
    window.posted(8 * MIB, 0.0)
    window.lost(8 * MIB)
    assert window.size_bytes(MIB, 10.0, 1 << 40, 0.1) == MIB
    window.posted(MIB, 1.0)
    window.credited(MIB, 1.5)
    assert window.size_bytes(MIB, 10.0, 1 << 40, 2.0) == 40 * MIB
    assert window.size_bytes(MIB, 10.0, 1 << 40, 2.0 + RATE_MEMORY_S) == MIB


def test_a_window_remembers_little():
    window = Window()
    for index in range(10 * MAX_SAMPLES):
        window.posted(1, index * 1e-3)
    assert len(window._posts) == MAX_SAMPLES


@pytest.mark.parametrize("seed", range(5))
def test_every_number_is_new_once(seed):
    rng = random.Random(seed)
    seen, numbers = SeqSet(), [*range(200)] * 3
    rng.shuffle(numbers)
    assert sum(seen.add(number) for number in numbers) == 200
    assert seen.base == 200
    assert not seen._above


def test_what_was_written_off_is_never_new_and_what_is_absurd_neither():
    seen = SeqSet()
    assert seen.add(7)
    seen.raise_base(6)
    assert not seen.add(3)
    assert seen.add(6)
    assert seen.base == 8
    assert not seen.add(8 + MAX_AHEAD)
    assert not seen.add((1 << 32) - 1)
    assert len(seen._above) == 0
