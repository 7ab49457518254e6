"""Every key of transformers' configuration classes: implemented, refused by name, or without effect on the logits.

A key that transformers adds to one of these classes, and that no table here has, makes the first test red: read what
it does to the computation, then implement or refuse it. What each table says is tried: an implemented key changes
`ModelConfig`, a refused one raises, and with a harmless one transformers' own logits stay the same, bit for bit.
"""

import dataclasses
import json

import pytest
import torch

from baton.core.errors import ModelFileDamaged, ModelUnsupported
from baton.kernels.pointwise.rope import rope_inverse_frequencies
from baton.model.config import _OF_OTHERS, ModelConfig
from baton.tests.model.checkpoints import ARCHITECTURES, write_checkpoint
from baton.tests.model.harness import prompt
from baton.tests.model.test_families import LLAMA3

pytestmark = pytest.mark.fast
# By key, another value than that of `write_checkpoint`.
IMPLEMENTED = {
    "architectures": None,  # of another family
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 300,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "rope_theta": 5e5,
    "num_experts": 6,
    "num_local_experts": 6,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "norm_topk_prob": None,  # the other of two
    "decoder_sparse_step": 2,
    "mlp_only_layers": [1],
    "qkv_bias": False,
    "sliding_window": 300,
}
REFUSED = {
    "hidden_act": "gelu",
    "attention_bias": True,
    "mlp_bias": True,
    "use_sliding_window": True,
    "layer_types": ["full_attention", "sliding_attention"],
    "partial_rotary_factor": 0.5,
    "is_causal": False,
    "attention_chunk_size": 64,
}
# Of training, of what transformers returns, of the tokenizer's ids, and of what other keys switch on.
HARMLESS = {
    "transformers_version": "4.0.0",
    "output_hidden_states": True,
    "return_dict": False,
    "dtype": "bfloat16",
    "chunk_size_feed_forward": 1,
    "is_encoder_decoder": True,
    "id2label": {"0": "yes", "1": "no"},
    "label2id": {"yes": 0, "no": 1},
    "problem_type": "regression",
    "initializer_range": 0.5,
    "use_cache": False,
    "pad_token_id": 3,
    "bos_token_id": 5,
    "eos_token_id": [5, 6],
    "pretraining_tp": 2,
    "attention_dropout": 0.5,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
    "router_jitter_noise": 0.5,
    "max_window_layers": 0,
}
# Of Qwen, without `use_sliding_window`.
HARMLESS_IN = {(kind, "sliding_window"): 16 for kind in ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")}
# Read by the base class or by masks and rotary embeddings, of every family; no field of its class.
OF_ALL = ("rope_scaling", "rope_theta", "partial_rotary_factor", "is_causal", "attention_chunk_size")
ROPE_KEYS = {
    "rope_theta": {"rope_type": "default", "rope_theta": 77.0},
    "rope_type": {"rope_type": "linear", "factor": 2.0},
    "factor": {"rope_type": "linear", "factor": 3.0},
    "low_freq_factor": {"rope_type": "llama3", "factor": 2.0, **LLAMA3, "low_freq_factor": 2.0},
    "high_freq_factor": {"rope_type": "llama3", "factor": 2.0, **LLAMA3, "high_freq_factor": 8.0},
    "original_max_position_embeddings": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
    "attention_factor": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.5},
    "beta_fast": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16.0},
    "beta_slow": {"rope_type": "yarn", "factor": 2.0, "beta_slow": 8.0},
    "mscale": {"rope_type": "yarn", "factor": 2.0, "mscale": 2.0, "mscale_all_dim": 1.0},
    "mscale_all_dim": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 2.0},
    "truncate": {"rope_type": "yarn", "factor": 2.0, "truncate": False},
}
ROPE_REFUSED = {
    "partial_rotary_factor": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
    "short_factor": {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 8},
    "long_factor": {"rope_type": "longrope", "factor": 2.0, "long_factor": [1.0] * 8},
    "mrope_section": {"rope_type": "yarn", "factor": 2.0, "mrope_section": [4, 2, 2]},
}


def keys_of(kind):
    from transformers import AutoConfig

    return [field.name for field in dataclasses.fields(type(AutoConfig.for_model(kind)))]


def verdict(kind, key):
    if (kind, key) in HARMLESS_IN:
        return "harmless"
    tables = {"implemented": IMPLEMENTED, "refused": REFUSED, "harmless": HARMLESS}
    found = [name for name, table in tables.items() if key in table]
    assert len(found) == 1, f"{key} of {kind}: neither implemented nor refused nor known to be harmless"
    return found[0]


