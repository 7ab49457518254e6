"""Both clients against a real router and scripted workers; the ordinary one from a thread of its own."""

import asyncio
import math

import pytest

from baton.client import AsyncBatonClient, BatonClient
from baton.client.access import Access
from baton.client.messages import ChunkCheck, checked_timeout_s
from baton.core.errors import (
    ConfigInvalid,
    ConflictingOptions,
    EmptyPrompt,
    InvalidText,
    ModelNotFound,
    ProtocolError,
    RequestCancelled,
    RequestDeadlineExceeded,
    WorkerLost,
)
from baton.core.requests.sampling import SamplingParams
from baton.proto import inference_pb2
from baton.router.admin import AdminService
from baton.tests.router.fakes import TOKENIZER, cluster

GREEDY = SamplingParams(max_tokens=64, temperature=0.0)


@pytest.mark.fast
@pytest.mark.parametrize("key", ["two words", "baton-x\n", "a\nb", "schl\u00fcssel", "\x7f", " ", "\udc80"])
def test_a_key_that_no_header_may_have_is_refused_before_any_call(key, monkeypatch):
    for client in (BatonClient, AsyncBatonClient):
        with pytest.raises(ConfigInvalid, match="the API key"):
            client("127.0.0.1:1", access=Access(api_key=key))
    monkeypatch.setenv("BATON_API_KEY", key)
    if key.strip() in ("", "baton-x"):  # what a file or a secret of Kubernetes ends with
        assert Access.from_environment().api_key == key.strip()
    else:
        with pytest.raises(ConfigInvalid, match="BATON_API_KEY"):
            Access.from_environment()


@pytest.mark.fast
@pytest.mark.asyncio
async def test_the_ordinary_client():
    async with cluster() as running:
        with BatonClient(running.address, timeout_s=5.0) as client:

            def use():
                chunks = list(client.generate("hi", sampling=GREEDY, model="toy"))
                assert "".join(chunk.text for chunk in chunks) == "hello world"
                assert chunks[-1].finish.reason == "length"
                assert client.generate_text(token_ids=[1, 2], sampling=GREEDY) == "hello world"
                assert client.generate_text("hi", sampling=inference_pb2.Sampling(max_tokens=4)) == "hell"
                assert client.tokenize("hi") == TOKENIZER.encode("hi")
                assert client.model().max_model_len == 200
                assert client.status().num_requests_finished == 3
                assert len(client.inventory().workers) == 2
                for kind, call in (
                    (ModelNotFound, lambda: client.generate_text("hi", model="x")),
                    (ModelNotFound, lambda: client.tokenize("hi", model="x")),
                    (ConflictingOptions, lambda: client.generate("hi", token_ids=[1])),
                    (EmptyPrompt, client.generate),
                    (InvalidText, lambda: client.generate("\ud800")),
                    (InvalidText, lambda: client.tokenize("\ud800")),
                    (InvalidText, lambda: client.generate("hi", model="\ud800")),
                    (InvalidText, lambda: client.tokenize("hi", model="\ud800")),
                ):
                    with pytest.raises(kind):
                        call()

            await asyncio.to_thread(use)


@pytest.mark.fast
@pytest.mark.asyncio
async def test_dropping_the_iterator_cancels_the_request():
    async with cluster() as running:
        running.script.decode_hangs_after = 2
        with BatonClient(running.address) as client:

            def leave():
                text = ""
                for chunk in client.generate("hi", sampling=GREEDY):
                    text += chunk.text  # a reader that is behind gets several tokens at once
                    assert text in ("h", "he", "hel")
                    if len(text) > 1:  # the first may come before the decode worker has heard of the request
                        break

            await asyncio.to_thread(leave)
            _, decode = await running.idle()
            assert decode[0].cancelled


