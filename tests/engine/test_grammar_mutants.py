"""Mutants of valid grammars: each compiles or is refused by type, within a bound of CPU time, and none hangs."""

import json
import random
from pathlib import Path

import pytest

from baton.core.errors import BatonError, InvalidGrammar
from baton.core.requests.answer_structure import check_grammar
from baton.core.requests.sampling import GrammarSpec
from baton.core.requests.tokenizer import Tokenizer
from baton.engine.grammar import text as grammar_text
from baton.engine.grammar.grammar import OWN_LIMITS, GrammarCompiler
from baton.engine.grammar.trial import TRIAL_CPU_S, GrammarTrial

TINY = Path(__file__).parents[2] / "assets" / "tiny"
VALID = {
    "regex": [
        r"(def|class) [a-z_]{1,12}\([a-z, ]{0,20}\):",
        r"[A-Z][a-z]+( [0-9]{1,3}|\.)*",
        r"(a|b)*?x{2,5}[^\n\"]\p{L}?",
    ],
    "ebnf": [
        'root ::= "[" item ("," item){1,3} "]"\nitem ::= [0-9]{1,3} | "(" root ")"',
        'root ::= object\nobject ::= "{" (pair ("," pair)*)? "}"\npair ::= name ":" [0-9]+\nname ::= "#" [a-z]*\n',
    ],
    "lark": [
        'start: (word " ")* word\nword: /[a-z]+/ | NUMBER\nNUMBER: /[0-9]+/\n',
        '?start: expr\n?expr: term ("+" term)*\nterm: /[0-9]+/ | "(" expr ")"\n%ignore / +/\n',
        'start: <|im_start|> "x" %json {"type": "object", "properties": {"a": {"type": "integer"}}}',
    ],
    "json_schema": [
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 12},
                "tags": {"type": "array", "items": {"enum": ["x", 1, None]}, "maxItems": 3},
            },
            "required": ["name"],
            "additionalProperties": False,
        },
        {
            "$defs": {"n": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]}},
            "type": "array",
            "items": {"$ref": "#/$defs/n"},
        },
        {"type": "integer", "minimum": -5, "exclusiveMaximum": 1e3, "multipleOf": 5},
        {"type": "string", "pattern": "^[a-z]+(-[0-9]{2})?$", "minLength": 2},
    ],
    "choice": [{"enum": ["yes", "no", "perhaps"]}, {"enum": ["a", "ab", "abc", ""]}],
    "json_object": [""],
}
ODD = (
    "(",
    ")",
    "[",
    "]",
    "{",
    "}",
    "::=",
    ":",
    "|",
    "*",
    "+",
    "?",
    "\\",
    '"',
    "/",
    "\n",
    "root",
    "start",
    "%",
    "<",
    "{9}",
    ",",
    "\x00",
    "ü",
)
ODD_VALUES: tuple[object, ...] = (
    None,
    -1,
    0,
    1e300,
    10**20,
    "",
    "a",
    [],
    {},
    True,
    {"type": "thing"},
    "(",
    {"$ref": "#"},
    {"$ref": "#/x"},
    [[]],
)
KINDS = {"ebnf": "grammar", "lark": "grammar", "choice": "json_schema"}


def mutated_text(text, rng):
    """A few characters gone, doubled, swapped or new."""
    for _ in range(rng.randrange(1, 4)):
        at, to = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
        match rng.randrange(4):
            case 0:
                text = text[:at] + text[to if to - at < 6 else at + 1 :]
            case 1:
                text = text[:at] + rng.choice(ODD) + text[at:]
            case 2:
                text = text[:to] + text[at:to] + text[to:]
            case _:
                text = text.replace(
                    rng.choice(("root", "item", "start", "word", "a", "[", '"', "0")), rng.choice(ODD), 1
                )
    return text


