"""Structures of answers against a judge of its own: what the grammar takes, what it refuses, and what no text escapes.

The judge reads a text with Python's `re`, `json` and `jsonschema`. Texts of the language and mutants of them are judged
by both; a masked walk of random tokens must end in the language.
"""

import itertools
import json
import random
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from baton.core.errors import InvalidGrammar
from baton.core.requests.answer_structure import (
    STRUCTURE,
    AnswerStructure,
    CallableTool,
    CallForm,
    Calls,
    Thought,
    check_grammar,
)
from baton.core.requests.sampling import GrammarSpec
from baton.core.requests.tokenizer import Tokenizer
from baton.engine.grammar import trial
from baton.engine.grammar.grammar import GrammarCompiler
from baton.engine.grammar.text import library_text

pytestmark = pytest.mark.fast
TINY = Path(__file__).parents[2] / "assets" / "tiny"
FORM = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "w": {"enum": ["a", "b c"]}},
    "required": ["ok"],
    "additionalProperties": False,
}
ARGUMENTS = {
    "type": "object",
    "properties": {"n": {"$ref": "#/$defs/N"}, "s": {"type": "string", "maxLength": 8}},
    "required": ["n"],
    "additionalProperties": False,
    "$defs": {"N": {"enum": [1, 20, None]}},
}
TOOLS = (CallableTool("f", ARGUMENTS), CallableTool("free"))
SCHEMAS = {"f": ARGUMENTS, "free": {"type": "object"}}
JSON_FORM = ("json_schema", json.dumps(FORM))
STRUCTURES = {
    f"{thought} {calls} {'form' if text else 'text'} {'many' if parallel else 'one'}": AnswerStructure(
        thought=thought,
        calls=calls,
        tools=() if calls is Calls.NONE else TOOLS,
        parallel=parallel,
        text=text,
    )
    for thought in Thought
    for calls, text in (
        (Calls.AUTO, JSON_FORM),
        (Calls.AUTO, None),
        (Calls.REQUIRED, None),
        (Calls.NONE, JSON_FORM),
    )
    for parallel in ((True, False) if calls is not Calls.NONE else (True,))
}


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(Tokenizer.from_directory(TINY), 4096)


def spec_of(structure):
    return GrammarSpec("structure", structure.to_json())


def takes(compiler, structure, text):
    """Whether the grammar lets a model write this text, in the tokenizer's tokens, and end."""
    tokenizer = compiler._tokens._tokenizer
    state = compiler.start(spec_of(structure))
    tokens = [*tokenizer.encode(text), compiler._eos_token_ids[0]]
    return state.accept(tokens) == len(tokens) and state.is_finished


def is_compact(text):
    return not re.search(r"\s", re.sub(r'"(?:[^"\\]|\\.)*"', "", text))


def is_json_of(schema, text):
    try:
        value = json.loads(text)
    except ValueError:
        return False
    order = list(schema.get("properties", ()))
    return (
        jsonschema.Draft202012Validator(schema).is_valid(value)
        and is_compact(text)
        and (not order or [key for key in order if key in value] == list(value))
    )


CALL = re.compile(r'<tool_call>\n?\{"name": "(f|free)", "arguments": (.*?)\}\n?</tool_call>', re.DOTALL)


def call_ends(text, at):
    """Where calls that begin here may end."""
    for end in re.finditer("</tool_call>", text[at:]):
        found = CALL.fullmatch(text, at, at + end.end())
        if found and is_json_of(SCHEMAS[found[1]], found[2]):
            yield found.end()


def is_calls(text, parallel, at=0):
    return any(
        end == len(text) or (parallel and text[end] == "\n" and is_calls(text, parallel, end + 1))
        for end in call_ends(text, at)
    )


def is_free(text, parallel, at=0):
    found = text.find("<tool_call>", at)
    if found < 0:
        return True
    return any(
        is_free(text, parallel, end) if parallel else "<tool_call>" not in text[end:] for end in call_ends(text, found)
    )


