"""What a grammar of calls lets a model write reads back as calls in the same form: names of tools, arguments by schema.

Sentences of each form, mutants of them and walks of random tokens go through the real grammar and the real splitters.
"""

import itertools
import json
import random
from functools import cache

import jsonschema
import numpy as np
import pytest

from baton.core.errors import InvalidGrammar
from baton.core.requests.answer_structure import (
    DEEPSEEK_TAGS,
    KIMI_TAGS,
    AnswerStructure,
    CallableTool,
    CallForm,
    Calls,
    Thought,
    ThoughtForm,
    check_grammar,
)
from baton.core.requests.sampling import GrammarSpec
from baton.core.requests.tokenizer import Tokenizer
from baton.engine.grammar.grammar import GrammarCompiler
from baton.router.openai.reasoning import ReasoningSplitter
from baton.router.openai.tool_calls import calls_of
from baton.tests.e2e.conftest import TINY
from baton.tests.router.openai.tokenizers_of_families import deepseek, kimi, llama, mistral, of_bytes, qwen

pytestmark = pytest.mark.fast
ARGUMENTS = {
    "type": "object",
    "properties": {"n": {"enum": [1, 20, None]}, "s": {"type": "string", "maxLength": 8}},
    "required": ["n"],
    "additionalProperties": False,
}
SCHEMAS = {"f": ARGUMENTS, "free": {"type": "object"}}
TOOLS = (CallableTool("f", ARGUMENTS), CallableTool("free"))
FORM = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
JSON_FORM = ("json_schema", json.dumps(FORM))
F, FREE = ("f", '{"n":20,"s":"; }"}'), ("free", '{"x":[1,{"y":"{"}]}')


