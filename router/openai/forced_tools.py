"""The JSON Schema of an answer that must be a tool call."""

import json
from collections.abc import Sequence
from typing import Any, Final

from baton.router.openai.chat_request import Function

_LITERAL: Final = frozenset(("const", "enum", "default", "examples"))  # what stands there is data, not a schema
_NAMED: Final = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))


def one_call(functions: Sequence[Function]) -> str:
    """The schema of one call, `{"name": ..., "arguments": ...}`, of one of `functions`."""
    return json.dumps(_schema(functions, _any_of(functions)), ensure_ascii=False)


def some_calls(functions: Sequence[Function], *, parallel: bool) -> str:
    """The schema of an array of one call, or of several where they may be `parallel`."""
    calls: dict[str, Any] = {"type": "array", "items": _any_of(functions), "minItems": 1}
    if not parallel:
        calls["maxItems"] = 1
    return json.dumps(_schema(functions, calls), ensure_ascii=False)


def _schema(functions: Sequence[Function], root: dict[str, Any]) -> dict[str, Any]:
    definitions = {
        _key(at): _moved(function.parameters or {"type": "object"}, at) for at, function in enumerate(functions)
    }
    return root | {"$defs": definitions}


def _any_of(functions: Sequence[Function]) -> dict[str, Any]:
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": function.name}, "arguments": {"$ref": f"#/$defs/{_key(at)}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for at, function in enumerate(functions)
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _key(at: int) -> str:
    return f"tool{at}"


def _moved(schema: Any, at: int, *, are_names: bool = False) -> Any:
    """A schema as a definition: what it refers to within itself has moved with it.

    Args:
        schema: it, or a part of it.
        at: which tool's.
        are_names: the keys are names of the schema's own choice, not keywords.
    """
    if isinstance(schema, list):
        return [_moved(item, at) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {
        key: value
        if key in _LITERAL and not are_names
        else _moved(value, at, are_names=key in _NAMED and not are_names)
        for key, value in schema.items()
    }
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = f"#/$defs/{_key(at)}{reference[1:]}"
    return moved
