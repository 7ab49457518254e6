"""Chats through OpenAI's client, a real router and scripted workers."""

import json

import openai
import pytest

from baton.core.requests.answer_structure import AnswerStructure
from baton.core.requests.sampling import MAX_BAD_WORDS
from baton.proto import inference_pb2
from baton.router.openai.limits import MAX_BAD_TEXTS
from baton.tests.router.fakes import TOKENIZER
from baton.tests.router.openai.served import CHATML, MAX_MODEL_LEN, MODEL, prompt_of, sent_to, served

pytestmark = [pytest.mark.asyncio, pytest.mark.fast]
HI = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
TREE = {
    "type": "function",
    "function": {
        "name": "tree",
        "parameters": {
            "type": "object",
            "properties": {
                "const": {"$ref": "#/$defs/N"},
                "x": {"const": {"$ref": "#/as/it/is"}},
                "all": {"$ref": "#"},
            },
            "$defs": {"N": {"type": "array", "items": {"$ref": "#/$defs/N"}}},
        },
    },
}
THINKING = "{% for message in messages %}{{ message.content }}{% endfor %}<think>\n"


async def chat(client, messages=HI, **more):
    return await client.chat.completions.create(model=MODEL, messages=messages, **more)


async def streamed(client, messages=HI, **more):
    return [chunk async for chunk in await chat(client, messages, stream=True, **more)]


def joined(chunks):
    """What a client makes of a stream's deltas: per choice (content, thinking, calls, reason)."""
    choices = {}
    for chunk in chunks:
        for choice in chunk.choices:
            found = choices.setdefault(choice.index, ["", "", [], None])
            found[0] += choice.delta.content or ""
            found[1] += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or ():
                if call.index == len(found[2]):
                    assert call.id
                    found[2].append([call.function.name, ""])
                found[2][call.index][1] += call.function.arguments
            assert found[3] is None
            found[3] = choice.finish_reason
    return choices


@pytest.mark.long
async def test_an_answer_and_its_usage():
    async with served() as (running, client):
        answer = await chat(client)
        assert answer.object == "chat.completion"
        assert answer.id.startswith("chatcmpl-")
        [choice] = answer.choices
        assert (choice.message.role, choice.message.content) == ("assistant", "hello world")
        assert (choice.finish_reason, choice.message.tool_calls, choice.logprobs) == ("length", None, None)
        [request] = sent_to(running)
        prompt = "<system>be brief\n<user>hi\n<assistant>"
        assert prompt_of(request) == prompt
        usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (len(prompt), 11, len(prompt) + 11)
        assert usage.prompt_tokens_details.cached_tokens == len(prompt) - 2
        assert request.sampling.max_tokens == MAX_MODEL_LEN - len(prompt), "all that fit"


async def test_a_stream_with_its_usage():
    async with served() as (_, client):
        chunks = await streamed(client, stream_options={"include_usage": True})
        assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
        assert len({chunk.id for chunk in chunks}) == 1
        assert chunks[0].choices[0].delta.role == "assistant"
        assert joined(chunks) == {0: ["hello world", "", [], "length"]}
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == 11
        assert all(chunk.usage is None for chunk in chunks[:-1])
        more = {"include_usage": True, "continuous_usage_stats": True}
        counts = [chunk.usage.completion_tokens for chunk in await streamed(client, stream_options=more)]
        assert counts == sorted(counts)
        assert (counts[0], counts[-1]) == (0, 11)
        assert all(chunk.usage is None for chunk in await streamed(client))


async def test_as_many_bad_words_are_taken_as_the_document_says():
    """Each is two token sequences, of which a request has so many at most."""
    words = [f"w{number}" for number in range(MAX_BAD_TEXTS + 1)]
    async with served() as (running, client):
        await chat(client, extra_body={"bad_words": words[:-1]})
        assert len(sent_to(running)[0].sampling.bad_words) == MAX_BAD_WORDS
        with pytest.raises(openai.BadRequestError, match=f"bad_words.*{MAX_BAD_TEXTS}"):
            await chat(client, extra_body={"bad_words": words})


