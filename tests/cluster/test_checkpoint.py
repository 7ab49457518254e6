"""Model directories of every kind, judged from headers: what each would run as, or the sentence that refuses it."""

import json
import shutil
import subprocess
import sys
from math import prod

import pytest

from baton.cluster import checkpoint, cli
from baton.cluster.resolve import find_model, resolve_worker
from baton.core.config import DEFAULT_LOOKED_UP, MAX_DRAFTS, ServeConfig
from baton.core.errors import ConfigInvalid, ModelFileDamaged, ModelUnsupported
from baton.model.checkpoint.weights import read_headers
from baton.model.config import ModelConfig
from baton.model.tensor_spec import tensor_spec
from baton.router.openai.advised_sampling import advised_sampling
from baton.router.openai.chat_template import ChatTemplate
from baton.router.served_model import ServedModel
from baton.tests.model.deepseek_checkpoints import deepseek_config
from baton.tests.model.hybrid_checkpoints import hybrid_config

pytestmark = pytest.mark.fast
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
MTP = {"mtp_num_hidden_layers": 1}
NULL = object()  # of a key that config.json has


BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
CHANNELS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        }
    },
}


def write_tensors(path, shapes, dtypes=None):
    header, at = {}, 0
    for name, shape in shapes.items():
        dtype, item_bytes = (dtypes or {}).get(name, ("F32", 4))
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + item_bytes * prod(shape)]}
        at += item_bytes * prod(shape)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(at))


def write_model(path, *, without=(), weights="model.safetensors", **changes):
    """A Qwen3 whose config has these changes, with every tensor that its own spec asks for."""
    path.mkdir()
    values = {key: value for key, value in (QWEN3 | changes).items() if value is not None}
    values |= {key: None for key, value in changes.items() if value is NULL}
    (path / "config.json").write_text(json.dumps(values))
    (path / "tokenizer.json").write_text((find_model("tiny").path / "tokenizer.json").read_text())
    try:
        config = ModelConfig.from_directory(path, made_weights="x")
    except ModelUnsupported:  # its weights are never looked at
        (path / weights).write_bytes(b"")
    else:
        spec = tensor_spec(config, with_mtp=config.num_mtp_layers > 0)
        write_tensors(path / weights, {name: shape for name, shape in spec.required.items() if name not in without})
    for name in without:
        (path / name).unlink(missing_ok=True)
    return path


def other(architecture, **more):
    return {"architectures": [architecture], **more}


