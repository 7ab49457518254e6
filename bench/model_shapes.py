"""Published model shapes for random weights: only config.json is written, nothing is downloaded."""

import json
from importlib import resources
from pathlib import Path
from typing import Any, Final

from baton.core.errors import ConfigInvalid

_QWEN3: Final[dict[str, Any]] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "rope_scaling": None,
    "max_position_embeddings": 40_960,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
    "torch_dtype": "bfloat16",
}


def _sizes(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
    }


_DEEPSEEK: Final[dict[str, Any]] = {
    "hidden_act": "silu",
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "qwen3-0.6b": _QWEN3 | _sizes(1024, 28, 16, 8, 3072) | {"tie_word_embeddings": True},
    "qwen3-8b": _QWEN3 | _sizes(4096, 36, 32, 8, 12_288),
    "qwen3-32b": _QWEN3 | _sizes(5120, 64, 64, 8, 25_600),
    "qwen3-30b-a3b": _QWEN3
    | _sizes(2048, 48, 32, 4, 6144)
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "qwen1.5-moe-a2.7b": _QWEN3
    | _sizes(2048, 24, 16, 16, 5632)
    | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "max_position_embeddings": 8192,
        "bos_token_id": 151_643,
        "eos_token_id": 151_643,
    },
    "qwen2.5-7b": _QWEN3
    | _sizes(3584, 28, 28, 4, 18_944)
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 152_064,
        "max_position_embeddings": 32_768,
        "bos_token_id": 151_643,
        "eos_token_id": 151_645,
    },
    "llama-3.1-8b": _sizes(4096, 32, 32, 8, 14_336)
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128_256,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "max_position_embeddings": 131_072,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 128_000,
        "eos_token_id": 128_009,
        "torch_dtype": "bfloat16",
    },
    "qwen3.5-35b-a3b": _sizes(2048, 40, 16, 2, 512)
    | {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "vocab_size": 248_320,
        "head_dim": 256,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25},
        "max_position_embeddings": 262_144,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "mtp_num_hidden_layers": 1,
        "eos_token_id": 248_046,
        "torch_dtype": "bfloat16",
    },
    "glm-4.5-air": _DEEPSEEK
    | _sizes(4096, 46, 96, 8, 10_944)
    | {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "vocab_size": 151_552,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 131_072,
        "attention_bias": True,
        "use_qk_norm": False,
        "n_routed_experts": 128,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1408,
        "eos_token_id": 151_329,
    },
    "deepseek-v3": _DEEPSEEK
    | _sizes(7168, 61, 128, 128, 18_432)
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": 129_280,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
            "mscale": 1.0, "mscale_all_dim": 1.0,
        },
        "max_position_embeddings": 163_840,
        "attention_bias": False,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "moe_intermediate_size": 2048,
        "eos_token_id": 1,
    },
}  # fmt: skip
BUNDLED: Final = ("tiny", "tiny-hybrid", "tiny-mla")
ALIASES: Final = {name.removeprefix("qwen3-"): name for name in SHAPES}


def full_name(name: str) -> str:
    """Resolve a shape's name that may lack its family: `8b` is `qwen3-8b`.

    Raises:
        ConfigInvalid: there is no such shape.
    """
    found = ALIASES.get(name, name)
    if found not in BUNDLED and found not in SHAPES:
        known = ", ".join([*BUNDLED, *ALIASES])
        raise ConfigInvalid(f"--shape {name}: there are {known}", keys=["shape"])
    return found


def write_shape(name: str, directory: Path, **changes: Any) -> Path:
    """Write `directory`/config.json of a shape or a bundled model, with some keys changed.

    Returns:
        `directory`, which is created if necessary.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if name in BUNDLED:
        values = json.loads((resources.files("baton.assets") / name / "config.json").read_text(encoding="utf-8"))
    else:
        values = SHAPES[name]
    if "num_hidden_layers" in changes and "layer_types" in values:  # one entry per layer
        changes = {"layer_types": values["layer_types"][: changes["num_hidden_layers"]]} | changes
    (directory / "config.json").write_text(json.dumps(values | changes, indent=2) + "\n")
    return directory


def write_drafter(target: Path, directory: Path, vocab_size: int = 32_000) -> Path:
    """Write `directory`/config.json of an EAGLE-3 drafter: one layer of the target's sizes, a head of few tokens.

    Args:
        target: directory with config.json.
        directory: created if necessary.
        vocab_size: number of tokens that it drafts, at most the target's.

    Returns:
        `directory`.
    """
    values = json.loads((target / "config.json").read_text(encoding="utf-8"))
    kept = [
        "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps",
        "intermediate_size", "rope_theta", "max_position_embeddings", "hidden_act", "torch_dtype",
    ]  # fmt: skip
    sizes = {key: values[key] for key in kept if key in values} | {"num_hidden_layers": 1, "model_type": "llama"}
    sizes |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": min(vocab_size, values["vocab_size"])}
    last = values["num_hidden_layers"] - 1
    sizes["eagle_aux_hidden_state_layer_ids"] = [2, last // 2, last - 2] if last > 8 else [0, last // 2, last]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(sizes, indent=2) + "\n")
    return directory
