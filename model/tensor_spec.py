"""Names and shapes of the tensors a checkpoint must hold, and the errors when it does not. Reads no file itself."""

from collections.abc import Mapping
from dataclasses import dataclass

from baton.core.errors import ModelTensorMisshapen, ModelTensorMissing, ModelTensorUnexpected
from baton.model.config import ModelConfig
from baton.model.draft_names import D2T, DRAFT_HEAD, T2D
from baton.model.fp8_scheme import Fp8Scheme
from baton.model.fp8_tensors import NO_FLOAT8, Fp8Tensors, match_scales
from baton.model.weights import StoredTensor

Shape = tuple[int, ...]
# Of an attention layer, read for KV in float8 alone. ModelOpt writes them beside the projections, AutoFP8 one for both.
KV_SCALES = (("k_scale", "k_proj.k_scale", "kv_scale"), ("v_scale", "v_proj.v_scale", "kv_scale"))
_NUM_NAMED = 5  # tensors an error's sentence names; its fields carry all


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Tensors to load, tables of ids to load, and tensors that may be there and are not needed."""

    required: dict[str, Shape]
    tables: dict[str, Shape]
    optional: dict[str, Shape]


def tensor_spec(config: ModelConfig, *, with_mtp: bool) -> TensorSpec:
    """What the architecture needs, with or without its MTP head."""
    vocab = (config.vocab_size, config.hidden_size)
    required: dict[str, Shape] = {"model.embed_tokens.weight": vocab, "model.norm.weight": (config.hidden_size,)}
    optional: dict[str, Shape] = {}
    (optional if config.tie_word_embeddings else required)["lm_head.weight"] = vocab
    for layer in range(config.num_layers):
        required |= layer_spec(config, f"model.layers.{layer}", layer)
        optional |= _scale_spec(f"model.layers.{layer}")
    if with_mtp:
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            required[f"mtp.{name}.weight"] = (config.hidden_size,)
        required["mtp.fc.weight"] = (config.hidden_size, 2 * config.hidden_size)
        required |= layer_spec(config, "mtp.layers.0", config.num_layers)
        optional |= _scale_spec("mtp.layers.0")
    tables: dict[str, Shape] = {}
    if with_mtp and config.draft_vocab_size is not None:
        required[DRAFT_HEAD] = (config.draft_vocab_size, config.hidden_size)
        tables[D2T] = (config.draft_vocab_size,)
    return TensorSpec(required, tables, optional)


def layer_spec(config: ModelConfig, prefix: str, layer: int) -> dict[str, Shape]:
    """A decoder layer's."""
    hidden, head = config.hidden_size, config.head_dim
    queries, keys = config.num_heads * head, config.num_kv_heads * head
    spec: dict[str, Shape] = {
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
        f"{prefix}.self_attn.q_proj.weight": (queries, hidden),
        f"{prefix}.self_attn.k_proj.weight": (keys, hidden),
        f"{prefix}.self_attn.v_proj.weight": (keys, hidden),
        f"{prefix}.self_attn.o_proj.weight": (hidden, queries),
    }
    if config.has_head_norms:
        spec |= {f"{prefix}.self_attn.{part}_norm.weight": (head,) for part in "qk"}
    if config.has_qkv_bias:
        sizes = {"q": queries, "k": keys, "v": keys}
        spec |= {f"{prefix}.self_attn.{part}_proj.bias": (size,) for part, size in sizes.items()}
    if not config.is_sparse(layer):
        return spec | _mlp_spec(f"{prefix}.mlp", hidden, config.intermediate_size)
    spec[f"{prefix}.mlp.gate.weight"] = (config.num_experts, hidden)
    for expert in range(config.num_experts):
        spec |= _mlp_spec(f"{prefix}.mlp.experts.{expert}", hidden, config.moe_intermediate_size)
    return spec


def _scale_spec(prefix: str) -> dict[str, Shape]:
    """One number each, stored as a scalar or as a list of one."""
    return {f"{prefix}.self_attn.{name}": () for names in KV_SCALES for name in names}


def _mlp_spec(prefix: str, hidden: int, inner: int) -> dict[str, Shape]:
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }


def check_tensors(spec: TensorSpec, stored: Mapping[str, StoredTensor], scheme: Fp8Scheme | None = None) -> Fp8Tensors:
    """Compare a checkpoint's headers with what is needed; which weights are float8, if it has a `scheme` for them.

    Raises:
        ModelTensorMissing: tensors or scales are not there; if only the MTP head's, the message says how to serve
            without it.
        ModelTensorUnexpected: tensors the architecture has no place for (those of an unused MTP head excepted).
        ModelTensorMisshapen: a shape differs, or a dtype is not a plain float of 16 to 64 bits nor float8 with a scale.
        ModelUnsupported: there is a scheme, and no float8 weight.
    """
    float8 = NO_FLOAT8 if scheme is None else match_scales(scheme, [*spec.required, *spec.optional], stored)
    missing = sorted({*spec.required, *spec.tables} - set(stored))
    if missing:
        message = f"the checkpoint lacks {_named(missing)}"
        if all(name.startswith("mtp.") for name in missing):
            message += "; its MTP head cannot be used, but --speculative-method none would serve the model without it"
        raise ModelTensorMissing(message, tensors=missing)
    known = spec.required | spec.tables | spec.optional
    beside = float8.names
    unexpected = sorted(
        name for name in stored if name not in known and name not in beside and not _is_ignored(name, spec)
    )
    if unexpected:
        message = f"the checkpoint holds {_named(unexpected)}, for which the architecture has no place"
        raise ModelTensorUnexpected(message, tensors=unexpected)
    for name, shape in known.items():
        tensor = stored.get(name)
        if tensor is not None and tensor.shape != shape and (shape or tensor.shape != (1,)):
            message = f"{name} has shape {list(tensor.shape)} where config.json implies {list(shape)}"
            raise ModelTensorMisshapen(message, tensor=name, shape=list(tensor.shape), wanted_shape=list(shape))
        if tensor is not None and name in spec.tables:
            if not tensor.is_index:
                message = f"{name} is stored as {tensor.dtype_name}; ids must be I64 or I32"
                raise ModelTensorMisshapen(message, tensor=name, dtype=tensor.dtype_name)
        elif tensor is not None and not tensor.is_weight and name not in float8.scales:
            message = f"{name} is stored as {tensor.dtype_name}; weights must be F64, F32, BF16 or F16"
            if tensor.is_float8:
                message += ", or F8_E4M3 with a scale where config.json has a quantization_config"
            raise ModelTensorMisshapen(message, tensor=name, dtype=tensor.dtype_name)
    return float8


def _is_ignored(name: str, spec: TensorSpec) -> bool:
    if name.endswith(".rotary_emb.inv_freq"):  # old checkpoints store this constant
        return True
    if name == T2D:  # follows from d2t
        return DRAFT_HEAD in spec.required or "mtp.fc.weight" not in spec.required
    return name.startswith("mtp.") and "mtp.fc.weight" not in spec.required


def _named(names: list[str]) -> str:
    shown = ", ".join(names[:_NUM_NAMED])
    return shown if len(names) <= _NUM_NAMED else f"{shown} and {len(names) - _NUM_NAMED} more"
