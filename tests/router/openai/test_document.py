"""What docs/openai*.md say is backed by tests that exist, and every parameter that is refused has its reason."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import openai
import pytest

from baton.core.errors import InvalidRequest, InvalidSampling
from baton.core.requests import sampling
from baton.core.requests.sampling import SamplingParams
from baton.router import inference
from baton.router.access.message_limits import MAX_REQUEST_ID_LEN, MAX_TENANT_LEN
from baton.router.admission.admission import HIGH, LOW, NORMAL
from baton.router.openai.app import make_app
from baton.router.openai.chat_request import ChatRequest
from baton.router.openai.completions import DEFAULT_MAX_TOKENS, CompletionRequest
from baton.router.openai.document import LIMITS, openapi_document
from baton.router.openai.front import HttpConfig
from baton.router.openai.limits import MAX_BAD_TEXTS
from baton.router.openai.options import HARMLESS, MAX_TOP_LOGPROBS, REFUSED
from baton.tests.router.fakes import TOKENIZER
from baton.tests.router.openai.served import MODEL, served
from baton.tests.router.openai.test_chat import THINKING, report
from baton.tests.router.openai.test_errors import CHAT, FAR, post
from baton.tests.router.openai.test_messages import CALL, events_of

pytestmark = pytest.mark.fast
ROOT = Path(__file__).parents[3]
DOCUMENT = (ROOT / "docs" / "openai.md").read_text()
PARAMETERS = (ROOT / "docs" / "openai-parameters.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PARAMETERS.splitlines()
    if line.startswith("| ") and not line.startswith("| parameter")
]


def test_every_row_names_what_backs_it():
    folders = ("tests/router/openai", "tests/core")
    tests = [path for folder in folders for path in (ROOT / folder).glob("test_*.py")]
    tests.append(ROOT / "tests/e2e/test_openai.py")
    names = {name for path in tests for name in re.findall(r"def (test_\w+)", path.read_text())}
    files = {path.name for path in (*tests, *(ROOT / "router" / "openai").glob("*.py"))}
    assert len(ROWS) >= 30
    for row in ROWS:
        assert len(row) == 4, row
        backing = re.findall(r"`([\w.]+)`", row[3])
        assert row[3] == "the same" or backing, row
        assert set(backing) <= names | files, row


FIELDS = ChatRequest.model_fields.keys() | CompletionRequest.model_fields.keys()
# In the table for what replies hold, or as another way to ask.
BESIDE = {"usage", "finish_reason", "stop_reason", "X-Request-Id"}
# What rows say in numbers, and what the code holds.
NUMBERS = {
    "n": ("1 to 16;", sampling.MAX_CHOICES),
    "max_tokens": ("completions: 16;", DEFAULT_MAX_TOKENS),
    "presence_penalty": ("in [-2, 2]", sampling.MAX_ADDED_PENALTY),
    "stop": ("up to 16 strings", sampling.MAX_STOP_STRINGS),
    "logit_bias": ("up to 1,024 tokens, -100 to 100", (sampling.MAX_LOGIT_BIASES, sampling.MAX_LOGIT_BIAS)),
    "bad_words": ("up to 64 and 4,096", (MAX_BAD_TEXTS, sampling.MAX_ALLOWED_TOKEN_IDS)),
    "top_logprobs": ("up to 20", (sampling.MAX_LOGPROBS, MAX_TOP_LOGPROBS)),
    "cache_salt": ("up to 256 characters", MAX_TENANT_LEN),
    "request_id": ("up to 128 characters", MAX_REQUEST_ID_LEN),
}


def parameters_of(row):
    """Names in a row's first cell, without values: "tool_choice: none" is of tool_choice."""
    return re.findall(r"`([\w-]+)(?:: [^`]+)?`", row[0])


def test_the_table_has_every_parameter_and_no_other():
    named = {name for row in ROWS for name in parameters_of(row)}
    assert len(named) >= 30
    assert named - BESIDE <= FIELDS | REFUSED.keys() | HARMLESS
    parts = {"stream_options", "structured_outputs", "response_format"}  # a row says what is in them
    assert parts <= named
    in_text = {"reasoning_content", "enable_thinking"}
    assert {name for name in FIELDS if f"`{name}`" not in PARAMETERS and f"`{name}:" not in PARAMETERS} <= in_text


