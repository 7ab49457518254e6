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
