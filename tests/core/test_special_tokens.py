"""Tokens that a directory names beside tokenizer.json are read as transformers reads them."""

import json

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from baton.core.errors import ModelFileDamaged
from baton.core.requests.tokenizer import Tokenizer, _byte_characters

PIECES = ("<turn>", "<late>")  # of the model's vocabulary, and read as one only where a file says so
TEXT = "<s>a<new> <|call|>é<turn> x<late>"
DECODER = {
    "258": {"content": "<s>", "special": True},
    "259": {"content": "<new>", "special": True, "normalized": False, "lstrip": False, "rstrip": True},
    "260": {"content": "<|call|>", "special": False},
}
CASES: dict[str, tuple[dict, dict, dict]] = {
    "nothing": ({}, {}, {}),
    "by their ids": ({"added_tokens_decoder": DECODER}, {}, {}),
    "a list": ({"additional_special_tokens": ["<new>", "<turn>"]}, {}, {}),
    "a list of today": ({"extra_special_tokens": ["<turn>", "<s>"]}, {}, {}),
    "names": (
        {"eos_token": "<turn>", "pad_token": {"__type": "AddedToken", "content": "<late>"}, "mask_token": None},
        {},
        {},
    ),
    "all": ({"added_tokens_decoder": DECODER, "additional_special_tokens": ["<turn>"], "eos_token": "<late>"}, {}, {}),
    "the map": ({}, {"eos_token": {"content": "<turn>", "lstrip": True}, "additional_special_tokens": ["<late>"]}, {}),
    "the map goes first": ({"eos_token": "<turn>"}, {"eos_token": "<late>"}, {}),
    "a map of no use": ({"added_tokens_decoder": DECODER}, {"eos_token": "<turn>"}, {}),
}


def bare():
    """Two pieces, and one token that is added."""
    vocab = {one: at for at, one in enumerate([*_byte_characters(), *PIECES])}
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<s>"])
    return Tokenizer(fast, ())


def write(directory, config, special_map, model):
    (directory / "tokenizer.json").write_text(bare().to_json(), encoding="utf-8")
    for name, value in (("tokenizer_config", config), ("special_tokens_map", special_map), ("config", model)):
        (directory / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return directory


@pytest.mark.parametrize("name", CASES)
def test_a_text_is_the_tokens_that_transformers_reads(name, tmp_path):
    from transformers import PreTrainedTokenizerFast

    path = write(tmp_path, *CASES[name])
    theirs, ours = PreTrainedTokenizerFast.from_pretrained(path), Tokenizer.from_directory(path)
    wanted = theirs.encode(TEXT, add_special_tokens=False)
    assert ours.encode(TEXT) == wanted
    assert ours.decode(wanted) == theirs.decode(wanted, skip_special_tokens=True)
    assert (len(wanted) < len(bare().encode(TEXT))) == (name != "nothing")


@pytest.mark.fast
def test_a_token_without_a_place_in_the_model_or_with_another_id_stays_text(tmp_path):
    plain = bare().encode("<new>")
    for config, model, is_one in (
        ({"additional_special_tokens": ["<new>"]}, {"vocab_size": 260}, True),
        ({"additional_special_tokens": ["<new>"]}, {"vocab_size": 259}, False),
        ({"additional_special_tokens": ["<new>"]}, {"vocab_size": 9, "text_config": {"vocab_size": 260}}, True),
        ({"added_tokens_decoder": {"259": {"content": "<new>"}}}, {}, True),
        ({"added_tokens_decoder": {"300": {"content": "<new>"}}}, {}, False),
        ({"eos_token": "<new>", "mask_token": "<new>"}, {}, False),
        ({"added_tokens_decoder": {}, "additional_special_tokens": [None, 5, {}, ""]}, {}, False),
    ):
        ids = Tokenizer.from_directory(write(tmp_path, config, {}, model)).encode("<new>")
        assert ids == ([259] if is_one else plain), (config, model)


@pytest.mark.fast
@pytest.mark.parametrize("bad", [[1], {"x": {"content": "y"}}, {"257": 5}, {"257": {}}, {"257": None}])
def test_tokens_by_their_ids_that_are_none_are_named(bad, tmp_path):
    with pytest.raises(ModelFileDamaged, match="added_tokens_decoder"):
        Tokenizer.from_directory(write(tmp_path, {"added_tokens_decoder": bad}, {}, {}))


@pytest.mark.fast
def test_a_map_that_is_no_object_is_named(tmp_path):
    with pytest.raises(ModelFileDamaged, match="special_tokens_map"):
        Tokenizer.from_directory(write(tmp_path, {}, [], {}))
