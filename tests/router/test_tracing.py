"""The router's spans and logs of requests that fail, are tried again or are not traced, over scripted workers."""

import asyncio
import logging

import pytest

from baton.client import AsyncBatonClient
from baton.core.errors import InvalidGrammar, Overloaded, TransferFailed, WorkerLost
from baton.core.requests.sampling import SamplingParams
from baton.core.telemetry.span import SpanBatch
from baton.router.attempt import stats
from baton.tests.router import fakes
from baton.tests.router.fakes import MODEL, cluster
from baton.tests.router.openai.served import served

pytestmark = [pytest.mark.asyncio, pytest.mark.fast]
GREEDY = SamplingParams(max_tokens=64, temperature=0.0)


class Kept:
    def __init__(self):
        self.batch = SpanBatch(0)
        self.share = 1.0

    def put(self, make):
        make(self.batch)

    @property
    def spans(self):
        return self.batch.spans


@pytest.fixture
def kept(monkeypatch):
    """Spans of routers that are made from here on."""
    tracer, make = Kept(), fakes.RouterServer
    monkeypatch.setattr(fakes, "RouterServer", lambda *given: make(*given, tracer=tracer))
    return tracer


async def ask(running, **more):
    async with AsyncBatonClient(running.address, timeout_s=10.0) as client:
        return [chunk async for chunk in client.generate("hi", **({"sampling": GREEDY} | more))]


def named(kept, name):
    return [span for span in kept.spans if span.name == name]


async def test_each_attempt_is_a_span_below_which_its_workers_put_theirs(kept):
    async with cluster(num_prefill=2) as running:
        running.script.attempt_errors = {1: TransferFailed("the hand-off failed")}
        await ask(running)
        prefill, decode = await running.idle()
    [request] = named(kept, "request")
    attempts = named(kept, "attempt")
    assert [span.attributes["attempt"] for span in attempts] == [1, 2]
    assert [span.error for span in attempts] == ["it was tried again", ""]
    assert {span.context.parent_id for span in attempts} == {request.context.span_id}
    assert request.error == ""
    told = {seen.request.attempt.attempt: seen.request.traceparent for seen in prefill}
    assert told == {span.attributes["attempt"]: str(span.context) for span in attempts}
    assert {seen.request.traceparent for seen in decode} <= set(told.values()), "one may be given up before it came"
    assert decode[-1].request.traceparent == told[2]
    [publish] = named(kept, "first_token.publish")
    assert publish.context.parent_id == attempts[1].context.span_id


async def test_the_answers_of_one_request_are_attempts_of_their_own(kept):
    async with cluster() as running:
        await ask(running, sampling=SamplingParams(max_tokens=4, temperature=0.0, n=3))
        await running.idle()
    assert [span.attributes["choice"] for span in named(kept, "attempt")] == [0, 1, 2]
    assert len({span.context.span_id for span in kept.spans}) == len(kept.spans)
    assert len(named(kept, "request")) == 1


async def test_a_request_that_fails_says_why_in_its_span_and_in_the_log(kept, caplog):
    caplog.set_level(logging.INFO)
    async with cluster() as running:
        running.script.prefill_error = Overloaded("no room")
        with pytest.raises(Overloaded):
            await ask(running)
        prefill, _ = await running.idle()
    [request] = named(kept, "request")
    assert request.error == "Overloaded: no room"
    [line] = [record for record in caplog.records if "failed at the workers" in record.message]
    assert prefill[0].request.attempt.request_id in line.message
    assert "Overloaded: no room" in line.message


async def test_a_client_whose_mistake_a_worker_finds_writes_no_log(caplog):
    async with cluster() as running:
        running.script.prefill_error = InvalidGrammar("no type objekt")
        with pytest.raises(InvalidGrammar):
            await ask(running)
        await running.idle()
        assert running.router.metrics.ended_with_errors() == (0, 1)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_request_that_is_refused_has_no_span(kept):
    async with cluster() as running:
        with pytest.raises(Exception, match="max_tokens"):
            await ask(running, sampling=SamplingParams(max_tokens=10_000))
    assert kept.spans == []


async def test_of_requests_that_leave_it_open_only_a_share_is_traced(kept, monkeypatch):
    kept.share = 0.25
    draws = iter((0.3, 0.2, 0.25, 0.0))
    monkeypatch.setattr(stats.random, "random", lambda: next(draws))
    async with cluster() as running:
        for _ in range(4):
            await ask(running)
        prefill, _ = await running.idle()
    assert len(named(kept, "request")) == 2
    assert [seen.request.traceparent != "" for seen in prefill] == [False, True, False, True]


async def test_without_a_tracer_workers_are_told_nothing():
    async with cluster() as running:
        await ask(running)
        prefill, decode = await running.idle()
    assert [seen.request.traceparent for seen in (*prefill, *decode)] == ["", ""]


@pytest.mark.long
async def test_a_trace_goes_on_over_http_and_ends_with_its_request(kept):
    trace, span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    async with served() as (running, client):
        asked = {"model": MODEL, "prompt": "hi", "max_tokens": 4}
        await client.completions.create(**asked, extra_headers={"traceparent": f"00-{trace}-{span}-01"})
        await client.completions.create(**asked)
        await client.completions.create(**asked, extra_headers={"traceparent": f"00-{trace}-{span}-00"})
        prefill, _ = await running.idle()
    told, untold = named(kept, "request")
    assert (told.context.trace_id, told.context.parent_id) == (trace, span)
    assert untold.context.trace_id != trace
    assert untold.context.parent_id == ""
    assert prefill[0].request.traceparent.startswith(f"00-{trace}-")
    assert prefill[2].request.traceparent == ""
    assert (told.error, untold.error) == ("", "")


@pytest.mark.long
async def test_an_answer_that_moves_is_attempts_of_one_request(kept):
    async with cluster(num_decode=2) as running:
        running.script.decode_error, running.script.decode_error_after = WorkerLost("died"), 4
        running.script.decode_ends_when = at_once = asyncio.Event()
        at_once.set()
        with pytest.raises(WorkerLost):
            await ask(running)
        await running.idle()
    [request] = named(kept, "request")
    attempts = named(kept, "attempt")
    assert [span.attributes["attempt"] for span in attempts] == [1, 2, 3]
    assert {span.context.parent_id for span in attempts} == {request.context.span_id}
    assert request.error.startswith("WorkerLost: ")


async def test_a_request_that_leaves_while_it_waits_for_its_turn_has_a_span_without_attempts(kept):
    async with cluster(max_wait_s=30.0) as running:
        router, entered = running.router, asyncio.Event()

        async def never(request):
            entered.set()
            await asyncio.Event().wait()

        router._admission_queue.enter = never
        asking = asyncio.create_task(ask(running))
        await entered.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        async with asyncio.timeout(5):
            while not named(kept, "request"):
                await asyncio.sleep(0.01)
    [request] = kept.spans
    assert request.error == "RequestCancelled"


async def test_a_request_that_is_refused_its_turn_is_in_no_log(kept, caplog):
    async with cluster(max_wait_s=30.0) as running:

        async def refuse(request):
            raise Overloaded("it would wait too long")

        running.router._admission_queue.enter = refuse
        with pytest.raises(Overloaded):
            await ask(running)
    assert [span.error for span in kept.spans] == ["Overloaded: it would wait too long"]
    assert not [record for record in caplog.records if record.name == "baton.router.inference"]