def judge(structure, text):
    """Whether a text is of the structure."""
    is_bound = structure.text is not None or structure.calls is Calls.REQUIRED
    rests = []
    if structure.thought is Thought.OPEN or (structure.thought is Thought.OPTIONAL and text.startswith("<think>")):
        at = text.find("</think>")
        if at >= 0:
            rest = text[at + len("</think>") :]
            rests = [rest[num:] for num in range(3) if rest.startswith("\n" * num)] if is_bound else [rest]
    else:
        rests = [text]
    for rest in rests:
        if not is_bound:
            if is_free(rest, structure.parallel):
                return True
            continue
        if structure.calls is not Calls.NONE and is_calls(rest, structure.parallel):
            return True
        if structure.text is not None and is_json_of(FORM, rest):
            return True
    return False


CALLS = (
    '<tool_call>\n{"name": "f", "arguments": {"n":20}}\n</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"n":null,"s":"a\\"<b"}}</tool_call>',
    '<tool_call>\n{"name": "free", "arguments": {"x":[1,{"y":"</tool_call>"}]}}\n</tool_call>',
)
FORMED = ('{"ok":true}', '{"ok":false,"w":"b c"}')
THOUGHTS = ("", "<think>\nhm\n</think>\n\n", "hm <tool_call> {</think>", "</think>\n", "<think><think></think>")
BODIES = (*FORMED, *CALLS, CALLS[0] + "\n" + CALLS[1], "so:\n" + CALLS[1] + CALLS[2] + " and", "a <tool_cal", "<thin")
TEXTS = ["".join(parts) for parts in itertools.product(THOUGHTS, BODIES)]
PIECES = (
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "\n",
    " ",
    "{",
    "}",
    '"',
    "n",
    "f",
    "ree",
    ",",
    "1",
    "null",
)


def mutant(draw, text):
    """A text with one place changed."""
    at = draw.randrange(len(text) + 1)
    to = min(len(text), at + draw.choice((0, 0, 1, 1, 2, 8)))
    more = draw.choice((*PIECES, "", "", text[draw.randrange(len(text) + 1) :][:12]))
    return text[:at] + more + text[to:]


@pytest.mark.long
@pytest.mark.parametrize("name", STRUCTURES)
def test_the_grammar_takes_what_the_judge_takes(compiler, name):
    structure, draw = STRUCTURES[name], random.Random(name)
    num_taken = 0
    for text in TEXTS:
        want = judge(structure, text)
        num_taken += want
        assert takes(compiler, structure, text) == want, text
    assert num_taken >= 2
    good = [text for text in TEXTS if judge(structure, text)]
    for _ in range(30):
        text = mutant(draw, draw.choice(good))
        assert takes(compiler, structure, text) == judge(structure, text), text


def walk(compiler, structure, draw):
    """A text of allowed tokens: those of a sentence where the mask allows them, some at random, EOS when it may be."""
    tokenizer = compiler._tokens._tokenizer
    state = compiler.start(spec_of(structure))
    tokens = []
    for hint in tokenizer.encode(draw.choice(TEXTS) + draw.choice(TEXTS) + draw.choice(CALLS)):
        mask_W = state.masks([])[0]
        allowed = np.flatnonzero(np.unpackbits(mask_W.view(np.uint8), bitorder="little")[:4096]).tolist()
        assert allowed, tokenizer.decode(tokens)
        ends = [token_id for token_id in compiler._eos_token_ids if token_id in allowed]
        if ends and draw.random() < 0.5:
            return tokenizer.decode(tokens)
        chosen = draw.choice(allowed) if draw.random() < 0.1 else hint
        if chosen in allowed and chosen not in ends:
            assert state.accept([chosen]) == 1
            tokens.append(chosen)
    return None


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in STRUCTURES if "many" not in name])
def test_random_tokens_end_in_the_language(compiler, name):
    structure = STRUCTURES[name]
    draw = random.Random(name)
    texts = [walk(compiler, structure, draw) for _ in range(40)]
    ended = [text for text in texts if text is not None]
    assert ended
    for text in ended:
        assert judge(structure, text), text


@pytest.mark.long
def test_a_regex_does_not_hide_the_calls(compiler):
    structure = AnswerStructure(thought=Thought.OPTIONAL, calls=Calls.AUTO, tools=TOOLS, text=("regex", "(?s:.*)"))
    for text, want in (
        (CALLS[0], True),
        ("<tool_call>x", False),
        ("a<tool_call>x", True),
        ("", True),
        ("<think>x", False),
    ):
        assert takes(compiler, structure, text) == want, text


