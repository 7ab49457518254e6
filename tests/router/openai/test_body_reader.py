"""Bodies that another process reads: the same replies, and a typed end whatever becomes of the process."""

import asyncio
import contextlib
import json
import os
import random
import signal
import sys

import httpx2
import pytest

from baton.core.errors import InternalError, from_wire
from baton.core.inside import ENVIRONMENT
from baton.router.openai import body_reader, reader_process
from baton.router.openai.chat_request import ChatRequest
from baton.router.openai.chat_template import ChatTemplate
from baton.router.openai.completions import CompletionRequest
from baton.router.openai.front import Forms
from baton.router.openai.understood import SPENT, ReadingJob, Understood
from baton.tests.router.fakes import TOKENIZER
from baton.tests.router.openai.served import CHATML, MODEL, served
from baton.tests.router.openai.test_chat import TREE, report

pytestmark = [pytest.mark.fast, pytest.mark.asyncio]
popen = body_reader._popen
LONG = {"prompt": [1] * 300, "max_tokens": 4, "unknown": [[]] * 60}  # too many arrays for the event loop
CALLS = '<think>\nhm\n</think>\n\nI <tool_call>{"name": "weather", "arguments": {"a": 1}}</tool_call>'
TAGGED = "<tool_call>\n<function=weather>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
WITH_TAGS = CHATML + "{# <function= <parameter= <think> #}"
PROPERTIES = {"type": "object", "properties": {"a": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PROPERTIES}}
BOTH = [(CHATML, CALLS), (WITH_TAGS, TAGGED)]
TEMPLATES = pytest.mark.parametrize(("template", "answer"), BOTH, ids=["plain", "tags"])
NAMED = {"type": "function", "function": {"name": "weather"}}
NUM_SAMPLED = 16
OF_EACH = ("id", "created", "object", "model")  # event or reply
COMMON = {
    "model": MODEL,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "n": 2,
    "max_tokens": 40,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "seed": 3,
    "stop": ["zz"],
    "stop_token_ids": [5],
    "ignore_eos": True,
    "min_tokens": 1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {"3": 1.0},
    "bad_words": ["q"],
    "allowed_token_ids": [1, 2],
    "prompt_logprobs": 1,
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a"},
    "guided_json": {"type": "object"},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": 'root ::= "a"',
    "regex": "a",
    "ebnf": 'root ::= "a"',
    "grammar": 'root ::= "a"',
    "best_of": 1,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "add_special_tokens": True,
    "truncate_prompt_tokens": 2,
    "return_tokens_as_token_ids": True,
    "return_token_ids": True,
    "return_timings": True,
    "priority": 1,
    "cache_salt": "me",
    "request_id": "mine",
}
FIELDS = {
    "chat/completions": COMMON
    | {
        "messages": [{"role": "user", "content": "hi"}],
        "max_completion_tokens": 30,
        "logprobs": True,
        "top_logprobs": 1,
        "tools": [TREE, WEATHER],
        "tool_choice": NAMED,
        "parallel_tool_calls": False,
        "include_reasoning": False,
        "reasoning_effort": "none",
        "add_generation_prompt": False,
        "continue_final_message": True,
        "chat_template_kwargs": {"a": [1]},
    },
    "completions": COMMON | {"prompt": ["hi", "ho"], "echo": True, "logprobs": 1},
}
BASE = {
    "chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200},
    "completions": {"prompt": "hi", "max_tokens": 200},
}
NEEDS = {"top_logprobs": {"logprobs": True}, "tool_choice": {"tools": [TREE, WEATHER]}, "best_of": {"n": 1}}
NEEDS |= {"parallel_tool_calls": {"tools": [TREE, WEATHER]}, "continue_final_message": {"add_generation_prompt": False}}
NEEDS |= {"max_completion_tokens": {"max_tokens": None}, "stream_options": {"stream": True}}
ROLES = {"chat/completions": ChatRequest, "completions": CompletionRequest}