REFUSED = [
    ("gemma2", other("Gemma2ForCausalLM"), {}, "Gemma2ForCausalLM.*this version serves LlamaForCausalLM"),
    ("llama with biases", other("LlamaForCausalLM", attention_bias=True), {}, "attention_bias = True"),
    ("mistral", other("MistralForCausalLM", sliding_window=64), {}, "sliding_window = 64.*--max-model-len 64 would"),
    (
        "qwen2.5-1m",
        other("Qwen2ForCausalLM", dual_chunk_attention_config={"chunk_size": 100, "local_size": 20}),
        {},
        "dual_chunk_attention_config is not implemented for 128 positions; --max-model-len 80 would serve",
    ),
    ("deepseek_v2", other("DeepseekV2ForCausalLM"), {}, "DeepseekV2ForCausalLM"),
    (
        "qwen3_vl_moe",
        other("Qwen3VLMoeForConditionalGeneration", text_config={"max_position_embeddings": 128}),
        {},
        "Qwen3VLMoeForConditionalGeneration",
    ),
    (
        "gemma3",
        other("Gemma3ForConditionalGeneration", text_config={"hidden_size": 32}, max_position_embeddings=None),
        {},
        "of architecture .*Gemma3ForConditionalGeneration.*this version serves LlamaForCausalLM",
    ),
    (
        "gemma3 without text",
        other("Gemma3ForConditionalGeneration", max_position_embeddings=None) | {"text_config": NULL},
        {},
        "of architecture .*Gemma3ForConditionalGeneration.*this version serves LlamaForCausalLM",
    ),
    ("no architecture", {"architectures": None}, {}, "architecture unknown"),
    ("fp8", {"quantization_config": {"quant_method": "fp8"}}, {}, "says float8 .*no weight is float8"),
    ("gptq", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, {}, "quantized by 'gptq'"),
    ("awq", {"quantization_config": {"quant_method": "awq"}}, {}, "quantized by 'awq'"),
    ("longrope", {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, {}, "rope_type 'longrope'"),
    ("no tokenizer", {"without": ["tokenizer.json"]}, {}, "tokenizer.json does not exist"),
    ("tp", {}, {"tensor_parallel_size": 8}, "num_attention_heads = 4 is no multiple"),
    ("tp of one role", {"num_attention_heads": 6}, {"tp_decode": 4}, "num_attention_heads = 6 is no multiple"),
    ("experts of a dense model", {}, {"enable_expert_parallel": True}, "--enable-expert-parallel: the model is dense"),
    (
        "attention over heads",
        {},
        {"enable_dp_attention": True, "tp_decode": 2},
        "--enable-dp-attention: attention of .* is over heads, which ranks share, not over latents",
    ),
    (
        "experts over ranks",
        other("Qwen3MoeForCausalLM", **MOE | {"num_experts": 6}),
        {"enable_expert_parallel": True, "tp_decode": 4},
        "--enable-expert-parallel: 6 experts cannot be dealt evenly over 4 ranks",
    ),
    (
        "copies over ranks",
        other("Qwen3MoeForCausalLM", **MOE),
        {"enable_expert_parallel": True, "enable_eplb": True, "num_redundant_experts": 1, "tp_decode": 2},
        "--num-redundant-experts: 4 experts and 1 redundant ones cannot be dealt evenly over 2 ranks",
    ),
    (
        "parts of experts",
        other("Qwen3MoeForCausalLM", **MOE | {"moe_intermediate_size": 18}),
        {"tp_prefill": 4},
        "moe_intermediate_size = 18 is no multiple of it; --enable-expert-parallel keeps every expert whole",
    ),
    ("mtp asked for", {}, {"num_speculative_tokens": 2}, "has no MTP head to draft with"),
    ("mtp required", {}, {"speculative_method": "mtp"}, "has no MTP head to draft with"),
    ("two mtp layers", {"mtp_num_hidden_layers": 2}, {"num_speculative_tokens": 1}, "has 2 MTP layers"),
    ("a head without tensors", MTP | {"without": ["mtp.fc.weight"]}, {}, "lacks mtp.fc.weight; .*MTP head"),
    ("a tensor is missing", {"without": ["model.norm.weight"]}, {}, "lacks model.norm.weight"),
    ("too long", {}, {"max_model_len": 4096}, "4096 exceeds the model's own 128"),
]


def judged(path, **asked):
    return checkpoint.judge(ServeConfig.from_mapping({"model": str(path), "device": "cpu", **asked}))


@pytest.mark.long
@pytest.mark.parametrize(("name", "changes", "asked", "sentence"), REFUSED, ids=[row[0] for row in REFUSED])
def test_what_cannot_be_served_says_so_in_one_sentence(tmp_path, name, changes, asked, sentence):
    found = judged(write_model(tmp_path / name.replace(" ", "-"), **changes), **asked)
    assert found.errors
    with pytest.raises(type(found.errors[0]), match=sentence):
        raise found.errors[0]
    with pytest.raises(type(found.errors[0])):
        checkpoint.require_servable(
            ServeConfig.from_mapping({"model": str(tmp_path / name.replace(" ", "-")), "device": "cpu", **asked})
        )


def kinds(tmp_path):
    lora, gguf, pickles, base = (tmp_path / name for name in ("lora", "gguf", "pickles", "config-only"))
    for path in (lora, gguf, pickles, base):
        path.mkdir()
    (lora / "adapter_config.json").write_text("{}")
    (lora / "adapter_model.safetensors").write_bytes(b"")
    (gguf / "q4.gguf").write_bytes(b"GGUF")
    (pickles / "config.json").write_text(json.dumps(QWEN3))
    (pickles / "pytorch_model-00001-of-2.bin").write_bytes(b"")
    (base / "config.json").write_text(json.dumps(QWEN3))
    (base / "tokenizer.json").write_text("{}")
    return {
        str(lora): "is a LoRA adapter, not a model",
        str(gguf): "holds GGUF files",
        str(gguf / "q4.gguf"): "is a GGUF file",
        str(pickles): "PyTorch pickles",
        str(base): r"holds no \.safetensors file",
        "Qwen/Qwen3-8B": "hf download Qwen/Qwen3-8B --local-dir Qwen3-8B",
        str(tmp_path / "nowhere"): "is not a directory",
        str(base / "config.json"): "is a file; --model takes the directory",
    }


def test_what_is_no_checkpoint_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for model, sentence in kinds(tmp_path).items():
        errors = judged(model).errors
        with pytest.raises(type(errors[0]), match=sentence):
            raise errors[0]


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        (other("LlamaForCausalLM"), {}),
        (other("Qwen2ForCausalLM"), {}),
        ({"text_config": NULL}, {}),
        (other("MistralForCausalLM", sliding_window=None), {}),
        (other("MistralForCausalLM", sliding_window=64), {"max_model_len": 64}),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}, {}),
    ],
)
def test_plain_families_can_be_served(tmp_path, changes, asked):
    assert not judged(write_model(tmp_path / "m", **changes), **asked).errors


