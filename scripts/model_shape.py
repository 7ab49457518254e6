"""Write a published model's config.json from its numbers, for `--weights random`: nothing is downloaded.

    python scripts/model_shape.py qwen3-8b /tmp/qwen3-8b
    baton serve --model /tmp/qwen3-8b --weights random

`--layers N` keeps the shape of a layer and takes fewer of them.
"""

import argparse
import json
from pathlib import Path
from typing import Any

_QWEN3 = {
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


SHAPES: dict[str, dict[str, Any]] = {
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
}


def write_shape(name: str, directory: Path, **changes: Any) -> Path:
    """Write `directory`/config.json of a shape, with some keys changed; returns `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(SHAPES[name] | changes, indent=2) + "\n")
    return directory


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    options = parser.parse_args()
    changes = {} if options.layers is None else {"num_hidden_layers": options.layers}
    print(write_shape(options.shape, options.directory, **changes) / "config.json")


if __name__ == "__main__":
    main()
