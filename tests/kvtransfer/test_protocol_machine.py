"""Hypothesis drives two prefill and two decode workers over a network that drops, repeats, reorders and damages."""

import collections

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from baton.kvtransfer.receiver.table import IncomingState
from baton.kvtransfer.sender.table import TransferState
from baton.tests.kvtransfer.simulation import Options
from baton.tests.kvtransfer.simulation_driver import STEPS, Driver

CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
NUM_SEQUENCES, SEQUENCE_LEN = 1000, 50
NUM_LONG_STEPS, LONG_SEQUENCE_LEN = 1_000_000, 200
OPTIONS = st.builds(
    Options,
    prefill_tp=st.sampled_from([1, 2]),
    decode_tp=st.sampled_from([1, 2]),
    data_path=st.sampled_from(["inline", "shm"]),
    has_digest=st.booleans(),
    skew=st.sampled_from([0.0, 0.02]),
    names_change=st.booleans(),
)


class HandOff(RuleBasedStateMachine):
    """Hypothesis chooses every step and every choice within it, so that what fails is made small."""

    @initialize(options=OPTIONS, random=st.randoms(use_true_random=False))
    def begin(self, options, random):
        self.driver = Driver(random.getrandbits(32), options)
        self.driver.rng = random

    @rule(names=st.lists(st.sampled_from([name for name, weight in STEPS if weight >= 2]), min_size=1, max_size=8))
    def usual(self, names):
        for name in names:
            getattr(self.driver, name)()
            self.driver.world.check()

    @rule(name=st.sampled_from([name for name, weight in STEPS if weight < 2]))
    def rare(self, name):
        getattr(self.driver, name)()

    @invariant()
    def holds(self):
        if hasattr(self, "driver"):
            self.driver.world.check()

    def teardown(self):
        if hasattr(self, "driver"):
            self.driver.world.settle()


def machine(**limits):
    run_state_machine_as_test(HandOff, settings=settings(deadline=None, suppress_health_check=CHECKS, **limits))


def test_the_invariants_hold_whatever_hypothesis_tries():
    machine(max_examples=60, stateful_step_count=30)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_invariants_hold_whatever_hypothesis_tries_for_long():
    machine(max_examples=3000, stateful_step_count=50)


def test_the_invariants_hold_for_a_while():
    for seed in range(100):
        Driver(seed).run(SEQUENCE_LEN)


@settings(max_examples=NUM_SEQUENCES, deadline=None, suppress_health_check=CHECKS)
@given(seed=st.integers(0, (1 << 62) - 1))
def test_the_invariants_hold(seed):
    """1,000 sequences of 50 steps and more, each in a cluster of another kind."""
    driver = Driver(seed)
    driver.run(SEQUENCE_LEN)
    assert driver.world.steps >= SEQUENCE_LEN


def test_long_sequences_leave_nothing_behind():
    """Some failures take two ranks, several of their lives, and peers that are forgotten meanwhile."""
    for seed in range(250):
        Driver(seed).run(LONG_SEQUENCE_LEN)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_invariants_hold_for_a_million_steps():
    num_steps, seed = 0, 1 << 32
    hits = collections.Counter()
    while num_steps < NUM_LONG_STEPS:
        driver = Driver(seed)
        driver.run(LONG_SEQUENCE_LEN)
        num_steps += driver.world.steps
        hits += driver.world.hits
        seed += 1
    assert_every_fault_met_every_state(hits)


def assert_every_fault_met_every_state(hits):
    """`hits` counts (fault, side, state); a fault that concerns a side meets all of its states."""
    faults = {(fault, side) for fault, side, _ in hits}
    for fault, side in faults:
        if fault in ("abort_prefill", "broken_write", "damaged_write", "failed_write"):
            continue  # they need something that not every state has
        for state in IncomingState if side == "incoming" else TransferState:
            assert hits[fault, side, state.name], f"{fault} never met a {side} in {state.name}"


def test_faults_meet_every_state():
    hits = collections.Counter()
    for seed in range(150):
        driver = Driver(seed, hold=6, write_at_source=6)
        driver.run(150)
        hits += driver.world.hits
    for fault in ("drop", "repeat", "damage", "replay"):
        for side, states in (("incoming", IncomingState), ("push", TransferState)):
            missed = [state.name for state in states if not hits[fault, side, state.name]]
            assert not missed, f"{fault} never met a {side} in {missed}"


def test_most_of_it_gets_through():
    """A simulation in which nothing ever seals proves nothing."""
    num_complete = num_reserved = 0
    for seed in range(100):
        driver = Driver(seed)
        driver.run(SEQUENCE_LEN)
        num_complete += len(driver.world.log)
        num_reserved += sum(driver.world.next_attempt.values())
    assert num_complete > num_reserved / 4, f"{num_complete} of {num_reserved} attempts sealed"
