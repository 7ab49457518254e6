"""Completions through OpenAI's client, a real router and scripted workers."""

import openai
import pytest

from baton.proto import inference_pb2
from baton.tests.router.fakes import TOKENIZER
from baton.tests.router.openai.served import MODEL, prompt_of, sent_to, served
from baton.tests.router.openai.test_chat import report

pytestmark = [pytest.mark.asyncio, pytest.mark.fast]


async def complete(client, prompt="say", **more):
    return await client.completions.create(model=MODEL, prompt=prompt, **({"max_tokens": 64} | more))


async def streamed(client, prompt="say", **more):
    return [chunk async for chunk in await complete(client, prompt, stream=True, **more)]


@pytest.mark.long
async def test_an_answer():
    async with served() as (running, client):
        answer = await complete(client)
        assert (answer.object, answer.id[:5]) == ("text_completion", "cmpl-")
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("hello world", "length")
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 11)
        assert prompt_of(sent_to(running)[0]) == "say"
        await client.completions.create(model=MODEL, prompt="say")
        assert sent_to(running)[-1].sampling.max_tokens == 16, "OpenAI's default"


async def test_a_stream():
    async with served() as (_, client):
        chunks = await streamed(client, stream_options={"include_usage": True})
        assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "hello world"
        assert chunks[-2].choices[0].finish_reason == "length"
        assert (chunks[-1].choices, chunks[-1].usage.total_tokens) == ([], 14)


@pytest.mark.parametrize("prompts", [["a", "bc"], [[97], [98, 99]]])
@pytest.mark.long
async def test_several_prompts_and_answers(prompts):
    async with served() as (running, client):
        answer = await complete(client, prompts, n=2, echo=True)
        texts = [TOKENIZER.decode(one) if isinstance(one, list) else one for one in prompts]
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert [choice.text for choice in answer.choices] == [f"{text}hello world" for text in texts for _ in range(2)]
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 44), "a prompt counts once"
        chunks = await streamed(client, prompts, n=2)
        for index in range(4):
            found = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
            assert "".join(choice.text for choice in found) == "hello world"
            assert [choice.finish_reason for choice in found if choice.finish_reason] == ["length"]
        await running.idle()


async def test_token_ids_in_and_out():
    async with served() as (running, client):
        answer = await complete(client, [1, 2, 3], extra_body={"return_token_ids": True})
        assert list(sent_to(running)[0].prompt_token_ids) == [1, 2, 3]
        assert answer.choices[0].token_ids == TOKENIZER.encode("hello world")
        assert answer.choices[0].prompt_token_ids == [1, 2, 3]


async def test_timings_come_with_each_answers_end_if_asked():
    """`n` answers to two prompts: each last piece says where its time went, and the parts add up."""
    async with served() as (running, client):
        whole = await complete(client, ["a", "b"], n=2, extra_body={"return_timings": True})
        pieces = [
            chunk.choices[0] for chunk in await streamed(client, ["a", "b"], n=2, extra_body={"return_timings": True})
        ]
        for found in (whole.choices, pieces):
            ended = [choice for choice in found if choice.finish_reason]
            assert len(ended) == 4
            assert [hasattr(choice, "timings") for choice in found] == [bool(choice.finish_reason) for choice in found]
            for choice in ended:
                first = choice.timings["first"]
                assert first["sum_ms"] == pytest.approx(sum(first["parts"].values()))
                assert choice.timings["path"] in ("split", "local")
        assert not hasattr((await complete(client, "a")).choices[0], "timings")
        await running.idle()