def hermes_of(*calls):
    return "\n".join(f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>' for name, text in calls)


def llama_of(*calls):
    return "; ".join(f'{{"name": "{name}", "parameters": {text}}}' for name, text in calls)


def mistral_of(*calls):
    written = ", ".join(f'{{"name": "{name}", "arguments": {text}}}' for name, text in calls)
    return f"[TOOL_CALLS][{written}]"


def args_of(*calls):
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{text}" for name, text in calls)


def ids_of(*calls):
    return args_of(*calls).replace("[ARGS]", "[CALL_ID]a1B2c3D4e[ARGS]")


def section_of(tags, calls, write, between=""):
    first, begin, apart, end, last = tags
    return first + between.join(f"{begin}{write(at, *call, apart)}{end}" for at, call in enumerate(calls)) + last


def v3_of(*calls):
    def written(_, name, text, apart):
        return f"function{apart}{name}\n```json\n{text}\n```"

    return section_of(DEEPSEEK_TAGS, calls, written, between="\n")


def v31_of(*calls):
    return section_of(DEEPSEEK_TAGS, calls, lambda _, name, text, apart: f"{name}{apart}{text}")


def kimi_of(*calls):
    return section_of(KIMI_TAGS, calls, lambda at, name, text, apart: f"functions.{name}:{at}{apart}{text}")


def tagged_of(*calls):
    return f"<|python_tag|>{llama_of(*calls)}"


def special_hermes():
    return of_bytes(["<eos>", "<tool_call>", "</tool_call>"], ends=["<eos>"])


@cache
def tiny():
    return Tokenizer.from_directory(TINY)


# A form, its tokenizer, and how calls may be written: the first is the usual one.
FORMS = {
    "hermes": (CallForm.HERMES, qwen, (hermes_of,)),
    "hermes, special": (CallForm.HERMES, special_hermes, (hermes_of,)),
    "llama": (CallForm.LLAMA3_JSON, llama, (llama_of, tagged_of)),
    "llama, no tag": (CallForm.LLAMA3_JSON, qwen, (llama_of,)),
    "llama, tokens of several characters": (CallForm.LLAMA3_JSON, tiny, (llama_of,)),
    "mistral": (CallForm.MISTRAL, mistral, (mistral_of,)),
    "mistral, text": (CallForm.MISTRAL, qwen, (mistral_of,)),
    "mistral args": (CallForm.MISTRAL_ARGS, mistral, (args_of, ids_of)),
    "mistral args, text": (CallForm.MISTRAL_ARGS, qwen, (args_of,)),
    "mistral args, tokens of several characters": (CallForm.MISTRAL_ARGS, tiny, (args_of,)),
    "deepseek v3": (CallForm.DEEPSEEK_V3, deepseek, (v3_of,)),
    "deepseek v3, text": (CallForm.DEEPSEEK_V3, qwen, (v3_of,)),
    "deepseek v3.1": (CallForm.DEEPSEEK_V31, deepseek, (v31_of,)),
    "deepseek v3.1, tokens of several characters": (CallForm.DEEPSEEK_V31, tiny, (v31_of,)),
    "kimi": (CallForm.KIMI_K2, kimi, (kimi_of,)),
    "kimi, text": (CallForm.KIMI_K2, qwen, (kimi_of,)),
}
COMPILERS: dict = {}


def compiler_of(make):
    if make not in COMPILERS:
        COMPILERS[make] = GrammarCompiler(make(), make().vocab_size)
    return COMPILERS[make]


def writers_of(name, kind):
    """How calls may be written; Llama's beside a format are of its JSON, without spaces."""
    writers = FORMS[name][2]
    if kind != "auto, form" or FORMS[name][0] is not CallForm.LLAMA3_JSON:
        return writers
    return [lambda *calls, write=write: compact(write(*calls)) for write in writers]


def compact(text):
    return text.replace('{"name": "', '{"name":"').replace('", "parameters": ', '","parameters":')


def structure_of(name, **more):
    form, make, _ = FORMS[name]
    tokens = {mark: at for mark, at in make().added_tokens.items() if mark in form.marks}
    return AnswerStructure(**({"tools": TOOLS, "form": form, "tokens": tokens} | more))


def state_of(name, structure):
    return compiler_of(FORMS[name][1]).start(GrammarSpec("structure", structure.to_json()))


def takes(name, structure, text):
    tokenizer = FORMS[name][1]()
    state = state_of(name, structure)
    tokens = [*tokenizer.encode(text), tokenizer.eos_token_ids[0]]
    return state.accept(tokens) == len(tokens) and state.is_finished


def split(structure, text):
    splitter = calls_of(structure.form, SCHEMAS)
    content, calls = "", []
    for parts in (splitter.push(text), splitter.finish()):
        content += parts.content
        calls += [[name, ""] for _, name in parts.begun]
        for number, more in parts.arguments:
            calls[number][1] += more
    return content, calls


def check_reads_back(structure, text):
    """The law."""
    thought, rest = "", text
    if structure.thought is not Thought.NONE:
        splitter = ReasoningSplitter(is_open=structure.thought is Thought.OPEN, form=structure.thought_form)
        (thought, rest), (more, last) = splitter.push(text), splitter.finish()
        thought, rest = thought + more, rest + last
    content, calls = split(structure, rest)
    for name, arguments in calls:
        assert jsonschema.Draft202012Validator(SCHEMAS[name]).is_valid(json.loads(arguments)), text
    assert structure.parallel or len(calls) <= 1, text
    is_bound = structure.calls is Calls.REQUIRED or structure.text is not None
    if structure.calls is Calls.REQUIRED or (is_bound and calls):
        assert calls, text
        assert content == "", text
    elif is_bound:
        assert jsonschema.Draft202012Validator(FORM).is_valid(json.loads(content)), text
    return calls


KINDS = {
    "required": {"calls": Calls.REQUIRED},
    "required, one": {"calls": Calls.REQUIRED, "parallel": False},
    "auto": {"calls": Calls.AUTO},
    "auto, one": {"calls": Calls.AUTO, "parallel": False},
    "auto, form": {"calls": Calls.AUTO, "text": JSON_FORM},
}
SENTENCES = ("", "so", ' {"ok":true} ', "[1]", "{", '{"n', "; ", "[TOOL_C", "<|python", "é\n\n")
PIECES = (
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<tool_call>", "</tool_call>", "; ", ", ", "[", "]"),
    *("{", "}", '"', ":", "\n", "f", "free", '{"name": "f"', '"parameters": {', '"type": ', "\\u006e", "1"),
    *("functions.", "function", "```json\n", "\n```", *DEEPSEEK_TAGS, *KIMI_TAGS),
)


def mutant(draw, text):
    at = draw.randrange(len(text) + 1)
    to = min(len(text), at + draw.choice((0, 0, 1, 1, 2, 8)))
    more = draw.choice((*PIECES, "", "", text[draw.randrange(len(text) + 1) :][:12]))
    return text[:at] + more + text[to:]


@pytest.mark.long
@pytest.mark.parametrize(("name", "kind"), list(itertools.product(FORMS, KINDS)))
def test_what_the_grammar_takes_reads_back(name, kind):
    structure, draw = structure_of(name, **KINDS[kind]), random.Random(f"{name} {kind}")
    writers = writers_of(name, kind)
    written = [write(*calls) for write in writers for calls in ((F,), (FREE,), (FREE, F))]
    for write in writers:
        for calls in ((F,), (FREE,), (FREE, F)):
            text = write(*calls)
            assert takes(name, structure, text) == (structure.parallel or len(calls) == 1), text
            if structure.parallel:
                assert check_reads_back(structure, text) == [list(call) for call in calls]
        bad = write(("f", '{"n":2}')), write(("other", "{}")), write(("f", "{}"))
        assert not any(takes(name, structure, text) for text in bad)
    texts = [
        *written,
        *written,
        *SENTENCES,
        '{"ok":true}',
        *(f"so {text}" for text in written),
        *(f"{one} x" for one in written),
    ]
    assert takes(name, structure, '{"ok":true}') == (structure.calls is Calls.AUTO)
    assert takes(name, structure, "so") == (kind in ("auto", "auto, one"))
    num_taken = 0
    for _ in range(100):
        text = draw.choice(texts)
        for _ in range(draw.choice((0, 0, 1, 1, 2))):
            text = mutant(draw, text)
        if takes(name, structure, text):
            num_taken += 1
            check_reads_back(structure, text)
    assert num_taken > 1


@pytest.mark.long
@pytest.mark.parametrize(("name", "kind"), list(itertools.product(FORMS, KINDS)))
def test_random_tokens_read_back(name, kind):
    structure, draw = structure_of(name, **KINDS[kind]), random.Random(f"{name} {kind} walk")
    tokenizer, num_ended = FORMS[name][1](), 0
    for _ in range(16):
        state, tokens = state_of(name, structure), []
        hint = (
            draw.choice(SENTENCES) * draw.choice((0, 1))
            + draw.choice(writers_of(name, kind))(F, FREE)
            + " "
            + hermes_of(F)
        )
        for wanted in tokenizer.encode(hint):
            mask_W = state.masks([])[0]
            allowed = np.flatnonzero(np.unpackbits(mask_W.view(np.uint8), bitorder="little")).tolist()
            assert allowed, tokenizer.decode(tokens)
            ends = [token for token in tokenizer.eos_token_ids if token in allowed]
            if ends and draw.random() < 0.4:
                decoded = tokenizer.stream(skip_special_tokens=False)
                check_reads_back(structure, "".join(map(decoded.push, tokens)) + decoded.flush())
                num_ended += 1
                break
            chosen = draw.choice(allowed) if draw.random() < 0.05 else wanted
            if chosen in allowed and chosen not in tokenizer.eos_token_ids:
                assert state.accept([chosen]) == 1
                tokens.append(chosen)
    assert num_ended


def tokens_of(make, *forms):
    marks = {mark for form in forms for mark in form.marks}
    return {mark: at for mark, at in make().added_tokens.items() if mark in marks}


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["mistral", "mistral args", "mistral args, text", "llama", "hermes", "deepseek v3", "kimi"]
)
@pytest.mark.parametrize("form", ThoughtForm)
@pytest.mark.parametrize("kind", KINDS)
def test_a_thought_comes_first(name, form, kind):
    (call_form, make, _), (write, *_) = FORMS[name], writers_of(name, kind)
    tokens = tokens_of(make, call_form, form)
    begin, end = form.marks
    for thought in (Thought.OPTIONAL, Thought.OPEN):
        structure = structure_of(name, **KINDS[kind], thought=thought, thought_form=form, tokens=tokens)
        opened = "" if thought is Thought.OPEN else begin
        for inside in ("hm", "", '{"name": "f", "parameters": {'):
            text = f"{opened}{inside}{end}\n{write(F)}"
            assert takes(name, structure, text), text
            assert check_reads_back(structure, text) == [list(F)]
            assert not takes(name, structure, text.replace('"n":20', '"n":2'))
        assert takes(name, structure, write(F)) == (thought is Thought.OPTIONAL)
        is_free = kind in ("auto", "auto, one")
        assert takes(name, structure, f"{opened}hm{end}so") == is_free
        assert not takes(name, structure, f"{begin}hm")
        assert takes(name, structure, "so") == (is_free and thought is Thought.OPTIONAL)


