"""`/openapi.json`: every path, made of the models that read requests and of the tables that refuse, so neither drifts.

What a model cannot say, ranges of numbers and what is refused by name, comes from `core.requests.sampling` and
`options`. It describes; nothing is validated by it.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from pydantic.json_schema import models_json_schema

from baton.core.requests.sampling import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIASES,
    MAX_STOP_STRING_LEN,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    RANGES,
    SamplingParams,
)
from baton.router.openai.batches import BatchRequest
from baton.router.openai.chat_request import ChatRequest
from baton.router.openai.completion_request import CompletionRequest
from baton.router.openai.messages_request import CountTokensRequest, MessagesRequest
from baton.router.openai.options import HARMLESS, MAX_TOP_LOGPROBS, REFUSED
from baton.router.openai.reply_schemas import REPLIES, Schema, ref
from baton.router.openai.responses_request import ResponsesRequest
from baton.router.openai.tokens import DetokenizeRequest, TokenizeRequest

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
REQUESTS: Final = (
    ChatRequest,
    BatchRequest,
    CompletionRequest,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
_MAX_INT: Final = (1 << 31) - 1
_STOP: Final = {"minLength": 1, "maxLength": MAX_STOP_STRING_LEN}


def _numbers(name: str, **changed: int) -> Mapping[str, Schema]:
    """The schema of a sampling parameter that is one number, of its type."""
    allowed = RANGES[name]
    low = {"exclusiveMinimum" if allowed.above_low else "minimum": allowed.low}
    is_integer = "int" in str(SamplingParams.__annotations__[name])
    return {"integer" if is_integer else "number": low | {"maximum": min(allowed.high, _MAX_INT)} | changed}


# By type of the value, as a field may have several.
LIMITS: Final[Mapping[str, Mapping[str, Schema]]] = {
    **{name: _numbers(name) for name in RANGES if name != "seed"},  # any 64-bit number is a seed over HTTP
    "max_tokens": _numbers("max_tokens", minimum=0),  # 0 with `echo`
    "max_completion_tokens": _numbers("max_tokens"),
    "top_k": _numbers("top_k", minimum=-1),  # vLLM's other way of saying: all
    "top_logprobs": {"integer": {"minimum": 0, "maximum": MAX_TOP_LOGPROBS}},
    "stop": {"string": _STOP, "array": {"maxItems": MAX_STOP_STRINGS, "items": {"type": "string"} | _STOP}},
    "stop_token_ids": {"array": {"maxItems": MAX_STOP_TOKEN_IDS, "items": {"type": "integer", "minimum": 0}}},
    "allowed_token_ids": {
        "array": {"minItems": 1, "maxItems": MAX_ALLOWED_TOKEN_IDS, "items": {"type": "integer", "minimum": 0}}
    },
    "bad_words": {"array": {"maxItems": MAX_BAD_WORDS}},
    "logit_bias": {
        "object": {
            "maxProperties": MAX_LOGIT_BIASES,
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -MAX_LOGIT_BIAS, "maximum": MAX_LOGIT_BIAS},
        }
    },
    "guided_choice": {"array": {"minItems": 1}},
    "request_id": {"string": {"pattern": "^[!-~]{1,128}$"}},
}
_ERRORS: Final = {
    HTTPStatus.BAD_REQUEST: "the request must change; `param` says where",
    HTTPStatus.UNAUTHORIZED: "no API key, or none that is good now",
    HTTPStatus.FORBIDDEN: "the key is of another tenant than the one that was named",
    HTTPStatus.NOT_FOUND: "another model's name",
    HTTPStatus.METHOD_NOT_ALLOWED: "this path has another method",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "the body is too large",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "the body is no JSON by its own word",
    HTTPStatus.UNPROCESSABLE_ENTITY: "workers died of this request; it is refused for a while",
    HTTPStatus.TOO_MANY_REQUESTS: "as many answers are under way as may be; `Retry-After` says when to come again",
    HTTPStatus.SERVICE_UNAVAILABLE: "no worker can serve it now; `Retry-After` says when to come again",
    HTTPStatus.GATEWAY_TIMEOUT: "the request's deadline has passed",
}
_LOOK: Final = (HTTPStatus.UNAUTHORIZED, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.SERVICE_UNAVAILABLE)


def openapi_document(model: str) -> dict[str, Any]:
    """The document of a router that serves `model`."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": "v1",
            "summary": f"OpenAI's API, as it is served for the model {model}",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{}, {"key": []}],
        "paths": _paths(),
        "components": {
            "schemas": _request_schemas(model) | REPLIES,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "if the router asks for one"}
            },
        },
    }


def _paths() -> dict[str, Schema]:
    paths: dict[str, Schema] = {}
    for path, method in _REPLIES:
        paths.setdefault(path, {})[method] = _operation(path, method)
    return paths


