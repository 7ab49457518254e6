"""Retries of both clients against a server that dies at every point: no token is ever repeated or left out."""

import asyncio
import itertools
import socket
import time
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest

from baton.client import AsyncBatonClient, BatonClient, RetryPolicy
from baton.client.messages import CallAttempts
from baton.core.errors import (
    BatonError,
    ConfigInvalid,
    InvalidRequest,
    NoWorker,
    Overloaded,
    ProtocolError,
    RequestCancelled,
    RequestDeadlineExceeded,
    TransferFailed,
    Unauthenticated,
    WorkerLost,
    WorkersIncompatible,
)
from baton.core.requests.sampling import SamplingParams
from baton.proto import inference_pb2, inference_pb2_grpc, wire
from baton.proto.wire import retry_details

pytestmark = pytest.mark.fast
ANSWER = "seven cats"
QUICK = RetryPolicy(max_attempts=3, first_delay_s=0.01, max_delay_s=0.02)
TWO = SamplingParams(n=2)


class Dying(inference_pb2_grpc.InferenceServicer):
    """Answers letter by letter, for `n` answers in turns; each attempt may end early.

    Args:
        ends: of the first attempts, (letters before it, how): an error, a gRPC code without a type, "cut" (the stream
            ends well, without a finish), "gap", "again" (a letter is left out, or comes twice). Later ones end well.
    """

    def __init__(self, ends, letters_in_a_chunk=1):
        self.ends = list(ends)
        self.size = letters_in_a_chunk
        self.num_calls = 0
        self.called_s = []

    def next_end(self):
        self.num_calls += 1
        self.called_s.append(time.monotonic())
        return self.ends.pop(0) if self.ends else (10**6, None)

    async def Generate(self, request, context):
        after, how = self.next_end()
        num, choices = 0, range(max(request.sampling.n, 1))
        for at, choice in itertools.product(range(0, len(ANSWER), self.size), choices):
            index = at
            if num >= after:
                if how not in ("gap", "again"):
                    await self.end(context, how)
                    return
                index += 1 if how == "gap" else -1
            text = ANSWER[at : at + self.size]
            chunk = inference_pb2.GenerateChunk(index=index, token_ids=map(ord, text), text=text, choice=choice)
            if at + self.size >= len(ANSWER):
                chunk.finish.reason = "stop"
            num += len(text)
            await context.write(chunk)

    async def Tokenize(self, request, context):
        _, how = self.next_end()
        if how is not None:
            await self.end(context, how)
        return inference_pb2.TokenizeReply(token_ids=map(ord, request.text))

    @staticmethod
    async def end(context, how):
        if isinstance(how, grpc.StatusCode):
            await context.abort(how, "died")
        elif how == "a proxy's":
            error = Overloaded("full", retry_after_s=0.3)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "full", retry_details(error, 14, "full"))
        elif isinstance(how, BatonError):
            await wire.abort_with(context, how)


@asynccontextmanager
async def dying(*ends, **more):
    server, service = grpc.aio.server(), Dying(ends, **more)
    inference_pb2_grpc.add_InferenceServicer_to_server(service, server)
    service.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield service
    finally:
        await server.stop(None)


async def ask(service, is_sync, sampling=None, retry=QUICK, timeout_s=20.0):
    """(letters by answer, the error it ended with)."""
    got = ["", ""]

    def take(chunk):
        assert [chr(token) for token in chunk.token_ids] == list(chunk.text)
        got[chunk.choice] += chunk.text

    def use():
        with BatonClient(service.address, timeout_s=timeout_s, retry=retry) as client:
            for chunk in client.generate("hi", sampling=sampling):
                take(chunk)

    try:
        if is_sync:
            await asyncio.to_thread(use)
        else:
            async with AsyncBatonClient(service.address, timeout_s=timeout_s, retry=retry) as client:
                async for chunk in client.generate("hi", sampling=sampling):
                    take(chunk)
    except BatonError as error:
        return got, error
    return got, None


@pytest.mark.parametrize("is_sync", [True, False])
@pytest.mark.asyncio
@pytest.mark.long
async def test_whoever_dies_at_any_point(is_sync):
    """Before the first token the call is made again; later what has arrived is right, and comes with the error."""
    for after, n in itertools.product(range(len(ANSWER) + 1), (1, 2)):
        sampling = TWO if n == 2 else None
        async with dying((after, WorkerLost("died"))) as service:
            got, error = await ask(service, is_sync, sampling)
        whole = [ANSWER, ANSWER if n == 2 else ""]
        if after == 0 or (n == 1 and after == len(ANSWER)):
            assert (got, error) == (whole, None)
            assert service.num_calls == (2 if after == 0 else 1)
            continue
        assert isinstance(error, WorkerLost)
        assert service.num_calls == 1, "tokens had been delivered"
        assert all(want.startswith(have) for want, have in zip(whole, got, strict=True))
        assert sum(map(len, got)) == after
        received = error.fields["received"]
        assert [one["text"] for one in received] == got[:n]
        assert [list(map(chr, one["token_ids"])) for one in received] == [list(text) for text in got[:n]]
        assert [one["choice"] for one in received] == list(range(n))
        assert [one["finished"] for one in received] == [text == ANSWER for text in got[:n]]