async def test_an_echo_with_log_probabilities():
    async with served() as (running, client):
        running.script.answer, running.script.logprobs = "hey", report
        whole = (await complete(client, "ab", echo=True, logprobs=2)).choices[0]
        pieces = [chunk.choices[0] for chunk in await streamed(client, "ab", echo=True, logprobs=2)]
        for found in ([whole], pieces):
            assert "".join(choice.text for choice in found) == "abhey"
            assert [token for choice in found for token in choice.logprobs.tokens] == list("abhey")
            assert [at for choice in found for at in choice.logprobs.text_offset] == [0, 1, 2, 3, 4]
            logprobs = [value for choice in found for value in choice.logprobs.token_logprobs]
            assert logprobs == [None, -0.5, -0.5, -0.5, -0.5]
        assert whole.logprobs.top_logprobs[0] is None
        assert whole.logprobs.top_logprobs[2]["h"] == -0.5
        assert min(whole.logprobs.top_logprobs[2].values()) == -9999.0
        running.script.finish_at_first, running.script.events = "length", []
        only = await complete(client, "ab", echo=True, logprobs=0, max_tokens=0)
        assert (only.choices[0].text, only.choices[0].logprobs.tokens) == ("ab", ["a", "b"])
        running.script.finish_at_first, running.script.events = "", None
        several = await complete(client, "ab", echo=True, logprobs=1, n=2)
        assert [choice.logprobs.tokens for choice in several.choices] == [list("abhey")] * 2
        with pytest.raises(openai.BadRequestError, match="n > 1"):
            await streamed(client, "ab", echo=True, logprobs=1, n=2)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_token_never_looks_likelier_than_the_likeliest_of_its_name(streams):
    """lm_eval takes a token for the greedy one if its value is the largest of its entry, whose keys are names."""
    first, other = TOKENIZER.encode("é")  # each is half a character
    top = {"top_token_ids": [first], "top_logprobs": [-0.25]}

    def report_of(token_id):
        logprob = -0.25 if token_id == first else -3.0
        return inference_pb2.TokenLogprobs(token_id=token_id, logprob=logprob, rank=1 + (token_id != first), **top)

    async with served() as (running, client):
        running.script.answer, running.script.logprobs = "hey", report_of
        asked = {"echo": True, "logprobs": 1}
        if streams:
            choices = [
                chunk.choices[0] for chunk in await streamed(client, [[*TOKENIZER.encode("a"), first, other]], **asked)
            ]
        else:
            choices = (await complete(client, [[*TOKENIZER.encode("a"), first, other]], **asked)).choices
        values = [value for choice in choices for value in choice.logprobs.token_logprobs]
        tops = [top for choice in choices for top in choice.logprobs.top_logprobs]
        assert values[:3] == [None, -0.25, -3.0]
        assert tops[:3] == [None, {"\ufffd": -0.25}, {"\ufffd": -0.25}]


@pytest.mark.parametrize("echo", [False, True])
async def test_offsets_are_those_of_the_text(echo):
    async with served() as (running, client):
        running.script.answer, running.script.logprobs = "né€!", report
        for more in ({}, {"extra_body": {"return_tokens_as_token_ids": True}}):
            whole = (await complete(client, "à.", echo=echo, logprobs=0, **more)).choices[0]
            pieces = [one.choices[0] for one in await streamed(client, "à.", echo=echo, logprobs=0, **more)]
            want = [0, 0, 1, 2, 3, 3, 4, 4, 4, 5] if echo else [0, 1, 1, 2, 2, 2, 3]
            assert whole.logprobs.text_offset == want
            assert [at for choice in pieces if choice.logprobs for at in choice.logprobs.text_offset] == want
            assert whole.text[want[-1]] == "!"


@pytest.mark.parametrize("skips", [None, False, True])
async def test_an_echo_shows_all_of_its_prompt(skips):
    more = {} if skips is None else {"extra_body": {"skip_special_tokens": skips}}
    async with served() as (_, client):
        answer = await complete(client, TOKENIZER.encode("a<eos>b"), echo=True, **more)
        assert answer.choices[0].text == "a<eos>bhello world"
        assert (await complete(client, "a<eos>b", echo=True, **more)).choices[0].text == "a<eos>bhello world"


@pytest.mark.parametrize("stop", [{}, {"stop": "h"}, {"extra_body": {"stop_token_ids": [7]}}])
async def test_an_echo_alone_costs_no_token_and_stops_at_none(stop):
    async with served() as (running, client):
        running.script.answer, running.script.finish_at_first, running.script.events = "h", "stop", []
        more = {"echo": True, "max_tokens": 0, **stop}
        answer = await complete(client, "ab", **more)
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (2, 0, 2)
        chunks = await streamed(client, "ab", stream_options={"include_usage": True}, **more)
        assert chunks[-1].usage == answer.usage
        for choice in (answer.choices[0], chunks[-2].choices[0]):
            assert (choice.text, choice.finish_reason, choice.stop_reason) == ("ab", "length", None)


async def test_one_bad_prompt_refuses_all_before_any_begins():
    async with served() as (running, client):
        with pytest.raises(openai.BadRequestError, match="at position 0"):
            await complete(client, [[1], [999]])
        with pytest.raises(openai.BadRequestError) as refused:
            await complete(client, ["a", "b" * 3000])
        assert refused.value.code == "context_length_exceeded"
        assert sent_to(running) == []
        with pytest.raises(openai.BadRequestError, match="at most 64"):
            await complete(client, ["a"] * 65)


async def test_one_failure_ends_all():
    async with served() as (running, client):
        running.script.refused_pairs = {}
        running.script.decode_hangs_after = 3
        stream = await complete(client, ["a", "b"], stream=True)
        assert (await anext(aiter(stream))).choices
        await stream.close()
        _, decode = await running.idle()
        assert all(seen.cancelled for seen in decode)
        assert running.router.metrics.total("requests_failed") == 1
