"""The end of a router in order: who is let in, who finishes, what the rest hears. By gRPC and HTTP alike."""

import asyncio
import json

import grpc
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.client import AsyncBatonClient
from baton.core.errors import Draining, RequestCancelled, WorkerLost
from baton.core.requests.sampling import SamplingParams
from baton.router import server
from baton.router.__main__ import ProcessEnd
from baton.router.access.security import RouterSecurity
from baton.router.shutdown import Shutdown
from baton.tests.router.fakes import MODEL, TOKENIZER
from baton.tests.router.openai.served import served
from baton.tests.router.openai.test_errors import raw

pytestmark = [pytest.mark.asyncio, pytest.mark.fast]
ANSWER = "hello world"
GREEDY = SamplingParams(max_tokens=len(ANSWER), temperature=0.0)
PATIENCE_S = 30.0


class Streams:
    """One of each kind, read as they come."""

    def __init__(self, running, client):
        self._running = running
        self.texts = {"grpc": "", "http": "", "whole": ""}
        self._http = client
        self.tasks = {
            kind: asyncio.create_task(course())
            for kind, course in (("grpc", self.grpc), ("http", self.http), ("whole", self.whole))
        }

    async def grpc(self):
        async with AsyncBatonClient(self._running.address, timeout_s=PATIENCE_S) as client:
            async for chunk in client.generate("a", sampling=GREEDY):
                self.texts["grpc"] += chunk.text

    async def http(self):
        stream = await self._http.completions.create(
            model=MODEL, prompt="b", max_tokens=len(ANSWER), temperature=0, stream=True
        )
        async for chunk in stream:
            self.texts["http"] += chunk.choices[0].text

    async def whole(self):
        answer = await self._http.completions.create(model=MODEL, prompt="c", max_tokens=len(ANSWER), temperature=0)
        self.texts["whole"] = answer.choices[0].text

    async def under_way(self):
        async with asyncio.timeout(PATIENCE_S):
            while len(self._running.of("decode")[0].running()) < 3 or not self.texts["grpc"] or not self.texts["http"]:
                await asyncio.sleep(0.005)

    async def over(self):
        """The errors that they ended with."""
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait(self.tasks.values())
        return {kind: task.exception() for kind, task in self.tasks.items() if task.exception() is not None}

    def go_on(self):
        for seen in self._running.of("decode")[0].seen:
            seen.hang.set()


def hanging(running):
    """Answers stop before their end, until told to go on."""
    running.script.answer = ANSWER
    running.script.decode_hangs_after = 3
    return running


async def health_of(address):
    async with grpc.aio.insecure_channel(address) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        return reply.status


async def until_health(address, status):
    """The health service looks at workers now and then."""
    async with asyncio.timeout(PATIENCE_S):
        while await health_of(address) != status:
            await asyncio.sleep(0.01)


async def test_what_runs_finishes_and_what_is_new_is_refused():
    async with served() as (running, client):
        streams = Streams(hanging(running), client)
        await streams.under_way()
        await until_health(running.address, health_pb2.HealthCheckResponse.SERVING)
        drain = asyncio.create_task(running.router.drain(PATIENCE_S))
        await until_health(running.address, health_pb2.HealthCheckResponse.NOT_SERVING)
        status, headers, body = await raw(running.url, ["GET /ready HTTP/1.1"])
        assert (status, json.loads(body)["error"]["code"]) == (503, "draining")
        assert int(headers["retry-after"]) >= 1
        assert (await raw(running.url, ["GET /health HTTP/1.1"]))[0] == 200
        async with AsyncBatonClient(running.address, timeout_s=PATIENCE_S) as late:
            with pytest.raises(Draining, match="shutting down") as refused:
                await late.generate_text("d")
        assert refused.value.fields["retry_after_s"] > 0
        with pytest.raises(openai.InternalServerError) as refused:
            await client.completions.create(model=MODEL, prompt="e")
        assert (refused.value.status_code, refused.value.code) == (503, "draining")
        assert len(running.router.members.live("decode")) == 1, "workers are still heard"
        assert not drain.done()
        streams.go_on()
        assert await streams.over() == {}
        assert set(streams.texts.values()) == {ANSWER}
        async with asyncio.timeout(PATIENCE_S):
            await drain


@pytest.mark.long
async def test_what_does_not_finish_ends_with_a_typed_error_and_what_it_had():
    async with served() as (running, client):
        streams = Streams(hanging(running), client)
        await streams.under_way()
        await running.router.drain(0.05)
        await running.router.stop(PATIENCE_S)
        errors = await streams.over()
        assert isinstance(errors["grpc"], Draining)
        [received] = errors["grpc"].fields["received"]
        assert TOKENIZER.decode(received["token_ids"]) == streams.texts["grpc"] == ANSWER[: len(streams.texts["grpc"])]
        assert errors["http"].code == "draining"
        assert errors["whole"].status_code == 503
        assert errors["whole"].code == "draining"
        metrics = running.router.metrics.render()
        assert 'baton_requests_failed_total{error="Draining"} 3.0' in metrics


async def test_with_a_port_of_their_own_workers_are_heard_while_clients_are_sent_away(monkeypatch):
    monkeypatch.setattr(server, "NOTICE_S", 0.0)
    async with served(security=RouterSecurity(admin_port=0)) as (running, client):
        streams = Streams(hanging(running), client)
        await streams.under_way()
        drain = asyncio.create_task(running.router.drain(PATIENCE_S))
        async with asyncio.timeout(PATIENCE_S):
            while await is_answered(running.address):
                await asyncio.sleep(0.01)
        assert await health_of(f"127.0.0.1:{running.router.admin_port}") == health_pb2.HealthCheckResponse.NOT_SERVING
        streams.go_on()
        assert await streams.over() == {}
        await drain


async def is_answered(address):
    async with AsyncBatonClient(address, timeout_s=5.0) as client:
        try:
            await client.model()
        except (WorkerLost, RequestCancelled):  # no connection, or one that was closed under the call
            return False
    return True


async def test_a_timeout_of_ones_own_is_not_taken_for_the_end():
    shutdown = Shutdown()
    with pytest.raises(TimeoutError):
        async with shutdown.call():
            raise TimeoutError
    assert shutdown.num_open == 0
    assert shutdown.cut() == 0
    with pytest.raises(Draining):
        async with shutdown.call():
            pass
    assert await shutdown.wait_empty(0.0)


async def test_the_second_signal_ends_what_the_first_began():
    ending, has_ended = ProcessEnd(), asyncio.Event()

    async def course():
        try:
            await asyncio.Event().wait()
        finally:
            has_ended.set()

    ending.signalled()
    assert ending.drain.is_set()
    assert not ending.now.is_set()
    running = asyncio.create_task(ending.unless_now(course()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    ending.signalled()
    await running
    assert has_ended.is_set()


async def test_an_error_of_the_course_is_not_lost():
    async def course():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await ProcessEnd().unless_now(course())
