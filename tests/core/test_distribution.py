"""Histograms of metrics: buckets and quantiles against plain Python over the values themselves."""

import random

import pytest

from baton.core.distribution import Buckets, Distribution
from baton.core.errors import MalformedMessage

pytestmark = pytest.mark.fast

BOUNDS = (0.5, 1.0, 2.0, 8.0)


def filled(values, bounds=BOUNDS):
    buckets = Buckets(bounds)
    for value in values:
        buckets.observe(value)
    return buckets.read()


def test_a_value_belongs_to_the_first_bucket_that_it_does_not_exceed():
    values = [0.0, 0.5, 0.50001, 1.0, 2.0, 2.5, 8.0, 8.1, 1e9]
    assert filled(values).counts == (2, 2, 1, 2, 2)
    assert filled(values).num == len(values)
    assert filled(values).mean == pytest.approx(sum(values) / len(values))


def test_quantiles_lie_in_the_bucket_of_the_true_value():
    rng = random.Random(3)
    for _ in range(200):
        values = sorted(rng.uniform(0, 8) for _ in range(rng.randrange(1, 40)))
        found = filled(values)
        for share in (0.01, 0.25, 0.5, 0.9, 0.99, 1.0):
            true = next(value for at, value in enumerate(values, 1) if at >= share * len(values) - 1e-9)
            quantile = found.quantile(share)
            low = max((bound for bound in (0.0, *BOUNDS) if bound < true), default=0.0)
            high = min(bound for bound in BOUNDS if bound >= true)
            assert low <= quantile <= high, (values, share)


def test_quantiles_are_interpolated_and_end_at_the_last_bound():
    assert filled([0.6, 0.7, 0.8, 0.9]).quantile(0.5) == pytest.approx(0.75)
    assert filled([100.0]).quantile(0.5) == 8.0
    assert filled([]).quantile(0.5) is None
    assert filled([]).mean is None


def test_the_difference_of_two_readings_is_what_came_between():
    buckets = Buckets(BOUNDS)
    buckets.observe(0.1)
    before = buckets.read()
    for value in (1.5, 3.0):
        buckets.observe(value)
    between = buckets.read().since(before)
    assert between.counts == filled([1.5, 3.0]).counts
    assert between.total == pytest.approx(4.5)
    assert before.num == 1, "a reading does not move"


@pytest.mark.parametrize(
    ("bounds", "counts"),
    [((), ()), ((1.0,), (1,)), ((1.0,), (1, 2, 3)), ((2.0, 1.0), (1, 2, 3)), ((1.0, 1.0), (1,) * 3)],
)
def test_numbers_that_do_not_fit_are_refused(bounds, counts):
    with pytest.raises(MalformedMessage):
        Distribution.checked(bounds, counts, 0.0)
    assert Distribution.checked([1.0], [3, 4], 5.0).num == 7