@pytest.mark.long
async def test_sampling_values_reach_the_workers():
    values = {"temperature": 0.5, "top_p": 0.25, "presence_penalty": 1.0, "frequency_penalty": -1.0, "seed": 7}
    more = {"top_k": 5, "min_p": 0.125, "repetition_penalty": 1.5, "stop_token_ids": [3], "min_tokens": 2}
    more |= {"ignore_eos": True, "allowed_token_ids": [1, 2], "bad_words": ["ab"]}
    async with served() as (running, client):
        await chat(client, **values, stop=["zz", "yy"], logit_bias={"5": -2.5}, max_tokens=9, extra_body=more)
        sent = sent_to(running)[0].sampling
        for name, value in values.items():
            assert getattr(sent, name) == value, name
        assert (sent.top_k, sent.min_p, sent.repetition_penalty, sent.min_tokens) == (5, 0.125, 1.5, 2)
        assert (sent.ignore_eos, sent.max_tokens) == (True, 9)
        assert (list(sent.stop), list(sent.stop_token_ids), list(sent.allowed_token_ids.ids)) == (
            ["zz", "yy"],
            [3],
            [1, 2],
        )
        assert [(bias.token_id, bias.bias) for bias in sent.logit_bias] == [(5, -2.5)]
        words = {tuple(word.ids) for word in sent.bad_words}
        assert words == {tuple(TOKENIZER.encode("ab")), tuple(TOKENIZER.encode(" ab"))}
        await chat(client, max_completion_tokens=5, seed=-1, stop="q", extra_body={"top_k": -1, "cache_salt": "me"})
        last = sent_to(running)[-1]
        assert (last.sampling.max_tokens, last.sampling.top_k, list(last.sampling.stop)) == (5, 0, ["q"])
        assert (last.sampling.seed, last.tenant) == ((1 << 63) - 1, "me")


async def test_values_that_the_model_advises_hold_where_a_request_names_none():
    async with served(http={"defaults": {"temperature": 0.5, "top_k": 20}}) as (running, client):
        await chat(client)
        await chat(client, temperature=0.0, extra_body={"top_k": 0})
        sent = [(request.sampling.temperature, request.sampling.top_k) for request in sent_to(running)]
        assert sent == [(0.5, 20), (0.0, 0)]


async def test_several_answers():
    async with served() as (_, client):
        answer = await chat(client, n=3)
        assert [(choice.index, choice.message.content) for choice in answer.choices] == [
            (index, "hello world") for index in range(3)
        ]
        assert answer.usage.completion_tokens == 33
        assert joined(await streamed(client, n=2)) == {index: ["hello world", "", [], "length"] for index in range(2)}


async def test_a_stop_string_ends_the_text():
    async with served() as (running, client):
        running.script.answer = "one. two"
        answer = await chat(client, stop=["."])
        assert answer.choices[0].message.content == "one"
        assert joined(await streamed(client, stop=["."]))[0][0] == "one"


def report(token_id):
    top = {"top_token_ids": [token_id, 5, 6], "top_logprobs": [-0.5, -2.0, float("-inf")]}
    return inference_pb2.TokenLogprobs(token_id=token_id, logprob=-0.5, rank=1, **top)