def test_rows_say_what_the_code_does_with_a_parameter():
    for row in ROWS:
        for name in set(parameters_of(row)) - BESIDE:
            if row[1].startswith("refused") and "unless" not in row[1]:
                assert name in REFUSED, row
            elif row[1].startswith("without effect"):
                assert name in HARMLESS, row
            elif not row[1].startswith("refused"):
                assert name in FIELDS, row
    told = {name for row in ROWS for name in parameters_of(row)}
    assert {"suffix", "chat_template", "structural_tag"} <= told & REFUSED.keys()


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_the_table_are_those_of_the_code(name):
    words, values = NUMBERS[name]
    [row] = [row for row in ROWS if name in parameters_of(row) and words in row[1]]
    said = [float(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", words)]
    for value in values if isinstance(values, tuple) else (values,):
        assert value in said, row


@pytest.mark.long
def test_the_document_has_the_paths_that_are_served():
    model = SimpleNamespace(name="toy", tokenizer=TOKENIZER, tokenizer_config={})
    front = SimpleNamespace(
        model=model, now_unix_s=lambda: 0.0, authenticator=None, operators=None, metrics=None, config=HttpConfig(port=0)
    )
    made = make_app(front)._app.routes
    routes = {
        (route.path.replace("{name:path}", "{name}"), method.lower())
        for route in made
        for method in route.methods - {"HEAD"}
    }
    document = openapi_document("toy")
    assert routes == {(path, method) for path, methods in document["paths"].items() for method in methods}
    listed = DOCUMENT.partition("## Errors")[0]
    assert all(f"{path.replace('{name}', 'NAME')}`" in listed for path, _ in routes)
    for kind in (ChatRequest, CompletionRequest):
        properties = document["components"]["schemas"][kind.__name__]["properties"]
        assert kind.model_fields.keys() | REFUSED.keys() | HARMLESS == properties.keys()
    jsonschema.Draft202012Validator.check_schema({"$defs": document["components"]["schemas"]})


@pytest.mark.parametrize("name", sorted(LIMITS.keys() & SamplingParams.__dataclass_fields__.keys()))
def test_limits_of_the_document_are_those_of_the_check(name):
    """The edges of each range are good, and what lies beyond is refused."""
    for form, limits in LIMITS[name].items():
        if form not in ("integer", "number") or name in ("top_k", "max_tokens"):
            continue  # -1 and 0 have a meaning over HTTP
        more = {"max_tokens": (1 << 31) - 1} if name == "min_tokens" else {}
        low, high = limits.get("minimum", limits.get("exclusiveMinimum")), limits["maximum"]
        inside = [high] if "exclusiveMinimum" in limits else [low, high]
        outside = [low if "exclusiveMinimum" in limits else low - 1, high + 1]
        for value in inside:
            SamplingParams(**more | {name: value}).validate(300)
        for value in outside:
            with pytest.raises(InvalidSampling):
                SamplingParams(**more | {name: value}).validate(300)


@pytest.mark.long
@pytest.mark.asyncio
async def test_whose_turn_it_is(monkeypatch):
    seen, of = [], inference._priority
    monkeypatch.setattr(inference, "_priority", lambda asked: seen.append(of(asked)) or seen[-1])
    async with served() as (_, client):
        for priority in (None, 0, -1, 5, -(10**20), 10**20):
            more = {"extra_body": {"priority": priority}}
            await client.completions.create(model=MODEL, prompt="x", max_tokens=2, **more)
            await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}], **more)
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(model=MODEL, prompt="x", extra_body={"priority": "high"})
        reply = await client.get("/../openapi.json", cast_to=object)
        assert reply == openapi_document(MODEL)
    assert seen == [turn for turn in (NORMAL, NORMAL, HIGH, LOW, HIGH, LOW) for _ in range(2)]


