"""`baton check` over a directory of every family and format, and of every kind that is refused: what it would run as,
with which drafter and how much KV, or the sentence that says why not. The loader agrees with each.

One process judges them all, in which reading a tensor's bytes or importing a library that takes seconds is an error.
"""

import json
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from baton.cluster.checkpoint import Judgement
from baton.cluster.commands.check import _text
from baton.core.errors import BatonError
from baton.core.numerics import KVDtype, Numerics
from baton.kvcache.pool import num_blocks_for_memory
from baton.model.checkpoint.mtp_fit import stores_mtp
from baton.model.config import ModelConfig
from baton.model.loader import load_model
from baton.model.tensor_spec import tensor_spec
from baton.tests.cluster.test_checkpoint import BLOCKS, CHANNELS, MOE, QWEN3, WIDE, write_tensors
from baton.tests.model.checkpoints import write_tokenizer
from baton.tests.model.fp8_checkpoints import FBGEMM

pytestmark = pytest.mark.fast
KV_MIB, BLOCK_SIZE, NUM_LAYERS, MAX_LEN = 256, 16, 2, 128
MOE_WIDE = MOE | {"moe_intermediate_size": 128}
FAMILIES = {
    "LlamaForCausalLM": {"tie_word_embeddings": False},
    "MistralForCausalLM": {"sliding_window": None, "tie_word_embeddings": False},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {},
    "Qwen3MoeForCausalLM": MOE_WIDE,
}
TENSORS = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
WEIGHT_ONLY = json.loads(json.dumps(CHANNELS))
WEIGHT_ONLY["config_groups"]["group_0"] |= {"input_activations": None}
WEIGHT_ONLY["config_groups"]["group_0"]["weights"]["strategy"] = "tensor"
SCHEMES = {"block": BLOCKS, "tensor": TENSORS, "channel": CHANNELS, "weights alone": WEIGHT_ONLY, "fbgemm": FBGEMM}
SAID = {
    "block": "float8 with a scale for each block of 128 x 128 (fp8)",
    "tensor": "float8 with a scale for each tensor (fp8)",
    "channel": "float8 with a scale for each channel (compressed-tensors)",
    "fbgemm": "float8 with a scale for each channel (fbgemm_fp8)",
    "weights alone": "float8 with a scale for each tensor (compressed-tensors)",
}
STORED = {"BF16": 2, "F16": 2, "F32": 4}
NOTES = {
    "F16": "float16 weights are rounded to bfloat16",
    "channel": "because kernels have no scale per channel",
    "fbgemm": "its activation_scale_ub is not used: activations are not quantized",
    "weights alone": "because activations are not to be quantized",
    "tensor": "its input_scale is not used",
}
LAYER = "input_layernorm post_attention_layernorm self_attn.q_norm self_attn.k_norm".split()
LAYER += [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
HEAD = ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", *(f"layers.0.{part}" for part in LAYER)]
NO_DRAFTS = {"num_speculative_tokens": 0, "drafter": None}


@dataclass
class Directory:
    """One that is judged: what is written, what is asked, and what must be said."""

    config: dict = field(default_factory=dict)
    stored: str = "BF16"
    scheme: str = ""
    asked: dict = field(default_factory=dict)
    facts: dict = field(default_factory=dict)
    notes: tuple = ()
    error: str = ""
    sentence: str = ""
    without: tuple = ()
    more: dict = field(default_factory=dict)
    is_loaders: bool = True


def write(path, directory):
    path.mkdir()
    values = QWEN3 | WIDE | directory.config
    if directory.scheme:
        values |= {"quantization_config": SCHEMES[directory.scheme]}
    (path / "config.json").write_text(json.dumps(values))
    write_tokenizer(path, values["vocab_size"])
    try:
        config = ModelConfig.from_directory(path, made_weights="x")
        spec = tensor_spec(config, with_mtp=config.num_mtp_layers > 0)
    except BatonError:
        write_tensors(path / "model.safetensors", {})
        spec = None
    if spec is not None:
        shapes, dtypes = dict(spec.required), dict.fromkeys(spec.required, (directory.stored, STORED[directory.stored]))
        for name in [name for name in shapes if name.endswith("_proj.weight") and directory.scheme]:
            rows, columns = shapes[name]
            dtypes[name] = ("F8_E4M3", 1)
            of_block = (-(-rows // 128), -(-columns // 128))
            scale = {"block": of_block, "channel": (rows, 1), "fbgemm": (rows, 1)}.get(directory.scheme, ())
            shapes[f"{name}_scale{'_inv' if directory.scheme == 'block' else ''}"] = scale
        shapes |= spec.tables
        dtypes |= dict.fromkeys(spec.tables, ("I64", 8))
        write_tensors(
            path / "model.safetensors", {n: s for n, s in shapes.items() if n not in directory.without}, dtypes
        )
    for name in directory.without:
        (path / name).unlink(missing_ok=True)
    for name, text in directory.more.items():
        (path / name).write_text(text)


def served():
    for family, changes in FAMILIES.items():
        config, name = {"architectures": [family], **changes}, family.removesuffix("ForCausalLM")
        for stored in ("BF16", "F16"):
            yield (
                f"{name} {stored}",
                Directory(config, stored, facts={"architecture": family, "weights": None, **NO_DRAFTS}),
            )
        for scheme in ("block", "tensor", "channel"):
            yield (
                f"{name} FP8 {scheme}",
                Directory(config, scheme=scheme, facts={"architecture": family, "weights": SAID[scheme], **NO_DRAFTS}),
            )
    yield "FP8 weights alone", Directory(scheme="weights alone", facts={"weights": SAID["weights alone"]})
    yield (
        "FP8 fbgemm",
        Directory(scheme="fbgemm", facts={"weights": SAID["fbgemm"]}, notes=("kernels have no scale per channel",)),
    )
    mtp = {"mtp_num_hidden_layers": 1}
    yield "MTP", Directory(mtp, facts={"num_speculative_tokens": 2, "drafter": "MTP head"})
    yield "MTP FP8", Directory(mtp, scheme="block", facts={"num_speculative_tokens": 2, "drafter": "MTP head"})
    yield (
        "MTP, four drafts",
        Directory(mtp, asked={"num_speculative_tokens": 4}, facts={"num_speculative_tokens": 4, "drafter": "MTP head"}),
    )
    yield (
        "MTP, not used",
        Directory(mtp, asked={"speculative_method": "none"}, facts=NO_DRAFTS, notes=("its 1 MTP layers are not used",)),
    )
    head = tuple(f"mtp.{name}.weight" for name in HEAD)
    note = "no tensor of its MTP head is stored, which transformers drops when it saves a model: it is served without"
    yield "MTP, not stored", Directory(mtp, without=head, facts=NO_DRAFTS, notes=(note,))
    yield (
        "draft head",
        Directory(
            mtp | {"draft_vocab_size": 16}, facts={"num_speculative_tokens": 2, "drafter": "MTP head over 16 tokens"}
        ),
    )
    yield (
        "two MTP layers",
        Directory({"mtp_num_hidden_layers": 2}, facts=NO_DRAFTS, notes=("its 2 MTP layers are not used",)),
    )
    yield "float32", Directory(stored="F32", asked={"dtype": "float32"}, facts={"dtype": "float32"})
    yield "FP8 KV", Directory(asked={"kv_cache_dtype": "fp8"}, facts={"dtype": "bfloat16"})
    yield "FP8 at load", Directory(asked={"quantization": "fp8"}, facts={"weights": "fp8, made at load"})
    yield "two ranks", Directory(asked={"tensor_parallel_size": 2}, facts={"tp_prefill": 2, "tp_decode": 2})
    yield (
        "a window that is longer",
        Directory({"architectures": ["MistralForCausalLM"], "sliding_window": 4096, "tie_word_embeddings": False}),
    )
    yield (
        "a window as long as asked",
        Directory(
            {"architectures": ["MistralForCausalLM"], "sliding_window": 64, "tie_word_embeddings": False},
            asked={"max_model_len": 64},
            facts={"max_model_len": 64},
        ),
    )
    yield (
        "a pool shorter than the model",
        Directory(
            {"max_position_embeddings": 1 << 20},
            facts={"max_model_len": 131056},
            notes=("max_model_len 131056, not the model's: the KV pool holds 131056 positions",),
        ),
    )
    yield "a GPU", Directory(asked={"device": "cuda"}, facts={"device": "cuda", "kv_tokens": None})


def quantized(**config):
    return {"quantization_config": config}


def packed(layout):
    return quantized(**json.loads(json.dumps(CHANNELS | {"format": layout})))


def refused():
    unsupported = {
        "AWQ": (quantized(quant_method="awq", bits=4), "holds INT4 weights, quantized by 'awq'; this version serves"),
        "GPTQ": (quantized(quant_method="gptq", bits=4), "holds INT4 weights, quantized by 'gptq'; this version"),
        "INT8 GPTQ": (quantized(quant_method="gptq", bits=8), "holds INT8 weights, quantized by 'gptq'"),
        "auto-round": (quantized(quant_method="auto-round", bits=4), "holds INT4 weights, quantized by 'auto-round'"),
        "NF4": (
            quantized(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4"), "holds NF4 weights",
        ),
        "MXFP4": (quantized(quant_method="mxfp4"), "quantized by 'mxfp4'"),
        "packed INT4": (packed("pack-quantized"), "holds INT4 or INT8 weights"),
        "INT8": (packed("int-quantized"), "holds INT4 or INT8 weights"),
        "NVFP4": (quantized(quant_method="modelopt", quant_algo="NVFP4"), "weights of quant_algo 'NVFP4'"),
        "an unknown key": (quantized(**BLOCKS, rotation="hadamard"), r"quantization_config\.rotation = 'hadamard'"),
        "FP8 in name alone": (quantized(**BLOCKS), "no weight is float8"),
        "gemma": ({"architectures": ["Gemma3ForCausalLM"]}, "this version serves LlamaForCausalLM"),
        "no architecture": ({"architectures": None}, "architecture unknown"),
        "vision": ({"architectures": ["Qwen3VLForConditionalGeneration"]}, "Qwen3VLForConditionalGeneration"),
        "biases": ({"architectures": ["LlamaForCausalLM"], "attention_bias": True}, "attention_bias = True"),
        "a sliding layer": ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        "Qwen2 that slides": ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}, "_window = True"),
        "longrope": ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope_type 'longrope'"),
    }  # fmt: skip
    for name, (config, sentence) in unsupported.items():
        yield name, Directory(config, error="ModelUnsupported", sentence=sentence)
    norm, scale = "model.norm.weight", "model.layers.1.mlp.up_proj.weight_scale_inv"
    up = scale.removesuffix("_scale_inv")
    held = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    yield (
        "whole experts",
        Directory(asked=held, error="ModelUnsupported", sentence="the model is dense .Qwen3ForCausalLM"),
    )
    yield "a tensor less", Directory(without=(norm,), error="ModelTensorMissing", sentence=f"lacks {norm}")
    yield (
        "a scale less",
        Directory(
            scheme="block", without=(scale,), error="ModelTensorMissing", sentence=f"{up} is float8.*lacks its scale"
        ),
    )
    yield (
        "a weight less",
        Directory(scheme="block", without=(up,), error="ModelTensorMissing", sentence=f"holds {scale}, and lacks {up}"),
    )
    yield (
        "an MTP head less",
        Directory(
            asked={"num_speculative_tokens": 2}, error="ModelTensorMissing", sentence="has no MTP head to draft with"
        ),
    )
    yield (
        "eight ranks",
        Directory(
            asked={"tensor_parallel_size": 8},
            error="ModelUnsupported",
            sentence="num_attention_heads = 4 is no multiple",
        ),
    )
    serve = {"is_loaders": False}  # which is never asked
    yield (
        "a sliding window",
        Directory(
            {"architectures": ["MistralForCausalLM"], "sliding_window": 64, "tie_word_embeddings": False},
            error="ModelUnsupported",
            sentence="sliding_window = 64 is not implemented for 128 positions; --max-model-len 64 would serve it",
            **serve,
        ),
    )
    yield (
        "narrow heads",
        Directory({"head_dim": 4}, asked={"kv_cache_dtype": "fp8"}, error="ModelUnsupported", sentence="heads have 4"),
    )
    yield (
        "no room for a block",
        Directory(
            asked={"kv_memory_mib": 1, "block_size": 64},
            config={"num_hidden_layers": 16},
            error="ConfigInvalid",
            sentence="the memory for KV holds no block of 1048576 bytes; raise kv_memory_mib",
            **serve,
        ),
    )
    yield (
        "no room for a sequence",
        Directory(
            asked={"kv_memory_mib": 1, "max_model_len": 2048},
            config={"max_position_embeddings": 4096},
            error="ConfigInvalid",
            sentence="max_model_len 2048: the KV pool holds 496 positions, drafts among them; lower it, or raise",
            **serve,
        ),
    )
    pickles = {"pytorch_model.bin": ""}
    lora = {"adapter_config.json": "{}", "adapter_model.safetensors": ""}
    weights = ("model.safetensors",)
    yield (
        "pickles",
        Directory(without=weights, more=pickles, error="ModelUnsupported", sentence="holds PyTorch pickles", **serve),
    )
    yield (
        "an adapter",
        Directory(
            without=("config.json", *weights),
            more=lora,
            error="ModelUnsupported",
            sentence="is a LoRA adapter",
            **serve,
        ),
    )
    yield (
        "GGUF",
        Directory(
            without=weights, more={"q4.gguf": ""}, error="ModelUnsupported", sentence="holds GGUF files", **serve
        ),
    )
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n"
    for name in ("model.safetensors", "tokenizer.json"):
        yield (
            f"a pointer for {name}",
            Directory(
                more={name: pointer},
                error="ModelMissing",
                sentence=rf"{name} is a pointer of Git LFS, not the file; `git lfs pull` in .* fetches it",
                **serve,
            ),
        )
    yield (
        "Mistral's own weights",
        Directory(
            without=weights,
            more={"consolidated.safetensors": "", "params.json": "{}"},
            error="ModelUnsupported",
            sentence=r"holds weights in Mistral's own form \(consolidated\.safetensors\); this version serves",
            **serve,
        ),
    )
    yield (
        "weights of another name",
        Directory(
            without=weights,
            more={"model.fp16.safetensors": ""},
            error="ModelMissing",
            sentence=r"neither model\.safetensors nor .*; others are not read: model\.fp16\.safetensors",
            **serve,
        ),
    )
    yield (
        "no weights",
        Directory(without=weights, error="ModelMissing", sentence=r"holds no \.safetensors file", **serve),
    )
    yield (
        "no tokenizer",
        Directory(
            without=("tokenizer.json",), error="ModelMissing", sentence=r"tokenizer\.json does not exist", **serve
        ),
    )


SERVED, REFUSED = dict(served()), dict(refused())
PROGRAM = """
import json, sys
from baton.cluster.checkpoint import judge
from baton.core.config import ServeConfig
from baton.model.checkpoint import weights

def no_bytes(*arguments):
    raise AssertionError("a tensor was read")

weights.read_bytes = no_bytes
told = {}
for name, values in json.load(sys.stdin).items():
    found = judge(ServeConfig.from_mapping(values))
    errors = [[type(error).__name__, error.message] for error in found.errors]
    told[name] = {"model": found.model, "errors": errors, "notes": found.notes, "facts": found.facts}
heavy = {"torch", "ray", "transformers", "triton", "numpy", "safetensors"} & set(sys.modules)
assert not heavy, heavy
json.dump(told, sys.stdout)
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What a process of its own says of every directory; and where they are."""
    folder = tmp_path_factory.mktemp("directories")
    asked = {}
    for name, directory in (SERVED | REFUSED).items():
        path = folder / name.replace(" ", "-").replace(",", "")
        write(path, directory)
        asked[name] = {"model": str(path), "device": "cpu", "dtype": "bfloat16", **directory.asked}
    asked["a hub id"] = {"model": "Qwen/Qwen3-8B", "device": "cpu"}
    asked["a GGUF file"] = {"model": str(folder / "GGUF" / "q4.gguf"), "device": "cpu"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM],
        input=json.dumps(asked), capture_output=True, text=True, cwd=folder, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def load(path, directory):
    asked = directory.asked
    size = asked.get("tensor_parallel_size", 1)
    config = ModelConfig.from_directory(path)
    default = 2 if config.num_mtp_layers == 1 and stores_mtp(path) and asked.get("speculative_method") != "none" else 0
    return load_model(
        path,
        dtype=getattr(torch, asked.get("dtype", "bfloat16")),
        device=torch.device("cpu"),
        numerics=Numerics.DEFAULT,
        with_mtp=asked.get("num_speculative_tokens", default) > 0,
        kv_dtype=KVDtype(asked.get("kv_cache_dtype", "auto")),
        communicator=None if size == 1 else Rank(size),
        expert_parallel=asked.get("enable_expert_parallel", False),
    )


class Rank:
    """The first of a group, whose part is loaded and not used."""

    rank = 0

    def __init__(self, size):
        self.size = size

    def all_sum(self, x):
        raise AssertionError

    all_gather = all_sum


@pytest.mark.long
@pytest.mark.parametrize("name", SERVED)
def test_what_it_would_run_as_is_what_the_loader_makes(name, told):
    directory, said = SERVED[name], told[name]
    assert said["errors"] == []
    assert {key: said["facts"].get(key) for key in directory.facts} == directory.facts
    for note in (*directory.notes, *(NOTES[key] for key in (directory.stored, directory.scheme) if key in NOTES)):
        assert any(note in one for one in said["notes"]), note
    layout = load(Path(said["model"]), directory).kv_layout(BLOCK_SIZE)
    facts = said["facts"]
    assert facts["kv_bytes_per_token"] == layout.bytes_per_position
    item_bytes = 1 if "kv_cache_dtype" in directory.asked else {"float32": 4, "bfloat16": 2}[facts["dtype"]]
    num_layers = NUM_LAYERS + (facts["num_speculative_tokens"] > 0)
    assert facts["kv_bytes_per_token"] == 2 * num_layers * 2 * 128 * item_bytes
    if facts["device"] == "cpu":
        assert facts["kv_tokens"] == BLOCK_SIZE * num_blocks_for_memory(layout, KV_MIB << 20)


@pytest.mark.parametrize("name", [*REFUSED, "a hub id", "a GGUF file"])
@pytest.mark.long
def test_the_sentence_that_refuses_it_is_the_loaders(name, told):
    directory = (
        REFUSED.get(name)
        or {
            "a hub id": Directory(
                error="ModelMissing", sentence="hf download Qwen/Qwen3-8B --local-dir", is_loaders=False
            ),
            "a GGUF file": Directory(error="ModelUnsupported", sentence="q4.gguf is a GGUF file", is_loaders=False),
        }[name]
    )
    kind, message = told[name]["errors"][0]
    assert kind == directory.error
    assert re.search(directory.sentence, message)
    assert "\n" not in message
    if directory.is_loaders:
        with pytest.raises(BatonError) as caught:
            load(Path(told[name]["model"]), directory)
        assert (type(caught.value).__name__, caught.value.message) == (kind, message)


def test_a_person_reads_the_drafter_and_the_kv(told):
    def text(name):
        return _text(Judgement(model="m", facts=told[name]["facts"]))

    assert "up to 128 positions, 2 draft tokens a step by the MTP head over 16 tokens\n" in text("draft head")
    assert "KV 3.0 KiB a token, for 87360 tokens" in text("MTP")
    assert "128 positions, without drafts\n" in text("Qwen3 BF16")
    assert "KV 2.0 KiB a token, for 131056 tokens" in text("Qwen3 BF16")
    assert "KV 2.0 KiB a token, 0.00 GiB for a sequence of 128" in text("a GPU")
