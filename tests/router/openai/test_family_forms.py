"""Calls of Qwen3.5, GLM, DeepSeek and Kimi: what their templates write of earlier calls is read as the same calls.

However a text is cut, whole or mangled, the parts are the same, and what is no call stays text.
"""

import json
import random

import jsonschema
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.core.requests.answer_structure import (
    DEEPSEEK_TAGS,
    KIMI_TAGS,
    AnswerStructure,
    CallableTool,
    CallForm,
    Calls,
    Thought,
)
from baton.core.requests.sampling import GrammarSpec
from baton.engine.grammar.grammar import GrammarCompiler
from baton.router.openai.chat_request import CallArguments, Message, data_of
from baton.router.openai.chat_template import ChatTemplate
from baton.router.openai.tool_calls import MAX_HEAD_LEN, calls_of
from baton.tests.router.openai.templates_of_families import (
    DEEPSEEK_R1,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GLM,
    HERMES,
    KIMI,
    QWEN35,
)
from baton.tests.router.openai.tokenizers_of_families import glm, qwen

pytestmark = pytest.mark.fast
GLM45, V3, V31, K2 = CallForm.GLM45, CallForm.DEEPSEEK_V3, CallForm.DEEPSEEK_V31, CallForm.KIMI_K2
CODER = CallForm.QWEN3_CODER
TEMPLATES = {
    "qwen3.5": (QWEN35, CODER),
    "qwen3-next": (HERMES, CallForm.HERMES),
    "glm": (GLM, GLM45),
    "deepseek v3": (DEEPSEEK_V3, V3),
    "deepseek r1": (DEEPSEEK_R1, V3),
    "deepseek v3.1": (DEEPSEEK_V31, V31),
    "kimi": (KIMI, K2),
}
ANY_TYPE = {
    "s": {"type": "string"},
    "i": {"type": "integer"},
    "x": {"type": "number"},
    "b": {"type": "boolean"},
    "a": {"type": "array"},
    "o": {"type": "object"},
    "null or s": {"type": ["string", "null"]},
    "null or i": {"type": ["integer", "null"]},
    "i or s": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    "open": {"description": "anything"},
}
SCHEMAS = {"f": {"type": "object", "properties": ANY_TYPE}}


def split(form, *pieces, schemas=SCHEMAS):
    """(content, calls as (id, name, arguments))."""
    splitter, content, calls = calls_of(form, schemas), "", []
    for parts in (*map(splitter.push, pieces), splitter.finish()):
        content += parts.content
        for number, name in parts.begun:
            assert number == len(calls)
            calls.append([parts.ids.get(number), name, ""])
        for number, more in parts.arguments:
            calls[number][2] += more
    return content, [tuple(call) for call in calls]


def pairs_of(name, *pairs):
    written = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in pairs)
    return f"<tool_call>{name}\n{written}</tool_call>"


def params_of(name, *pairs):
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in pairs)
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


D1, D2, D3, D4, D5 = DEEPSEEK_TAGS
K1, K3, K4, K5, K6 = KIMI_TAGS


def v3(name, arguments, kind="function"):
    return f"{D2}{kind}{D3}{name}\n```json\n{arguments}\n```{D4}"


def v31(name, arguments):
    return f"{D2}{name}{D3}{arguments}{D4}"


def kimi(id_, arguments):
    return f"{K3}{id_}{K4}{arguments}{K5}"


