"""Requests that wait for their turn, and those that are refused it, over real gRPC."""

import asyncio
import time

import grpc
import pytest

from baton.client import AsyncBatonClient
from baton.core.errors import InvalidRequest, NoWorker, Overloaded, RequestCancelled, RequestDeadlineExceeded
from baton.core.requests.sampling import SamplingParams
from baton.proto import inference_pb2, inference_pb2_grpc
from baton.proto.wire import DETAILS_KEY, retry_after_s, retry_details
from baton.router.admission.fair_queue import QueueLimits
from baton.tests.router.fakes import cluster

pytestmark = pytest.mark.asyncio
GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
AHEAD = QueueLimits().ahead


async def text_of(running, timeout_s=10.0, tenant="", **sampling):
    params = SamplingParams(max_tokens=64, temperature=0.0, **sampling)
    async with AsyncBatonClient(running.address, timeout_s=timeout_s) as client:
        return await client.generate_text("hi", sampling=params, tenant=tenant)


async def slow(running, tokens_per_s=10.0):
    """Wait until the router has heard how slow its prefill worker is."""
    running.of("prefill")[0].inventory = {"full_prefill_tokens_per_s": tokens_per_s}
    await until(lambda: queue_of(running)._capacity.tokens_per_s == tokens_per_s)


def queue_of(running):
    return running.router._admission_queue.queue


async def until(condition, timeout_s=10.0):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def is_empty(running):
    return (queue_of(running).num_waiting, queue_of(running).num_running) == (0, 0)


@pytest.mark.fast
async def test_where_nothing_was_measured_nobody_waits():
    async with cluster(max_wait_s=5.0) as running:
        running.of("decode")[0].inventory = {"num_blocks": 1000}
        await until(lambda: running.router.members.live("decode")[0].capacity_len > 1000)
        running.script.prefill_hangs = True
        answers = [asyncio.create_task(text_of(running)) for _ in range(3 * AHEAD)]
        await until(lambda: len(running.of("prefill")[0].seen) == 3 * AHEAD)
        for task in answers:
            task.cancel()
        await asyncio.gather(*answers, return_exceptions=True)


@pytest.mark.fast
async def test_who_finds_room_waits_for_nothing():
    async with cluster(max_wait_s=5.0) as running:
        assert await text_of(running) == "hello world"
        assert await text_of(running, n=2) == "hello world"
        await until(lambda: is_empty(running))
        assert running.router._admission_queue.answer_len.latest > 0


async def test_requests_wait_here_and_not_at_the_worker():
    async with cluster(max_wait_s=5.0) as running:
        await slow(running)
        running.script.first_delay_s = 0.3
        answers = [asyncio.create_task(text_of(running)) for _ in range(AHEAD + 2)]
        prefill = running.of("prefill")[0]
        await until(lambda: queue_of(running).num_waiting == 2)
        assert len(prefill.seen) <= AHEAD
        assert "baton_router_requests_waiting 2.0" in running.router.metrics.render()
        assert await asyncio.gather(*answers) == ["hello world"] * (AHEAD + 2)
        await until(lambda: is_empty(running))


async def test_those_whose_incoming_is_stuck_hold_up_others_for_a_moment_only():
    async with cluster(max_wait_s=5.0) as running:
        await slow(running, 20.0)
        running.of("decode")[0].inventory = {"num_blocks": 1000}
        await until(lambda: running.router.members.live("decode")[0].capacity_len > 1000)
        running.script.prefill_hangs = True
        stuck = [asyncio.create_task(text_of(running)) for _ in range(AHEAD)]
        await until(lambda: len(running.of("prefill")[0].seen) == AHEAD)
        running.script.prefill_hangs = False
        start_s = time.monotonic()
        assert await text_of(running) == "hello world"
        assert time.monotonic() - start_s < QueueLimits().stall_s + 3.0
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)
        await until(lambda: is_empty(running))