@pytest.mark.parametrize("is_sync", [True, False])
@pytest.mark.asyncio
@pytest.mark.long
async def test_which_errors_are_worth_another_attempt(is_sync):
    again = [Overloaded("x", retry_after_s=0.01), NoWorker("x"), WorkersIncompatible("x"), TransferFailed("x")]
    for how in (*again, grpc.StatusCode.UNAVAILABLE):
        async with dying((0, how), (0, how)) as service:
            assert await ask(service, is_sync) == ([ANSWER, ""], None)
            assert service.num_calls == 3
    never = [InvalidRequest("x"), Unauthenticated("x"), RequestCancelled("x"), RequestDeadlineExceeded("x")]
    for how in (*never, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS):
        async with dying((0, how)) as service:
            got, error = await ask(service, is_sync)
            assert (got, service.num_calls) == (["", ""], 1)
            assert isinstance(error, type(how) if isinstance(how, BatonError) else BatonError)
            assert "received" not in error.fields


@pytest.mark.parametrize("is_sync", [True, False])
@pytest.mark.parametrize("how", ["cut", "gap", "again"])
@pytest.mark.asyncio
async def test_a_stream_that_breaks_its_promise_is_not_asked_again(is_sync, how):
    async with dying((4, how), letters_in_a_chunk=2) as service:
        got, error = await ask(service, is_sync)
        assert service.num_calls == 1
    assert isinstance(error, ProtocolError)
    assert got[0] == ANSWER[:4] == error.fields["received"][0]["text"]


@pytest.mark.long
@pytest.mark.parametrize("is_sync", [True, False])
@pytest.mark.asyncio
async def test_attempts_pauses_and_time_have_an_end(is_sync):
    async with dying(*[(0, NoWorker("none"))] * 9) as service:
        _, error = await ask(service, is_sync)
        assert isinstance(error, NoWorker) and service.num_calls == 3
    async with dying((0, NoWorker("none"))) as service:
        _, error = await ask(service, is_sync, retry=None)
        assert isinstance(error, NoWorker) and service.num_calls == 1
    for how in (Overloaded("full", retry_after_s=0.3), "a proxy's"):
        async with dying((0, how)) as service:
            assert await ask(service, is_sync) == ([ANSWER, ""], None)
            first_s, second_s = service.called_s
            assert second_s - first_s >= 0.29, "what the server asks for is kept"
    async with dying((0, Overloaded("full", retry_after_s=60.0))) as service:
        _, error = await ask(service, is_sync)
        assert isinstance(error, Overloaded) and service.num_calls == 1, "there is no time for that"


@pytest.mark.parametrize("is_sync", [True, False])
@pytest.mark.asyncio
async def test_other_calls_are_made_again_too(is_sync):
    async with dying((0, NoWorker("none")), (0, grpc.StatusCode.UNAVAILABLE)) as service:
        if is_sync:
            with BatonClient(service.address, timeout_s=20.0, retry=QUICK) as client:
                assert await asyncio.to_thread(client.tokenize, "ab") == [97, 98]
        else:
            async with AsyncBatonClient(service.address, timeout_s=20.0, retry=QUICK) as client:
                assert await client.tokenize("ab") == [97, 98]
        assert service.num_calls == 3


@pytest.mark.long
@pytest.mark.parametrize("is_sync", [True, False])
@pytest.mark.asyncio
async def test_an_address_where_somebody_comes_later(is_sync):
    """Nobody answers at first: the connection is refused, and made at a later attempt."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("127.0.0.1", 0))  # nobody else gets the port, and nobody listens
    server, service = grpc.aio.server(), Dying(())
    inference_pb2_grpc.add_InferenceServicer_to_server(service, server)
    service.address = address = f"127.0.0.1:{held.getsockname()[1]}"
    patient = RetryPolicy(max_attempts=200, first_delay_s=0.05, max_delay_s=0.1)
    asking = asyncio.create_task(ask(service, is_sync, retry=patient))
    await asyncio.sleep(0.2)
    server.add_insecure_port(address)
    await server.start()
    try:
        assert await asking == ([ANSWER, ""], None)
    finally:
        await server.stop(None)
        held.close()


def pauses(policy, errors, timeout_s=1e6, draw=0.0):
    attempts = CallAttempts(policy, timeout_s, now_s=lambda: 0.0, draw=lambda: draw)
    found = []
    for error in errors:
        try:
            found.append(attempts.pause_s(error))
        except BatonError as raised:
            assert raised is error
            return found
    return found


def test_pauses_grow_are_spread_and_keep_what_was_asked():
    policy = RetryPolicy(max_attempts=6, first_delay_s=1.0, max_delay_s=4.0)
    errors = [NoWorker("x")] * 9
    assert pauses(policy, errors, draw=0.0) == [0.5, 1.0, 2.0, 2.0, 2.0]
    assert pauses(policy, errors, draw=1.0) == [1.0, 2.0, 4.0, 4.0, 4.0]
    asked = [Overloaded("x", retry_after_s=30.0)] * 2
    assert pauses(policy, asked, draw=0.0) == [30.0, 30.0]
    assert pauses(policy, asked, draw=1.0) == [37.5, 37.5]
    assert pauses(policy, asked, timeout_s=30.0) == []
    for nonsense in (-1.0, float("nan"), float("inf"), "soon", None):
        assert pauses(policy, [Overloaded("x", retry_after_s=nonsense)]) == [0.5]
    assert len(pauses(RetryPolicy(max_attempts=5000), [NoWorker("x")] * 5000)) == 4999


def test_nonsense_is_refused():
    for values in ({"max_attempts": 0}, {"first_delay_s": 0.0}, {"max_delay_s": float("inf")}, {"max_delay_s": -1.0}):
        with pytest.raises(ConfigInvalid):
            RetryPolicy(**values)
