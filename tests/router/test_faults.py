"""What goes wrong under a request that may not move: both legs end, and the client gets the reason in time."""

import asyncio
import time

import grpc
import pytest

from baton.client import AsyncBatonClient
from baton.core.errors import (
    Draining,
    Overloaded,
    ProtocolError,
    RequestCancelled,
    RequestDeadlineExceeded,
    TransferFailed,
    WorkerLost,
)
from baton.core.requests.sampling import SamplingParams
from baton.proto import worker_pb2
from baton.tests.router.fakes import OFF, cluster

pytestmark = pytest.mark.asyncio
GREEDY = SamplingParams(max_tokens=64, temperature=0.0)


async def fails(running, kind, timeout_s=5.0, after=None):
    """Run a request that must end with `kind`; returns the error and the text that came before it.

    With `after`, a decode worker fails when this text has come, and not before.
    """
    running.script.decode_ends_when = asyncio.Event() if after else None
    text = []
    async with AsyncBatonClient(running.address, timeout_s=timeout_s) as client:
        with pytest.raises(kind) as caught:
            async for chunk in client.generate("hi", sampling=GREEDY):
                text.append(chunk.text)
                if "".join(text) == after:
                    running.script.decode_ends_when.set()
    assert type(caught.value) is kind
    return caught.value, "".join(text)


async def works(running):
    async with AsyncBatonClient(running.address, timeout_s=5.0) as client:
        return await client.generate_text("hi", sampling=GREEDY) == running.script.answer


async def tokens_arrive(stream, num_tokens):
    """Read that many, in however many chunks: a reader that is behind gets several tokens at once."""
    async with asyncio.timeout(10.0):
        while num_tokens > 0:
            num_tokens -= len((await anext(stream)).token_ids)


async def under_way(running, num_tokens):
    """Wait until every worker has seen a request, and clients were sent so many tokens."""
    async with asyncio.timeout(10.0):
        while not all(worker.seen for worker in running.workers) or (
            running.router.metrics.total("generation_tokens") < num_tokens
        ):
            await asyncio.sleep(0.005)


def hang(running, point):
    """Make the script stop at a point of a request's life."""
    if point == "before the first token":
        running.script.prefill_hangs = True
    elif point == "before done":
        running.script.done_delay_s = 30.0
        running.script.decode_hangs_after = 0
    elif point == "before decode":
        running.script.decode_hangs_after = 0
    else:
        running.script.decode_hangs_after = 4


def heal(running):
    running.script.prefill_hangs = False
    running.script.done_delay_s = 0.0
    running.script.decode_hangs_after = None


POINTS = {"before the first token": 0, "before done": 1, "before decode": 1, "during decode": 5}


@pytest.mark.fast
@pytest.mark.parametrize("point", POINTS)
async def test_a_client_that_leaves_ends_both_legs(point):
    async with cluster(migration=OFF) as running, AsyncBatonClient(running.address) as client:
        hang(running, point)
        got = []

        async def read():
            async for chunk in client.generate("hi", sampling=GREEDY):
                got.extend(chunk.token_ids)

        reading = asyncio.create_task(read())
        async with asyncio.timeout(10.0):
            while len(got) < POINTS[point] or not all(worker.seen for worker in running.workers):
                await asyncio.sleep(0.005)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        prefill, decode = await running.idle()
        assert decode[0].cancelled
        assert prefill[0].cancelled == (point in ("before the first token", "before done"))
        status = await client.status()
        assert status.num_requests_running == 0
        assert (status.num_requests_failed, status.num_requests_refused) == (0, 1)
        heal(running)
        assert await works(running)


async def test_a_connection_that_breaks_ends_both_legs():
    async with cluster(migration=OFF) as running:
        hang(running, "during decode")
        client = AsyncBatonClient(running.address)
        stream = client.generate("hi", sampling=GREEDY)
        await tokens_arrive(stream, POINTS["during decode"])
        await client.close()
        _, decode = await running.idle()
        assert decode[0].cancelled


@pytest.mark.parametrize("point", POINTS)
async def test_the_routers_deadline_ends_both_legs_with_a_type(point):
    timeout_s = 0.8 if POINTS[point] else 0.2  # what it waits for must have come
    async with cluster(migration=OFF, request_timeout_s=timeout_s) as running:
        hang(running, point)
        start_s = time.monotonic()
        error, text = await fails(running, RequestDeadlineExceeded, timeout_s=20.0)
        assert timeout_s - 0.01 < time.monotonic() - start_s < 10.0
        received = error.fields.pop("received", [])  # the client's own word
        assert sum(len(one["token_ids"]) for one in received) == POINTS[point]
        assert error.fields == {"num_tokens": POINTS[point]}
        assert len(text) == POINTS[point]
        _, decode = await running.idle()
        assert decode[0].cancelled