def bodies():
    """Each field alone, in one piece and streamed; what may stand together, together."""
    for path, fields in FIELDS.items():
        for name, value in fields.items():
            body = BASE[path] | NEEDS.get(name, {}) | {name: value}
            yield path, name, body
            if name not in ("prompt_logprobs", "stream_options"):
                yield path, f"{name}, streamed", body | {"stream": True}
        both = {"return_token_ids": True, "n": 2}
        if path == "completions":
            yield path, "echo with all", BASE[path] | both | {"echo": True, "logprobs": 1, "prompt_logprobs": 1}
        else:
            tools = {"tools": [TREE, WEATHER], "logprobs": True, "top_logprobs": 1}
            some = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
            for choice in ("auto", "required", "none", some):
                yield path, f"tools {choice}", BASE[path] | both | tools | {"tool_choice": choice}
                yield path, f"tools {choice}, streamed", BASE[path] | tools | {"tool_choice": choice, "stream": True}


def said(text):
    """What a reply says: without ids and times, and a stream as if it had come in one piece."""
    if not text.startswith("data:"):
        return without_ids(json.loads(text))
    whole = {}
    for line in text.removesuffix("data: [DONE]\n\n").split("\n\n"):
        if line:
            whole = merged(whole, without_ids(json.loads(line.removeprefix("data: "))))
    return whole


def without_ids(value):
    if isinstance(value, dict):
        return {
            key: without_ids(item) for key, item in value.items() if key not in ("id", "created", "object", "model")
        }
    return [without_ids(item) for item in value] if isinstance(value, list) else value


def merged(one, more):
    """Texts and lists follow each other, what has an index adds to what has the same, other values replace."""
    if isinstance(one, dict) and isinstance(more, dict):
        return one | {key: merged(one.get(key), value) for key, value in more.items() if value is not None}
    if isinstance(one, str) and isinstance(more, str):
        return one + more
    if not isinstance(one, list) or not isinstance(more, list):
        return more if not isinstance(more, list) else merged([], more)
    one = list(one)
    for item in more:
        at = item.get("index") if isinstance(item, dict) else None
        if at is None:
            one.append(item)
        else:
            one += [{} for _ in range(at + 1 - len(one))]
            one[at] = merged(one[at], {key: value for key, value in item.items() if key != "index"})
    return one


class Forbidding:
    """A body of which no reply may read what another process has spent."""

    def __getattribute__(self, name):
        assert name not in SPENT, f"a reply reads {name}, which the other process does not hand over"
        return super().__getattribute__(name)


@pytest.fixture
def forbidding(monkeypatch):
    kinds = {kind: type(kind.__name__, (Forbidding, kind), {}) for kind in ROLES.values()}
    from_parts = Understood.from_parts

    def strict(parts, kind):
        understood = from_parts(parts, kind)
        understood.asked.__class__ = kinds[kind]
        return understood

    monkeypatch.setattr(Understood, "from_parts", strict)