async def test_log_probabilities():
    async with served() as (running, client):
        running.script.answer, running.script.logprobs = "né", report
        for is_stream in (False, True):
            if is_stream:
                chunks = await streamed(client, logprobs=True, top_logprobs=3)
                entries = [
                    entry for chunk in chunks for c in chunk.choices if c.logprobs for entry in c.logprobs.content
                ]
            else:
                entries = (await chat(client, logprobs=True, top_logprobs=3)).choices[0].logprobs.content
            assert [entry.bytes for entry in entries] == [[b] for b in "né".encode()]
            assert [entry.token for entry in entries] == ["n", "�", "�"]
            assert entries[0].logprob == -0.5
            assert [top.logprob for top in entries[0].top_logprobs] == [-0.5, -2.0, -9999.0]
        assert sent_to(running)[0].sampling.logprobs == 3
        none = (await chat(client, logprobs=True)).choices[0].logprobs.content
        assert [entry.top_logprobs for entry in none] == [[]] * 3
        ids = await chat(
            client, logprobs=True, extra_body={"return_tokens_as_token_ids": True, "return_token_ids": True}
        )
        assert ids.choices[0].logprobs.content[0].token == f"token_id:{TOKENIZER.encode('n')[0]}"
        assert ids.choices[0].token_ids == TOKENIZER.encode("né")
        assert TOKENIZER.decode(ids.prompt_token_ids) == prompt_of(sent_to(running)[0])
        timed = await chat(client, extra_body={"return_timings": True})
        assert timed.choices[0].timings["first"]["total_ms"] > 0
        assert not hasattr(ids.choices[0], "timings")
        asked = await chat(client, extra_body={"prompt_logprobs": 1})
        assert asked.prompt_logprobs[0] is None
        assert len(asked.prompt_logprobs) == asked.usage.prompt_tokens


CALLS = """Well.
<tool_call>
{"name": "weather", "arguments": {"in": "Rome"}}
</tool_call>
<tool_call>
{"name": "tree"}
</tool_call>"""


@pytest.mark.long
async def test_calls_among_text():
    async with served() as (running, client):
        running.script.answer = CALLS
        running.script.events = None
        answer = await chat(client, tools=[WEATHER, TREE])
        message = answer.choices[0].message
        assert message.content == "Well."
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls]
        assert calls == [("weather", '{"in": "Rome"}'), ("tree", "{}")]
        assert len({call.id for call in message.tool_calls}) == 2
        found = joined(await streamed(client, tools=[WEATHER, TREE]))[0]
        assert (found[0], [tuple(call) for call in found[2]]) == ("Well.", calls)
        assert '"name": "weather"' in prompt_of(sent_to(running)[0])
        one = await chat(client, tools=[WEATHER, TREE], parallel_tool_calls=False)
        assert [call.function.name for call in one.choices[0].message.tool_calls] == ["weather"]
        none = await chat(client, tools=[WEATHER], tool_choice="none")
        assert (none.choices[0].message.content, none.choices[0].message.tool_calls) == (CALLS, None)
        assert "weather" not in prompt_of(sent_to(running)[-1])
        assert (await chat(client)).choices[0].message.content == CALLS, "without tools nothing is split"


async def test_a_call_that_ends_the_answer_is_its_reason():
    async with served() as (running, client):
        running.script.answer, running.script.finish_at_first, running.script.events = "x", "stop", []
        assert (await chat(client, tools=[WEATHER])).choices[0].finish_reason == "stop"
    from baton.router.openai.chat_request import ChatRequest
    from baton.router.openai.chats import ChatChoice
    from baton.router.openai.token_names import TokenNames
    from baton.router.openai.tool_calls import TaggedCalls

    asked = ChatRequest.model_validate_json(json.dumps({"messages": HI}))
    for reason, calls_finish, want in (
        ("stop", True, "tool_calls"),
        ("stop", False, "stop"),
        ("length", True, "length"),
    ):
        choice = ChatChoice(0, asked, TokenNames(TOKENIZER), tools=TaggedCalls(), calls_finish=calls_finish)
        chunk = inference_pb2.GenerateChunk(text=CALLS, finish=inference_pb2.Finish(reason=reason))
        assert choice.push(chunk)["finish_reason"] == want


FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object", "maxProperties": 0}}}
STRICT = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}, "strict": True}}
NAMED = {"type": "function", "function": {"name": "tree"}}


def allowed(mode, *names):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


