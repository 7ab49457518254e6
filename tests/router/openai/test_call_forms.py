"""Chats of models of each family, through OpenAI's client: calls and thoughts in the forms that templates show."""

import json

import openai
import pytest

from baton.core.errors import ConfigInvalid
from baton.core.requests.answer_structure import DEEPSEEK_TAGS, KIMI_TAGS, AnswerStructure, CallForm, ThoughtForm
from baton.router.openai.chat_template import ChatTemplate
from baton.tests.router.openai.served import MODEL, sent_to, served
from baton.tests.router.openai.templates_of_families import (
    DEEPSEEK_R1,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GLM,
    HERMES,
    KIMI,
    LLAMA,
    MAGISTRAL,
    MISTRAL,
    MISTRAL_ARGS,
    QWEN35,
    QWEN_THINKING,
    R1,
)
from baton.tests.router.openai.test_chat import chat, joined, streamed
from baton.tests.router.openai.test_errors import post
from baton.tests.router.openai.tokenizers_of_families import deepseek, glm, kimi, llama, mistral, of_bytes, qwen

pytestmark = pytest.mark.fast
HI = [{"role": "user", "content": "hi"}]


def tool(name, **more):
    schema = {"type": "object", "properties": {"in": {"type": "string"}}, "required": ["in"]}
    return {"type": "function", "function": {"name": name, "parameters": schema} | more}


TOOLS = [tool("weather"), tool("tree")]
ROME, OSLO = ("weather", '{"in": "Rome"}'), ("tree", '{"in": "Os\\"[lo]"}')


