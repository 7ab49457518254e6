"""The parts of a step's time, found again from times made of them."""

import random

import pytest

from baton.core.pace import FEW_STEPS, PrefillPace

pytestmark = pytest.mark.fast


def fed(lengths, fixed_s=0.004, per_token_s=0.0001, noise=0.0):
    pace, rng = PrefillPace(), random.Random(1)
    for length in lengths:
        pace.add(length, (fixed_s + per_token_s * length) * (1 + noise * rng.uniform(-1, 1)), 0.001)
    return pace


def test_nothing_is_known_before_the_second_step():
    pace = PrefillPace()
    assert not pace.is_known
    pace.add(10, 3.0)
    assert not pace.is_known, "the first one sets things up"
    pace.add(10, 0.01)
    assert pace.is_known
    assert pace.step_s(10) == pytest.approx(0.01)


def test_both_parts_are_found():
    pace = fed([8, 8, 64, 200, 16, 256, 100])
    assert pace.fixed_s == pytest.approx(0.004)
    assert pace.per_token_s == pytest.approx(0.0001)
    assert pace.draft_s == pytest.approx(0.001)


def test_noise_moves_them_little():
    lengths = random.Random(2).choices(range(1, 256), k=300)
    pace = fed(lengths, noise=0.3)
    assert pace.step_s(10) == pytest.approx(0.005, rel=0.3)
    assert pace.step_s(250) == pytest.approx(0.029, rel=0.1)


def test_steps_of_one_length_say_nothing_of_the_parts():
    pace = fed([32] * 10)
    assert pace.fixed_s == pytest.approx(pace.per_token_s * 32)
    assert pace.step_s(32) == pytest.approx(0.0072)


def test_no_part_is_negative():
    down = PrefillPace()
    for length, seconds in ((1, 1.0), (10, 0.02), (100, 0.01), (10, 0.02), (100, 0.01)):
        down.add(length, seconds)
    assert down.per_token_s == 0
    assert 0.01 <= down.fixed_s <= 0.02
    steep = PrefillPace()
    for length, seconds in ((1, 1.0), (10, 0.001), (100, 0.1), (10, 0.001), (100, 0.1)):
        steep.add(length, seconds)
    assert steep.fixed_s >= 0
    assert steep.per_token_s > 0


def test_a_stray_step_counts_as_somewhat_longer():
    pace = fed([10, 100] * FEW_STEPS)
    before = pace.step_s(50)
    pace.add(50, 60.0)
    assert pace.step_s(50) < 1.5 * before


def test_what_is_long_ago_is_forgotten():
    pace = fed([10, 100] * 300)
    for _ in range(400):
        pace.add(10, 0.05)
        pace.add(100, 0.5)
    assert pace.fixed_s == pytest.approx(0.0, abs=1e-3)
    assert pace.per_token_s == pytest.approx(0.005, rel=0.01)