@pytest.mark.parametrize("grammar", ['root ::= "a" | "(" root ")"', 'start: "a" | "(" start ")"'])
def test_a_grammar_of_the_client_goes_with_calls(compiler, grammar):
    structure = AnswerStructure(calls=Calls.AUTO, tools=TOOLS, text=("grammar", grammar))
    for text, want in ((CALLS[0], True), ("((a))", True), ("((a)", False), ("a" + CALLS[0], False)):
        assert takes(compiler, structure, text) == want, text


TAGGED = {
    "type": "object",
    "properties": {
        "s": {"type": "string", "description": "any"},
        "e": {"type": "string", "enum": ["x", "y z"]},
        "n": {"type": "array", "items": {"$ref": "#/$defs/N"}},
    },
    "required": ["s"],
    "$defs": {"N": {"type": "integer"}},
}


def tagged(name="f", **values):
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (tagged(s="a\n<b> {"), True),
        (tagged(s=""), True),
        (tagged(s="a", e="y z", n="[1,-2]"), True),
        (tagged(s="a", n="[]"), True),
        (tagged(), False),
        (tagged(e="x"), False),
        (tagged(s="a", e="z"), False),
        (tagged(s="a", n="[1.5]"), False),
        (tagged(s="a", other="1"), False),
        (tagged(s="a</parameter>b"), False),
        (tagged("g", s="a"), False),
        (tagged("free", z="1"), True),
        ('<tool_call>\n{"name": "json", "arguments": {"s":"ab"}}\n</tool_call>', True),
        ('<tool_call>\n{"name": "json", "arguments": {"s":"ba"}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "f", "arguments": {"s":"ab"}}\n</tool_call>', False),
    ],
)
def test_calls_of_tags(compiler, text, want):
    patterned = {"type": "object", "properties": {"s": {"type": "string", "pattern": "^ab"}}, "required": ["s"]}
    tools = (CallableTool("f", TAGGED), CallableTool("free"), CallableTool("json", patterned))
    structure = AnswerStructure(calls=Calls.REQUIRED, tools=tools, form=CallForm.QWEN3_CODER)
    assert takes(compiler, structure, text) == want


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "empty"),
        ("[]", "no object"),
        ("{", "structure"),
        ("[" * 30000, "structure"),
        ('{"thoughts": "none"}', "thoughts"),
        ('{"thought": "deep"}', "deep"),
        ('{"calls": "auto"}', "go together"),
        ('{"tools": [{"name": "f"}]}', "go together"),
        ("{}", "neither"),
        ('{"calls": "required", "tools": [{"name": "f"}], "text": {"kind": "json_object"}}', "required"),
        ('{"calls": "auto", "tools": [{"name": "a b"}]}', "name"),
        ('{"calls": "auto", "tools": [{"name": "f", "x": 1}]}', "tool"),
        ('{"calls": "auto", "tools": [{"name": "f", "parameters": 1}]}', "f: parameters"),
        ('{"calls": "auto", "tools": [{"name": "f", "parameters": false}]}', "tool f: .*nothing"),
        ('{"calls": "auto", "tools": [{"name": "f", "parameters": {"x-guidance": {}}}]}', "x-guidance"),
        ('{"calls": "auto", "parallel": 1, "tools": [{"name": "f"}]}', "parallel"),
        ('{"calls": "auto", "tools": {"name": "f"}}', "list"),
        ('{"text": {"kind": "structure", "text": "{}"}}', "no structure"),
        ('{"text": {"kind": "json_schema", "text": "no"}}', "json_schema"),
        ('{"text": {"kind": "word", "text": "no"}}', "word"),
        ('{"text": "a"}', "kind"),
    ],
)
def test_what_is_no_structure(text, match):
    with pytest.raises(InvalidGrammar, match=match):
        check_grammar("structure", text)


def test_a_schema_that_does_not_compile_is_refused(compiler):
    tools = (CallableTool("f", {"type": "no"}),)
    with pytest.raises(InvalidGrammar, match="structure"):
        compiler.compile(spec_of(AnswerStructure(calls=Calls.AUTO, tools=tools)))


