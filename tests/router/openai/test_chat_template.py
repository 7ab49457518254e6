"""Chat templates: where they come from, what they read, and what they may not do."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import ConfigInvalid, InvalidRequest, ModelFileDamaged
from baton.router.openai.advised_sampling import advised_sampling, unused_advice
from baton.router.openai.chat_template import ChatTemplate
from baton.tests.e2e.conftest import TINY

HI = [{"role": "user", "content": "hi"}]
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "does <f> & \"g\" 'h' é", "parameters": {"b": 1, "a": 2}},
}
TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"in": "Róme", "n": [1.5, None]}}}
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "sun"},
]


@pytest.mark.fast
def test_where_a_template_comes_from(tmp_path):
    assert ChatTemplate.load(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text(
        '{"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": null}'
    )
    assert ChatTemplate.load(tmp_path) is None
    config = {"bos_token": {"content": "<s>"}, "chat_template": "{{ bos_token }}one"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.load(tmp_path).render(HI) == "<s>one"
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "with {{ tools[0].function.name }}"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    both = ChatTemplate.load(tmp_path)
    assert (both.render(HI), both.render(HI, [TOOL]), both.render(HI, [])) == ("plain", "with f", "plain")
    (tmp_path / "chat_template.json").write_text('{"chat_template": "two"}')
    assert ChatTemplate.load(tmp_path).render(HI) == "two"
    (tmp_path / "chat_template.jinja").write_text("three <think>")
    found = ChatTemplate.load(tmp_path)
    assert (found.render(HI), found.thinks, both.thinks) == ("three <think>", True, False)
    (tmp_path / "own.jinja").write_text("four")
    assert ChatTemplate.load(tmp_path, str(tmp_path / "own.jinja")).render(HI) == "four"
    assert "<|im_start|>user\nhi<|im_end|>" in ChatTemplate.load(tmp_path, "chatml").render(HI)


@pytest.mark.fast
def test_special_tokens_that_only_their_map_names_are_read_by_a_template(tmp_path):
    """As old directories have them; with `added_tokens_decoder` transformers does not look at the map."""
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}|{{ eos_token }}")
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<s>"}, "unk_token": 3}')
    assert ChatTemplate.load(tmp_path).render(HI) == "<s>|"
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert ChatTemplate.load(tmp_path).render(HI) == "<s>|</s>"
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<b>", "added_tokens_decoder": {}}')
    assert ChatTemplate.load(tmp_path).render(HI) == "<b>|"
    (tmp_path / "special_tokens_map.json").write_text("[")
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ModelFileDamaged, match="special_tokens_map"):
        ChatTemplate.load(tmp_path)


@pytest.mark.fast
def test_a_template_that_is_none_is_refused_at_the_start(tmp_path):
    with pytest.raises(ConfigInvalid, match="nowhere"):
        ChatTemplate.load(tmp_path, str(tmp_path / "nowhere"))
    (tmp_path / "bad.jinja").write_text("{% for %}")
    with pytest.raises(ConfigInvalid, match="bad"):
        ChatTemplate.load(tmp_path, str(tmp_path / "bad.jinja"))
    for text in ('{"chat_template": "{% if %}"}', '{"chat_template": [{"name": "x"}]}', "[]", "{"):
        (tmp_path / "tokenizer_config.json").write_text(text)
        with pytest.raises(ModelFileDamaged):
            ChatTemplate.load(tmp_path)


@pytest.mark.fast
@pytest.mark.parametrize(
    "text",
    [
        "{{ raise_exception('only two roles') }}",
        "{{ messages[7].content.nothing }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages + 1 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_what_fails_in_a_template_is_the_requests_error(text):
    with pytest.raises(InvalidRequest, match="chat template"):
        ChatTemplate({"default": text}).render(HI)


@pytest.mark.fast
def test_the_final_message_cannot_be_continued_where_the_template_hides_it():
    with pytest.raises(InvalidRequest, match="continued"):
        ChatTemplate({"default": "nothing"}).render(HI, add_generation_prompt=False, continue_final_message=True)


@pytest.mark.fast
def test_the_built_in_template(tmp_path):
    template = ChatTemplate.load(tmp_path, "chatml")
    call = '<tool_call>\n{"name": "f", "arguments": {"in": "Róme", "n": [1.5, null]}}\n</tool_call>'
    prompt = template.render(TALK, [TOOL])
    assert prompt.startswith("<|im_start|>system\nbe brief\n\n# Tools")
    assert json.dumps(TOOL, ensure_ascii=False) in prompt
    assert prompt.endswith(
        f"<|im_start|>assistant\n{call}<|im_end|>\n<|im_start|>user\n<tool_response>\nsun\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert template.thinks
    quiet = template.render(HI, variables={"enable_thinking": False})
    assert quiet.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert template.render(HI) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@given(st.text(max_size=40))
@pytest.mark.fast
@pytest.mark.long
def test_text_of_a_message_is_never_read_as_a_template(text):
    assert (
        ChatTemplate({"default": "[{{ messages[0].content }}]"}).render([{"role": "user", "content": text}])
        == f"[{text}]"
    )


def test_it_renders_as_transformers_does():
    from transformers.utils.chat_template_utils import render_jinja_template

    for given_name in ("", "chatml"):
        template = ChatTemplate.load(TINY, given_name)
        source = next(iter(template.sources.values()))
        for messages, tools in ((HI, None), (TALK, [TOOL]), (TALK[:2], [TOOL, TOOL])):
            for add in (False, True):
                [want], _ = render_jinja_template(
                    [messages], tools=tools, chat_template=source, add_generation_prompt=add, eos_token="<|endoftext|>"
                )
                assert template.render(messages, tools, add_generation_prompt=add) == want


@pytest.mark.parametrize("save_jinja_files", [True, False])
def test_a_template_for_tools_is_found_where_transformers_saves_it(save_jinja_files, tmp_path):
    """5 saves named templates as files, earlier versions in tokenizer_config.json."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(TINY / "tokenizer.json"))
    tokenizer.chat_template = {
        "default": "plain {{ messages[0].content }}",
        "tool_use": "{{ tools[0].function.name }}: {{ messages[0].content }}",
        "rag": "{{ raise_exception('not for chats') }}",
    }
    tokenizer.save_pretrained(tmp_path, save_jinja_files=save_jinja_files)
    assert (tmp_path / "additional_chat_templates" / "tool_use.jinja").is_file() == save_jinja_files
    template = ChatTemplate.load(tmp_path)
    for tools in (None, [TOOL]):
        assert template.render(HI, tools) == tokenizer.apply_chat_template(HI, tools=tools, tokenize=False)