async def replies(template, answer, chosen, *, is_light, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(body_reader, "is_light", lambda body: is_light)
        async with served(template=template) as (running, _), httpx2.AsyncClient(timeout=60.0) as http:
            running.script.answer, running.script.logprobs = answer, report
            found = {}
            for path, what, body in chosen:
                reply = await http.post(f"{running.url}/v1/{path}", json=body)
                found[path, what] = reply.status_code, said(reply.text)
            assert running.router._reader.num_in_process == (0 if is_light else len(chosen))
            return found


async def differing(template, answer, chosen, monkeypatch):
    here = await replies(template, answer, chosen, is_light=True, monkeypatch=monkeypatch)
    there = await replies(template, answer, chosen, is_light=False, monkeypatch=monkeypatch)
    assert {what: status for what, (status, _) in here.items() if status != 200} == {}
    return [what for what in here if here[what] != there[what]]


@pytest.mark.long
@TEMPLATES
async def test_replies_are_the_same_wherever_the_body_was_read(forbidding, monkeypatch, template, answer):
    chosen = [one for one in bodies() if one[2].get("tools") or "echo" in one[1]]
    rest = [one for one in bodies() if one not in chosen]
    chosen += random.Random(len(answer)).sample(rest, NUM_SAMPLED)
    assert await differing(template, answer, chosen, monkeypatch) == []


@pytest.mark.slow
@TEMPLATES
async def test_all_replies_are_the_same_wherever_the_body_was_read(forbidding, monkeypatch, template, answer):
    assert await differing(template, answer, list(bodies()), monkeypatch) == []


@pytest.mark.parametrize("path", FIELDS)
async def test_every_field_of_a_body_is_among_them(path):
    fields = {field.alias or name for name, field in ROLES[path].model_fields.items()}
    assert fields - set(FIELDS[path]) == {"stream"}


@contextlib.asynccontextmanager
async def reading(**options):
    """(its reader, ask) of a router"""
    async with served() as (running, _), httpx2.AsyncClient(timeout=60.0) as http:
        reader = running.router._reader
        for name, value in options.items():
            setattr(reader, name, value)

        async def ask(path="v1/completions", body=LONG):
            reply = await http.post(f"{running.url}/{path}", json=body)
            error = reply.json().get("error")
            return reply.status_code, error and error["code"]

        yield reader, ask


@pytest.mark.long
async def test_a_process_that_ended_while_idle_costs_no_request():
    async with reading() as (reader, ask):
        assert await ask() == (200, None)
        [process] = reader._idle
        process._child.kill()  # not waited for: it may still look alive
        assert await ask() == (200, None)
        [process] = reader._idle
        process._child.kill()
        process._child.wait()
        assert await ask() == (200, None)


@pytest.mark.long
async def test_the_first_body_finds_a_process(monkeypatch):
    async with reading() as (reader, ask):
        await reader.warm_up()
        [process] = reader._idle
        monkeypatch.setattr(body_reader, "_popen", None)  # no other can be started
        assert await ask() == (200, None)
        assert reader._idle == [process]


@pytest.mark.long
async def test_a_router_that_has_started_has_a_process():
    async with served() as (running, _):
        reader = running.router._reader
        assert reader._idle == []
        running.router.warm_up()
        async with asyncio.timeout(60):
            while not reader._idle:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("command", [("cat",), ("no-such-program",)], ids=["waits", "is missing"])
async def test_a_router_ends_while_its_first_process_starts(monkeypatch, command):
    started = []
    monkeypatch.setattr(body_reader, "_COMMAND", command)
    monkeypatch.setattr(body_reader, "_popen", lambda end: started.append(popen(end)) or started[-1])
    async with served() as (running, _):
        running.router.warm_up()
        await asyncio.sleep(0)
    for child in started:
        assert child.wait(10) is not None
    assert not running.router._reader._idle


@pytest.mark.long
async def test_a_process_that_has_grown_says_so_and_is_replaced(monkeypatch):
    program = "from baton.router.openai import reader_process as r; r.MAX_RSS_BYTES = 0; r.main()"
    monkeypatch.setattr(body_reader, "_COMMAND", (sys.executable, "-c", program))
    async with reading() as (reader, ask):
        assert [await ask() for _ in range(3)] == [(200, None)] * 3
        assert reader._idle == []


@pytest.mark.long
async def test_memory_of_the_process_that_started_it_is_not_its_own():
    """`ru_maxrss` would be at least that of the parent, where it was forked from it."""
    held = bytearray(reader_process.MAX_RSS_BYTES)
    held[:: os.sysconf("SC_PAGE_SIZE")] = b"\1" * len(held[:: os.sysconf("SC_PAGE_SIZE")])
    async with reading() as (reader, ask):
        assert await ask() == (200, None)
        assert len(reader._idle) == 1
    del held


@pytest.mark.long
async def test_a_process_that_says_nothing_is_ended_and_the_next_body_is_read():
    async with reading() as (reader, ask):
        assert await ask() == (200, None)
        [process] = reader._idle
        os.kill(process._child.pid, signal.SIGSTOP)
        reader._answer_timeout_s = 0.3
        assert await ask() == (500, "internal_error")
        assert process.returncode == -signal.SIGKILL
        reader._answer_timeout_s = 60.0
        assert await ask() == (200, None)


@pytest.mark.long
@pytest.mark.parametrize(
    "command", [("false",), ("head", "-c", "3"), ("no-such-program",)], ids=["ends", "ends in its answer", "is missing"]
)
@pytest.mark.parametrize("path", ["v1/completions", "v1/chat/completions", "tokenize", "detokenize"])
async def test_without_processes_every_endpoint_ends_typed(monkeypatch, command, path):
    monkeypatch.setattr(body_reader, "_COMMAND", command)
    async with reading() as (reader, ask):
        assert await ask(path) == (500, "internal_error")
        assert (reader._idle, reader._num_bytes_of.total(), reader._turns.num_held) == ([], 0, 0)


@pytest.mark.long
async def test_who_waits_too_long_for_a_process_is_refused():
    async with reading(_place_timeout_s=0.1) as (reader, ask):
        held = [await reader._turns.take("") for _ in range(body_reader.NUM_PROCESSES)]
        assert await ask() == (429, "rate_limit_exceeded")
        held.pop()()
        reader._place_timeout_s = 60.0
        assert await ask() == (200, None)


@pytest.mark.long
async def test_a_request_that_is_given_up_gives_its_place_back(monkeypatch):
    monkeypatch.setattr(body_reader, "_COMMAND", ("sleep", "1000"))
    async with reading() as (reader, _):
        job = ReadingJob(kind="CompletionRequest", request_id="a", max_answers=1, max_model_len=1)
        task = asyncio.create_task(reader._ask(job, b"{}", "acme"))
        while not reader.num_in_process:
            await asyncio.sleep(0)
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (reader._idle, reader._turns.num_held) == ([], 0)


async def test_whatever_is_raised_over_a_body_is_its_answer(monkeypatch):
    def fail(*args):
        raise ZeroDivisionError("of a bug")

    monkeypatch.setattr(reader_process, "understand", fail)
    forms = Forms(name=MODEL, encode=TOKENIZER.encode, template=ChatTemplate({"default": CHATML}), defaults={})
    job = ReadingJob(kind="ChatRequest", request_id="a", max_answers=1, max_model_len=1)
    head, body = reader_process.parted(reader_process.job_frame(job, b"{}")[8:])
    [error] = reader_process.answer(reader_process.joined([head, body])[8:], forms)
    assert isinstance(from_wire(error.decode()), InternalError)


@pytest.mark.long
async def test_a_process_is_told_no_secret(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, "ab" * 32)
    async with reading() as (reader, ask):
        assert await ask() == (200, None)
        [process] = reader._idle
        with open(f"/proc/{process._child.pid}/environ", "rb") as file:
            environment = file.read()
    assert b"PATH=" in environment and ENVIRONMENT.encode() not in environment


@pytest.mark.long
@pytest.mark.parametrize("path", ["v1/completions", "v1/chat/completions", "tokenize", "detokenize"])
async def test_deep_nesting_is_the_clients_mistake(path):
    async with served() as (running, _), httpx2.AsyncClient(timeout=60.0) as http:
        for body in (
            b"[" * 100_000,
            b'{"prompt":' * 20_000,
            b'{"messages":[' + b"[" * 100_000,
            b'{"a":{"b":[' * 30_000,
        ):
            reply = await http.post(f"{running.url}/{path}", content=body, headers={"content-type": "application/json"})
            assert reply.status_code == 400, (path, reply.text)
