"""Directories that cannot be served: each fault has its own error, which names the file or the tensors."""

import json
import math
import shutil
import tracemalloc

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.core.errors import (
    ModelFileDamaged,
    ModelMissing,
    ModelTensorMisshapen,
    ModelTensorMissing,
    ModelTensorUnexpected,
    ModelUnsupported,
)
from baton.core.numerics import Numerics
from baton.core.requests.tokenizer import _eos_token_ids
from baton.model.config import ModelConfig
from baton.model.loader import load_model
from baton.tests.model.checkpoints import write_checkpoint
from baton.tests.model.harness import Paged, prompt
from baton.tests.model.ranks import on_ranks

pytestmark = pytest.mark.fast
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


def load(path, *, with_mtp=True, dtype=torch.float32, on_progress=None, communicator=None):
    return load_model(
        path,
        dtype=dtype,
        device=torch.device("cpu"),
        numerics=Numerics.DEFAULT,
        with_mtp=with_mtp,
        on_progress=on_progress,
        communicator=communicator,
    )


@pytest.fixture
def copy(tiny_checkpoint, tmp_path):
    """A copy of a good directory that a test may spoil."""
    return shutil.copytree(tiny_checkpoint(), tmp_path / "model")


def rewrite_config(path, **changes):
    values = json.loads((path / "config.json").read_text())
    for key, value in changes.items():
        if value is ...:
            del values[key]
        else:
            values[key] = value
    (path / "config.json").write_text(json.dumps(values))


