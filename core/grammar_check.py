"""What can be seen of a grammar without compiling it: its kind, size, nesting, and whether a schema is JSON at all.

Every front end and worker asks here before anything compiles, so that what reaches the compiler is bounded: parsers
recurse, and a nesting that overflows a stack takes the process with it. Whether the text means anything is the
compiler's business (engine.grammar).
"""

import json
from typing import Any, Final

from baton.core.errors import InvalidGrammar

JSON_OBJECT: Final = "json_object"
GRAMMAR_KINDS: Final = ("json_schema", "regex", "grammar", JSON_OBJECT)
MAX_GRAMMAR_BYTES: Final = 64 << 10
MAX_GRAMMAR_DEPTH: Final = 64
LIBRARY_KEY: Final = "x-guidance"  # by which a schema would set options of the library behind it


def check_grammar(kind: str, text: str) -> None:
    """Check a grammar's outside.

    Raises:
        InvalidGrammar: an unknown kind, a text that is missing, too long or nested too deeply, or no JSON schema.
    """
    if kind not in GRAMMAR_KINDS:
        raise InvalidGrammar(f"grammar: {kind[:40]!r} is none of {', '.join(GRAMMAR_KINDS)}", kind=kind[:40])
    if kind == JSON_OBJECT:
        _require(text == "", kind, "takes no text")
        return
    _require(text != "", kind, "is empty")
    num_bytes = len(text.encode("utf-8", "surrogatepass"))
    _require(num_bytes <= MAX_GRAMMAR_BYTES, kind, f"has {num_bytes} bytes; at most {MAX_GRAMMAR_BYTES}")
    _require(text.isascii() or not _has_surrogate(text), kind, "is not valid UTF-8")
    _require(_nesting(text) <= MAX_GRAMMAR_DEPTH, kind, f"is nested more than {MAX_GRAMMAR_DEPTH} deep")
    if kind == "json_schema":
        _check_schema(text)


def _check_schema(text: str) -> None:
    try:
        schema: Any = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidGrammar(f"json_schema: not JSON: {error}"[:300], kind="json_schema") from error
    _require(isinstance(schema, dict | bool), "json_schema", "is neither an object nor a boolean")
    _require(schema is not False, "json_schema", "allows nothing")
    _require(
        not isinstance(schema, dict) or LIBRARY_KEY not in schema,
        "json_schema",
        f"holds {LIBRARY_KEY}, which is no keyword of JSON Schema",
    )


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _nesting(text: str) -> int:
    """How deep brackets of any kind nest; too much rather than too little where some are quoted."""
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}" and depth:
            depth -= 1
    return deepest


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _require(holds: bool, kind: str, why: str) -> None:
    if not holds:
        raise InvalidGrammar(f"{kind}: {why}", kind=kind)