A = (None, "f", '{"s": "1"}')
WHAT = [
    (GLM45, f"Well.\n{pairs_of('f', ('s', 1))}", "Well.", [A]),
    (GLM45, pairs_of("f", ("s", " a\n<b> ")), "", [(None, "f", '{"s": " a\\n<b> "}')]),
    (GLM45, pairs_of("f", ("s", "</tool_call>")), "", [(None, "f", '{"s": "</tool_call>"}')]),
    (GLM45, f"{pairs_of('f', ('s', 1))}\n{pairs_of('g')}", "", [A, (None, "g", "{}")]),
    (GLM45, "<tool_call>g</tool_call>", "", [(None, "g", "{}")]),
    (GLM45, "<tool_call>\ng \n</tool_call>\nso", "so", [(None, "g", "{}")]),
    (GLM45, "<tool_call>f<arg_key>s</arg_key><arg_value>1</arg_value></tool_call>", "", [A]),
    (GLM45, "<tool_call>f <arg_key> s\n</arg_key> \n <arg_value>1</arg_value> </tool_call>", "", [A]),
    (GLM45, '<tool_call>\n{"name": "f", "arguments": {"s": "1"}}\n</tool_call>', "", [A]),
    (GLM45, pairs_of("f", ("s", 1), ("s", 2)), "", [A]),
    (GLM45, "<tool_call>what?\n</tool_call>", "<tool_call>what?\n</tool_call>", []),
    (GLM45, "<tool_call>f\nno tags</tool_call>", "<tool_call>f\nno tags</tool_call>", []),
    (GLM45, "<tool_call>f\n<arg_ke", "<tool_call>f\n<arg_ke", []),
    (GLM45, "<tool_call>f", "<tool_call>f", []),
    (GLM45, "<tool_call></tool_call>", "<tool_call></tool_call>", []),
    (GLM45, "<tool_call>" + "f" * 300 + "\n</tool_call>", "<tool_call>" + "f" * 300 + "\n</tool_call>", []),
    (GLM45, f"{pairs_of('f', ('s', 1))[:-12]}oops</tool_call>.", ".", [A]),
    (GLM45, pairs_of("f", ("k" * 300, 1)) + ".", ".", [(None, "f", "{}")]),
    (V3, f"Well.\n\n{D1}{v3('f', A[2])}{D5}", "Well.", [A]),
    (V3, f"{D1}{v3('f', A[2])}\n{v3('g', '{}')}{D5}", "", [A, (None, "g", "{}")]),
    (V3, f"{D1}{D2}function{D3}f\n{A[2]}{D4}{D5}", "", [A]),
    (V3, f"{D1}{v3('f', A[2])}{D5}\nmore", "more", [A]),
    (V3, f"{D1}{v3('f', A[2])}", "", [A]),
    (V3, f"{D1}{D2}function{D3}f\n```json\n{A[2]}\n``", "", [A]),
    (V3, f"{D1}{v3('f', A[2])}\n more", "more", [A]),
    (V3, f"{D1}{v3('f', A[2])[: -len(D4)]} more", "``` more", [A]),
    (V3, f"{D1}{v3('f', A[2])}{D5}{D1}{v3('g', '{}')}{D5}", "", [A, (None, "g", "{}")]),
    (V3, f"{D1}{v3('f', A[2])}{D1}{v3('g', '{}')}{D5}", "", [A, (None, "g", "{}")]),
    (V3, f"{D1}{v3('f', A[2], 'retrieval')}{D5}", f"{D1}{v3('f', A[2], 'retrieval')}{D5}", []),
    (V3, f"{D1}{v3('f', '[1]')}{D5}", f"{D1}{v3('f', '[1]')}{D5}", []),
    (V3, f"{D1}{v3('a b', A[2])}{D5}", f"{D1}{v3('a b', A[2])}{D5}", []),
    (V3, f"{D1}{D5}", f"{D1}{D5}", []),
    (V3, f"{D1}{D2}function{D3}f\n``", f"{D1}{D2}function{D3}f\n``", []),
    (V3, f"{D1}{D2}function{D3}f\n```json\n{{", "", [(None, "f", "{")]),
    (V3, f"{D1}{D2}" + "x" * (MAX_HEAD_LEN + 1) + "{", f"{D1}{D2}" + "x" * (MAX_HEAD_LEN + 1) + "{", []),
    (V31, f"Well.{D1}{v31('f', A[2])}{v31('g', '{}')}{D5}", "Well.", [A, (None, "g", "{}")]),
    (V31, f"{D1} {D2}f {D3} {A[2]}\n{D4}\n{D5}", "", [A]),
    (V31, f"{D1}{v31('f', '{')}", D4, [(None, "f", "{")]),
    (V31, f"{D1}{v3('f', A[2])}{D5}", f"{D1}{v3('f', A[2])}{D5}", []),
    (V31, f"{v31('f', A[2])}", v31("f", A[2]), []),
    (K2, f"Well.{K1}{kimi('functions.f:0', A[2])}{K6}", "Well.", [("functions.f:0", *A[1:])]),
    (
        K2,
        f"{K1}{kimi('functions.f:3', A[2])}{kimi('functions.a.b:4', '{}')}{K6}",
        "",
        [("functions.f:3", *A[1:]), ("functions.a.b:4", "a.b", "{}")],
    ),
    (K2, f"{K1}{kimi('f:12', A[2])}{K6}", "", [("f:12", *A[1:])]),
    (K2, f"{K1}{kimi('functions.f', A[2])}{K6}", f"{K1}{kimi('functions.f', A[2])}{K6}", []),
    (K2, f"{K1}{kimi('functions.f:x', A[2])}{K6}", f"{K1}{kimi('functions.f:x', A[2])}{K6}", []),
]


