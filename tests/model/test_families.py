"""Every family without an MTP head: transformers' logits, alone and cut over ranks; rope types; what is refused."""

import json

import pytest
import torch

from baton.core.errors import ModelFileDamaged, ModelTensorMissing, ModelUnsupported
from baton.core.numerics import Numerics
from baton.kernels.pointwise.rope import rope_inverse_frequencies
from baton.model.config import ModelConfig
from baton.model.loader import load_model
from baton.model.rope_scaling import read_scaling
from baton.model.tensor_spec import tensor_spec
from baton.tests.model.checkpoints import ARCHITECTURES, write_checkpoint
from baton.tests.model.harness import Paged, prompt
from baton.tests.model.ranks import on_ranks

pytestmark = pytest.mark.fast
FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
ROPES = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, **LLAMA3},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, no truncation": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "truncate": False,
        "beta_fast": 16.0, "beta_slow": 2.0,
    },
    "yarn, mscale": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    "yarn, attention factor": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.3,
    },
}  # fmt: skip


def load(path, communicator=None, **options):
    options = {"dtype": torch.float64, "numerics": Numerics.DEFAULT, "with_mtp": False, **options}
    return load_model(path, device=torch.device("cpu"), communicator=communicator, **options)


def run(model, ids, group=None):
    """Logits of a prompt in chunks, and of its last two tokens as decode rows."""
    paged = Paged(model, capacity_len=len(ids) + 16, group=group)
    start = len(ids) - 2
    hidden = paged.prefill(ids[:-2], chunk_len=29)
    decoded = paged.trunk(ids[-2:], paged.decode_batch([0], [start], 2))
    return paged.logits(torch.cat([hidden, decoded]))


@pytest.mark.long
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_logits_are_transformers_at_any_number_of_ranks(kind, tie, tmp_path, reference, check_logits):
    options = {"kind": kind, "tie": tie, "num_heads": 8, "num_kv_heads": 2, "head_dim": 16, "with_mtp": False}
    path = write_checkpoint(tmp_path / "model", **options)
    ids = prompt(80)
    wanted = reference(path, torch.float64).logits(ids)
    assert wanted.std() > 0.3
    check_logits(kind, run(load(path), ids), wanted)
    for size in (2, 4):  # of 2 KV heads
        for logits in on_ranks(size, lambda group: run(load(path, group), ids, group)):
            check_logits(kind, logits, wanted)


@pytest.mark.parametrize(
    "overrides",
    [
        {"mlp_only_layers": [2], "decoder_sparse_step": 2, "num_experts_per_tok": 1},
        {"norm_topk_prob": True, "qkv_bias": False, "num_experts_per_tok": 8},
    ],
    ids=["dense layers", "renormalised, no biases"],
)
@pytest.mark.long
def test_options_of_qwen2_moe(overrides, tmp_path, reference, check_logits):
    options = {"kind": "qwen2_moe", "layers": 4, "num_heads": 8, "num_kv_heads": 2, "with_mtp": False}
    path = write_checkpoint(tmp_path / "model", **options, overrides=overrides)
    ids = prompt(60)
    wanted = reference(path, torch.float64).logits(ids)
    check_logits("qwen2_moe", run(load(path), ids), wanted)
    for logits in on_ranks(2, lambda group: run(load(path, group), ids, group)):
        check_logits("qwen2_moe", logits, wanted)


@pytest.mark.long
@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_every_rope_type_beyond_the_original_length(kind, name, tmp_path, reference, check_logits):
    overrides = {"rope_scaling": ROPES[name]}
    path = write_checkpoint(tmp_path / "model", kind=kind, with_mtp=False, overrides=overrides)
    model = load(path, dtype=torch.float32)
    plain = load(write_checkpoint(tmp_path / "plain", kind=kind, with_mtp=False), dtype=torch.float32)
    for length in (40, 130, 300):
        ids = prompt(length)
        logits = run(model, ids)
        check_logits(f"rope {name}", logits, reference(path, torch.float32).logits(ids))
        if name != "dynamic":  # which scales nothing within the model's own length
            assert (logits - run(plain, ids)).abs().max() > 0.01


def test_a_context_that_yarn_lengthens_is_served_to_its_end(tmp_path, reference, check_logits):
    overrides = {"rope_scaling": ROPES["yarn"], "max_position_embeddings": 64}
    path = write_checkpoint(tmp_path / "model", kind="qwen2", with_mtp=False, overrides=overrides)
    model = load(path, dtype=torch.float32)
    assert model.config.max_model_len == 256
    ids = prompt(256)
    check_logits("rope yarn", run(model, ids), reference(path, torch.float32).logits(ids))


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.long
def test_scaled_frequencies_are_transformers(name):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {**ROPES[name], "rope_theta": 5e5}
    config = LlamaConfig(head_dim=128, max_position_embeddings=512, rope_parameters=parameters)
    wanted = LlamaRotaryEmbedding(config)
    scaling = read_scaling({"rope_parameters": parameters, "max_position_embeddings": 512})
    inverse_F = rope_inverse_frequencies(128, 5e5, torch.float32, torch.device("cpu"))
    assert torch.allclose(scaling.scale(inverse_F, 5e5), wanted.inv_freq, rtol=1e-5, atol=0)
    assert scaling.attention_factor == pytest.approx(wanted.attention_scaling)


