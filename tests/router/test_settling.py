"""A router after another one: its first requests wait until the workers, and what they have cached, are known."""

import asyncio

import pytest

from baton.client import AsyncBatonClient
from baton.core.requests.sampling import SamplingParams
from baton.router import server
from baton.router.admission.admission import Settling
from baton.tests.router.fakes import cluster

pytestmark = [pytest.mark.asyncio, pytest.mark.fast]
GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


async def test_it_is_over_when_everything_is_known_or_the_time_is():
    for now_s, whole in ((10.0, False), (0.0, True)):
        settling = Settling(10.0, lambda whole=whole: whole)
        waiting = asyncio.create_task(settling.wait())
        await asyncio.sleep(0)
        assert not waiting.done()
        settling.look(now_s)
        await waiting
    settling = Settling(10.0, lambda: False)
    settling.look(9.9)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await settling.wait()


@pytest.mark.long
async def test_a_request_that_comes_before_the_workers_waits_for_all_of_them(monkeypatch):
    monkeypatch.setattr(server, "SETTLE_S", 60.0)
    async with cluster(1, 0, follows_workers=3) as running, AsyncBatonClient(running.address, timeout_s=30.0) as client:
        asking = asyncio.create_task(client.generate_text("hi", sampling=GREEDY))
        await running.add("decode", "decode-0")
        await asyncio.sleep(0.3)
        assert not asking.done()
        assert not running.of("prefill")[0].seen
        await running.add("decode", "decode-1")
        assert await asking == "hell"


async def test_it_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(server, "SETTLE_S", 0.1)
    async with cluster(1, 1, follows_workers=3) as running, AsyncBatonClient(running.address, timeout_s=30.0) as client:
        assert await client.generate_text("hi", sampling=GREEDY) == "hell"
