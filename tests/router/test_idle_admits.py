"""Admission after what it has learnt has passed: an idle system admits, and 1,000 clients may wait."""

import random

import pytest

from baton.core.rate import FullStepRate, RateMeter
from baton.router.admission.admission import Capacity, RequestWork
from baton.router.admission.admission_queue import REQUEST_BYTES, TOKEN_BYTES
from baton.router.admission.fair_queue import FairQueue, QueueLimits
from baton.tests.router.gate_simulation import GateSimulation

pytestmark, long = pytest.mark.fast, pytest.mark.long
CANARY_LEN, CANARY_S, CHUNK_LEN = 4, 0.0158, 2048


def overload(seed):
    """Several times more than a fleet can do, whose reports may be wrong by orders of magnitude; then nothing."""
    rng = random.Random(seed)
    rate = 10 ** rng.uniform(2, 5)
    simulation = GateSimulation(
        seed=seed,
        num_prefill=rng.randint(1, 3),
        num_decode=rng.randint(1, 3),
        rate=rate,
        reported=rng.choice((0.0, rate, rate * 10 ** rng.uniform(-5, 1))),
        num_positions=rng.choice((2_000, 50_000, 1 << 20)),
        token_s=10 ** rng.uniform(-3, 0),
        max_wait_s=rng.choice((None, None, 5.0, 30.0)),
        max_waiting=rng.choice((None, None, 16)),
    )
    per_s, now_s = rng.uniform(2, 8) * rate * len(simulation.free_s) / 500, 0.0
    for _ in range(rng.randint(40, 160)):
        now_s += rng.expovariate(per_s)
        timeout_s = rng.choice((0.5, 2.0, 10.0, 50.0, 600.0))
        tenant = rng.choice(("a", "b"))
        simulation.at(now_s, simulation.offer, rng.randint(1, 1000), rng.randint(1, 40), timeout_s, tenant)
    simulation.run()
    return simulation, rng


@pytest.mark.long
@pytest.mark.parametrize("seed", [*range(40), *(pytest.param(seed, marks=long) for seed in range(40, 200))])
def test_the_first_request_after_a_second_of_idleness_is_admitted(seed):
    simulation, rng = overload(seed)
    for _ in range(3):
        simulation.clock.time_s += 1.0
        simulation.admission_queue.look()
        before = simulation.num_answered
        assert simulation.offer(rng.randint(1, 1000), timeout_s=rng.choice((0.5, 2.0, 50.0, 600.0))), simulation.errors
        assert simulation.admission_queue.queue.num_waiting == 0, "it begins at once"
        simulation.run()
        assert simulation.num_answered == before + 1


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.long
def test_a_while_after_an_overload_several_at_once_are_admitted_as_on_the_first_day(seed):
    """Estimates have faded; what workers report of their rate is true here."""
    simulation, rng = overload(seed)
    simulation.fleet.report(simulation.rate)
    simulation.clock.time_s += 60.0
    simulation.refused.clear()
    for _ in range(15):
        simulation.offer(rng.randint(1, 100), timeout_s=50.0)
    simulation.run()
    assert not simulation.refused


def clients(simulation, number, num_requests, prompt_len, max_tokens):
    """They share so many requests; each client sends the next one when its last has ended."""
    left = [num_requests]

    def client():
        if left[0]:
            left[0] -= 1
            simulation.offer(prompt_len, max_tokens, then=client)

    for _ in range(number):
        simulation.at(simulation.clock.now_s(), client)
    simulation.run()


def after_canaries(meter):
    """What a prefill worker that has only answered canaries says it can do."""
    for at in range(1, 6):
        if isinstance(meter, FullStepRate):
            meter.add(CANARY_LEN, CANARY_S, 30.0 * at, full_len=CHUNK_LEN)
        else:
            meter.add(CANARY_LEN, CANARY_S)
    return meter.per_s(151.0) if isinstance(meter, FullStepRate) else meter.per_s


def test_canaries_do_not_tell_how_fast_prompts_are_computed():
    """With `--local-prefill always` nothing else ever reaches the prefill workers."""
    assert after_canaries(FullStepRate()) == 0.0
    simulation = GateSimulation(rate=37_000.0, reported=after_canaries(FullStepRate()), token_s=0.008)
    clients(simulation, 16, 96, 1024, 128)
    assert (simulation.num_answered, simulation.refused.total()) == (96, 0)


