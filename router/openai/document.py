"""Builds `/openapi.json` from the request models and the tables of refused parameters, so that neither can drift.

Ranges of numbers and refusals by name, which models cannot express, come from `core.requests.sampling` and `options`.
The document only describes; nothing is validated by it.
"""

import functools
from collections.abc import Iterator, Mapping
from html import escape
from http import HTTPStatus
from typing import Any, Final

from pydantic.json_schema import models_json_schema

from baton.core.requests.sampling import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIASES,
    MAX_STOP_STRING_LEN,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    RANGES,
    SamplingParams,
)
from baton.router.openai.chat_request import ChatRequest
from baton.router.openai.chats import BatchRequest
from baton.router.openai.completions import CompletionRequest
from baton.router.openai.limits import MAX_BAD_TEXTS
from baton.router.openai.messages import CountTokensRequest, MessagesRequest
from baton.router.openai.options import HARMLESS, MAX_TOP_LOGPROBS, REFUSED
from baton.router.openai.responses import ResponsesRequest
from baton.router.openai.tokens import DetokenizeRequest, TokenizeRequest

_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "code{background:#8882;padding:.1em .3em;border-radius:3px}summary{cursor:pointer;margin:.4rem 0}"
    "table{border-collapse:collapse;margin:.5rem 0 1rem}"
    "td,th{text-align:left;vertical-align:top;padding:.2rem .8rem .2rem 0}"
)


