"""What is expected of a time that is measured again and again."""

import random

import pytest

from baton.router.estimate import CLIP, Estimate

pytestmark = pytest.mark.fast


def test_nothing_is_expected_before_anything_was_measured():
    assert Estimate().high == 0.0


def test_the_mean_is_followed_and_what_varies_gets_room():
    steady, wild, rng = Estimate(), Estimate(), random.Random(1)
    for _ in range(500):
        steady.add(0.2)
        wild.add(0.2 + rng.uniform(-0.1, 0.1))
    assert steady.high == pytest.approx(0.2)
    assert wild.mean == pytest.approx(0.2, abs=0.03)
    assert 0.25 < wild.high < 0.35


def test_one_that_is_far_out_counts_for_little_and_a_lasting_change_is_learnt():
    estimate = Estimate()
    for _ in range(100):
        estimate.add(0.1)
    estimate.add(1000.0)
    assert estimate.high < 0.1 * (1 + CLIP)
    for _ in range(200):
        estimate.add(2.0)
    assert estimate.mean == pytest.approx(2.0, rel=0.05)


def test_after_zeros_something_is_learnt():
    estimate = Estimate()
    for value in (0.0, 0.0, *[1.0] * 300):
        estimate.add(value)
    assert estimate.mean == pytest.approx(1.0, rel=0.1)
