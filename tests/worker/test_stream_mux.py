"""A worker's end of a stream mux: what is said together goes together, streams end alone, and a lost call ends all."""

import asyncio
import threading

import grpc.aio
import pytest

from baton.core.errors import MalformedMessage, Overloaded, TransferFailed
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import GrammarSpec, SamplingParams
from baton.proto import kv_pb2, worker_pb2
from baton.proto.stream_mux_wire import MAX_FRAME_BYTES, End, decode_frame, read_decode_frame
from baton.worker.stream_mux import MuxedStream, SendQueue, StreamMux, WriteCoalescer

pytestmark = [pytest.mark.asyncio, pytest.mark.fast]
EPOCH = 77


def open_of(number, name="r", prompt=(1, 2)):
    request = worker_pb2.AttendRequest(attempt=kv_pb2.Attempt(request_id=name), prompt_token_ids=prompt)
    return worker_pb2.DecodeCommands(open=[worker_pb2.DecodeOpen(stream=number, request=request)])


def tokens_of(index, *token_ids):
    return worker_pb2.DecodeEvent(tokens=worker_pb2.DecodeTokens(index=index, token_ids=token_ids))


class Call:
    """The context of one call, without gRPC."""

    def __init__(self):
        self.commands = asyncio.Queue()
        self.frames = []
        self.aborted = None
        self.may_write = asyncio.Event()
        self.may_write.set()

    async def read(self):
        return await self.commands.get()

    async def write(self, frame):
        await self.may_write.wait()
        self.frames.append(worker_pb2.DecodeFrame.FromString(frame.SerializeToString()))

    async def abort(self, code, message, metadata):
        self.aborted = (code, message)
        raise asyncio.CancelledError

    def said(self, number):
        return [said for frame in self.frames for stream, said in read_decode_frame(frame) if stream == number]


class Role:
    """Records; `refuse` is raised by `begin`."""

    def __init__(self):
        self.streams, self.cancelled, self.checked, self.refuse = {}, [], [], None
        self.check_may_end = threading.Event()
        self.sampling = SamplingParams()

    def read(self, message):
        if not message.prompt_token_ids:
            raise MalformedMessage("the message holds no prompt")
        key = AttemptKey(message.attempt.request_id, 1)
        return GenerationRequest(
            key=key, prompt_token_ids=(1,), sampling=self.sampling, deadline_s=1e9, num_draft_tokens=0
        )

    def check(self, attempt):
        assert self.check_may_end.wait(20.0)
        self.checked.append(attempt.key)

    def begin(self, message, attempt, stream):
        if self.refuse is not None:
            raise self.refuse
        self.streams[attempt.key.request_id] = stream

    def cancel(self, key, stream):
        assert self.streams.get(key.request_id) in (None, stream)
        self.cancelled.append(key.request_id)


class Served:
    """A stream mux under way."""

    def __init__(self):
        self.call, self.role, self.write_coalescer = Call(), Role(), WriteCoalescer()
        self.task = None

    async def __aenter__(self):
        self.task = asyncio.create_task(
            StreamMux(self.role, decode_frame, self.write_coalescer, EPOCH).serve(self.call)
        )
        await until(lambda: self.call.frames)
        return self

    async def __aexit__(self, *about):
        if not self.task.done():
            self.call.commands.put_nowait(grpc.aio.EOF)
        await asyncio.gather(self.task, return_exceptions=True)

    async def open(self, number, name):
        self.call.commands.put_nowait(open_of(number, name))
        await until(lambda: name in self.role.streams)
        return self.role.streams[name]


async def until(condition, timeout_s=20.0):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


async def test_a_call_begins_with_whose_it_is():
    async with Served() as served:
        assert [frame.epoch for frame in served.call.frames] == [EPOCH]


async def test_a_step_is_one_frame_whatever_thread_says_it():
    async with Served() as served:
        streams = [await served.open(number, f"r{number}") for number in range(1, 40)]
        request_limit = threading.Event()

        def step():
            with served.write_coalescer.hold():
                for stream in streams[:20]:
                    stream.emit(tokens_of(1, 5))
                request_limit.wait(20.0)  # the event loop has all the time it wants to take what is not complete
                for stream in streams[20:]:
                    stream.emit(tokens_of(1, 5))

        stepping = asyncio.create_task(asyncio.to_thread(step))
        await asyncio.sleep(0.05)
        assert len(served.call.frames) == 1
        request_limit.set()
        await stepping
        await until(lambda: len(served.call.frames) > 1)
        assert [len(frame.streams) for frame in served.call.frames[1:]] == [len(streams)]


