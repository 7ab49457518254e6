"""Reads an architecture's config.json into one form. Rejects what the model code does not implement.

End-of-text token ids are not included: the tokenizer has them.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from baton.core.config import MAX_DRAFTS
from baton.core.errors import ModelFileDamaged, ModelMissing, ModelUnsupported
from baton.kvcache.layout import LayerLayout, attention_layer
from baton.model.checkpoint.fp8_scheme import Fp8Scheme, read_scheme
from baton.model.checkpoint.weights import checkpoint_identity, shape_identity
from baton.model.delta_sizes import POOL_LAYERS, DeltaSizes, read_delta_layers, read_delta_sizes
from baton.model.draft_names import MTPNames
from baton.model.latent_sizes import LatentSizes, read_latent_sizes
from baton.model.rope_scaling import RopeScaling, read_scaling, rope_parameters, stretched_len

_MAX_LAYERS = 1000
_MAX_SIZE = 1 << 20  # of any dimension without a limit of its own
_MAX_HEADS = 4096
_MAX_EXPERTS = 4096
_MAX_VOCAB_SIZE = 1 << 24
_MAX_POSITIONS = 16 << 20


@dataclass(frozen=True, slots=True)
class _Family:
    """What an architecture's name implies and config.json does not say.

    Attributes:
        has_head_norms: queries and keys are normalised, unless `use_qk_norm` is false.
        has_qkv_bias: their projections and that of values have biases, unless `bias_key` is false.
        bias_key: the config key that says so.
        turns_in_part: the share of a head's columns that are rotated if `partial_rotary_factor` is absent; None: that
            key is not implemented, and all columns are rotated.
        slides: `sliding_window` applies unless it is null; otherwise only with `use_sliding_window`.
        is_moe: layers have experts.
        has_shared_expert: besides, one expert that processes every token.
        sparse_block: the part of a layer's names that stands for its experts.
        expert_parts: gate, up and down projection of an expert.
        expert_size: the key of its intermediate size.
        renormalises: the selected probabilities sum to 1; otherwise only with `norm_topk_prob`.
        has_delta_nets: layers may be gated delta nets (`model.delta_net`); `layer_types` says which.
        has_output_gate: attention outputs are gated, which `attn_output_gate` must not deny.
        has_plus_one_norms: norms multiply by 1 + w.
        has_published_names: tensors are stored by names or in stacks of their own (`model.checkpoint.published_names`).
        is_interleaved: projections of a gated delta net are stored key head by key head.
        is_multimodal: config.json has the text model's values in `text_config`.
        has_mrope: rope parameters say which columns are rotated by the place within an image (`_SECTIONS`); for text,
            all columns are rotated by one position.
        is_latent: attention is over latents (`model.latent_attention`).
        is_deepseek: experts are selected by sigmoids, in groups, besides shared ones; the first layers are dense; the
            MTP head is numbered as a layer.
        absent: the family's own meaning of keys that config.json leaves out.
    """

    has_head_norms: bool = False
    has_qkv_bias: bool = False
    bias_key: str = "qkv_bias"
    turns_in_part: float | None = None
    slides: bool = False
    is_moe: bool = False
    has_shared_expert: bool = False
    sparse_block: str = "mlp"
    expert_parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    expert_size: str = "moe_intermediate_size"
    renormalises: bool = False
    has_delta_nets: bool = False
    has_output_gate: bool = False
    has_plus_one_norms: bool = False
    has_published_names: bool = False
    is_interleaved: bool = False
    is_multimodal: bool = False
    has_mrope: bool = False
    is_latent: bool = False
    is_deepseek: bool = False
    absent: Mapping[str, Any] = field(default_factory=dict)


_QWEN3_5 = _Family(
    has_head_norms=True,
    has_delta_nets=True,
    has_output_gate=True,
    has_plus_one_norms=True,
    has_published_names=True,
    has_mrope=True,
    turns_in_part=0.25,
    absent={"head_dim": 256, "rms_norm_eps": 1e-6},
)
_QWEN3_5_MOE = replace(
    _QWEN3_5,
    is_moe=True,
    has_shared_expert=True,
    renormalises=True,
    # There is no dense layer.
    absent={**_QWEN3_5.absent, "intermediate_size": 1, "moe_intermediate_size": 512},
)
_FAMILIES = {
    "LlamaForCausalLM": _Family(slides=True, absent={"num_key_value_heads": None, "rope_theta": 10_000.0}),
    "MistralForCausalLM": _Family(slides=True, absent={"sliding_window": 4096}),
    "MixtralForCausalLM": _Family(
        slides=True,
        is_moe=True,
        sparse_block="block_sparse_moe",
        expert_parts=("w1", "w3", "w2"),
        expert_size="intermediate_size",
        renormalises=True,
    ),
    "Qwen2ForCausalLM": _Family(has_qkv_bias=True),
    "Qwen2MoeForCausalLM": _Family(has_qkv_bias=True, is_moe=True, has_shared_expert=True),
    "Qwen3ForCausalLM": _Family(has_head_norms=True, absent={"head_dim": 128}),
    "Qwen3MoeForCausalLM": _Family(has_head_norms=True, is_moe=True),
    "Qwen3NextForCausalLM": replace(
        _QWEN3_5_MOE,
        is_interleaved=True,
        has_mrope=False,
        renormalises=False,
        # Its config.json does not name the MTP head that it is published with.
        absent={**_QWEN3_5.absent, "intermediate_size": 5632, "norm_topk_prob": True, "mtp_num_hidden_layers": 1},
    ),
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": replace(_QWEN3_5, is_multimodal=True),
    "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": replace(_QWEN3_5_MOE, is_multimodal=True),
    "DeepseekV3ForCausalLM": _Family(
        is_moe=True,
        is_latent=True,
        is_deepseek=True,
        absent={
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 3,
            "routed_scaling_factor": 2.5,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-6,
        },
    ),
    "Glm4MoeForCausalLM": _Family(
        has_head_norms=True,
        has_qkv_bias=True,
        bias_key="attention_bias",
        turns_in_part=0.5,
        is_moe=True,
        is_deepseek=True,
        absent={
            "use_qk_norm": False,
            "attention_bias": False,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.0,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-5,
        },
    ),
}
_OF_THE_WHOLE = ("architectures", "tie_word_embeddings", "quantization_config")  # override `text_config`
_SECTIONS = ("mrope_section", "mrope_interleaved")


# Keys of other families, and the value, besides null, that has no effect. transformers ignores them in these families;
# a checkpoint that has one was not made with these families' equations.
_OF_OTHERS = {
    "attention_multiplier": None,
    "attn_logit_softcapping": None,
    "clip_qkv": None,
    "embedding_multiplier": 1,
    "final_logit_softcapping": None,
    "logit_scale": 1,
    "logits_scaling": 1,
    "residual_multiplier": 1,
    "scale_emb": 1,
}


# Keys of DeepSeek's family, and the values, besides null, that mean what is implemented.
_OF_DEEPSEEK = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "index_topk": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SigmoidRouting:
    """How experts are selected by sigmoids and a bias (DeepSeek-V3, section 2.1.2).

    Attributes:
        num_groups: number of equal groups of consecutive experts.
        num_kept_groups: number of groups whose experts may be selected.
        scaling: factor of the selected experts' weights.
    """

    num_groups: int
    num_kept_groups: int
    scaling: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and options of one checkpoint.

    Attributes:
        max_model_len: positions the model was made for (max_position_embeddings), or is stretched to.
        intermediate_size: of dense layers' MLP.
        num_experts: 0 for a dense model.
        num_experts_per_token: experts a token is sent to.
        moe_intermediate_size: of one expert.
        shared_expert_size: intermediate size of the shared expert, which processes every token; 0: there is none.
        sigmoid_routing: how experts are selected by sigmoids; None: by a softmax. With it, the shared expert has no
            gate.
        renormalise_experts: whether the selected probabilities are made to sum to 1 (norm_topk_prob).
        sparse_layers: trunk layers with experts.
        sparse_block: the part of such a layer's tensor names that stands for its experts and their router.
        expert_parts: the part that stands for an expert's gate, up and down projections.
        num_mtp_layers: MTP layers the checkpoint says it has.
        mtp_names: tensor names of the first of them.
        has_head_norms: queries and keys are normalised head by head.
        has_qkv_bias: the projections of queries, keys and values have biases.
        rope: how rotary frequencies are scaled.
        sliding_window: positions that attention looks back; None: all. Served only if no position is beyond it.
        dual_chunk_len: positions of a chunk of dual chunk attention (Qwen2.5-1M), which is plain attention within the
            first chunk; None: there are no chunks. Only the first chunk is served.
        draft_vocab_size: columns of the draft head; None if the MTP head drafts from the whole vocabulary.
        d2t_form: how the draft head's table is written, if config.json says (model.draft_head).
        rotary_dim: columns of a head that are rotated by its position.
        has_plus_one_norms: norms multiply by 1 + w.
        has_output_gate: each query head has a gate for its attention output.
        delta_net: sizes of the layers that are gated delta nets; None: there are none.
        delta_layers: trunk layers that are gated delta nets.
        has_interleaved_delta_net: their projections are stored key head by key head.
        has_published_names: tensors are stored by names or in stacks of their own (`model.checkpoint.published_names`).
        latent: sizes of attention over latents, whose rows then count as the one KV head; None: heads have K and V.
        fp8: how the checkpoint's float8 weights are quantized; None: it has none.
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
    rope: RopeScaling
    has_head_norms: bool
    has_qkv_bias: bool
    sliding_window: int | None
    dual_chunk_len: int | None
    rms_norm_eps: float
    tie_word_embeddings: bool
    intermediate_size: int
    num_experts: int
    num_experts_per_token: int
    moe_intermediate_size: int
    shared_expert_size: int
    sigmoid_routing: SigmoidRouting | None
    renormalise_experts: bool
    sparse_layers: frozenset[int]
    sparse_block: str
    expert_parts: tuple[str, str, str]
    num_mtp_layers: int
    mtp_names: MTPNames
    draft_vocab_size: int | None
    d2t_form: str | None
    rotary_dim: int
    has_plus_one_norms: bool
    has_output_gate: bool
    delta_net: DeltaSizes | None
    delta_layers: frozenset[int]
    has_interleaved_delta_net: bool
    has_published_names: bool
    latent: LatentSizes | None
    fp8: Fp8Scheme | None
    model_hash: str

    @classmethod
    def from_directory(cls, path: Path, *, made_weights: str | None = None) -> "ModelConfig":
        """Read config.json, and the safetensors headers for `model_hash`.

        Args:
            path: the directory.
            made_weights: describes how weights that no file holds are generated; `model_hash` then covers it and
                config.json.

        Raises:
            ModelMissing: the directory, config.json or the weights are not there.
            ModelFileDamaged: a file is not what its name says.
            ModelUnsupported: an architecture or option that is not implemented, or an absurd size.
        """
        values = read_config(path)
        return cls.of_values(values, path, identity=values, made_weights=made_weights)

    @classmethod
    def of_values(
        cls, values: dict[str, Any], path: Path, *, identity: dict[str, Any], made_weights: str | None = None
    ) -> "ModelConfig":
        """Read the mapping of config.json, or its part about layers; `identity` is the whole mapping.

        Raises:
            Exception: as `from_directory`.
        """
        values = text_values(values)
        _refuse_unsupported(values, path)
        scheme = read_scheme(values, path)
        if made_weights is None:
            model_hash = checkpoint_identity(path, identity)
        else:
            model_hash = shape_identity(identity, made_weights)
        try:
            return cls(**_fields(values), fp8=scheme, model_hash=model_hash)
        except KeyError as error:
            key = str(error.args[0])
            raise ModelFileDamaged(f"{path / 'config.json'} lacks {key!r}", path=str(path), key=key) from error
        except (TypeError, ValueError, OverflowError) as error:
            message = f"{path / 'config.json'} holds a value of the wrong kind: {error}"
            raise ModelFileDamaged(message, path=str(path)) from error

    def require_full_attention(self, max_model_len: int | None = None) -> None:
        """Check that `max_model_len` (None: the model's own) is not beyond the sliding window or the first chunk.

        Raises:
            ModelUnsupported: it is.
        """
        wanted = self.max_model_len if max_model_len is None else max_model_len
        if self.sliding_window is not None and wanted > self.sliding_window:
            message = f"sliding_window = {self.sliding_window} is not implemented for {wanted} positions"
            message += f"; --max-model-len {self.sliding_window} would serve it"
            raise ModelUnsupported(message, option="sliding_window", value=self.sliding_window)
        if self.dual_chunk_len is not None and wanted > self.dual_chunk_len:
            message = f"dual_chunk_attention_config is not implemented for {wanted} positions"
            message += f"; --max-model-len {self.dual_chunk_len} would serve its first chunk"
            raise ModelUnsupported(message, option="dual_chunk_attention_config", value=self.dual_chunk_len)

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts; the MTP layer (index num_layers) has them if the model has any."""
        return self.num_experts > 0 if layer == self.num_layers else layer in self.sparse_layers

    @property
    def query_dim(self) -> int:
        """Number of columns of a query head."""
        return self.head_dim if self.latent is None else self.latent.query_dim

    @property
    def value_dim(self) -> int:
        """Number of columns of a query head's output."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def shared_expert(self) -> str:
        """The part of a sparse layer's names that stands for the shared expert."""
        return f"{self.sparse_block}.shared_expert{'' if self.sigmoid_routing is None else 's'}"

    def kv_layer(self, dtype: str) -> LayerLayout:
        """What an attention layer keeps of a sequence."""
        if self.latent is not None:
            return self.latent.kv_layer(dtype)
        return attention_layer(self.num_kv_heads, self.head_dim, dtype)

    def kv_layers(self, num_layers: int, kv_dtype: str, dtype: str) -> tuple[LayerLayout, ...]:
        """What the pool layers of the first model layers keep of a sequence.

        Args:
            num_layers: number of model layers; the MTP layer follows the trunk's.
            kv_dtype: of what attention layers keep.
            dtype: the model's.
        """
        attention = (self.kv_layer(kv_dtype),)
        state = () if self.delta_net is None else self.delta_net.pool_layers(dtype)
        kept = (state if layer in self.delta_layers else attention for layer in range(num_layers))
        layers = tuple(layout for layouts in kept for layout in layouts)
        limits = (layout.max_drafts for layout in layers)
        assert all(most is None or most >= MAX_DRAFTS for most in limits), "a ring is too short for a step's drafts"
        return layers

    def pool_layer(self, layer: int) -> int:
        """The first pool layer of a model layer; the MTP layer's follows the trunk's."""
        return layer + (POOL_LAYERS - 1) * sum(index < layer for index in self.delta_layers)

    def expert_names(self, layer_prefix: str, expert: int) -> tuple[str, str, str]:
        """Weight names of an expert: its gate, up and down projections."""
        prefix = f"{layer_prefix}.{self.sparse_block}.experts.{expert}"
        gate, up, down = (f"{prefix}.{part}.weight" for part in self.expert_parts)
        return gate, up, down


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
    except (ValueError, RecursionError) as error:
        raise ModelFileDamaged(f"{file} is not JSON: {error}", path=str(file)) from error
    if not isinstance(values, dict):
        raise ModelFileDamaged(f"{file} holds no mapping", path=str(file))
    return values


def text_values(values: dict[str, Any]) -> dict[str, Any]:
    """The values about the text model; a multimodal model has them in `text_config`."""
    family, text = _family_of(values), values.get("text_config")
    if family is None:
        return values
    if family.is_multimodal and isinstance(text, dict):
        values = {**values, **text, **{key: values[key] for key in _OF_THE_WHOLE if key in values}}
    if not family.has_mrope:
        return values
    ropes = {key: rope for key in ("rope_parameters", "rope_scaling") if isinstance(rope := values.get(key), dict)}
    without = {key: {name: rope[name] for name in rope if name not in _SECTIONS} for key, rope in ropes.items()}
    return {**values, **without}


def num_mtp_layers(values: dict[str, Any]) -> int:
    """Number of MTP layers that config.json names, or that its family has if it names none.

    Raises:
        ValueError: the value is no number.
    """
    values = text_values(values)
    family = _family_of(values)
    values = values if family is None else {**family.absent, **values}
    return int(values.get("mtp_num_hidden_layers") or values.get("num_nextn_predict_layers") or 0)


def _family_of(values: dict[str, Any]) -> _Family | None:
    found = values.get("architectures")
    return _FAMILIES.get(found[0]) if isinstance(found, list) and found and isinstance(found[0], str) else None


def _refuse_unsupported(values: dict[str, Any], path: Path) -> None:
    architectures = values.get("architectures") or []
    if architectures not in [[name] for name in _FAMILIES]:
        known = ", ".join(_FAMILIES)
        message = f"{path} is of architecture {architectures or 'unknown'}; this version serves {known}"
        raise ModelUnsupported(message, option="architectures", value=architectures)
    family = _FAMILIES[architectures[0]]
    rotaries = [where.get("partial_rotary_factor") for where in (values, rope_parameters(values))]
    kinds = values.get("layer_types") or []
    refused = {
        "use_sliding_window": bool(values.get("use_sliding_window")),
        "attention_bias": bool(values.get("attention_bias")) and family.bias_key != "attention_bias",
        "mlp_bias": bool(values.get("mlp_bias")),
        "partial_rotary_factor": family.turns_in_part is None and any(rotary not in (None, 1) for rotary in rotaries),
        "hidden_act": values.get("hidden_act", "silu") != "silu",
        "layer_types": not family.has_delta_nets
        and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)),
        "attn_output_gate": family.has_output_gate and not values.get("attn_output_gate", True),
        "mtp_use_dedicated_embeddings": bool(values.get("mtp_use_dedicated_embeddings")),
        "is_causal": not values.get("is_causal", True),
        "attention_chunk_size": values.get("attention_chunk_size") is not None,
    }
    nothing_said = _OF_OTHERS | (_OF_DEEPSEEK if family.is_deepseek else {})
    refused |= {option: values.get(option) not in (None, nothing) for option, nothing in nothing_said.items()}
    for option, is_refused in refused.items():
        if is_refused:
            value = values.get(option)
            message = f"{path / 'config.json'}: {option} = {value!r} is not implemented"
            raise ModelUnsupported(message, option=option, value=value)