async def test_a_request_that_would_be_late_is_refused_at_once_and_told_when_to_come_again():
    async with cluster(max_wait_s=5.0) as running:
        await slow(running)
        running.script.prefill_hangs = True
        beside = asyncio.create_task(text_of(running, timeout_s=60.0))
        await until(lambda: queue_of(running).num_running == 1)
        request = inference_pb2.GenerateRequest(text="x" * 50)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in inference_pb2_grpc.InferenceStub(running.channel).Generate(request, timeout=2.0):
                pass
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        metadata = {key: value for key, value in refused.value.trailing_metadata()}
        assert 3.0 < retry_after_s(metadata[DETAILS_KEY]) < 5.6, "the more, the less of its two seconds was left"
        await slow(running, 0.2)
        with pytest.raises(Overloaded) as typed:
            await text_of(running, timeout_s=3.0)
        assert typed.value.fields["reason"] == "deadline"
        assert 'baton_router_requests_refused_total{reason="deadline"} 2.0' in running.router.metrics.render()
        beside.cancel()
        await asyncio.gather(beside, return_exceptions=True)
        await until(lambda: is_empty(running))
        running.script.prefill_hangs = False
        assert await text_of(running, timeout_s=5.0) == "hello world", "alone it is taken, however slow they say to be"


async def test_who_goes_away_while_waiting_leaves_no_trace():
    async with cluster(max_wait_s=5.0) as running:
        await slow(running)
        running.script.prefill_hangs = True
        stuck = [asyncio.create_task(text_of(running)) for _ in range(AHEAD)]
        await until(lambda: len(running.of("prefill")[0].seen) == AHEAD)
        waiting = asyncio.create_task(text_of(running))
        await until(lambda: queue_of(running).num_waiting == 1)
        waiting.cancel()
        await until(lambda: queue_of(running).num_waiting == 0)
        with pytest.raises(RequestDeadlineExceeded):
            await text_of(running, timeout_s=1.2)
        await until(lambda: queue_of(running).num_waiting == 0)
        for task in stuck:
            task.cancel()
        ended = await asyncio.gather(*stuck, waiting, return_exceptions=True)
        assert all(isinstance(error, asyncio.CancelledError | RequestCancelled) for error in ended)
        await until(lambda: is_empty(running))
        seen = running.of("prefill")[0].seen
        assert len(seen) == AHEAD, "those that waited were never sent"


@pytest.mark.fast
async def test_a_request_that_fails_gives_its_place_back():
    async with cluster(max_wait_s=5.0) as running:
        running.script.prefill_error = InvalidRequest("no")
        for _ in range(2 * AHEAD):
            with pytest.raises(InvalidRequest):
                await text_of(running)
        assert is_empty(running)
    async with cluster(max_wait_s=5.0, num_decode=0) as running:
        with pytest.raises(NoWorker):
            await text_of(running)


@pytest.mark.fast
async def test_a_priority_that_does_not_exist_is_refused():
    async with cluster(max_wait_s=5.0) as running:
        stub = inference_pb2_grpc.InferenceStub(running.channel)
        for priority in (0, 1, 2, 3):
            call = stub.Generate(inference_pb2.GenerateRequest(text="hi", priority=priority), timeout=5.0)
            if priority < 3:
                assert [chunk async for chunk in call]
                continue
            with pytest.raises(grpc.aio.AioRpcError, match="priority = 3"):
                async for _ in call:
                    pass


@pytest.mark.fast
async def test_retry_info_is_read_as_it_was_written_and_only_where_there_is_some():
    ((key, details),) = retry_details(Overloaded("no", retry_after_s=1.25), 8, "no")
    assert (key, retry_after_s(details)) == (DETAILS_KEY, 1.25)
    for wrong in ("soon", float("nan"), -1, None):
        assert retry_details(Overloaded("no", retry_after_s=wrong), 8, "no") == ()
    assert retry_after_s(b"\xff\xff") is None
    assert retry_after_s(b"") is None