def test_every_field_of_a_request_is_in_the_document():
    fields = ChatRequest.model_fields.keys() | CompletionRequest.model_fields.keys()
    said = DOCUMENT + PARAMETERS
    assert sorted(name for name in fields if f"`{name}`" not in said and f"`{name}:" not in said) == []


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_built_is_refused_unless_it_asks_for_nothing(name):
    nothing, why = REFUSED[name]
    kind = CompletionRequest if name not in CompletionRequest.model_fields else ChatRequest
    body = {"messages": [{"role": "user", "content": "x"}]} if kind is ChatRequest else {"prompt": "x"}
    for value in nothing:
        kind.model_validate_json(json.dumps(body | {name: value})).refuse_unbuilt()
    with pytest.raises(InvalidRequest) as refused:
        kind.model_validate_json(json.dumps(body | {name: {"some": "thing"}})).refuse_unbuilt()
    assert refused.value.fields["field"] == name
    assert why in refused.value.message


def test_what_changes_nothing_is_not_told_of():
    asked = CompletionRequest.model_validate_json(json.dumps({"prompt": "x", "new": 1} | dict.fromkeys(HARMLESS, "x")))
    asked.refuse_unbuilt()
    assert asked.ignored() == ["new"]


MORE: tuple[dict, ...] = (
    {},
    {"n": 2, "stop": "w"},
    {"logprobs": 2},
    {"prompt_logprobs": 1, "return_token_ids": True, "logprobs": 0},
    {"echo": True, "logprobs": 1, "return_tokens_as_token_ids": True},
    {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"stream": True, "logprobs": 1, "return_token_ids": True},
    {"stream": True, "max_tokens": 5000},
    {"temperature": "hot"},
    {"model": "other"},
)


def fits(document, path, status, media_type, data):
    content = document["paths"][path]["post"]["responses"][str(status)]["content"][media_type]
    schema = content.get("x-events", content["schema"])
    if status == 200 and data.get("error"):
        schema = {"$ref": "#/components/schemas/Error"}
    jsonschema.Draft202012Validator(schema | {"components": document["components"]}).validate(data)


@pytest.mark.long
@pytest.mark.asyncio
async def test_replies_are_those_of_the_document():
    document = openapi_document(MODEL)
    async with served() as (running, _):
        running.script.logprobs = report
        for path, base in (("/v1/completions", {"prompt": "x"}), (FAR, {"messages": CHAT["messages"]})):
            for more in MORE:
                if path == FAR:
                    if "echo" in more:
                        continue
                    if "logprobs" in more:
                        more = more | {"logprobs": True, "top_logprobs": more["logprobs"]}
                status, fields, data = await post(running.url, path, base | more)
                media_type = fields["content-type"].partition(";")[0]
                if isinstance(data, bytes):
                    events = data.decode().replace("\r\n", "\n").split("data: ")[1:]
                    assert "[DONE]" in events[-1]
                    for event in events[:-1]:
                        fits(document, path, status, media_type, json.loads(event.partition("\n\n")[0]))
                else:
                    fits(document, path, status, media_type, data)
        for path, body in (("/tokenize", {"prompt": "x", "return_token_strs": True}), ("/detokenize", {"tokens": [1]})):
            status, _, data = await post(running.url, path, body)
            fits(document, path, status, "application/json", data)


HI = {"messages": CHAT["messages"], "max_tokens": 9}
OTHERS: dict[str, tuple[dict, ...]] = {
    "/v1/chat/completions/batch": (
        {"messages": [CHAT["messages"]] * 2},
        {"logprobs": True, "return_token_ids": True},
        {"stream": True},
    ),
    "/v1/messages": (HI, {}, {"stream": True}, {"stream": True, "max_tokens": 5000}, {"stop_sequences": [""]}),
    "/v1/messages/count_tokens": (HI, {}, {"messages": []}),
    "/v1/responses": (
        {"input": "hi"},
        {},
        {"top_logprobs": 1, "stream": True},
        {"stream": True, "max_output_tokens": 5000},
        {"n": 2},
    ),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("path", OTHERS)
@pytest.mark.long
async def test_replies_in_other_words_are_those_of_the_document(path):
    document = openapi_document(MODEL)
    base, *others = OTHERS[path]
    async with served(THINKING) as (running, _):
        running.script.answer, running.script.logprobs = f"so\n</think>\nhello {CALL}", report
        for more in others:
            status, fields, data = await post(running.url, path, base | more)
            media_type = fields["content-type"].partition(";")[0]
            for one in events_of(data) if isinstance(data, bytes) else [data]:
                fits(document, path, status, media_type, one)