def cells(which):
    keys = {kind: [*keys_of(kind), *OF_ALL] for kind in ARCHITECTURES}
    return [(kind, key) for kind in ARCHITECTURES for key in keys[kind] if verdict(kind, key) == which]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A checkpoint of each family."""
    return {kind: write_checkpoint(tmp_path_factory.mktemp(kind), kind=kind, with_mtp=False) for kind in ARCHITECTURES}


def rewritten(path, to, absent=(), **changes):
    values = json.loads((path / "config.json").read_text()) | changes
    if not (to / "model.safetensors").exists():
        (to / "model.safetensors").symlink_to(path / "model.safetensors")
    (to / "config.json").write_text(json.dumps({key: value for key, value in values.items() if key not in absent}))
    return to


def config_of(path):
    """But for the hash, which is of every key."""
    return dataclasses.replace(ModelConfig.from_directory(path, made_weights="none"), model_hash="")


@pytest.mark.long
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_key_of_transformers_class_is_judged(kind):
    for key in keys_of(kind):
        verdict(kind, key)


@pytest.mark.long
def test_every_judgement_is_of_a_key():
    known = {key for kind in ARCHITECTURES for key in keys_of(kind)} | set(OF_ALL)
    assert set(IMPLEMENTED) | set(REFUSED) | set(HARMLESS) == known
    assert all(key in keys_of(kind) for kind, key in HARMLESS_IN)


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.long
def test_an_implemented_key_changes_the_configuration(kind, written, tmp_path):
    before = config_of(written[kind])
    for key in [key for of, key in cells("implemented") if of == kind]:
        value = IMPLEMENTED[key]
        if key == "norm_topk_prob":
            value = not before.renormalise_experts
        elif key == "architectures":
            value = [ARCHITECTURES["llama" if kind == "mistral" else "mistral"]]
        assert config_of(rewritten(written[kind], tmp_path, **{key: value})) != before, key


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.long
def test_a_refused_key_is_named(kind, written, tmp_path):
    for key in [key for of, key in cells("refused") if of == kind]:
        with pytest.raises(ModelUnsupported) as refused:
            config_of(rewritten(written[kind], tmp_path, **{key: REFUSED[key]}))
        assert refused.value.fields["option"] == key


@pytest.mark.long
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_harmless_key_changes_neither_the_configuration_nor_transformers_logits(kind, written, tmp_path):
    before, logits = config_of(written[kind]), logits_of(written[kind])
    for key in [key for of, key in cells("harmless") if of == kind]:
        changes = {key: HARMLESS_IN.get((kind, key), HARMLESS.get(key))}
        path = rewritten(written[kind], tmp_path, **changes)
        assert config_of(path) == before, key
        assert torch.equal(logits_of(path), logits), key


@torch.no_grad()
def logits_of(path):
    """transformers', of a prompt longer than any window here."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return model.lm_head(model.model(input_ids=prompt(40)[None], use_cache=False)[0])  # a tuple or outputs


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.long
def test_a_key_that_is_absent_is_transformers_default_or_missed(kind, written, tmp_path):
    from transformers import AutoConfig

    for key in [key for of, key in cells("implemented") if of == kind and key not in (*OF_ALL, "rope_parameters")]:
        values = json.loads((written[kind] / "config.json").read_text())
        theirs = AutoConfig.for_model(**{name: value for name, value in values.items() if name != key})
        try:
            found = config_of(rewritten(written[kind], tmp_path, absent=[key]))
        except (ModelFileDamaged, ModelUnsupported):
            assert key in keys_of(kind)
            continue
        wanted = getattr(theirs, key, None)
        assert found == config_of(rewritten(written[kind], tmp_path, **{key: wanted})), (key, wanted)


@pytest.mark.long
def test_every_key_of_transformers_rope_parameters_is_judged():
    from transformers.modeling_rope_utils import RopeParameters

    assert set(RopeParameters.__annotations__) == set(ROPE_KEYS) | set(ROPE_REFUSED)


@pytest.mark.parametrize("key", ROPE_KEYS)
@pytest.mark.long
def test_a_key_of_rope_parameters_does_what_it_does_in_transformers(key, written, tmp_path):
    rope = {"rope_theta": 10000.0, **ROPE_KEYS[key]}
    found = frequencies(rewritten(written["llama"], tmp_path, rope_parameters=rope))
    theirs = frequencies_of_transformers(tmp_path)
    assert found == pytest.approx(theirs, rel=1e-5)
    if key not in ("factor", "low_freq_factor", "high_freq_factor"):  # without which there is no scaling
        without = {name: value for name, value in rope.items() if name != key}
        if key in ("mscale", "mscale_all_dim"):
            without[key] = 4.0
        if key in ("rope_type", "rope_theta"):
            without = {"rope_type": "default", "rope_theta": 10000.0}
        assert frequencies(rewritten(written["llama"], tmp_path, rope_parameters=without)) != found