# What a request adds; whether calls may or must be, the tools that may be called, those bound by their schema, whether
# there is a format beside them. None: nothing is bound.
BOUND = [
    ({}, None),
    ({"tool_choice": "auto"}, None),
    ({"tool_choice": "required"}, ("required", "weather tree", "weather tree", False)),
    ({"tool_choice": NAMED}, ("required", "tree", "tree", False)),
    ({"tool_choice": allowed("auto", "tree")}, ("auto", "tree", "", False)),
    ({"tool_choice": allowed("auto", "weather", "tree")}, None),
    ({"tool_choice": allowed("required", "tree")}, ("required", "tree", "tree", False)),
    ({"response_format": FORM}, ("auto", "weather tree", "", True)),
    ({"response_format": FORM, "tool_choice": "required"}, ("required", "weather tree", "weather tree", False)),
    ({"response_format": FORM, "tool_choice": NAMED}, ("required", "tree", "tree", False)),
    ({"response_format": FORM, "tool_choice": allowed("auto", "tree")}, ("auto", "tree", "", True)),
    ({"tools": [STRICT, TREE]}, ("auto", "weather tree", "weather", False)),
    ({"tools": [STRICT, TREE], "response_format": FORM}, ("auto", "weather tree", "weather", True)),
    ({"tools": [STRICT, TREE], "tool_choice": allowed("auto", "tree")}, ("auto", "tree", "", False)),
]


@pytest.mark.long
@pytest.mark.parametrize("template", [CHATML, CHATML + "{# <function= #}"])
async def test_what_tools_and_formats_bind(template):
    async with served(template) as (running, client):
        for body, want in BOUND:
            answer = await chat(client, **({"tools": [WEATHER, TREE]} | body))
            sampling = sent_to(running)[-1].sampling
            assert sampling.HasField("grammar") == (want is not None), body
            assert '"name": "tree"' in prompt_of(sent_to(running)[-1]), "all tools stay in the prompt"
            assert answer.choices[0].message.content
            if want is None:
                continue
            found = AnswerStructure.from_json(sampling.grammar.structure)
            bound = " ".join(tool.name for tool in found.tools if tool.parameters is not None)
            assert (found.calls, " ".join(tool.name for tool in found.tools), bound, found.text is not None) == want, (
                body
            )
            assert found.form == ("qwen3_coder" if "function=" in template else "hermes")
            if found.text is not None:
                assert (found.text[0], json.loads(found.text[1])) == ("json_schema", FORM["json_schema"]["schema"])
        now = {"type": "function", "function": {"name": "now"}}
        await chat(client, tools=[now], tool_choice="required")
        (found,) = AnswerStructure.from_json(sent_to(running)[-1].sampling.grammar.structure).tools
        assert found.parameters == {"type": "object", "properties": {}, "additionalProperties": False}, "no arguments"
        assert '"parameters"' not in prompt_of(sent_to(running)[-1])
        none = {"tools": [STRICT, TREE], "tool_choice": "none"}
        await chat(client, **none)
        assert not sent_to(running)[-1].sampling.HasField("grammar")
        await chat(client, **none, response_format=FORM)
        assert sent_to(running)[-1].sampling.grammar.WhichOneof("form") == "json_schema"
        for parallel, choice, want in ((False, "required", False), (None, "required", True), (True, NAMED, False)):
            await chat(client, tools=[WEATHER, TREE], tool_choice=choice, extra_body={"parallel_tool_calls": parallel})
            sampling = sent_to(running)[-1].sampling
            assert AnswerStructure.from_json(sampling.grammar.structure).parallel == want


async def test_calls_beside_a_format_are_split_off():
    async with served() as (running, client):
        running.script.events = None
        for text, content, calls in (
            ("{}", "{}", None),
            ('<tool_call>\n{"name": "tree", "arguments": {"b": []}}\n</tool_call>', None, [["tree", '{"b": []}']]),
        ):
            running.script.answer = text
            both = {"tools": [WEATHER, TREE], "response_format": FORM}
            message = (await chat(client, **both)).choices[0].message
            found = message.tool_calls and [[one.function.name, one.function.arguments] for one in message.tool_calls]
            assert (message.content, found) == (content, calls)
            streamed_parts = joined(await streamed(client, **both))[0]
            assert (streamed_parts[0] or None, streamed_parts[2] or None) == (content, calls)