def mutated_value(value, rng):
    """One place of a schema is another."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.2:
        return rng.choice(ODD_VALUES)
    if isinstance(value, list):
        at = rng.randrange(len(value))
        return [*value[:at], mutated_value(value[at], rng), *value[at + 1 :]]
    key = rng.choice(tuple(value))
    rest = {other: inner for other, inner in value.items() if other != key}
    return rest | {rng.choice((key, key, key, "items", "pattern", "oneOf", "not")): mutated_value(value[key], rng)}


def mutants(form, count):
    rng = random.Random(form)
    for _ in range(count):
        valid = rng.choice(VALID[form])
        if isinstance(valid, dict):
            value = mutated_value(valid, rng)
            text = json.dumps(value) if rng.random() < 0.8 else mutated_text(json.dumps(value), rng)
        else:
            text = mutated_text(valid, rng) if valid or rng.random() < 0.5 else ""
        yield GrammarSpec(KINDS.get(form, form), text)


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(Tokenizer.from_directory(TINY), 4096)


@pytest.mark.parametrize("form", VALID)
def test_valid_ones_compile(form, compiler):
    for valid in VALID[form]:
        compiler.compile(GrammarSpec(KINDS.get(form, form), json.dumps(valid) if isinstance(valid, dict) else valid))


def check_mutants(form, count, compiler):
    num_refused = 0
    for spec in mutants(form, count):
        try:
            compiler.compile(spec)
        except InvalidGrammar as error:
            assert 0 < len(error.message) <= 300
            assert "takes more than" not in error.message, spec
            num_refused += 1
    return num_refused


@pytest.mark.parametrize("form", VALID)
def test_mutants_are_refused_by_type(form, compiler):
    """The kernel ends a compilation at `TRIAL_CPU_S`; none of these comes near it."""
    assert check_mutants(form, 12, compiler) > 0
    assert TRIAL_CPU_S < 1.0


@pytest.mark.slow
@pytest.mark.parametrize("form", VALID)
def test_two_hundred_mutants_are_refused_by_type(form, compiler):
    assert check_mutants(form, 200, compiler) >= 20


@pytest.mark.parametrize(
    "text", ["root ::= foo", 'item ::= "a"', '" "\nroot ::=', "root ::= a\nroot ::= b\na ::= root", "::="]
)
def test_mistyped_ebnf_is_refused(text, compiler):
    with pytest.raises(InvalidGrammar):
        compiler.compile(GrammarSpec("grammar", text))


class OddError(Exception):
    """Of a library that declares no errors."""


def test_whatever_the_converter_raises_is_a_refusal(monkeypatch):
    import llguidance.gbnf_to_lark

    def broken(_):
        raise OddError("odd")

    monkeypatch.setattr(llguidance.gbnf_to_lark, "gbnf_to_lark", broken)
    with pytest.raises(InvalidGrammar, match="odd"):
        grammar_text.library_text("grammar", 'root ::= "a"')


def test_a_compilation_that_does_not_end_is_ended(compiler):
    """Its process is stopped by the kernel; others are compiled beside it."""
    schema = {"type": "integer", "multipleOf": 999983, "minimum": 0, "maximum": 10**12}
    with pytest.raises(InvalidGrammar, match="takes more than"):
        compiler.compile(GrammarSpec("json_schema", json.dumps(schema)))
    compiler.compile(GrammarSpec("regex", "still here"))


def test_a_trial_process_that_died_is_started_again(compiler):
    compiler.compile(GrammarSpec("regex", "before"))
    process = compiler._trial._process
    process.kill()
    process.wait()
    compiler.compile(GrammarSpec("regex", "after"))
    assert compiler._trial._process is not process


def test_the_trial_process_ends_with_its_owner():
    tokenizer = Tokenizer.from_directory(TINY)
    trial = GrammarTrial((tokenizer.to_json(), 4096, 0))
    assert trial.text_of("regex", "a", OWN_LIMITS, is_compact=True)
    process = trial._process
    del trial
    assert process.wait(60) == 0


def test_every_mutant_is_checked_outside_first():
    """What the outside check refuses, it refuses by type."""
    for form in VALID:
        for spec in mutants(form, 60):
            try:
                check_grammar(spec.kind, spec.text)
            except BatonError as error:
                assert isinstance(error, InvalidGrammar)
