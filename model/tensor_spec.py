"""Lists the tensors of an architecture in one table: name, shape, each rank's part, and how to generate it at random.

Also raises the errors for a checkpoint that does not hold them. Reads no file itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from baton.core.errors import ModelTensorMisshapen, ModelTensorMissing, ModelTensorUnexpected
from baton.kernels.moe.held_experts import HeldExperts
from baton.model.checkpoint.fp8_scheme import Fp8Scheme
from baton.model.checkpoint.fp8_tensors import NO_FLOAT8, Fp8Tensors, match_scales
from baton.model.checkpoint.weights import Cut, StoredTensor
from baton.model.config import ModelConfig
from baton.model.draft_names import D2T, DRAFT_HEAD, T2D, MTPNames

Shape = tuple[int, ...]
# Scales of an attention layer, read only for float8 KV. ModelOpt writes them beside the projections, Quark and older
# llm-compressors as scales of the projections' outputs, AutoFP8 one for both.
KV_SCALES = (
    ("k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale"),
    ("v_scale", "v_proj.v_scale", "v_proj.output_scale", "kv_scale"),
)
# Scales of queries and of attention probabilities, which are not quantized: not used.
_OTHER_SCALES = ("q_scale", "q_proj.q_scale", "q_proj.output_scale", "prob_output_scale")
_NUM_NAMED = 5  # tensors named in an error's message; its fields have all

# Spreads of random weights, see `model.checkpoint.random_weights`.
_NORM_SPREAD = 0.1
_BIAS_SPREAD = 0.1  # a larger one would shift every token alike
_HEAD_NORM_MEAN = 1.5  # of queries and keys: makes attention neither uniform nor fixed on one token
LOGIT_GAIN = 3.0
_ROUTER_GAIN = 2.0  # makes routers neither undecided nor always choose the same experts
_ROUTER_BIAS_SPREAD = 0.05  # small beside sigmoids: changes the choice of experts for some tokens
_DECAY_MEANS, _DECAY_SPREAD = (-1.0, -2.0), 1.0  # A_log, dt_bias: heads that forget at once or after hundreds
_ADDED_GAIN = 3.0  # layer outputs outweigh a token's own embedding, which a tied lm_head would repeat for ever


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One weight.

    Attributes:
        shape: of the whole weight.
        cut_dim: the dimension that is cut over ranks; None: each rank holds all of it.
        group_len: number of indices of that dimension that stay together, such as a head's.
        mean: of the random numbers in its place.
        spread: their standard deviation.
        expert: for a routed expert's weight, the number of that expert, and how many there are; else None. Uncut, it is
            on the ranks that hold the expert: one rank, unless there are redundant slots.
        num_redundant: for an expert's weight, the number of slots its layer has beyond one per expert
            (`kernels.moe.expert_map`).
    """

    shape: Shape
    cut_dim: int | None = None
    group_len: int = 1
    mean: float = 0.0
    spread: float = 0.0
    expert: tuple[int, int] | None = None
    num_redundant: int = 0

    def cut(self, rank: int, size: int) -> Cut | None:
        """The part of one of `size` ranks; None for all of it.

        Ranks share a group of indices if there are fewer groups than ranks.
        """
        if self.cut_dim is None or size == 1:
            return None
        num_groups = self.shape[self.cut_dim] // self.group_len
        if num_groups < size:
            return Cut(self.cut_dim, rank * num_groups // size * self.group_len, self.group_len)
        count = num_groups // size * self.group_len
        return Cut(self.cut_dim, rank * count, count)

    def is_held(self, rank: int, size: int) -> bool:
        """Whether one of `size` ranks holds any part of it."""
        if self.expert is None or self.cut_dim is not None:
            return True
        number, num_experts = self.expert
        return number in HeldExperts.of_rank(num_experts, rank, size, self.num_redundant).numbers

    def part_shape(self, rank: int, size: int) -> Shape:
        """The shape of a rank's part."""
        cut = self.cut(rank, size)
        return self.shape if cut is None else (*self.shape[: cut.dim], cut.count, *self.shape[cut.dim + 1 :])


@dataclass(frozen=True)
class TensorSpec:
    """Weights to load, tables of ids to load, and optional tensors.

    Attributes:
        weights: by name.
        tables: shapes of integer tables, by name.
        optional: shapes of tensors that may be stored but are not needed, by name.
        mtp: names of an MTP head, whether or not it is included.
    """

    weights: dict[str, WeightSpec]
    tables: dict[str, Shape]
    optional: dict[str, Shape]
    mtp: MTPNames = field(default_factory=MTPNames)

    @cached_property
    def required(self) -> dict[str, Shape]:
        """Shapes of the weights."""
        return {name: weight.shape for name, weight in self.weights.items()}


def tensor_spec(
    config: ModelConfig,
    *,
    with_mtp: bool,
    expert_parallel: bool = False,
    num_redundant_experts: int | None = None,
    dp_attention: bool = False,
) -> TensorSpec:
    """What the architecture needs, with or without its MTP head.

    With `expert_parallel` ranks hold different experts, else a part of each. With `dp_attention` each rank has all
    heads of attention over latents, else ranks share them.
    """
    hidden = config.hidden_size
    vocab = matrix(config.vocab_size, hidden, LOGIT_GAIN)
    shift = _norm_shift(config)
    weights = {"model.embed_tokens.weight": vocab, "model.norm.weight": norm(hidden, 1.0 - shift)}
    optional: dict[str, Shape] = {}
    if config.tie_word_embeddings:
        optional["lm_head.weight"] = vocab.shape
    else:
        weights["lm_head.weight"] = vocab
    for layer in range(config.num_layers):
        weights |= layer_weights(config, f"model.layers.{layer}", layer)
        optional |= _scales(f"model.layers.{layer}")
    tables: dict[str, Shape] = {}
    mtp = config.mtp_names
    if with_mtp:
        norms = (mtp.embedding_norm, mtp.hidden_norm, mtp.norm)
        weights |= {f"{name}.weight": norm(hidden, 1.0 - shift) for name in norms}
        weights[mtp.join] = matrix(hidden, 2 * hidden)
        weights |= layer_weights(config, mtp.layer, config.num_layers)
        optional |= _scales(mtp.layer) | dict.fromkeys(mtp.copies, vocab.shape)
        if config.draft_vocab_size is not None:
            weights[DRAFT_HEAD] = matrix(config.draft_vocab_size, hidden, LOGIT_GAIN)
            tables[D2T] = (config.draft_vocab_size,)
    if expert_parallel:
        more = num_redundant_experts or 0
        experts = {name: one for name, one in weights.items() if one.expert is not None}
        weights |= {name: replace(one, cut_dim=None, num_redundant=more) for name, one in experts.items()}
    if dp_attention:
        whole = {name: one for name, one in weights.items() if ".self_attn." in name}
        weights |= {name: replace(one, cut_dim=None) for name, one in whole.items()}
    return TensorSpec(weights, tables, optional, mtp)


def layer_weights(
    config: ModelConfig, prefix: str, layer: int, *, input_len: int | None = None
) -> dict[str, WeightSpec]:
    """Weights of a decoder layer; its attention reads rows of `input_len`, or of the hidden size if None."""
    hidden, head = config.hidden_size, config.head_dim
    queries, keys = config.num_heads * head, config.num_kv_heads * head
    shift = _norm_shift(config)
    weights = {f"{prefix}.{name}_layernorm.weight": norm(hidden, 1.0 - shift) for name in ("input", "post_attention")}
    if layer in config.delta_layers:
        return weights | _delta_net(config, f"{prefix}.linear_attn") | _mlp_weights(config, prefix, layer)
    if config.latent is not None:
        return weights | _latent_attention(config, f"{prefix}.self_attn") | _mlp_weights(config, prefix, layer)
    for name, rows in (("q", queries), ("k", keys), ("v", keys)):
        num_each = 2 if name == "q" and config.has_output_gate else 1  # a query head, and its gate
        weights[f"{prefix}.self_attn.{name}_proj.weight"] = matrix(
            num_each * rows, input_len or hidden, cut_dim=0, group_len=num_each * head
        )
        if config.has_qkv_bias:
            bias = WeightSpec((rows,), cut_dim=0, group_len=head, spread=_BIAS_SPREAD)
            weights[f"{prefix}.self_attn.{name}_proj.bias"] = bias
    weights[f"{prefix}.self_attn.o_proj.weight"] = matrix(hidden, queries, _ADDED_GAIN, cut_dim=1, group_len=head)
    if config.has_head_norms:
        weights |= {f"{prefix}.self_attn.{name}_norm.weight": norm(head, _HEAD_NORM_MEAN - shift) for name in "qk"}
    return weights | _mlp_weights(config, prefix, layer)


def _mlp_weights(config: ModelConfig, prefix: str, layer: int) -> dict[str, WeightSpec]:
    """Weights of a layer's MLP, or of its experts."""
    hidden = config.hidden_size
    if not config.is_sparse(layer):
        return _mlp(mlp_names(f"{prefix}.mlp"), hidden, config.intermediate_size)
    block = f"{prefix}.{config.sparse_block}"
    weights = {f"{block}.gate.weight": matrix(config.num_experts, hidden, _ROUTER_GAIN)}
    for expert in range(config.num_experts):
        parts = _mlp(config.expert_names(prefix, expert), hidden, config.moe_intermediate_size)
        weights |= {name: replace(part, expert=(expert, config.num_experts)) for name, part in parts.items()}
    if config.sigmoid_routing is not None:
        weights[router_bias(block)] = WeightSpec((config.num_experts,), spread=_ROUTER_BIAS_SPREAD)
    if config.shared_expert_size:
        shared = f"{prefix}.{config.shared_expert}"
        weights |= _mlp(mlp_names(shared), hidden, config.shared_expert_size)
        if config.sigmoid_routing is None:
            weights[f"{shared}_gate.weight"] = matrix(1, hidden)
    return weights


def router_bias(block: str) -> str:
    """Name of the bias that is added to the sigmoids when experts are selected by them."""
    return f"{block}.gate.e_score_correction_bias"


def _latent_attention(config: ModelConfig, prefix: str) -> dict[str, WeightSpec]:
    """Weights of latent attention: those that make latents are whole on every rank, those that make heads are cut."""
    sizes, hidden = config.latent, config.hidden_size
    assert sizes is not None

    def of_heads(group_len: int, columns: int) -> WeightSpec:
        return matrix(config.num_heads * group_len, columns, cut_dim=0, group_len=group_len)

    down, up, out = latent_linears(config, prefix)
    weights = {down[1]: matrix(sizes.row_len, hidden)}
    if sizes.query_rank:
        weights |= {down[0]: matrix(sizes.query_rank, hidden), up[0]: of_heads(sizes.query_dim, sizes.query_rank)}
        weights[f"{prefix}.q_a_layernorm.weight"] = norm(sizes.query_rank, _HEAD_NORM_MEAN)
    else:
        weights[down[0]] = of_heads(sizes.query_dim, hidden)
    weights[f"{prefix}.kv_a_layernorm.weight"] = norm(sizes.latent_dim, _HEAD_NORM_MEAN)
    weights[f"{prefix}.kv_b_proj.weight"] = of_heads(sizes.nope_dim + sizes.value_dim, sizes.latent_dim)
    values = config.num_heads * sizes.value_dim
    weights[out[0]] = matrix(hidden, values, _ADDED_GAIN, cut_dim=1, group_len=sizes.value_dim)
    return weights


def latent_linears(config: ModelConfig, prefix: str) -> tuple[tuple[str, str], tuple[str, ...], tuple[str]]:
    """GEMM weights of latent attention: for hidden states, for the queries' latent if there is one, and for outputs.

    Excludes the one that makes keys and values from latents, which is multiplied head by head.
    """
    assert config.latent is not None
    query = "q_a_proj" if config.latent.query_rank else "q_proj"
    down = (f"{prefix}.{query}.weight", f"{prefix}.kv_a_proj_with_mqa.weight")
    up = (f"{prefix}.q_b_proj.weight",) if config.latent.query_rank else ()
    return down, up, (f"{prefix}.o_proj.weight",)


def _delta_net(config: ModelConfig, prefix: str) -> dict[str, WeightSpec]:
    """Weights of a gated delta net, cut into key heads; `checkpoint.published_names` splits multi-range tensors."""
    sizes, hidden = config.delta_net, config.hidden_size
    assert sizes is not None
    groups = {"q": sizes.key_dim, "k": sizes.key_dim, "v": sizes.values_len}

    def by_key_head(group_len: int) -> WeightSpec:
        return matrix(sizes.num_key_heads * group_len, hidden, cut_dim=0, group_len=group_len)

    def of_value_heads(mean: float) -> WeightSpec:
        return WeightSpec(
            (sizes.num_value_heads,), cut_dim=0, group_len=sizes.num_values, mean=mean, spread=_DECAY_SPREAD
        )

    if config.has_interleaved_delta_net:
        weights = {
            f"{prefix}.in_proj_qkvz.weight": by_key_head(2 * (sizes.key_dim + sizes.values_len)),
            f"{prefix}.in_proj_ba.weight": by_key_head(2 * sizes.num_values),
        }
    else:
        weights = {f"{prefix}.in_proj_qkv[{part}].weight": by_key_head(length) for part, length in groups.items()}
        weights[f"{prefix}.in_proj_z.weight"] = by_key_head(sizes.values_len)
        weights |= {f"{prefix}.in_proj_{part}.weight": by_key_head(sizes.num_values) for part in "ba"}
    for part, length in groups.items():
        shape = (sizes.num_key_heads * length, 1, sizes.num_taps)
        spread = sizes.num_taps**-0.5
        weights[f"{prefix}.conv1d[{part}].weight"] = WeightSpec(shape, cut_dim=0, group_len=length, spread=spread)
    weights[f"{prefix}.A_log"], weights[f"{prefix}.dt_bias"] = map(of_value_heads, _DECAY_MEANS)
    weights[f"{prefix}.norm.weight"] = norm(sizes.value_dim)
    values = sizes.num_key_heads * sizes.values_len
    weights[f"{prefix}.out_proj.weight"] = matrix(hidden, values, _ADDED_GAIN, cut_dim=1, group_len=sizes.values_len)
    return weights


def delta_linears(config: ModelConfig, prefix: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Weights of a gated delta net's two GEMMs: for its inputs, without their gates, and for its outputs."""
    if config.has_interleaved_delta_net:
        names: tuple[str, ...] = (f"{prefix}.in_proj_qkvz.weight",)
    else:
        names = (*(f"{prefix}.in_proj_qkv[{part}].weight" for part in "qkv"), f"{prefix}.in_proj_z.weight")
    return names, (f"{prefix}.out_proj.weight",)


def mixer_linears(config: ModelConfig, layer: int, prefix: str) -> tuple[tuple[str, ...], ...]:
    """Weights of each GEMM of a layer's attention, or of what takes its place."""
    if layer in config.delta_layers:
        return delta_linears(config, f"{prefix}.linear_attn")
    if config.latent is not None:
        return tuple(names for names in latent_linears(config, f"{prefix}.self_attn") if names)
    queries = tuple(f"{prefix}.self_attn.{part}_proj.weight" for part in "qkv")
    return queries, (f"{prefix}.self_attn.o_proj.weight",)


def _norm_shift(config: ModelConfig) -> float:
    """The offset that is added to the weights of norms."""
    return 1.0 if config.has_plus_one_norms else 0.0


def mlp_names(prefix: str) -> tuple[str, str, str]:
    """Weight names of a SwiGLU: its gate, up and down projections."""
    return f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight", f"{prefix}.down_proj.weight"


def _mlp(names: tuple[str, str, str], hidden: int, inner: int) -> dict[str, WeightSpec]:
    gate, up, down = names
    return {
        gate: matrix(inner, hidden, cut_dim=0),
        up: matrix(inner, hidden, cut_dim=0),
        down: matrix(hidden, inner, _ADDED_GAIN, cut_dim=1),
    }


def matrix(rows: int, columns: int, gain: float = 1.0, *, cut_dim: int | None = None, group_len: int = 1) -> WeightSpec:
    """A weight whose random values keep the scale of their input, up to the gain."""
    return WeightSpec((rows, columns), cut_dim, group_len, spread=gain * columns**-0.5)


def norm(size: int, mean: float = 1.0) -> WeightSpec:
    """The weight of a norm."""
    return WeightSpec((size,), mean=mean, spread=_NORM_SPREAD)


def _scales(prefix: str) -> dict[str, Shape]:
    """Scales of KV, one number each, stored as a scalar or as a list of one."""
    return {f"{prefix}.self_attn.{name}": () for names in (*KV_SCALES, _OTHER_SCALES) for name in names}


def check_tensors(spec: TensorSpec, stored: Mapping[str, StoredTensor], scheme: Fp8Scheme | None = None) -> Fp8Tensors:
    """Compare a checkpoint's headers with the spec; returns its float8 weights, if it has a `scheme` for them.

    Raises:
        ModelTensorMissing: tensors or scales are missing; if only the MTP head's are, the message says how to serve
            without it.
        ModelTensorUnexpected: tensors the architecture has no place for (except those of an unused MTP head).
        ModelTensorMisshapen: a shape differs, or a dtype is not a plain float of 16 to 64 bits nor float8 with a scale.
        ModelUnsupported: there is a scheme but no float8 weight.
    """
    float8 = NO_FLOAT8 if scheme is None else match_scales(scheme, [*spec.weights, *spec.optional], stored)
    missing = sorted({*spec.weights, *spec.tables} - set(stored))
    if missing:
        message = f"the checkpoint lacks {_named(missing)}"
        if all(name.startswith(spec.mtp.prefixes) for name in missing):
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
    has_mtp = spec.mtp.join in spec.weights
    if name == T2D:  # follows from d2t
        return DRAFT_HEAD in spec.weights or not has_mtp
    return name.startswith(spec.mtp.prefixes) and not has_mtp


def _named(names: list[str]) -> str:
    shown = ", ".join(names[:_NUM_NAMED])
    return shown if len(names) <= _NUM_NAMED else f"{shown} and {len(names) - _NUM_NAMED} more"