YARN = {"rope_type": "yarn", "factor": 2.0}


@pytest.mark.parametrize(
    "more",
    [
        {"mscale_all_dim": 0},
        {"mscale": 0.0, "mscale_all_dim": 0.0},
        {"mscale": 2.0, "mscale_all_dim": 0},
        {"mscale": 0, "mscale_all_dim": 2.0},
        {"finetuned": True},
    ],
)
@pytest.mark.long
def test_what_says_nothing_to_transformers_beside_yarn_says_nothing_here(more, written, tmp_path):
    found = frequencies(rewritten(written["llama"], tmp_path, rope_parameters={"rope_theta": 1e4, **YARN, **more}))
    assert found == pytest.approx(frequencies_of_transformers(tmp_path), rel=1e-5)
    assert found == frequencies(rewritten(written["llama"], tmp_path, rope_parameters={"rope_theta": 1e4, **YARN}))


@pytest.mark.parametrize("more", [{"mscale": -1.0}, {"finetuned": False}, {"attention_factor": 0.0}])
def test_what_yarn_cannot_be_is_refused(more, written, tmp_path):
    with pytest.raises(ModelUnsupported, match=next(iter(more))):
        config_of(rewritten(written["llama"], tmp_path, rope_parameters={"rope_theta": 1e4, **YARN, **more}))


@pytest.mark.parametrize("key", ROPE_REFUSED)
def test_a_refused_key_of_rope_parameters_is_named(key, written, tmp_path):
    with pytest.raises(ModelUnsupported, match=f"{key}|longrope"):
        config_of(rewritten(written["llama"], tmp_path, rope_parameters={"rope_theta": 1e4, **ROPE_REFUSED[key]}))
    if key == "partial_rotary_factor":
        with pytest.raises(ModelUnsupported, match=key):
            config_of(rewritten(written["llama"], tmp_path, rope_scaling=ROPE_REFUSED[key]))


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
@pytest.mark.long
def test_an_original_length_beside_the_rope_parameters_goes_before_theirs(kind, written, tmp_path):
    rope = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 64}
    rope |= LLAMA3 if kind == "llama3" else {}
    changes = {"rope_scaling": rope, "original_max_position_embeddings": 256}
    found = frequencies(rewritten(written["llama"], tmp_path, **changes))
    assert found == pytest.approx(frequencies_of_transformers(tmp_path), rel=1e-5)
    assert found != frequencies(rewritten(written["llama"], tmp_path, rope_scaling=rope))


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_a_base_among_the_rope_parameters_goes_before_the_one_beside_them(name, written, tmp_path):
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    found = frequencies(rewritten(written["llama"], tmp_path, **{name: rope}))
    assert found == pytest.approx(frequencies_of_transformers(tmp_path), rel=1e-5)
    assert config_of(tmp_path).rope_theta == 5e5


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "each kind of layer"),
        ({"rope_parameters": {"factor": 2.0}, "rope_scaling": {"factor": 3.0}}, "differ"),
        ({"rope_scaling": [1]}, "no mapping"),
    ],
)
def test_rope_parameters_that_are_not_one_mapping_are_refused(changes, why, written, tmp_path):
    with pytest.raises(ModelUnsupported, match=why) as refused:
        config_of(rewritten(written["llama"], tmp_path, **changes))
    assert refused.value.fields["option"] == "rope_type"


@pytest.mark.parametrize("key", _OF_OTHERS)
def test_a_key_of_other_families_is_refused_where_it_says_something(key, written, tmp_path):
    is_factor = key.startswith(("embedding", "logit", "residual", "scale"))
    for value in (None, 1.0, 2.5):
        path = rewritten(written["llama"], tmp_path, **{key: value})
        if value is None or (value == 1 and is_factor):
            config_of(path)
            continue
        with pytest.raises(ModelUnsupported) as refused:
            config_of(path)
        assert refused.value.fields["option"] == key


def frequencies(path):
    """What Baton turns queries and keys by, and the factor of cosines and sines."""
    config = config_of(path)
    inverse_F = rope_inverse_frequencies(config.head_dim, config.rope_theta, torch.float32, torch.device("cpu"))
    return [*config.rope.scale(inverse_F, config.rope_theta).tolist(), config.rope.attention_factor]


def frequencies_of_transformers(path):
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(AutoConfig.from_pretrained(path))
    return [*rotary.inv_freq.tolist(), rotary.attention_scaling]
