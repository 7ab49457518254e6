"""OpenAI's responses, through its own client: the chats that they become, and the items that answers become."""

import asyncio
import itertools
import json

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import WorkerLost
from baton.proto import inference_pb2
from baton.router.attempt.migration import MigrationConfig
from baton.router.openai import limits
from baton.router.openai.chat_request import ChatRequest
from baton.router.openai.chats import ChatChoice
from baton.router.openai.reasoning import ReasoningSplitter
from baton.router.openai.responses import Items, ResponsesRequest
from baton.router.openai.token_names import TokenNames
from baton.tests.core.byte_tokenizers import byte_tokenizer
from baton.tests.router.fakes import TOKENIZER, decode_tokens, finished
from baton.tests.router.openai.served import MODEL, prompt_of, sent_to, served
from baton.tests.router.openai.test_chat import THINKING, report
from baton.tests.router.openai.test_errors import post
from baton.tests.router.openai.test_messages import CALL

pytestmark = pytest.mark.fast
PATH = "/v1/responses"
WEATHER = {"type": "function", "name": "weather", "description": "of a city", "parameters": {"type": "object"}}


async def ask(client, asked="hi", **more):
    return await client.responses.create(model=MODEL, input=asked, **more)


async def streamed(client, asked="hi", **more):
    """The response that the last event shows; all others lead to it."""
    events = [event async for event in await ask(client, asked, stream=True, **more)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    output, texts, item_id = [], {}, None
    for event in events[2:-1]:
        kind = event.type.removeprefix("response.")
        if kind.startswith("output_item"):
            if kind == "output_item.added":
                assert event.output_index == len(output)
                texts = {}
            else:
                assert event.item.id == item_id
                output.append(event.item)
            item_id = event.item.id
            continue
        assert (event.item_id, event.output_index) == (item_id, len(output))
        name, _, state = kind.rpartition(".")
        if state == "delta":
            texts[name] = texts.get(name, "") + event.delta
        elif state == "done" and name != "content_part":
            said = event.arguments if name == "function_call_arguments" else event.text
            assert said == texts.get(name, "")
    last = events[-1]
    assert last.type == f"response.{last.response.status}"
    assert last.response.output == output
    return last.response


def alike(response):
    """Without what differs from one call to the next."""
    data = response.model_dump()
    for item in data["output"]:
        item |= dict.fromkeys(("id", "call_id"))
    return data | {"id": "", "created_at": 0}


@pytest.mark.asyncio
@pytest.mark.long
async def test_a_response_and_its_stream():
    async with served() as (running, client):
        more = {"instructions": "be brief", "max_output_tokens": 50, "metadata": {"a": "b"}, "temperature": 0.5}
        response = await ask(client, **more)
        prompt = "<system>be brief\n<user>hi\n<assistant>"
        assert [prompt_of(request) for request in sent_to(running)] == [prompt]
        assert sent_to(running)[0].sampling.max_tokens == 50
        assert response.id.startswith("resp_")
        assert (response.object, response.model, response.output_text) == ("response", MODEL, "hello world")
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (response.metadata, response.temperature, response.max_output_tokens) == ({"a": "b"}, 0.5, 50)
        used = response.usage
        assert (used.input_tokens, used.output_tokens, used.total_tokens) == (len(prompt), 11, len(prompt) + 11)
        assert used.input_tokens_details.cached_tokens == len(prompt) - 2
        assert alike(await streamed(client, **more)) == alike(response)


@pytest.mark.asyncio
@pytest.mark.long
async def test_a_response_that_is_complete():
    async with served() as (running, client):
        ids = TOKENIZER.encode("hello")
        running.script.events = [finished(decode_tokens(1, ids[1:]), len(ids) - 1, reason="stop")]
        response = await ask(client)
        assert (response.status, response.incomplete_details) == ("completed", None)
        assert response.output[0].status == "completed"
        assert alike(await streamed(client)) == alike(response)


@pytest.mark.asyncio
@pytest.mark.parametrize("step", [1, 7, 500])
@pytest.mark.long
async def test_calls_are_items(step):
    async with served() as (running, client):
        running.script.step = step
        running.script.answer = f"let me see\n{CALL}\n{CALL}"
        response = await ask(client, tools=[WEATHER])
        text, *calls = response.output
        assert text.content[0].text == "let me see"
        assert [(call.type, call.name, json.loads(call.arguments)) for call in calls] == [
            ("function_call", "weather", {"city": "Rome"})
        ] * 2
        assert calls[0].call_id != calls[1].call_id and calls[0].id != calls[1].id
        assert alike(await streamed(client, tools=[WEATHER])) == alike(response)


@pytest.mark.asyncio
@pytest.mark.long
async def test_thoughts_are_items():
    async with served(THINKING) as (running, client):
        running.script.answer, running.script.logprobs = "so\nso\n</think>\n\nyes", report
        response = await ask(client, top_logprobs=1)
        thought, text = response.output
        assert (thought.type, thought.content[0].text, thought.summary) == ("reasoning", "so\nso", [])
        assert text.content[0].text == "yes"
        assert response.usage.output_tokens_details.reasoning_tokens == len("so\nso\n")
        assert len(text.content[0].logprobs) < len("</think>\n\nyes"), "thoughts are shown without"
        assert alike(await streamed(client, top_logprobs=1)) == alike(response)


@pytest.mark.asyncio
@pytest.mark.long
async def test_log_probabilities_stand_beside_their_text():
    async with served() as (running, client):
        running.script.logprobs = report
        response = await ask(client, include=["message.output_text.logprobs"], top_logprobs=2)
        shown = response.output[0].content[0].logprobs
        assert "".join(one.token for one in shown) == "hello world"
        assert len(shown[0].top_logprobs) == 2
        events = [event async for event in await ask(client, stream=True, top_logprobs=2)]
        for event in events:
            if event.type == "response.output_text.delta":
                assert "".join(one.token for one in event.logprobs) == event.delta
            if event.type == "response.content_part.added":
                assert event.part.logprobs == []
        assert (await ask(client)).output[0].content[0].logprobs == []


def chat_of(asked="hi", **more):
    return ResponsesRequest.model_validate_json(json.dumps({"input": asked} | more)).as_chat()


def test_items_become_messages():
    chat = chat_of(
        [
            {"role": "developer", "content": "be"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "wait"}]},
            {"type": "function_call", "call_id": "a", "name": "weather", "arguments": '{"city": "Rome"}'},
            {"type": "function_call", "call_id": "b", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "sun"},
            {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "rain"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}], "content": []},
            {"type": "function_call", "call_id": "c", "name": "weather"},
            {"role": "assistant", "content": "one"},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        ],
        instructions="brief",
    )
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    other = {"id": "b", "type": "function", "function": {"name": "weather", "arguments": {}}}
    assert chat.message_data() == [
        {"role": "system", "content": "brief"},
        {"role": "system", "content": "be"},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "wait", "reasoning_content": "hm", "tool_calls": [call, other]},
        {"role": "tool", "content": "sun", "tool_call_id": "a"},
        {"role": "tool", "content": "rain", "tool_call_id": "b"},
        {"role": "assistant", "content": "", "reasoning_content": "so", "tool_calls": [other | {"id": "c"}]},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "no"},
    ]