async def test_what_is_no_choice_of_tools():
    async with served() as (running, client):
        for choice, match in (
            (allowed("auto", "none such"), "no tool is named"),
            (allowed("auto"), "at least 1"),
            (allowed("none", "tree"), "auto"),
            ({"type": "allowed_tools"}, "allowed_tools"),
        ):
            with pytest.raises(openai.BadRequestError, match=match) as caught:
                await chat(client, tools=[WEATHER, TREE], tool_choice=choice)
            assert caught.value.param == "tool_choice"
        bad = TREE["function"] | {"parameters": {"x-guidance": {}}}
        with pytest.raises(openai.BadRequestError, match="tool tree"):
            await chat(client, tools=[{"type": "function", "function": bad}], tool_choice="required")
        assert sent_to(running) == []


OPEN_OR_NOT = (
    CHATML + "{# <think> #}{{ '<think>\\n' if open else '' }}{{ '<think>\\n\\n</think>\\n\\n' if over else '' }}"
)


@pytest.mark.parametrize(
    ("variables", "thought", "text", "parts"),
    [
        ({}, "optional", "<think>\nhm\n</think>\n\n{}", ("hm", "{}")),
        ({}, "optional", "{}", (None, "{}")),
        ({"open": True}, "open", "hm\n</think>\n\n{}", ("hm", "{}")),
        ({"over": True}, "none", "{}", (None, "{}")),
    ],
)
@pytest.mark.long
async def test_a_thought_comes_before_a_format(variables, thought, text, parts):
    async with served(OPEN_OR_NOT) as (running, client):
        running.script.answer, running.script.events = text, None
        body = {"chat_template_kwargs": variables}
        message = (await chat(client, response_format=FORM, extra_body=body)).choices[0].message
        assert (getattr(message, "reasoning", None), message.content) == parts
        grammar = sent_to(running)[-1].sampling.grammar
        if thought == "none":
            assert grammar.WhichOneof("form") == "json_schema"
        else:
            assert AnswerStructure.from_json(grammar.structure).thought == thought
        found = joined(await streamed(client, response_format=FORM, extra_body=body))[0]
        assert (found[1] or None, found[0]) == parts
        await chat(client, tools=[TREE], tool_choice="required", extra_body=body)
        assert AnswerStructure.from_json(sent_to(running)[-1].sampling.grammar.structure).thought == thought


async def test_earlier_calls_and_their_results_are_shown_to_the_template():
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"in": "Rome"}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sun"},
    ]
    async with served() as (running, client):
        await chat(client, messages)
        want = '<system>a\nb\n<assistant>[weather {"in": "Rome"}]\n<tool>sun\n<assistant>'
        assert prompt_of(sent_to(running)[0]) == want


async def test_content_of_a_message_is_in_the_prompt_or_refused_in_any_field():
    said = {"role": "assistant", "content": None, "refusal": "never", "function_call": None, "audio": None}
    async with served() as (running, client):
        await chat(client, [said])
        assert prompt_of(sent_to(running)[0]) == "<assistant>never\n<assistant>"
        for elsewhere in ({"function_call": {"name": "f", "arguments": "{}"}}, {"audio": {"id": "a"}}):
            with pytest.raises(openai.BadRequestError, match=f"messages.0.: {next(iter(elsewhere))} is not supported"):
                await chat(client, [said | elsewhere])
        assert len(sent_to(running)) == 1


async def test_half_of_a_character_in_an_earlier_call_stays_escaped():
    text = r'{"in": "\uD83D", "\udc00": "Rome"}'
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": text}}
    whole = call | {"function": {"name": "weather", "arguments": r'{"in": "\ud83d\ude00"}'}}
    async with served() as (running, client):
        await chat(client, [{"role": "assistant", "content": "", "tool_calls": [call, whole]}])
        want = f"<assistant>[weather {json.dumps(text)}][weather {json.dumps({'in': '😀'})}]\n<assistant>"
        assert prompt_of(sent_to(running)[0]).encode() == want.replace(r"\ud83d\ude00", "😀").encode()
    async with served("{{ messages[0].content[0] and '\ud83d' }}") as (running, client):
        with pytest.raises(openai.BadRequestError, match="not valid UTF-8 at character 0"):
            await chat(client, HI)