@pytest.mark.parametrize("parameters", [True, {}, {"title": "any"}, {"type": ["object", "null"]}, {"anyOf": [{}]}])
@pytest.mark.parametrize(
    ("form", "call", "text"),
    [
        (CallForm.HERMES, '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>', None),
        (CallForm.MISTRAL_ARGS, "[TOOL_CALLS]f[ARGS]%s", None),
        (CallForm.LLAMA3_JSON, '{"name": "f", "parameters": %s}', None),
        (CallForm.LLAMA3_JSON, '{"name":"f","parameters":%s}', ("json_schema", '{"const":1}')),
    ],
)
@pytest.mark.long
def test_arguments_are_an_object_though_the_schema_does_not_say_so(compiler, parameters, form, call, text):
    calls = Calls.REQUIRED if text is None else Calls.AUTO
    structure = AnswerStructure(calls=calls, tools=(CallableTool("f", parameters),), form=form, text=text)
    assert takes(compiler, structure, call % "{}")
    for other in ("null", "1", "[]", '"a"'):
        assert not takes(compiler, structure, call % other)


@pytest.mark.parametrize(
    ("form", "call"),
    [
        (CallForm.HERMES, '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'),
        (CallForm.MISTRAL_ARGS, "[TOOL_CALLS]f[ARGS]%s"),
        (CallForm.LLAMA3_JSON, '{"name": "f", "parameters": %s}'),
    ],
)
def test_a_function_without_arguments_is_called_without(compiler, form, call):
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    structure = AnswerStructure(calls=Calls.REQUIRED, tools=(CallableTool("f", nothing),), form=form)
    assert takes(compiler, structure, call % "{}")
    assert not takes(compiler, structure, call % '{"a": 1}')


@pytest.mark.parametrize("form", [CallForm.QWEN3_CODER, CallForm.GLM45])
def test_a_function_without_arguments_is_called_without_tags(compiler, form):
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    structure = AnswerStructure(calls=Calls.REQUIRED, tools=(CallableTool("f", nothing),), form=form)
    bare = {CallForm.QWEN3_CODER: tagged(), CallForm.GLM45: "<tool_call>f\n</tool_call>"}[form]
    assert takes(compiler, structure, bare)


@pytest.mark.parametrize("kinds", ["string", ["array", "null"], [], 5])
def test_arguments_that_are_no_object_are_refused(kinds):
    structure = AnswerStructure(calls=Calls.REQUIRED, tools=(CallableTool("f", {"type": kinds}),))
    with pytest.raises(InvalidGrammar, match="are an object"):
        library_text("structure", structure.to_json())


MALFORMED = {
    "enum of no list": ({"properties": {"a": {"type": "string", "enum": 5}}}, "enum must be an array"),
    "enum of letters": ({"properties": {"a": {"type": "string", "enum": "abc"}}}, "enum must be an array"),
    "enum of null": ({"properties": {"a": {"type": "string", "enum": None}}}, "enum must be an array"),
    "enum of nothing": ({"properties": {"a": {"type": "string", "enum": []}}, "required": ["a"]}, "unsatisfiable"),
    "required list": ({"required": [["a"]]}, "Expected string for 'required'"),
    "required false": ({"properties": {"a": False}, "required": ["a"]}, "unsatisfiable"),
    "additional number": ({"additionalProperties": 1}, "must be an object or boolean"),
    "no schema": ({"properties": {"a": 5}}, "must be an object or boolean"),
    "no definitions": ({"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": 5}, "does not exist"),
}


@pytest.mark.parametrize(("parameters", "match"), MALFORMED.values(), ids=MALFORMED)
@pytest.mark.parametrize("form", [CallForm.HERMES, CallForm.QWEN3_CODER, CallForm.GLM45])
@pytest.mark.long
def test_a_malformed_schema_is_refused_for_what_it_is(compiler, form, parameters, match):
    tools = (CallableTool("f", parameters),)
    with pytest.raises(InvalidGrammar, match=match):
        compiler.compile(spec_of(AnswerStructure(calls=Calls.REQUIRED, tools=tools, form=form)))


