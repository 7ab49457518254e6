"""Whatever any call of the gate or its queue raises, once, costs one request at most: no place stays taken.

At every call of both modules, one after the other, without a clock or a network: a request waits for its turn beside
one that runs and one that waits.
"""

import asyncio
from contextlib import suppress

import pytest

from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import SamplingParams
from baton.router.admission.fair_queue import QueueLimits
from baton.router.admission.gate import Gate
from baton.router.placement.members import DECODE, PREFILL
from baton.tests.e2e.foreign import Foreign, Injection
from baton.tests.router.gate_simulation import Clock, Fleet

pytestmark = [pytest.mark.asyncio, pytest.mark.fast]
MODULES = [
    f"baton.router.{name}"
    for name in (
        "admission.gate",
        "admission.fair_queue",
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


async def serve(gate, name, go_on):
    """What `Choices` does: whoever has a turn leaves it, whatever else happens."""
    turn = await gate.enter(request(name))
    try:
        await go_on.wait()
        turn.arrived(1, False)
        turn.arrived(3, True)
    finally:
        turn.leave()


async def look(gate, until):
    for _ in range(TURNS):
        if until():
            return
        with suppress(Foreign):
            gate.look()
        await asyncio.sleep(0)


async def one(injection, point):
    """What is wrong after the exception at a point; None: nothing."""
    gate = Gate(QueueLimits(max_running=2), Fleet({PREFILL: 1, DECODE: 1}, 100.0, 10**6), Clock(), lambda request: 0)
    events = {name: asyncio.Event() for name in ("runs", "injected", "waits")}
    tasks = {"runs": asyncio.create_task(serve(gate, "runs", events["runs"]))}
    await look(gate, lambda: gate.queue.num_running == 1)
    injection.arm(point)
    events["injected"].set()
    tasks["injected"] = asyncio.create_task(serve(gate, "injected", events["injected"]))
    await asyncio.sleep(0)
    tasks["waits"] = asyncio.create_task(serve(gate, "waits", events["waits"]))
    await look(gate, lambda: tasks["injected"].done())
    for event in events.values():
        event.set()
    await look(gate, lambda: all(task.done() for task in tasks.values()))
    injection.armed = None
    hung = [name for name, task in tasks.items() if not task.done()]
    for task in tasks.values():
        task.cancel()
    ends = await asyncio.gather(*tasks.values(), return_exceptions=True)
    num_foreign = sum(isinstance(end, Foreign) for end in ends)
    held = gate._waiting, gate._running, gate.queue.num_waiting, gate.queue.num_running, gate.queue.num_bytes
    if hung or any(held) or num_foreign > 1 or any(end and not isinstance(end, Foreign) for end in ends):
        return injection.points[point], hung, held, ends
    return None


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