def _json(name: str) -> Schema:
    return {JSON: {"schema": ref(name)}}


def _streamed(whole: str, chunk: str, last: str = "data: [DONE]") -> Schema:
    about = f"events of `data: ` and one JSON each, {chunk} or Error; the last is `{last}`"
    events = {"schema": {"type": "string"}, "x-events": ref(chunk)}
    return _json(whole) | {EVENTS: events | {"example": f'data: {{"id": "..."}}\n\n{last}\n\n', "x-about": about}}


_REPLIES: Final[Mapping[tuple[str, str], tuple[str, Schema, type | None]]] = {
    ("/v1/chat/completions", "post"): (
        "Answer a conversation.",
        _streamed("ChatCompletion", "ChatCompletionChunk"),
        ChatRequest,
    ),
    ("/v1/completions", "post"): ("Continue texts.", _streamed("Completion", "CompletionChunk"), CompletionRequest),
    ("/v1/chat/completions/batch", "post"): (
        "Answer several conversations.",
        _json("ChatCompletion"),
        BatchRequest,
    ),
    ("/v1/responses", "post"): (
        "Answer a conversation, in the words of OpenAI's newer API.",
        _streamed("Response", "ResponseEvent", "event: response.completed"),
        ResponsesRequest,
    ),
    ("/v1/messages", "post"): (
        "Answer a conversation, in Anthropic's words.",
        _streamed("Message", "MessageEvent", "event: message_stop"),
        MessagesRequest,
    ),
    ("/v1/messages/count_tokens", "post"): (
        "How many tokens a conversation's prompt has.",
        _json("TokenCount"),
        CountTokensRequest,
    ),
    ("/v1/models", "get"): ("The one model.", _json("Models"), None),
    ("/v1/models/{name}", "get"): ("The one model, by its name.", _json("Model"), None),
    ("/tokenize", "post"): ("Token ids of a text or a conversation.", _json("TokenizeReply"), TokenizeRequest),
    ("/detokenize", "post"): ("The text of token ids.", _json("DetokenizeReply"), DetokenizeRequest),
    ("/tokenizer_info", "get"): ("The tokenizer's configuration.", _json("TokenizerInfo"), None),
    ("/health", "get"): ("This process answers.", _json("State"), None),
    ("/ready", "get"): ("Both roles have a live worker.", _json("State"), None),
    ("/metrics", "get"): ("Prometheus' text format.", {"text/plain": {"schema": {"type": "string"}}}, None),
    ("/openapi.json", "get"): ("This document.", {JSON: {"schema": {"type": "object"}}}, None),
    ("/docs", "get"): ("This document as a page.", {"text/html": {"schema": {"type": "string"}}}, None),
    ("/ping", "get"): ("This process answers.", _json("State"), None),
    ("/ping", "post"): ("This process answers.", _json("State"), None),
    ("/version", "get"): ("Which release runs here.", _json("Version"), None),
    ("/load", "get"): ("How many answers are under way.", _json("Load"), None),
}


def _operation(path: str, method: str) -> Schema:
    summary, content, body = _REPLIES[path, method]
    statuses = list(_ERRORS) if body is not None else [*_LOOK, HTTPStatus.NOT_FOUND] if "{" in path else list(_LOOK)
    replies: dict[str, Schema] = {"200": {"description": "as asked", "content": content}}
    for status in sorted(statuses):
        replies[str(int(status))] = {"description": _ERRORS[status], "content": _json("Error")}
    operation: Schema = {"summary": summary, "operationId": f"{method}_{path.strip('/')}", "responses": replies}
    if body is not None:
        operation["requestBody"] = {"required": True, "content": _json(body.__name__)}
    if "{name}" in path:
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation


def _request_schemas(model: str) -> dict[str, Schema]:
    made = models_json_schema([(kind, "validation") for kind in REQUESTS], ref_template="#/components/schemas/{model}")
    schemas: dict[str, Schema] = made[1]["$defs"]
    for kind in (ChatRequest, BatchRequest, CompletionRequest, TokenizeRequest):
        properties = schemas[kind.__name__]["properties"]
        for name, limits in LIMITS.items():
            for form in properties.get(name, {}).get("anyOf", ()):
                form |= limits.get(form.get("type", ""), {})
        for name, (nothing, why) in REFUSED.items() if kind is not TokenizeRequest else ():
            properties.setdefault(name, {"enum": list(nothing), "description": f"anything else is refused: {why}"})
        for name in sorted(HARMLESS):
            properties.setdefault(name, {"description": "without effect"})
    for name in [kind.__name__ for kind in REQUESTS]:
        about = "the one that is served; another name is not found"
        schemas[name]["properties"]["model"] = {"enum": [model, "", None], "description": about}
    return schemas
