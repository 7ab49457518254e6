"""The tiny model with latent attention in training form: DeepSeek-V3's layers and routing, with its MTP head.

Heads are computed from latents as a model is trained; serving keeps the latents (`model/latent_attention.py`). Sources:
DeepSeek-V2 (2024), section 2.1; DeepSeek-V3 (2024), sections 2.1.2 and 2.2; transformers `DeepseekV3ForCausalLM`.
"""

from dataclasses import dataclass

import torch
from tiny_hybrid import Dense  # type: ignore[import-not-found]
from tiny_model import Keys, Norm, Rope, Tiny, TinyExperts, TinyShape, linear  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch.nn import functional

BIAS_STEP = 1e-3  # of a router's bias, in each step towards even loads


@dataclass(frozen=True)
class MlaShape(TinyShape):
    """Every size of the model."""

    layers: int = 5
    experts: int = 16
    expert_width: int = 48
    dense_layers: int = 1
    dense_width: int = 512
    shared_experts: int = 1
    groups: int = 4
    kept_groups: int = 2
    scaling: float = 2.0
    query_rank: int = 96
    latent_dim: int = 64
    nope_dim: int = 32
    rope_dim: int = 16
    value_dim: int = 32

    @property
    def query_dim(self) -> int:
        """Columns of a query head."""
        return self.nope_dim + self.rope_dim

    def config(self, end: int) -> dict[str, object]:
        """Return the Hugging Face configuration of this shape."""
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.dense_width,
            "num_hidden_layers": self.layers,
            "num_nextn_predict_layers": 1,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "q_lora_rank": self.query_rank,
            "kv_lora_rank": self.latent_dim,
            "qk_nope_head_dim": self.nope_dim,
            "qk_rope_head_dim": self.rope_dim,
            "v_head_dim": self.value_dim,
            "rope_interleave": True,
            "n_routed_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.expert_width,
            "n_shared_experts": self.shared_experts,
            "first_k_dense_replace": self.dense_layers,
            "moe_layer_freq": 1,
            "n_group": self.groups,
            "topk_group": self.kept_groups,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "routed_scaling_factor": self.scaling,
            "hidden_act": "silu",
            "rms_norm_eps": self.eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "max_position_embeddings": self.max_positions,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "bos_token_id": end,
            "eos_token_id": end,
            "pad_token_id": end,
            "use_cache": True,
            "torch_dtype": "bfloat16",
        }


def rotate_pairs(x: Tensor, rope: Rope) -> Tensor:
    """Rotate neighbouring columns of [batch, time, head, dim] together."""
    cosine, sine = rope[0][..., None, :], rope[1][..., None, :]
    left, right = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([left * cosine - right * sine, right * cosine + left * sine], -1)
    return turned.flatten(-2).to(x.dtype)


