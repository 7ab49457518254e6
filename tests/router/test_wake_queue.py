"""Readers of streams wake in turns, and a router that lags merges tokens instead of lagging further."""

import asyncio
from contextlib import suppress
from types import SimpleNamespace

import grpc.aio
import pytest

from baton.core.errors import NoWorker
from baton.proto import inference_pb2, worker_pb2
from baton.proto.stream_mux_wire import StreamTokens, decode_frame, read_decode_frame
from baton.router.attempt.channels import StreamMuxClient
from baton.router.attempt.request_run import RequestRun
from baton.router.attempt.wake_queue import MAX_WOKEN, WakeQueue
from baton.router.inference import MAX_BEGUN
from baton.tests.router.fakes import cluster
from baton.tests.router.test_ended_attempt import FIRST, a_run

pytestmark = [pytest.mark.asyncio, pytest.mark.fast]
NUM_STEPS = 40
NUM_STREAMS = 4 * MAX_WOKEN


async def test_readers_wake_in_order_and_few_in_one_pass():
    queue, loop = WakeQueue(), asyncio.get_running_loop()
    readers = [loop.create_future() for _ in range(2 * MAX_WOKEN + 3)]
    readers[1].cancel()
    for reader in readers:
        queue.wake(reader)
    for num in (MAX_WOKEN + 1, 2 * MAX_WOKEN + 1, len(readers)):  # the cancelled one takes no turn
        assert not readers[num - 1].done()
        await asyncio.sleep(0)
        assert [reader.done() for reader in readers] == [place < num for place in range(len(readers))]
    queue.wake(again := loop.create_future())
    await again


async def test_a_call_does_not_wait_behind_calls_of_clients_that_are_gone():
    queue = WakeQueue(MAX_BEGUN)
    gone = [asyncio.create_task(queue.turn()) for _ in range(50 * MAX_BEGUN)]
    await asyncio.sleep(0)
    for call in gone[MAX_BEGUN:]:
        call.cancel()
    here = asyncio.create_task(queue.turn())
    for _ in range(4):  # cancellation, its turn, the reader's and the task's end
        await asyncio.sleep(0)
    assert here.done()
    await asyncio.gather(*gone, return_exceptions=True)


class Arrived:
    """A call of which all frames have arrived. As with gRPC, reading one takes two passes of the event loop."""

    def __init__(self, frames):
        self._frames = iter(frames)

    async def read(self):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return next(self._frames, grpc.aio.EOF)

    async def write(self, message):
        pass

    def cancel(self):
        pass


async def read_all(run: RequestRun, events):
    token_ids: list[int] = []
    while len(token_ids) < NUM_STEPS:
        if (emitted := run.take()) is None:
            await run.changed()
            continue
        events.append(emitted)
        token_ids += emitted.token_ids
    return token_ids


async def test_a_router_that_lags_merges_the_tokens_of_several_steps():
    streams = range(1, NUM_STREAMS + 1)
    steps = [[(stream, StreamTokens(step, [step])) for stream in streams] for step in range(1, NUM_STEPS)]
    channels, events, reading = SimpleNamespace(wake_queue=WakeQueue()), [], []
    mux = StreamMuxClient(
        Arrived([decode_frame(()), *map(decode_frame, steps)]),
        worker_pb2.DecodeCommands,
        read_decode_frame,
        worker_id="d",
        role="decode",
        epoch=0,
    )
    for _ in streams:
        run = a_run(channels=channels, max_tokens=NUM_STEPS)
        run._on_prefill_event(FIRST)
        mux.open(worker_pb2.AttendRequest(), SimpleNamespace(on_said=run._on_decode_event, on_end=lambda error: None))
        reading.append(asyncio.create_task(read_all(run, events)))
    answers = await asyncio.gather(*reading)
    assert answers == [[7, *range(1, NUM_STEPS)]] * NUM_STREAMS
    assert len(events) < 0.75 * NUM_STEPS * NUM_STREAMS
    mux.close()


async def test_a_reader_waits_for_its_turn_once():
    woken = []
    run = a_run(channels=SimpleNamespace(wake_queue=SimpleNamespace(wake=woken.append)), max_tokens=NUM_STEPS)
    reader = run.changed()
    run._on_prefill_event(FIRST)
    for step in range(1, NUM_STEPS):
        run._on_decode_event(StreamTokens(step, [step]))
    assert woken == [reader]


async def test_of_a_burst_of_calls_few_begin_in_one_pass(monkeypatch):
    num_begun = 0

    async def begin(*_, **__):
        nonlocal num_begun
        num_begun += 1
        raise NoWorker("none")

    async def call(inference):
        with suppress(NoWorker):
            async with inference.open([inference_pb2.GenerateRequest(text="hi")]):
                pass

    async with cluster() as running:
        monkeypatch.setattr(running.router.inference, "_admit", begin)
        calls = [asyncio.create_task(call(running.router.inference)) for _ in range(10 * MAX_BEGUN)]
        while num_begun < len(calls):
            before = num_begun
            await asyncio.sleep(0)
            assert num_begun <= before + MAX_BEGUN
        await asyncio.gather(*calls)
