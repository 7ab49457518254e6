"""Which idle workers are asked whether they can serve, and who is found unfit; under virtual time."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.router.placement.canary import NUM_FAILURES, CanaryConfig, CanaryOutcome, CanaryRoster, CanaryWatch
from baton.router.placement.members import Incarnation

pytestmark = pytest.mark.fast

CONFIG = CanaryConfig(idle_s=30.0, retry_s=5.0, timeout_s=10.0)
ANSWER_S = 0.05


class Fleet:
    """Workers of which some hang, and what the watch makes of them."""

    def __init__(self, num_prefill=1, num_decode=1, config=CONFIG):
        self.now_s = 100.0
        self.prefill = [Incarnation(f"p{at}", 1) for at in range(num_prefill)]
        self.decode = [Incarnation(f"d{at}", 1) for at in range(num_decode)]
        self.hung, self.busy, self.barred, self.apart, self.alone = set(), set(), set(), set(), set()
        self.changes = []
        self.watch = CanaryWatch(config, lambda incarnation, why: self.changes.append((incarnation.worker_id, why)))
        self.begin()

    @property
    def incarnations(self):
        return [*self.prefill, *self.decode]

    def incarnation(self, name):
        return next(incarnation for incarnation in self.incarnations if incarnation.worker_id == name)

    def begin(self, after_s=0.0):
        self.now_s += after_s
        roster = CanaryRoster(
            set(self.prefill),
            set(self.decode),
            self.barred,
            self.apart,
            self.alone,
            lambda incarnation: incarnation in self.busy,
        )
        return self.watch.begin(roster, self.now_s)

    def end(self, probe, outcome=None, why="late"):
        if outcome is None:
            outcome = CanaryOutcome.FAILED if self.hung & set(probe.incarnations) else CanaryOutcome.ANSWERED
        self.now_s += CONFIG.timeout_s if outcome is CanaryOutcome.FAILED else ANSWER_S
        self.watch.ended(probe, outcome, self.now_s, "" if outcome is CanaryOutcome.ANSWERED else why)

    def probes(self, num, patience_s=120.0):
        """So many canaries, one after the other."""
        for _ in range(num):
            until_s = self.now_s + patience_s
            while (probe := self.begin(0.5)) is None:
                assert self.now_s < until_s, "nobody is due"
            self.end(probe)
            yield probe

    def unfit(self):
        return {incarnation.worker_id for incarnation in self.incarnations if self.watch.is_unfit(incarnation)}


def names(probe):
    return probe.prefill.worker_id, probe.decode.worker_id


def test_nobody_is_asked_before_it_was_idle_long_enough():
    fleet = Fleet()
    assert fleet.begin(29.9) is None
    probe = fleet.begin(0.2)
    assert names(probe) == ("p0", "d0")
    assert fleet.begin() is None, "one is under way"
    fleet.end(probe)
    assert fleet.begin(29.9) is None, "both have answered"
    assert fleet.begin(0.2) is not None


def test_zero_asks_nobody():
    fleet = Fleet(config=CanaryConfig())
    assert fleet.begin(1e9) is None
    fleet.watch.came(fleet.decode[0], fleet.now_s)
    assert fleet.watch.num_incarnations == 0


def test_what_clients_get_postpones_it_for_that_worker_alone():
    fleet = Fleet(1, 2)
    for _ in range(6):
        assert fleet.begin(9.0) is None or fleet.now_s > 130.0
        if fleet.watch.under_way is not None:
            break
        for name in ("p0", "d0"):
            fleet.watch.came(fleet.incarnation(name), fleet.now_s)
    assert fleet.watch.under_way.target == fleet.incarnation("d1")


def test_only_the_worker_that_fails_with_everybody_stays_blamed():
    fleet = Fleet(1, 2)
    fleet.begin(1.0)
    fleet.hung.add(fleet.incarnation("d0"))
    seen = [names(probe) for probe in fleet.probes(3)]
    assert seen[0] == ("p0", "d0")
    assert seen[1] == ("p0", "d1"), "whom it did not fail with"
    assert fleet.unfit() == {"d0"}
    assert seen[2] == ("p0", "d0")
    assert fleet.changes == [("d0", "late")]


def test_an_unfit_one_is_asked_every_few_seconds_and_comes_back():
    fleet = Fleet(2, 2)
    fleet.hung.add(fleet.incarnation("p1"))
    list(fleet.probes(12))
    assert fleet.unfit() == {"p1"}
    assert fleet.watch.why_unfit(fleet.incarnation("p1")) == "late"
    begun = [probe.begun_s for probe in fleet.probes(12) if probe.target.worker_id == "p1"]
    assert len(begun) >= 4
    assert all(later - earlier <= 4 * CONFIG.timeout_s for earlier, later in itertools.pairwise(begun))
    fleet.hung.clear()
    list(fleet.probes(4))
    assert fleet.unfit() == set()
    assert fleet.changes == [("p1", "late"), ("p1", "")]


def test_a_client_that_is_served_makes_it_fit():
    fleet = Fleet()
    fleet.hung.add(fleet.incarnation("d0"))
    list(fleet.probes(NUM_FAILURES))
    assert fleet.unfit() == {"p0", "d0"}, "nobody can tell them apart"
    for incarnation in fleet.incarnations:
        fleet.watch.came(incarnation, fleet.now_s)
    assert fleet.unfit() == set()
    assert fleet.begin(CONFIG.retry_s + 1.0) is None, "it is idle for a moment only"


def test_who_answered_a_client_meanwhile_is_not_blamed():
    fleet = Fleet()
    for _ in range(2 * NUM_FAILURES):
        probe = fleet.begin(CONFIG.idle_s + 1.0)
        fleet.watch.came(fleet.incarnation("p0"), fleet.now_s + 1.0)
        fleet.end(probe, CanaryOutcome.FAILED)
        assert fleet.watch._records[fleet.incarnation("p0")].num_failures == 0
    assert fleet.unfit() == {"d0"}


def test_busy_ones_are_not_asked_nor_taken_along_nor_blamed():
    fleet = Fleet(1, 1)
    fleet.busy.add(fleet.incarnation("p0"))
    assert fleet.begin(1000.0) is None, "d0 is due, and has no idle partner"
    fleet.busy.clear()
    fleet.hung.add(fleet.incarnation("d0"))
    list(fleet.probes(NUM_FAILURES))
    fleet.watch.came(fleet.incarnation("p0"), fleet.now_s)
    fleet.busy.add(fleet.incarnation("p0"))
    for probe in fleet.probes(3):
        assert (names(probe), probe.judged) == (("p0", "d0"), (fleet.incarnation("d0"),)), (
            "else it would never come back"
        )
    assert fleet.unfit() == {"d0"}
    fleet.hung.clear()
    list(fleet.probes(1))
    assert fleet.unfit() == set()


def test_an_unfit_one_goes_with_a_busy_partner_rather_than_with_one_in_doubt():
    fleet = Fleet(1, 2)
    fleet.busy.add(fleet.incarnation("d1"))
    fleet.hung.add(fleet.incarnation("d0"))
    list(fleet.probes(NUM_FAILURES))
    assert fleet.unfit() == {"p0", "d0"}
    seen = [(names(probe), probe.judged) for probe in fleet.probes(2) if probe.target == fleet.incarnation("p0")]
    assert seen == [(("p0", "d1"), (fleet.incarnation("p0"),))]
    assert fleet.unfit() == {"d0"}


def test_an_unfit_one_takes_a_busy_partner_along_only_where_no_idle_one_is():
    fleet = Fleet(2, 1)
    fleet.hung.add(fleet.incarnation("d0"))
    list(fleet.probes(6))
    assert fleet.unfit() == {"d0"}
    for name in ("p0", "p1"):
        fleet.busy = {fleet.incarnation(name)}
        for incarnation in fleet.prefill:
            fleet.watch.came(incarnation, fleet.now_s)
        seen = [probe.prefill.worker_id for probe in fleet.probes(2) if probe.target == fleet.incarnation("d0")]
        assert seen
        assert name not in seen


def test_one_in_doubt_is_not_the_partner_of_one_that_is_not():
    fleet = Fleet(1, 2)
    fleet.end(fleet.begin(CONFIG.idle_s), CanaryOutcome.FAILED)
    assert fleet.begin() is None, "d1 is due, but p0 is in doubt"
    probe = fleet.begin(CONFIG.retry_s)
    assert (probe.target, names(probe)) == (fleet.incarnation("p0"), ("p0", "d1"))


def test_who_must_not_be_asked_is_not():
    fleet = Fleet(2, 1)
    fleet.barred.add(fleet.incarnation("p0"))
    fleet.apart.add((fleet.incarnation("p1"), fleet.incarnation("d0")))
    assert fleet.begin(1000.0) is None
    fleet.apart.clear()
    assert names(fleet.begin()) == ("p1", "d0")


@pytest.mark.parametrize("outcome", [CanaryOutcome.OVERLOADED, CanaryOutcome.REFUSED, CanaryOutcome.LOST])
def test_what_is_no_verdict_blames_nobody_and_waits(outcome):
    fleet = Fleet()
    for _ in range(5):
        fleet.end(fleet.begin(CONFIG.idle_s + 1.0), outcome)
        assert fleet.begin(CONFIG.idle_s - 1.0) is None
    assert fleet.unfit() == set()


def test_decode_workers_are_asked_alone_where_nobody_else_computes_prompts():
    fleet = Fleet(0, 2)
    assert fleet.begin(1000.0) is None
    fleet.alone.add(fleet.incarnation("d1"))
    fleet.hung.add(fleet.incarnation("d1"))
    for probe in fleet.probes(NUM_FAILURES):
        assert (names(probe), probe.incarnations) == (("d1", "d1"), (fleet.incarnation("d1"),))
    assert fleet.unfit() == {"d1"}


def test_a_new_life_owes_nothing_to_the_one_before():
    fleet = Fleet()
    fleet.hung.add(fleet.incarnation("d0"))
    list(fleet.probes(NUM_FAILURES))
    old = fleet.decode[0]
    fleet.decode[0] = Incarnation("d0", 2)
    probe = fleet.begin(CONFIG.retry_s)
    assert not fleet.watch.is_unfit(old)
    assert fleet.unfit() == {"p0"}
    assert (probe.target, probe.decode) == (fleet.incarnation("p0"), fleet.incarnation("d0"))
    fleet.end(probe)
    assert fleet.unfit() == set()


def test_a_life_that_is_lost_under_its_canary_is_forgotten():
    fleet = Fleet()
    probe = fleet.begin(1000.0)
    fleet.decode.clear()
    fleet.end(probe, CanaryOutcome.FAILED)
    fleet.begin()
    assert fleet.watch.num_incarnations == 1


@pytest.mark.long
@given(
    num_prefill=st.integers(1, 4),
    num_decode=st.integers(1, 4),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_who_hangs_becomes_unfit_and_nobody_else_stays_so(num_prefill, num_decode, data):
    """As long as somebody of each role is well."""
    fleet = Fleet(num_prefill, num_decode)
    well = {data.draw(st.sampled_from(fleet.prefill)), data.draw(st.sampled_from(fleet.decode))}
    others = [incarnation for incarnation in fleet.incarnations if incarnation not in well]
    fleet.hung = hung = data.draw(st.sets(st.sampled_from(others))) if others else set()
    num_incarnations = num_prefill + num_decode
    list(fleet.probes(8 * num_incarnations))
    wanted = {incarnation.worker_id for incarnation in hung}
    assert fleet.unfit() == wanted
    for _ in fleet.probes(4 * num_incarnations):
        assert fleet.unfit() == wanted, "and it stays like that"
    fleet.hung = set()
    list(fleet.probes(2 * num_incarnations))
    assert fleet.unfit() == set()


@given(num_prefill=st.integers(1, 4), num_decode=st.integers(2, 4), data=st.data())
@settings(max_examples=40, deadline=None)
def test_one_that_hangs_never_takes_another_with_it(num_prefill, num_decode, data):
    fleet = Fleet(num_prefill, num_decode)
    fleet.hung = {data.draw(st.sampled_from(fleet.decode))}
    for _ in fleet.probes(10 * (num_prefill + num_decode)):
        assert fleet.unfit() <= {incarnation.worker_id for incarnation in fleet.hung}


OPS = st.one_of(
    st.tuples(st.just("wait"), st.sampled_from([0.2, 3.0, 6.0, 31.0])),
    st.tuples(st.sampled_from(["hung", "busy", "barred"]), st.integers(0, 7)),
    st.tuples(st.sampled_from(["leave", "again", "came"]), st.integers(0, 7)),
    st.tuples(st.just("end"), st.sampled_from([None, *CanaryOutcome])),
)


@pytest.mark.long
@given(st.lists(OPS, max_size=80))
@settings(max_examples=100, deadline=None)
def test_whatever_happens(ops):
    """One at a time, and nobody whom it must not be; a bounded memory; who answers is fit."""
    fleet, epoch = Fleet(3, 3), 1
    for op, value in ops:
        incarnations = fleet.incarnations
        incarnation = incarnations[value % len(incarnations)] if incarnations and isinstance(value, int) else None
        if op == "end" and fleet.watch.under_way is not None:
            probe = fleet.watch.under_way
            fleet.end(probe, value)
            if value is CanaryOutcome.ANSWERED:
                assert not any(fleet.watch.is_unfit(one) for one in probe.incarnations)
        elif incarnation is not None and op in ("hung", "busy", "barred"):
            getattr(fleet, op).symmetric_difference_update({incarnation})
        elif incarnation is not None and op == "came":
            fleet.watch.came(incarnation, fleet.now_s)
            assert not fleet.watch.is_unfit(incarnation)
        elif incarnation is not None and op in ("leave", "again"):
            epoch += 1
            of = fleet.prefill if incarnation in fleet.prefill else fleet.decode
            of.remove(incarnation)
            if op == "again":
                of.append(Incarnation(incarnation.worker_id, epoch))
        was_under_way, unfit = fleet.watch.under_way, fleet.unfit()
        probe = fleet.begin(value if op == "wait" else 0.0)
        if was_under_way is not None:
            assert probe is None
            continue
        assert fleet.watch.num_incarnations == len(fleet.incarnations)
        if probe is not None:
            assert probe is fleet.watch.under_way
            assert probe.prefill in fleet.prefill
            assert probe.decode in fleet.decode
            assert not fleet.barred & set(probe.incarnations)
            assert probe.target not in fleet.busy
            assert not fleet.busy & set(probe.judged)
            assert not fleet.busy & set(probe.incarnations) or probe.target.worker_id in unfit
            assert set(probe.judged) <= set(probe.incarnations)
            doubts = {one: fleet.watch._records[one].num_failures for one in probe.incarnations}
            assert doubts[probe.target] or not any(doubts.values()), "one in doubt would draw another into it"
    blamed = {name for name, why in fleet.changes if why}
    assert fleet.unfit() <= blamed