@pytest.mark.fast
@pytest.mark.asyncio
async def test_what_is_asked_of_a_closed_client_is_cancelled():
    client, aio = BatonClient("127.0.0.1:1"), AsyncBatonClient("127.0.0.1:1")
    client.close()
    await aio.close()
    for call in ("status", "inventory", "model"):
        for one in (client, aio):
            with pytest.raises(RequestCancelled, match="the client is closed"):
                reply = getattr(one, call)()
                if one is aio:
                    await reply
    with pytest.raises(RequestCancelled, match="the client is closed"):
        client.generate_text("hi")
    with pytest.raises(RequestCancelled, match="the client is closed"):
        await aio.generate_text("hi")


@pytest.mark.fast
@pytest.mark.asyncio
@pytest.mark.parametrize("call", ["generate", "inventory"])
@pytest.mark.parametrize("kind", [BatonClient, AsyncBatonClient])
async def test_closing_a_client_cancels_what_is_under_way(kind, call, monkeypatch):
    """gRPC ends such a call by a CancelledError, which is not that of the task that waits for it."""
    asked = asyncio.Event()

    async def hang(self, request, context):
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(AdminService, "Inventory", hang)
    async with cluster() as running:
        running.script.decode_hangs_after = 2
        client, received = kind(running.address, timeout_s=100.0), []

        def use():
            if call == "inventory":
                client.inventory()
            for chunk in client.generate("hi", sampling=GREEDY):
                received.append(chunk)
                loop.call_soon_threadsafe(asked.set)

        async def use_aio():
            if call == "inventory":
                await client.inventory()
            async for chunk in client.generate("hi", sampling=GREEDY):
                received.append(chunk)
                asked.set()

        loop = asyncio.get_running_loop()
        task = asyncio.create_task(asyncio.to_thread(use) if kind is BatonClient else use_aio())
        await asked.wait()
        closing = client.close()
        if kind is AsyncBatonClient:
            await closing
        with pytest.raises(RequestCancelled) as caught:
            await task
        assert ("received" in caught.value.fields) is bool(received) is (call == "generate")


@pytest.mark.asyncio
async def test_a_deadline_and_an_address_where_nobody_is():
    async with cluster() as running:
        running.script.prefill_hangs = True
        with BatonClient(running.address, timeout_s=0.2) as client, pytest.raises(RequestDeadlineExceeded):
            await asyncio.to_thread(client.generate_text, "hi")
        address = running.address
    with BatonClient(address, timeout_s=10.0) as client, pytest.raises(WorkerLost):
        await asyncio.to_thread(client.status)
    async with AsyncBatonClient(address, timeout_s=10.0) as client:
        with pytest.raises(WorkerLost):
            await client.generate_text("hi")


@pytest.mark.fast
def test_a_time_limit_is_positive_and_finite():
    for timeout_s in (0, -1, math.nan, math.inf):
        with pytest.raises(ConfigInvalid, match="timeout"):
            BatonClient("127.0.0.1:1", timeout_s=timeout_s)
        with pytest.raises(ConfigInvalid, match="timeout"):
            AsyncBatonClient("127.0.0.1:1", timeout_s=timeout_s)
    assert checked_timeout_s(0.5) == 0.5
    assert checked_timeout_s(1e300) * 1e3 <= 2**31
    with BatonClient("127.0.0.1:1", timeout_s=1e300) as client, pytest.raises(WorkerLost):
        client.status()


@pytest.mark.fast
def test_a_stream_with_a_gap_or_without_an_end_is_refused():
    check = ChunkCheck()
    check.take(inference_pb2.GenerateChunk(index=0, token_ids=[1, 2]))
    with pytest.raises(ProtocolError):
        check.end()
    for index in (1, 3):
        with pytest.raises(ProtocolError):
            check.take(inference_pb2.GenerateChunk(index=index, token_ids=[1]))
    check.take(inference_pb2.GenerateChunk(index=2, finish=inference_pb2.Finish(reason="stop")))
    check.end()
