"""Who is blamed for deaths: who was at several, came to each after the one before, and alone shares that record."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.clock import VirtualClock
from baton.core.errors import RequestQuarantined
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import GrammarSpec, SamplingParams
from baton.router.attempt import poison_detector as module
from baton.router.attempt.in_flight_requests import fingerprint
from baton.router.attempt.migration import Migration, MigrationConfig
from baton.router.attempt.poison_detector import PoisonDetector, Stay
from baton.router.metrics import RouterMetrics
from baton.router.placement.members import Members

pytestmark = pytest.mark.fast


def died(poison_detector, worker, names, at_s, since_s=None):
    """A death of these, who had come after whatever happened before; the names that are blamed by it."""
    start_s = at_s - 1.0 if since_s is None else since_s
    return [
        one.fingerprint for one in poison_detector.died(worker, [Stay(name, start_s, at_s) for name in names], at_s)
    ]


def test_a_request_alone_is_blamed_at_its_second_worker():
    poison_detector = PoisonDetector()
    assert died(poison_detector, "d0", ["x"], 10) == []
    assert died(poison_detector, "d1", ["x"], 20) == ["x"]
    blamed = poison_detector.find("x", 20)
    assert (blamed.workers, blamed.until_s) == (("d0", "d1"), 620.0)
    assert poison_detector.find("y", 20) is None
    assert poison_detector.find("x", 620.0) is None
    assert poison_detector.blamed(620.0) == []


def test_one_death_blames_nobody_and_bystanders_go_free():
    poison_detector = PoisonDetector()
    crowd = [f"b{number}" for number in range(16)]
    assert died(poison_detector, "d0", ["x", *crowd], 10) == []
    # They scatter: half of them go on with x, half elsewhere, and new ones come.
    assert died(poison_detector, "d1", ["x", "n0", "n1"], 20) == ["x"]
    assert all(poison_detector.find(name, 21) is None for name in [*crowd, "n0", "n1"])


def test_those_who_go_from_death_to_death_together_are_told_apart_by_another():
    poison_detector = PoisonDetector()
    crowd = ["x", *(f"b{number}" for number in range(16))]
    assert died(poison_detector, "d0", crowd, 10) == []
    assert died(poison_detector, "d1", crowd, 20) == []
    assert died(poison_detector, "d2", ["x", "b3", "n"], 30) == []
    assert died(poison_detector, "d3", ["x"], 40) == ["x"]
    assert poison_detector.find("b3", 41) is None


def test_a_host_that_takes_two_workers_with_it_is_one_death():
    """A lone request on a prefill and a decode worker of one host: it did not come to the second after the first."""
    poison_detector = PoisonDetector()
    assert died(poison_detector, "p0", ["x"], 10, since_s=5) == []
    assert died(poison_detector, "d0", ["x"], 10.2, since_s=5) == []
    assert died(poison_detector, "d1", ["x"], 20, since_s=11) == ["x"]


def test_a_worker_that_dies_again_and_again_blames_nobody():
    poison_detector = PoisonDetector()
    for at_s in (10, 20, 30):
        assert died(poison_detector, "bad", ["x"], at_s) == []


def test_what_matters_is_when_a_stream_broke_and_not_when_its_worker_was_given_up():
    poison_detector = PoisonDetector()
    assert poison_detector.died("d0", [Stay("x", 1.0, 2.0)], 3.5) == []
    assert len(poison_detector.died("d1", [Stay("x", 2.1, 2.4)], 3.9)) == 1


def test_who_ended_well_is_forgiven_and_so_is_who_was_there_long_ago():
    poison_detector = PoisonDetector(hold_s=100.0)
    died(poison_detector, "d0", ["x", "y"], 10)
    poison_detector.finished("x")
    poison_detector.finished("nobody")
    assert died(poison_detector, "d1", ["x"], 20) == []
    assert died(poison_detector, "d2", ["y"], 111) == []
    assert died(poison_detector, "d3", ["y"], 120) == ["y"]


def test_a_pardon_begins_anew():
    poison_detector = PoisonDetector()
    died(poison_detector, "d0", ["x"], 10)
    died(poison_detector, "d1", ["x"], 20)
    assert poison_detector.clear("y") == 0
    assert poison_detector.clear("x") == 1
    assert len(poison_detector) == 0
    assert died(poison_detector, "d2", ["x"], 30) == []
    assert died(poison_detector, "d3", ["x"], 40) == ["x"]
    assert poison_detector.clear() == 1


def test_it_can_be_off_or_stricter():
    never = PoisonDetector(num_deaths=0)
    strict = PoisonDetector(num_deaths=3)
    for number in range(5):
        assert died(never, f"d{number}", ["x"], 10 * number) == []
        assert died(strict, f"d{number}", ["x"], 10 * number) == (["x"] if number == 2 else [])
    with pytest.raises(AssertionError):
        PoisonDetector(num_deaths=1)


def test_both_tables_are_bounded(monkeypatch):
    monkeypatch.setattr(module, "MAX_RECORDS", 20)
    monkeypatch.setattr(module, "MAX_BLAMED", 5)
    poison_detector = PoisonDetector()
    for number in range(100):
        died(poison_detector, f"a{number}", [f"x{number}"], 2 * number)
        died(poison_detector, f"b{number}", [f"x{number}"], 2 * number + 1)
        died(poison_detector, f"c{number}", [f"y{number}", f"z{number}"], 2 * number + 1)
    assert [one.fingerprint for one in poison_detector.blamed(200)] == [f"x{number}" for number in range(95, 100)]
    assert len(poison_detector) == 25


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), num_workers=st.integers(3, 8), num_others=st.integers(0, 12))
def test_a_poison_among_requests_that_move_at_random_is_the_only_one_blamed(seed, num_workers, num_others):
    """One request kills every worker it comes to; the others go wherever there is a worker, and finish now and then."""
    rng = random.Random(seed)
    poison_detector = PoisonDetector()
    others = [f"b{number}" for number in range(num_others)]
    where = {name: rng.randrange(num_workers) for name in others}
    blamed, now_s = [], 0.0
    for death in range(12):
        now_s += 10.0
        worker = death % num_workers
        present = ["x", *(name for name in others if where[name] == worker)]
        blamed += died(poison_detector, f"d{worker}", present, now_s)
        if blamed:
            break
        for name in others:
            if where[name] == worker:
                where[name] = rng.randrange(num_workers)
    assert set(blamed) <= {"x"}
    assert blamed or num_others, "alone it is blamed for certain"


def request_of(tokens=(1, 2, 3), **values):
    return GenerationRequest(
        key=AttemptKey("a", 1), prompt_token_ids=tokens, sampling=SamplingParams(**values), deadline_s=1.0
    )


def test_a_fingerprint_is_of_the_prompt_and_the_parameters():
    plain = fingerprint(request_of())
    assert len(plain) == 24
    assert plain == fingerprint(request_of(seed=77)), "servers draw seeds"
    assert plain == fingerprint(request_of(prompt_logprobs=1)), "of the first answer alone"
    different = [
        request_of((1, 2)),
        request_of((1, 2, 4)),
        request_of((12, 3)),
        request_of(temperature=0.5),
        request_of(stop=("x",)),
        request_of(n=2),
        request_of(grammar=GrammarSpec("regex", "a")),
        dataclasses.replace(request_of(), tenant="t"),
        dataclasses.replace(request_of(), tenant="u"),
    ]
    assert len({plain, *map(fingerprint, different)}) == 1 + len(different)


def test_each_tenant_is_refused_for_its_own_requests_alone():
    clock = VirtualClock()
    migration = Migration(MigrationConfig(), Members(clock), clock, RouterMetrics())
    one, other = (dataclasses.replace(request_of(), tenant=tenant) for tenant in ("t", "u"))
    died(migration.poison_detector, "d0", [fingerprint(one)], 10)
    assert died(migration.poison_detector, "d1", [fingerprint(one)], 20) == [fingerprint(one)]
    with pytest.raises(RequestQuarantined):
        migration.admit(one)
    migration.admit(other)
    died(migration.poison_detector, "d0", [fingerprint(other)], 30)
    assert died(migration.poison_detector, "d1", [fingerprint(other)], 40) == [fingerprint(other)]
    with pytest.raises(RequestQuarantined):
        migration.admit(other)