MARKED = """{%- set end = '<|im_end|>' %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- set said = 'outer' %}
        {% generation %}
            {%- set said = message.content %}
        {{ said }}{{ end }} {{ loop.index }}
        {% endgeneration %}
        {{- said + '\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + end + '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def test_what_is_marked_for_training_is_written_as_transformers_writes_it(tmp_path):
    from transformers.utils.chat_template_utils import render_jinja_template

    (tmp_path / "chat_template.jinja").write_text(MARKED)
    template = ChatTemplate.load(tmp_path)
    talk = [*HI, {"role": "assistant", "content": "hello"}, *HI, {"role": "assistant", "content": "{% x %}"}]
    for messages in (HI, talk):
        for add in (False, True):
            [want], _ = render_jinja_template([messages], chat_template=MARKED, add_generation_prompt=add)
            assert template.render(messages, add_generation_prompt=add) == want
    assert "hello<|im_end|> 2" in template.render(talk)


@pytest.mark.fast
@pytest.mark.parametrize("text", ["{% generation %}x", "{% endgeneration %}", "{% generation %}{% if %}"])
def test_marks_that_are_not_closed_are_refused(text, tmp_path):
    (tmp_path / "chat_template.jinja").write_text(text)
    with pytest.raises(ModelFileDamaged, match="no usable chat template"):
        ChatTemplate.load(tmp_path)


@pytest.mark.fast
def test_values_that_a_models_makers_advise(tmp_path):
    assert advised_sampling(tmp_path) == {}
    path = tmp_path / "generation_config.json"
    path.write_text(
        '{"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": null, "do_sample": true, "eos_token_id": [1]}'
    )
    assert advised_sampling(tmp_path) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    path.write_text('{"top_k": -1, "temperature": 0}')
    assert advised_sampling(tmp_path) == {"temperature": 0.0, "top_k": 0}
    assert unused_advice(tmp_path) is None
    path.write_text('{"top_p": 0.0, "temperature": 0.6}')
    assert advised_sampling(tmp_path) == {"temperature": 0.6}
    assert unused_advice(tmp_path) == "generation_config.json advises top_p = 0, which keeps no token: it is not used"
    wrong = (
        '"temperature": -5',
        '"temperature": NaN',
        '"top_p": 2',
        '"top_p": -0.1',
        '"top_k": -2',
        '"repetition_penalty": 0',
    )
    for text in ("[]", "{", '{"temperature": "warm"}', *(f"{{{one}}}" for one in wrong)):
        path.write_text(text)
        with pytest.raises(ModelFileDamaged):
            advised_sampling(tmp_path)