def docs_page(document: Mapping[str, Any]) -> str:
    """Render an OpenAPI document as a page."""
    info = document["info"]
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(info['title'])}</title>",
        f"<style>{_STYLE}</style>",
        f"<h1>{escape(info['title'])}</h1><p>{escape(info['summary'])}.",
        'For programs: <a href="openapi.json">openapi.json</a>.</p>',
    ]
    schemas = document["components"]["schemas"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts += _operation(path, method, operation, schemas)
    return "\n".join([*parts, "</html>\n"])


def _operation(path: str, method: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    yield f"<details><summary><code>{method.upper()} {escape(path)}</code> {escape(operation['summary'])}</summary>"
    body = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if body is not None:
        schema = schemas[body["schema"]["$ref"].rpartition("/")[2]]
        needed = schema.get("required", ())
        yield "<table><tr><th>parameter<th>type<th>"
        for name, about in schema["properties"].items():
            note = "required" if name in needed else about.get("description", "")
            yield f"<tr><td><code>{escape(name)}</code><td>{escape(_kind(about))}<td>{escape(note)}"
        yield "</table>"
    yield "<table>"
    for status, reply in operation["responses"].items():
        yield f"<tr><td>{escape(status)}<td>{escape(reply['description'])}"
    yield "</table></details>"


def _kind(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(kind for kind in map(_kind, schema["anyOf"]) if kind != "null")
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return str(schema.get("type", ""))


Schema = dict[str, Any]

TEXT: Final[Schema] = {"type": "string"}
NUMBER: Final[Schema] = {"type": "number"}
COUNT: Final[Schema] = {"type": "integer", "minimum": 0}


def ref(name: str) -> Schema:
    """Refer to another schema of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


def record(required: Schema, optional: Schema | None = None) -> Schema:
    """Schema of an object with these members and no others."""
    return {
        "type": "object",
        "properties": required | (optional or {}),
        "required": list(required),
        "additionalProperties": False,
    }


def many(item: Schema) -> Schema:
    """Schema of an array."""
    return {"type": "array", "items": item}


def or_null(schema: Schema) -> Schema:
    """Schema that also allows null."""
    return {"anyOf": [schema, {"type": "null"}]}


_TOKEN_IDS = many(COUNT)
_FINISH = or_null({"enum": ["stop", "length", "tool_calls"]})
_STOP_REASON = or_null({"anyOf": [TEXT, COUNT]})
_NULL: Final[Schema] = {"type": "null"}
# Fields that vLLM may fill and Baton never does: null, so that clients find the keys.
_NOTHING_ELSE: Final[Schema] = {"service_tier": _NULL, "system_fingerprint": _NULL, "kv_transfer_params": _NULL}
_ENVELOPE: Final[Schema] = {"id": TEXT, "created": COUNT, "model": TEXT}
_RANKED = {"type": "object", "additionalProperties": ref("RankedToken")}
_PROMPT_LOGPROBS = many(or_null(_RANKED))
_CALL = record({"id": TEXT, "type": {"const": "function"}, "function": record({"name": TEXT, "arguments": TEXT})})
_CALL_DELTA = record(
    {"index": COUNT, "function": record({"arguments": TEXT}, {"name": TEXT})},
    {"id": TEXT, "type": {"const": "function"}},
)
_MESSAGE = record(
    {"role": {"const": "assistant"}, "content": or_null(TEXT), "refusal": {"type": "null"}},
    {
        "tool_calls": many(_CALL),
        "reasoning": or_null(TEXT),
        "reasoning_content": or_null(TEXT),
        "annotations": _NULL,
        "audio": _NULL,
        "function_call": _NULL,
    },
)
_DELTA = record(
    {},
    {
        "role": {"const": "assistant"},
        "content": TEXT,
        "reasoning": TEXT,
        "reasoning_content": TEXT,
        "tool_calls": many(_CALL_DELTA),
    },
)
_CHAT_LOGPROBS = or_null(record({"content": many(ref("TokenLogprob")), "refusal": {"type": "null"}}))
_COMPLETION_LOGPROBS = or_null(
    record(
        {
            "tokens": many(TEXT),
            "token_logprobs": many(or_null(NUMBER)),
            "top_logprobs": many(or_null({"type": "object", "additionalProperties": NUMBER})),
            "text_offset": many(COUNT),
        }
    )
)
_TOKEN = {"token": TEXT, "logprob": NUMBER, "bytes": many({"type": "integer", "minimum": 0, "maximum": 255})}
_CHAT_END = {"logprobs": _CHAT_LOGPROBS, "finish_reason": _FINISH}
_COMPLETION_CHOICE = record(
    {
        "index": COUNT,
        "text": TEXT,
        "logprobs": _COMPLETION_LOGPROBS,
        "finish_reason": _FINISH,
        "stop_reason": _STOP_REASON,
        "token_ids": or_null(_TOKEN_IDS),
        "prompt_token_ids": or_null(_TOKEN_IDS),
    },
    {"prompt_logprobs": or_null(_PROMPT_LOGPROBS)},
)


def _type(name: str) -> Schema:
    return {"type": {"const": name}}


_STOP_REASONS: Final = ["end_turn", "max_tokens", "stop_sequence", "tool_use"]
_BLOCK: Final[Schema] = {
    "anyOf": [
        record(_type("text") | {"text": TEXT}),
        record(_type("thinking") | {"thinking": TEXT, "signature": TEXT}),
        record(_type("tool_use") | {"id": TEXT, "name": TEXT, "input": {"type": "object"}}),
    ]
}
_BLOCK_DELTA: Final[Schema] = {
    "anyOf": [
        record(_type("text_delta") | {"text": TEXT}),
        record(_type("thinking_delta") | {"thinking": TEXT}),
        record(_type("input_json_delta") | {"partial_json": TEXT}),
    ]
}
_MESSAGE_USAGE: Final[Schema] = record(
    {
        "input_tokens": COUNT,
        "cache_creation_input_tokens": COUNT,
        "cache_read_input_tokens": COUNT,
        "output_tokens": COUNT,
    }
)
_MESSAGE_END: Final[Schema] = {"stop_reason": or_null({"enum": _STOP_REASONS}), "stop_sequence": or_null(TEXT)}
_MESSAGE_OF_BLOCKS: Final[Schema] = record(
    {"id": TEXT, **_type("message"), "role": {"const": "assistant"}, "model": TEXT, "content": many(_BLOCK)}
    | _MESSAGE_END
    | {"usage": _MESSAGE_USAGE}
)


def _numbered(*names: str) -> Schema:
    return {"type": {"enum": list(names)}, "sequence_number": COUNT}


_TOKEN_LOGPROBS: Final = many(ref("TokenLogprob"))
_PART: Final[Schema] = {
    "anyOf": [
        record(_type("output_text") | {"text": TEXT, "annotations": many({}), "logprobs": _TOKEN_LOGPROBS}),
        record(_type("reasoning_text") | {"text": TEXT}),
    ]
}
_ABOUT_ITEM: Final[Schema] = {"id": TEXT, "status": {"enum": ["in_progress", "completed", "incomplete"]}}
_ITEM: Final[Schema] = {
    "anyOf": [
        record(_ABOUT_ITEM | _type("message") | {"role": {"const": "assistant"}, "content": many(_PART)}),
        record(
            _ABOUT_ITEM | _type("reasoning") | {"summary": many({}), "content": many(_PART), "encrypted_content": _NULL}
        ),
        record(_ABOUT_ITEM | _type("function_call") | {"call_id": TEXT, "name": TEXT, "arguments": TEXT}),
    ]
}
_AT: Final[Schema] = {"output_index": COUNT}
_IN_ITEM: Final[Schema] = _AT | {"item_id": TEXT}
_IN_PART: Final[Schema] = _IN_ITEM | {"content_index": COUNT}
_ECHOED: Final[Schema] = {
    "background": {"const": False},
    "instructions": _NULL,
    "max_output_tokens": or_null(COUNT),
    "metadata": {"type": "object"},
    "parallel_tool_calls": {"type": "boolean"},
    "previous_response_id": _NULL,
    "reasoning": record({"effort": or_null(TEXT), "summary": _NULL}),
    "store": {"const": False},
    "temperature": or_null(NUMBER),
    "text": record({"format": record({"type": TEXT})}),
    "tool_choice": {"anyOf": [TEXT, record({"type": TEXT, "name": or_null(TEXT)})]},
    "tools": many({}),
    "top_logprobs": COUNT,
    "top_p": or_null(NUMBER),
    "truncation": TEXT,
}
_RESPONSE: Final[Schema] = record(
    {
        "id": TEXT,
        "object": {"const": "response"},
        "created_at": COUNT,
        "model": TEXT,
        "status": {"enum": ["in_progress", "completed", "incomplete"]},
        "error": _NULL,
        "incomplete_details": or_null(record({"reason": {"const": "max_output_tokens"}})),
        "output": many(_ITEM),
        "usage": or_null(
            record(
                {
                    "input_tokens": COUNT,
                    "input_tokens_details": record({"cached_tokens": COUNT}),
                    "output_tokens": COUNT,
                    "output_tokens_details": record({"reasoning_tokens": COUNT}),
                    "total_tokens": COUNT,
                }
            )
        ),
    }
    | _ECHOED
)


def _object(name: str) -> Schema:
    return {"object": {"const": name}}


REPLIES: Final[dict[str, Schema]] = {
    "Error": record(
        {"error": record({"message": TEXT, "type": TEXT, "param": or_null(TEXT), "code": TEXT})},
        {"type": {"const": "error"}, "sequence_number": COUNT},
    ),
    "Usage": record(
        {
            "prompt_tokens": COUNT,
            "completion_tokens": COUNT,
            "total_tokens": COUNT,
            "prompt_tokens_details": record({"cached_tokens": COUNT}),
        },
        {"completion_tokens_details": record({"reasoning_tokens": COUNT})},
    ),
    "RankedToken": record({"logprob": NUMBER, "rank": COUNT, "decoded_token": TEXT}),
    "TokenLogprob": record(_TOKEN | {"top_logprobs": many(record(_TOKEN))}),
    "ChatCompletion": record(
        _ENVELOPE
        | _object("chat.completion")
        | {
            "choices": many(
                record(
                    {"index": COUNT, "message": _MESSAGE}
                    | _CHAT_END
                    | {"stop_reason": _STOP_REASON, "token_ids": or_null(_TOKEN_IDS)}
                )
            ),
            "usage": ref("Usage"),
            "prompt_logprobs": or_null(_PROMPT_LOGPROBS),
            "prompt_token_ids": or_null(_TOKEN_IDS),
        }
        | _NOTHING_ELSE,
    ),
    "ChatCompletionChunk": record(
        _ENVELOPE
        | _object("chat.completion.chunk")
        | {
            "choices": many(
                record(
                    {"index": COUNT, "delta": _DELTA} | _CHAT_END,
                    {"stop_reason": _STOP_REASON, "token_ids": _TOKEN_IDS, "prompt_token_ids": _TOKEN_IDS},
                )
            )
        },
        {"usage": or_null(ref("Usage"))},
    ),
    "Completion": record(
        _ENVELOPE
        | _object("text_completion")
        | {"choices": many(_COMPLETION_CHOICE), "usage": ref("Usage")}
        | _NOTHING_ELSE,
    ),
    "CompletionChunk": record(
        _ENVELOPE | _object("text_completion") | {"choices": many(_COMPLETION_CHOICE)},
        {"usage": or_null(ref("Usage"))},
    ),
    "Response": _RESPONSE,
    "ResponseEvent": {
        "anyOf": [
            record(_numbered("response.created", "response.in_progress") | {"response": _RESPONSE}),
            record(_numbered("response.completed", "response.incomplete") | {"response": _RESPONSE}),
            record(_numbered("response.output_item.added", "response.output_item.done") | _AT | {"item": _ITEM}),
            record(_numbered("response.content_part.added", "response.content_part.done") | _IN_PART | {"part": _PART}),
            record(_numbered("response.output_text.delta") | _IN_PART | {"delta": TEXT, "logprobs": _TOKEN_LOGPROBS}),
            record(_numbered("response.output_text.done") | _IN_PART | {"text": TEXT, "logprobs": _TOKEN_LOGPROBS}),
            record(_numbered("response.reasoning_text.delta") | _IN_PART | {"delta": TEXT}),
            record(_numbered("response.reasoning_text.done") | _IN_PART | {"text": TEXT}),
            record(_numbered("response.function_call_arguments.delta") | _IN_ITEM | {"delta": TEXT}),
            record(
                _numbered("response.function_call_arguments.done") | _IN_ITEM | {"name": TEXT, "arguments": TEXT},
            ),
        ]
    },
    "Message": _MESSAGE_OF_BLOCKS
    | {"properties": _MESSAGE_OF_BLOCKS["properties"] | {"stop_reason": {"enum": _STOP_REASONS}}},
    "MessageEvent": {
        "anyOf": [
            record(_type("message_start") | {"message": _MESSAGE_OF_BLOCKS}),
            record(_type("content_block_start") | {"index": COUNT, "content_block": _BLOCK}),
            record(_type("content_block_delta") | {"index": COUNT, "delta": _BLOCK_DELTA}),
            record(_type("content_block_stop") | {"index": COUNT}),
            record(_type("message_delta") | {"delta": record(_MESSAGE_END), "usage": _MESSAGE_USAGE}),
            record(_type("message_stop")),
        ]
    },
    "TokenCount": record({"input_tokens": COUNT}),
    "Model": record(
        _object("model")
        | {
            "id": TEXT,
            "created": COUNT,
            "owned_by": TEXT,
            "root": TEXT,
            "parent": {"type": "null"},
            "max_model_len": COUNT,
        }
    ),
    "Models": record(_object("list") | {"data": many(ref("Model"))}),
    "TokenizeReply": record(
        {"count": COUNT, "max_model_len": COUNT, "tokens": _TOKEN_IDS, "token_strs": or_null(many(TEXT))}
    ),
    "TokenizerInfo": {
        "type": "object",
        "properties": {"tokenizer_class": TEXT, "chat_template": or_null(TEXT)},
        "required": ["tokenizer_class", "chat_template"],
    },
    "DetokenizeReply": record({"prompt": TEXT}),
    "State": record({"status": TEXT}),
    "Version": record({"version": TEXT}),
    "Load": record({"server_load": COUNT}),
}


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
    """Schema of a sampling parameter that is a single number, by its type."""
    allowed = RANGES[name]
    low = {"exclusiveMinimum" if allowed.above_low else "minimum": allowed.low}
    is_integer = "int" in str(SamplingParams.__annotations__[name])
    return {"integer" if is_integer else "number": low | {"maximum": min(allowed.high, _MAX_INT)} | changed}


# Keyed by the value's type, because a field may accept several.
LIMITS: Final[Mapping[str, Mapping[str, Schema]]] = {
    **{name: _numbers(name) for name in RANGES if name != "seed"},  # any 64-bit number is a valid seed over HTTP
    "max_tokens": _numbers("max_tokens", minimum=0),  # 0 with `echo`
    "max_completion_tokens": _numbers("max_tokens"),
    "top_k": _numbers("top_k", minimum=-1),  # -1 is vLLM's other spelling of "all tokens"
    "top_logprobs": {"integer": {"minimum": 0, "maximum": MAX_TOP_LOGPROBS}},
    "stop": {"string": _STOP, "array": {"maxItems": MAX_STOP_STRINGS, "items": {"type": "string"} | _STOP}},
    "stop_token_ids": {"array": {"maxItems": MAX_STOP_TOKEN_IDS, "items": {"type": "integer", "minimum": 0}}},
    "allowed_token_ids": {
        "array": {"minItems": 1, "maxItems": MAX_ALLOWED_TOKEN_IDS, "items": {"type": "integer", "minimum": 0}}
    },
    "bad_words": {"array": {"maxItems": MAX_BAD_TEXTS}},
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
    """Build the document of a router that serves `model`."""
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
        paths.setdefault(path, {})[method] = _path_operation(path, method)
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
    ("/ready", "get"): (
        "Requests are served: a decode worker lives, and a prefill worker, or decode workers compute prompts.",
        _json("State"),
        None,
    ),
    ("/metrics", "get"): ("Prometheus' text format.", {"text/plain": {"schema": {"type": "string"}}}, None),
    ("/openapi.json", "get"): ("This document.", {JSON: {"schema": {"type": "object"}}}, None),
    ("/docs", "get"): ("This document as a page.", {"text/html": {"schema": {"type": "string"}}}, None),
    ("/ping", "get"): ("This process answers.", _json("State"), None),
    ("/ping", "post"): ("This process answers.", _json("State"), None),
    ("/version", "get"): ("Which release runs here.", _json("Version"), None),
    ("/load", "get"): ("How many answers are under way.", _json("Load"), None),
}


def _path_operation(path: str, method: str) -> Schema:
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


@functools.cache
def _schemas() -> dict[str, Schema]:
    """Schemas of all requests, for any model; must not be modified. Building them takes a tenth of a second."""
    made = models_json_schema([(kind, "validation") for kind in REQUESTS], ref_template="#/components/schemas/{model}")
    schemas: dict[str, Schema] = made[1]["$defs"]
    for kind in REQUESTS:
        if kind is DetokenizeRequest:
            continue
        properties = schemas[kind.__name__]["properties"]
        for name, limits in LIMITS.items():
            for form in properties.get(name, {}).get("anyOf", ()):
                form |= limits.get(form.get("type", ""), {})
        for name, (nothing, why) in REFUSED.items() if kind is not TokenizeRequest else ():
            properties.setdefault(name, {"enum": list(nothing), "description": f"anything else is refused: {why}"})
        for name in sorted(HARMLESS):
            properties.setdefault(name, {"description": "without effect"})
    return schemas


def _request_schemas(model: str) -> dict[str, Schema]:
    schemas = dict(_schemas())
    known = {"enum": [model, "", None], "description": "the one that is served; another name is not found"}
    for name in [kind.__name__ for kind in REQUESTS]:
        schemas[name] = schemas[name] | {"properties": schemas[name]["properties"] | {"model": known}}
    return schemas