def test_a_parameter_that_is_never_there_is_left_out(compiler):
    tools = (CallableTool("f", {"properties": {"s": False, "n": {"type": "boolean"}}}),)
    structure = AnswerStructure(calls=Calls.REQUIRED, tools=tools, form=CallForm.QWEN3_CODER)
    assert takes(compiler, structure, tagged(n="true"))
    assert not takes(compiler, structure, tagged(s="true"))


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}]},
        {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/x~1"}}, "$defs": {"x/": {"$ref": "#/$defs/x~1"}}},
    ],
    ids=json.dumps,
)
@pytest.mark.long
def test_a_schema_of_itself_alone_is_refused_wherever_it_stands(compiler, schema):
    tools = (CallableTool("f", schema),)
    text = ("json_schema", json.dumps(schema))
    for spec in (
        GrammarSpec(*text),
        spec_of(AnswerStructure(thought=Thought.OPEN, text=text)),
        spec_of(AnswerStructure(calls=Calls.AUTO, tools=(CallableTool("g"),), text=text)),
        *(spec_of(AnswerStructure(calls=Calls.REQUIRED, tools=tools, form=form)) for form in CallForm),
    ):
        with pytest.raises(InvalidGrammar, match=r"leads back|NoExtensionBias|circular"):
            compiler.compile(spec)


def test_a_schema_that_refers_to_itself_further_in_is_followed(compiler):
    schema = {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False}
    structure = AnswerStructure(thought=Thought.OPEN, text=("json_schema", json.dumps(schema)))
    assert takes(compiler, structure, '</think>{"a":{"a":{}}}')


def test_what_a_child_raises_is_no_limit(monkeypatch):
    job = {"kind": "json_schema", "text": "{}", "limits": {}, "is_compact": True}

    def raises(*_, **__):
        raise error

    monkeypatch.setattr(trial, "library_text", raises)
    error = TypeError("unhashable")
    assert trial._tried(None, job) == {"error": "json_schema: it cannot be read (TypeError: unhashable)"}
    error = MemoryError()
    with pytest.raises(MemoryError):
        trial._tried(None, job)


MANY = [f"v{at}" for at in range(2000)]
UNIQUE = {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2, 3, 4]}}


def many_parameters(values):
    """A tool of many parameters, and definitions as large as all of them."""
    parameters = {"type": "object", "properties": values, "$defs": {"many": {"enum": MANY}}}
    tools = (CallableTool("f", parameters),)
    return STRUCTURE, AnswerStructure(calls=Calls.REQUIRED, tools=tools, form=CallForm.QWEN3_CODER).to_json()


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        many_parameters({f"p{at}": {"$ref": "#/$defs/many", "title": str(at)} for at in range(400)}),
        ("json_schema", json.dumps({"allOf": [UNIQUE] * 800})),
    ],
)
def test_what_grows_when_it_is_written_out_is_refused(kind, text):
    check_grammar(kind, text)
    with pytest.raises(InvalidGrammar, match="once it is written out"):
        library_text(kind, text)


@pytest.mark.parametrize(
    ("number", "why"),
    [
        ("9" * 309, f"json_schema: {'9' * 40} is beyond the range of numbers"),
        ("-" + "9" * 5000, f"json_schema: -{'9' * 39} is beyond the range of numbers"),
        ("1e999", "json_schema: 1e999 is beyond the range of numbers"),
        ("-1.5E400", "json_schema: -1.5E400 is beyond the range of numbers"),
        ("Infinity", "json_schema: Infinity is no JSON number"),
    ],
)
@pytest.mark.parametrize("at", ["minimum", "const", "x-unknown"])
def test_numbers_that_no_schema_can_hold_are_refused_in_words_about_them(number, why, at):
    with pytest.raises(InvalidGrammar) as caught:
        check_grammar("json_schema", f'{{"anyOf": [{{"{at}": {number}}}]}}')
    assert caught.value.message == why


def test_numbers_within_their_bounds_pass():
    for number in ("9" * 308, "-" + "9" * 308, "1e308", "-1e308", "1e-999", "0.0"):
        check_grammar("json_schema", f'{{"minimum": {number}}}')


def test_definitions_go_only_where_they_are_referred_to():
    text = library_text(*many_parameters({f"p{at}": {"type": "integer", "title": str(at)} for at in range(400)}))
    assert "v1999" not in text


def test_a_structure_comes_back_from_its_text():
    for structure in STRUCTURES.values():
        assert AnswerStructure.from_json(structure.to_json()) == structure
