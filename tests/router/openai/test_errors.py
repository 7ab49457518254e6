"""What goes wrong over HTTP: statuses, OpenAI's error JSON, when to try again, and clients that leave."""

import asyncio
import json
import re

import openai
import pytest

from baton.core.errors import BatonError, InvalidRequest, NoWorker, Overloaded, RequestDeadlineExceeded, WorkerLost
from baton.router.attempt.migration import MigrationConfig
from baton.router.openai import reply as reply_module
from baton.router.openai.body import as_model
from baton.router.openai.chat_request import ChatRequest
from baton.router.openai.completions import CompletionRequest
from baton.router.openai.reply import error_data, error_headers
from baton.tests.router.openai.served import MAX_MODEL_LEN, MODEL, sent_to, served

pytestmark = [pytest.mark.asyncio, pytest.mark.fast]
HI = [{"role": "user", "content": "hi"}]
CHAT = {"model": MODEL, "messages": HI}
TOOL = {"type": "function", "function": {"name": "f"}}
FAR = "/v1/chat/completions"
SCHEMA = {"type": "json_schema"}
BAD_SCHEMA = {"minimum": 10**400}  # no worker need be asked
WRONG_TOOL = {"type": "function", "function": {"name": "f", "parameters": BAD_SCHEMA}}
STRICT_TOOL = {"type": "function", "function": {"name": "f", "parameters": BAD_SCHEMA, "strict": True}}


