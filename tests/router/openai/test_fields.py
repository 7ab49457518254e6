"""Fields that clients of vLLM, SGLang and llama.cpp send, and keys that they look for in replies."""

import json
from importlib import metadata

import openai
import pytest

from baton.core.build import NO_VERSION
from baton.core.errors import BatonError
from baton.core.requests.sampling import SamplingParams
from baton.proto import admin_pb2, admin_pb2_grpc
from baton.proto.wire import sampling_from_proto
from baton.router.openai.chat_request import ChatRequest
from baton.router.openai.completions import CompletionRequest
from baton.router.openai.document import docs_page, openapi_document
from baton.router.openai.reasoning import ReasoningCount
from baton.tests.core.byte_tokenizers import byte_tokenizer
from baton.tests.router.fakes import TOKENIZER
from baton.tests.router.openai.served import MODEL, prompt_of, sent_to, served
from baton.tests.router.openai.test_chat import THINKING, chat, report
from baton.tests.router.openai.test_chat import streamed as streamed_chat
from baton.tests.router.openai.test_completions import complete, streamed
from baton.tests.router.openai.test_errors import raw

pytestmark = pytest.mark.fast


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("stop", "reason", "texts"),
    [
        ({"stop": ["zz", "wor", "o w"]}, "o w", ("hell", "hello w")),
        ({"extra_body": {"stop_token_ids": TOKENIZER.encode("w")}}, TOKENIZER.encode("w")[0], ("hello ", "hello w")),
        ({}, None, ("hello world", "hello world")),
    ],
)
@pytest.mark.long
async def test_what_ended_an_answer(stop, reason, texts):
    async with served() as (running, client):
        for include, text in zip((False, True), texts, strict=True):
            end = running.script.answer.index(texts[1]) + len(texts[1])
            running.script.answer = "hello world"[:end]
            more = {**stop, "extra_body": {**stop.get("extra_body", {}), "include_stop_str_in_output": include}}
            for choice in ((await complete(client, **more)).choices[0], (await chat(client, **more)).choices[0]):
                said = choice.text if hasattr(choice, "text") else choice.message.content
                assert (said, choice.stop_reason) == (text, reason)
            events = [event.choices[0] for event in await streamed(client, **more)]
            assert ("".join(event.text for event in events), events[-1].stop_reason) == (text, reason)
            events = [event.choices[0] for event in await streamed_chat(client, **more)]
            assert ("".join(event.delta.content or "" for event in events), events[-1].stop_reason) == (text, reason)


@pytest.mark.asyncio
async def test_keys_that_nobody_asked_for_are_null():
    async with served() as (_, client):
        answer = (await complete(client)).model_dump()
        beside = ("service_tier", "system_fingerprint", "kv_transfer_params")
        assert [answer[name] for name in beside] == [None] * 3
        found = [
            answer["choices"][0][name] for name in ("stop_reason", "token_ids", "prompt_token_ids", "prompt_logprobs")
        ]
        assert found == [None] * 4
        answer = (await chat(client)).model_dump()
        assert [answer[name] for name in (*beside, "prompt_logprobs", "prompt_token_ids")] == [None] * 5
        choice = answer["choices"][0]
        assert [choice[name] for name in ("stop_reason", "token_ids")] == [None] * 2
        assert [choice["message"][name] for name in ("refusal", "annotations", "audio", "function_call")] == [None] * 4


@pytest.mark.asyncio
@pytest.mark.long
async def test_tokens_of_thoughts_are_counted():
    async with served(THINKING) as (running, client):
        running.script.answer = "so\nso\n</think>\n\nyes"
        answer = await chat(client)
        message, usage = answer.choices[0].message, answer.usage
        assert (message.reasoning, message.reasoning_content) == ("so\nso",) * 2
        assert usage.completion_tokens_details.reasoning_tokens == len("so\nso\n"), "a token a byte here"
        deltas = [event.choices[0].delta for event in await streamed_chat(client)]
        assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == "so\nso"
        running.script.answer = "so"
        assert (await chat(client)).usage.completion_tokens_details.reasoning_tokens == 2, "a thought that is cut"
    async with served() as (_, client):
        assert (await chat(client)).usage.completion_tokens_details is None


@pytest.mark.parametrize(
    ("text", "is_open", "num"),
    [
        ("ab</think>c", True, 2),
        ("<think>ab</think>c", False, 2),
        ("  <think>ab", False, 2),
        ("ab</think>", False, 0),
        ("a</thin", True, 7),
    ],
)
def test_thoughts_are_counted_between_the_tags(text, is_open, num):
    count = ReasoningCount(byte_tokenizer().stream(), is_open=is_open)
    for token_id in text.encode():
        count.push([token_id])
    assert count.num_tokens == num


