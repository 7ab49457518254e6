"""Masks of grammars, against brute force: every token tried, every language listed by Python's own `re` and `json`."""

import itertools
import json
import random
import re
import time
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from baton.core.errors import GrammarBudgetExceeded, InvalidGrammar
from baton.core.requests.sampling import GrammarSpec
from baton.core.requests.tokenizer import Tokenizer
from baton.engine.grammar import grammar as grammar_module
from baton.engine.grammar.grammar import QUICK_LIMITS, GrammarBudget, GrammarCompiler
from baton.engine.grammar.text import refusal

pytestmark = pytest.mark.fast
TINY = Path(__file__).parents[2] / "assets" / "tiny"
# Tokens of one to four bytes, some the beginning of others, two EOS; `V` exceeds the number of tokens.
TEXTS = [
    *'abc01{}[]:," ',
    "ab",
    "ba",
    "aba",
    "abab",
    "bc",
    "cc",
    "01",
    "10",
    '{"',
    '":',
    '",',
    '"}',
    "true",
    "tr",
    "ue",
]
TEXTS += ["fal", "se", "null", "[]", "{}", "],", '"a"', '"b', "a,"]
EOS = (len(TEXTS), len(TEXTS) + 1)
VOCAB_SIZE = len(TEXTS) + 9


def small_tokenizer(eos=EOS):
    spelled = [text.replace(" ", "Ġ") for text in TEXTS]
    vocab = {text: at for at, text in enumerate([*spelled, "<eos>", "<end>"])}
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<eos>", "<end>"])
    return Tokenizer(fast, eos)


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(small_tokenizer(), VOCAB_SIZE)


@pytest.fixture(scope="module")
def tiny():
    return GrammarCompiler(Tokenizer.from_directory(TINY), 4096)


@pytest.fixture(scope="module")
def spaced():
    return GrammarCompiler(Tokenizer.from_directory(TINY), 4096, is_compact=False)