def hermes_of(*calls):
    return "\n".join(f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>' for name, text in calls)


def coder_of(*calls):
    written = [(name, json.loads(text)["in"]) for name, text in calls]
    return "\n".join(
        f"<tool_call>\n<function={name}>\n<parameter=in>\n{city}\n</parameter>\n</function>\n</tool_call>"
        for name, city in written
    )


def llama_of(*calls):
    return "; ".join(f'{{"name": "{name}", "parameters": {text}}}' for name, text in calls)


def mistral_of(*calls):
    return f"[TOOL_CALLS][{', '.join(json.dumps({'name': name, 'arguments': json.loads(t)}) for name, t in calls)}]"


def args_of(*calls):
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{text}" for name, text in calls)


def pairs_of(*calls):
    written = [(name, json.loads(text)["in"]) for name, text in calls]
    return "\n".join(
        f"<tool_call>{name}\n<arg_key>in</arg_key>\n<arg_value>{city}</arg_value>\n</tool_call>"
        for name, city in written
    )


def v3_of(*calls):
    first, begin, apart, end, last = DEEPSEEK_TAGS
    written = (f"{begin}function{apart}{name}\n```json\n{text}\n```{end}" for name, text in calls)
    return first + "\n".join(written) + last


def v31_of(*calls):
    first, begin, apart, end, last = DEEPSEEK_TAGS
    return first + "".join(f"{begin}{name}{apart}{text}{end}" for name, text in calls) + last


def kimi_of(*calls, index=0):
    first, begin, apart, end, last = KIMI_TAGS
    written = (f"{begin}functions.{name}:{index + at}{apart}{text}{end}" for at, (name, text) in enumerate(calls))
    return first + "".join(written) + last


# A template, its tokenizer, an answer of two calls, and the text of it.
ANSWERS = {
    "hermes": (HERMES, qwen, "Well.\n" + hermes_of(ROME, OSLO), "Well."),
    "qwen3 coder": (HERMES + "{# <function= #}", qwen, f"Well.\n{coder_of(ROME, OSLO)}", "Well."),
    "qwen3.5": (QWEN35, qwen, f"</think>\n\nWell.\n{coder_of(ROME, OSLO)}", "Well."),
    "glm": (GLM, glm, f"\n<think></think>\nWell.\n{pairs_of(ROME, OSLO)}", "Well."),
    "deepseek v3": (DEEPSEEK_V3, deepseek, f"Well.\n\n{v3_of(ROME, OSLO)}", "Well."),
    "deepseek r1": (DEEPSEEK_R1, deepseek, f"</think>\n\n{v3_of(ROME, OSLO)}", None),
    "deepseek v3.1": (DEEPSEEK_V31, deepseek, f"Well.{v31_of(ROME, OSLO)}", "Well."),
    "kimi": (KIMI, kimi, f"Well.{kimi_of(ROME, OSLO)}", "Well."),
    "llama": (LLAMA, llama, llama_of(ROME, OSLO), None),
    "llama, with the tag": (LLAMA, llama, "<|python_tag|>" + llama_of(ROME, OSLO), None),
    "llama, text before the tag": (LLAMA, llama, "Well.\n<|python_tag|>" + llama_of(ROME, OSLO), "Well."),
    "mistral": (MISTRAL, mistral, mistral_of(ROME, OSLO), None),
    "mistral, text before": (MISTRAL, mistral, "Well. " + mistral_of(ROME, OSLO), "Well."),
    "mistral, tags that are text": (MISTRAL, qwen, mistral_of(ROME, OSLO), None),
    "mistral, with names": (MISTRAL_ARGS, mistral, "Well." + args_of(ROME, OSLO), "Well."),
    "mistral, with ids": (
        MISTRAL_ARGS,
        mistral,
        args_of(ROME, OSLO).replace("[ARGS]", "[CALL_ID]a1B2c3D4e[ARGS]"),
        None,
    ),
}


@pytest.mark.long
@pytest.mark.asyncio
@pytest.mark.parametrize("name", ANSWERS)
async def test_calls_of_each_form(name):
    template, make, text, content = ANSWERS[name]
    is_mistral = name.startswith("mistral")
    async with served(template, tokenizer=make()) as (running, client):
        running.script.answer = text
        for step in (1, 2, 7, 1000):
            running.script.step = step
            message = (await chat(client, HI, tools=TOOLS)).choices[0].message
            calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
            want = [(name, json.loads(arguments)) for name, arguments in (ROME, OSLO)]
            assert (message.content, calls) == (content, want)
            ids = [call.id for call in message.tool_calls]
            assert len(set(ids)) == 2
            assert all((len(one) == 9 and one.isalnum() and one.isascii()) == is_mistral for one in ids)
            found = joined(await streamed(client, HI, tools=TOOLS))[0]
            assert (found[0] or None, [(name, json.loads(text)) for name, text in found[2]]) == (content, want)
        one = await chat(client, HI, tools=TOOLS, parallel_tool_calls=False)
        assert [call.function.name for call in one.choices[0].message.tool_calls] == ["weather"]
        asked = {"model": MODEL, "input": "hi", "tools": [{"type": "function", **TOOLS[0]["function"]}]}
        _, _, response = await post(running.url, "/v1/responses", asked)
        called = [item["name"] for item in response["output"] if item["type"] == "function_call"]
        assert called[0] == "weather"
        asked = {"model": MODEL, "messages": HI, "max_tokens": 500}
        tools = [{"name": one["function"]["name"], "input_schema": one["function"]["parameters"]} for one in TOOLS]
        _, _, said = await post(running.url, "/v1/messages", asked | {"tools": tools})
        assert [block["name"] for block in said["content"] if block["type"] == "tool_use"] == ["weather", "tree"]


@pytest.mark.long
@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("template", "make", "text"),
    [
        (LLAMA, llama, 'It is {"name": "weather", "parameters": {"in": "Rome"}}.'),
        (LLAMA, llama, '{"name": "Bob", "parameters": {"age": 3}}'),
        (LLAMA, llama, '{"temperature": 20}'),
        (MISTRAL, mistral, '[{"name": "weather", "arguments": {}}]'),
        (MISTRAL_ARGS, mistral, 'weather {"in": "Rome"}'),
        (GLM, glm, "<tool_call>no call</tool_call>"),
        (DEEPSEEK_V3, deepseek, v31_of(ROME)),
        (DEEPSEEK_V31, deepseek, v3_of(ROME)),
        (KIMI, kimi, kimi_of(ROME).replace(":0", "")),
    ],
)
async def test_an_answer_that_is_no_call_is_text(template, make, text):
    async with served(template, tokenizer=make()) as (running, client):
        running.script.answer = text
        message = (await chat(client, HI, tools=TOOLS)).choices[0].message
        assert (message.content, message.tool_calls) == (text, None)
        assert joined(await streamed(client, HI, tools=TOOLS))[0][:3] == [text, "", []]
        assert not sent_to(running)[-1].sampling.HasField("grammar")


