"""`uniqueItems` in a JSON Schema, which the `llguidance` library does not know.

A grammar cannot remember which of arbitrarily many values came before. Where an array's items are a few given values
(`enum`, `const`, booleans, null), all arrays of different ones are listed instead. Elsewhere the keyword is refused: an
answer that breaks it would be no answer to the request.
"""

import itertools
import json
import math
from collections.abc import Mapping
from typing import Any, Final

MAX_ARRAYS: Final = 128  # that one schema is replaced by
KEYWORD: Final = "uniqueItems"
_LITERAL: Final = frozenset(("const", "enum", "default", "examples"))  # what stands there is data, not a schema
_NAMED: Final = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_NOTES: Final = frozenset(
    ("title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$id", "$defs", "definitions")
)
_OF_ARRAY: Final = frozenset(("type", "items", "minItems", "maxItems", KEYWORD))
_KINDS: Final[Mapping[str, tuple[type, ...]]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


def without_unique_items(schema: Any) -> Any:
    """A schema of the same values that does without the keyword.

    Raises:
        ValueError: there is none; it says where and why.
    """
    try:
        return _rewritten(schema, schema, "#")
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"malformed beside {KEYWORD}: {error}") from error


def _rewritten(schema: Any, root: Any, path: str, *, are_names: bool = False) -> Any:
    if isinstance(schema, list):
        return [_rewritten(item, root, f"{path}/{at}") for at, item in enumerate(schema)]
    if not isinstance(schema, dict):
        return schema
    found = {
        key: value
        if key in _LITERAL and not are_names
        else _rewritten(value, root, f"{path}/{key}", are_names=key in _NAMED and not are_names)
        for key, value in schema.items()
    }
    if are_names or KEYWORD not in found:
        return found
    is_unique = found.pop(KEYWORD)
    if not isinstance(is_unique, bool):
        raise ValueError(f"{path}: {KEYWORD} is neither true nor false")
    return _listed(found, root, path) if is_unique else found


def _listed(schema: dict[str, Any], root: Any, path: str) -> Any:
    """An array of different items, by all that there are."""
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    least, most = schema.get("minItems", 0), schema.get("maxItems", math.inf)
    if (None not in kinds and "array" not in kinds) or most <= 1:
        return schema
    more = sorted(schema.keys() - _OF_ARRAY - _NOTES)
    if None in kinds or more:
        why = f"beside {more[0]}" if more else "without a type"
        raise ValueError(f"{path}: {KEYWORD} {why} cannot be followed")
    values = _values(schema.get("items"), root)
    if values is None:
        why = "can be followed where the items are a few given values (enum, const, boolean, null); leave it out here"
        raise ValueError(f"{path}: {KEYWORD} {why}")
    if len(values) > MAX_ARRAYS:
        raise ValueError(f"{path}: {KEYWORD} of {len(values)} values leaves more than {MAX_ARRAYS} different arrays")
    sizes = range(least, int(min(most, len(values))) + 1)
    num = sum(math.perm(len(values), size) for size in sizes)
    if not 1 <= num <= MAX_ARRAYS:
        raise ValueError(f"{path}: {KEYWORD} leaves {num} different arrays; at least 1 and at most {MAX_ARRAYS}")
    arrays: list[dict[str, Any]] = [
        {"type": "array", "prefixItems": [{"const": one} for one in chosen], "minItems": size, "maxItems": size}
        for size in sizes
        for chosen in itertools.permutations(values, size)
    ]
    others = [{"type": kind} for kind in kinds if kind != "array"]
    return {key: value for key, value in schema.items() if key in _NOTES} | {"anyOf": [*arrays, *others]}


def _values(items: Any, root: Any) -> list[Any] | None:
    """All values of a schema; None where they are not listed."""
    if isinstance(items, dict) and isinstance(items.get("$ref"), str) and items.keys() <= _NOTES | {"$ref"}:
        where, _, name = items["$ref"].rpartition("/")
        if where not in ("#/$defs", "#/definitions") or not isinstance(root, dict):
            return None
        items = root.get(where[2:], {}).get(name)
    if not isinstance(items, dict) or not items.keys() <= _NOTES | {"type", "enum", "const"}:
        return None
    kinds = items.get("type", list(_KINDS))
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "const" in items:
        listed = [one for one in items.get("enum", [items["const"]]) if _key(one) == _key(items["const"])]
    elif "enum" in items:
        listed = items["enum"]
    elif set(kinds) <= {"boolean", "null"}:
        listed = [False, True] * ("boolean" in kinds) + [None] * ("null" in kinds)
    else:
        return None
    return list({_key(one): one for one in listed if any(_is_of(one, kind) for kind in kinds)}.values())


def _is_of(value: Any, kind: Any) -> bool:
    if isinstance(value, bool):
        return bool(kind == "boolean")
    whole = isinstance(value, float) and value.is_integer() and kind == "integer"
    return whole or isinstance(value, _KINDS.get(kind, ()))


def _key(value: Any) -> str:
    """The same for values that JSON Schema calls equal."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return f"[{','.join(map(_key, value))}]"
    if isinstance(value, dict):
        return json.dumps({name: _key(one) for name, one in value.items()}, sort_keys=True)
    return json.dumps(value)