@pytest.mark.long
@pytest.mark.parametrize(("form", "text", "content", "calls"), WHAT)
def test_what_is_a_call(form, text, content, calls):
    assert split(form, text) == (content, calls)
    assert split(form, *text) == (content, calls)
    for at in range(len(text)):
        assert split(form, text[:at], text[at:]) == (content, calls)


def test_a_head_is_not_withheld_for_ever():
    for form in (V3, V31, K2):
        splitter, text = calls_of(form, {}), form.marks[0] + form.marks[1] + "x" * (MAX_HEAD_LEN + 1)
        assert splitter.push(text).content == text


BITS = st.sampled_from(
    (
        *DEEPSEEK_TAGS,
        *KIMI_TAGS,
        *GLM45.marks,
        *(text for _, text, _, _ in WHAT if len(text) < 200),
        *(
            "function",
            "functions.f:0",
            "f",
            "\n",
            " ",
            "```json\n",
            "\n```",
            "``",
            "{",
            "}",
            '{"s": ',
            '"',
            "<",
            "x",
            "1",
        ),
        *("<function=f>", "<parameter=s>", "</parameter>", "</function>", " " * 200),
    )
)
TEXTS = st.lists(BITS, max_size=10).map("".join)
FORMS = st.sampled_from((CODER, GLM45, V3, V31, K2))


@pytest.mark.long
@given(TEXTS, FORMS, st.data())
def test_calls_do_not_depend_on_the_cuts(text, form, data):
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found = split(form, text)
    assert split(form, *pieces) == found
    assert split(form, *text) == found
    if form.marks[0] not in text:
        assert found == (text, [])


def test_a_call_is_told_before_it_is_complete():
    for form, head in ((V3, v3("f", "@")), (V31, v31("f", "@")), (K2, kimi("f:0", "@"))):
        splitter, head = calls_of(form, {}), head.partition("@")[0]
        assert splitter.push(f"{form.marks[0]}{head}").begun == []
        parts = splitter.push('{"s": ')
        assert (parts.begun, parts.arguments) == ([(0, "f")], [(0, '{"s": ')])
        assert splitter.push("[1, 2").arguments == [(0, "[1, 2")]
    splitter = calls_of(GLM45, {})
    assert splitter.push("<tool_call>f\n").begun == []
    assert splitter.push("<arg_key>").begun == [(0, "f")]
    assert splitter.push("s</arg_key><arg_value>1</arg_value>").arguments == [(0, '{"s": 1')]


@pytest.mark.parametrize("form", [CODER, GLM45])
@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("s", "3", "3"),
        ("s", "null", "null"),
        ("s", '"q"', '"q"'),
        ("s", "", ""),
        ("i", "3", 3),
        ("i", " -3 ", -3),
        ("i", "three", "three"),
        ("x", "1e3", 1000.0),
        ("x", "2", 2),
        ("x", "1e999", "1e999"),
        ("x", "NaN", "NaN"),
        ("b", "true", True),
        ("b", "False", False),
        ("b", " True\n", True),
        ("b", "None", "None"),
        ("null or i", "None", None),
        ("null or i", "True", "True"),
        ("null or s", "None", "None"),
        ("a", '[1, {"y": "[" }]', [1, {"y": "["}]),
        ("a", "[1", "[1"),
        ("o", '{"y": null}', {"y": None}),
        ("null or s", "3", "3"),
        ("null or s", "true", "true"),
        ("null or s", "null", None),
        ("null or s", "a", "a"),
        ("i or s", "3", 3),
        ("i or s", "3.5", "3.5"),
        ("i or s", "[3]", "[3]"),
        ("open", "[3]", [3]),
        ("open", "word", "word"),
        ("unknown", "3", 3),
        ("unknown", "word", "word"),
        ("unknown", '"\\ud800"', '"\\ud800"'),
        ("unknown", "[" * 100_000, "[" * 100_000),
    ],
)
@pytest.mark.long
def test_bare_values_have_the_types_of_the_schema(form, key, text, value):
    write = pairs_of if form is GLM45 else params_of
    _, [(_, name, arguments)] = split(form, write("f", (key, text)))
    found = json.loads(arguments)[key]
    assert (name, found, type(found)) == ("f", value, type(value))
    arguments.encode()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
