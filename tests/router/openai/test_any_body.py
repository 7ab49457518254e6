"""Whatever a field holds, the reply is an answer or a client's error: never a 5xx; and workers keep nothing."""

import json
import re

import pytest

from baton.router.openai.chat_request import ChatRequest
from baton.router.openai.chats import BatchRequest
from baton.router.openai.completions import CompletionRequest
from baton.router.openai.messages import CountTokensRequest, MessagesRequest
from baton.router.openai.options import HARMLESS, REFUSED
from baton.router.openai.responses import ResponsesRequest
from baton.router.openai.tokens import DetokenizeRequest, TokenizeRequest
from baton.tests.router.openai.served import served
from baton.tests.router.openai.test_chat import report
from baton.tests.router.openai.test_errors import TOOL, post

pytestmark = pytest.mark.asyncio
MESSAGES = [{"role": "user", "content": "x"}]
PATHS = {
    "/v1/chat/completions": (ChatRequest, {"messages": MESSAGES, "tools": [TOOL]}),
    "/v1/chat/completions/batch": (BatchRequest, {"messages": [MESSAGES, MESSAGES], "tools": [TOOL]}),
    "/v1/completions": (CompletionRequest, {"prompt": "x", "max_tokens": 32}),
    "/v1/responses": (ResponsesRequest, {"input": "x", "tools": [{"type": "function", "name": "f"}]}),
    "/v1/messages": (MessagesRequest, {"messages": MESSAGES, "max_tokens": 32, "tools": [{"name": "f"}]}),
    "/v1/messages/count_tokens": (CountTokensRequest, {"messages": MESSAGES}),
    "/tokenize": (TokenizeRequest, {"prompt": "x"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1]}),
}
NUMBERS = [0, 1, -1, 2, 1 << 31, 1 << 63, -(1 << 80), 0.5, float("nan"), float("inf"), 1e308]
TEXTS = ["", "x", "\u0000", "é" * 300, "none"]
LISTS = [[], [0], [-1], [1 << 40], [[]], [[1], [2]], [None], ["a", 1], ["", "b"]]
OBJECTS = [
    {},
    {"x": 1},
    {"5": 1},
    {"5": float("nan")},
    {"-1": 1},
    {"type": "object"},
    {"type": "json_schema"},
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"schema": {}}},
    {"type": "function", "function": {"name": "f"}},
    {"json": "{", "regex": "("},
    {"regex": "a"},
    {"choice": [""]},
    {"include_usage": True},
]
PARTS = [
    [{"role": "user", "content": []}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
    [{"type": "function_call", "call_id": "a", "name": "f"}, {"type": "function_call_output", "call_id": "a"}],
    [{"type": "reasoning", "summary": []}, {"role": "assistant", "content": [{"type": "refusal", "refusal": "x"}]}],
    [{"role": "tool", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text"}]}]}],
    [{"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": {"x": float("nan")}}]}],
    [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}],
]
PARTS += [[one] for one in PARTS]
VALUES = [None, True, *NUMBERS, *TEXTS, *LISTS, *OBJECTS, *PARTS]


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", PATHS)
async def test_no_value_is_a_servers_error(path, stride):
    kind, body = PATHS[path]
    names = [field.alias or name for name, field in kind.model_fields.items()]
    async with served() as (running, _):
        running.script.finish_at_first, running.script.events, running.script.logprobs = "length", [], report
        for at, name in enumerate((*names, *sorted(REFUSED), min(HARMLESS), "unknown")):
            for value in VALUES[at % stride :: stride]:
                status, _, data = await post(
                    running.url, path, json.dumps(body | {name: value}).encode(), "Accept: */*"
                )
                assert status in (200, 400, 404), (name, value, data)
                if status != 200:
                    message = data["error"]["message"]
                    assert message, (name, value)
                    assert not re.search(r"constrained-|(list|dict|union|function)[-\[]", message), (name, message)
        await running.idle()