@pytest.mark.parametrize(
    ("changes", "asked", "drafts", "note"),
    [
        ({}, {}, 0, "has no MTP head: it is served without drafts"),
        (MTP, {}, 2, ""),
        (MTP, {"num_speculative_tokens": 1}, 1, ""),
        (MTP, {"num_speculative_tokens": "auto"}, 6, ""),
        ({}, {"num_speculative_tokens": "auto"}, 0, "has no MTP head"),
        (MTP, {"speculative_method": "none"}, 0, "1 MTP layers are not used"),
        ({"mtp_num_hidden_layers": 2}, {}, 0, "2 MTP layers are not used"),
        ({"architectures": ["Qwen3MoeForCausalLM"], **MOE}, {}, 0, "has no MTP head"),
        ({}, {"load_format": "dummy", "num_speculative_tokens": 2}, 2, ""),
        ({}, {"speculative_method": "ngram"}, 4, ""),
        (MTP, {"speculative_method": "ngram", "num_speculative_tokens": 1}, 1, ""),
        (MTP, {"speculative_method": "auto"}, 6, ""),
        ({}, {"speculative_method": "auto"}, 6, ""),
        (MTP, {"speculative_method": "auto", "num_speculative_tokens": 3}, 3, ""),
    ],
)
@pytest.mark.long
def test_drafts_are_what_the_checkpoint_has(tmp_path, changes, asked, drafts, note):
    found = judged(write_model(tmp_path / "m", **changes), **asked)
    assert not found.errors
    assert found.facts["num_speculative_tokens"] == drafts
    assert any(note in text for text in found.notes) if note else not any("MTP" in text for text in found.notes)
    assert any("no chat template" in text for text in found.notes)


@pytest.mark.parametrize("name", ["tiny", "tiny-hybrid", "tiny-mla"])
def test_a_head_that_is_not_stored_drafts_for_nobody_and_is_missed_if_it_was_asked_for(name, tmp_path):
    """As transformers saves such models: without the head's tensors, with config.json as it was."""
    path = tmp_path / "m"
    shutil.copytree(find_model(name).path, path)
    tensors = read_headers(path)
    names = ModelConfig.from_directory(path).mtp_names
    trunk = {one: tensor.shape for one, tensor in tensors.items() if not one.startswith(names.prefixes)}
    write_tensors(path / "model.safetensors", trunk)
    plain, auto, ngram = {}, {"speculative_method": "auto"}, {"speculative_method": "ngram"}
    for asked, num_drafts, drafter in (
        (plain, 0, None),
        ({"num_speculative_tokens": "auto"}, 0, None),
        (auto, MAX_DRAFTS, "n-grams of the text so far, or none, as measured"),
        (ngram, DEFAULT_LOOKED_UP, "n-grams of the text so far"),
    ):
        found = judged(path, **asked)
        assert not found.errors
        assert (found.facts["num_speculative_tokens"], found.facts["drafter"]) == (num_drafts, drafter)
        assert sum("no tensor of its MTP head is stored" in note for note in found.notes) == (num_drafts == 0)
        config = ServeConfig.from_mapping({"model": str(path), "device": "cpu", **asked})
        workers = [resolve_worker(config, find_model(str(path)), worker_id="w", role=r) for r in ("prefill", "decode")]
        assert {worker.num_draft_tokens for worker in workers} == {num_drafts}
        assert not any(worker.has_head and worker.num_draft_tokens for worker in workers)
    for asked in ({"speculative_method": "mtp"}, {"num_speculative_tokens": 2}):
        (error,) = judged(path, **asked).errors
        assert names.join in error.fields["tensors"]
        assert "its MTP head cannot be used" in error.message
    write_tensors(path / "model.safetensors", trunk | {f"{names.norm}.weight": tensors[f"{names.norm}.weight"].shape})
    (error,) = judged(path).errors  # a head in part
    assert names.join in error.fields["tensors"]
    assert not judged(path, load_format="dummy").errors
    assert judged(path, load_format="dummy").facts["num_speculative_tokens"] == 2


