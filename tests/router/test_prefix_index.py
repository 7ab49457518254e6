"""The router's index of cached prefixes: whatever is lost, repeated or restarted on the way, it ends up right."""

import random
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from baton.core.block_hash import BlockChange
from baton.core.errors import MalformedMessage
from baton.kvcache.block_log import BlockLog
from baton.proto import worker_pb2
from baton.proto.wire import change_from_proto, change_to_proto
from baton.router.placement.members import Incarnation
from baton.router.placement.prefix_index import FleetPrefixIndex

pytestmark = pytest.mark.fast
A, B = Incarnation("a", 1), Incarnation("b", 1)


def names(*values):
    return tuple(bytes([value]) * 16 for value in values)


class Worker:
    """One worker's present incarnation, what it holds, and what is on its way to the router."""

    def __init__(self, worker_id, epoch, ring_len, max_names):
        self.incarnation = Incarnation(worker_id, epoch)
        self.log = BlockLog(ring_len, max_names)
        self.held = set()
        self.wire = []
        self.told = 0


class IndexMachine(RuleBasedStateMachine):
    """Workers change, streams break and are opened again; the router applies what arrives."""

    @initialize(num_workers=st.integers(1, 3), ring_len=st.integers(1, 6), max_names=st.integers(1, 4))
    def begin(self, num_workers, ring_len, max_names):
        self.limits = (ring_len, max_names)
        self.index = FleetPrefixIndex()
        self.workers = [Worker(f"w{at}", 1, ring_len, max_names) for at in range(num_workers)]
        for worker in self.workers:
            self.index.join(worker.incarnation)

    def one(self, at):
        return self.workers[at % len(self.workers)]

    @rule(at=st.integers(0, 2), name=st.integers(0, 7))
    def change(self, at, name):
        worker, (name,) = self.one(at), names(name)
        if name in worker.held:
            worker.held.remove(name)
            worker.log.removed(name)
        else:
            worker.held.add(name)
            worker.log.stored(name)

    @rule(at=st.integers(0, 2))
    def tell(self, at):
        """The stream goes on from what was told last."""
        worker = self.one(at)
        for change in worker.log.since(worker.told):
            worker.wire.append(change_from_proto(change_to_proto(change)))
            worker.told = change.version

    @rule(at=st.integers(0, 2))
    def deliver(self, at):
        worker = self.one(at)
        if worker.wire and not self.index.apply(worker.incarnation, worker.wire.pop(0)):
            self.reopen(at)

    @rule(at=st.integers(0, 2))
    def reopen(self, at):
        """What is on its way is lost, and the router asks from what it has."""
        worker = self.one(at)
        worker.wire.clear()
        worker.told = self.index.version(worker.incarnation)

    @rule(at=st.integers(0, 2), where=st.integers(0, 5))
    def lose(self, at, where):
        worker = self.one(at)
        if worker.wire:
            worker.wire.pop(where % len(worker.wire))

    @rule(at=st.integers(0, 2), where=st.integers(0, 5))
    def repeat(self, at, where):
        worker = self.one(at)
        if worker.wire:
            worker.wire.insert(where % len(worker.wire), worker.wire[where % len(worker.wire)])

    @rule(at=st.integers(0, 2))
    def restart(self, at):
        at %= len(self.workers)
        before = self.workers[at]
        self.index.drop(before.incarnation)
        self.workers[at] = Worker(before.incarnation.worker_id, before.incarnation.epoch + 1, *self.limits)
        self.index.join(self.workers[at].incarnation)

    @rule()
    def quiet(self):
        """Every stream is opened again and read to its end, and everything is as it is at the workers."""
        for at, worker in enumerate(self.workers):
            self.reopen(at)
            self.tell(at)
            while worker.wire:
                assert self.index.apply(worker.incarnation, worker.wire.pop(0))
            assert self.index.names(worker.incarnation) == worker.held
        assert self.index.num_names == sum(len(worker.held) for worker in self.workers)

    @invariant()
    def lookups_are_those_of_the_sets(self):
        if not hasattr(self, "index"):
            return
        prompt = names(0, 1, 2, 3, 4)
        found = self.index.match(prompt, 0.0)
        assert found.keys() == set(self.index.incarnations()) == {worker.incarnation for worker in self.workers}
        for incarnation, length in found.items():
            held = self.index.names(incarnation)
            assert set(prompt[:length]) <= held
            assert length == len(prompt) or prompt[length] not in held

    def teardown(self):
        if hasattr(self, "index"):
            self.quiet()
            for worker in self.workers:
                self.index.drop(worker.incarnation)
            assert (self.index.num_names, self.index._bits) == (0, {})


@pytest.mark.long
def test_any_sequence_of_changes_losses_and_restarts_ends_with_the_workers_true_sets():
    run_state_machine_as_test(IndexMachine, settings=settings(max_examples=150, stateful_step_count=40, deadline=None))