def _fields(values: dict[str, Any]) -> dict[str, Any]:
    """Fields of ModelConfig from config.json. Raises KeyError for a missing key."""
    architecture = values["architectures"][0]
    family = _FAMILIES[architecture]
    values = {**family.absent, **values}
    num_layers = _size(values, "num_hidden_layers", limit=_MAX_LAYERS)
    num_heads = _size(values, "num_attention_heads", limit=_MAX_HEADS)
    hidden_size = _size(values, "hidden_size")
    latent = read_latent_sizes(values, num_heads) if family.is_latent else None
    default = num_heads if "num_key_value_heads" in values else None  # for null
    num_kv_heads = _size(values, "num_key_value_heads", limit=_MAX_HEADS, default=default) if latent is None else 1
    if num_heads % num_kv_heads:
        raise ValueError(f"num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}")
    head_dim = latent.row_len if latent else _size(values, "head_dim", default=hidden_size // num_heads)
    return {
        "architecture": architecture,
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": _size(values, "vocab_size", limit=_MAX_VOCAB_SIZE),
        "max_model_len": _max_model_len(values),
        "rope_theta": _positive(values | rope_parameters(values), "rope_theta"),
        "rope": read_scaling(values),
        "has_head_norms": family.has_head_norms and bool(values.get("use_qk_norm", True)),
        "has_qkv_bias": family.has_qkv_bias and bool(values.get(family.bias_key, True)),
        "sliding_window": _size(values, "sliding_window") if family.slides and values.get("sliding_window") else None,
        "dual_chunk_len": _dual_chunk_len(values),
        "rms_norm_eps": _positive(values, "rms_norm_eps"),
        "tie_word_embeddings": bool(values.get("tie_word_embeddings", False)),
        "intermediate_size": _size(values, "intermediate_size"),
        **_expert_fields(values, family, num_layers),
        "draft_vocab_size": _draft_vocab_size(values),
        "d2t_form": None if values.get("d2t_form") is None else str(values["d2t_form"]),
        "num_mtp_layers": (num_mtp := num_mtp_layers(values)),
        "mtp_names": MTPNames.behind_trunk(num_layers, max(1, num_mtp)) if family.is_deepseek else MTPNames(),
        "rotary_dim": _rotary_dim(values, head_dim, family) if latent is None else latent.rope_dim,
        "latent": latent,
        "has_plus_one_norms": family.has_plus_one_norms,
        "has_output_gate": family.has_output_gate,
        "has_published_names": family.has_published_names,
        **_delta_fields(values, family, num_layers),
    }


def _max_model_len(values: dict[str, Any]) -> int:
    own, stretched = _size(values, "max_position_embeddings", limit=_MAX_POSITIONS), stretched_len(values)
    if stretched > _MAX_POSITIONS:
        message = f"config.json: YaRN stretches positions to {stretched}; this version serves {_MAX_POSITIONS}"
        raise ModelUnsupported(message, option="rope_type", value=stretched)
    return max(own, stretched)


def _delta_fields(values: dict[str, Any], family: _Family, num_layers: int) -> dict[str, Any]:
    layers = read_delta_layers(values, num_layers) if family.has_delta_nets else frozenset()
    return {
        "delta_net": read_delta_sizes(values) if layers else None,
        "delta_layers": layers,
        "has_interleaved_delta_net": family.is_interleaved,
    }


def _dual_chunk_len(values: dict[str, Any]) -> int | None:
    """Length of the first chunk of `dual_chunk_attention_config`.

    Absent sizes have the defaults of vLLM, whose implementation the model's makers name.
    """
    chunks = values.get("dual_chunk_attention_config")
    if not chunks:
        return None
    if not isinstance(chunks, dict):
        raise ValueError(f"dual_chunk_attention_config is {chunks!r}")
    chunk_size = _size(chunks, "chunk_size", limit=_MAX_POSITIONS, default=8192)
    return chunk_size - _size(chunks, "local_size", minimum=0, limit=chunk_size - 1, default=1024)


def _rotary_dim(values: dict[str, Any], head_dim: int, family: _Family) -> int:
    """Number of columns of a head that are rotated."""
    if family.turns_in_part is None:
        return head_dim
    found = (where.get("partial_rotary_factor") for where in (rope_parameters(values), values))
    factor = float(next((one for one in found if one is not None), family.turns_in_part))
    dim = int(head_dim * factor) if math.isfinite(factor) else 0
    if not 0 < dim <= head_dim or dim % 2:
        message = f"config.json: partial_rotary_factor = {factor} turns {dim} of {head_dim} columns"
        raise ModelUnsupported(message, option="partial_rotary_factor", value=factor)
    return dim


def _expert_fields(values: dict[str, Any], family: _Family, num_layers: int) -> dict[str, Any]:
    num_experts = _num_experts(values) if family.is_moe else 0
    dense_layers = values.get("mlp_only_layers") or []
    sparse_step = _size(values, "decoder_sparse_step", default=1)
    if family.is_deepseek:
        dense_layers = range(_size(values, "first_k_dense_replace", minimum=0))
    sparse = [i for i in range(num_layers) if num_experts and i not in dense_layers and (i + 1) % sparse_step == 0]
    num_chosen = _size(values, "num_experts_per_tok", limit=max(1, num_experts)) if family.is_moe else 0
    shared_size = _size(values, "shared_expert_intermediate_size") if family.has_shared_expert else 0
    if family.is_deepseek:
        shared_size = _size(values, "n_shared_experts", minimum=0) * _size(values, family.expert_size)
    return {
        "num_experts": num_experts,
        "num_experts_per_token": num_chosen,
        "moe_intermediate_size": _size(values, family.expert_size) if family.is_moe else 0,
        "shared_expert_size": shared_size,
        "sigmoid_routing": _sigmoid_routing(values, num_experts, num_chosen) if family.is_deepseek else None,
        "renormalise_experts": family.renormalises or bool(values.get("norm_topk_prob", False)),
        "sparse_layers": frozenset(sparse),
        "sparse_block": family.sparse_block,
        "expert_parts": family.expert_parts,
    }


def _sigmoid_routing(values: dict[str, Any], num_experts: int, num_chosen: int) -> SigmoidRouting:
    num_groups = _size(values, "n_group", limit=max(1, num_experts))
    found = SigmoidRouting(
        num_groups=num_groups,
        num_kept_groups=_size(values, "topk_group", limit=num_groups),
        scaling=_positive(values, "routed_scaling_factor"),
    )
    group_len = num_experts // num_groups
    if num_experts % num_groups or (num_groups > 1 and group_len < 2):
        message = f"config.json: n_group = {num_groups} is no division of {num_experts} experts into groups of some"
        raise ModelUnsupported(message, option="n_group", value=num_groups)
    if num_chosen > found.num_kept_groups * group_len:
        message = (
            f"config.json: topk_group = {found.num_kept_groups} keeps less than the {num_chosen} experts of a token"
        )
        raise ModelUnsupported(message, option="topk_group", value=found.num_kept_groups)
    return found


def _draft_vocab_size(values: dict[str, Any]) -> int | None:
    if values.get("draft_vocab_size") is None:
        return None
    return _size(values, "draft_vocab_size", limit=int(values["vocab_size"]))


def _num_experts(values: dict[str, Any]) -> int:
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    key = next((key for key in keys if values.get(key) is not None), keys[0])
    if values.get(key) is None:
        raise KeyError("num_experts")
    return _size(values, key, minimum=0, limit=_MAX_EXPERTS)


def _size(
    values: dict[str, Any], key: str, *, minimum: int = 1, limit: int = _MAX_SIZE, default: int | None = None
) -> int:
    """A size by its key, checked against limits before anything is allocated or counted by it."""
    value = values.get(key)
    size = int(values[key] if default is None else default) if value is None else int(value)
    if not minimum <= size <= limit:
        message = f"config.json: {key} = {size}; this version serves {minimum} to {limit}"
        raise ModelUnsupported(message, option=key, value=size)
    return size


def _positive(values: dict[str, Any], key: str) -> float:
    value = float(values[key])
    if not (math.isfinite(value) and value > 0):
        raise ModelUnsupported(f"config.json: {key} = {value} is not positive and finite", option=key, value=str(value))
    return value
