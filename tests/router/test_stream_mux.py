"""All streams to a worker over one call: what they share, and what none of them may do to the others."""

import asyncio

import pytest

from baton.client import AsyncBatonClient
from baton.core.errors import ProtocolError
from baton.core.requests.sampling import SamplingParams
from baton.router.attempt.request_run import CertainTokens, RequestRun
from baton.tests.router.fakes import TOKENIZER, cluster, decode_tokens, finished

pytestmark = [pytest.mark.asyncio, pytest.mark.fast]
GREEDY = SamplingParams(max_tokens=64, temperature=0.0)


async def text_of(running, prompt="hi", sampling=GREEDY):
    async with AsyncBatonClient(running.address, timeout_s=20.0) as client:
        return await client.generate_text(prompt, sampling=sampling)


async def answer_of(running):
    """A text, and the workers that gave it."""
    async with AsyncBatonClient(running.address, timeout_s=20.0) as client:
        chunks = [chunk async for chunk in client.generate("hi", sampling=GREEDY)]
    stats = chunks[-1].finish.stats
    return "".join(chunk.text for chunk in chunks), stats.prefill_worker, stats.decode_worker


async def until(condition, timeout_s=10.0):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def stream_muxes_of(running):
    return [stream_mux for stream_mux, _ in running.router._channels._stream_muxes.values()]


def is_idle(running):
    return all(stream_mux.num_open == 0 for stream_mux in stream_muxes_of(running))


async def test_many_streams_share_one_call_to_each_worker_and_leave_nothing():
    async with cluster() as running:
        running.script.token_delay_s = 0.01
        assert await asyncio.gather(*(text_of(running) for _ in range(12))) == ["hello world"] * 12
        assert len(stream_muxes_of(running)) == 2
        await until(lambda: is_idle(running))
        assert [stream_mux._last for stream_mux in stream_muxes_of(running)] == [12, 12]
        await running.idle(3.0)


@pytest.mark.long
async def test_a_cancelled_stream_is_cancelled_at_both_workers_and_the_others_go_on():
    async with cluster() as running:
        running.script.token_delay_s = 0.1
        other = asyncio.create_task(text_of(running))
        leaving = asyncio.create_task(text_of(running))
        decode = running.of("decode")[0]
        await until(lambda: len(decode.running()) == 2)
        leaving.cancel()
        await until(lambda: len(decode.running()) == 1 or other.done())
        assert await other == "hello world"
        await running.idle(3.0)
        assert sum(seen.cancelled for seen in decode.seen) == 1
        await until(lambda: is_idle(running))


async def test_what_one_stream_may_not_say_ends_that_stream_alone():
    async with cluster() as running:
        running.script.token_delay_s = 0.05
        good = asyncio.create_task(text_of(running))
        await until(lambda: running.router.metrics.total("generation_tokens") >= 3)  # its script is read already
        running.script.events = [decode_tokens(7, [1])]
        with pytest.raises(ProtocolError, match="skipped"):
            await text_of(running)
        assert await good == "hello world"
        await running.idle(3.0)
        assert len(stream_muxes_of(running)) == 2
        assert not any(stream_mux.over for stream_mux in stream_muxes_of(running))


@pytest.mark.long
async def test_a_call_that_ends_moves_all_its_streams_and_another_is_begun():
    async with cluster(1, 2) as running:
        running.script.token_delay_s = 0.1
        answers = [asyncio.create_task(text_of(running)) for _ in range(6)]
        lost = running.of("decode")[0]
        await until(lambda: len(lost.running()) == 3)
        (broken,) = (
            stream_mux
            for incarnation, (stream_mux, _) in running.router._channels._stream_muxes.items()
            if incarnation.worker_id == lost.worker_id
        )
        broken.close()
        assert await asyncio.gather(*answers) == ["hello world"] * 6
        assert broken.over
        assert running.router.metrics.total("migrations") == 3
        await running.idle(3.0)
        running.script.token_delay_s = 0.0
        await until(
            lambda: (
                not running.router.migration.in_flight_requests.is_unsettled(
                    running.router.members.live("decode")[0].incarnation
                )
            )
        )
        for _ in range(4):
            assert await text_of(running) == "hello world"


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_of_another_life_at_the_same_address_serves_nobody(role):
    async with cluster(2, 2) as running:
        wrong = running.of(role)[0]
        told, wrong.epoch = wrong.epoch, wrong.epoch + 5000

        def state():
            found = type(wrong).state(wrong)
            found.epoch = told
            return found

        wrong.state = state
        answers = await asyncio.gather(*(answer_of(running) for _ in range(4)))
        assert {text for text, *_ in answers} == {"hello world"}
        assert wrong.worker_id not in {worker for _, *workers in answers for worker in workers}
        await until(lambda: not wrong.running())


async def test_what_waits_for_a_slow_reader_is_one_event_and_loses_nothing():
    run = RequestRun.__new__(RequestRun)
    run._waiting, run._error, run._changed, run.on_arrival = None, None, None, None
    run._put(CertainTokens(0, [0], "", [0], ["of the prompt"]))
    assert run.take() == CertainTokens(0, [0], "", [0], ["of the prompt"])
    for index in range(1, 1000):
        run._put(CertainTokens(index, [index], "length" if index == 999 else "", [index]))
    whole = list(range(1, 1000))
    assert run.take() == CertainTokens(1, whole, "length", whole)
    assert run.take() is None


async def test_a_slow_reader_holds_up_no_other_stream_and_gets_its_whole_answer():
    async with cluster() as running:
        text = "slow reader " * 10
        running.script.answer, running.script.step = text, 1
        async with AsyncBatonClient(running.address, timeout_s=30.0) as client:
            sampling = SamplingParams(max_tokens=len(TOKENIZER.encode(text)), temperature=0.0)
            slow = client.generate("hi", sampling=sampling)
            first = await anext(slow)
            assert await text_of(running, sampling=sampling) == text
            await running.idle(5.0)  # the workers wait for nobody
            parts = [first.text]
            async for chunk in slow:
                parts.append(chunk.text)
            assert "".join(parts) == text


async def test_packed_tokens_may_overtake_the_first_token():
    async with cluster() as running:
        running.script.decode_before_first = True
        token_ids = TOKENIZER.encode("hello world")
        rest = [decode_tokens(index, [token_ids[index]]) for index in range(1, len(token_ids) - 1)]
        last = decode_tokens(len(token_ids) - 1, token_ids[-1:])
        running.script.events = [*rest, finished(last, len(token_ids) - 1, len(token_ids) - 1)]
        assert await text_of(running) == "hello world"
