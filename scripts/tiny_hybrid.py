"""The tiny hybrid model in training form: Qwen3.5-MoE's gated delta nets and gated attention, a shared expert, MTP.

A gated delta net is computed in chunks, all at once: inside a chunk by the inverse of a unit triangular matrix, between
chunks by a scan of the states' transitions. Source: Yang et al. 2024 (Gated DeltaNet); transformers
`Qwen3_5MoeGatedDeltaNet`. All of it is in float32.

Legend: B sequences, T positions, N chunks of C, H value heads, K and V sizes of a key head and of a value head.
"""

import functools
import math
from dataclasses import dataclass

import torch
from tiny_model import (  # type: ignore[import-not-found]
    EXPERT_PARTS,
    Keys,
    Mlp,
    Norm,
    Rope,
    Tiny,
    TinyAttention,
    TinyShape,
    linear,
    rotate,
)
from torch import Tensor, nn
from torch.nn import functional

CHUNK = 32  # as long as a key head is wide: what is done inside a chunk and between chunks costs about the same
L2_EPS = 1e-6


@dataclass(frozen=True)
class HybridShape(TinyShape):
    """Every size of the model."""

    layers: int = 4
    expert_width: int = 96
    shared_width: int = 64
    interval: int = 4
    delta_key_heads: int = 4
    delta_value_heads: int = 8
    delta_key_dim: int = 32
    delta_value_dim: int = 32
    taps: int = 4
    turned_share: float = 0.25

    def is_delta(self, index: int) -> bool:
        """Whether a layer is a gated delta net; the MTP head's is not."""
        return index < self.layers and (index + 1) % self.interval != 0

    @property
    def turned(self) -> int:
        """Columns of a head that turn."""
        return int(self.head_dim * self.turned_share)

    def config(self, end: int) -> dict[str, object]:
        """Return the Hugging Face configuration of this shape."""
        kinds = ("full_attention", "linear_attention")
        return {
            "architectures": ["Qwen3_5MoeForCausalLM"],
            "model_type": "qwen3_5_moe_text",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "layer_types": [kinds[self.is_delta(index)] for index in range(self.layers)],
            "full_attention_interval": self.interval,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "attn_output_gate": True,
            "linear_num_key_heads": self.delta_key_heads,
            "linear_num_value_heads": self.delta_value_heads,
            "linear_key_head_dim": self.delta_key_dim,
            "linear_value_head_dim": self.delta_value_dim,
            "linear_conv_kernel_dim": self.taps,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.expert_width,
            "shared_expert_intermediate_size": self.shared_width,
            "hidden_act": "silu",
            "rms_norm_eps": self.eps,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": self.turned_share,
            },
            "max_position_embeddings": self.max_positions,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "router_aux_loss_coef": 0.001,
            "output_router_logits": False,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "bos_token_id": end,
            "eos_token_id": end,
            "pad_token_id": end,
            "use_cache": True,
            "dtype": "bfloat16",
        }