def test_what_it_would_run_as(tmp_path):
    facts = judged(write_model(tmp_path / "m"), served_model_name=["a", "b"], dtype="bfloat16").facts
    assert (facts["architecture"], facts["names"], facts["max_model_len"]) == ("Qwen3ForCausalLM", ["a", "b"], 128)
    assert facts["kv_bytes_per_token"] == 2 * 2 * 2 * 8 * 2
    layer = 32 * (4 * 8) * 2 + 32 * (2 * 8) * 2 + 3 * 32 * 48 + 2 * 32 + 2 * 8
    assert facts["num_parameters"] == 300 * 32 + 32 + 2 * layer


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({"rope_scaling": YARN}, 512),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}}, 512),
        ({"rope_parameters": {**YARN, "rope_theta": 1e6}}, 512),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 16}}, 128),
        ({"rope_scaling": YARN | {"factor": 1.51}}, 193),
        ({"rope_scaling": YARN, "original_max_position_embeddings": 64}, 256),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 128),  # of which length, nothing says
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 128),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 128}}, 128),
    ],
)
def test_the_length_is_what_yarn_stretches_positions_to(changes, length, tmp_path):
    """As Qwen2.5's model cards say to switch it on: max_position_embeddings stays the original length."""
    path = write_model(tmp_path / "m", **changes)
    assert find_model(str(path)).max_model_len == ModelConfig.from_directory(path).max_model_len == length
    found = judged(path)
    assert not found.errors
    assert found.facts["max_model_len"] == length
    assert not judged(path, max_model_len=length).errors
    config = ServeConfig.from_mapping({"model": str(path), "device": "cpu", "max_model_len": length + 1})
    assert f"exceeds the model's own {length}" in checkpoint.judge(config).errors[0].message
    with pytest.raises(ConfigInvalid, match=f"exceeds the model's own {length}"):
        resolve_worker(config, find_model(str(path)), worker_id="w")
    worker = resolve_worker(ServeConfig(model=str(path), device="cpu"), find_model(str(path)), worker_id="w")
    assert worker.max_model_len == length


@pytest.mark.parametrize("rope", [[1], {"rope_type": "yarn", "factor": "x"}, YARN | {"factor": 1e300}, YARN | {"x": 1}])
def test_a_stretch_that_is_none_is_refused_where_the_model_is_judged(rope, tmp_path):
    path = write_model(tmp_path / "m")
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | {"rope_scaling": rope}))
    find_model(str(path))
    [error] = judged(path).errors
    assert isinstance(error, ModelUnsupported | ModelFileDamaged)


def test_a_stored_head_that_is_not_the_embedding_is_noted_and_weighed(tmp_path):
    path = write_model(tmp_path / "m", tie_word_embeddings=False)
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | {"tie_word_embeddings": True}))
    weights = path / "model.safetensors"
    same = judged(path)
    assert not same.errors
    assert not any("tie_word_embeddings" in note for note in same.notes)
    data = bytearray(weights.read_bytes())
    at = 8 + int.from_bytes(data[:8], "little")
    begin = json.loads(data[8:at])["lm_head.weight"]["data_offsets"][0]
    data[at + begin + 20_000] = 1
    weights.write_bytes(data)
    other = judged(path)
    assert not other.errors
    [note] = [note for note in other.notes if "tie_word_embeddings" in note]
    assert "the lm_head.weight that is stored is not the embedding" in note
    assert other.facts["num_parameters"] == same.facts["num_parameters"] + 300 * 32
    dummy = judged(path, load_format="dummy")
    assert dummy.facts["num_parameters"] == same.facts["num_parameters"]


