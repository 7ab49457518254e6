import json
import threading
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.core.errors import InvalidText, ModelFileDamaged, ModelMissing
from baton.core.requests.tokenizer import Tokenizer
from baton.tests.router.fakes import TOKENIZER

pytestmark = pytest.mark.fast


@given(st.lists(st.integers(0, 260), max_size=40))
@example([256, 104])
@example([195])
def test_a_stream_of_any_tokens_is_their_text(token_ids):
    stream = TOKENIZER.stream()
    text = "".join(stream.push(token_id) for token_id in token_ids)
    assert text + stream.flush() == TOKENIZER.decode(token_ids)
    assert stream.flush() == ""


@settings(max_examples=50)
@given(st.text(max_size=40))
def test_text_survives_and_no_piece_is_shown_too_early(text):
    stream = TOKENIZER.stream()
    shown = ""
    for token_id in TOKENIZER.encode(text):
        shown += stream.push(token_id)
        assert text.startswith(shown)
    assert shown + stream.flush() == text


def test_special_tokens_spelled_out_or_generated():
    assert TOKENIZER.decode([256]) == ""
    assert TOKENIZER.decode([*TOKENIZER.encode("ab"), 256]) == "ab"
    assert TOKENIZER.encode("<eos>x") == [256, *TOKENIZER.encode("x")], "also where a prompt spells them"


def test_a_long_text_lets_other_threads_go_on():
    encoding = threading.Thread(target=TOKENIZER.encode, args=("def f(x): " * 10_000,))
    num_turns = 0
    encoding.start()
    while encoding.is_alive():
        time.sleep(0.001)
        num_turns += 1
    assert num_turns > 5, "two or three if it held the GIL"


def test_lone_surrogates_are_no_text():
    with pytest.raises(InvalidText) as caught:
        TOKENIZER.encode("ab\udc80")
    assert caught.value.fields == {"at": 2}


def write(directory, **files):
    (directory / "tokenizer.json").write_text(TOKENIZER._fast.to_str(), encoding="utf-8")
    for name, value in files.items():
        (directory / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return directory


def test_eos_comes_from_generation_config_then_config(tmp_path):
    def eos(**files):
        return Tokenizer.from_directory(write(tmp_path, **files)).eos_token_ids

    assert eos() == ()
    assert eos(config={"eos_token_id": 7}) == (7,)
    assert eos(generation_config={}) == (7,)
    assert eos(generation_config={"eos_token_id": [1, 2]}) == (1, 2)
    assert eos(generation_config={"eos_token_id": 0}) == (0,)


def test_eos_of_a_multimodal_model_is_in_its_text_config(tmp_path):
    def eos(**files):
        return Tokenizer.from_directory(write(tmp_path, **files)).eos_token_ids

    assert eos(config={"text_config": {"eos_token_id": 9}}) == (9,)
    assert eos(config={"eos_token_id": 7, "text_config": {"eos_token_id": [9, 8]}}) == (9, 8), "as of its other keys"
    assert eos(config={"eos_token_id": 7, "text_config": {"eos_token_id": None}}) == (7,)
    assert eos(config={"eos_token_id": 7, "text_config": [3]}) == (7,)
    assert eos(generation_config={"eos_token_id": 1}) == (1,)


def test_the_tokenizers_own_eos_ends_an_answer_beside_those_that_are_listed(tmp_path):
    """A fine-tune may end its turns by another token than its base's config.json has."""

    def eos(**files):
        return Tokenizer.from_directory(write(tmp_path, **files)).eos_token_ids

    assert eos(tokenizer_config={"eos_token": "<eos>"}) == (256,)
    assert eos(config={"eos_token_id": 7}) == (7, 256)
    assert eos(generation_config={"eos_token_id": [256, 3]}) == (256, 3), "once"
    assert eos(tokenizer_config={"eos_token": {"content": "<eos>"}}, generation_config={"eos_token_id": 3}) == (3, 256)
    for none in ("no token", "", None, 5, {"content": None}):
        assert eos(tokenizer_config={"eos_token": none}) == (3,)
    assert eos(tokenizer_config={"eos_token": "<eos>"}, config={"vocab_size": 256}) == (3,), "the model has no such"
    with pytest.raises(ModelFileDamaged, match="tokenizer_config"):
        eos(tokenizer_config="[]")


def test_truncation_and_padding_that_a_tokenizer_stores_are_not_applied(tmp_path):
    """A fine-tune's tokenizer.json often keeps those of its training run."""
    write(tmp_path)
    plain = Tokenizer.from_directory(tmp_path)
    stored = json.loads(plain.to_json())
    for side in ("Left", "Right"):
        stored["truncation"] = {"direction": side, "max_length": 4, "strategy": "LongestFirst", "stride": 0}
        stored["padding"] = {
            "strategy": {"Fixed": 8}, "direction": side, "pad_to_multiple_of": None, "pad_id": 256, "pad_type_id": 0,
            "pad_token": "<eos>",
        }  # fmt: skip
        (tmp_path / "tokenizer.json").write_text(json.dumps(stored), encoding="utf-8")
        tokenizer = Tokenizer.from_directory(tmp_path)
        for text in ("hi", "a prompt of more than four tokens"):
            for adds in (False, True):
                assert tokenizer.encode(text, add_special_tokens=adds) == plain.encode(text)


@pytest.mark.parametrize("name", ["config", "generation_config"])
def test_ends_that_the_model_has_no_token_for_are_left_out(tmp_path, name):
    def eos(value, **config):
        write(tmp_path, **({"config": config} | {name: config | {"eos_token_id": value}}))
        return Tokenizer.from_directory(tmp_path).eos_token_ids, Tokenizer.byte_level(tmp_path, 300).eos_token_ids

    assert eos(-1, vocab_size=300) == ((), ()), "as files say it where there is none"
    assert eos([299, 300, 7, -5], vocab_size=300) == ((299, 7), (299, 7))
    assert eos([2**40, -1]) == ((2**40,), ()), "of a size that is not known"


@pytest.mark.parametrize("bad", ["", "[]", "3", '{"eos_token_id": ["x"]}', '{"eos_token_id": {}}'])
def test_damaged_files_are_named(tmp_path, bad):
    with pytest.raises(ModelFileDamaged, match=r"config\.json"):
        Tokenizer.from_directory(write(tmp_path, config=bad))
    with pytest.raises(ModelMissing):
        Tokenizer.from_directory(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ModelFileDamaged, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


def test_a_directory_without_a_tokenizer_may_have_one_of_bytes(tmp_path):
    write(tmp_path, config={"eos_token_id": 300})
    tokenizer = Tokenizer.byte_level(tmp_path, 1000)
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids) == (1000, (300,))
    for text in ("", "hello world\n", "naïve 🎉\x00\x7f\xad", " <300> <|x|>", "".join(map(chr, range(512)))):
        assert tokenizer.encode(text) == list(text.encode())
        assert tokenizer.decode(text.encode()) == text
    assert tokenizer.decode([72, 105, 999]) == "Hi<999>"
    stream = tokenizer.stream()
    assert "".join([*(stream.push(token) for token in [*"é".encode(), 256, 0xF0]), stream.flush()]) == "é<256>\ufffd"
    with pytest.raises(ModelMissing, match="too few"):
        Tokenizer.byte_level(tmp_path, 255)
