"""What is expected of a time that is measured again and again."""

import random

import pytest

from baton.router.admission.admission_queue import CLIP, HALF_LIFE_S, Estimate

pytestmark = pytest.mark.fast
STEP_S = 0.01  # between two measurements


def after(estimate, values, start_s=0.0, step_s=STEP_S):
    now_s = start_s
    for value in values:
        now_s += step_s
        estimate.add(value, now_s)
    return now_s


def test_nothing_is_expected_before_anything_was_measured():
    assert Estimate().high(1e9) == 0.0


def test_the_mean_is_followed_and_what_varies_gets_room():
    steady, wild, rng = Estimate(), Estimate(), random.Random(1)
    now_s = after(steady, [0.2] * 500)
    after(wild, [0.2 + rng.uniform(-0.1, 0.1) for _ in range(500)])
    assert steady.high(now_s) == pytest.approx(0.2)
    assert wild.mean(now_s) == pytest.approx(0.2, abs=0.03)
    assert 0.25 < wild.high(now_s) < 0.35


def test_one_that_is_far_out_counts_for_little_and_a_lasting_change_is_learnt():
    estimate = Estimate()
    now_s = after(estimate, [0.1] * 100)
    estimate.add(1000.0, now_s)
    assert estimate.high(now_s) < 0.1 * (1 + CLIP)
    now_s = after(estimate, [2.0] * 200, now_s)
    assert estimate.mean(now_s) == pytest.approx(2.0, rel=0.05)


def test_after_zeros_something_is_learnt():
    estimate = Estimate()
    now_s = after(estimate, (0.0, 0.0, *[1.0] * 300))
    assert estimate.mean(now_s) == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("half_lives", [1, 2, 10])
def test_what_was_measured_fades_and_the_next_measurement_weighs_as_much_more(half_lives):
    estimate = Estimate()
    now_s = after(estimate, [8.0] * 100)
    later_s = now_s + half_lives * HALF_LIFE_S
    assert estimate.high(later_s) == pytest.approx(8.0 * 0.5**half_lives)
    assert estimate.mean(later_s) == pytest.approx(8.0 * 0.5**half_lives)
    estimate.add(1.0, later_s)
    assert estimate.mean(later_s) == pytest.approx(1.0 + 7.0 * 0.5**half_lives)