def test_tools_of_responses():
    chat = chat_of(tools=[WEATHER | {"strict": True}], tool_choice="required", parallel_tool_calls=False)
    assert (chat.tool_choice, chat.parallel_tool_calls, chat.tools[0].function.strict) == ("required", False, True)
    named = chat_of(tools=[WEATHER], tool_choice={"type": "function", "name": "weather"})
    assert named.tool_choice.function.name == "weather"
    some = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    allowed = chat_of(tools=[WEATHER], tool_choice=some).tool_choice.allowed_tools
    assert (allowed.mode, allowed.tools[0].function.name) == ("required", "weather")


def test_other_fields_of_responses():
    schema = {"type": "object"}
    chat = chat_of(
        text={"format": {"type": "json_schema", "name": "x", "schema": schema}, "verbosity": "low"},
        reasoning={"effort": "none"},
        truncation="auto",
        top_p=0.25,
        seed=7,
        top_k=3,
    )
    assert chat.response_format.json_schema.schema_ == schema
    assert (chat.reasoning_effort, chat.truncate_prompt_tokens, chat.top_p) == ("none", -1, 0.25)
    assert (chat.seed, chat.top_k, chat.logprobs) == (7, 3, None)
    assert chat_of(text={"format": {"type": "text"}}).constraint() is None


BAD = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input"),
    ({"input": "long " * 1000}, "input"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema"}}}, "text"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 5000}, "input"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"conversation": "c"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"metadata": {"a": "x" * 513}}, "metadata"),
    ({"n": 2}, "n"),
    ({"temperature": "hot"}, "temperature"),
    ({"json_schema": {}}, "json_schema"),
    ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ({"return_token_ids": True}, "return_token_ids"),
    ({"return_timings": True}, "return_timings"),
    ({"include": ["reasoning.encrypted_content", "message.output_text.logprob"]}, "include"),
    ({"messages": [{"role": "user", "content": "another"}]}, "input"),
    ({"max_output_tokens": 3, "max_completion_tokens": 5}, "max_output_tokens"),
    ({"text": {"format": {"type": "text"}}, "response_format": {"type": "json_object"}}, "text"),
    ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning"),
    ({"truncation": "auto", "truncate_prompt_tokens": 7}, "truncation"),
    ({"top_logprobs": 1, "logprobs": False}, "logprobs"),
]


