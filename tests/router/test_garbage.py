"""What a request leaves behind: nothing that only the garbage collector could free, which would stop all streams."""

import collections
import gc

import pytest

from baton.client import AsyncBatonClient, RetryPolicy
from baton.core.errors import BatonError, Overloaded
from baton.core.requests.sampling import SamplingParams
from baton.tests.router.fakes import cluster

pytestmark = [pytest.mark.asyncio, pytest.mark.fast]
ONCE = RetryPolicy(max_attempts=1)
OURS = ("baton.router.", "baton.core.requests.request.")


async def ask(client):
    try:
        return await client.generate_text("hi", sampling=SamplingParams(max_tokens=64, temperature=0.0))
    except BatonError as error:
        return type(error)


async def left_by(running, number=4):
    """Answers, and how many of the router's objects only the collector could free, by type."""
    async with AsyncBatonClient(running.address, timeout_s=20.0, retry=ONCE) as client:
        await ask(client)  # what is made once
        gc.collect()
        gc.disable()
        try:
            answers = [await ask(client) for _ in range(number)]
            await running.idle(5.0)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            kinds = (f"{type(found).__module__}.{type(found).__qualname__}" for found in gc.garbage)
            left = collections.Counter(kind for kind in kinds if kind.startswith(OURS))
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    return answers, left


@pytest.mark.long
@pytest.mark.parametrize("local", ["never", "always"])
async def test_an_answer_leaves_nothing(local):
    async with cluster(1, 1, local_prefill=local, alive_s=30.0) as running:
        answers, left = await left_by(running)
        assert answers == ["hello world"] * 4
        assert not left


@pytest.mark.long
async def test_a_refusal_leaves_nothing(monkeypatch):
    def refuse(queue, work, now_s):
        raise queue._refusal("queue", "no room", 1.0)

    async with cluster(1, 1, max_wait_s=2.0, alive_s=30.0) as running:
        monkeypatch.setattr("baton.router.admission.fair_queue.FairQueue.offer", refuse)
        answers, left = await left_by(running)
        assert answers == [Overloaded] * 4
        assert not left
