"""Anthropic's messages: the chats that they become, and the messages and events that answers become."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from baton.core.errors import InvalidRequest, WorkerLost
from baton.core.requests.answer_structure import AnswerStructure
from baton.proto import worker_pb2
from baton.router.attempt.migration import MigrationConfig
from baton.router.openai import limits, messages
from baton.router.openai.body import parse_body
from baton.router.openai.chats import steps
from baton.router.openai.messages import CountTokensRequest, MessagesRequest, usage_data
from baton.tests.router.fakes import TOKENIZER, decode_tokens, finished
from baton.tests.router.openai.served import MODEL, prompt_of, sent_to, served
from baton.tests.router.openai.test_chat import THINKING
from baton.tests.router.openai.test_errors import post, raw

pytestmark = pytest.mark.fast
PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HI = [{"role": "user", "content": "hi"}]
ASKED = {"model": MODEL, "max_tokens": 50, "messages": HI}
WEATHER = {"name": "weather", "description": "of a city", "input_schema": {"type": "object"}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'


async def ask(running, path=PATH, at_text=None, **more):
    status, _, data = await post(running.url, path, ASKED | more, at_text=at_text)
    assert status == 200, data
    return data if isinstance(data, dict) else events_of(data)


def newest(running):
    return running.of("decode")[0].seen[-1]


def events_of(data):
    events = []
    for event in data.decode().replace("\r\n", "\n").split("\n\n"):
        name, _, text = event.partition("\ndata: ")
        if text:
            found = json.loads(text.partition("\n")[0])
            assert name.rpartition("event: ")[2] == found["type"]
            events.append(found)
    return events


def assembled(events):
    """The message that a client makes of its events, which must be in order."""
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    message, is_open = events[0]["message"], False
    for event in events[1:-2]:
        kind, index = event["type"], event["index"]
        if kind == "content_block_start":
            assert not is_open and index == len(message["content"])
            message["content"].append(event["content_block"] | {"parts": ""})
        assert index == len(message["content"]) - 1
        is_open = kind != "content_block_stop"
        if kind == "content_block_delta":
            delta = {name: value for name, value in event["delta"].items() if name != "type"}
            assert event["delta"]["type"].removesuffix("_delta") in ("text", "thinking", "input_json")
            message["content"][-1]["parts"] += "".join(delta.values())
    assert not is_open
    for block in message["content"]:
        parts = block.pop("parts")
        if block["type"] == "tool_use":
            block["input"] = json.loads(parts)
        else:
            block[block["type"]] += parts
    return message | events[-2]["delta"] | {"usage": events[-2]["usage"]}


def alike(message):
    """Without what differs from one call to the next."""
    return message | {"id": "", "content": [block | {"id": ""} for block in message["content"]]}


@pytest.mark.asyncio
async def test_a_message_and_its_stream():
    async with served() as (running, _):
        message = await ask(running, system="be brief")
        prompt = "<system>be brief\n<user>hi\n<assistant>"
        assert [prompt_of(request) for request in sent_to(running)] == [prompt]
        assert sent_to(running)[0].sampling.max_tokens == 50
        assert message["id"].startswith("msg_")
        assert (message["type"], message["role"], message["model"]) == ("message", "assistant", MODEL)
        assert message["content"] == [{"type": "text", "text": "hello world"}]
        assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)
        cached = len(prompt) - 2
        assert message["usage"] == {
            "input_tokens": 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": 11,
        }
        running.script.decode_hangs_after = 4
        events = await ask(running, system="be brief", stream=True, at_text=lambda: newest(running).hang.set())
        assert events[0]["message"]["usage"]["input_tokens"] == len(prompt)
        assert events[0]["message"]["stop_reason"] is None
        assert len(events) > 6, "text comes as it is made: the client had some before the rest was made"
        assert alike(assembled(events)) == alike(message)


@pytest.mark.asyncio
async def test_what_a_prompt_leaves_in_the_prefix_cache():
    """The fake worker had all but two tokens of every prompt."""
    async with served() as (running, _):
        [worker] = running.of("prefill")
        worker.naming = worker_pb2.PrefixNaming(block_size=1)
        running.router.members.heartbeat(worker.state())
        used = (await ask(running, messages=[{"role": "user", "content": "x" * 45}]))["usage"]
        assert list(used.values())[:3] == [1, 1, 61]


@pytest.mark.asyncio
async def test_what_a_prompt_leaves_in_the_prefix_cache_of_a_decode_worker():
    async with served(num_prefill=0, local_prefill="auto") as (running, _):
        [worker] = running.of("decode")
        worker.overrides["can_prefill"] = True
        worker.naming = worker_pb2.PrefixNaming(block_size=1)
        worker.num_cached_tokens = 61
        running.router.members.heartbeat(worker.state())
        used = (await ask(running, messages=[{"role": "user", "content": "x" * 45}]))["usage"]
        assert list(used.values())[:3] == [1, 1, 61]


@pytest.mark.parametrize(("read", "created", "others"), [(0, 48, 1), (16, 32, 1), (48, 0, 1)])
def test_three_counts_of_a_prompt_add_up(read, created, others):
    used = {"prompt_tokens": 49, "prompt_tokens_details": {"cached_tokens": read}, "completion_tokens": 3}
    data = usage_data(SimpleNamespace(as_data=lambda: used), 16)
    assert data == {
        "input_tokens": others,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": read,
        "output_tokens": 3,
    }


@pytest.mark.asyncio
async def test_what_ended_a_message():
    async with served() as (running, _):
        ids = TOKENIZER.encode("hello w")
        running.script.events = [finished(decode_tokens(1, ids[1:]), len(ids) - 1, reason="stop")]
        stopped = await ask(running, stop_sequences=["o w"])
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "o w")
        assert stopped["content"] == [{"type": "text", "text": "hell"}]
        assert alike(assembled(await ask(running, stop_sequences=["o w"], stream=True))) == alike(stopped)
        running.script.answer, running.script.finish_at_first = "w", "stop"
        assert (await ask(running))["stop_reason"] == "end_turn"


@pytest.mark.asyncio
@pytest.mark.parametrize("step", [1, 7, 500])
@pytest.mark.long
async def test_calls_are_blocks(step):
    async with served() as (running, _):
        running.script.step = step
        running.script.answer = f"let me see\n{CALL}\n{CALL}"
        more = {"tools": [WEATHER], "max_tokens": 300}
        message = await ask(running, **more)
        text, *calls = message["content"]
        assert text == {"type": "text", "text": "let me see"}
        assert [(call["type"], call["name"], call["input"]) for call in calls] == [
            ("tool_use", "weather", {"city": "Rome"})
        ] * 2
        assert calls[0]["id"] != calls[1]["id"]
        shown = assembled(await ask(running, stream=True, **more))
        assert alike(shown) == alike(message)
        one = await ask(running, tool_choice={"type": "auto", "disable_parallel_tool_use": True}, **more)
        assert [block["type"] for block in one["content"]] == ["text", "tool_use"]
        running.script.answer = CALL[:-20]
        cut = await ask(running, **more)
        assert (cut["stop_reason"], cut["content"][0]["input"]) == ("max_tokens", {})


@pytest.mark.asyncio
@pytest.mark.parametrize("choice", [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "weather"}])
async def test_a_call_is_what_ended_a_message_whoever_chose_it(choice):
    async with served() as (running, _):
        ids = TOKENIZER.encode(CALL)
        running.script.answer = CALL
        running.script.events = [finished(decode_tokens(1, ids[1:]), len(ids) - 1, reason="stop")]
        more = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 300}
        message = await ask(running, **more)
        assert (message["stop_reason"], message["content"][0]["input"]) == ("tool_use", {"city": "Rome"})
        assert alike(assembled(await ask(running, stream=True, **more))) == alike(message)


@pytest.mark.asyncio
@pytest.mark.parametrize("step", [1, 7, 500])
async def test_a_whole_message_has_the_blocks_of_its_stream(step):
    async with served() as (running, _):
        running.script.step = step
        running.script.answer = f"<think>so</think>first\n{CALL}\nthen\n{CALL}\nlast"
        more = {"tools": [WEATHER], "max_tokens": 400}
        message = await ask(running, **more)
        if step < 500:  # what comes in one chunk is one text
            kinds = [block["type"] for block in message["content"]]
            assert kinds[-5:] == ["text", "tool_use", "text", "tool_use", "text"]
            assert message["content"][-1]["text"].strip() == "last"
        assert alike(assembled(await ask(running, stream=True, **more))) == alike(message)


@pytest.mark.parametrize("text", ['{"city": ', "[" * 100_000, '{"city": ' + "[" * 100_000, "null", "[1]", '"a"'])
def test_arguments_that_break_off_are_none(text):
    assert messages._input(text) == {}


@pytest.mark.asyncio
async def test_thoughts_are_blocks():
    async with served(THINKING) as (running, _):
        running.script.answer = "so\nso\n</think>\n\nyes"
        message = await ask(running)
        assert message["content"] == [
            {"type": "thinking", "thinking": "so\nso", "signature": ""},
            {"type": "text", "text": "yes"},
        ]
        assert alike(assembled(await ask(running, stream=True))) == alike(message)


def chat_of(**more):
    return MessagesRequest.model_validate_json(json.dumps(ASKED | more)).as_chat()


def test_a_conversation_with_calls_and_results():
    chat = chat_of(
        system=[{"type": "text", "text": "be"}, {"type": "text", "text": "brief", "cache_control": {}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "weather?"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "wait"},
                    {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Rome"}},
                    {"type": "tool_use", "id": "b", "name": "weather", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "here:"},
                    {"type": "tool_result", "tool_use_id": "a", "content": "sun"},
                    {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "rain"}]},
                    {"type": "tool_result", "tool_use_id": "b"},
                    {"type": "text", "text": "and?"},
                ],
            },
        ],
    )
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    other = {"id": "b", "type": "function", "function": {"name": "weather", "arguments": {}}}
    assert chat.message_data() == [
        {"role": "system", "content": "be\nbrief"},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "wait", "reasoning_content": "hm", "tool_calls": [call, other]},
        {"role": "user", "content": "here:"},
        {"role": "tool", "content": "sun", "tool_call_id": "a"},
        {"role": "tool", "content": "rain", "tool_call_id": "b"},
        {"role": "tool", "content": "", "tool_call_id": "b"},
        {"role": "user", "content": "and?"},
    ]
    assert chat.continue_final_message is None


def test_a_message_of_the_assistant_is_continued():
    chat = chat_of(messages=[*HI, {"role": "assistant", "content": "well,"}])
    assert (chat.continue_final_message, chat.add_generation_prompt) == (True, False)
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "weather", "input": {}}]}
    assert chat_of(messages=[*HI, called]).continue_final_message is None


@pytest.mark.parametrize(
    ("choice", "said", "parallel"),
    [
        ({"type": "auto"}, "auto", None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", None),
    ],
)
def test_choices_of_tools(choice, said, parallel):
    chat = chat_of(tools=[WEATHER | {"type": "custom", "strict": True}], tool_choice=choice)
    assert (chat.tool_choice, chat.parallel_tool_calls) == (said, parallel)
    [tool] = chat.tools
    assert (tool.function.name, tool.function.parameters, tool.function.strict) == ("weather", {"type": "object"}, True)
    named = chat_of(tools=[WEATHER], tool_choice={"type": "tool", "name": "weather"}).tool_choice
    assert named.function.name == "weather"


def test_other_fields_are_those_of_a_chat():
    schema = {"type": "object"}
    chat = chat_of(
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        stop_sequences=["x"],
        stream=True,
        seed=7,
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}},
    )
    assert (chat.temperature, chat.top_p, chat.top_k, chat.stop) == (0.5, 0.25, 3, ["x"])
    assert (chat.stream, chat.seed, chat.reasoning_effort) == (True, 7, "low")
    assert chat.chat_template_kwargs == {"enable_thinking": False}
    assert chat.response_format.json_schema.schema_ == schema
    older = chat_of(output_format={"type": "json_schema", "schema": schema}, output_config={"effort": "low"})
    assert older.response_format.json_schema.schema_ == schema
    assert chat_of(thinking={"type": "disabled"}).chat_template_kwargs == {"enable_thinking": False}
    thinks = chat_of(thinking={"type": "enabled", "budget_tokens": 9}, chat_template_kwargs={"a": 1})
    assert thinks.chat_template_kwargs == {"enable_thinking": True, "a": 1}
    assert CountTokensRequest.model_validate({"messages": HI}).as_chat().max_tokens is None


BAD = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use", "name": "f", "input": {}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]}, "messages"),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}],
                }
            ]
        },
        "messages",
    ),
    ({"system": [{"type": "image"}]}, "system"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
    ({"tools": [{"name": "no name"}]}, "tools"),
    ({"tools": [{"name": "n" * 129}]}, "tools"),
    ({"container": "c"}, "container"),
    ({"mcp_servers": [{"type": "url", "url": "https://x", "name": "x"}]}, "mcp_servers"),
    ({"compaction": {"type": "summarize"}}, "compaction"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
    ({"output_config": {"format": {"type": "yaml"}}}, "output_config"),
    ({"output_format": {"type": "yaml"}}, "output_format"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
    ({"n": 2}, "n"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"echo": True}, "echo"),
    ({"gbnf": "x"}, "gbnf"),
    ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"return_token_ids": True}, "return_token_ids"),
    ({"return_timings": True}, "return_timings"),
    ({"stop_sequences": ["a"], "stop": "b"}, "stop_sequences"),
    (
        {"messages": [*HI, {"role": "assistant", "content": "so"}], "add_generation_prompt": True},
        "add_generation_prompt",
    ),
    ({"output_config": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning_effort"),
]


@pytest.mark.asyncio
async def test_what_a_client_can_do_wrong_with_messages():
    async with served() as (running, _):
        for more, field in BAD:
            for path in (PATH, COUNT):
                status, _, data = await post(running.url, path, ASKED | more)
                is_sampling = field in ("max_tokens", "stop_sequences", "top_p", "tool_choice") and path == COUNT
                if is_sampling and status == 200:
                    continue
                assert (status, data["type"], data["error"]["type"]) == (400, "error", "invalid_request_error"), more
                assert data["error"]["param"] == field, (more, data)
        status, _, data = await post(running.url, PATH, ASKED | {"model": "claude"})
        assert (status, data["error"]["type"]) == (404, "not_found_error")
        status, _, data = await post(running.url, COUNT, ASKED | {"model": "claude"})
        assert (status, data["error"]["type"]) == (404, "not_found_error")
        assert sent_to(running) == []
        _, fields, _ = await post(running.url, PATH, ASKED | {"metadata": {"user_id": "u"}, "other": 1})
        assert fields["x-baton-ignored"] == "other"


@pytest.mark.asyncio
async def test_a_tool_may_have_as_long_a_name_as_anthropic_allows():
    """Names of MCP tools begin with their server's, and are often longer than the 64 characters of OpenAI's."""
    name = "mcp__" + "n" * 123
    tool = WEATHER | {"name": name}
    async with served() as (running, _):
        choice = {"type": "tool", "name": name}
        status, _, data = await post(running.url, PATH, ASKED | {"tools": [tool], "tool_choice": choice})
        assert status == 200, data
        structure = AnswerStructure.from_json(sent_to(running)[-1].sampling.grammar.structure)
        assert [found.name for found in structure.tools] == [name]


@pytest.mark.asyncio
async def test_refusals_before_a_body_is_read_have_the_form_of_messages():
    async with served() as (running, _):
        json_type = "Content-Type: application/json"
        for head, status, kind in (
            ([f"GET {PATH} HTTP/1.1"], 405, "invalid_request_error"),
            ([f"POST {PATH}/batches HTTP/1.1", json_type], 404, "not_found_error"),
            ([f"POST {PATH} HTTP/1.1", "Content-Type: text/plain"], 415, "invalid_request_error"),
        ):
            found, _, body = await raw(running.url, head, b"{}")
            data = json.loads(body)
            assert (found, data["type"], data["error"]["type"]) == (status, "error", kind)


@pytest.mark.asyncio
async def test_a_conversation_that_the_server_would_keep_is_refused_so_that_its_client_sends_it_whole():
    """The loop over tools of Anthropic's client sends only what is new, unless this error says that it must not."""
    async with served() as (running, _):
        for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
            for more in ({}, {"stream": True}):
                status, _, data = await post(running.url, PATH, ASKED | {"thread": thread} | more)
                assert (status, data["error"]["param"]) == (400, "thread")
                assert data["error"]["details"] == {"error_code": "thread_unsupported_request"}
                assert "send the whole conversation" in data["error"]["message"]
        assert sent_to(running) == []
        assert (await post(running.url, PATH, ASKED | {"thread": None}))[0] == 200