@pytest.mark.asyncio
async def test_without_tools_special_tokens_stay_hidden():
    async with served(MISTRAL, tokenizer=mistral()) as (running, client):
        running.script.answer = "a[TOOL_CALLS]b"
        assert (await chat(client, HI)).choices[0].message.content == "ab"
        assert sent_to(running)[-1].sampling.skip_special_tokens
        shown = await chat(client, HI, extra_body={"skip_special_tokens": False})
        assert shown.choices[0].message.content == "a[TOOL_CALLS]b"


@pytest.mark.asyncio
async def test_a_turn_ends_at_either_token_and_its_text_is_not_shown():
    async with served(LLAMA, tokenizer=llama()) as (running, client):
        for end in ("<|eom_id|>", "<|eot_id|>"):
            running.script.answer = f"<|python_tag|>{llama_of(ROME)}{end}"
            choice = (await chat(client, HI, tools=TOOLS)).choices[0]
            assert (choice.message.content, choice.stop_reason) == (None, None)
            assert [call.function.arguments for call in choice.message.tool_calls] == [ROME[1]]
            running.script.answer = f"Well.{end}"
            assert (await chat(client, HI, tools=TOOLS)).choices[0].message.content == "Well."


@pytest.mark.asyncio
@pytest.mark.parametrize("template", [MISTRAL, MISTRAL_ARGS])
@pytest.mark.long
async def test_a_conversation_goes_on_with_the_ids_that_were_made(template):
    async with served(template, tokenizer=mistral()) as (running, client):
        running.script.answer = mistral_of(ROME)
        message = (await chat(client, HI, tools=TOOLS)).choices[0].message
        call = message.tool_calls[0]
        more = [*HI, message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "sun"}]
        await chat(client, more, tools=TOOLS)
        prompt = mistral().stream(skip_special_tokens=False)
        text = "".join(map(prompt.push, sent_to(running)[-1].prompt_token_ids))
        assert f"[TOOL_RESULTS]{call.id}sun" in text
        more[-1]["tool_call_id"] = "call_0123456789"
        with pytest.raises(openai.BadRequestError, match="nine characters"):
            await chat(client, more, tools=TOOLS)


@pytest.mark.asyncio
@pytest.mark.long
async def test_calls_of_kimi_keep_the_ids_that_the_model_wrote():
    async with served(KIMI, tokenizer=kimi()) as (running, client):
        running.script.answer = kimi_of(ROME, OSLO, index=3)
        message = (await chat(client, HI, tools=TOOLS)).choices[0].message
        assert [call.id for call in message.tool_calls] == ["functions.weather:3", "functions.tree:4"]
        deltas = [chunk.choices[0].delta for chunk in await streamed(client, HI, tools=TOOLS) if chunk.choices]
        ids = [call.id for delta in deltas for call in delta.tool_calls or () if call.id]
        assert ids == ["functions.weather:3", "functions.tree:4"]
        more = [*HI, message.model_dump(exclude_none=True)]
        more += [{"role": "tool", "tool_call_id": call.id, "content": "sun"} for call in message.tool_calls]
        await chat(client, more, tools=TOOLS)
        prompt = kimi().stream(skip_special_tokens=False)
        text = "".join(map(prompt.push, sent_to(running)[-1].prompt_token_ids))
        assert kimi_of(ROME, OSLO, index=3) in text
        assert "## Return of functions.tree:4\nsun" in text
        running.script.answer = kimi_of(ROME) + kimi_of(ROME)
        first, second = (await chat(client, HI, tools=TOOLS)).choices[0].message.tool_calls
        assert first.id == "functions.weather:0"
        assert second.id.startswith("call_"), "an id is of one call"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("template", "make", "write"),
    [(DEEPSEEK_V3, deepseek, v3_of), (DEEPSEEK_V31, deepseek, v31_of), (GLM, glm, pairs_of), (QWEN35, qwen, coder_of)],
)
@pytest.mark.long
async def test_calls_and_results_go_back_into_the_prompt(template, make, write):
    async with served(template, tokenizer=make()) as (running, client):
        running.script.answer = f"</think>{write(ROME, OSLO)}" if template == QWEN35 else write(ROME, OSLO)
        message = (await chat(client, HI, tools=TOOLS)).choices[0].message
        for content in (None, ""):
            called = {
                "role": "assistant",
                "content": content,
                "tool_calls": [c.model_dump() for c in message.tool_calls],
            }
            result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sun"}
            await chat(client, [*HI, called, result], tools=TOOLS)
            prompt = make().stream(skip_special_tokens=False)
            text = "".join(map(prompt.push, sent_to(running)[-1].prompt_token_ids))
            assert write(ROME, OSLO) in text
            assert "sun" in text


