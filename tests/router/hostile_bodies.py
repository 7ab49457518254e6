"""Bodies and messages that are as dear as their bytes allow: for every field of every model, and for whole shapes.

The fields are found by walking the models and the descriptors, so a new one is tried without a line here.
"""

import json
from typing import get_args

from google.protobuf.descriptor import FieldDescriptor
from pydantic import BaseModel

from baton.proto import inference_pb2
from baton.router.access.message_limits import is_repeated
from baton.router.openai.chat_request import ChatRequest
from baton.router.openai.chats import BatchRequest
from baton.router.openai.completions import CompletionRequest
from baton.router.openai.messages import CountTokensRequest, MessagesRequest
from baton.router.openai.responses import ResponsesRequest
from baton.router.openai.tokens import DetokenizeRequest, TokenizeRequest

ENDPOINTS = {
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "a"}]}),
    "/v1/chat/completions/batch": (BatchRequest, {"messages": [[{"role": "user", "content": "a"}]]}),
    "/v1/completions": (CompletionRequest, {"prompt": "a"}),
    "/v1/responses": (ResponsesRequest, {"input": "a"}),
    "/v1/messages": (MessagesRequest, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 8}),
    "/v1/messages/count_tokens": (CountTokensRequest, {"messages": [{"role": "user", "content": "a"}]}),
    "/tokenize": (TokenizeRequest, {"messages": [{"role": "user", "content": "a"}]}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1]}),
}
# The least that is valid, of parts that need something.
LEAST = {
    "Message": {"role": "user", "content": "a"},
    "ContentPart": {"type": "text", "text": "a"},
    "ToolCall": {"function": {"name": "f"}},
    "FunctionCall": {"name": "f"},
    "Tool": {"function": {"name": "f"}},
    "Function": {"name": "f"},
    "NamedToolChoice": {"function": {"name": "f"}},
    "NamedFunction": {"name": "f"},
    "ResponseFormat": {"type": "json_schema"},
    "Item": {"role": "user", "content": "a"},
    "Part": {"type": "input_text", "text": "a"},
    "FunctionTool": {"type": "function", "name": "f"},
    "NamedTool": {"type": "function", "name": "f"},
    "ResponsesToolChoice": {"type": "function", "name": "f"},
    "TextFormat": {"type": "text"},
    "Turn": {"role": "user", "content": "a"},
    "Block": {"type": "text", "text": "a"},
    "TextBlock": {"type": "text", "text": "a"},
    "ClientTool": {"name": "f"},
    "MessagesToolChoice": {"type": "auto"},
    "Thinking": {"type": "enabled"},
    "OutputFormat": {"type": "json_schema", "schema": {}},
}


def values(num_bytes):
    """(name, JSON text) of values of about so many bytes, each dear in its own way."""
    yield "a text", '"' + "a" * num_bytes + '"'
    yield "escapes", '"' + "\\u00e9" * (num_bytes // 6) + '"'
    for name, item in (
        ("texts", '"a"'),
        ("numbers", "1"),
        ("arrays", "[]"),
        ("objects", "{}"),
        ("arrays of one", "[1]"),
        ("nulls", "null"),
    ):
        yield name, "[" + ",".join([item] * (num_bytes // (len(item) + 1))) + "]"
    yield "keys", "{" + ",".join(f'"{at}":1' for at in range(num_bytes // 9)) + "}"
    yield "the same key", "{" + ",".join(['"1":1'] * (num_bytes // 6)) + "}"
    yield "depth", "[" * 100 + ",".join(["1"] * (num_bytes // 2)) + "]" * 100


def bodies(num_bytes):
    """(path of the endpoint, what it is, body)."""
    for path, (kind, least) in ENDPOINTS.items():
        for name, text in values(num_bytes):
            for place, body in _places(kind, least, text):
                yield path, f"{place}: {name}", body.encode()
        for place, part, item in _repeated(kind):
            for most in (100, 1000, num_bytes):  # within limits of their number, and beyond
                num = min(most, num_bytes // (len(json.dumps(item)) + 1))
                items = "[" + ",".join([json.dumps(item)] * num) + "]"
                yield path, f"{place}: {part} {num} times", _with(least, place, items).encode()
        names = ",".join(f'"x{at}":1' for at in range(num_bytes // 10))
        yield path, "unknown fields", (json.dumps(least)[:-1] + "," + names + "}").encode()
        yield path, "no object", next(text for name, text in values(num_bytes) if name == "arrays").encode()
        yield path, "not closed", b"[" * num_bytes


def messages(num_bytes):
    """(what it is, bytes of a GenerateRequest)."""
    base = inference_pb2.GenerateRequest(text="a").SerializeToString()
    for path in _message_fields(inference_pb2.GenerateRequest.DESCRIPTOR):
        for name, payload in (("large", b"a" * num_bytes), ("empty ones", b""), ("ones", b"\x01")):
            once = payload
            for field in reversed(path):
                once = _tagged(field, once)
            again = 1 if payload and len(payload) > 1 else num_bytes // len(once)
            yield f"{'.'.join(field.name for field in path)}: {name}", base + once * again
    yield "unknown fields", base + b"\xf8\x7f\x01" * (num_bytes // 3)


def _tagged(field, payload):
    kinds = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_MESSAGE)
    if field.type in kinds or is_repeated(field):
        return _varint(field.number << 3 | 2) + _varint(len(payload)) + payload
    return _varint(field.number << 3) + b"\x01"


def _varint(number):
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def _message_fields(descriptor, above=()):
    for field in descriptor.fields:
        yield (*above, field)
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            yield from _message_fields(field.message_type, (*above, field))


def parts_of(annotation):
    """The models that an annotation names, at any depth."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [part for argument in get_args(annotation) for part in parts_of(argument)]


def _holds_list(annotation):
    return getattr(annotation, "__origin__", None) is list or any(map(_holds_list, get_args(annotation)))


def _places(kind, least, text):
    """(dotted field, whole body) with `text` as that field's value, for every field of the model and of its parts."""
    for name, field in kind.model_fields.items():
        alias = field.alias or name
        yield name, _with(least, alias, text)
        for part in parts_of(field.annotation):
            for inner, body in _places(part, LEAST.get(part.__name__, {}), text):
                nested = f"[{body}]" if _holds_list(field.annotation) else body
                yield f"{name}.{inner}", _with(least, alias, nested)


def _repeated(kind, above=""):
    for name, field in kind.model_fields.items():
        for part in parts_of(field.annotation):
            if _holds_list(field.annotation):
                yield name, part.__name__, LEAST.get(part.__name__, {})
                if part.__name__ == "Message":
                    yield name, "an empty message", {"role": "user", "content": ""}


def _with(least, name, text):
    rest = {key: value for key, value in least.items() if key != name}
    return json.dumps(rest)[:-1] + ("," if rest else "") + f"{json.dumps(name)}:{text}}}"