@pytest.mark.asyncio
async def test_the_chosen_token_is_the_first_of_the_likeliest():
    async with served() as (running, client):
        running.script.logprobs = unlikely
        logprobs = (await complete(client, logprobs=2)).choices[0].logprobs
        assert [next(iter(top)) for top in logprobs.top_logprobs] == logprobs.tokens


def unlikely(token_id):
    made = report(token_id)
    made.logprob, made.top_token_ids[0] = -3.0, (token_id + 1) % 256
    return made


@pytest.mark.asyncio
async def test_any_role_goes_to_the_template():
    async with served() as (running, client):
        await chat(client, [{"role": "king", "content": "x"}, {"role": "function", "name": "f", "content": "y"}])
        assert prompt_of(sent_to(running)[0]).startswith("<king>x\n<function>y\n")


@pytest.mark.asyncio
async def test_as_many_are_made_as_are_returned():
    async with served() as (_, client):
        assert len((await complete(client, n=2, best_of=2)).choices) == 2
        assert len((await complete(client, best_of=1)).choices) == 1


@pytest.mark.asyncio
async def test_a_prompt_is_cut_if_asked():
    async with served() as (running, client):
        answer = await complete(client, "0123456789", echo=True, extra_body={"truncate_prompt_tokens": 4})
        assert (prompt_of(sent_to(running)[-1]), answer.usage.prompt_tokens) == ("6789", 4)
        assert answer.choices[0].text == "6789hello world"
        await complete(client, "x" * 1990 + "0123456789", max_tokens=990, extra_body={"truncate_prompt_tokens": -1})
        assert prompt_of(sent_to(running)[-1]) == "0123456789"
        for length in (999, 1000, 1001, 5000):
            await complete(client, TOKENIZER.encode("x") * length, extra_body={"truncate_prompt_tokens": 4})
            assert prompt_of(sent_to(running)[-1]) == "xxxx", length
        for prompt in ("x" * 5000, TOKENIZER.encode("x") * 5000):  # the same words whichever way it came
            for asked, length in ((10**9, 5000), (1234, 1234)):
                with pytest.raises(openai.BadRequestError, match=f"too long: it has {length} tokens"):
                    await complete(client, prompt, extra_body={"truncate_prompt_tokens": asked})
        await chat(client, extra_body={"truncate_prompt_tokens": 11})
        assert prompt_of(sent_to(running)[-1]) == "<assistant>"


@pytest.mark.asyncio
async def test_special_tokens_are_shown_if_asked():
    async with served() as (running, client):
        running.script.answer = "ab<eos>"
        more = {"ignore_eos": True, "max_tokens": 3}
        assert (await complete(client, extra_body=more)).choices[0].text == "ab"
        shown = await complete(client, extra_body=more | {"skip_special_tokens": False})
        assert shown.choices[0].text == "ab<eos>"


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CONSTRAINTS = {
    # name: a value, and the kind of grammar that it is read as; None: it is refused
    "regex": ("a+", "regex"),
    "ebnf": ('root ::= "a"', "grammar"),
    "grammar": ('root ::= "a"', "grammar"),
    "guided_json": (SCHEMA, "json_schema"),
    "guided_regex": ("a+", "regex"),
    "guided_choice": (["a", "b"], "regex"),
    "guided_grammar": ('root ::= "a"', "grammar"),
    "structured_outputs": ({"regex": "a+"}, "regex"),
    "response_format": ({"type": "json_object", "schema": SCHEMA}, "json_schema"),
    "json_schema": ("{}", None),
    "structural_tag": ({"structures": []}, None),
    "guided_json_object": (True, None),
    "guided_whitespace_pattern": (" ?", None),
    "guided_decoding": ({"regex": "a+"}, None),
    "guided_something_new": ("a+", None),
    "format": ("json", None),
    "output_schema": (SCHEMA, None),
    "jsonschema": (SCHEMA, None),
    "lark_grammar": ("x", None),
    "regex_pattern": ("a+", None),
}


@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_no_constraint_is_ignored(name, kind):
    value, form = CONSTRAINTS[name]
    body = {"messages": [{"role": "user", "content": "x"}]} if kind is ChatRequest else {"prompt": "x"}
    asked = kind.model_validate_json(json.dumps(body | {name: value}))
    assert asked.ignored() == [] or form is None
    if form is None:
        with pytest.raises(BatonError, match=name):
            asked.refuse_unbuilt()
    else:
        asked.refuse_unbuilt()
        grammar = sampling_from_proto(asked.sampling(TOKENIZER.encode)).grammar
        assert grammar.kind == form
    kind.model_validate_json(json.dumps(body | {name: None})).refuse_unbuilt()


