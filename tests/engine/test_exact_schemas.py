"""What of a schema the grammar library would read as something else: refused, or followed to the letter."""

import json
from pathlib import Path

import jsonschema
import pytest

from baton.core.errors import InvalidGrammar
from baton.core.requests.answer_structure import STRUCTURE, AnswerStructure, CallableTool, CallForm, Calls
from baton.core.requests.sampling import GrammarSpec
from baton.core.requests.tokenizer import Tokenizer
from baton.engine.grammar.grammar import GrammarCompiler
from baton.engine.grammar.text import library_text

pytestmark = pytest.mark.fast
TINY = Path(__file__).parents[2] / "assets" / "tiny"
EXACT, MAX_I64 = 1 << 53, (1 << 63) - 1
SNOWFLAKE = 1_420_070_400_123_456_789


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(Tokenizer.from_directory(TINY), 4096)


def takes(compiler, schema, text):
    state = compiler.start(GrammarSpec("json_schema", json.dumps(schema)))
    tokens = [*compiler._tokenizer.encode(text), compiler._eos_token_ids[0]]
    return state.accept(tokens) == len(tokens)


@pytest.mark.parametrize(
    "schema",
    [
        {"const": EXACT},
        {"enum": [-EXACT, EXACT + 2, 10**18]},
        {"type": "integer", "minimum": EXACT - 1, "maximum": EXACT},
        {"type": "integer", "minimum": 1 << 60, "maximum": (1 << 60) + 256},
        {"type": "integer", "maximum": MAX_I64},
    ],
    ids=json.dumps,
)
def test_large_integers_that_are_exact_are_followed(compiler, schema):
    validator = jsonschema.Draft202012Validator(schema)
    near = [EXACT, -EXACT, 1 << 60, (1 << 60) + 256, 10**18, MAX_I64]
    for value in (one + more for one in near for more in (-1, 0, 1, 2)):
        assert takes(compiler, schema, str(value)) == validator.is_valid(value), value


@pytest.mark.parametrize(
    ("schema", "match"),
    [
        ({"const": EXACT + 1}, "#/const: 9007199254740993 is not exact"),
        ({"const": {"a": [-EXACT - 1]}}, "#/const: -9007199254740993"),
        ({"type": "object", "properties": {"id": {"enum": [1, SNOWFLAKE]}}}, f"#/properties/id/enum: {SNOWFLAKE}"),
        ({"const": 1 << 64}, "not exact"),  # exact, but written with other digits
        ({"const": 10**400}, "malformed|not exact"),
        ({"items": {"type": "integer", "minimum": EXACT + 1}}, "#/items/minimum: 9007199254740993"),
        ({"type": "integer", "exclusiveMaximum": EXACT + 1}, "#/exclusiveMaximum"),
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


def test_names_and_notes_hold_any_integer():
    schema = {"properties": {"const": {"type": "integer", "default": EXACT + 1, "examples": [EXACT + 1]}}}
    assert "default" in library_text("json_schema", json.dumps(schema))