class PlusOneNorm(Norm):
    """RMSNorm that multiplies by 1 + w."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise in float32."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * (1 + self.weight.float())).to(x.dtype)


def turned_in_part(x: Tensor, rope: Rope) -> Tensor:
    """Rotate the first columns, as many as the tables have."""
    turned = rope[0].shape[-1]
    return torch.cat([rotate(x[..., :turned], rope), x[..., turned:]], -1)


class GatedAttention(TinyAttention):
    """Grouped-query attention, turned in part; each query head has a gate for what it attends to."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__(shape)
        self.q_proj = nn.Linear(shape.hidden, 2 * shape.heads * shape.head_dim, bias=False)
        self.q_norm = PlusOneNorm(shape.head_dim, shape.eps)
        self.k_norm = PlusOneNorm(shape.head_dim, shape.eps)

    def project_gated(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys and values as [batch, head, time, dim], and the gate [batch, time, inner]."""

        def heads(layer: nn.Linear, pieces: int = 1) -> Tensor:
            return linear(x, layer.weight).unflatten(-1, (-1, pieces * self.shape.head_dim))

        query, gate = heads(self.q_proj, 2).chunk(2, -1)
        query = turned_in_part(self.q_norm(query), rope)
        key = turned_in_part(self.k_norm(heads(self.k_proj)), rope)
        value = heads(self.v_proj)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), gate.flatten(2)


class SharedMlp(Mlp):
    """Experts beside one that takes every token, weighted by a sigmoid of the token's own."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__(shape)
        self.shared_expert = Dense(shape.hidden, shape.shared_width)
        self.shared_expert_gate = nn.Linear(shape.hidden, 1, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output of the experts and the balance loss."""
        mixed, balance = super().forward(x)
        weight = linear(x, self.shared_expert_gate.weight).float().sigmoid()
        return (mixed.float() + weight * self.shared_expert(x).float()).to(x.dtype), balance


class Dense(nn.Module):
    """A SwiGLU."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        inner = functional.silu(linear(x, self.gate_proj.weight)) * linear(x, self.up_proj.weight)
        return linear(inner, self.down_proj.weight)


def inverse_of_unit_lower(below: Tensor) -> Tensor:
    """Return (I + `below`)^-1 of strictly lower triangular [..., C, C], C a power of two.

    Inverses of diagonal blocks are joined to those of blocks twice as long, which is as stable as substitution; powers
    of `below`, which grow where keys repeat, are never made. No step is recorded: X - X (L - stop(L)) X has the value
    of X and, to first order, its gradient.
    """
    size = below.shape[-1]
    place = torch.arange(size, device=below.device)
    with torch.no_grad():
        inverse = torch.eye(size, device=below.device, dtype=below.dtype).expand_as(below)
        length = 1
        while length < size:
            block = place // length
            joins = (block[:, None] == block + 1) & (block[:, None] % 2 == 1)
            inverse = inverse - inverse @ torch.where(joins, below, 0) @ inverse
            length *= 2
    return inverse - inverse @ (below - below.detach()) @ inverse


def scanned(moves: Tensor, adds: Tensor) -> Tensor:
    """Return S before each step of S <- moves S + adds from zero; [B, N, H, K, K] and [B, N, H, K, V]."""
    width = moves.shape[-1]
    both, shift = torch.cat([moves, adds], -1), 1
    while shift < moves.shape[1]:
        made = both[:, shift:, ..., :width] @ both[:, :-shift]
        made = made + functional.pad(both[:, shift:, ..., width:], (width, 0))
        both, shift = torch.cat([both[:, :shift], made], 1), 2 * shift
    after = both[..., width:]
    return torch.cat([torch.zeros_like(after[:, :1]), after[:, :-1]], 1)


def delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Return what queries read of the states, [B, T, H, V], in float32.

    S_p = e^g S_(p-1) + k u^T with u = beta (v - (e^g S_(p-1))^T k), and o = S_p^T q.

    Args:
        query: [B, T, H, K], normalised and scaled.
        key: likewise, normalised.
        value: [B, T, H, V].
        decay: [B, T, H], g, not above 0.
        beta: [B, T, H].
    """
    span = query.shape[1]
    rest = -span % CHUNK

    def chunks(x: Tensor) -> Tensor:  # [B, N, H, C, ...]; zeros behind the last position change nothing before them
        x = functional.pad(x, (0, 0) * (x.dim() - 2) + (0, rest))
        return x.unflatten(1, (-1, CHUNK)).transpose(2, 3)

    query, key, value, decay, beta = (chunks(x) for x in (query, key, value, decay, beta))
    total = decay.cumsum(-1)
    place = torch.arange(CHUNK, device=query.device)
    is_seen = place[:, None] >= place
    apart = torch.where(is_seen, total[..., :, None] - total[..., None, :], -math.inf).exp()
    met = (key @ key.mT) * apart * beta[..., None]
    inverse = inverse_of_unit_lower(torch.where(place[:, None] > place, met, 0))
    since = total.exp()[..., None]
    own = inverse @ (value * beta[..., None])
    of_state = inverse @ (key * since * beta[..., None])
    left = key * (total[..., -1:] - total).exp()[..., None]
    kept = total[..., -1].exp()[..., None, None] * torch.eye(key.shape[-1], device=key.device)
    state = scanned(kept - left.mT @ of_state, left.mT @ own)
    out = (query * since) @ state + ((query @ key.mT) * apart) @ (own - of_state @ state)
    return out.transpose(2, 3).flatten(1, 2)[:, :span]


class TinyDeltaNet(nn.Module):
    """A gated delta net up to its output projection."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        self.shape = shape
        keys = shape.delta_key_heads * shape.delta_key_dim
        values = shape.delta_value_heads * shape.delta_value_dim
        self.parts = [keys, keys, values]
        self.in_proj_qkv = nn.Linear(shape.hidden, 2 * keys + values, bias=False)
        self.in_proj_z = nn.Linear(shape.hidden, values, bias=False)
        self.in_proj_b = nn.Linear(shape.hidden, shape.delta_value_heads, bias=False)
        self.in_proj_a = nn.Linear(shape.hidden, shape.delta_value_heads, bias=False)
        self.conv1d = nn.Conv1d(2 * keys + values, 2 * keys + values, shape.taps, groups=2 * keys + values, bias=False)
        self.A_log = nn.Parameter(torch.empty(shape.delta_value_heads).uniform_(1, 16).log())
        steps = torch.empty(shape.delta_value_heads).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias = nn.Parameter(steps.expm1().log())  # softplus of it is the step
        self.norm = Norm(shape.delta_value_dim, shape.eps)
        self.out_proj = nn.Linear(values, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, time, values]."""
        shape, span = self.shape, x.shape[1]
        mixed = functional.pad(linear(x, self.in_proj_qkv.weight).float(), (0, 0, shape.taps - 1, 0))
        weight = self.conv1d.weight.float()
        tapped = [mixed[:, tap : tap + span] * weight[:, 0, tap] for tap in range(shape.taps)]
        mixed = functional.silu(functools.reduce(torch.add, tapped))
        query, key, value = mixed.split(self.parts, -1)
        copies = shape.delta_value_heads // shape.delta_key_heads

        def normed(part: Tensor) -> Tensor:
            heads = part.unflatten(-1, (shape.delta_key_heads, -1))
            heads = heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + L2_EPS)
            return heads.repeat_interleave(copies, 2)

        steps = functional.softplus(linear(x, self.in_proj_a.weight).float() + self.dt_bias)
        out = delta_rule(
            normed(query) * shape.delta_key_dim**-0.5,
            normed(key),
            value.unflatten(-1, (shape.delta_value_heads, -1)),
            -self.A_log.exp() * steps,
            linear(x, self.in_proj_b.weight).float().sigmoid(),
        )
        gate = linear(x, self.in_proj_z.weight).float().unflatten(-1, (shape.delta_value_heads, -1))
        return (self.norm(out) * functional.silu(gate)).flatten(2).to(x.dtype)


class HybridBlock(nn.Module):
    """What both kinds of layer have; `before` and `after` what mixes positions are compiled."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        self.mlp = SharedMlp(shape)
        self.input_layernorm = PlusOneNorm(shape.hidden, shape.eps)
        self.post_attention_layernorm = PlusOneNorm(shape.hidden, shape.eps)
        self.dropout = 0.0

    def joined(self, x: Tensor, mixed: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Add the mixer's output, multiplied by its output projection, and the MoE layer."""
        drop = self.dropout if self.training else 0.0
        x = x + functional.dropout(linear(mixed, weight), drop)
        out, balance = self.mlp(self.post_attention_layernorm(x))
        return x + functional.dropout(out, drop), balance


class DeltaBlock(HybridBlock):
    """A layer whose mixer is a gated delta net."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__(shape)
        self.linear_attn = TinyDeltaNet(shape)

    def before(self, x: Tensor) -> Tensor:
        """Return what the output projection takes."""
        mixed: Tensor = self.linear_attn(self.input_layernorm(x))
        return mixed

    def after(self, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer's output and the balance loss."""
        return self.joined(x, mixed, self.linear_attn.out_proj.weight)

    def forward(self, x: Tensor, rope: Rope) -> tuple[Tensor, None, Tensor]:
        """Return the output, no keys, and the balance loss."""
        del rope
        x, balance = self.after(x, self.before(x))
        return x, None, balance


class GatedBlock(HybridBlock):
    """A layer whose mixer is gated attention."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__(shape)
        self.self_attn = GatedAttention(shape)

    def before(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return what attention needs, and the gate."""
        return self.self_attn.project_gated(self.input_layernorm(x), rope)

    def after(self, x: Tensor, mixed: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer's output and the balance loss."""
        gated = (mixed.float() * gate.float().sigmoid()).to(x.dtype)
        return self.joined(x, gated, self.self_attn.o_proj.weight)

    def forward(
        self, x: Tensor, rope: Rope, past: Keys | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Keys, Tensor]:
        """Return the output, all keys and values (past ones first), and the balance loss."""
        query, key, value, gate = self.before(x, rope)
        keys = (key, value)
        if past is not None:
            keys = (torch.cat([past[0], key], 2), torch.cat([past[1], value], 2))
        drop = self.dropout if self.training else 0.0
        x, balance = self.after(x, self.self_attn.attend(query, keys, mask, drop), gate)
        return x, keys, balance


class TinyHybrid(Tiny):
    """Trunk and MTP head; experts are published stacked in the trunk, each by itself in the head."""

    norm = PlusOneNorm
    wide = ("A_log", "dt_bias", "linear_attn.norm.weight")

    def __init__(self, shape: HybridShape, dtype: torch.dtype) -> None:
        super().__init__(shape, dtype)
        for name, weight in self.named_parameters():
            if name.endswith(("out_proj.weight", "shared_expert.down_proj.weight")):
                nn.init.zeros_(weight)
            elif ".in_proj_" in name or name.endswith("conv1d.weight"):
                nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

    def block(self, index: int) -> nn.Module:
        """Return a new decoder layer."""
        return DeltaBlock(self.shape) if self.shape.is_delta(index) else GatedBlock(self.shape)

    def rope(self, positions: Tensor) -> Rope:
        """Return cosines and sines of the columns that turn."""
        steps = torch.arange(0, self.shape.turned, 2, device=positions.device).float()
        rates: Tensor = self.shape.rope_theta ** (-steps / self.shape.turned)
        angles = positions.float()[..., None] * rates
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()

    def to_published(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Stack the trunk's experts: gates above ups in one tensor, downs in another."""
        made = dict(tensors)
        for layer in range(self.shape.layers):
            prefix = f"model.layers.{layer}.mlp.experts"
            gate, up, down = (
                torch.stack([made.pop(f"{prefix}.{expert}.{part}.weight") for expert in range(self.shape.experts)])
                for part in EXPERT_PARTS
            )
            made[f"{prefix}.gate_up_proj"], made[f"{prefix}.down_proj"] = torch.cat([gate, up], 1), down
        return made

    def from_published(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Take the stacked experts apart."""
        made = dict(tensors)
        for layer in range(self.shape.layers):
            prefix = f"model.layers.{layer}.mlp.experts"
            gate, up = made.pop(f"{prefix}.gate_up_proj").chunk(2, 1)
            stacked = dict(zip(EXPERT_PARTS, (gate, up, made.pop(f"{prefix}.down_proj")), strict=True))
            for part, weights in stacked.items():
                made |= {f"{prefix}.{expert}.{part}.weight": weight for expert, weight in enumerate(weights)}
        return made