@pytest.mark.asyncio
async def test_without_thinking_glm_is_told_so_and_begins_no_thought():
    async with served(GLM, tokenizer=glm()) as (running, client):
        more = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}, "tool_choice": "required"}
        running.script.answer = pairs_of(("weather", '{"in": "7"}'))
        message = (await chat(client, HI, tools=TOOLS, **more)).choices[0].message
        assert [call.function.arguments for call in message.tool_calls] == ['{"in": "7"}'], "by the tool's schema"
        prompt = glm().decode(sent_to(running)[-1].prompt_token_ids)
        assert "hi/nothink" in prompt
        structure = AnswerStructure.from_json(sent_to(running)[-1].sampling.grammar.structure)
        assert structure.thought == "none"


# What a request adds; whether calls may or must be, and the tools that may be called.
BOUND = [
    ({"tool_choice": "required"}, "required", ["weather", "tree"]),
    ({"tool_choice": {"type": "function", "function": {"name": "tree"}}}, "required", ["tree"]),
    ({"tools": [tool("weather", strict=True), TOOLS[1]]}, "auto", ["weather", "tree"]),
    (
        {
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "tree"}}]},
            }
        },
        "auto",
        ["tree"],
    ),
    ({"response_format": {"type": "json_object"}}, "auto", ["weather", "tree"]),
]


@pytest.mark.long
@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("template", "make", "form", "marks", "are_special"),
    [
        (HERMES, of_bytes, "hermes", [], False),
        (HERMES, qwen, "hermes", ["</tool_call>", "<tool_call>"], False),
        (HERMES, lambda: of_bytes(["<tool_call>", "</tool_call>"]), "hermes", ["</tool_call>", "<tool_call>"], True),
        (LLAMA, llama, "llama3_json", ["<|python_tag|>"], True),
        (MISTRAL, mistral, "mistral", ["[ARGS]", "[CALL_ID]", "[TOOL_CALLS]"], True),
        (MISTRAL, qwen, "mistral", [], False),
        (MISTRAL_ARGS, mistral, "mistral_args", ["[ARGS]", "[CALL_ID]", "[TOOL_CALLS]"], True),
        (GLM, glm, "glm45", [*CallForm.GLM45.marks, *ThoughtForm.TAGS.marks], False),
        (DEEPSEEK_V3, deepseek, "deepseek_v3", [*DEEPSEEK_TAGS, *ThoughtForm.TAGS.marks], False),
        (KIMI, kimi, "kimi_k2", list(KIMI_TAGS), True),
    ],
)
async def test_calls_are_bound_in_the_models_form(template, make, form, marks, are_special):
    tokenizer = make()
    async with served(template, tokenizer=tokenizer) as (running, client):
        for body, calls, names in BOUND:
            await chat(client, HI, **({"tools": TOOLS} | body))
            sampling = sent_to(running)[-1].sampling
            found = AnswerStructure.from_json(sampling.grammar.structure)
            assert (found.form, found.calls, [one.name for one in found.tools]) == (form, calls, names), body
            assert found.tokens == {mark: tokenizer.added_tokens[mark] for mark in sorted(marks)}
            assert sampling.skip_special_tokens != are_special