@pytest.mark.long
def test_a_regex_does_not_hide_the_calls():
    for name in ("llama", "llama, no tag", "mistral", "mistral, text"):
        structure = structure_of(name, calls=Calls.AUTO, text=("regex", "(?s:.*)"))
        write = FORMS[name][2][0]
        assert takes(name, structure, write(F))
        assert takes(name, structure, "anything {")
        assert not takes(name, structure, write(("f", '{"n":2}')))


@pytest.mark.long
def test_a_tool_of_any_object_has_any_object():
    for name, (_, _, writers) in FORMS.items():
        structure = structure_of(name, calls=Calls.REQUIRED)
        for write in writers:
            for arguments, want in (("{}", True), ('{"a":[{}]}', True), ("[]", False), ("3", False)):
                assert takes(name, structure, write(("free", arguments))) == want


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('{"calls": "auto", "tools": [{"name": "f"}], "form": "pythonic"}', "pythonic"),
        ('{"calls": "auto", "tools": [{"name": "f"}], "thought_form": "<t>"}', "<t>"),
        ('{"calls": "auto", "tools": [{"name": "f"}], "tokens": {"<eos>": 1}}', "other texts"),
        ('{"calls": "auto", "tools": [{"name": "f"}], "tokens": {"[ARGS]": -1}}', "token ids"),
        ('{"calls": "auto", "tools": [{"name": "f"}], "tokens": {"[ARGS]": true}}', "token ids"),
        ('{"calls": "auto", "tools": [{"name": "f"}], "tokens": ["[ARGS]"]}', "other texts"),
        ('{"calls": "auto", "tools": [{"name": "f"}], "tagged": true}', "tagged"),
    ],
)
def test_what_is_no_structure(text, match):
    with pytest.raises(InvalidGrammar, match=match):
        check_grammar("structure", text)