def rewrite_tensors(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def shard(path):
    """The same checkpoint in two shards; returns their names."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    parts = [dict(list(tensors.items())[::2]), dict(list(tensors.items())[1::2])]
    for name, part in zip(names, parts, strict=True):
        save_file(part, path / name)
    weight_map = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return names


def test_missing_directory_config_and_weights(copy, tmp_path):
    with pytest.raises(ModelMissing, match="no model directory") as caught:
        load(tmp_path / "nowhere")
    assert caught.value.fields["path"] == str(tmp_path / "nowhere")
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelMissing, match=r"neither model\.safetensors nor"):
        load(copy)
    (copy / "config.json").unlink()
    with pytest.raises(ModelMissing, match=r"no config\.json"):
        load(copy)


@pytest.mark.parametrize("text", ["{", "[]", '"qwen3"', "\xff"])
def test_damaged_config(copy, text):
    (copy / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelFileDamaged, match=r"config\.json"):
        load(copy)


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_size", ...), ("rope_theta", ...), ("num_hidden_layers", "two"), ("hidden_size", math.inf)],
)
def test_config_without_a_key_or_with_nonsense(copy, key, value):
    rewrite_config(copy, **{key: value})
    with pytest.raises(ModelFileDamaged, match=r"config\.json"):
        load(copy)


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, "rope_type"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0}}, "rope_type"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_what_is_not_implemented_is_refused(copy, changes, option):
    rewrite_config(copy, **changes)
    with pytest.raises(ModelUnsupported, match=option.removesuffix("s")) as caught:
        load(copy)
    assert caught.value.fields["option"] == option


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_position_embeddings", 1e15),
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", 0),
        ("num_attention_heads", 0),
        ("num_key_value_heads", -1),
        ("head_dim", 2**40),
        ("hidden_size", 2**31),
        ("vocab_size", 2**40),
        ("num_experts", 10**9),
        ("num_experts_per_tok", 9),
        ("decoder_sparse_step", 0),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", -1.0),
    ],
)
@pytest.mark.long
def test_absurd_sizes_are_refused_by_name(copy, key, value):
    rewrite_config(copy, **{key: value})
    with pytest.raises(ModelUnsupported, match=key) as caught:
        ModelConfig.from_directory(copy)
    assert caught.value.fields["option"] == key


def test_json_nested_too_deeply(copy):
    shard(copy)
    for name in ("generation_config.json", "model.safetensors.index.json", "config.json"):
        (copy / name).write_text("[" * 100_000)
        with pytest.raises(ModelFileDamaged, match=name.replace(".", r"\.")):
            if name.startswith("generation"):
                _eos_token_ids(copy)
            else:
                ModelConfig.from_directory(copy)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_weights(copy, keep):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelFileDamaged, match="truncated") as caught:
        load(copy)
    assert caught.value.fields["path"] == str(file)


def test_weights_that_are_none(copy):
    file = copy / "model.safetensors"
    good = file.read_bytes()
    for data in (good + b"\0", b"\x02\0\0\0\0\0\0\0[]", b"\x04\0\0\0\0\0\0\0junk", b"GGUF" + bytes(64)):
        file.write_bytes(data)
        with pytest.raises(ModelFileDamaged, match=r"model\.safetensors"):
            load(copy)


def test_missing_tensors_are_named(copy):
    rewrite_tensors(copy, lambda tensors: (tensors.pop(EXPERT), tensors.pop("model.norm.weight")))
    with pytest.raises(ModelTensorMissing, match=r"model\.norm\.weight") as caught:
        load(copy)
    assert caught.value.fields["tensors"] == [EXPERT, "model.norm.weight"]
    assert "--speculative-method none" not in str(caught.value)


def test_unexpected_tensors_are_named(copy):
    def add(tensors):
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)  # old checkpoints hold it

    rewrite_tensors(copy, add)
    with pytest.raises(ModelTensorUnexpected) as caught:
        load(copy)
    assert caught.value.fields["tensors"] == ["model.layers.0.self_attn.q_proj.bias"]


def test_misshapen_tensors(copy):
    rewrite_tensors(copy, lambda tensors: tensors.update({EXPERT: tensors[EXPERT].T.contiguous()}))
    with pytest.raises(ModelTensorMisshapen, match=r"\[32, 24\].*\[24, 32\]") as caught:
        load(copy)
    assert caught.value.fields["tensor"] == EXPERT


def test_integer_weights(copy):
    rewrite_tensors(copy, lambda tensors: tensors.update({EXPERT: tensors[EXPERT].to(torch.int8)}))
    with pytest.raises(ModelTensorMisshapen, match="I8"):
        load(copy)


def test_a_missing_mtp_head_says_how_to_go_on(copy):
    rewrite_tensors(copy, lambda tensors: tensors.pop("mtp.fc.weight"))
    with pytest.raises(ModelTensorMissing, match="--speculative-method none would serve"):
        load(copy)
    assert load(copy, with_mtp=False).config.num_mtp_layers == 1
    rewrite_config(copy, mtp_num_hidden_layers=...)
    with pytest.raises(ModelTensorMissing, match="--speculative-method ngram drafts without one, none not at all"):
        load(copy)
    rewrite_config(copy, num_nextn_predict_layers=2)
    with pytest.raises(ModelUnsupported, match="2 MTP layers"):
        load(copy)


def test_shards(copy, tiny_checkpoint):
    names = shard(copy)
    model = load(copy)
    assert model.config == ModelConfig.from_directory(tiny_checkpoint())  # and so is the hash
    (copy / names[1]).rename(copy / "elsewhere")
    with pytest.raises(ModelMissing, match=names[1]):
        load(copy)
    shutil.copy(copy / names[0], copy / names[1])
    with pytest.raises(ModelTensorMissing, match="their index names"):
        load(copy)
    (copy / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelFileDamaged, match="index"):
        load(copy)


def test_an_index_beside_a_whole_checkpoint_is_of_the_same_tensors(copy):
    """transformers would read the one, vLLM the other."""
    whole = load_file(copy / "model.safetensors")
    names, base = shard(copy), ModelConfig.from_directory(copy)
    save_file(whole, copy / "model.safetensors")
    assert ModelConfig.from_directory(copy) == base
    (copy / names[0]).unlink()  # shards that were put together
    assert load(copy).config == base
    save_file({"model.norm.weight": whole["model.norm.weight"]}, copy / "model.safetensors")
    with pytest.raises(ModelFileDamaged, match=r"model\.safetensors and, of other tensors, .*index\.json: .*; remove"):
        load(copy)
    (copy / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelTensorMissing):
        load(copy)


def test_a_shard_may_be_called_as_a_whole_checkpoint_is(copy):
    base, names = ModelConfig.from_directory(copy), shard(copy)
    (copy / names[0]).rename(copy / "model.safetensors")
    index = copy / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(names[0], "model.safetensors"))
    assert load(copy).config == base


def test_the_hash_tells_weights_and_config_apart(copy, tiny_checkpoint):
    base = ModelConfig.from_directory(copy)
    assert base.model_hash == ModelConfig.from_directory(tiny_checkpoint()).model_hash
    other = ModelConfig.from_directory(tiny_checkpoint(seed=1))
    assert other.model_hash != base.model_hash
    assert other.vocab_size == base.vocab_size
    rewrite_config(copy, rope_theta=20000.0)
    assert ModelConfig.from_directory(copy).model_hash != base.model_hash


def test_a_base_that_one_of_two_spellings_names(copy):
    """A directory that transformers 5 saved, with `rope_scaling` added for earlier versions."""
    scaling = {"rope_type": "linear", "factor": 2.0}
    rewrite_config(copy, rope_theta=...)
    for changes in (
        {"rope_parameters": scaling | {"rope_theta": 5e5}, "rope_scaling": scaling},
        {"rope_parameters": scaling, "rope_scaling": scaling | {"rope_theta": 5e5}},
    ):
        rewrite_config(copy, **changes)
        config = ModelConfig.from_directory(copy)
        assert (config.rope_theta, config.rope.kind, config.rope.factor) == (5e5, "linear", 2.0)
    both = {"rope_parameters": scaling | {"rope_theta": 5e5}, "rope_scaling": scaling | {"rope_theta": 1e4}}
    for changes in (both, {"rope_parameters": scaling | {"rope_theta": 5e5}, "rope_scaling": {"factor": 2.0}}):
        rewrite_config(copy, **changes)
        with pytest.raises(ModelUnsupported, match="rope_parameters and rope_scaling differ"):
            ModelConfig.from_directory(copy)


def test_both_spellings_of_rope_and_experts(copy):
    base = ModelConfig.from_directory(copy)
    rewrite_config(copy, rope_theta=..., rope_scaling=..., rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    rewrite_config(copy, num_experts=..., num_local_experts=8)
    config = ModelConfig.from_directory(copy)
    assert (base.rope_theta, config.rope_theta) == (1e4, 5e5)
    assert config.num_experts == base.num_experts == 8


def test_a_tied_checkpoint_may_store_its_lm_head(copy):
    rewrite_tensors(copy, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load(copy)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["qwen3", "deepseek_v3"])
def test_an_lm_head_that_is_not_the_embedding_is_the_head_whatever_the_config_says(
    kind, ranks, tmp_path, reference, check_logits
):
    """As transformers 5 has it, by one row as by all; its MTP head shares it."""
    untied = write_checkpoint(tmp_path / "untied", kind=kind, tie=False, layers=3)
    path = shutil.copytree(untied, tmp_path / "model")
    rewrite_config(path, tie_word_embeddings=True)
    ids = prompt(40)

    def run(path, group=None):
        model = load(path, communicator=group)
        paged = Paged(model, group=group)
        hidden = paged.prefill(ids)
        drafts = paged.mtp(ids[1:], hidden[:-1], paged.prefill_batch([(0, 0, len(ids) - 1)]))
        return paged.logits(hidden), paged.logits(drafts)

    wanted = reference(path, torch.float32).logits(ids)
    for found in [run(path)] if ranks == 1 else on_ranks(ranks, lambda group: run(path, group)):
        check_logits("own head", found[0], wanted)
        check_logits("own head's drafts", found[1], run(untied)[1])


def test_a_head_of_which_one_row_differs_is_one_of_its_own(copy, caplog):
    def store(row):
        def change(tensors):
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
            tensors["lm_head.weight"][row, -1] += 1

        rewrite_tensors(copy, change)

    for row in (0, 41, 95):
        store(row)
        caplog.clear()
        model = load(copy)
        assert not model.config.tie_word_embeddings
        assert "lm_head.weight that is stored is not the embedding" in caplog.text
        hidden = torch.ones(1, 32)
        tensors = load_file(copy / "model.safetensors")
        assert torch.allclose(model.logits(hidden), hidden @ tensors["lm_head.weight"].T)


def test_a_head_that_is_the_embedding_takes_no_memory_of_its_own(copy, caplog):
    rewrite_tensors(copy, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert load(copy).config.tie_word_embeddings
    assert not caplog.text
    model = load_model(
        copy, dtype=torch.float32, device=torch.device("cpu"), numerics=Numerics.DEFAULT, with_mtp=True, random_seed=1
    )
    assert model.config.tie_word_embeddings, "of random weights there is no stored head"


def test_progress_counts_every_tensor(tmp_path):
    path = write_checkpoint(tmp_path / "model", kind="qwen3", tie=False)
    seen = []
    load(path, on_progress=lambda done, total: seen.append((done, total)))
    total = len(load_file(path / "model.safetensors"))
    assert seen == [(done, total) for done in range(1, total + 1)]


def test_what_is_converted_takes_no_more_of_the_host_than_its_largest_tensor(tiny_checkpoint):
    path = tiny_checkpoint()
    sizes = [tensor.nbytes for tensor in load_file(path / "model.safetensors").values()]
    load(path, dtype=torch.float64)  # what is imported and cached meanwhile is not of the tensors
    tracemalloc.start()
    try:
        load(path, dtype=torch.float64)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert max(sizes) <= peak <= max(sizes) + 300_000 < sum(sizes)


@pytest.mark.fast
@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": 5}, {"architectures": {"a": 1}}, {"architectures": [["x"]]}, {"architectures": True},
        {"layer_types": 5}, {"layer_types": {"a": 1}}, {"layer_types": [["full_attention"]]}, {"layer_types": True},
    ],
)  # fmt: skip
def test_keys_of_the_wrong_kind_are_named_errors(copy, changes):
    rewrite_config(copy, **changes)
    with pytest.raises((ModelUnsupported, ModelFileDamaged)):
        load(copy)