@pytest.mark.asyncio
@pytest.mark.long
async def test_what_a_client_can_do_wrong_with_responses():
    async with served() as (running, client):
        for more, field in BAD:
            status, _, data = await post(running.url, PATH, {"input": "hi"} | more)
            assert (status, data["error"]["param"]) == (400, field), (more, data)
            if field in ("previous_response_id", "conversation") or "item_reference" in json.dumps(more):
                assert "send the whole conversation" in data["error"]["message"]
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="gpt-9", input="hi")
        assert sent_to(running) == []
        harmless = {"return_token_ids": False, "prompt_logprobs": None, "include": ["reasoning.encrypted_content"]}
        same = {"max_output_tokens": 3, "max_completion_tokens": 3}
        status, _, _ = await post(running.url, PATH, {"input": "hi"} | harmless | same)
        assert status == 200
        _, fields, _ = await post(running.url, PATH, {"input": "hi", "store": True, "user": "u", "other": 1})
        assert fields["x-baton-ignored"] == "other"


@pytest.mark.asyncio
async def test_an_error_in_mid_stream_of_a_response_is_numbered():
    async with served(migration=MigrationConfig(max_migrations=0)) as (running, client):
        running.script.decode_error, running.script.decode_error_after = WorkerLost("gone", worker_id="w"), 4
        ends = running.script.decode_ends_when = asyncio.Event()
        with pytest.raises(openai.APIError, match="gone"):
            async for _ in await ask(client, stream=True):
                ends.set()  # the answer has begun
        ends.clear()
        _, _, data = await post(running.url, PATH, {"input": "hi", "stream": True}, at_text=ends.set)
        lines = [line.removeprefix("data: ") for line in data.decode().splitlines() if line.startswith("data: ")]
        events = [json.loads(line) for line in lines]  # tokens that wait at the router share an event
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert (events[-1]["type"], events[-1]["error"]["code"]) == ("error", "worker_lost")


@pytest.mark.long
@pytest.mark.asyncio
async def test_a_long_response_is_read_elsewhere_and_asks_the_same():
    long = {"instructions": "x" * 40, "tools": [WEATHER], "tool_choice": "required", "metadata": {"a": "b"}}
    async with served() as (running, client):
        running.script.answer = CALL
        more = {"extra_body": {"seed": 7}}
        first = await ask(client, **long, **more)
        more["extra_body"]["unknown"] = "x" * limits.LIGHT_BYTES
        assert alike(await ask(client, **long, **more)) == alike(first)
        one, other = sent_to(running)
        assert (one.prompt_token_ids, one.sampling) == (other.prompt_token_ids, other.sampling)


ANSWERS = st.sampled_from(
    [
        "so\nso\n</think>\n\nyes",
        "so</think>",
        "so</thin",
        "</think>yes",
        "</think>\n",
        "<think>\nso\n</think> yes",
        "yes",
    ]
)


@pytest.mark.long
@given(ANSWERS, st.sets(st.integers(1, 24)), st.integers(0, 3), st.booleans())
def test_items_do_not_depend_on_where_an_answer_is_cut(answer, cuts, num_late, is_open):
    assert items_of(answer, cuts, num_late, is_open=is_open) == items_of(answer, (), 0, is_open=is_open)


def items_of(answer, cuts, num_late, *, is_open):
    """Of an answer in chunks, whose text comes so many tokens late; the last token, which ended it, has none."""
    asked = ChatRequest(model=MODEL, messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=1)
    splitter, names = ReasoningSplitter(is_open=is_open), TokenNames(byte_tokenizer())
    choice, items = ChatChoice(0, asked, names, reasoning=splitter), Items("r")
    token_ids = [*answer.encode(), 0]
    shown = 0
    bounds = sorted({0, len(token_ids), *(cut for cut in cuts if cut < len(token_ids))})
    for first, end in itertools.pairwise(bounds):
        is_last = end == len(token_ids)
        upto = len(answer) if is_last else max(shown, end - num_late)
        chunk = inference_pb2.GenerateChunk(
            token_ids=token_ids[first:end], text=answer[shown:upto], logprobs=map(report, token_ids[first:end])
        )
        if is_last:
            chunk.finish.reason = "stop"
        shown = upto
        piece = choice.push(chunk)
        if piece is not None:
            items.add(piece, choice.num_before_text)
    items.end()
    return items.output