async def test_the_clients_deadline_goes_to_the_workers():
    async with cluster(migration=OFF) as running:
        hang(running, "before the first token")
        await fails(running, RequestDeadlineExceeded, timeout_s=0.6)
        prefill, decode = await running.idle()
        assert prefill[0].cancelled
        assert decode[0].cancelled
        assert 0 < prefill[0].request.timeout_ms < 650


async def test_a_prefill_error_keeps_its_type_and_cancels_decode():
    async with cluster(migration=OFF) as running:
        running.script.prefill_error = Overloaded("no room", limit=3)
        error, text = await fails(running, Overloaded)
        assert (error.message, error.fields, text) == ("no room", {"limit": 3}, "")
        _, decode = await running.idle()
        assert all(seen.cancelled for seen in decode), "or it never arrived"
        running.script.prefill_error = None
        running.script.prefill_error_after_first = TransferFailed("nack")
        running.script.decode_hangs_after = 0
        error, text = await fails(running, TransferFailed)
        assert (error.message[:6], text) == ("nack; ", "h")
        running.script.prefill_error_after_first = None
        running.script.handed_off = False
        await fails(running, TransferFailed)
        running.script.no_done = True
        await fails(running, ProtocolError)
        await running.idle()


async def test_a_prefill_error_after_decode_has_begun_is_nobodys_loss():
    async with cluster(migration=OFF) as running:
        running.script.prefill_error_after_first = TransferFailed("its ack was lost")
        running.script.prefill_fails_when, running.script.token_delay_s = asyncio.Event(), 0.1
        working = asyncio.create_task(works(running))
        await under_way(running, 2)
        running.script.prefill_fails_when.set()
        assert await working


@pytest.mark.fast
async def test_a_decode_error_keeps_its_type_and_cancels_prefill():
    async with cluster(migration=OFF) as running:
        running.script.decode_error = Overloaded("too many", limit=9)
        running.script.prefill_hangs = True
        error, text = await fails(running, Overloaded)
        assert (error.fields, text) == ({"limit": 9}, "")
        prefill, _ = await running.idle()
        assert all(seen.cancelled for seen in prefill), "or it never arrived"
        running.script.prefill_hangs = False
        running.script.decode_error = TransferFailed("corrupt")
        running.script.decode_error_after = 4
        error, text = await fails(running, TransferFailed, after="hello")
        assert text == "hello", "what was made is streamed"
        running.script.decode_error = RequestCancelled("shutting down")
        error, _ = await fails(running, WorkerLost, after="hello")
        want = {"worker_id": "decode-0", "role": "decode", "cause": "stream"}
        error.fields.pop("received")  # the client's own word
        assert error.fields == want, "the client did not cancel"


async def test_a_failed_hand_off_seen_by_decode_waits_for_prefills_word():
    async with cluster(migration=OFF) as running:
        script = running.script
        script.decode_error, script.first_delay_s = TransferFailed("the incoming transfer was aborted"), 0.05
        script.finish_at_first = "stop"
        async with AsyncBatonClient(running.address) as client:
            assert await client.generate_text("hi", sampling=GREEDY) == "h", (
                "it ended there; its incoming transfer was given back"
            )
        script.finish_at_first, script.prefill_error = "", Overloaded("the cause")
        await fails(running, Overloaded)
        script.prefill_error = None
        _, text = await fails(running, TransferFailed)
        assert text == "h"
        script.prefill_hangs = True
        await fails(running, TransferFailed)
        await running.idle()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_that_is_killed(role):
    async with cluster(migration=OFF, alive_s=20.0) as running:
        hang(running, "before the first token" if role == "prefill" else "during decode")
        running.silent.add(f"{role}-0")
        failing = asyncio.create_task(fails(running, WorkerLost, timeout_s=20.0))
        await under_way(running, 0 if role == "prefill" else POINTS["during decode"])
        start_s = time.monotonic()
        await running.of(role)[0].server.stop(None)
        error, text = await failing
        assert time.monotonic() - start_s < 8.0, "a broken connection needs no heartbeat to be seen"
        assert (error.fields["worker_id"], error.fields["role"]) == (f"{role}-0", role)
        assert text == ("" if role == "prefill" else "hello")
        heal(running)
        running.workers = [worker for worker in running.workers if worker.role != role]
        await running.idle()
        await running.add(role, f"{role}-1")
        assert await works(running)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_silent_worker_ends_its_requests_within_two_seconds(role):
    async with cluster(migration=OFF, alive_s=1.5) as running:
        hang(running, "before the first token")
        failing = asyncio.create_task(fails(running, WorkerLost, timeout_s=20.0))
        await under_way(running, 0)
        running.silent.add(f"{role}-0")
        start_s = time.monotonic()
        error, _ = await failing
        assert 1.3 < time.monotonic() - start_s < 15.0, "a second and a half, and what a busy machine adds"
        assert error.fields == {"worker_id": f"{role}-0", "role": role, "cause": "fence"}
        prefill, decode = await running.idle()
        assert prefill[0].cancelled
        assert decode[0].cancelled