@pytest.mark.asyncio
async def test_an_error_in_mid_stream_is_an_event():
    off = MigrationConfig(max_migrations=0)
    async with served(migration=off) as (running, _):
        running.script.decode_error, running.script.decode_error_after = WorkerLost("gone", worker_id="w"), 4
        running.script.decode_ends_when = asyncio.Event()
        events = await ask(running, stream=True, at_text=running.script.decode_ends_when.set)
        assert events[0]["type"] == "message_start"
        assert events[-1]["type"] == "error"
        assert events[-1]["error"]["type"] == "overloaded_error"


@pytest.mark.asyncio
async def test_tokens_are_counted_as_a_prompt_has_them():
    async with served() as (running, _):
        asked = {"messages": HI, "system": "be brief", "tools": [WEATHER]}
        counted = await ask(running, COUNT, **asked)
        assert sent_to(running) == []
        used = (await ask(running, **asked))["usage"]
        assert counted == {"input_tokens": used["input_tokens"] + used["cache_read_input_tokens"]}


@pytest.mark.long
@pytest.mark.asyncio
async def test_a_long_body_is_read_elsewhere_and_asks_the_same():
    long = {
        "metadata": {"user_id": "x" * limits.LIGHT_BYTES},
        "tools": [WEATHER],
        "tool_choice": {"type": "any"},
        "seed": 7,
    }
    async with served() as (running, _):
        running.script.answer = CALL
        short = {name: value for name, value in long.items() if name != "metadata"}
        first, second = await ask(running, **short), await ask(running, **long)
        assert alike(first) == alike(second)
        one, other = sent_to(running)
        assert one.prompt_token_ids == other.prompt_token_ids
        assert one.sampling == other.sampling


def test_a_call_is_complete_before_text_follows_it():
    delta = {
        "content": "then",
        "tool_calls": [
            {"index": 0, "function": {"arguments": "}"}},
            {"index": 1, "id": "b", "function": {"name": "g", "arguments": "{}"}},
        ],
    }
    assert [step.kind for step in steps(delta)] == ["arguments", "text", "call", "arguments"]


def test_more_blocks_than_may_be_are_refused():
    blocks = [{"type": "text", "text": ""}] * (limits.MAX_PARTS + 1)
    body = json.dumps(ASKED | {"messages": [{"role": "user", "content": blocks}]}).encode()
    with pytest.raises(InvalidRequest, match="4096"):
        parse_body(body, MessagesRequest)
