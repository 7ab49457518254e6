"""Whatever any call of the gate or its queue raises, once, costs one request at most: no place stays taken.

At every call of both modules, one after the other, without a clock or a network: a request waits for its turn beside
one that runs and one that waits.
"""

import asyncio
from contextlib import suppress

import pytest

from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import SamplingParams
from baton.router.admission.admission_queue import AdmissionQueue
from baton.router.admission.fair_queue import QueueLimits
from baton.router.placement.members import DECODE, PREFILL
from baton.tests.e2e.foreign import Foreign, Injection
from baton.tests.router.gate_simulation import Clock, Fleet

pytestmark = [pytest.mark.asyncio, pytest.mark.fast]
MODULES = [
    f"baton.router.{name}"
    for name in (
        "admission.admission_queue",
        "admission.fair_queue",
        "admission.deficit_round_robin",
        "admission.admission",
    )
]
TURNS = 20  # of the event loop: more than any request here needs


def request(name):
    return GenerationRequest(
        key=AttemptKey(name, 1),
        prompt_token_ids=(1,) * 10,
        sampling=SamplingParams(max_tokens=4),
        deadline_s=1000.0,
        num_draft_tokens=0,
    )


async def serve(admission_queue, name, go_on):
    """What `Choices` does: whoever has a turn leaves it, whatever else happens."""
    turn = await admission_queue.enter(request(name))
    try:
        await go_on.wait()
        turn.arrived(1, False)
        turn.arrived(3, True)
    finally:
        turn.leave()


async def look(admission_queue, until):
    for _ in range(TURNS):
        if until():
            return
        with suppress(Foreign):
            admission_queue.look()
        await asyncio.sleep(0)


async def one(injection, point):
    """What is wrong after the exception at a point; None: nothing."""
    admission_queue = AdmissionQueue(
        QueueLimits(max_running=2), Fleet({PREFILL: 1, DECODE: 1}, 100.0, 10**6), Clock(), lambda request: 0
    )
    events = {name: asyncio.Event() for name in ("runs", "injected", "waits")}
    tasks = {"runs": asyncio.create_task(serve(admission_queue, "runs", events["runs"]))}
    await look(admission_queue, lambda: admission_queue.queue.num_running == 1)
    injection.arm(point)
    events["injected"].set()
    tasks["injected"] = asyncio.create_task(serve(admission_queue, "injected", events["injected"]))
    await asyncio.sleep(0)
    tasks["waits"] = asyncio.create_task(serve(admission_queue, "waits", events["waits"]))
    await look(admission_queue, lambda: tasks["injected"].done())
    for event in events.values():
        event.set()
    await look(admission_queue, lambda: all(task.done() for task in tasks.values()))
    injection.armed = None
    hung = [name for name, task in tasks.items() if not task.done()]
    for task in tasks.values():
        task.cancel()
    ends = await asyncio.gather(*tasks.values(), return_exceptions=True)
    num_foreign = sum(isinstance(end, Foreign) for end in ends)
    held = (
        admission_queue._waiting,
        admission_queue._running,
        admission_queue.queue.num_waiting,
        admission_queue.queue.num_running,
        admission_queue.queue.num_bytes,
    )
    if hung or any(held) or num_foreign > 1 or any(end and not isinstance(end, Foreign) for end in ends):
        return injection.points[point], hung, held, ends
    return None


@pytest.mark.long
async def test_no_place_stays_taken():
    injection = Injection(MODULES)
    try:
        injection.is_watching = True
        assert await one(injection, None) is None
        assert len(injection.seen) > 100
        found = [await one(injection, point) for point in sorted(injection.seen)]
        assert [each for each in found if each] == []
    finally:
        injection.restore()