# A template and what it opens, its tokenizer, an answer, its thought and its text.
THOUGHTS = {
    "qwen, opened by the template": (QWEN_THINKING, {}, qwen, "hm\n</think>\n\nyes", "hm", "yes"),
    "r1, opened by the template": (R1, {"opens": True}, qwen, "hm\n</think>\n\nyes", "hm", "yes"),
    "r1, opened by the model": (R1, {}, qwen, "<think>\nhm\n</think>\n\nyes", "hm", "yes"),
    "r1, none": (R1, {}, qwen, "yes", None, "yes"),
    "special tags": (R1, {}, lambda: of_bytes(["<think>", "</think>"]), "<think>hm</think>yes", "hm", "yes"),
    "qwen3.5, opened by the template": (QWEN35, {}, qwen, "hm\n</think>\n\nyes", "hm", "yes"),
    "glm": (GLM, {}, glm, "\n<think>hm</think>\nyes", "hm", "yes"),
    "deepseek r1, opened by the template": (DEEPSEEK_R1, {}, deepseek, "hm\n</think>\n\nyes", "hm", "yes"),
    "deepseek v3.1, opened by the template": (
        DEEPSEEK_V31,
        {"thinking": True},
        deepseek,
        "hm</think>yes",
        "hm",
        "yes",
    ),
    "magistral": (MAGISTRAL, {}, mistral, "[THINK]hm[/THINK]yes", "hm", "yes"),
    "magistral, none": (MAGISTRAL, {}, mistral, "yes", None, "yes"),
    "magistral, tags that are text": (MAGISTRAL, {}, qwen, "[THINK]\nhm\n[/THINK]\nyes", "hm", "yes"),
}


@pytest.mark.long
@pytest.mark.asyncio
@pytest.mark.parametrize("name", THOUGHTS)
async def test_thoughts_of_each_form(name):
    template, variables, make, text, thought, rest = THOUGHTS[name]
    async with served(template, tokenizer=make()) as (running, client):
        running.script.answer = text
        for step in (1, 3, 1000):
            running.script.step = step
            more = {"extra_body": {"chat_template_kwargs": variables}}
            answer = await chat(client, HI, **more)
            message = answer.choices[0].message
            assert (getattr(message, "reasoning", None), message.content) == (thought, rest)
            count = answer.usage.completion_tokens_details.reasoning_tokens
            begin, end = ("<think>", "</think>") if "</think>" in text else ("[THINK]", "[/THINK]")
            inside = text.partition(begin)[2].partition(end)[0] if begin in text else text.partition(end)[0]
            assert count == (len(inside) if thought else 0)
            found = joined(await streamed(client, HI, **more))[0]
            assert (found[1] or None, found[0]) == (thought, rest)
        await chat(client, HI, response_format={"type": "json_object"}, **more)
        structure = AnswerStructure.from_json(sent_to(running)[-1].sampling.grammar.structure)
        is_open = "opened by the template" in name
        assert structure.thought == ("open" if is_open else "optional")
        assert structure.thought_form == ("[THINK]" if "magistral" in name else "<think>")


@pytest.mark.asyncio
async def test_a_thought_and_then_calls():
    async with served(MAGISTRAL, tokenizer=mistral()) as (running, client):
        running.script.answer = f"[THINK]which[/THINK]Well.{args_of(ROME)}"
        message = (await chat(client, HI, tools=TOOLS)).choices[0].message
        assert (message.reasoning, message.content) == ("which", "Well.")
        assert [call.function.name for call in message.tool_calls] == ["weather"]
        found = joined(await streamed(client, HI, tools=TOOLS))[0]
        assert found[:3] == ["Well.", "which", [list(ROME)]]


