"""Chunks beside running streams take about a step, and are never so short that their fixed cost is all of it."""

import pytest

from baton.core.distribution import Distribution
from baton.core.pace import PrefillPace
from baton.decode_worker.chunk_budget import FIRST_LEN, MIN_LEN, ChunkBudget

pytestmark = pytest.mark.fast


class Steps:
    def __init__(self):
        self.num, self.total = 0, 0.0

    def add(self, num, step_s):
        self.num, self.total = self.num + num, self.total + num * step_s

    def __call__(self):
        return Distribution((1.0,), (self.num, 0), self.total)


def pace_of(fixed_s, per_token_s):
    pace = PrefillPace()
    for length in (1, 10, 100, 30, 200):
        pace.add(length, fixed_s + per_token_s * length)
    return pace


def test_few_tokens_before_anything_is_known():
    steps = Steps()
    assert ChunkBudget(256, PrefillPace(), steps).length() == FIRST_LEN
    assert ChunkBudget(256, pace_of(0.001, 0.0001), steps).length() == FIRST_LEN
    assert ChunkBudget(20, PrefillPace(), steps).length() == 20


def test_a_chunk_takes_about_a_step():
    steps, pace = Steps(), pace_of(0.001, 0.0001)
    steps.add(10, 0.011)
    budget = ChunkBudget(256, pace, steps)
    assert budget.length() == pytest.approx(100, abs=1)
    assert budget.last_len == budget.length()
    assert pace.step_s(budget.last_len) <= 0.0111


def test_a_fixed_cost_beyond_a_step_is_worth_as_many_tokens():
    steps = Steps()
    steps.add(10, 0.002)
    assert ChunkBudget(256, pace_of(0.01, 0.0001), steps).length() == pytest.approx(100, abs=1)


def test_a_chunk_is_never_tiny_or_longer_than_the_most():
    steps = Steps()
    steps.add(10, 0.002)
    assert ChunkBudget(256, pace_of(0.0, 0.001), steps).length() == MIN_LEN
    assert ChunkBudget(8, pace_of(0.0, 0.001), steps).length() == 8
    steps.add(1000, 10.0)
    assert ChunkBudget(256, pace_of(0.0, 0.001), steps).length() == 256


def test_the_step_is_that_of_late():
    steps = Steps()
    steps.add(1000, 0.01)
    budget = ChunkBudget(1000, pace_of(0.0, 0.0001), steps)
    assert budget.length() == pytest.approx(100, abs=1)
    for _ in range(10):
        steps.add(3, 0.05)
        budget.length()
    assert budget.length() == pytest.approx(500, rel=0.01)