TYPED = {
    "s": st.text() | st.sampled_from(("<tool_call>", "</arg_key>", '{"a"', "```", D4, K6, "3")),
    "i": st.integers(),
    "x": st.floats(allow_nan=False, allow_infinity=False),
    "b": st.booleans(),
    "a": st.lists(JSON, max_size=3),
    "o": st.dictionaries(st.text(max_size=3), JSON, max_size=3),
}
ARGUMENTS = st.fixed_dictionaries({}, optional=TYPED)
MADE = st.lists(st.tuples(st.sampled_from(("f", "g.h-2")), ARGUMENTS), min_size=1, max_size=3)


def history(calls):
    """A conversation with these calls, as a client sends it back."""
    made = [
        {"id": f"functions.{name}:{at}", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for at, (name, arguments) in enumerate(calls)
    ]
    asked = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": made}]
    return data_of([Message.model_validate(one) for one in asked], "messages")


@pytest.mark.long
@settings(max_examples=40)
@given(MADE, st.sampled_from(sorted(TEMPLATES)), st.integers(1, 9))
@example([("f", {"s": "\n"})], "glm", 3)
@example([("f", {"b": True, "i": 1})], "qwen3.5", 3)
def test_what_a_template_writes_of_calls_is_read_as_the_same_calls(calls, family, size):
    text, form = TEMPLATES[family]
    template = ChatTemplate({"default": text})
    assert template.call_form is form
    written = template.render(history(calls), add_generation_prompt=False)
    mark = form.marks[0]
    written = written[written.index(mark) :]
    pieces = [written[at : at + size] for at in range(0, len(written), size)]
    content, found = split(form, *pieces, schemas={name: SCHEMAS["f"] for name, _ in calls})
    assert [(name, json.loads(arguments)) for _, name, arguments in found] == calls
    assert content.strip() in ("", "<eos>", "<|im_end|>")
    if form is K2:
        assert [id_ for id_, _, _ in found] == [f"functions.{name}:{at}" for at, (name, _) in enumerate(calls)]


def test_arguments_are_an_object_and_joined_to_a_text_its_json():
    arguments = CallArguments({"s": "é", "a": [1]})
    text = '{"s": "é", "a": [1]}'
    template = ChatTemplate(
        {"default": "{{ messages[0].a + '|' + messages[0].a ~ '|' ~ messages[0].a.s }}|{{ messages[0].a }}"}
    )
    assert template.render([{"role": "user", "a": arguments}]) == f"{text}|{text}|é|{text}"
    is_mapping = "{{ messages[0].a is mapping }} {{ messages[0].a is string }} {{ messages[0].a | tojson }}"
    assert ChatTemplate({"default": is_mapping}).render([{"a": arguments}]) == f"True False {text}"


# What GLM's tags can say, and what they cannot, so that it is called in JSON.
PAIRED = {
    "type": "object",
    "properties": {
        "s": {"type": "string", "description": "any"},
        "e": {"type": "string", "enum": ["x", "y z"]},
        "n": {"type": "array", "items": {"$ref": "#/$defs/N"}},
        "m": {"type": ["string", "null"]},
    },
    "required": ["s"],
    "additionalProperties": False,
    "$defs": {"N": {"type": "integer"}},
}
PATTERNED = {"type": "object", "properties": {"s": {"type": "string", "pattern": "^ab"}}, "required": ["s"]}
TOOLS = (CallableTool("f", PAIRED), CallableTool("free"), CallableTool("json", PATTERNED))
BOUND_SCHEMAS = {"f": PAIRED, "free": {"type": "object"}, "json": PATTERNED}
COMPILERS: dict = {}


def state_of(make, **more):
    if make not in COMPILERS:
        COMPILERS[make] = GrammarCompiler(make(), make().vocab_size)
    tokens = {mark: at for mark, at in make().added_tokens.items() if mark in (*GLM45.marks, "<think>", "</think>")}
    structure = AnswerStructure(**({"calls": Calls.REQUIRED, "tools": TOOLS, "form": GLM45, "tokens": tokens} | more))
    return COMPILERS[make].start(GrammarSpec("structure", structure.to_json()))


def takes(make, text, **more):
    state, tokens = state_of(make, **more), [*make().encode(text), make().eos_token_ids[0]]
    return state.accept(tokens) == len(tokens) and state.is_finished


@pytest.mark.parametrize("make", [glm, qwen])
@pytest.mark.parametrize(
    ("text", "want"),
    [
        (pairs_of("f", ("s", "a\n<b> {")), True),
        (pairs_of("f", ("s", "")), True),
        (pairs_of("f", ("s", "a"), ("e", "y z"), ("n", "[1,-2]"), ("m", '"3"')), True),
        (pairs_of("f", ("s", "a"), ("m", "null")), True),
        (pairs_of("f", ("s", "a"), ("m", "3")), False),
        (pairs_of("f"), False),
        (pairs_of("f", ("e", "x")), False),
        (pairs_of("f", ("s", "a"), ("e", "z")), False),
        (pairs_of("f", ("s", "a"), ("n", "[1.5]")), False),
        (pairs_of("f", ("s", "a"), ("other", "1")), False),
        (pairs_of("g", ("s", "a")), False),
        (pairs_of("free", ("a b", "1"), ("c", "</parameter>")), True),
        (pairs_of("free"), True),
        (f"{pairs_of('free')}\n{pairs_of('f', ('s', 'a'))}", True),
        ('<tool_call>\n{"name": "json", "arguments": {"s":"ab"}}\n</tool_call>', True),
        ('<tool_call>\n{"name": "json", "arguments": {"s":"ba"}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "f", "arguments": {"s":"ab"}}\n</tool_call>', False),
        ("so", False),
    ],
)
@pytest.mark.long
def test_calls_of_glm_are_bound(make, text, want):
    assert takes(make, text) == want
    assert takes(make, f"hm</think>\n{text}", thought=Thought.OPEN) == want
    assert takes(make, f"\n<think>hm</think>\n{text}", thought=Thought.OPTIONAL) == want
    if want:
        assert takes(make, text, parallel=False) == (text.count("<tool_call>") == 1)
        assert takes(make, f"so {text} and", calls=Calls.AUTO)
        content, calls = split(GLM45, text, schemas=BOUND_SCHEMAS)
        assert (content, len(calls)) == ("", text.count("<tool_call>"))
        for _, name, arguments in calls:
            assert jsonschema.Draft202012Validator(BOUND_SCHEMAS[name]).is_valid(json.loads(arguments))


@pytest.mark.parametrize("make", [glm, qwen])
@pytest.mark.long
def test_random_tokens_of_glm_read_back(make):
    draw, num_ended = random.Random(make.__name__), 0
    hints = [text for text in (pairs_of("f", ("s", "a"), ("n", "[1]")), pairs_of("free", ("k", '"v"'), ("l", "w")))]
    for _ in range(24):
        state, tokens = state_of(make), []
        for wanted in make().encode("\n".join(draw.sample(hints, 2)) + pairs_of("f", ("s", "b"))):
            allowed = np.flatnonzero(np.unpackbits(state.masks([])[0].view(np.uint8), bitorder="little")).tolist()
            assert allowed
            ends = [token for token in make().eos_token_ids if token in allowed]
            if ends and draw.random() < 0.4:
                decoded = make().stream(skip_special_tokens=False)
                text = "".join(map(decoded.push, tokens)) + decoded.flush()
                content, calls = split(GLM45, text, schemas=BOUND_SCHEMAS)
                assert content == "", text
                assert calls, text
                for _, name, arguments in calls:
                    validator = jsonschema.Draft202012Validator(BOUND_SCHEMAS[name])
                    assert validator.is_valid(json.loads(arguments)), text
                num_ended += 1
                break
            chosen = draw.choice(allowed) if draw.random() < 0.03 else wanted
            if chosen in allowed and chosen not in make().eos_token_ids:
                assert state.accept([chosen]) == 1
                tokens.append(chosen)
    assert num_ended