async def raw(url, head, body=b"", *, is_partial=False, at_text=None):
    """One request by hand: (status, headers, body). `at_text` is called as soon as a stream brings the first text."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        lines = [
            *head,
            "Host: x",
            *([] if is_partial else [f"Content-Length: {len(body)}"]),
            "Connection: close",
            "",
            "",
        ]
        writer.write("\r\n".join(lines).encode() + body)
        answer = b""
        if at_text is not None:
            answer = await asyncio.wait_for(reader.readuntil(b"delta"), 10)
            at_text()
        answer += await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()
    top, _, rest = answer.partition(b"\r\n\r\n")
    status, *fields = top.decode().split("\r\n")
    return int(status.split()[1]), dict(field.lower().split(": ", 1) for field in fields), rest


async def post(url, path, data, *headers, at_text=None):
    body = data if isinstance(data, bytes) else json.dumps(data).encode()
    head = [f"POST {path} HTTP/1.1", "Content-Type: application/json", *headers]
    status, fields, body = await raw(url, head, body, at_text=at_text)
    is_stream = fields.get("content-type", "").startswith("text/event-stream")
    return status, fields, body if is_stream else json.loads(body)


BAD = [
    ({"n": 0}, "n", "invalid_sampling"),
    ({"n": 2**40}, "n", "invalid_sampling"),
    ({"n": 17}, "n", "invalid_sampling"),
    ({"best_of": 2}, "best_of", "invalid_request"),
    ({"n": 2, "best_of": 3}, "best_of", "invalid_request"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_request"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "invalid_request"),
    ({"temperature": "0.5"}, "temperature", "invalid_request"),
    ({"temperature": -1}, "temperature", "invalid_sampling"),
    ({"temperature": True}, "temperature", "invalid_request"),
    ({"top_p": 0}, "top_p", "invalid_sampling"),
    ({"top_k": -2}, "top_k", "invalid_sampling"),
    ({"max_tokens": 0}, "max_tokens", "invalid_sampling"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "invalid_sampling"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "conflicting_options"),
    ({"max_tokens": 5000}, "messages", "context_length_exceeded"),
    ({"seed": 1 << 63}, "seed", "invalid_request"),
    ({"stop": [""]}, "stop", "invalid_sampling"),
    ({"stop": ["a"] * 17}, "stop", "invalid_sampling"),
    ({"stop": 7}, "stop", "invalid_request"),
    ({"presence_penalty": 3}, "presence_penalty", "invalid_sampling"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_sampling"),
    ({"logit_bias": {"5000": 1}}, "logit_bias", "invalid_sampling"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "invalid_sampling"),
    ({"top_logprobs": 2}, "top_logprobs", "conflicting_options"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_sampling"),
    ({"logprobs": 2}, "logprobs", "invalid_request"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "conflicting_options"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "conflicting_options"),
    ({"response_format": {"type": "yaml"}}, "response_format", "invalid_request"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "invalid_request"),
    ({"guided_json": "{"}, "guided_json", "invalid_grammar"),
    ({"response_format": SCHEMA | {"json_schema": {"schema": BAD_SCHEMA}}}, "response_format", "invalid_grammar"),
    ({"tools": [WRONG_TOOL], "tool_choice": "required"}, "tools", "invalid_grammar"),
    (
        {
            "tools": [STRICT_TOOL],
            "response_format": SCHEMA | {"json_schema": {"schema": {}}},
        },
        "tools",
        "invalid_grammar",
    ),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "conflicting_options"),
    ({"guided_choice": []}, "guided_choice", "invalid_request"),
    ({"guided_regex": "a" * 70_000}, "guided_regex", "invalid_grammar"),
    ({"messages": []}, "messages", "invalid_request"),
    ({"messages": "hi"}, "messages", "invalid_request"),
    ({"messages": [{"role": "user"}]}, "messages", "invalid_request"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "invalid_request"),
    ({"messages": [{"role": "user", "content": "long " * 1000}]}, "messages", "context_length_exceeded"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_request"),
    ({"tool_choice": "perhaps"}, "tool_choice", "invalid_request"),
    ({"tools": [{"type": "function", "function": {"name": "no name"}}]}, "tools", "invalid_request"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
        "invalid_request",
    ),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "invalid_request"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "invalid_request"),
    ({"request_id": "a\nb"}, "request_id", "invalid_request"),
    ({"cache_salt": "x" * 257}, "cache_salt", "invalid_request"),
]


@pytest.mark.long
async def test_what_a_client_can_do_wrong():
    async with served() as (running, _):
        for body, param, code in BAD:
            status, fields, data = await post(running.url, FAR, CHAT | body)
            error = data["error"]
            assert (status, error["param"], error["code"]) == (400, param, code), (body, data)
            assert error["type"] == "invalid_request_error"
            assert error["message"]
            assert "retry-after" not in fields
        for body in (b"", b"{", b"[]", b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b"[" * 100_000):
            status, _, data = await post(running.url, FAR, body)
            assert (status, data["error"]["type"]) == (400, "invalid_request_error"), body[:40]
        for path, body, param in (
            ("/v1/completions", {"prompt": "long " * 1000}, "prompt"),
            ("/v1/completions", {"prompt": "a", "guided_json": "{"}, "guided_json"),
            ("/v1/responses", {"input": "long " * 1000}, "input"),
            ("/v1/responses", {"input": "a", "text": {"format": SCHEMA | {"name": "n", "schema": BAD_SCHEMA}}}, "text"),
        ):
            status, _, data = await post(running.url, path, {"model": MODEL} | body)
            assert (status, data["error"]["param"]) == (400, param), (path, data)
        for prompt in (None, "", [], [[]], [-1], [5000], [1 << 40], ["a", 1], [""]):
            status, _, data = await post(running.url, "/v1/completions", {"prompt": prompt})
            assert (status, data["error"]["param"]) == (400, "prompt"), (prompt, data)
        status, _, data = await post(running.url, FAR, CHAT | {"model": "gpt-9"})
        assert (status, data["error"]["code"]) == (404, "model_not_found")
        assert sent_to(running) == [], "nothing was begun"
        assert running.router.metrics.total("requests_failed") == len(BAD) + 5 + 4 + 9 + 1
        status, fields, _ = await post(running.url, FAR, CHAT | {"max_token": 3, "user": "me", "best_of": 1, "a b": 1})
        assert (status, fields["x-baton-ignored"]) == (200, "max_token")


@pytest.mark.parametrize("path", [FAR, "/v1/completions", "/v1/messages", "/v1/responses"])
async def test_clients_learn_that_a_request_is_too_long(path):
    """litellm, and so aider, searches the message for these words; Claude Code computes a smaller `max_tokens`."""
    is_responses, is_completion = path.endswith("responses"), path == "/v1/completions"
    limit = "max_output_tokens" if is_responses else "max_tokens"
    longest = f"this model's maximum context length is {MAX_MODEL_LEN} tokens"

    def asked(text, num):
        prompt = {"input": text} if is_responses else {"prompt": text} if is_completion else {}
        return {limit: num} | (prompt or {"messages": [{"role": "user", "content": text}]})

    async with served() as (running, _):
        bodies = [asked("long " * 1000, 1), asked("long " * 500_000, 1), asked("hi", 5000)]
        if is_completion:
            bodies += [asked([1] * MAX_MODEL_LEN, 1), asked([1] * (2 * MAX_MODEL_LEN), 1)]
        for body in bodies:
            status, _, data = await post(running.url, path, body)
            error = data["error"]
            assert (status, error["code"]) == (400, "context_length_exceeded")
            if body[limit] == 1:
                assert error["message"].startswith("the prompt is too long: ")
                assert longest in error["message"] or "bytes" in error["message"]
            else:
                found = re.match(
                    r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+); ", error["message"]
                )
                assert found and (int(found[2]), int(found[3])) == (5000, MAX_MODEL_LEN)
                assert error["message"].endswith(longest)
                room = MAX_MODEL_LEN - int(found[1])
                status, _, _ = await post(running.url, path, asked("hi", room))
                assert status == 200
        status, _, _ = await post(running.url, path, asked("hi", room + 1))
        assert status == 400


async def test_an_error_names_every_wrong_token_and_the_size_of_the_vocabulary():
    async with served() as (running, _):
        keys = [f"bad{index}" for index in range(20)]
        _, _, data = await post(running.url, FAR, CHAT | {"logit_bias": dict.fromkeys(["5", *keys], 1)})
        message = data["error"]["message"]
        assert all(repr(key) in message for key in keys[:8]) and "and 12 more" in message
        _, _, data = await post(running.url, FAR, CHAT | {"logit_bias": {"5000": 1}})
        size = re.search(r"which has (\d+)", data["error"]["message"])
        assert size and int(size[1]) < 5000


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": 5}]},
            "messages.0.content: Input should be a valid string or a valid list",
        ),
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            "messages.0.content.0.text: Input should be a valid string",
        ),
        (CompletionRequest, {"prompt": {"a": 1}}, "prompt: Input should be a valid string or a valid list"),
        (CompletionRequest, {"prompt": [["a"]]}, "prompt.0: Input should be a valid integer or a valid string"),
    ],
)
async def test_of_a_field_of_several_kinds_the_error_names_them(kind, body, message):
    with pytest.raises(InvalidRequest) as caught:
        as_model(body, kind)
    assert str(caught.value).startswith(message)


async def test_an_unknown_path_names_the_one_that_was_meant():
    async with served() as (running, _):
        for path, meant in (
            ("/chat/completions", FAR),
            ("/v1/v1/chat/completions", FAR),
            (f"{FAR}/", FAR),
            ("/v1/v1/messages", "/v1/messages"),
            ("/v1/tokenize", "/tokenize"),
            ("/models", "/v1/models"),
            ("/v1/embeddings", None),
            ("/" + "v1/" * 60, None),
        ):
            status, _, data = await post(running.url, path, {})
            hint = "GET /docs shows what is served" if meant is None else f"{meant} is served"
            assert (status, data["error"]["code"]) == (404, "not_found")
            assert data["error"]["message"].endswith(f"Not Found; {hint}"), path


async def test_other_paths_methods_and_bodies():
    async with served(http={"max_body_bytes": 1000}) as (running, _):
        url, json_type = running.url, "Content-Type: application/json"
        for head, want, code in (
            (["GET /v1/nothing HTTP/1.1"], 404, "not_found"),
            (["GET /v1/chat/completions HTTP/1.1"], 405, "method_not_allowed"),
            (["DELETE /v1/models HTTP/1.1"], 405, "method_not_allowed"),
            (["POST /v1/completions HTTP/1.1", "Content-Type: text/plain"], 415, "unsupported_media_type"),
        ):
            status, _, body = await raw(url, head)
            assert (status, json.loads(body)["error"]["code"]) == (want, code)
        status, _, body = await raw(url, [f"POST {FAR} HTTP/1.1", json_type], b"x" * 1001)
        assert (status, json.loads(body)["error"]["code"]) == (413, "request_too_large")
        chunked = [f"POST {FAR} HTTP/1.1", json_type, "Transfer-Encoding: chunked"]
        status, _, body = await raw(url, chunked, b"3e9\r\n" + b"x" * 1001 + b"\r\n0\r\n\r\n", is_partial=True)
        assert status == 413
        assert running.router.metrics.ended_with_errors() == (0, 3), "the client's mistakes"
        status, fields, _ = await post(url, FAR, CHAT, "X-Request-Id: mine")
        assert (status, fields["x-request-id"]) == (200, "mine")
        assert sent_to(running)[0].attempt.request_id.startswith("mine-")
        mine = "X-Request-Id: mine"
        for path, body in ((FAR, b"{"), (FAR, CHAT | {"n": "x"}), ("/v1/messages", {}), (FAR, b"x" * 1001)):
            status, fields, _ = await post(url, path, body, mine)
            assert (status in (400, 413), fields["x-request-id"]) == (True, "mine")
        for other in ("a b", "x" * 129):
            status, fields, _ = await post(url, FAR, CHAT, f"X-Request-Id: {other}")
            assert (status, "x-request-id" in fields) == (400, False)


@pytest.mark.parametrize("path", [FAR, "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize"])
async def test_a_compressed_body_is_refused_by_the_name_of_its_coding(path):
    async with served() as (running, _):
        for header, coding in (
            ("Content-Encoding: gzip", "gzip"),
            ("Content-Encoding: identity, ZSTD", "zstd"),
            ("Transfer-Encoding: gzip, chunked", "gzip"),
        ):
            body = b"0\r\n\r\n" if "chunked" in header else b"\x1f\x8b"
            head = [f"POST {path} HTTP/1.1", "Content-Type: application/json", header]
            status, _, reply = await raw(running.url, head, body, is_partial="chunked" in header)
            assert status == 415, (path, header)
            name = header.partition(":")[0].lower()
            want = f"{name} {coding!r} is not supported: send the body uncompressed"
            assert json.loads(reply)["error"]["message"] == want
        status, _, _ = await post(running.url, "/tokenize", {"prompt": "a"}, "Content-Encoding: identity")
        assert status == 200


@pytest.mark.long
async def test_openais_client_raises_its_own_errors_and_tries_again_where_that_helps():
    async with served(max_queue_len=1) as (running, client):
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=HI)
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")
        running.script.prefill_hangs = True
        hung = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=HI))
        async with asyncio.timeout(10.0):
            while not running.of("prefill")[0].seen:
                await asyncio.sleep(0.01)
        with pytest.raises(openai.RateLimitError) as refused:
            await client.chat.completions.create(model=MODEL, messages=HI)
        assert refused.value.response.headers["retry-after"] == "1"
        assert (refused.value.code, refused.value.type) == ("rate_limit_exceeded", "rate_limit_error")
        running.script.prefill_hangs = False
        asyncio.get_running_loop().call_later(0.3, hung.cancel)
        answer = await client.with_options(max_retries=3).chat.completions.create(model=MODEL, messages=HI)
        assert answer.choices[0].message.content == "hello world"


async def test_without_workers_it_is_alive_and_not_ready():
    async with served(num_prefill=0) as (running, client):
        assert (await raw(running.url, ["GET /health HTTP/1.1"]))[0] == 200
        for path in ("/ready", "/v1/models"):
            status, fields, _ = await raw(running.url, [f"GET {path} HTTP/1.1"])
            assert (status, fields["retry-after"]) == (503, "1")
        with pytest.raises(openai.InternalServerError) as refused:
            await client.chat.completions.create(model=MODEL, messages=HI)
        assert (refused.value.status_code, refused.value.code) == (503, "no_worker")
        await running.add("prefill", "prefill-9")
        assert (await raw(running.url, ["GET /ready HTTP/1.1"]))[0] == 200


async def test_without_a_template_only_completions():
    async with served(None) as (_, client):
        with pytest.raises(openai.BadRequestError, match="--chat-template"):
            await client.chat.completions.create(model=MODEL, messages=HI)
        assert (await client.completions.create(model=MODEL, prompt="x", max_tokens=64)).choices[
            0
        ].text == "hello world"


async def test_an_error_before_the_first_token_has_its_status_even_in_a_stream():
    async with served() as (running, client):
        running.script.prefill_error = NoWorker("gone", retry_after_s=2.5)
        with pytest.raises(openai.InternalServerError) as refused:
            await client.chat.completions.create(model=MODEL, messages=HI, stream=True)
        assert refused.value.status_code == 503
        assert refused.value.response.headers["retry-after-ms"] == "2500"


@pytest.mark.long
async def test_an_error_later_is_an_event_of_the_stream(monkeypatch):
    async with served(migration=MigrationConfig(max_migrations=0)) as (running, client):
        running.script.decode_error, running.script.decode_error_after = WorkerLost("died"), 4
        running.script.decode_ends_when = asyncio.Event()
        stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True)
        running.script.decode_ends_when.set()  # the answer has begun
        text = ""
        with pytest.raises(openai.APIError) as failed:
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
        assert "hello".startswith(text)
        assert failed.value.code == "worker_lost"
        monkeypatch.setattr(reply_module, "HEADERS_WITHIN_S", 0.05)
        running.script.first_delay_s, running.script.prefill_error = 2.0, NoWorker("late")
        stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True)
        with pytest.raises(openai.APIError, match="late"):
            await anext(aiter(stream))


class SlowReader:
    """Takes what is sent when it is told to."""

    def __init__(self):
        self.is_asked, self.reads, self.sent = asyncio.Event(), asyncio.Event(), []

    async def __call__(self, message):
        self.is_asked.set()
        await self.reads.wait()
        self.sent.append(message["type"].removeprefix("http.response."))


@pytest.mark.parametrize("error", [None, NoWorker("late")])
async def test_late_headers_that_wait_for_a_slow_reader_come_before_the_events(error, monkeypatch):
    monkeypatch.setattr(reply_module, "HEADERS_WITHIN_S", 0.0)
    reader = SlowReader()
    reply = reply_module.Reply(reader)

    async def serve():
        try:
            async with reply.headers_in_time():
                await reader.is_asked.wait()
                if error is not None:
                    raise error
            await reply.event({"type": "first"})
            await reply.end()
        except BatonError as caught:
            await reply.fail(caught)

    task = asyncio.create_task(serve())
    async with asyncio.timeout(20):
        await reader.is_asked.wait()
        for _ in range(20):  # it is at its events by then, were it not for the headers
            await asyncio.sleep(0)
        reader.reads.set()
        await task
    assert reader.sent == ["start", "body", "body"]


async def test_late_headers_wait_for_no_reader_of_a_call_that_is_cancelled(monkeypatch):
    monkeypatch.setattr(reply_module, "HEADERS_WITHIN_S", 0.0)
    reader = SlowReader()

    async def serve():
        async with reply_module.Reply(reader).headers_in_time():
            await asyncio.Event().wait()

    task = asyncio.create_task(serve())
    async with asyncio.timeout(20):
        await reader.is_asked.wait()
        task.cancel()
        await asyncio.wait({task})
    assert task.cancelled() and not reader.sent


@pytest.mark.long
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("when", ["prefill", "decode"])
async def test_a_client_that_leaves_cancels_its_request_at_once(is_stream, when):
    async with served() as (running, client):
        running.script.prefill_hangs = when == "prefill"
        running.script.decode_hangs_after = 3
        task = asyncio.create_task(reading(client, is_stream))
        async with asyncio.timeout(10.0):
            while not all(worker.seen for worker in running.workers) or (
                when == "decode" and running.of("prefill")[0].running()
            ):
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        prefill, decode = await running.idle()
        assert decode[0].cancelled
        assert prefill[0].cancelled == (when == "prefill")
        assert running.router.metrics.total("requests_failed") == 1


async def reading(client, is_stream):
    answer = await client.chat.completions.create(model=MODEL, messages=HI, stream=is_stream)
    if is_stream:
        async for _ in answer:
            pass


@pytest.mark.long
async def test_a_client_that_leaves_in_the_middle_of_its_body_costs_nothing():
    async with served() as (running, _):
        host, port = running.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"POST {FAR} HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{{".encode())
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()
        await asyncio.sleep(0.05)
        assert sent_to(running) == []


async def test_stopping_ends_open_streams():
    async with served() as (running, client):
        running.script.decode_hangs_after = 3
        stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True)
        await anext(aiter(stream))
        await asyncio.wait_for(running.router.stop(0.0), 5)
        await running.idle()
        await stream.close()
        running.router.stop = no_stop


async def no_stop(grace_s):
    """It has been stopped."""


async def test_a_bug_is_a_500_that_says_nothing_of_itself(monkeypatch):
    async with served() as (running, _):
        monkeypatch.setattr(running.router.metrics, "render", lambda: 1 / 0)
        status, _, body = await raw(running.url, ["GET /metrics HTTP/1.1"])
        assert status == 500
        assert json.loads(body)["error"]["code"] == "internal_error"
        assert b"division" not in body


async def test_every_error_has_its_json():
    def leaves(kind):
        return {kind}.union(*map(leaves, kind.__subclasses__()))

    for kind in leaves(BatonError):
        error = kind("words", field="f")
        data = error_data(error)["error"]
        assert data["message"] == "words"
        assert data["param"] == "f"
        assert data["code"].islower()
        assert data["type"] in ("invalid_request_error", "rate_limit_error", "server_error")
    assert error_headers(Overloaded("x", retry_after_s=0.25)) == {"retry-after": "1", "retry-after-ms": "250"}
    assert error_headers(RequestDeadlineExceeded("x")) == {"x-should-retry": "false"}
