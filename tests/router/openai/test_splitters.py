"""Thinking and tool calls split off an answer's text: the same, however the text is cut into pieces."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.core.requests.answer_structure import ThoughtForm
from baton.router.openai.reasoning import ReasoningSplitter
from baton.router.openai.tool_calls import EitherCallReader, LlamaCalls, MistralCalls, TaggedCalls

pytestmark = pytest.mark.fast
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<", "</", "think>", "tool_call>")
SPACES_AND_WORDS = (" ", "\n", "\n\n", " " * 200, "a b", "x", "é", "null")
JSON_BITS = ('{"name"', '{"name": 7}', '"', "{", "}", "[", "]", ",", ":", "\\")
CALLS = (
    '{"name": "f", "arguments": {"x": [1, "}", {"y": "\\""}]}}',
    '{"name": "g"}',
    '{"arguments": 3, "name": "h"}',
    '{"name": "i", "arguments": "</tool_call>"}',
)
TAG_BITS = (
    "<function=f>",
    "<function=",
    "<parameter=a>",
    "<parameter=b>",
    "</parameter>",
    "</function>",
    "</fun",
    "1",
    ">",
)
MARK_BITS = (
    "<|python_tag|>",
    "<|python_tag",
    "[TOOL_CALLS]",
    "[TOOL_CALLS]f",
    "[ARGS]",
    "[CALL_ID]",
    "[THINK]",
    "[/THINK]",
    "; ",
    ", ",
    "f{",
    '{"name": "f", "parameters": {',
    '{"name": "f", "parameters": {"a": 1}}',
    '[TOOL_CALLS][{"name": "f", "arguments": {}}',
)
BITS = st.sampled_from((*TAGS, *SPACES_AND_WORDS, *JSON_BITS, *TAG_BITS, *MARK_BITS, *CALLS))
TEXTS = st.lists(BITS, max_size=14).map("".join)


@st.composite
def cut_texts(draw):
    """A text and its pieces."""
    text = draw(TEXTS)
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=12)))
    ends = [*cuts, len(text)]
    return text, [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def thought(pieces, *, is_open=False, form=ThoughtForm.TAGS):
    splitter = ReasoningSplitter(is_open=is_open, form=form)
    parts = [splitter.push(piece) for piece in pieces] + [splitter.finish()]
    return tuple("".join(part) for part in zip(*parts, strict=True))


def calls_of(splitter, pieces):
    content, calls = "", []
    for parts in (*map(splitter.push, pieces), splitter.finish()):
        content += parts.content
        for number, name in parts.begun:
            assert number == len(calls)
            calls.append([name, ""])
        for number, arguments in parts.arguments:
            assert arguments
            calls[number][1] += arguments
    return content, [tuple(call) for call in calls]


def tagged(*pieces):
    return calls_of(TaggedCalls(), pieces)


SCHEMAS = {"f": {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}}


def coder(*pieces):
    return calls_of(TaggedCalls(lambda: EitherCallReader(SCHEMAS)), pieces)


TWO = ('{"name": "f", "parameters": {}}; ', '<|python_tag|>{"name": "g"}')


def llama(*pieces):
    return calls_of(LlamaCalls({"f", "g", "é"}), pieces)


def mistral(*pieces):
    return calls_of(MistralCalls(), pieces)


@pytest.mark.long
@given(cut_texts(), st.booleans(), st.sampled_from(ThoughtForm))
def test_thinking_does_not_depend_on_the_cuts(cut, is_open, form):
    text, pieces = cut
    assert thought(pieces, is_open=is_open, form=form) == thought([text], is_open=is_open, form=form)


@given(cut_texts())
@example((" " * 255 + '{"name": "f", "parameters": {}}', [" " * 255, ' {"name": "f", "parameters": {}}']))
@example((" " * 300 + "<|python_tag|>{", [" " * 257, " " * 43 + "<|python_", "tag|>{"]))
@example(('{"name": "f", "parameters": {}}\n ; \n x', ['{"name": "f", "parameters": {}}\n', " ; \n", " x"]))
@example(('{"name": "f", "parameters": {}}<|python_tag|>{}', ['{"name": "f", "parameters": {}}<|pyth', "on_tag|>{}"]))
@example((f"{TWO[0]}{TWO[1]}", [f"{TWO[0]}<|pyth", "on_tag|>" + TWO[1].removeprefix("<|python_tag|>")]))
@pytest.mark.long
def test_calls_of_llama_do_not_depend_on_the_cuts(cut):
    text, pieces = cut
    assert llama(*pieces) == llama(text) == llama(*text)


@given(cut_texts())
@example(("[TOOL_CALLS][[TOOL_CALLS] []", ["[TOOL_CALLS][", "[TOOL_CALLS] [", "]"]))
@example(("a [TOOL_CALLS]f[CALL_ID]1[ARGS]{}", ["a [TOOL_", "CALLS]f[CALL_ID]", "1[AR", "GS]{}"]))
@pytest.mark.long
def test_calls_of_mistral_do_not_depend_on_the_cuts(cut):
    text, pieces = cut
    assert mistral(*pieces) == mistral(text) == mistral(*text)


@given(cut_texts())
def test_tagged_calls_do_not_depend_on_the_cuts(cut):
    text, pieces = cut
    assert tagged(*pieces) == tagged(text)


@given(cut_texts())
@example(("<tool_call><think>", ["<tool_call><t", "hink>"]))
@example(("<tool_call><think>", ["<tool_call><", "t", "hink>"]))
def test_calls_in_tags_do_not_depend_on_the_cuts_and_their_arguments_are_json(cut):
    text, pieces = cut
    found = coder(*pieces)
    assert found == coder(text)
    for name, arguments in found[1]:
        assert name
        if arguments.endswith("}"):
            assert isinstance(json.loads(arguments), dict)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.text('abcé_- "\\', min_size=1, max_size=8)


@pytest.mark.long
@given(
    st.lists(st.tuples(NAMES, st.dictionaries(st.text(), JSON, max_size=3)), max_size=3),
    st.booleans(),
    st.sampled_from([None, 2]),
    st.booleans(),
    st.integers(1, 7),
)
def test_every_call_comes_back_as_it_was_written(calls, ascii_only, indent, name_last, size):
    objects = [{"name": name, "arguments": arguments} for name, arguments in calls]
    if name_last:
        objects = [dict(reversed(item.items())) for item in objects]
    written = [json.dumps(item, ensure_ascii=ascii_only, indent=indent) for item in objects]
    text = "before" + "".join(f"\n<tool_call>\n{call}\n</tool_call>" for call in written)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    content, found = tagged(*pieces)
    assert content == "before"
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
    assert coder(*pieces) == (content, found), "a model that writes tags may write JSON"


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.text("fg_.:-0", min_size=1, max_size=5), st.dictionaries(st.text(), JSON, max_size=2)), max_size=3
    ),
    st.integers(1, 7),
    st.sampled_from([None, 1]),
    st.booleans(),
)
@pytest.mark.long
def test_every_call_of_every_form_comes_back(calls, size, indent, more):
    """`more`: with what a form may have and need not: a tag, an id."""

    def written(key):
        return [json.dumps({"name": name, key: arguments}, indent=indent) for name, arguments in calls]

    def named():
        head = "[CALL_ID]a1B2c3D4e[ARGS]" if more else "[ARGS]"
        return "".join(f"[TOOL_CALLS]{name}{head}{json.dumps(values, indent=indent)}" for name, values in calls)

    def split(splitter, text):
        content, found = calls_of(splitter, [text[at : at + size] for at in range(0, len(text), size)])
        assert [(name, json.loads(arguments)) for name, arguments in found] == calls
        return content

    names = {name for name, _ in calls}
    tag = "<|python_tag|>" if more and calls else ""
    assert split(LlamaCalls(names), tag + "; ".join(written("parameters"))) == ""
    assert split(LlamaCalls(names), (tag or ";").join(["", *written("parameters")][not tag :])) == ""
    if calls:
        assert split(MistralCalls(), f"so: [TOOL_CALLS]{' ' * more}[{', '.join(written('arguments'))}]") == "so:"
    assert split(MistralCalls(), f"so:{named()}\n") == ("so:" if calls else "so:\n")


@given(TEXTS.filter(lambda text: "[TOOL_CALLS]" not in text))
@pytest.mark.long
def test_text_without_a_mark_is_kept_whole(text):
    assert mistral(text) == (text, [])
    assert llama(f"so {text}".replace("<|python_tag|>", "")) == (f"so {text}".replace("<|python_tag|>", ""), [])


ONE = '{"name": "f", "parameters": {"a": 1}}'
A = ("f", '{"a": 1}')


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (ONE, "", [A]),
        (f"\n\n {ONE} \n", "", [A]),
        ('{"type": "function", "name": "f", "parameters": {"a": 1}}', "", [A]),
        ('{"parameters": {"a": 1}, "name": "f"}', "", [A]),
        ('{"name": "f", "arguments": {"a": 1}}', "", [A]),
        (f"{ONE};{ONE}", "", [A, A]),
        (f"{ONE}; \n{ONE};", "", [A, A]),
        (f"{ONE}\n{ONE}", "", [A, A]),
        (f"<|python_tag|>{ONE}", "", [A]),
        (f"<|python_tag|>{ONE}; {ONE}", "", [A, A]),
        (f"{ONE}<|python_tag|>{ONE}", "", [A, A]),
        (f"I will.\n<|python_tag|>{ONE}", "I will.", [A]),
        ('<|python_tag|>{"name": "f"}', "", [("f", "{}")]),
        ('<|python_tag|>{"name": "other", "parameters": {}}', "", [("other", "{}")]),
        ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        ("so <|python_tag|>f.call(x={})", "so <|python_tag|>f.call(x={})", []),
        ("<|python_tag|>", "<|python_tag|>", []),
        (f"Call {ONE}", f"Call {ONE}", []),
        (f"{ONE} then", "then", [A]),
        (f"{ONE}; then", "; then", [A]),
        (f'{ONE}; {{"b": 1}}', '; {"b": 1}', [A]),
        ('{"name": "f"}', '{"name": "f"}', []),
        ('{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
        ('{"answer": {"name": "f", "parameters": {}}}', '{"answer": {"name": "f", "parameters": {}}}', []),
        ('{"name": "f", "age": 3}', '{"name": "f", "age": 3}', []),
        ("{}", "{}", []),
        ("{", "{", []),
        ("[1]", "[1]", []),
        ('{"name": "f", "parameters": {"a": ', "", [("f", '{"a": ')]),
        ('{"name": "f", "parameters": {"a": 1}, oops', "oops", [A]),
        ("", "", []),
        ("  ", "  ", []),
    ],
)
def test_what_is_a_call_of_llama(text, content, calls):
    assert llama(text) == (content, calls)


def test_json_that_is_no_call_is_not_withheld():
    splitter = LlamaCalls({"f"})
    assert splitter.push('{"answer"').content == '{"answer"'
    splitter = LlamaCalls({"f"})
    assert splitter.push('{"name": "Bob').content == ""
    assert splitter.push('"').content == '{"name": "Bob"'
    splitter = LlamaCalls({"f"})
    assert splitter.push('{"name": "f", "parameters": ').begun == []
    parts = splitter.push('{"a"')
    assert (parts.begun, parts.arguments) == ([(0, "f")], [(0, '{"a"')])


M = '{"name": "f", "arguments": {"a": 1}}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"[TOOL_CALLS][{M}]", "", [A]),
        (f"[TOOL_CALLS] [{M}, {M}]", "", [A, A]),
        (f"so\n[TOOL_CALLS]\n[\n{M}\n]\n", "so", [A]),
        (f"[TOOL_CALLS][{M}] more", "more", [A]),
        (f"[TOOL_CALLS][{M}", "", [A]),
        (f"[TOOL_CALLS][{M}, ", "", [A]),
        (f"[TOOL_CALLS]{M}", "", [A]),
        (f"[TOOL_CALLS][{M}][TOOL_CALLS][{M}]", "", [A, A]),
        ('[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "a1B2c3D4e"}]', "", [("f", "{}")]),
        ('[TOOL_CALLS]f[ARGS]{"a": 1}', "", [A]),
        ('[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{"a": 1}', "", [A]),
        ('[TOOL_CALLS] f{"a": 1}', "", [A]),
        ('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', "", [A, ("g", "{}")]),
        ('I see.[TOOL_CALLS]f[ARGS] {"a": 1}\nand', "I see.and", [A]),
        ('[TOOL_CALLS]f[ARGS]{"a": "}[TOOL_CALLS]"}', "", [("f", '{"a": "}[TOOL_CALLS]"}')]),
        ('[TOOL_CALLS]f[ARGS]{"a": ', "", [("f", '{"a": ')]),
        ("[TOOL_CALLS]f[ARGS]", "[TOOL_CALLS]f[ARGS]", []),
        ("[TOOL_CALLS]f[ARGS]3", "[TOOL_CALLS]f[ARGS]3", []),
        ("[TOOL_CALLS]f[OTHER]{}", "[TOOL_CALLS]f[OTHER]{}", []),
        ("[TOOL_CALLS][ARGS]{}", "[TOOL_CALLS][ARGS]{}", []),
        ("[TOOL_CALLS]f[CALL_ID]1[CALL_ID]2[ARGS]{}", "[TOOL_CALLS]f[CALL_ID]1[CALL_ID]2[ARGS]{}", []),
        ("[TOOL_CALLS]a b{}", "[TOOL_CALLS]a b{}", []),
        ("[TOOL_CALLS]" + "f" * 255 + "{}", "[TOOL_CALLS]" + "f" * 255 + "{}", []),
        ("[TOOL_CALLS]" + "f" * 254 + "{}", "", [("f" * 254, "{}")]),
        ("[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
        (f"[TOOL_CALLS][{M}] [TOOL_CALLS][]", "[TOOL_CALLS][]", [A]),
        ("[TOOL_CALLS][3]", "[TOOL_CALLS][3]", []),
        (f"[TOOL_CALLS][{M}, 3]", ", 3]", [A]),
        ('x [TOOL_CALLS][{"name": 7}]', 'x [TOOL_CALLS][{"name": 7}]', []),
        ("[TOOL_CALLS", "[TOOL_CALLS", []),
        ("x [TOOL_CALLS]", "x [TOOL_CALLS]", []),
    ],
)
def test_what_is_a_call_of_mistral(text, content, calls):
    assert mistral(text) == (content, calls)


@given(TEXTS.filter(lambda text: "<tool_call>" not in text))
def test_text_without_calls_is_kept_whole(text):
    assert tagged(text) == (text, [])


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "rest"),
    [
        ("<think>\nhm\n</think>\n\nyes", False, "hm", "yes"),
        ("\n<think>a</think>b", False, "a", "b"),
        ("<think>\n\n</think>\n\nyes", False, "", "yes"),
        ("hm\n</think>\n\nyes", True, "hm", "yes"),
        ("<think>hm</think>yes", True, "hm", "yes"),
        ("no thought <think>x</think>", False, "", "no thought <think>x</think>"),
        ("<think>cut off", False, "cut off", ""),
        ("cut off </thi", True, "cut off </thi", ""),
        ("<think>a</think>b</think>c <think>", False, "a", "b</think>c <think>"),
        ("", True, "", ""),
        ("<thin", False, "", "<thin"),
        (" " * 256 + "<think>a", False, "a", ""),
        (" " * 257 + "<think>a", False, "", " " * 257 + "<think>a"),
        ("<think>a" + " " * 258 + "</think>b", False, "a  ", "b"),
    ],
)
def test_what_is_thinking(text, is_open, reasoning, rest):
    assert thought([text], is_open=is_open) == (reasoning, rest)
    bracketed = text.replace("<think>", "[THINK]").replace("</think>", "[/THINK]").replace("</thi", "[/THI")
    found = thought([bracketed.replace("<thin", "[THIN")], is_open=is_open, form=ThoughtForm.BRACKETS)
    want = [part.replace("<think>", "[THINK]").replace("</think>", "[/THINK]") for part in (reasoning, rest)]
    assert found == tuple(part.replace("</thi", "[/THI").replace("<thin", "[THIN") for part in want)


CALL = '{"name": "f", "arguments": {"a": 1}}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"<tool_call>\n{CALL}\n</tool_call>", "", [("f", '{"a": 1}')]),
        (f"say \n<tool_call>{CALL}</tool_call>\n more", "say" + "more", [("f", '{"a": 1}')]),
        (f"<tool_call>{CALL}<tool_call>{CALL}</tool_call>", "", [("f", '{"a": 1}')] * 2),
        (f"<tool_call>{CALL}", "", [("f", '{"a": 1}')]),
        (f"<tool_call>{CALL[:-3]}", "", [("f", '{"a": ')]),
        ("<tool_call>no json</tool_call> x", "<tool_call>no json</tool_call> x", []),
        ('<tool_call>{"name": 7}</tool_call>', '<tool_call>{"name": 7}</tool_call>', []),
        ('<tool_call>{"name": ""}</tool_call>', '<tool_call>{"name": ""}</tool_call>', []),
        ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "parameters": {"b": 2}, "id": 9}</tool_call>', "", [("f", '{"b": 2}')]),
        ('<tool_call>{"na', '<tool_call>{"na', []),
        ("<tool_call", "<tool_call", []),
        ('<tool_call>{"name": "' + "f" * 300, '<tool_call>{"name": "' + "f" * 300, []),
        ('<tool_call>{"' + "f" * 300 + '": 1, "name": "f"}', '<tool_call>{"' + "f" * 300 + '": 1, "name": "f"}', []),
        ("a" + " " * 258 + f"<tool_call>{CALL}</tool_call>", "a  ", [("f", '{"a": 1}')]),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
            "",
            [("f", '{"a": "</tool_call>"}')],
        ),
        ('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>then', "then", [("f", '{"a": 1')]),
    ],
)
def test_what_is_a_call(text, content, calls):
    assert tagged(text) == (content, calls)


def test_a_name_is_told_before_the_arguments_are_complete():
    splitter = TaggedCalls()
    parts = splitter.push('<tool_call>{"name": "f", "arguments": {"a": ')
    assert (parts.begun, parts.arguments) == ([(0, "f")], [(0, '{"a": ')])
    assert splitter.push("[1, 2").arguments == [(0, "[1, 2")]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (
            "ok\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>",
            "ok",
            [("f", '{"a": "1", "b": 2}')],
        ),
        ("<tool_call><function=g></function></tool_call>", "", [("g", "{}")]),
        ("<tool_call><function=g><parameter=x>\n[1, null]\n</parameter></function>", "", [("g", '{"x": [1, null]}')]),
        ("<tool_call><function=g><parameter=x>\na\n\nb\n</parameter></tool_call>!", "!", [("g", '{"x": "a\\n\\nb"}')]),
        ("<tool_call><function=g><parameter=x>NaN</parameter></function></tool_call>", "", [("g", '{"x": "NaN"}')]),
        ("<tool_call><function=>", "<tool_call><function=>", []),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}</tool_call>', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
        ("<tool_call><function=g</tool_call>.", "<tool_call><function=g</tool_call>.", []),
    ],
)
def test_what_is_a_call_in_tags(text, content, calls):
    assert coder(text) == (content, calls)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text('ab{}[]",\\:</', max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("ab", max_size=1), inner, max_size=2),
    max_leaves=4,
)
MEMBERS = st.lists(st.tuples(st.sampled_from(["name", "arguments", "parameters", "id"]), VALUES), max_size=5)


@given(MEMBERS, st.sampled_from(["", " ", "\n  "]))
@example([("arguments", {"a": 1}), ("parameters", {"b": 2})], "")
@example([("arguments", 1), ("name", "g"), ("arguments", 2)], "")
@pytest.mark.long
def test_arguments_are_one_json_value_the_first(members, space):
    members = [("name", "f"), *((key, "g" if key == "name" else value) for key, value in members)]
    text = ",".join(f"{space}{json.dumps(key)}:{space}{json.dumps(value)}{space}" for key, value in members)
    _, [(name, arguments)] = tagged(f"<tool_call>{{{text}}}</tool_call>")
    given_values = [value for key, value in members if key in ("arguments", "parameters")]
    assert (name, json.loads(arguments)) == ("f", given_values[0] if given_values else {})
