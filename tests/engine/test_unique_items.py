"""Arrays of different items: every array that jsonschema calls valid can be written, and no other."""

import itertools
import json
from pathlib import Path

import jsonschema
import pytest

from baton.core.errors import InvalidGrammar
from baton.core.requests.sampling import GrammarSpec
from baton.core.requests.tokenizer import Tokenizer
from baton.engine.grammar.grammar import GrammarCompiler

pytestmark = pytest.mark.fast
TINY = Path(__file__).parents[2] / "assets" / "tiny"
UNIQUE = {"type": "array", "uniqueItems": True}
FOLLOWED = [
    UNIQUE | {"items": {"enum": ["a", "b", 1]}},
    UNIQUE | {"items": {"enum": ["a", "b", 1, 1.0, True]}, "minItems": 1, "maxItems": 2},
    UNIQUE | {"items": {"type": "boolean"}},
    UNIQUE | {"items": {"type": ["boolean", "null"]}, "minItems": 2},
    UNIQUE | {"items": {"const": "a"}},
    UNIQUE | {"items": {"enum": ["a", "b", 1], "type": "string"}},
    UNIQUE | {"items": {"$ref": "#/$defs/E"}, "$defs": {"E": {"enum": ["a", "b"], "title": "E"}}},
    UNIQUE | {"type": ["array", "null"], "items": {"enum": ["a", "b"]}},
    UNIQUE | {"items": {"type": "integer", "minimum": 0, "maximum": 1}, "maxItems": 1},
    {"type": "array", "uniqueItems": False, "items": {"enum": ["a", 1]}, "maxItems": 3},
    {"type": "null", "uniqueItems": True},
]


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(Tokenizer.from_directory(TINY), 4096)


def takes(compiler, spec, text):
    state = compiler.start(spec)
    tokens = [*compiler._tokens._tokenizer.encode(text), compiler._eos_token_ids[0]]
    return state.accept(tokens) == len(tokens)


@pytest.mark.parametrize("schema", FOLLOWED, ids=json.dumps)
@pytest.mark.long
def test_all_arrays_of_different_items_and_no_others(compiler, schema):
    spec, validator = GrammarSpec("json_schema", json.dumps(schema)), jsonschema.Draft202012Validator(schema)
    alphabet = ["a", "b", 1, True, False, None]
    documents = [list(items) for size in range(4) for items in itertools.product(alphabet, repeat=size)]
    wanted = [validator.is_valid(document) for document in (*documents, None, "a")]
    found = [takes(compiler, spec, json.dumps(one, separators=(",", ":"))) for one in (*documents, None, "a")]
    assert found == wanted
    assert any(wanted)


@pytest.mark.long
def test_names_and_data_are_no_keywords(compiler):
    properties = {"uniqueItems": {"const": {"uniqueItems": 7}}, "x": UNIQUE | {"items": {"const": 2}}}
    schema = {"type": "object", "properties": properties, "required": ["uniqueItems", "x"]}
    spec = GrammarSpec("json_schema", json.dumps(schema | {"additionalProperties": False}))
    assert takes(compiler, spec, '{"uniqueItems":{"uniqueItems":7},"x":[2]}')
    assert not takes(compiler, spec, '{"uniqueItems":{"uniqueItems":7},"x":[2,2]}')


@pytest.mark.parametrize(
    ("schema", "match"),
    [
        (UNIQUE | {"items": {"type": "integer"}}, "#: uniqueItems can be followed where"),
        ({"type": "object", "properties": {"s": UNIQUE}}, "#/properties/s: uniqueItems"),
        (UNIQUE | {"items": {"enum": list(range(9))}}, "at most 128"),
        (UNIQUE | {"items": {"enum": [1]}, "minItems": 2}, "leaves 0"),
        (UNIQUE | {"items": {"enum": [1]}, "contains": {}}, "beside contains"),
        ({"uniqueItems": True, "items": {"enum": [1]}}, "without a type"),
        ({"type": "array", "uniqueItems": 1}, "neither true nor false"),
        (UNIQUE | {"items": {"enum": list(range(5000))}}, "5000 values"),
        (UNIQUE | {"items": {"enum": [1]}, "minItems": "1"}, "malformed"),
        (UNIQUE | {"items": {"enum": 5}}, "malformed"),
        (UNIQUE | {"items": {"$ref": "#/$defs/E"}, "$defs": [1]}, "malformed"),
    ],
)
@pytest.mark.long
def test_what_cannot_be_followed_is_refused_by_its_place(compiler, schema, match):
    with pytest.raises(InvalidGrammar, match=match):
        compiler.compile(GrammarSpec("json_schema", json.dumps(schema)))