def test_a_gap_changes_nothing_and_is_counted():
    index = FleetPrefixIndex()
    index.join(A)
    assert index.apply(A, BlockChange(after=0, version=2, stored=names(1, 2)))
    assert not index.apply(A, BlockChange(after=3, version=4, stored=names(3)))
    assert (index.version(A), index.names(A), index.num_gaps) == (2, frozenset(names(1, 2)), 1)


def test_a_whole_that_is_cut_off_is_asked_for_again():
    index = FleetPrefixIndex()
    index.join(A)
    assert index.apply(A, BlockChange(after=0, version=9, stored=names(7)))
    assert index.apply(A, BlockChange(after=0, version=0, cleared=True, stored=names(1)))
    assert index.version(A) == 0
    assert index.match(names(1), 0.0) == {A: 1}


def test_a_whole_without_one_of_its_parts_is_a_gap():
    log = BlockLog(ring_len=1, max_names=1)
    for name in names(1, 2, 3):
        log.stored(name)
    for lost in (0, 1, 2):
        index = FleetPrefixIndex()
        index.join(A)
        parts = log.since(0)
        del parts[lost]
        taken = [index.apply(A, part) for part in parts]
        assert (index.version(A), all(taken)) == (0, lost == 2)


def test_lives_are_told_apart_and_a_dropped_one_leaves_nothing():
    index = FleetPrefixIndex()
    for incarnation in (A, B):
        index.join(incarnation)
    index.apply(A, BlockChange(after=0, version=2, stored=names(1, 2)))
    index.apply(B, BlockChange(after=0, version=1, stored=names(1)))
    assert index.match(names(1, 2, 3), 0.0) == {A: 2, B: 1}
    index.drop(A)
    index.drop(A)
    assert index.match(names(1, 2), 0.0) == {B: 1}
    index.join(Incarnation("a", 2))
    assert index.match(names(1, 2), 0.0) == {B: 1, Incarnation("a", 2): 0}
    assert index.version(A) == 0
    assert index.match((), 0.0) == {B: 0, Incarnation("a", 2): 0}


def test_more_names_than_the_bound_are_not_remembered():
    index = FleetPrefixIndex(max_names=2)
    index.join(A)
    index.apply(A, BlockChange(after=0, version=3, stored=names(1, 2, 3)))
    assert (index.num_names, index.num_ignored) == (2, 1)
    index.apply(A, BlockChange(after=3, version=5, stored=names(4), removed=names(1, 3)))
    assert index.names(A) == frozenset(names(2, 4))


def test_expected_names_count_until_they_come_or_their_time_is_over():
    index = FleetPrefixIndex(max_expected=3)
    index.expect(A, names(1), 1.0)
    assert index.match(names(1), 0.0) == {}, "an unknown life"
    for incarnation in (A, B):
        index.join(incarnation)
    index.apply(B, BlockChange(after=0, version=1, stored=names(1)))
    index.expect(A, names(1, 2), 1.0)
    assert index.match(names(1, 2), 0.9) == {A: 2, B: 1}
    assert index.match(names(1, 2), 1.0) == {A: 0, B: 1}
    index.expect(A, names(1, 2), 2.0)
    index.apply(A, BlockChange(after=0, version=1, stored=names(1)))
    index.apply(A, BlockChange(after=1, version=2, removed=names(1)))
    assert index.match(names(1, 2), 1.5)[A] == 0, "what came and went is expected no more"
    index.expect(A, names(1, 3, 4, 5), 3.0)
    assert index.match(names(1), 1.5)[A] == 0, "the oldest expectation gave way"
    assert index.match(names(3, 4, 5), 1.5)[A] == 3
    index.drop(A)
    assert index.match(names(3), 1.5) == {B: 0}


def test_a_lookup_takes_as_long_for_many_workers_as_for_few():
    prompt = [random.Random(7).randbytes(16) for _ in range(1000)]
    times = {}
    for num_workers in (2, 200):
        index = FleetPrefixIndex()
        for at in range(num_workers):
            incarnation = Incarnation(f"w{at}", 1)
            index.join(incarnation)
            index.apply(incarnation, BlockChange(after=0, version=1, stored=tuple(prompt)))
        best = float("inf")
        for _ in range(5):
            start_s = time.perf_counter()
            found = index.match(prompt, 0.0)
            best = min(best, time.perf_counter() - start_s)
        assert set(found.values()) == {1000}
        times[num_workers] = best
    assert times[200] < 10 * times[2], times


@pytest.mark.parametrize(
    "wrong", [{"name_bytes": 8}, {"stored": b"x" * 17, "name_bytes": 16}, {"removed": b"x", "name_bytes": 16}]
)
def test_names_of_another_kind_are_refused(wrong):
    with pytest.raises(MalformedMessage):
        change_from_proto(worker_pb2.PrefixChange(**wrong))
