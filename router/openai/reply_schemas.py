"""What replies over HTTP look like, in JSON Schema: for `/openapi.json`, and for tests that hold replies against it."""

from typing import Any, Final

Schema = dict[str, Any]

TEXT: Final[Schema] = {"type": "string"}
NUMBER: Final[Schema] = {"type": "number"}
COUNT: Final[Schema] = {"type": "integer", "minimum": 0}


def ref(name: str) -> Schema:
    """Another schema of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


def record(required: Schema, optional: Schema | None = None) -> Schema:
    """An object with these members and no others."""
    return {
        "type": "object",
        "properties": required | (optional or {}),
        "required": list(required),
        "additionalProperties": False,
    }


def many(item: Schema) -> Schema:
    """An array."""
    return {"type": "array", "items": item}


def or_null(schema: Schema) -> Schema:
    """The same, or null."""
    return {"anyOf": [schema, {"type": "null"}]}


_TOKEN_IDS = many(COUNT)
_FINISH = or_null({"enum": ["stop", "length", "tool_calls"]})
_STOP_REASON = or_null({"anyOf": [TEXT, COUNT]})
_NULL: Final[Schema] = {"type": "null"}
# What vLLM may write and what is never known here: null, so that clients find the keys.
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


def _object(name: str) -> Schema:
    return {"object": {"const": name}}


REPLIES: Final[dict[str, Schema]] = {
    "Error": record(
        {"error": record({"message": TEXT, "type": TEXT, "param": or_null(TEXT), "code": TEXT})},
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
    "DetokenizeReply": record({"prompt": TEXT}),
    "State": record({"status": TEXT}),
    "Version": record({"version": TEXT}),
    "Load": record({"server_load": COUNT}),
}