async def test_a_router_that_stands_still_for_a_while_loses_nobody():
    async with cluster(migration=OFF, alive_s=0.6) as running:
        running.script.token_delay_s = 0.1
        working = asyncio.create_task(works(running))
        await asyncio.sleep(0.2)
        time.sleep(1.0)
        assert await working


async def test_a_silent_prefill_worker_that_has_handed_over_is_not_needed():
    async with cluster(migration=OFF, alive_s=0.4) as running:
        running.script.token_delay_s = 0.2
        running.silent.add("prefill-0")
        assert await works(running)
        assert not running.router.members.live("prefill")


@pytest.mark.fast
async def test_a_worker_that_comes_back_under_a_new_epoch_ends_the_old_requests():
    async with cluster(migration=OFF) as running:
        hang(running, "during decode")
        failing = asyncio.create_task(fails(running, WorkerLost))
        await under_way(running, POINTS["during decode"])
        worker = running.of("decode")[0]
        worker.epoch += 500_000
        error, text = await failing
        assert (error.fields["worker_id"], text) == ("decode-0", "hello")
        heal(running)
        assert await works(running)
        async with AsyncBatonClient(running.address) as client:
            status = await client.status()
        assert [worker.num_epochs for worker in status.workers] == [2, 1]


async def test_an_attend_answered_by_another_life_fails_the_request():
    async with cluster(migration=OFF) as running:
        running.script.attending_epoch = 1
        running.script.prefill_hangs = True
        await fails(running, WorkerLost)
        await running.idle()


async def test_a_router_that_stops_ends_open_streams_and_legs():
    async with cluster(migration=OFF) as running:
        hang(running, "during decode")
        client = AsyncBatonClient(running.address)
        stream = client.generate("hi", sampling=GREEDY)
        await tokens_arrive(stream, POINTS["during decode"])
        running._heartbeats.cancel()
        await running.router.stop(0.05)
        with pytest.raises(Draining):
            async for _ in stream:
                pass
        await client.close()
        _, decode = await running.idle()
        assert decode[0].cancelled


async def test_cancels_at_random_times_leave_nothing():
    async with (
        cluster(migration=OFF, num_prefill=2, num_decode=2) as running,
        AsyncBatonClient(running.address) as client,
    ):
        running.script.token_delay_s = 0.005

        async def leave_after(seconds):
            try:
                async with asyncio.timeout(seconds):
                    async for _ in client.generate("hi", sampling=GREEDY):
                        pass
            except TimeoutError:
                pass

        await asyncio.gather(*(leave_after(0.001 * step) for step in range(40)))
        await running.idle(5.0)
        status = await client.status()
        assert status.num_requests_running == 0
        assert status.num_requests_finished + status.num_requests_failed + status.num_requests_refused <= 40
        running.script.token_delay_s = 0.0
        assert await works(running)
        assert not running.router.members._watches or all(
            len(watches) == 2 for watches in running.router.members._watches.values()
        ), "only the channels and the presence watch on"


async def test_a_worker_of_another_model_or_without_an_address_is_refused():
    async with cluster(migration=OFF) as running:
        good = running.workers[0].state()
        for change in ({"model": "other"}, {"address": ""}, {"role": "router"}, {"epoch": 0}, {"worker_id": ""}):
            state = worker_pb2.WorkerState()
            state.CopyFrom(good)
            for name, value in change.items():
                setattr(state, name, value)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await running.report(state)
            assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
        assert len(running.router.members.all()) == 2
