"""What of a schema the grammar library would read as something else: refused, or followed to the letter."""

import json
from decimal import Decimal
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import InvalidGrammar
from baton.core.requests.answer_structure import STRUCTURE, AnswerStructure, CallableTool, CallForm, Calls
from baton.core.requests.sampling import GrammarSpec
from baton.core.requests.tokenizer import Tokenizer
from baton.engine.grammar.grammar import GrammarCompiler
from baton.engine.grammar.text import FORMATS, library_text

pytestmark = pytest.mark.fast
TINY = Path(__file__).parents[2] / "assets" / "tiny"
EXACT, MAX_I64 = 1 << 53, (1 << 63) - 1
SNOWFLAKE = 1_420_070_400_123_456_789
TOKENIZER = Tokenizer.from_directory(TINY)


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(TOKENIZER, 4096)


def takes(compiler, schema, text):
    state = compiler.start(GrammarSpec("json_schema", json.dumps(schema)))
    tokens = [*TOKENIZER.encode(text), TOKENIZER.eos_token_ids[0]]
    return state.accept(tokens) == len(tokens)


@pytest.mark.parametrize(
    "schema",
    [
        {"const": EXACT},
        {"enum": [-EXACT, EXACT + 2, 10**18]},
        {"type": "integer", "minimum": EXACT - 1, "maximum": EXACT},
        {"type": "integer", "minimum": 1 << 60, "maximum": (1 << 60) + 256},
        {"type": "integer", "maximum": MAX_I64},
        {"type": "integer", "maximum": float(EXACT - 1)},  # a float, of which the library would read another
        {"type": "integer", "exclusiveMaximum": EXACT + 1},
        {"type": ["integer", "string"], "exclusiveMinimum": -EXACT - 1, "minimum": -(1 << 60)},
        {"type": "integer", "exclusiveMaximum": MAX_I64 + 1, "maximum": 1 << 60},
    ],
    ids=json.dumps,
)
def test_large_integers_that_are_exact_are_followed(compiler, schema):
    validator = jsonschema.Draft202012Validator(schema)
    near = [EXACT, -EXACT, 1 << 60, (1 << 60) + 256, 10**18, MAX_I64]
    for value in (one + more for one in near for more in (-1, 0, 1, 2)):
        assert takes(compiler, schema, str(value)) == validator.is_valid(value), value


def test_formats_that_the_library_knows_are_followed_and_others_are_remarks(compiler):
    valid = {
        "date": "2026-11-30",
        "date-time": "2026-11-30T10:00:00Z",
        "duration": "P1D",
        "email": "a@b.c",
        "hostname": "b.c",
        "ipv4": "10.0.0.1",
        "ipv6": "::1",
        "time": "10:00:00Z",
        "uri": "https://b.c/",
        "uuid": "01234567-89ab-cdef-0123-456789abcdef",
    }
    assert valid.keys() == FORMATS
    for name, text in valid.items():
        schema = {"type": "string", "format": name}
        assert takes(compiler, schema, json.dumps(text)) and not takes(compiler, schema, '"no such thing?"'), name
    for name in ("path", "password", "binary", "byte", "url", "jwt", "uri-reference", "int64", "ipvanyaddress"):
        properties = {"v": {"type": "string", "format": name, "maxLength": 3}, "format": {"const": "x"}}
        schema = {"type": "object", "properties": properties, "required": ["v", "format"], "format": name}
        assert takes(compiler, schema, '{"v":"any","format":"x"}')
        assert not takes(compiler, schema, '{"v":"more","format":"x"}')
        assert takes(compiler, {"const": {"format": name}}, json.dumps({"format": name}, separators=(",", ":")))


def test_why_a_schema_is_refused_is_said_without_what_was_made_of_it(compiler):
    with pytest.raises(InvalidGrammar) as refused:
        compiler.start(GrammarSpec("json_schema", '{"type": "string", "pattern": "a(?=b)"}'))
    message = refused.value.message
    assert message.startswith("json_schema: ") and "look-ahead" in message
    assert "start:" not in message and "at 1(" not in message


@pytest.mark.parametrize("kind", ["string", ["string", "null"]])
@pytest.mark.parametrize("key", ["maximum", "exclusiveMaximum"])
@pytest.mark.parametrize("bound", [EXACT + 1, 1 << 60])
def test_bounds_of_what_is_no_number_do_not_matter(compiler, kind, key, bound):
    schema = {"type": kind, key: bound}
    assert takes(compiler, schema, '"7"') and not takes(compiler, schema, "7")


