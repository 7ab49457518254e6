"""Workers run only so many sequences: what is beyond them waits at the router, in its order, not at the workers."""

import dataclasses
from types import SimpleNamespace

import pytest

from baton.core.requests.sampling import SamplingParams
from baton.router.admission.admission import HIGH, LOW, NORMAL, RequestWork
from baton.router.admission.deficit_round_robin import DeficitRoundRobin, Ticket
from baton.router.admission.fair_queue import QueueLimits
from baton.tests.router.gate_simulation import GateSimulation

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("num_seqs", "running"),
    [
        (8, 20 + 4),
        (1, 3 + 4),
        (0, 100),
    ],  # a quarter more than two workers' sequences, and what a prefill worker computes
)
def test_short_prompts_wait_here_once_the_workers_have_all_their_sequences(num_seqs, running):
    simulation = GateSimulation(num_decode=2, num_seqs=num_seqs)
    simulation.admission_queue.look()  # as on every tick
    for _ in range(100):
        assert simulation.offer(4)
    queue = simulation.admission_queue.queue
    assert (queue.num_running, queue.num_waiting) == (running, 100 - running)
    simulation.run()
    assert simulation.num_answered == 100


def test_long_contexts_still_count_by_their_kv():
    simulation = GateSimulation(num_seqs=16, num_positions=1000)
    for _ in range(10):
        assert simulation.offer(384, max_tokens=16)
    assert simulation.admission_queue.queue.num_running == 5, "2,000 positions are promised"
    simulation.run()


def test_every_answer_of_a_request_takes_a_sequence():
    simulation = GateSimulation(num_seqs=8)
    simulation.admission_queue.look()
    queue = simulation.admission_queue
    request = SimpleNamespace(
        sampling=SamplingParams(max_tokens=4, n=3), prompt_len=4, tenant="", deadline_s=9.0, priority=NORMAL
    )
    one = SimpleNamespace(**vars(request) | {"sampling": dataclasses.replace(request.sampling, n=1)})
    assert queue._work(request, 0.0).num_positions == 3 * queue._work(one, 0.0).num_positions
    assert queue._work(one, 0.0).num_positions == 2 * (1 << 20) // (10 + QueueLimits().ahead)


def test_a_request_of_more_answers_than_sequences_does_not_wait_until_nothing_runs():
    simulation = GateSimulation(num_seqs=8)
    simulation.admission_queue.look()
    queue = simulation.admission_queue
    request = SimpleNamespace(
        sampling=SamplingParams(max_tokens=4, n=100), prompt_len=4, tenant="", deadline_s=9.0, priority=NORMAL
    )
    assert queue._work(request, 0.0).num_positions == queue.queue.capacity.num_positions // 2


def test_higher_priorities_go_before_those_that_came_earlier():
    simulation, ended = GateSimulation(num_seqs=8, token_s=0.0), []
    simulation.admission_queue.look()  # as on every tick
    for number in range(40):
        simulation.offer(4, max_tokens=1, then=lambda number=number: ended.append(number))
    for name, priority in (("low", LOW), ("high", HIGH)):
        simulation.offer(4, max_tokens=1, then=lambda name=name: ended.append(name), priority=priority)
    simulation.run()
    assert ended.index("high") <= 14, "behind those that were at the worker already"
    assert ended[-1] == "low"


def test_answers_count_in_turns_so_that_short_prompts_do_not_have_all_of_them():
    ring = DeficitRoundRobin(10)
    for tenant in "aaaaaaaabbbbbbbb":
        ring.add(
            Ticket(RequestWork(tenant=tenant, num_tokens=1, num_positions=10, num_answer_tokens=9, deadline_s=9.0))
        )
    order = []
    while (ticket := ring.next()) is not None:
        ring.take(ticket)
        order.append(ticket.work.tenant)
    assert order in (["a", "b"] * 8, ["b", "a"] * 8)


@pytest.mark.parametrize(
    ("measured", "max_tokens", "num_answers", "counted"),
    [
        (0, 50, 1, 0),
        (30, 50, 1, 30),
        (80, 50, 1, 50),
        (30, 50, 4, 120),
    ],
)
def test_answers_count_as_the_recent_ones(measured, max_tokens, num_answers, counted):
    queue = GateSimulation().admission_queue
    if measured:
        queue.measure(1.0, measured)
    sampling = SamplingParams(max_tokens=max_tokens, n=num_answers)
    request = SimpleNamespace(sampling=sampling, prompt_len=5, tenant="", deadline_s=9.0, priority=NORMAL)
    work = queue._work(request, 0.0)
    assert (work.num_answer_tokens, work.cost) == (counted, 5 * num_answers + counted)