def allowed(mask_W, vocab_size=VOCAB_SIZE):
    return {t for t in range(vocab_size) if mask_W[t // 32] >> (t % 32) & 1}


def reference(language, text):
    """Tokens after which `text` can still become a word of the finite language, and EOS if it is one."""
    tokens = {t for t, piece in enumerate(TEXTS) if any(word.startswith(text + piece) for word in language)}
    return tokens | (set(EOS) if text in language else set())


def words(alphabet, longest):
    return ("".join(word) for size in range(longest + 1) for word in itertools.product(alphabet, repeat=size))


REGEXES = {
    "(ab|ba){0,3}c?": ("abc", 7),
    "a{2,4}|b(c|0)": ("abc0", 4),
    "(a|ab)(c|bcc)?": ("abc", 5),
    "[ab]{3}": ("abc", 4),
    "a?b?c?0?1?": ("abc01", 5),
    "(0|10|110)[01]{0,2}": ("01", 6),
}


def languages():
    for pattern, (alphabet, longest) in REGEXES.items():
        whole = re.compile(pattern)
        yield GrammarSpec("regex", pattern), {word for word in words(alphabet, longest) if whole.fullmatch(word)}
    nested = {f"{'[' * n}{'a' * m}{']' * n}" for n in range(4) for m in (0, 1) if n or m}
    yield GrammarSpec("grammar", 'start: a | b | c | d\na: "a"\nb: "[" a? "]"\nc: "[" b "]"\nd: "[" c "]"'), nested
    yield (
        GrammarSpec("grammar", 'root ::= "a" x | "[" [01] "]"\nx ::= ("b" | "c"){0,2}'),
        {
            *(f"a{tail}" for tail in words("bc", 2)),
            "[0]",
            "[1]",
        },
    )
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"enum": [0, 1, 10, None, "ab"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    documents = [{"a": a} | more for a in (True, False) for more in ({}, *({"b": b} for b in (0, 1, 10, None, "ab")))]
    assert all(jsonschema.Draft202012Validator(schema).is_valid(document) for document in documents)
    yield GrammarSpec("json_schema", json.dumps(schema)), {json.dumps(d, separators=(",", ":")) for d in documents}


LANGUAGES = list(languages())


@pytest.mark.parametrize(("spec", "language"), LANGUAGES, ids=lambda value: getattr(value, "text", "")[:20])
@pytest.mark.long
def test_masks_of_finite_languages_are_exact_after_every_prefix(spec, language, compiler):
    seen, waiting, num_rows = set(), [()], 0
    while waiting:
        tokens = waiting.pop()
        text = "".join(TEXTS[t] for t in tokens)
        state = compiler.start(spec, tokens)
        expected = reference(language, text)
        assert allowed(state.masks([])[0]) == expected, text
        for token in expected - set(EOS):
            # One draft ahead is the same as one token further, and leaves the state where it is.
            look = state.look([token])
            assert look.num_valid == 1
            assert allowed(look.masks_QW[1]) == reference(language, text + TEXTS[token]), text + TEXTS[token]
            num_rows += 1
            if (further := text + TEXTS[token]) not in seen:
                seen.add(further)
                waiting.append((*tokens, token))
        for token in set(range(VOCAB_SIZE)) - expected:
            assert state.num_valid([token, 0]) == 0
        assert allowed(state.masks([])[0]) == expected
        assert state.error is None
    assert num_rows >= 5


@pytest.mark.long
@pytest.mark.parametrize("spec", [spec for spec, _ in LANGUAGES], ids=lambda spec: spec.text[:20])
def test_looking_ahead_equals_having_accepted(spec, compiler):
    rng = random.Random(0)
    for _ in range(60):
        state = compiler.start(spec)
        while not state.is_finished:
            drafts = []
            for _ in range(rng.randrange(5)):
                after = compiler.start(spec, [*taken(state), *drafts])
                choice = sorted(allowed(after.masks([])[0])) if not after.error and not after.is_finished else []
                drafts.append(rng.choice(choice) if choice and rng.random() < 0.8 else rng.randrange(VOCAB_SIZE))
            look = state.look(drafts)
            rows, num_valid = [], 0
            for at in range(len(drafts) + 1):
                probe = compiler.start(spec, taken(state))
                if probe.accept(drafts[:at]) < at:
                    break
                num_valid = at
                if probe.is_finished:
                    break
                rows.append(probe.masks([])[0])
            assert look.num_valid == num_valid
            np.testing.assert_array_equal(look.masks_QW[: len(rows)], rows)
            assert (look.masks_QW[len(rows) :] == -1).all()
            state.accept([rng.choice(sorted(allowed(look.masks_QW[0])))])


def taken(state):
    return tuple(state._accepted)


def test_drafts_past_the_end_and_out_of_range(compiler):
    state = compiler.start(GrammarSpec("regex", "ab?"))
    a, b = TEXTS.index("a"), TEXTS.index("b")
    assert state.num_valid([a, EOS[1], a, b]) == 2
    assert state.num_valid([a, b, b]) == 2
    assert state.num_valid([EOS[0], a]) == 0
    assert state.num_valid([-1, a]) == 0
    assert state.num_valid([a, VOCAB_SIZE + 5]) == 1
    assert state.accept([a, b, EOS[1], a]) == 3
    assert state.is_finished
    assert state.error is None
    assert (state.masks([a, b]) == -1).all()
    assert state.num_valid([a]) == 0
    assert state.accept([a]) == 0


@pytest.mark.parametrize("token", [EOS[0], 2, -7, VOCAB_SIZE])
def test_a_token_that_cannot_be_ends_the_state_not_the_process(compiler, token):
    state = compiler.start(GrammarSpec("regex", "ab?"))
    assert state.accept([TEXTS.index("a")]) == 1
    other = compiler.start(GrammarSpec("regex", "aab?"))
    assert state.accept([TEXTS.index("b"), token]) == 1 + (token == EOS[0])
    assert other.accept([0, token]) == 1
    assert isinstance(other.error, InvalidGrammar)
    assert (other.masks([0, 1]) == -1).all()
    assert other.accept([0]) == 0


@pytest.mark.long
def test_every_token_may_be_eos_only_where_the_text_may_end(tiny):
    tokenizer = Tokenizer.from_directory(TINY)
    tokenizer.eos_token_ids = (0, 2)
    compiler = GrammarCompiler(tokenizer, 4096)
    state = compiler.start(GrammarSpec("regex", "(yes|no)!?"))
    for token in tokenizer.encode("no"):
        assert not {0, 1, 2} & allowed(state.masks([])[0], 4096)
        state.accept([token])
    assert {0, 1, 2} & allowed(state.masks([])[0], 4096) == {0, 2}
    state.accept(tokenizer.encode("!"))
    assert allowed(state.masks([])[0], 4096) == {0, 2}


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["x", "yy", "ü"]}, "maxItems": 3},
        "where": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.long
def test_random_walks_along_the_masks_end_in_valid_json(tiny):
    tokenizer, rng = Tokenizer.from_directory(TINY), random.Random(1)
    spec, num_ended = GrammarSpec("json_schema", json.dumps(SCHEMA)), 0
    for _ in range(12):
        state, tokens = tiny.start(spec), []
        while not state.is_finished and len(tokens) < 400:
            choice = sorted(allowed(state.masks([])[0], 4096))
            closing = [t for t in choice if t == 0 or set(tokenizer.decode([t])) <= set('"}],')]
            tokens.append(rng.choice(closing if closing and rng.random() < 0.5 else choice))
            state.accept(tokens[-1:])
        if state.is_finished:
            num_ended += 1
            jsonschema.validate(json.loads(tokenizer.decode(tokens)), SCHEMA)
    assert num_ended >= 3


@pytest.mark.parametrize("indent", [None, 0, 2])
@pytest.mark.long
def test_no_document_is_forbidden_however_it_is_cut(spaced, indent):
    tokenizer, rng = Tokenizer.from_directory(TINY), random.Random(2)
    documents = [
        {"name": 'Ann\n"ö"', "age": 7},
        {"name": "", "age": 150, "tags": ["ü", "x"], "where": {"lat": -1.5e-3}},
    ]
    for document, spec in itertools.product(
        documents, (GrammarSpec("json_schema", json.dumps(SCHEMA)), GrammarSpec("json_object"))
    ):
        text = json.dumps(document, indent=indent, ensure_ascii=False)
        cut = rng.randrange(len(text))
        tokens = [*tokenizer.encode(text[:cut]), *tokenizer.encode(text[cut:]), 0]
        state = spaced.start(spec)
        assert [state.num_valid(tokens), state.accept(tokens)] == [len(tokens)] * 2
        assert state.is_finished


@pytest.mark.long
def test_json_is_compact_unless_asked_otherwise(tiny, spaced):
    tokenizer = Tokenizer.from_directory(TINY)
    for spec in (GrammarSpec("json_schema", json.dumps(SCHEMA)), GrammarSpec("json_object")):
        for text, is_spaced in (
            ('{"name":"x","age":1', False),
            ('{ "name":', True),
            ('{"name" :', True),
            ('{\n"name"', True),
        ):
            tokens = tokenizer.encode(text)
            assert (tiny.start(spec, tokens).error is None) == (not is_spaced)
            assert spaced.start(spec, tokens).error is None


def test_special_tokens_in_a_grammar_are_taken_back_too(tiny):
    start, end = 1, 2
    tokenizer = Tokenizer.from_directory(TINY)
    x, y = tokenizer.encode("x")[0], tokenizer.encode("y")[0]
    state = tiny.start(GrammarSpec("grammar", 'start: "x" <|im_start|> "y" <[2]> "x"'))
    drafts = [x, start, y, end, x, 0]
    for at in range(len(drafts)):
        before = state.masks([])
        assert state.num_valid(drafts[at:]) == len(drafts) - at
        np.testing.assert_array_equal(state.masks([]), before)
        assert state.accept([drafts[at]]) == 1
    assert state.is_finished


BAD = {
    "kind": GrammarSpec("yaml", "a: b"),
    "empty": GrammarSpec("regex", ""),
    "text": GrammarSpec("json_object", "{}"),
    "huge regex": GrammarSpec("regex", "a" * 70_000),
    "huge schema": GrammarSpec("json_schema", json.dumps({"enum": [f"value {at}" for at in range(10_000)]})),
    "surrogate": GrammarSpec("regex", "\ud800"),
    "json": GrammarSpec("json_schema", "{"),
    "nan": GrammarSpec("json_schema", '{"minimum": NaN}'),
    "list": GrammarSpec("json_schema", "[]"),
    "false": GrammarSpec("json_schema", "false"),
    "library": GrammarSpec("json_schema", '{"x-guidance": {"lenient": true}}'),
    "type": GrammarSpec("json_schema", '{"type": "thing"}'),
    "keyword": GrammarSpec("json_schema", '{"dependentSchemas": {"a": {}}}'),
    "remote": GrammarSpec("json_schema", '{"$ref": "http://127.0.0.1:9/x.json"}'),
    "circle": GrammarSpec("json_schema", '{"$ref": "#"}'),
    "deep": GrammarSpec("json_schema", '{"items":' * 6000 + "{}" + "}" * 6000),
    "many": GrammarSpec("json_schema", json.dumps({"properties": {f"p{at}": {} for at in range(3000)}})),
    "look": GrammarSpec("json_schema", '{"type": "string", "pattern": "(?=a)b"}'),
    "open": GrammarSpec("regex", "(a"),
    "backref": GrammarSpec("regex", r"(a)\1"),
    "nothing": GrammarSpec("regex", r"[^\s\S]"),
    "deep regex": GrammarSpec("regex", "(" * 30_000 + "a" + ")" * 30_000),
    "no rule": GrammarSpec("grammar", "start: other"),
    "loop": GrammarSpec("grammar", "start: start"),
    "bytes": GrammarSpec("grammar", "\x00\x01"),
    "deep rule": GrammarSpec("grammar", "start: " + "(" * 30_000),
    "deep ebnf": GrammarSpec("grammar", "root ::= " + "(" * 30_000),
    "open ebnf": GrammarSpec("grammar", "root ::= [a"),
    "only eos": GrammarSpec("grammar", 'start: <[0]> "a"'),
    "inline": GrammarSpec(
        "grammar", "start: %json " + json.dumps({"properties": {f"p{at}": {} for at in range(2000)}})
    ),
}


@pytest.mark.parametrize("spec", BAD.values(), ids=BAD)
@pytest.mark.long
def test_bad_grammars_are_refused_by_type_and_soon(tiny, spec):
    start_s = time.monotonic()
    with pytest.raises(InvalidGrammar) as caught:
        tiny.compile(spec)
    assert time.monotonic() - start_s < 5
    assert 0 < len(caught.value.message) <= 300
    caught.value.to_wire()


HARD = {
    "repeats": GrammarSpec("regex", "(((((a{1,30}){1,30}){1,30}){1,30}){1,30})"),
    "overlap": GrammarSpec("regex", "(a|aa)*b" * 500),
    "states": GrammarSpec("regex", "(.*a.{15}|.*b.{17}|.*c.{19})"),
    "unicode": GrammarSpec("regex", r"(\p{L}\p{N}|\p{P}){1,200}[\p{Greek}]*" * 100),
    "long": GrammarSpec("regex", "a{20000}"),
    "ambiguous": GrammarSpec("grammar", 'start: e\ne: e e | "a" | e e e'),
    "nested": GrammarSpec("grammar", 'start: x{1,1000}\nx: y{1,1000}\ny: z{1,1000}\nz: "a"'),
}


@pytest.mark.long
@pytest.mark.parametrize("spec", HARD.values(), ids=HARD)
def test_hard_grammars_take_bounded_time_and_end_by_type(spec, tiny):
    rng = random.Random(0)
    start_s = time.process_time()
    state = tiny.start(spec)
    for _ in range(40):
        mask_W = state.masks([rng.randrange(4096), 80])[0]
        if state.error or state.is_finished:
            break
        state.accept([rng.choice(sorted(allowed(mask_W, 4096)))])
    assert state.error is None or isinstance(state.error, GrammarBudgetExceeded)
    assert time.process_time() - start_s < 15, "of processors' time: others may have them meanwhile"


@pytest.mark.long
@pytest.mark.parametrize("limit", [{"max_lexer_states": 60}, {"step_lexer_fuel": 500}])
def test_a_spent_budget_is_nobodys_error(limit):
    """Masks, and what may follow them, are the same however little the sequences may share, and none fails."""
    tokenizer = Tokenizer.from_directory(TINY)
    compiler = GrammarCompiler(tokenizer, 4096, budget=GrammarBudget(quick=QUICK_LIMITS | limit))
    free = GrammarCompiler(tokenizer, 4096)
    spec, rng = GrammarSpec("regex", "(.*a.{4}|.*b.{5}|.*c.{6})"), random.Random(0)
    num_errors = num_left = 0
    for _ in range(20):
        state, other = compiler.start(spec), free.start(spec)
        for _ in range(8):
            look = state.look([rng.randrange(4096)])
            np.testing.assert_array_equal(look.masks_QW[0], other.masks([])[0])
            token = rng.choice(sorted(allowed(look.masks_QW[0], 4096) - {0}))
            assert other.accept([token]) == state.accept([token]) == 1
        num_errors += state.error is not None
        num_left += not state.is_quick
    assert num_errors == 0
    assert num_left > 0  # or the budget was not spent, and nothing was seen


def test_the_cache_is_bounded_and_gives_the_same_object(compiler, monkeypatch):
    monkeypatch.setattr(grammar_module, "MAX_COMPILED", 3)
    small = GrammarCompiler(small_tokenizer(), VOCAB_SIZE)
    first = small.compile(GrammarSpec("regex", "a"))
    assert small.compile(GrammarSpec("regex", "a")) is first
    for pattern in ("b", "c", "ab"):
        small.compile(GrammarSpec("regex", pattern))
    assert len(small._compiled) == 3
    assert small.compile(GrammarSpec("regex", "a")) is not first


def test_a_grammar_that_is_held_is_not_compiled_again(compiler, monkeypatch):
    monkeypatch.setattr(grammar_module, "MAX_COMPILED", 1)
    small = GrammarCompiler(small_tokenizer(), VOCAB_SIZE)
    held = small.hold(GrammarSpec("regex", "a"))
    first = small.compile(GrammarSpec("regex", "a"))
    small.compile(GrammarSpec("regex", "b"))
    assert small.compile(GrammarSpec("regex", "a")) is first
    small.compile(GrammarSpec("regex", "b"))
    del held
    assert len(small._held) == 1
    assert small.compile(GrammarSpec("regex", "a")) is not first


def test_models_that_cannot_follow_a_grammar_say_so():
    with pytest.raises(InvalidGrammar, match="end-of-sequence"):
        GrammarCompiler(small_tokenizer(eos=()), VOCAB_SIZE).compile(GrammarSpec("regex", "a"))
    with pytest.raises(InvalidGrammar, match="follows no grammars"):
        grammar_module.check_compiles(GrammarSpec("regex", "a"), None)
    grammar_module.check_compiles(None, None)


@pytest.mark.fast
def test_a_refusal_is_a_sentence():
    assert refusal("json_schema", "NoExtensionBias\n<non-verbose/>").message == (
        "json_schema: the grammar library cannot follow it (NoExtensionBias)"
    )
    assert refusal("regex", "unclosed group\nat 3").message == "regex: unclosed group\nat 3"
