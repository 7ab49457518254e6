"""What config.json says about the architecture, in one spelling. Refuses what the model code does not implement.

Token ids of the end of a text are not here: the tokenizer has them.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.core.errors import ModelFileDamaged, ModelMissing, ModelUnsupported
from baton.model.weights import checkpoint_identity

_ARCHITECTURES = {"Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3_moe"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and options of one checkpoint.

    Attributes:
        max_model_len: positions the model was made for (max_position_embeddings).
        intermediate_size: of dense layers' MLP.
        num_experts: 0 for a dense model.
        num_experts_per_token: experts a token is sent to.
        moe_intermediate_size: of one expert.
        renormalise_experts: whether chosen probabilities are made to sum to 1 (norm_topk_prob).
        sparse_layers: trunk layers with experts.
        num_mtp_layers: MTP layers the checkpoint says it has.
        model_hash: identity of config and weights; equal for copies of one directory.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    intermediate_size: int
    num_experts: int
    num_experts_per_token: int
    moe_intermediate_size: int
    renormalise_experts: bool
    sparse_layers: frozenset[int]
    num_mtp_layers: int
    model_hash: str

    @classmethod
    def from_directory(cls, path: Path) -> "ModelConfig":
        """Read config.json, and the safetensors headers for `model_hash`.

        Raises:
            ModelMissing: the directory, config.json or the weights are not there.
            ModelFileDamaged: a file is not what its name says.
            ModelUnsupported: an architecture or option that is not implemented.
        """
        values = read_config(path)
        _refuse_unsupported(values, path)
        model_hash = checkpoint_identity(path, values)
        try:
            return cls(**_fields(values), model_hash=model_hash)
        except KeyError as error:
            key = str(error.args[0])
            raise ModelFileDamaged(f"{path / 'config.json'} lacks {key!r}", path=str(path), key=key) from error
        except (TypeError, ValueError) as error:
            message = f"{path / 'config.json'} holds a value of the wrong kind: {error}"
            raise ModelFileDamaged(message, path=str(path)) from error

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts; the MTP layer (index num_layers) has them where the model has any."""
        return self.num_experts > 0 if layer == self.num_layers else layer in self.sparse_layers


def read_config(path: Path) -> dict[str, Any]:
    """The mapping in config.json."""
    if not path.is_dir():
        raise ModelMissing(f"there is no model directory {path}", path=str(path))
    file = path / "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelMissing(f"{path} holds no config.json", path=str(file)) from error
    except OSError as error:
        raise ModelMissing(f"cannot read {file}: {error.strerror}", path=str(file)) from error
    except ValueError as error:
        raise ModelFileDamaged(f"{file} is not JSON: {error}", path=str(file)) from error
    if not isinstance(values, dict):
        raise ModelFileDamaged(f"{file} holds no mapping", path=str(file))
    return values


def _refuse_unsupported(values: dict[str, Any], path: Path) -> None:
    architectures = values.get("architectures") or []
    if len(architectures) != 1 or architectures[0] not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        message = f"{path} is of architecture {architectures or 'unknown'}; this version serves {known}"
        raise ModelUnsupported(message, option="architectures", value=architectures)
    refused = {
        "use_sliding_window": bool(values.get("use_sliding_window")),
        "attention_bias": bool(values.get("attention_bias")),
        "hidden_act": values.get("hidden_act", "silu") != "silu",
        "quantization_config": values.get("quantization_config") is not None,
        "layer_types": any(kind != "full_attention" for kind in values.get("layer_types") or []),
    }
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    refused["rope_type"] = not isinstance(rope, dict) or _rope_type(rope) != "default"
    for option, is_refused in refused.items():
        if is_refused:
            value = rope if option == "rope_type" else values.get(option)
            message = f"{path / 'config.json'}: {option} = {value!r} is not implemented"
            raise ModelUnsupported(message, option=option, value=value)


def _rope_type(rope: dict[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _fields(values: dict[str, Any]) -> dict[str, Any]:
    """Fields of ModelConfig by the names config.json uses. KeyError names a key that is missing."""
    architecture = values["architectures"][0]
    num_layers = int(values["num_hidden_layers"])
    num_heads = int(values["num_attention_heads"])
    is_moe = architecture == "Qwen3MoeForCausalLM"
    num_experts = _first(values, "num_experts", "num_local_experts") if is_moe else 0
    dense_layers = values.get("mlp_only_layers") or []
    sparse_step = int(values.get("decoder_sparse_step", 1))
    sparse = [i for i in range(num_layers) if num_experts and i not in dense_layers and (i + 1) % sparse_step == 0]
    rope = values.get("rope_parameters") or {}
    num_kv_heads = int(values.get("num_key_value_heads") or num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(f"num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}")
    return {
        "architecture": architecture,
        "num_layers": num_layers,
        "hidden_size": int(values["hidden_size"]),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": int(values.get("head_dim") or int(values["hidden_size"]) // num_heads),
        "vocab_size": int(values["vocab_size"]),
        "max_model_len": int(values["max_position_embeddings"]),
        "rope_theta": float(rope["rope_theta"] if "rope_theta" in rope else values["rope_theta"]),
        "rms_norm_eps": float(values["rms_norm_eps"]),
        "tie_word_embeddings": bool(values.get("tie_word_embeddings", False)),
        "intermediate_size": int(values["intermediate_size"]),
        "num_experts": num_experts,
        "num_experts_per_token": int(values["num_experts_per_tok"]) if is_moe else 0,
        "moe_intermediate_size": int(values["moe_intermediate_size"]) if is_moe else 0,
        "renormalise_experts": bool(values.get("norm_topk_prob", False)),
        "sparse_layers": frozenset(sparse),
        "num_mtp_layers": int(values.get("mtp_num_hidden_layers") or values.get("num_nextn_predict_layers") or 0),
    }


def _first(values: dict[str, Any], *keys: str) -> int:
    for key in keys:
        if values.get(key) is not None:
            return int(values[key])
    raise KeyError(keys[0])