def test_a_tensor_of_the_family_that_is_missing_is_named(tmp_path):
    path = write_checkpoint(tmp_path / "model", kind="llama", with_mtp=False)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen2ForCausalLM"]}))
    with pytest.raises(ModelTensorMissing, match=r"k_proj\.bias"):
        load(path)


@pytest.mark.parametrize(
    ("kind", "overrides", "option"),
    [
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "rope_type"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": -4.0}}, "rope_type"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "surprise": 1}}, "rope_type"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window"),
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window"),
    ],
)
def test_what_changes_the_computation_is_refused_by_name(kind, overrides, option, tmp_path):
    path = write_checkpoint(tmp_path / "model", kind=kind, with_mtp=False, overrides=overrides)
    with pytest.raises(ModelUnsupported) as refused:
        ModelConfig.from_directory(path)
    assert refused.value.fields["option"] == option


@pytest.mark.parametrize("kind", ["llama", "mistral", "mixtral"])
def test_a_window_is_served_only_where_it_never_bites(kind, tmp_path):
    path = write_checkpoint(tmp_path / "model", kind=kind, with_mtp=False, overrides={"sliding_window": 128})
    config = ModelConfig.from_directory(path)
    config.require_full_attention(128)
    for length in (129, None):
        with pytest.raises(ModelUnsupported, match="--max-model-len 128"):
            config.require_full_attention(length)


@pytest.mark.parametrize(
    ("chunks", "most"),
    [
        ({"chunk_size": 256, "local_size": 8, "original_max_position_embeddings": 256}, 248),
        ({"chunk_size": 300, "local_size": 0}, 300),
        ({"chunk_size": 1100}, 76),
        (None, 512),
        ({}, 512),
    ],
)
def test_dual_chunk_attention_is_served_within_the_first_chunk(chunks, most, tmp_path):
    """There it is plain attention: every key is of the query's chunk."""
    overrides = {"dual_chunk_attention_config": chunks}
    config = ModelConfig.from_directory(write_checkpoint(tmp_path / "model", kind="qwen2", overrides=overrides))
    config.require_full_attention(most)
    if most == 512:
        return
    for length in (most + 1, None):
        with pytest.raises(ModelUnsupported, match=f"dual_chunk_attention_config .*--max-model-len {most}") as refused:
            config.require_full_attention(length)
        assert refused.value.fields["option"] == "dual_chunk_attention_config"


@pytest.mark.parametrize("chunks", [[1], "yes", {"chunk_size": "x"}, {"chunk_size": 0}, {"chunk_size": 8}])
def test_dual_chunks_of_the_wrong_kind_are_named_errors(chunks, tmp_path):
    path = write_checkpoint(tmp_path / "model", kind="qwen2", overrides={"dual_chunk_attention_config": chunks})
    with pytest.raises((ModelUnsupported, ModelFileDamaged)):
        ModelConfig.from_directory(path)


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "max_position_embeddings": 8192,
}
QWEN2_MOE = LLAMA | {"architectures": ["Qwen2MoeForCausalLM"], "num_experts_per_tok": 4}
PUBLISHED = {
    "llama-3.1-8b": (LLAMA, 4096, 32, 32, 8, 14336, 128_256, 8_030_261_248),
    "llama-2-7b": (LLAMA | {"rope_theta": None}, 4096, 32, 32, 32, 11008, 32_000, 6_738_415_616),
    "mistral-7b": (
        LLAMA | {"architectures": ["MistralForCausalLM"]}, 4096, 32, 32, 8, 14336, 32_000, 7_241_732_096,
    ),
    "mixtral-8x7b": (
        LLAMA | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2},
        4096, 32, 32, 8, 14336, 32_000, 46_702_792_704,
    ),
    "qwen1.5-moe-a2.7b": (
        QWEN2_MOE | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts": 60},
        2048, 24, 16, 16, 5632, 151_936, 14_315_784_192,
    ),
    "qwen2-57b-a14b": (
        QWEN2_MOE | {"moe_intermediate_size": 2560, "shared_expert_intermediate_size": 20480, "num_experts": 64},
        3584, 28, 28, 4, 18944, 151_936, 57_408_658_944,
    ),
    "qwen2.5-7b": (
        LLAMA | {"architectures": ["Qwen2ForCausalLM"]}, 3584, 28, 28, 4, 18944, 152_064, 7_615_616_512,
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_have_as_many_weights_as_published_and_in_transformers(name, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    values, hidden, layers, heads, kv_heads, inner, vocab, count = PUBLISHED[name]
    values = values | {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    values |= {"num_key_value_heads": kv_heads, "intermediate_size": inner, "vocab_size": vocab}
    kind = next(kind for kind, architecture in ARCHITECTURES.items() if values["architectures"] == [architecture])
    values = {key: value for key, value in values.items() if value is not None} | {"model_type": kind}
    (tmp_path / "config.json").write_text(json.dumps(values))
    spec = tensor_spec(ModelConfig.from_directory(tmp_path, made_weights="none"), with_mtp=False)
    assert sum(torch.Size(shape).numel() for shape in spec.required.values()) == count
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert sum(parameter.numel() for parameter in theirs.parameters()) == count
