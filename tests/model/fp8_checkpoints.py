"""Tiny random float8 checkpoints in each published layout.

A directory has a twin whose weights are the values times the scales by the layout's own rule, in float32.
"""

import json
import shutil
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file

from baton.tests.model.checkpoints import write_checkpoint

SIZES = {"hidden_size": 256, "head_dim": 128, "num_heads": 4, "num_kv_heads": 2, "tie": False}
INNER = {"intermediate_size": 512}
EXPERTS = {"moe_intermediate_size": 256, "num_experts": 4, "num_experts_per_tok": 2}
MOE = {"qwen3_moe": EXPERTS, "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 512}}
MOE |= {kind: EXPERTS | {"shared_expert_intermediate_size": 256} for kind in ("qwen3_5_moe", "qwen3_next")}
MOE["mixtral"] = {"num_local_experts": 4}
QUANTIZED = ("_proj.weight", "kv_a_proj_with_mqa.weight", ".w1.weight", ".w2.weight", ".w3.weight", "mtp.fc.weight")
PROJECTIONS = (".in_proj_qkv.weight", ".in_proj_z.weight", ".in_proj_qkvz.weight")  # of gated delta nets
IGNORED = ("lm_head", "model.layers.1.self_attn.o_proj")
# As llm-compressor 0.14.0 with compressed-tensors 0.20.1 writes its schemes FP8_DYNAMIC, FP8 and FP8_BLOCK.
WEIGHTS = {
    "num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "group_size": None,
    "observer": "memoryless_minmax",
}  # fmt: skip
INPUTS = {
    "num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token", "group_size": None,
}  # fmt: skip
STATIC_INPUTS = INPUTS | {"dynamic": False, "strategy": "tensor", "observer": "static_minmax"}
BLOCK_INPUTS = INPUTS | {"strategy": "group", "group_size": 128}


def _llm_compressor(strategy, inputs=INPUTS, **weights):
    group = {"targets": ["Linear"], "weights": WEIGHTS | {"strategy": strategy, **weights}, "input_activations": inputs}
    group["format"] = "float-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"output_activations": None}},
        "ignore": list(IGNORED),
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        "moe_sparsity_config": None,
        "global_compression_ratio": None,
        "version": "0.20.1",
    }


def _layout(
    config, scale, suffix="weight_scale", dtype=torch.float32, wide=False, static=False, file="config.json", flat=False,
):  # fmt: skip
    """`flat`: scales of a tensor or its channels have one dimension, instead of none or two."""
    return SimpleNamespace(
        config=config, scale=scale, suffix=suffix, dtype=dtype, wide=wide, static=static, file=file, flat=flat
    )  # fmt: skip


BLOCKS = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
    "modules_to_not_convert": list(IGNORED),
}  # fmt: skip
AUTO_FP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": list(IGNORED)}
# As nvidia-modelopt 0.47.0 writes them: both forms, of which the first was once the only one.
MODELOPT_PRODUCER = {"name": "modelopt", "version": "0.47.0"}
MODELOPT = {
    "producer": MODELOPT_PRODUCER,
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": list(IGNORED)},
}
MODELOPT_FLAT = {
    "quant_method": "modelopt", "quant_algo": "FP8", "ignore": list(IGNORED), "producer": MODELOPT_PRODUCER,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"dynamic": False, "num_bits": 8, "type": "float"},
            "input_activations": {"dynamic": False, "num_bits": 8, "type": "float"},
        }
    },
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
}  # fmt: skip
MODELOPT_CHANNEL = {
    "quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "ignore": list(IGNORED),
    "producer": MODELOPT_PRODUCER,
}  # fmt: skip
FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": list(IGNORED)}
LAYOUTS = {
    "qwen3-fp8": _layout(BLOCKS, "block", "weight_scale_inv", torch.bfloat16),
    "deepseek": _layout(BLOCKS | {"scale_fmt": "ue8m0"}, "block", "weight_scale_inv"),
    "autofp8": _layout(AUTO_FP8, "tensor", static=True),
    "compressed tensor": _layout(
        _llm_compressor("tensor", STATIC_INPUTS), "tensor", dtype=torch.bfloat16, static=True, flat=True
    ),
    "compressed block": _layout(
        _llm_compressor("block", BLOCK_INPUTS, block_structure=[128, 128]), "block", dtype=torch.bfloat16
    ),
    "compressed channel": _layout(_llm_compressor("channel"), "channel", dtype=torch.bfloat16, wide=True),
    "fbgemm": _layout(FBGEMM, "channel", wide=True),
    "compressed weight-only": _layout(_llm_compressor("tensor", None), "tensor", wide=True),
    "modelopt": _layout(MODELOPT, "tensor", static=True, file="hf_quant_config.json"),
    "modelopt channel": _layout(MODELOPT_CHANNEL, "channel", wide=True, flat=True),
    "modelopt flat": _layout(MODELOPT_FLAT, "tensor", static=True),
}


def write_float8(path, layout, *, kind="qwen3", ignored=IGNORED, seed=5, **options):
    """Write a float8 checkpoint and its plain twin; returns both paths.

    `ignored` modules are stored in float32. Blocks, channels and tensors differ a lot in size, so that a scale in
    another's place shows.
    """
    overrides = INNER | MOE.get(kind, {}) | options.pop("overrides", {})
    sizes = SIZES | {"with_mtp": True} | options
    write_checkpoint(path / "float8", kind=kind, seed=seed, overrides=overrides, **sizes)
    shutil.copytree(path / "float8", path / "plain")
    tensors = load_file(path / "float8" / "model.safetensors")
    plain, generator = dict(tensors), torch.Generator().manual_seed(seed)
    for name in [name for name in tensors if name.endswith(QUANTIZED + PROJECTIONS)]:
        module = name.removesuffix(".weight")
        if module in ignored:
            continue
        values, scale, plain[name] = _quantized(tensors[name], layout, generator)
        tensors[name], tensors[f"{module}.{layout.suffix}"] = values, scale
        if layout.static:
            tensors[f"{module}.input_scale"] = torch.tensor([0.013] if layout.flat else 0.013, dtype=layout.dtype)
    save_file(tensors, path / "float8" / "model.safetensors", metadata={"format": "pt"})
    save_file(plain, path / "plain" / "model.safetensors", metadata={"format": "pt"})
    if layout.file == "config.json":
        rewrite_config(path / "float8", quantization_config=layout.config)
    else:
        (path / "float8" / layout.file).write_text(json.dumps(layout.config))
    return path / "float8", path / "plain"


def rewrite_config(path, **changes):
    values = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(values))


def _quantized(weight, layout, generator):
    """Values, the stored scale, and their product."""
    rows, columns = weight.shape
    shape = {"block": (-(-rows // 128), -(-columns // 128)), "tensor": (1, 1), "channel": (rows, 1)}[layout.scale]
    scale = (torch.rand(shape, generator=generator) * 2 - 5).exp2() / 448 * columns**-0.5 * 64
    scale = scale.to(layout.dtype)
    wide = scale.float()
    if layout.scale == "block":
        wide = wide.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    values = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
    stored = scale.reshape(()) if layout.scale == "tensor" else scale
    stored = scale.flatten() if layout.flat else stored
    return values, stored, values.float() * wide