@pytest.mark.parametrize(
    ("schema", "match"),
    [
        ({"const": EXACT + 1}, "#/const: 9007199254740993 is not exact"),
        ({"const": {"a": [-EXACT - 1]}}, "#/const: -9007199254740993"),
        ({"type": "object", "properties": {"id": {"enum": [1, SNOWFLAKE]}}}, f"#/properties/id/enum: {SNOWFLAKE}"),
        ({"const": 1 << 64}, "not exact"),  # exact, but written with other digits
        ({"const": 10**400}, "malformed|not exact"),
        ({"items": {"type": "integer", "minimum": EXACT + 1}}, "#/items/minimum: 9007199254740993"),
        ({"type": "integer", "exclusiveMaximum": EXACT + 2}, "#/exclusiveMaximum: 9007199254740994 is not exact"),
        ({"type": ["integer", "null"], "exclusiveMinimum": EXACT}, "#/exclusiveMinimum"),
        ({"type": "integer", "maximum": 1e19}, "#/maximum: 10000000000000000000 is not exact"),
        ({"minimum": 1e19}, "#/minimum"),
        ({"exclusiveMaximum": 1 << 60}, "#/exclusiveMaximum: 1152921504606846976 is not exact without a type"),
        ({"type": "integer", "maximum": (1 << 64) - 1}, "#/maximum"),
        ({"type": "number", "maximum": MAX_I64}, "#/maximum"),
    ],
    ids=str,
)
def test_integers_that_a_float_is_not_are_refused(schema, match):
    with pytest.raises(InvalidGrammar, match=match):
        library_text("json_schema", json.dumps(schema))
    for form in (CallForm.HERMES, CallForm.QWEN3_CODER):
        tool = CallableTool("f", {"type": "object", "properties": {"a": schema}})
        with pytest.raises(InvalidGrammar, match=r"not exact|malformed"):
            library_text(STRUCTURE, AnswerStructure(calls=Calls.REQUIRED, tools=(tool,), form=form).to_json())


@pytest.mark.long
@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    st.sampled_from(("integer", "number", None, ["integer", "null"])),
    st.tuples(st.sampled_from((20, 52, 53, 54, 60, 63, 64)), st.integers(-4, 4), st.sampled_from((1, -1))),
    st.booleans(),
)
def test_a_bound_is_followed_or_refused(compiler, key, kind, number, is_float):
    exponent, more, sign = number
    bound = sign * ((1 << exponent) + more)
    schema = {key: float(bound) if is_float else bound} | ({} if kind is None else {"type": kind})
    bound = int(Decimal(repr(schema[key])))
    try:
        for value in (*range(bound - 3, bound + 4), bound - 1025, bound + 1025, 2 * bound, -bound, 0):
            allowed = {
                "minimum": value >= bound,
                "maximum": value <= bound,
                "exclusiveMinimum": value > bound,
                "exclusiveMaximum": value < bound,
            }
            assert takes(compiler, schema, str(value)) == allowed[key], (schema, value)
    except InvalidGrammar:
        assert abs(bound) >= EXACT


def test_names_and_notes_hold_any_integer():
    schema = {"properties": {"const": {"type": "integer", "default": EXACT + 1, "examples": [EXACT + 1]}}}
    assert "default" in library_text("json_schema", json.dumps(schema))


OBJECT = {"type": "object", "additionalProperties": {"type": "boolean"}}


@pytest.mark.parametrize(
    "schema",
    [
        OBJECT | {"minProperties": 1},
        OBJECT | {"minProperties": 2, "required": ["a"], "properties": {"a": {"type": "boolean"}}},
        OBJECT | {"minProperties": 3, "required": ["a", "b"]},
        OBJECT | {"additionalProperties": False, "patternProperties": {"^[ab]$": {}}, "minProperties": 1},
    ],
    ids=json.dumps,
)
def test_as_many_properties_as_there_are_names(compiler, schema):
    validator = jsonschema.Draft202012Validator(schema)
    for names in ("", "a", "ab", "abb", "abc", "aa", "aab", "aba"):
        text = ",".join(f'"{name}":true' for name in names).join("{}")
        if takes(compiler, schema, text):
            assert validator.is_valid(json.loads(text)), text
    assert takes(compiler, schema, '{"a":true,"b":true,"c":true}') or "patternProperties" in schema


@pytest.mark.parametrize(
    "schema",
    [
        {"minProperties": 2},
        OBJECT | {"minProperties": 2},
        OBJECT | {"minProperties": 3, "required": ["a", "a"]},
        {"type": ["object", "null"], "patternProperties": {"^a": {}}, "minProperties": 2},
    ],
    ids=json.dumps,
)
def test_more_properties_than_are_told_apart_are_refused(schema):
    with pytest.raises(InvalidGrammar, match="#: minProperties can be followed up to"):
        library_text("json_schema", json.dumps(schema))