def test_a_token_that_the_model_has_not_is_refused():
    structure = structure_of("mistral", calls=Calls.REQUIRED, tokens={"[TOOL_CALLS]": 9999})
    with pytest.raises(InvalidGrammar, match="9999"):
        state_of("mistral", structure)


def test_a_structure_comes_back_from_its_text():
    for name, kind, form in itertools.product(FORMS, KINDS, ThoughtForm):
        structure = structure_of(name, **KINDS[kind], thought=Thought.OPTIONAL, thought_form=form)
        assert AnswerStructure.from_json(structure.to_json()) == structure


def accepts(name, structure, tokens):
    tokenizer, state = FORMS[name][1](), state_of(name, structure)
    tokens = [*tokens, tokenizer.eos_token_ids[0]]
    return state.accept(tokens) == len(tokens) and state.is_finished


def spelled(tokenizer, text):
    """Its characters' tokens, though it has a token of its own."""
    return [token for character in text for token in tokenizer.encode(character)]


@pytest.mark.parametrize(
    "name", ["hermes", "hermes, special", "llama", "mistral", "mistral args", "deepseek v3", "kimi"]
)
@pytest.mark.long
def test_no_text_spells_a_tag_that_is_a_token(name):
    """It would be read as a call, or as the end of a thought."""
    form, make, (*_, write) = FORMS[name]
    tokenizer = make()
    call = write(("f", '{"n":2}'))
    structure = structure_of(name, calls=Calls.AUTO)
    assert accepts(name, structure, spelled(tokenizer, "so " + form.marks[0][:-1]))
    assert not accepts(name, structure, spelled(tokenizer, "so " + call))
    assert split(structure, "so " + call)[1], "else there would be nothing to refuse"
    assert not accepts(name, structure, spelled(tokenizer, call))