@pytest.mark.parametrize(
    ("text", "form", "thought"),
    [
        (LLAMA, CallForm.LLAMA3_JSON, None),
        ("<|python_tag|>", CallForm.LLAMA3_JSON, None),
        (MISTRAL, CallForm.MISTRAL, None),
        (MISTRAL_ARGS, CallForm.MISTRAL_ARGS, None),
        (MAGISTRAL, CallForm.MISTRAL_ARGS, ThoughtForm.BRACKETS),
        (HERMES, CallForm.HERMES, None),
        (HERMES + "<|python_tag|>", CallForm.HERMES, None),
        (HERMES + "<function=", CallForm.QWEN3_CODER, None),
        (QWEN_THINKING, CallForm.HERMES, ThoughtForm.TAGS),
        (R1, CallForm.HERMES, ThoughtForm.TAGS),
        ("{{ messages[0].content.split('</think>')[-1] }}", CallForm.HERMES, ThoughtForm.TAGS),
        ("{{ messages }}", CallForm.HERMES, None),
        (QWEN35, CallForm.QWEN3_CODER, ThoughtForm.TAGS),
        (GLM, CallForm.GLM45, ThoughtForm.TAGS),
        (DEEPSEEK_V3, CallForm.DEEPSEEK_V3, ThoughtForm.TAGS),
        (DEEPSEEK_R1, CallForm.DEEPSEEK_V3, ThoughtForm.TAGS),
        (DEEPSEEK_V31, CallForm.DEEPSEEK_V31, ThoughtForm.TAGS),
        (KIMI, CallForm.KIMI_K2, None),
        (KIMI + "<think>", CallForm.KIMI_K2, ThoughtForm.TAGS),
    ],
)
@pytest.mark.long
def test_the_template_shows_the_forms(text, form, thought):
    template = ChatTemplate({"default": "{{ messages }}", "tool_use": text})
    assert (template.call_form, template.thought_form) == (form, thought)


@pytest.mark.parametrize(
    ("parser", "text", "form"),
    [
        ("hermes", MISTRAL, CallForm.HERMES),
        ("qwen3_coder", LLAMA, CallForm.QWEN3_CODER),
        ("llama3_json", "", CallForm.LLAMA3_JSON),
        ("mistral", "", CallForm.MISTRAL),
        ("mistral", MISTRAL_ARGS, CallForm.MISTRAL_ARGS),
        ("glm45", "", CallForm.GLM45),
        ("deepseek_v3", DEEPSEEK_V31, CallForm.DEEPSEEK_V3),
        ("deepseek_v31", DEEPSEEK_V3, CallForm.DEEPSEEK_V31),
        ("kimi_k2", HERMES, CallForm.KIMI_K2),
    ],
)
def test_a_parser_that_is_named_overrules_the_template(tmp_path, parser, text, form):
    (tmp_path / "chat_template.jinja").write_text(text + " ")
    assert ChatTemplate.load(tmp_path, "", parser).call_form == form
    (tmp_path / "own.jinja").write_text(text)
    assert ChatTemplate.load(tmp_path, str(tmp_path / "own.jinja"), parser).call_form == form


@pytest.mark.long
@pytest.mark.asyncio
async def test_a_parser_holds_for_light_and_heavy_bodies():
    for more in ({}, {"logit_bias": {str(token): 1.0 for token in range(260)}}):
        async with served(HERMES, tokenizer=llama(), parser="llama3_json") as (running, client):
            running.script.answer = "<|python_tag|>" + llama_of(ROME, OSLO)
            message = (await chat(client, HI, tools=TOOLS, **more)).choices[0].message
            assert [call.function.name for call in message.tool_calls] == ["weather", "tree"]
            await chat(client, HI, tools=TOOLS, tool_choice="required", **more)
            found = AnswerStructure.from_json(sent_to(running)[-1].sampling.grammar.structure)
            assert (found.form, list(found.tokens)) == ("llama3_json", ["<|python_tag|>"])
            assert (running.router._reader.num_in_process > 0) == bool(more)


def test_a_parser_without_http_is_refused():
    from baton.core.config import ServeConfig

    with pytest.raises(ConfigInvalid, match="tool_call_parser without http_port") as refused:
        ServeConfig.from_mapping({"tool_call_parser": "mistral"})
    assert refused.value.fields["keys"] == ["tool_call_parser"]
    with pytest.raises(ConfigInvalid, match="tool_call_parser"):
        ServeConfig.from_mapping({"tool_call_parser": "pythonic", "http_port": 0})
    assert ServeConfig.from_mapping({"tool_call_parser": "mistral", "http_port": 0}).tool_call_parser == "mistral"
