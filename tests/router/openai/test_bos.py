"""BOS is there once: a template writes it, or the tokenizer puts it before a raw prompt."""

import json

import pytest

from baton.client.aio_client import AsyncBatonClient
from baton.core.errors import ModelFileDamaged
from baton.core.requests.tokenizer import Tokenizer
from baton.tests.router.openai.served import MODEL, sent_to, served
from baton.tests.router.openai.test_errors import post
from baton.tests.router.openai.tokenizers_of_families import llama, mistral, of_bytes, qwen, sentencepiece

pytestmark = pytest.mark.fast
# A tokenizer, its BOS, and whether its post-processor adds it.
FAMILIES = {
    "llama 3": (llama, "<|begin_of_text|>", True),
    "mistral": (mistral, "<s>", True),
    "llama 2": (sentencepiece, "<s>", True),
    "qwen": (qwen, "<|endoftext|>", False),
}
HI = [{"role": "user", "content": "hi"}]
WRITES_BOS = "{{ bos_token }}{% for message in messages %}[{{ message.content }}]{% endfor %}"


def written(bos):
    return f"{{% set bos_token = '{bos}' %}}" + WRITES_BOS


@pytest.mark.long
@pytest.mark.asyncio
@pytest.mark.parametrize("family", FAMILIES)
async def test_bos_is_there_once(family):
    make, bos, adds = FAMILIES[family]
    tokenizer = make()
    bos_id = tokenizer.special_tokens[bos]

    async def num_bos(call, **more):
        await call(model=MODEL, max_tokens=4, **more)
        token_ids = list(sent_to(running)[-1].prompt_token_ids)
        assert bos_id not in token_ids[1:]
        assert len(token_ids) > 1
        return token_ids.count(bos_id)

    async with served(written(bos), tokenizer=tokenizer) as (running, client):
        chat, complete = client.chat.completions.create, client.completions.create
        assert await num_bos(chat, messages=HI) == 1, "by the template"
        assert await num_bos(complete, prompt="hi there") == adds, "by the tokenizer"
        assert await num_bos(complete, prompt=f"{bos}hi") == 1, "by the client"
        assert await num_bos(complete, prompt=tokenizer.encode("hi")) == 0, "token ids are as they are"
        assert await num_bos(complete, prompt="x" * 900) == adds, "also on a thread of its own"
        assert await num_bos(complete, prompt="hi", extra_body={"add_special_tokens": False}) == 0
        assert await num_bos(chat, messages=HI, extra_body={"add_special_tokens": True}) == 1, "never twice"
        for body, num in (
            ({"prompt": "hi"}, adds),
            ({"prompt": bos}, 1),
            ({"prompt": "hi", "add_special_tokens": False}, 0),
            ({"messages": HI}, 1),
        ):
            _, _, found = await post(running.url, "/tokenize", body)
            assert found["tokens"].count(bos_id) == num, body
        _, _, counted = await post(running.url, "/v1/messages/count_tokens", {"model": MODEL, "messages": HI})
        assert counted["input_tokens"] == len(tokenizer.encode(f"{bos}[hi]"))
        async with AsyncBatonClient(running.address, timeout_s=5.0) as grpc:
            assert (await grpc.tokenize("hi")).count(bos_id) == adds
            await grpc.generate_text("hi")
            assert list(sent_to(running)[-1].prompt_token_ids).count(bos_id) == adds


@pytest.mark.asyncio
@pytest.mark.long
async def test_a_template_that_writes_no_bos_gets_none():
    async with served("{{ messages[0].content }}", tokenizer=llama()) as (running, client):
        await client.chat.completions.create(model=MODEL, messages=HI, max_tokens=4)
        assert list(sent_to(running)[-1].prompt_token_ids) == llama().encode("hi")


def test_what_is_put_before_and_behind_a_text():
    for text in ("", "a", "é <s>"):
        assert mistral().encode(text, add_special_tokens=True) == [256, *mistral().encode(text)]
    for text in ("<s>", "<s>a", "<s><s>a"):
        assert mistral().encode(text, add_special_tokens=True) == mistral().encode(text)
    assert qwen().encode("a", add_special_tokens=True) == qwen().encode("a")


def test_tokenizer_config_may_ask_for_bos(tmp_path):
    plain = of_bytes(["<bos>"])
    (tmp_path / "tokenizer.json").write_text(plain.to_json(), encoding="utf-8")
    bos_id = plain.special_tokens["<bos>"]
    for config, num in (
        (None, 0),
        ({"bos_token": "<bos>"}, 0),
        ({"add_bos_token": False, "bos_token": "<bos>"}, 0),
        ({"add_bos_token": True, "bos_token": "<bos>"}, 1),
        ({"add_bos_token": True, "bos_token": {"content": "<bos>"}}, 1),
        ({"add_bos_token": True, "bos_token": None}, 0),
        ({"add_bos_token": True, "bos_token": "<other>"}, 0),
    ):
        if config is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        tokenizer = Tokenizer.from_directory(tmp_path)
        assert tokenizer.encode("a", add_special_tokens=True) == [bos_id] * num + plain.encode("a"), config
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": true}', encoding="utf-8")
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<bos>"}', encoding="utf-8")
    assert Tokenizer.from_directory(tmp_path).encode("a", add_special_tokens=True) == [bos_id, *plain.encode("a")]
    (tmp_path / "special_tokens_map.json").unlink()
    (tmp_path / "tokenizer.json").write_text(of_bytes(["<bos>"], bos="<bos>").to_json(), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": true, "bos_token": "<bos>"}', encoding="utf-8")
    assert Tokenizer.from_directory(tmp_path).encode("<bos>", add_special_tokens=True) == [bos_id]
    (tmp_path / "tokenizer_config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ModelFileDamaged, match="tokenizer_config"):
        Tokenizer.from_directory(tmp_path)


def test_ends_of_turns_end_an_answer_by_the_tokenizers_table(tmp_path):
    (tmp_path / "tokenizer.json").write_text(llama().to_json(), encoding="utf-8")
    table = llama().special_tokens
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": table["<|end_of_text|>"]}), encoding="utf-8")
    named = Tokenizer.from_directory(tmp_path).eos_token_ids
    assert named[0] == table["<|end_of_text|>"]
    assert sorted(named[1:]) == sorted([table["<|eom_id|>"], table["<|eot_id|>"]])
    config = {"eos_token_id": [table["<|eot_id|>"], table["<|eom_id|>"]]}
    (tmp_path / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
    assert Tokenizer.from_directory(tmp_path).eos_token_ids == tuple(config["eos_token_id"])
    spelled = of_bytes(added=["<|eot_id|>"])
    (tmp_path / "tokenizer.json").write_text(spelled.to_json(), encoding="utf-8")
    assert spelled.special_tokens == {}
    assert len(Tokenizer.from_directory(tmp_path).eos_token_ids) == 2, "as named; one that is not special is text"