def test_the_rate_of_canaries_and_a_wait_of_30_s_is_what_refused_88_of_96():
    rate = after_canaries(RateMeter())
    assert rate == pytest.approx(253, rel=0.01)
    simulation = GateSimulation(rate=37_000.0, reported=rate, token_s=0.008, max_wait_s=30.0)
    simulation.clock.time_s = 1000.0
    clients(simulation, 16, 96, 1024, 128)
    assert 85 <= simulation.refused["deadline"] <= 90
    assert "would be 2." in simulation.errors[0]


@pytest.mark.long
@pytest.mark.parametrize("rate", [pytest.param(37_000.0, marks=long), 3_000.0])
@pytest.mark.parametrize("reported", [pytest.param(0.0, marks=long), 1.0])
def test_a_thousand_clients_at_once_are_all_answered_by_default(rate, reported):
    simulation = GateSimulation(rate=rate, reported=reported * rate, num_positions=400_000, token_s=0.01)
    clients(simulation, 1000, 1000, 1024, 128)
    assert (simulation.num_answered, simulation.refused.total()) == (1000, 0)


def test_one_that_reads_slowly_tells_nothing_of_the_pace():
    """What comes from workers is counted when it comes; the reader's own end comes whenever it comes."""
    simulation = GateSimulation(rate=10_000.0, token_s=0.001)
    admission_queue = simulation.admission_queue
    for _ in range(20):
        simulation.offer(100, 40)
    running = []
    begin = simulation._end
    simulation._end = lambda turn, then: running.append(turn)
    simulation.run()
    simulation._end = begin
    pace, residence = admission_queue.pace.latest, admission_queue.residence.latest
    simulation.clock.time_s += 300.0
    for turn in running:
        turn.leave()  # it has read the last of its answer
    assert (admission_queue.pace.latest, admission_queue.residence.latest) == (pace, residence)
    assert pace < 0.01


def test_memory_bounds_what_waits_and_an_idle_system_takes_what_is_larger():
    simulation = GateSimulation(max_bytes=4 * REQUEST_BYTES + 100 * TOKEN_BYTES, ahead=1, ahead_s=0.0)
    accepted = [simulation.offer(20) for _ in range(6)]
    assert accepted == [True] * 4 + [False] * 2
    assert simulation.refused == {"memory": 2}
    simulation.run()
    assert simulation.offer(10_000), "it is alone"
    simulation.run()


def test_a_rate_is_that_of_full_steps_and_of_late():
    rate = FullStepRate()
    rate.add(CHUNK_LEN, 60.0, 60.0, full_len=CHUNK_LEN)  # sets things up
    for at in range(8):
        rate.add(CHUNK_LEN, 0.05 if at % 4 else 3.0, 61.0 + at, full_len=CHUNK_LEN)  # some compile
        rate.add(5, 0.02, 61.0 + at, full_len=CHUNK_LEN)
    assert rate.per_s(70.0) == pytest.approx(CHUNK_LEN / 0.05)
    assert rate.per_s(1000.0) == 0.0


@long
@pytest.mark.parametrize("num", [20_000])
def test_many_that_wait_cost_little_each(num):
    """The queue is not bounded by a number: each offer and grant must stay cheap where deadlines are far."""
    queue = FairQueue(QueueLimits())
    queue.set_capacity(Capacity(tokens_per_s=1e6, num_positions=10_000_000, residence_s=0.1))
    calls = []
    original = FairQueue._worst_s
    queue._worst_s = lambda *arguments: calls.append(1) or original(queue, *arguments)
    for at in range(num):
        queue.offer(RequestWork(tenant=f"{at % 7}", num_tokens=100, num_positions=200, deadline_s=600.0), 0.0)
    granted = queue.grant(0.0)
    while granted:
        ticket = granted.pop()
        queue.first_token(ticket)
        queue.leave(ticket)
        granted += queue.grant(1.0)
    assert queue.num_waiting == 0
    assert not calls, "no walk along the queue"
