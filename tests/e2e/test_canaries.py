"""Canaries at real workers: they are answered, and those that are given up leave nothing behind."""

import asyncio

import pytest

from baton.router.placement.canary import CanaryConfig
from baton.router.placement.local_prefill import AUTO
from baton.tests.e2e.served import served

pytestmark = pytest.mark.asyncio

OFTEN = CanaryConfig(idle_s=0.1, retry_s=0.05, timeout_s=1.0)


async def until(holds, timeout_s=30.0):
    async with asyncio.timeout(timeout_s):
        while not holds():
            await asyncio.sleep(0.01)


async def quiet(running):
    """No more canaries, and nothing is left of those that were."""
    running.router.migration.drains.begin("decode-0", 60.0)
    await running.wait_idle()


async def test_real_workers_answer(load_tiny, tokenizer):
    async with served(load_tiny(), tokenizer, 1, 1, canary=OFTEN) as running:
        counts = running.router.canaries.counts
        await until(lambda: all(counts[f"{role}-0", role, "answered"] >= 2 for role in ("prefill", "decode")))
        await quiet(running)


@pytest.mark.slow
@pytest.mark.parametrize("num_prefill", [1, 0])
async def test_real_workers_forget_what_is_given_up(load_tiny, tokenizer, num_prefill):
    async with served(load_tiny(), tokenizer, num_prefill, 1, local_prefill=AUTO, canary=OFTEN) as running:
        canary = running.router.migration.in_flight_tracker.canary
        decode = next(member.incarnation for member in running.router.members.live("decode"))
        running.hold.first_token = False
        running.hold.num_tokens = 0
        await until(lambda: canary.is_unfit(decode))
        running.hold.open()
        await until(lambda: not canary.is_unfit(decode))
        await quiet(running)