@pytest.mark.parametrize("part", [{"structural_tag": "{}"}, {"whitespace_pattern": " "}, {"pattern": "a"}])
def test_no_part_of_a_constraint_is_ignored(part):
    body = {"prompt": "x", "structured_outputs": {"regex": "a"} | part}
    with pytest.raises(BatonError, match=next(iter(part))):
        CompletionRequest.model_validate_json(json.dumps(body)).refuse_unbuilt()


def test_new_sampling_values_travel():
    asked = CompletionRequest(prompt="x", include_stop_str_in_output=True, skip_special_tokens=False)
    made = sampling_from_proto(asked.sampling(TOKENIZER.encode))
    assert (made.include_stop_str_in_output, made.skip_special_tokens) == (True, False)
    assert SamplingParams.from_data(made.as_data()) == made


@pytest.mark.asyncio
async def test_what_a_server_says_of_itself():
    async with served() as (running, _):
        for method in ("GET", "POST"):
            assert (await raw(running.url, [f"{method} /ping HTTP/1.1"]))[0] == 200
        status, _, body = await raw(running.url, ["GET /version HTTP/1.1"])
        assert (status, json.loads(body)) == (200, {"version": metadata.version("baton-pd")})
        assert json.loads((await raw(running.url, ["GET /load HTTP/1.1"]))[2]) == {"server_load": 0}
        status, fields, body = await raw(running.url, ["GET /docs HTTP/1.1"])
        assert (status, fields["content-type"]) == (200, "text/html; charset=utf-8")
        assert body.decode() == docs_page(openapi_document(MODEL))


@pytest.mark.asyncio
async def test_a_router_that_runs_does_not_take_the_version_of_an_installation_that_came_later(monkeypatch):
    async with served() as (running, _):
        runs = metadata.version("baton-pd")
        monkeypatch.setattr("importlib.metadata.version", lambda _: "99.0")
        status, _, body = await raw(running.url, ["GET /version HTTP/1.1"])
        assert (status, json.loads(body)) == (200, {"version": runs})
        told = await admin_pb2_grpc.AdminStub(running.channel).Status(admin_pb2.StatusRequest())
        assert told.version == runs


@pytest.mark.asyncio
async def test_a_router_serves_from_sources_that_were_never_installed(monkeypatch):
    def no_package(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", no_package)
    async with served() as (running, _):
        status, _, body = await raw(running.url, ["GET /version HTTP/1.1"])
        assert (status, json.loads(body)) == (200, {"version": NO_VERSION})
        told = await admin_pb2_grpc.AdminStub(running.channel).Status(admin_pb2.StatusRequest())
        assert told.version == NO_VERSION


def test_the_page_names_every_path_and_parameter_and_loads_nothing():
    document = openapi_document("a<b>")
    page = docs_page(document)
    assert "<b>" not in page and "a&lt;b&gt;" in page
    assert not [part for part in ("<script", "http://", "https://", "src=") if part in page]
    for path in document["paths"]:
        assert f" {path}</code>" in page
    for name in (*ChatRequest.model_fields, *CompletionRequest.model_fields):
        assert f"<code>{name}</code>" in page


@pytest.mark.asyncio
@pytest.mark.parametrize(("allowed", "is_allowed"), [((), False), (("https://a.example",), True), (("*",), True)])
@pytest.mark.long
async def test_web_pages_may_call_if_their_origin_is_allowed(allowed, is_allowed):
    asks = ["Origin: https://a.example", "Access-Control-Request-Method: POST"]
    more = ["Access-Control-Request-Headers: authorization,content-type"]
    async with served(http={"allowed_origins": allowed}) as (running, _):
        status, fields, _ = await raw(running.url, ["OPTIONS /v1/chat/completions HTTP/1.1", *asks, *more])
        assert (status == 200, "access-control-allow-origin" in fields) == (is_allowed, is_allowed)
        status, fields, _ = await raw(running.url, ["GET /v1/models HTTP/1.1", "Origin: https://a.example"])
        assert (status, "access-control-allow-origin" in fields) == (200, is_allowed)
        status, fields, _ = await raw(running.url, ["GET /v1/models HTTP/1.1", "Origin: https://b.example"])
        assert fields.get("access-control-allow-origin") == ("*" if "*" in allowed else None)