async def test_what_gathers_while_the_reader_is_slow_goes_in_one_frame():
    async with Served() as served:
        stream = await served.open(1, "r")
        served.call.may_write.clear()
        for index in range(500):
            stream.emit(tokens_of(index, index))
            await asyncio.sleep(0)
        served.call.may_write.set()
        await until(lambda: len(served.call.said(1)) == 500)
        assert len(served.call.frames) <= 3
        assert [said.token_ids for said in served.call.said(1)] == [[index] for index in range(500)]


@pytest.mark.long
async def test_frames_are_cut_where_they_would_be_too_large():
    async with Served() as served:
        stream = await served.open(1, "r")
        large = tokens_of(0, *range(1 << 20, (1 << 20) + 100_000))
        assert MAX_FRAME_BYTES / 4 < large.ByteSize() < MAX_FRAME_BYTES
        with served.write_coalescer.hold():
            for _ in range(10):
                stream.emit(large)
        await until(lambda: len(served.call.said(1)) == 10)
        assert all(frame.ByteSize() <= MAX_FRAME_BYTES for frame in served.call.frames)


async def test_streams_end_alone_and_refusals_are_ends():
    async with Served() as served:
        good = await served.open(1, "good")
        bad = await served.open(2, "bad")
        bad.end(TransferFailed("no"))
        bad.end()
        served.role.refuse = Overloaded("full", limit=3)
        served.call.commands.put_nowait(open_of(3, "late"))
        served.call.commands.put_nowait(open_of(4, "empty", prompt=()))
        await until(lambda: served.call.said(4))
        good.emit(tokens_of(1, 9))
        good.end()
        await until(lambda: len(served.call.said(1)) == 2)
        assert [type(served.call.said(number)[0].error) for number in (2, 3, 4)] == [
            TransferFailed,
            Overloaded,
            MalformedMessage,
        ]
        assert served.call.said(1)[1] == End()
        assert len(served.call.said(2)) == 1
    assert served.role.cancelled == [], "all had ended"


async def test_a_cancel_and_the_end_of_the_call_reach_the_worker():
    async with Served() as served:
        for number, name in ((1, "one"), (2, "two"), (3, "three")):
            await served.open(number, name)
        served.call.commands.put_nowait(worker_pb2.DecodeCommands(cancelled=[2, 99]))
        await until(lambda: served.role.cancelled)
        assert served.role.cancelled == ["two"]
        served.role.streams["three"].end()
    assert served.role.cancelled == ["two", "one"]


async def test_a_number_that_was_given_before_ends_the_call():
    async with Served() as served:
        await served.open(5, "five")
        served.call.commands.put_nowait(open_of(5, "again"))
        await asyncio.gather(served.task, return_exceptions=True)
        assert "stream 5" in served.call.aborted[1]
        assert served.role.cancelled == ["five"]


async def test_a_grammar_is_compiled_beside_other_streams_and_a_cancel_meanwhile_holds():
    async with Served() as served:
        served.role.sampling = SamplingParams(grammar=GrammarSpec("regex", "a+"))
        served.call.commands.put_nowait(open_of(1, "cancelled"))
        served.call.commands.put_nowait(open_of(2, "kept"))
        served.call.commands.put_nowait(worker_pb2.DecodeCommands(cancelled=[1]))
        await until(lambda: served.role.cancelled == ["cancelled"])
        served.role.check_may_end.set()
        await until(lambda: "kept" in served.role.streams)
        assert "cancelled" not in served.role.streams


async def test_an_send_queue_of_a_closed_loop_takes_what_nobody_reads():
    loop = asyncio.new_event_loop()
    send_queue = SendQueue(loop, WriteCoalescer())
    loop.close()
    MuxedStream(1, send_queue).emit(tokens_of(1, 2))
