"""Answers that decode workers make alone, over the router: the split path's, through deaths, drains and cancels.

In float64, with requests of every kind at once; see `test_migration`.
"""

import asyncio

import pytest

from baton.core.errors import RequestDeadlineExceeded
from baton.core.requests.sampling import SamplingParams
from baton.router.placement.local_prefill import ALWAYS, AUTO
from baton.tests.e2e.served import served
from baton.tests.e2e.test_migration import Streams, expected, model, prompts  # noqa: F401

pytestmark = pytest.mark.asyncio


async def finished(running, streams):
    moved = await streams.check()
    stats = [answer.stats for task in streams.tasks.values() for answer in task.result()]
    assert {one.path for one in stats} == {"local"}
    assert {one.prefill_worker for one in stats} == {""}
    assert {one.kv_bytes_pushed for one in stats} == {0}
    for one in stats:
        parts = one.router_ms + one.queue_ms + one.grant_wait_ms + one.prefill_ms + one.publish_ms
        assert parts == pytest.approx(one.ttft_ms, rel=0.01)
        if not one.num_migrations and one.HasField("second"):
            second = one.second
            rest = second.draft_ms + second.transfer_ms + second.verification_ms + second.admission_ms
            whole = parts - one.publish_ms + rest + second.step_ms + second.publish_ms + second.retry_ms
            assert whole == pytest.approx(second.total_ms, rel=0.01)
    return moved


@pytest.mark.parametrize("num_prefill", [pytest.param(1, marks=pytest.mark.slow), 0])
async def test_without_a_fault(load_tiny, tokenizer, expected, num_prefill):  # noqa: F811
    mode = ALWAYS if num_prefill else AUTO
    async with served(load_tiny(), tokenizer, num_prefill, 2, local_prefill=mode, routing="prefix") as running:
        moved = await finished(running, Streams(running, expected))
        assert not any(moved.values())
        await running.wait_idle()


@pytest.mark.parametrize("moment", ["before the first token", pytest.param("in the middle", marks=pytest.mark.slow)])
async def test_the_worker_that_does_it_all_dies(load_tiny, tokenizer, expected, moment):  # noqa: F811
    async with served(load_tiny(), tokenizer, 0, 2, local_prefill=AUTO, routing="prefix") as running:
        running.hold.first_token = moment != "before the first token"
        running.hold.num_tokens = 7
        streams = Streams(running, expected)
        await streams.held()
        await running.kill("decode-0")
        running.hold.open()
        moved = await finished(running, streams)
        assert sum(moved.values()) > 0
        await running.wait_idle()


@pytest.mark.slow
async def test_a_drained_worker_hands_its_streams_on(load_tiny, tokenizer, expected):  # noqa: F811
    async with served(load_tiny(), tokenizer, 0, 2, local_prefill=AUTO, routing="prefix") as running:
        running.hold.num_tokens = 7
        streams = Streams(running, expected)
        await streams.held()
        running.router.migration.drains.begin("decode-0", 0.0)
        running.hold.open()
        await finished(running, streams)
        async with asyncio.timeout(8.0):
            while running.sides["decode-0"].worker.inventory().num_requests_held:
                await asyncio.sleep(0.02)
        await running.wait_idle()


@pytest.mark.slow
async def test_the_last_prefill_worker_dies(load_tiny, tokenizer, expected):  # noqa: F811
    async with served(load_tiny(), tokenizer, 1, 1, local_prefill=AUTO) as running:
        running.hold.first_token = False
        streams = Streams(running, expected)
        async with asyncio.timeout(30.0):
            while not running.sides["prefill-0"].worker.inventory().num_requests_finished:  # none of it is heard
                await asyncio.sleep(0.02)
        await running.kill("prefill-0")
        running.hold.open()
        await finished(running, streams)
        await running.wait_idle()


async def test_a_deadline_frees_what_a_prompt_holds(load_tiny, tokenizer, prompts):  # noqa: F811
    async with served(
        load_tiny(), tokenizer, 0, 1, local_prefill=AUTO, request_timeout_s=0.05, routing="prefix"
    ) as running:
        sampling = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
        with pytest.raises(RequestDeadlineExceeded):
            await running.ask(sampling, (prompts[0] * 30)[:280])
        await running.wait_idle()