def test_a_model_whose_answers_nothing_ends_is_noted(tmp_path):
    path = write_model(tmp_path / "m")
    assert any("no file names an EOS token of the model" in note for note in judged(path).notes)
    (path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    assert not any("EOS" in note for note in judged(path).notes)
    (path / "tokenizer_config.json").unlink()
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | {"text_config": {"eos_token_id": 0}}))
    assert not any("EOS" in note for note in judged(path).notes)
    (path / "tokenizer.json").unlink()
    assert not any("EOS" in note for note in judged(path, load_format="dummy").notes), "bytes are read"


def write_float8(path, scheme, **changes):
    """A model whose projections are float8, each with a scale as the scheme has it."""
    write_model(path, **changes)
    values = json.loads((path / "config.json").read_text()) | {"quantization_config": scheme}
    (path / "config.json").write_text(json.dumps(values))
    shapes, dtypes = dict(tensor_spec(ModelConfig.from_directory(path, made_weights="x"), with_mtp=False).required), {}
    for name in [name for name in shapes if name.endswith("_proj.weight")]:
        rows, columns = shapes[name]
        dtypes[name] = ("F8_E4M3", 1)
        if scheme is BLOCKS:
            shapes[f"{name}_scale_inv"] = (-(-rows // 128), -(-columns // 128))
        else:
            shapes[f"{name}_scale"] = (rows, 1)
    write_tensors(path / "model.safetensors", shapes, dtypes)
    return path


WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 128}


def test_float8_checkpoints_are_weighed_as_they_are_served(tmp_path):
    blocks = judged(write_float8(tmp_path / "blocks", BLOCKS, **WIDE), dtype="bfloat16")
    assert not blocks.errors
    assert blocks.facts["weights"] == "float8 with a scale for each block of 128 x 128 (fp8)"
    channels = judged(write_float8(tmp_path / "channels", CHANNELS, **WIDE), dtype="bfloat16")
    assert not channels.errors
    assert any(
        "14 of 14 float8 weights are computed as bfloat16: 14 because kernels have no scale per channel" in note
        for note in channels.notes
    )
    gemms = 2 * (256 * 512 * 2 + 256 * 256 * 2 + 3 * 256 * 256)
    gib = channels.facts["weight_gib"] - blocks.facts["weight_gib"]
    assert gib == pytest.approx(gemms / 2**30, abs=2e-3)


def test_float8_checkpoints_that_cannot_be_served_so_are_refused(tmp_path):
    path = write_float8(tmp_path / "m", BLOCKS, **WIDE | {"intermediate_size": 384})
    (error,) = judged(path, tensor_parallel_size=2).errors
    assert "gate_proj.weight are no whole blocks of 128" in error.message
    (error,) = judged(path, batch_invariant=True).errors
    assert "--batch-invariant" in error.message
    assert not judged(path).errors


def test_whole_experts_are_served_where_parts_of_them_are_not(tmp_path):
    moe = other("Qwen3MoeForCausalLM", **MOE | {"moe_intermediate_size": 384})
    path = write_float8(tmp_path / "m", BLOCKS, **WIDE | moe)
    for role in ("tp_prefill", "tp_decode"):
        (error,) = judged(path, **{role: 2}).errors
        assert "down_proj.weight are no whole blocks" in error.message or "gate_proj.weight are no" in error.message
        assert error.message.endswith("; --enable-expert-parallel keeps every expert whole at one rank")
    found = judged(path, tensor_parallel_size=2, enable_expert_parallel=True, dtype="bfloat16")
    assert not found.errors
    assert not any("float8" in note for note in found.notes)
    alone = judged(path, enable_expert_parallel=True, dtype="bfloat16")  # one rank has all experts
    assert not alone.errors
    assert alone.facts["num_parameters"] == found.facts["num_parameters"]


def test_weights_that_cannot_be_made_float8_are_refused_as_the_loader_would(tmp_path):
    path = write_model(tmp_path / "m")
    (error,) = judged(path, quantization="fp8", dtype="float32").errors
    assert "--dtype bfloat16, not float32" in error.message
    (error,) = judged(path, quantization="fp8", dtype="bfloat16", batch_invariant=True).errors
    assert "--kernels triton on one rank" in error.message
    assert not judged(path, quantization="fp8", dtype="bfloat16").errors


def test_advice_that_no_request_may_follow_is_noted(tmp_path):
    path = write_model(tmp_path / "m")
    assert not any("generation_config" in note for note in judged(path).notes)
    (path / "generation_config.json").write_text('{"top_p": 0.0}')
    found = judged(path)
    assert not found.errors
    assert [note for note in found.notes if "generation_config.json advises top_p = 0" in note]


def test_an_adapter_beside_whole_weights_is_noted(tmp_path):
    path = write_model(tmp_path / "m")
    assert not any("adapter" in note for note in judged(path).notes)
    (path / "adapter_config.json").write_text("{}")
    write_tensors(path / "adapter_model.safetensors", {"base_model.model.lm_head.lora_A.weight": (2, 32)})
    found = judged(path)
    assert not found.errors
    assert [note for note in found.notes if "adapter" in note and "is not applied" in note]


def test_a_name_from_the_hub_cache_is_the_repositorys(tmp_path):
    cache = tmp_path / "models--Qwen--Qwen3-8B" / "snapshots"
    cache.mkdir(parents=True)
    assert judged(write_model(cache / "b968826d9c46")).facts["names"] == ["Qwen/Qwen3-8B"]


def run(arguments, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["baton", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code, *capsys.readouterr()


@pytest.mark.long
def test_what_a_router_cannot_read_is_found_before_it_is_started(tmp_path):
    number = 0
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        for text in (
            *(b"", b"[]", b"{", b"[" * 100_000, b"{{" + b"(" * 100_000, b"\xff"),
            *(b'{"temperature": -5}', b'{"chat_template": "{{"}'),
        ):
            for beside in ({}, {"chat_template.jinja": b"ok"}):
                path = write_model(tmp_path / str(number := number + 1))
                for file, data in (beside | {name: text}).items():
                    (path / file).write_bytes(data)
                try:
                    ServedModel.from_directory("m", path)
                    ChatTemplate.load(path, None)
                    advised_sampling(path)
                except ModelFileDamaged as error:
                    found = [one.fields["path"] for one in judged(path).errors]
                    assert error.fields["path"] in found, (name, text, beside)
                else:
                    assert not judged(path).errors, (name, text, beside)


def test_check_prints_all_reasons_and_exits_3(tmp_path, capsys, monkeypatch):
    path = write_model(tmp_path / "m")
    code, out, _ = run(["check", str(path)], capsys, monkeypatch)
    assert code == 0
    assert "can be served" in out
    arguments = ["check", str(path), "--tensor-parallel-size", "8", "--num-speculative-tokens", "2", "--json"]
    code, out, err = run(arguments, capsys, monkeypatch)
    data = json.loads(out)
    assert (code, data["ok"], data["exit_code"]) == (3, False, 3)
    assert [error["error"] for error in data["errors"]] == ["ModelTensorMissing", "ModelUnsupported"]
    assert err.count("next: ") == 2


def test_check_judges_the_model_of_its_file_unless_one_is_given(tmp_path, capsys, monkeypatch):
    path, file = write_model(tmp_path / "m"), tmp_path / "serve.yaml"
    file.write_text(f"model: {path}\n")
    for given, judged_model in (([], str(path)), (["tiny"], "tiny")):
        code, out, _ = run(["check", *given, "--config", str(file), "--json"], capsys, monkeypatch)
        assert (code, json.loads(out)["model"]) == (0, judged_model)
    assert json.loads(run(["check", "--json"], capsys, monkeypatch)[1])["model"] == "tiny"


@pytest.mark.long
def test_check_says_that_ranks_hold_whole_experts(capsys, monkeypatch):
    arguments = ["check", "tiny-mla", "--tensor-parallel-size", "2"]
    for more, expected in (
        ([], "over 2 ranks,"),
        (["--enable-expert-parallel"], "over 2 ranks, each with whole experts,"),
        (["--enable-expert-parallel", "--enable-eplb"], "each with whole experts that move by load, KV"),
        (
            ["--enable-expert-parallel", "--enable-eplb", "--num-redundant-experts", "4"],
            "whole experts that move by load, 4 copies among them, KV",
        ),
        (["--enable-dp-attention"], "over 2 ranks, those of decode workers with the KV of their own sequences, KV"),
        (
            ["--enable-expert-parallel", "--enable-dp-attention"],
            "each with whole experts, those of decode workers with the KV of their own sequences, KV",
        ),
    ):
        code, out, _ = run([*arguments, *more], capsys, monkeypatch)
        assert (code, expected in " ".join(out.split())) == (0, True)


@pytest.mark.parametrize(
    ("asked", "problems"),
    [
        ({"tp_prefill": 2, "tp_decode": 8}, []),
        ({"tp_prefill": 8, "tp_decode": 8}, ["num_attention_heads = 4 is no multiple of it"]),
        ({"tp_prefill": 8, "tp_decode": 8, "prefill": 0}, []),
    ],
)
def test_only_decode_workers_have_owners_and_so_whole_attention_at_every_rank(asked, problems, tmp_path):
    values = deepseek_config("deepseek_v3", 4) | {"head_dim": None, "intermediate_size": 64, "num_attention_heads": 4}
    path = write_model(tmp_path / "m", **other("DeepseekV3ForCausalLM", model_type="deepseek_v3") | values)
    found = judged(path, enable_dp_attention=True, load_format="dummy", **asked)
    assert len(found.errors) == len(problems)
    assert all(said in error.message for said, error in zip(problems, found.errors, strict=True))


def test_serve_refuses_before_anything_starts(tmp_path, capsys, monkeypatch):
    from baton.cluster.commands import serve

    monkeypatch.setattr(serve, "Deployment", None)  # it would fail otherwise
    path = write_model(tmp_path / "m", architectures=["GemmaForCausalLM"])
    code, _, err = run(["serve", "--model", str(path)], capsys, monkeypatch)
    assert code == 3
    assert "GemmaForCausalLM" in err


@pytest.mark.parametrize(
    ("changes", "asked", "note"),
    [
        ({}, {}, None),
        ({"kv_lora_rank": 48}, {}, "no kernel is made for latents of 48: torch computes the model, which is slow"),
        ({"v_head_dim": 96}, {}, "no kernel is made for heads of 96 over latents: "),
        ({"qk_rope_head_dim": 24}, {}, "no kernel is made for latents beside 24 turned columns: "),
        ({}, {"batch_invariant": True}, "no kernel is made for attention over latents in invariant numerics: "),
        ({"kv_lora_rank": 48}, {"device": "cpu"}, None),
    ],
)
def test_latents_that_torch_computes_on_a_gpu_are_noted(changes, asked, note, tmp_path):
    latents = deepseek_config("deepseek_v3", 4) | {
        "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "head_dim": None
    }  # fmt: skip
    values = other("DeepseekV3ForCausalLM", model_type="deepseek_v3") | latents | changes
    found = judged(write_model(tmp_path / "m", **values), **{"device": "cuda"} | asked)
    assert not found.errors
    notes = [said for said in found.notes if "no kernel" in said]
    assert len(notes) == (note is not None)
    assert note is None or notes[0].startswith(note)


@pytest.mark.parametrize(
    ("head_dim", "device", "notes"),
    [
        (16, "cuda", []),
        (
            12,
            "cuda",
            ["no kernel is made for a gated delta net's heads of 12: torch computes the model, which is slow"],
        ),
        (12, "cpu", []),
    ],
)
def test_delta_nets_that_torch_computes_on_a_gpu_are_noted(head_dim, device, notes, tmp_path):
    heads = {"linear_key_head_dim": 16, "linear_value_head_dim": head_dim}
    path = write_model(tmp_path / "m", **other("Qwen3_5ForCausalLM"), **hybrid_config("qwen3_5", 2) | heads)
    found = judged(path, device=device, load_format="dummy")
    assert not found.errors
    assert [said for said in found.notes if "no kernel" in said] == notes


@pytest.mark.long
def test_a_check_imports_no_torch_and_no_ray():
    """What keeps it within two seconds: both take seconds to import."""
    program = (
        "import sys; from baton.cluster.checkpoint import judge; from baton.core.config import ServeConfig; "
        "assert not judge(ServeConfig.from_mapping({'device': 'cpu'})).errors; "
        "found = {'torch', 'ray', 'transformers', 'triton'} & set(sys.modules); assert not found, found"
    )
    subprocess.run([sys.executable, "-P", "-c", program], check=True, timeout=120)