@pytest.mark.long
async def test_thinking_is_split_off():
    async with served(THINKING) as (running, client):
        running.script.answer = "so\nso\n</think>\n\nyes"
        message = (await chat(client)).choices[0].message
        assert (message.reasoning_content, message.content) == ("so\nso", "yes")
        assert joined(await streamed(client)) == {0: ["yes", "so\nso", [], "length"]}
        quiet = await chat(client, extra_body={"include_reasoning": False})
        assert (quiet.choices[0].message.content, hasattr(quiet.choices[0].message, "reasoning_content")) == (
            "yes",
            False,
        )


@pytest.mark.long
async def test_formats_of_an_answer():
    schema = {"type": "object", "properties": {"é": {"type": "integer"}}}
    forms = [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}, "json_schema"),
        ({"response_format": {"type": "json_object"}}, "json_object"),
        ({"response_format": {"type": "text"}}, None),
        ({"guided_json": schema}, "json_schema"),
        ({"guided_json": json.dumps(schema)}, "json_schema"),
        ({"guided_regex": "a+"}, "regex"),
        ({"guided_grammar": 'start: "a"'}, "grammar"),
        ({"guided_choice": ["a.b", "c|d"]}, "regex"),
        ({"structured_outputs": {"json": schema}}, "json_schema"),
        ({"structured_outputs": {"regex": "a"}}, "regex"),
        ({"structured_outputs": {"choice": ["a"]}}, "regex"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar"),
        ({"structured_outputs": {"json_object": True}}, "json_object"),
    ]
    async with served() as (running, client):
        for body, kind in forms:
            await chat(client, extra_body=body)
            grammar = sent_to(running)[-1].sampling.grammar
            assert grammar.WhichOneof("form") == kind, body
            if kind == "json_schema":
                assert json.loads(grammar.json_schema) == schema
            if "guided_choice" in body:
                assert grammar.regex == r"a\.b|c\|d"


async def test_the_final_message_may_be_continued():
    messages = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "hel"}]
    async with served() as (running, client):
        await chat(client, messages, extra_body={"continue_final_message": True, "add_generation_prompt": False})
        assert prompt_of(sent_to(running)[0]) == "<user>say\n<assistant>hel"
        with pytest.raises(openai.BadRequestError, match="exclude"):
            await chat(client, messages, extra_body={"continue_final_message": True})
        await chat(client, extra_body={"chat_template_kwargs": {"open_thought": "OPEN"}})
        assert prompt_of(sent_to(running)[-1]).endswith("<assistant>OPEN")


async def test_reasoning_effort_is_a_variable_of_the_template():
    template = "{{ reasoning_effort }} {{ enable_thinking }}"
    async with served(template) as (running, client):
        for more, shown in (
            ({"reasoning_effort": "high"}, "high "),
            ({"reasoning_effort": "none"}, "none False"),
            (
                {"reasoning_effort": "none", "extra_body": {"chat_template_kwargs": {"enable_thinking": True}}},
                "none True",
            ),
        ):
            await chat(client, **more)
            assert prompt_of(sent_to(running)[-1]) == shown


async def test_calls_in_the_form_that_the_template_speaks_of():
    template = "{% for message in messages %}{{ message.content }}{% endfor %}{# <function=name> #}"
    call = "<tool_call>\n<function=weather>\n<parameter=in>\nRome\n</parameter>\n</function>\n</tool_call>"
    async with served(template) as (running, client):
        running.script.answer = call
        message = (await chat(client, tools=[WEATHER])).choices[0].message
        assert [(one.function.name, one.function.arguments) for one in message.tool_calls] == [
            ("weather", '{"in": "Rome"}')
        ]
