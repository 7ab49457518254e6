"""Attempts after failed ones: how many a router may make, for any schedule, and what the client hears without one."""

import asyncio

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.client import AsyncBatonClient
from baton.core.errors import TransferFailed
from baton.core.requests.sampling import SamplingParams
from baton.proto import inference_pb2, inference_pb2_grpc
from baton.proto.wire import DETAILS_KEY, retry_after_s
from baton.router.attempt.migration import MigrationConfig, RetryBudget, RetryLimits
from baton.tests.router.fakes import cluster

pytestmark = pytest.mark.fast
LIMITS = RetryLimits(share=0.25, per_s=0.5, burst=4.0)


def test_a_full_bucket_is_a_burst_and_then_a_share_of_the_requests():
    budget = RetryBudget(LIMITS, 0.0)
    assert [budget.retry(0.0) for _ in range(4)] == [0.0] * 4
    assert budget.retry(0.0) == pytest.approx(2.0), "a trickle of one each two seconds"
    for _ in range(3):
        budget.request(0.0)
    assert budget.retry(0.0) == pytest.approx(0.5)
    budget.request(0.0)
    assert budget.retry(0.0) == 0.0
    assert budget.num_refused == 2


def test_a_trickle_comes_by_itself_and_no_more_than_the_bucket_holds():
    budget = RetryBudget(LIMITS, 10.0)
    for _ in range(4):
        assert budget.retry(10.0) == 0.0
    wait_s = budget.retry(10.5)
    assert budget.retry(10.5 + wait_s + 1e-9) == 0.0
    assert budget.tokens(1e6) == LIMITS.burst
    assert budget.tokens(0.0) == LIMITS.burst, "a clock that stands still gives nothing, and takes nothing"


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["request", "retry"]), st.floats(0.0, 2.0)), max_size=300))
def test_retries_never_exceed_the_burst_the_share_and_the_trickle(steps):
    budget, now_s, num_requests, num_retries = RetryBudget(LIMITS, 0.0), 0.0, 0, 0
    for what, gap_s in steps:
        now_s += gap_s
        if what == "request":
            num_requests += 1
            budget.request(now_s)
        else:
            wait_s = budget.retry(now_s)
            num_retries += wait_s == 0.0
            assert 0.0 <= wait_s <= 1.0 / LIMITS.per_s
        bound = LIMITS.burst + LIMITS.share * num_requests + LIMITS.per_s * now_s
        assert num_retries <= bound + 1e-6
        assert 0.0 <= budget.tokens(now_s) <= LIMITS.burst


def empty(running):
    """Leave nothing in the router's bucket, and nothing to come."""
    budget = running.router.retries
    budget._limits = RetryLimits(share=0.0, per_s=1e-3, burst=50.0)
    budget._tokens = 0.0


@pytest.mark.asyncio
async def test_without_budget_the_first_error_stands_with_the_time_to_try_again():
    async with cluster(1, 2) as running:
        empty(running)
        running.script.attempt_errors = {1: TransferFailed("corrupt frames")}
        stub = inference_pb2_grpc.InferenceStub(running.channel)
        request = inference_pb2.GenerateRequest(text="hi")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(request):
                pass
        assert caught.value.code() is grpc.StatusCode.ABORTED
        assert "the router's retries are used up" in caught.value.details()
        details = dict(caught.value.trailing_metadata())[DETAILS_KEY]
        assert 0 < retry_after_s(details) <= 1001
        async with AsyncBatonClient(running.address) as client:
            status = await client.status()
        assert (status.num_handoff_retries, status.num_retries_refused) == (0, 1)
        assert status.retry_tokens < 1
        assert "baton_retries_refused_total 1.0" in running.router.metrics.render()
        running.script.attempt_errors = {}
        prefill, _ = await running.idle(3.0)
        assert len(prefill) == 1, "the workers were asked once"


@pytest.mark.asyncio
async def test_migrations_need_no_budget_nor_do_streams_that_have_begun():
    async with cluster(2, 2, migration=MigrationConfig(max_migrations=2)) as running:
        empty(running)
        running.script.decode_hangs_after = 4
        sampling = SamplingParams(max_tokens=64, temperature=0.0)

        async def answer():
            async with AsyncBatonClient(running.address) as client:
                return await client.generate_text("hi", sampling=sampling)

        answers = [asyncio.create_task(answer()) for _ in range(8)]
        async with asyncio.timeout(10.0):
            while sum(len(worker.running()) for worker in running.of("decode")) < 8:
                await asyncio.sleep(0.005)
            while running.router.metrics.total("generation_tokens") < 8 * 5:
                await asyncio.sleep(0.005)
        running.script.decode_hangs_after = None
        lost, other = running.of("decode")
        assert lost.running()
        lost.epoch += 1000
        running.router.members.heartbeat(lost.state())
        for seen in other.running():
            seen.hang.set()
        assert await asyncio.gather(*answers) == ["hello world"] * 8
        assert running.router.metrics.total("migrations") > 0
        assert running.router.retries.num_refused == 0
