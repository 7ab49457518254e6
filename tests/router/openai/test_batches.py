"""Several conversations in one call."""

import pytest

from baton.router.openai import chats, limits
from baton.tests.router.openai.served import prompt_of, sent_to, served
from baton.tests.router.openai.test_chat import WEATHER, report
from baton.tests.router.openai.test_errors import post

pytestmark = [pytest.mark.fast, pytest.mark.asyncio]
PATH = "/v1/chat/completions/batch"
ASKED = {"messages": [[{"role": "user", "content": "one"}], [{"role": "user", "content": "two"}]]}


@pytest.mark.long
async def test_choices_are_in_the_order_of_conversations():
    async with served() as (running, _):
        running.script.logprobs = report
        more = {"n": 2, "max_tokens": 20, "logprobs": True, "return_token_ids": True}
        status, _, data = await post(running.url, PATH, ASKED | more)
        assert (status, data["object"]) == (200, "chat.completion")
        assert [choice["index"] for choice in data["choices"]] == [0, 1, 2, 3]
        assert {choice["message"]["content"] for choice in data["choices"]} == {"hello world"}
        assert all(choice["logprobs"]["content"] and choice["token_ids"] for choice in data["choices"])
        prompts = ["<user>one\n<assistant>", "<user>two\n<assistant>"]
        assert sorted({prompt_of(request) for request in sent_to(running)}) == prompts
        assert data["usage"]["prompt_tokens"] == sum(map(len, prompts))
        assert data["usage"]["completion_tokens"] == 44


@pytest.mark.long
async def test_a_long_batch_is_read_elsewhere_and_answered_the_same():
    async with served() as (running, _):
        more = {"tools": [WEATHER], "unknown": "x" * limits.LIGHT_BYTES, "seed": 7}
        status, _, data = await post(running.url, PATH, ASKED | more)
        assert (status, len(data["choices"])) == (200, 2)
        assert len(sent_to(running)) == 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"stream": True}, "stream"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": [[]]}, "messages"),
        ({"messages": ASKED["messages"][0]}, "messages"),
        ({"messages": [*ASKED["messages"], [{"role": "user"}]]}, "messages"),
        ({"messages": ASKED["messages"] * 300}, "n"),
    ],
)
async def test_one_bad_conversation_refuses_all(more, field):
    async with served() as (running, _):
        status, _, data = await post(running.url, PATH, ASKED | more)
        assert (status, data["error"]["param"]) == (400, field), data
        assert sent_to(running) == []


async def test_tools_are_not_written_into_more_prompts_than_may_be(monkeypatch):
    made = []
    write = chats.chat_prompt
    monkeypatch.setattr(chats, "chat_prompt", lambda *asked: made.append(write(*asked)) or made[-1])
    monkeypatch.setattr(chats, "MAX_CHARS", 1000)
    async with served() as (running, _):
        tools = [{"type": "function", "function": {"name": "f", "description": "x" * 600}}]
        more = {"tools": tools, "messages": ASKED["messages"] * 8}
        status, _, data = await post(running.url, PATH, ASKED | more)
        assert (status, data["error"]["param"]) == (400, "messages")
        assert len(made) == 2


async def test_conversations_that_begin_differently_are_not_mixed():
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>"
    async with served(template + "{{ '</think>' if messages[0].content == 'two' }}") as (running, _):
        status, _, data = await post(running.url, PATH, ASKED)
        assert (status, data["error"]["code"]) == (400, "conflicting_options")