class LatentAttention(nn.Module):
    """Multi-head attention whose queries, and whose keys and values, are made of a latent each."""

    def __init__(self, shape: MlaShape) -> None:
        super().__init__()
        self.shape = shape
        self.q_a_proj = nn.Linear(shape.hidden, shape.query_rank, bias=False)
        self.q_a_layernorm = Norm(shape.query_rank, shape.eps)
        self.q_b_proj = nn.Linear(shape.query_rank, shape.heads * shape.query_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(shape.hidden, shape.latent_dim + shape.rope_dim, bias=False)
        self.kv_a_layernorm = Norm(shape.latent_dim, shape.eps)
        self.kv_b_proj = nn.Linear(shape.latent_dim, shape.heads * (shape.nope_dim + shape.value_dim), bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.value_dim, shape.hidden, bias=False)

    def project(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values as [batch, head, time, dim]."""
        shape = self.shape
        query = linear(self.q_a_layernorm(linear(x, self.q_a_proj.weight)), self.q_b_proj.weight)
        query_still, query_turned = query.unflatten(-1, (shape.heads, -1)).split([shape.nope_dim, shape.rope_dim], -1)
        latent, turned = linear(x, self.kv_a_proj_with_mqa.weight).split([shape.latent_dim, shape.rope_dim], -1)
        rows = linear(self.kv_a_layernorm(latent), self.kv_b_proj.weight).unflatten(-1, (shape.heads, -1))
        key_still, value = rows.split([shape.nope_dim, shape.value_dim], -1)
        key_turned = rotate_pairs(turned[..., None, :], rope).expand(-1, -1, shape.heads, -1)
        query = torch.cat([query_still, rotate_pairs(query_turned, rope)], -1)
        key = torch.cat([key_still, key_turned], -1)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def attend(self, query: Tensor, keys: Keys, mask: Tensor | None, dropout: float) -> Tensor:
        """Attend causally, or as the mask says; return [batch, time, inner]."""
        key, value = keys
        value = functional.pad(value, (0, key.shape[-1] - value.shape[-1]))  # fused forms want one size
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None
        )
        return mixed[..., : self.shape.value_dim].transpose(1, 2).flatten(2)


class Router(nn.Module):
    """Scores of experts, and the bias that their choice is made with."""

    def __init__(self, shape: MlaShape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.experts, shape.hidden))
        self.e_score_correction_bias: Tensor
        self.register_buffer("e_score_correction_bias", torch.zeros(shape.experts))


class SigmoidMlp(nn.Module):
    """Experts chosen by their sigmoids and a bias, within groups that are kept, beside a shared one."""

    def __init__(self, shape: MlaShape) -> None:
        super().__init__()
        self.shape = shape
        self.gate = Router(shape)
        self.experts = TinyExperts(shape)
        self.shared_experts = Dense(shape.hidden, shape.shared_experts * shape.expert_width)
        self.load: Tensor | None = None  # of the last step

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output of the experts, the balance loss (1 when routing is even) and the experts' loads."""
        shape = self.shape
        odds = functional.linear(x.float(), self.gate.weight.float()).sigmoid()
        choice = odds.detach() + self.gate.e_score_correction_bias
        grouped = choice.unflatten(-1, (shape.groups, -1))
        is_kept = best(grouped.topk(2, -1).values.sum(-1), shape.kept_groups)
        choice = torch.where(is_kept[..., None], grouped, -torch.inf).flatten(-2)
        chosen = best(choice, shape.top_k).float()
        weights = odds * chosen
        mixed = self.experts(x, shape.scaling * weights / weights.sum(-1, keepdim=True))
        load = chosen.flatten(0, 1).mean(0) / shape.top_k
        share = (odds / odds.sum(-1, keepdim=True)).flatten(0, 1).mean(0)
        out = (mixed.float() + self.shared_experts(x).float()).to(x.dtype)
        return out, odds.shape[-1] * (load * share).sum(), load


def best(scores: Tensor, count: int) -> Tensor:
    """Say which scores are among the `count` largest of the last dimension; among equals the lower index wins."""
    order = torch.arange(scores.shape[-1], device=scores.device)
    first = order[:, None] > order
    mine, other = scores[..., :, None], scores[..., None, :]
    return ((other > mine) | ((other == mine) & first)).sum(-1) < count


class MlaBlock(nn.Module):
    """One decoder layer, dense or sparse."""

    def __init__(self, shape: MlaShape, is_dense: bool) -> None:
        super().__init__()
        self.self_attn = LatentAttention(shape)
        self.mlp: Dense | SigmoidMlp = Dense(shape.hidden, shape.dense_width) if is_dense else SigmoidMlp(shape)
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)
        self.dropout = 0.0

    def before(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Return what attention needs."""
        return self.self_attn.project(self.input_layernorm(x), rope)

    def after(self, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Add attention's output and the MLP's; return the output, the balance loss and the loads."""
        drop = self.dropout if self.training else 0.0
        x = x + functional.dropout(linear(mixed, self.self_attn.o_proj.weight), drop)
        normed = self.post_attention_layernorm(x)
        if isinstance(self.mlp, Dense):
            out, balance, load = self.mlp(normed), x.new_zeros(()).float(), x.new_zeros(1).float()
        else:
            out, balance, load = self.mlp(normed)
        return x + functional.dropout(out, drop), balance, load

    def forward(
        self, x: Tensor, rope: Rope, past: Keys | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Keys, Tensor]:
        """Return the output, all keys and values (past ones first), and the balance loss."""
        query, key, value = self.before(x, rope)
        keys = (key, value)
        if past is not None:
            keys = (torch.cat([past[0], key], 2), torch.cat([past[1], value], 2))
        drop = self.dropout if self.training else 0.0
        x, balance, load = self.after(x, self.self_attn.attend(query, keys, mask, drop))
        if isinstance(self.mlp, SigmoidMlp):
            self.mlp.load = load.detach()
        return x, keys, balance


class TinyMla(Tiny):
    """Trunk and MTP head, which is numbered as the layer after the trunk's last."""

    wide = ("e_score_correction_bias",)

    def __init__(self, shape: MlaShape, dtype: torch.dtype) -> None:
        super().__init__(shape, dtype)
        for name, weight in self.named_parameters():
            if name.endswith(("mlp.down_proj.weight", "shared_experts.down_proj.weight")):
                nn.init.zeros_(weight)
            elif name.endswith("kv_a_proj_with_mqa.weight"):
                nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

    def block(self, index: int) -> nn.Module:
        """Return a new decoder layer."""
        return MlaBlock(self.shape, index < self.shape.dense_layers)

    def rope(self, positions: Tensor) -> Rope:
        """Return a cosine and a sine for each pair of columns that turns."""
        steps = torch.arange(0, self.shape.rope_dim, 2, device=positions.device).float()
        rates: Tensor = self.shape.rope_theta ** (-steps / self.shape.rope_dim)
        angles = positions.float()[..., None] * rates
        return angles.cos(), angles.sin()

    def adjust_routers(self, part: nn.Module) -> None:
        """Raise the bias of experts that got less than their share in the last step, and lower the others'."""
        for mlp in part.modules():
            if isinstance(mlp, SigmoidMlp) and mlp.load is not None:
                mlp.gate.e_score_correction_bias += BIAS_STEP * torch.sign(mlp.load.mean() - mlp.load)

    def _names(self) -> dict[str, str]:
        """Return what the head's names begin with, here and as published; the layer's own comes last."""
        layer = f"model.layers.{self.shape.layers}."
        parts = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj"}
        parts["norm"] = "shared_head.norm"
        return {f"mtp.{ours}.": f"{layer}{theirs}." for ours, theirs in parts.items()} | {"mtp.layers.0.": layer}

    def to_published(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Name the head's tensors as a layer's."""
        return renamed(tensors, self._names())

    def from_published(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Name them as a head's again."""
        return renamed(tensors, {theirs: ours for ours, theirs in self._names().items()})


def renamed(tensors: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    """Replace what names begin with; the first that fits counts."""
    made = {}
    for name, tensor in tensors.items():
        old = next((old for old in names if name.startswith(old)), "")
        made[names.get(old, "") + name.removeprefix(old)] = tensor
    return made