def test_no_thought_spells_its_end():
    tokenizer = mistral()
    tokens = tokens_of(mistral, CallForm.MISTRAL, ThoughtForm.BRACKETS)
    more = {"thought": Thought.OPEN, "thought_form": ThoughtForm.BRACKETS, "tokens": tokens}
    structure = structure_of("mistral", calls=Calls.REQUIRED, **more)
    call = tokenizer.encode(f"[/THINK]{mistral_of(F)}")
    assert accepts("mistral", structure, spelled(tokenizer, "hm [/THIN]") + call)
    assert not accepts("mistral", structure, spelled(tokenizer, "hm [/THINK] so") + call)


@pytest.mark.long
@pytest.mark.parametrize("is_compact", [True, False])
@pytest.mark.parametrize("name", ["llama", "llama, no tag"])
def test_a_format_that_begins_as_a_call_does_goes_with_calls(name, is_compact):
    def written(*calls):
        return compact(llama_of(*calls)) if is_compact else llama_of(*calls)

    tokenizer = FORMS[name][1]()
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, is_compact=is_compact)
    person = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    for kind, text in (("json_schema", json.dumps(person)), ("json_object", "")):
        structure = structure_of(name, calls=Calls.AUTO, text=(kind, text))
        spec = GrammarSpec("structure", structure.to_json())
        for text, want in (
            (written(F, FREE), True),
            ('{"name":"Bob","age":3}', True),
            ('{"name": "Bob", "age": 3}', not is_compact),
            ('{"name":"f"}', True),
            ("so", False),
            (written(F)[:-1], False),
            ('{"name":"f","parameters":{"n":2}}', True),  # a text of this format; which it is cannot be told
        ):
            state, tokens = compiler.start(spec), [*tokenizer.encode(text), tokenizer.eos_token_ids[0]]
            assert (state.accept(tokens) == len(tokens)) == want, text
            if want:
                content, calls = split(structure, text)
                assert (content, bool(calls)) == ((text, False) if '"parameters"' not in text else ("", True))
        closed = ("json_schema", json.dumps(person | {"additionalProperties": False}))
        spec = GrammarSpec("structure", structure_of(name, calls=Calls.AUTO, text=closed).to_json())
        for arguments, want in (('{"n":20}', True), ('{"n":2}', False)):
            tokens = [*tokenizer.encode(written(("f", arguments))), tokenizer.eos_token_ids[0]]
            assert (compiler.start(spec).accept(tokens) == len(tokens)) == want


def test_references_of_a_schema_hold_beside_a_format():
    tree = {
        "type": "object",
        "properties": {
            "kids": {"type": "array", "items": {"$ref": "#"}},
            "n": {"$ref": "#/$defs/N"},
            "$ref": {"const": {"$ref": "#/as/it/is"}},
        },
        "additionalProperties": False,
        "$defs": {"N": {"enum": [1, 20]}},
    }
    tools = (CallableTool("tree", tree), CallableTool("anything", True))
    structure = structure_of("llama", tools=tools, calls=Calls.AUTO, text=JSON_FORM)
    for arguments, want in (
        ('{"kids":[{"kids":[],"n":20}],"n":1}', True),
        ('{"kids":[{"n":2}]}', False),
        ('{"$ref":{"$ref":"#/as/it/is"}}', True),
        ('{"$ref":{"$ref":"#/properties/parameters/as/it/is"}}', False),
        ('{"other":1}', False),
    ):
        assert takes("llama", structure, compact(llama_of(("tree", arguments)))) == want, arguments
    assert takes("llama", structure, compact(llama_of(("anything", '{"a":[1]}'))))
    assert not takes("llama", structure, compact(llama_of(("anything", "[1]"))))
