"""The gate's estimates come from requests that were served: none that was refused or gave up says anything of them."""

import asyncio

import pytest

from baton.core.errors import Overloaded, RequestDeadlineExceeded
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import SamplingParams
from baton.router.admission.admission_queue import AdmissionQueue
from baton.router.admission.fair_queue import QueueLimits
from baton.router.placement.members import DECODE, PREFILL
from baton.tests.router.gate_simulation import Clock, Fleet

pytestmark = [pytest.mark.asyncio, pytest.mark.fast]


def request(name, deadline_s=1000.0):
    return GenerationRequest(
        key=AttemptKey(name, 1),
        prompt_token_ids=(1,) * 10,
        sampling=SamplingParams(max_tokens=4),
        deadline_s=deadline_s,
        num_draft_tokens=0,
    )


def estimates(admission_queue):
    return [
        (one.latest, one._deviation)
        for one in (admission_queue.residence, admission_queue.answer_len, admission_queue.pace, admission_queue.slack)
    ]


async def gate_that_has_served(**limits):
    clock = Clock()
    admission_queue = AdmissionQueue(
        QueueLimits(max_running=1, **limits), Fleet({PREFILL: 1, DECODE: 1}, 100.0, 10**6), clock, lambda _: 0
    )
    turn = await admission_queue.enter(request("served"))
    clock.time_s = 1.0
    turn.arrived(1, False)
    clock.time_s = 3.0
    turn.arrived(2, True)
    assert [latest for latest, _ in estimates(admission_queue)] == [3.0, 3.0, 1.0, pytest.approx(0.9)]
    return admission_queue, clock


async def test_who_is_refused_is_no_measurement():
    admission_queue, clock = await gate_that_has_served(max_waiting=0)
    await admission_queue.enter(request("runs"))
    before = estimates(admission_queue)
    for at in range(3):
        clock.time_s += 1.0
        with pytest.raises(Overloaded):
            await admission_queue.enter(request(f"refused {at}"))
        assert estimates(admission_queue) == before


async def test_who_gives_up_without_a_token_is_no_measurement():
    admission_queue, clock = await gate_that_has_served()
    before = estimates(admission_queue)
    turn = await admission_queue.enter(request("gives up"))
    clock.time_s += 50.0
    turn.leave()
    turn.leave()
    assert estimates(admission_queue) == before


async def test_whose_deadline_passes_before_its_turn_is_no_measurement():
    admission_queue, clock = await gate_that_has_served()
    await admission_queue.enter(request("runs"))
    before = estimates(admission_queue)
    with pytest.raises((RequestDeadlineExceeded, Overloaded)):
        await admission_queue.enter(request("late", deadline_s=clock.time_s))
    assert estimates(admission_queue) == before
    assert admission_queue.queue.num_waiting == 0


async def test_a_request_is_measured_once():
    admission_queue, _ = await gate_that_has_served()
    turn = await admission_queue.enter(request("twice"))
    turn.arrived(1, False)
    turn.arrived(1, True)
    before = estimates(admission_queue)
    turn.leave()
    assert estimates(admission_queue) == before


@pytest.mark.parametrize(("num_prefill", "role", "queued"), [(0, PREFILL, 10), (1, PREFILL, 0), (1, DECODE, 10)])
async def test_how_much_waits_for_each_worker_that_computes_prompts_beside_answers(num_prefill, role, queued):
    """Nothing if prefill workers compute the prompts, unless all are computed where they are decoded."""
    fleet = Fleet({PREFILL: num_prefill, DECODE: 2}, 100.0, 10**6)
    admission_queue = AdmissionQueue(QueueLimits(ahead=1, ahead_s=0.0), fleet, Clock(), lambda _: 0, role)
    num_granted = 1 if num_prefill and role == PREFILL else 2
    waiting = [asyncio.ensure_future(admission_queue.enter(request(f"r{at}"))) for at in range(num_granted + 2)]
    await asyncio.sleep(0)
    assert admission_queue.queue.num_waiting_tokens == 20
    assert admission_queue.num_queued_tokens() == queued
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert admission_queue.num_queued_tokens() == 0
