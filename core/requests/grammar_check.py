"""What can be seen of a grammar without compiling it: its kind, its size, and whether a schema is JSON at all.

Every front end and worker asks here before anything compiles. Whether the text means anything is the compiler's
business (engine.grammar).
"""

import json
from typing import Any, Final

from baton.core.errors import InvalidGrammar
from baton.core.requests.answer_structure import STRUCTURE, AnswerStructure

JSON_OBJECT: Final = "json_object"
GRAMMAR_KINDS: Final = ("json_schema", "regex", "grammar", JSON_OBJECT, STRUCTURE)
MAX_GRAMMAR_BYTES: Final = 64 << 10
# Compiling an object's optional properties takes time that grows with the square of their number.
MAX_OBJECT_KEYS: Final = 512
INLINE_JSON: Final = "%json"  # by which a grammar holds a schema, whose keys nobody counts
MAX_INLINE_JSON_BYTES: Final = 8 << 10
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
    _require(_is_unicode(text), kind, "is not valid UTF-8")
    if kind == "json_schema":
        _check_schema(text)
    if kind == STRUCTURE:
        _check_structure(AnswerStructure.from_json(text))
    if kind == "grammar" and INLINE_JSON in text:
        why = f"holds {INLINE_JSON} and has {num_bytes} bytes; at most {MAX_INLINE_JSON_BYTES} of those"
        _require(num_bytes <= MAX_INLINE_JSON_BYTES, kind, why)


def _check_schema(text: str) -> None:
    try:
        schema: Any = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_small_object)
    except (ValueError, RecursionError) as error:
        raise InvalidGrammar(f"json_schema: {error}"[:300], kind="json_schema") from error
    _require(isinstance(schema, dict | bool), "json_schema", "is neither an object nor a boolean")
    _require(schema is not False, "json_schema", "allows nothing")
    _require(
        not isinstance(schema, dict) or LIBRARY_KEY not in schema,
        "json_schema",
        f"holds {LIBRARY_KEY}, which is no keyword of JSON Schema",
    )


def _check_structure(structure: AnswerStructure) -> None:
    if structure.text is not None:
        check_grammar(*structure.text)
    for tool in structure.tools:
        if tool.parameters is None:
            continue
        try:
            check_grammar("json_schema", json.dumps(tool.parameters, ensure_ascii=False))
        except InvalidGrammar as error:
            raise InvalidGrammar(f"tool {tool.name}: {error.message}"[:300], kind=STRUCTURE) from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _small_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_OBJECT_KEYS:
        raise ValueError(f"an object has {len(pairs)} keys; at most {MAX_OBJECT_KEYS}")
    return dict(pairs)


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # lone surrogates
        return False
    return True


def _require(holds: bool, kind: str, why: str) -> None:
    if not holds:
        raise InvalidGrammar(f"{kind}: {why}", kind=kind)
