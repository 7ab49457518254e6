"""The tiny model in training form: a Qwen3-MoE trunk with a chained MTP head.

Experts are stored stacked and computed densely, as one wide MLP whose hidden units are scaled by
routing weights that are zero outside the top k. At these sizes that beats any dispatch.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

Rope = tuple[Tensor, Tensor]
Keys = tuple[Tensor, Tensor]
EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class TinyShape:
    """Every size of the model."""

    vocab: int = 4096
    hidden: int = 256
    layers: int = 5
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    experts: int = 8
    top_k: int = 4
    expert_width: int = 80
    max_positions: int = 2048
    rope_theta: float = 10000.0
    eps: float = 1e-6

    def config(self, end: int) -> dict[str, object]:
        """Return the Hugging Face configuration of this shape."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.experts * self.expert_width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.expert_width,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "hidden_act": "silu",
            "rms_norm_eps": self.eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "max_position_embeddings": self.max_positions,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "sliding_window": None,
            "router_aux_loss_coef": 0.001,
            "output_router_logits": False,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "mtp_num_hidden_layers": 1,
            "bos_token_id": end,
            "eos_token_id": end,
            "pad_token_id": end,
            "use_cache": True,
            "torch_dtype": "bfloat16",
        }


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Apply a weight kept in a wider type than the activations."""
    return functional.linear(x, weight.to(x.dtype))


class Norm(nn.Module):
    """RMSNorm whose weight multiplies plainly."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise in float32."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight.float()).to(x.dtype)


def rope_tables(shape: TinyShape, positions: Tensor) -> Rope:
    """Return cosines and sines [..., head_dim] for the positions."""
    steps = torch.arange(0, shape.head_dim, 2, device=positions.device).float()
    rates: Tensor = shape.rope_theta ** (-steps / shape.head_dim)
    angles = positions.float()[..., None] * rates
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotate [batch, time, head, dim] in half-split form."""
    cosine, sine = rope[0][..., None, :], rope[1][..., None, :]
    left, right = x.float().chunk(2, -1)
    turned: Tensor = x.float() * cosine + torch.cat([-right, left], -1) * sine
    return turned.to(x.dtype)


class TinyAttention(nn.Module):
    """Grouped-query attention with normalised queries and keys."""

    def __init__(self, shape: TinyShape) -> None:
        super().__init__()
        self.shape = shape
        inner, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, inner, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv, bias=False)
        self.o_proj = nn.Linear(inner, shape.hidden, bias=False)
        self.q_norm = Norm(shape.head_dim, shape.eps)
        self.k_norm = Norm(shape.head_dim, shape.eps)

    def project(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values as [batch, head, time, dim]."""

        def heads(layer: nn.Linear) -> Tensor:
            joined = linear(x, layer.weight)
            return joined.reshape(*joined.shape[:-1], -1, self.shape.head_dim)

        query = rotate(self.q_norm(heads(self.q_proj)), rope)
        key = rotate(self.k_norm(heads(self.k_proj)), rope)
        value = heads(self.v_proj)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def attend(self, query: Tensor, keys: Keys, mask: Tensor | None, dropout: float) -> Tensor:
        """Attend causally, or as the mask says; return [batch, time, inner]."""
        copies = self.shape.heads // self.shape.kv_heads
        key, value = (part.repeat_interleave(copies, 1) for part in keys)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None
        )
        return mixed.transpose(1, 2).flatten(2)


class TinyExperts(nn.Module):
    """All experts' weights, stacked."""

    def __init__(self, shape: TinyShape) -> None:
        super().__init__()
        inward = (shape.experts, shape.expert_width, shape.hidden)
        self.gate_proj = nn.Parameter(torch.randn(inward) * shape.hidden**-0.5)
        self.up_proj = nn.Parameter(torch.randn(inward) * shape.hidden**-0.5)
        self.down_proj = nn.Parameter(torch.zeros(inward[0], inward[2], inward[1]))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """Run every expert on every token and sum by the routing weights."""
        gate = linear(x, self.gate_proj.flatten(0, 1))
        inner = functional.silu(gate) * linear(x, self.up_proj.flatten(0, 1))
        inner = inner.unflatten(-1, (*weights.shape[-1:], -1)) * weights.to(x.dtype)[..., None]
        return linear(inner.flatten(-2), self.down_proj.transpose(0, 1).flatten(1))


class Mlp(nn.Module):
    """Mixture of experts with renormalised top-k routing."""

    def __init__(self, shape: TinyShape) -> None:
        super().__init__()
        self.top_k = shape.top_k
        self.gate = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.experts = TinyExperts(shape)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output of the experts and the balance loss, which is 1 when routing is even."""
        odds = linear(x, self.gate.weight).float().softmax(-1)
        order = torch.arange(odds.shape[-1], device=x.device)
        first = order[:, None] > order  # among equals the lower index wins
        mine, other = odds[..., :, None], odds[..., None, :]
        rank = ((other > mine) | ((other == mine) & first)).sum(-1)
        chosen = (rank < self.top_k).float()
        weights = odds * chosen
        mixed = self.experts(x, weights / weights.sum(-1, keepdim=True))
        load = chosen.flatten(0, 1).mean(0) / self.top_k
        return mixed, odds.shape[-1] * (load * odds.flatten(0, 1).mean(0)).sum()


class TinyBlock(nn.Module):
    """One decoder layer; `compiled` swaps in fused forms of its two pointwise-heavy halves."""

    def __init__(self, shape: TinyShape) -> None:
        super().__init__()
        self.self_attn = TinyAttention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)
        self.dropout = 0.0

    def before(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Return what attention needs."""
        return self.self_attn.project(self.input_layernorm(x), rope)

    def after(self, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """Add attention's output and the MoE layer."""
        drop = self.dropout if self.training else 0.0
        x = x + functional.dropout(linear(mixed, self.self_attn.o_proj.weight), drop)
        out, balance = self.mlp(self.post_attention_layernorm(x))
        return x + functional.dropout(out, drop), balance

    def forward(
        self, x: Tensor, rope: Rope, past: Keys | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Keys, Tensor]:
        """Return the output, all keys and values (past ones first), and the balance loss."""
        query, key, value = self.before(x, rope)
        keys = (key, value)
        if past is not None:
            keys = (torch.cat([past[0], key], 2), torch.cat([past[1], value], 2))
        drop = self.dropout if self.training else 0.0
        x, balance = self.after(x, self.self_attn.attend(query, keys, mask, drop))
        return x, keys, balance


class Trunk(nn.Module):
    """Embedding, decoder layers and the final norm."""

    def __init__(self, shape: Any, block: Callable[[int], nn.Module], norm: type[Norm] = Norm) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(block(index) for index in range(shape.layers))
        self.norm = norm(shape.hidden, shape.eps)


class Head(nn.Module):
    """The MTP head: one decoder layer over (next token, hidden state) pairs."""

    def __init__(self, shape: Any, block: nn.Module, norm: type[Norm] = Norm) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = norm(shape.hidden, shape.eps)
        self.pre_fc_norm_hidden = norm(shape.hidden, shape.eps)
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.layers = nn.ModuleList([block])
        self.norm = norm(shape.hidden, shape.eps)


class Tiny(nn.Module):
    """Trunk and MTP head, sharing the embedding and (tied to it) the LM head.

    Another family overrides what makes a block, how positions turn heads, and how tensors are published.
    """

    norm: type[Norm] = Norm
    wide: tuple[str, ...] = ()  # ends of names of tensors that are stored in float32

    def __init__(self, shape: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype
        self.model = Trunk(shape, self.block, self.norm)
        self.mtp = Head(shape, self.block(shape.layers), self.norm)
        for name, weight in self.named_parameters():
            if name.endswith("o_proj.weight"):
                nn.init.zeros_(weight)
            elif name.endswith(("_proj.weight", "fc.weight")):
                nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
            elif name.endswith(("embed_tokens.weight", "gate.weight")):
                nn.init.normal_(weight, std=0.02)

    def block(self, index: int) -> nn.Module:
        """Return a new decoder layer; the MTP head's has the index after the trunk's last."""
        del index
        return TinyBlock(self.shape)

    def rope(self, positions: Tensor) -> Rope:
        """Return what layers turn heads by at the positions."""
        return rope_tables(self.shape, positions)

    def adjust_routers(self, part: nn.Module) -> None:
        """Follow the last step's load in `part`, the model or its head, if the family's routers have a bias."""

    def to_published(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors, one for each expert, by the family's names and in its form."""
        return tensors

    def from_published(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what `to_published` was given."""
        return tensors

    def blocks(self) -> Iterator[Any]:
        """Yield every decoder layer, the head's last."""
        yield from [*self.model.layers, *self.mtp.layers]

    def set_dropout(self, rate: float) -> None:
        """Set the rate that training mode applies."""
        for block in self.blocks():
            block.dropout = rate

    def set_compiled(self, on: bool) -> None:
        """Swap the layers' pointwise-heavy halves for compiled ones, shared by all layers."""
        for block in self.blocks():
            for name in ("before", "after"):
                block.__dict__.pop(name, None)
                if on:
                    compiled = torch.compile(getattr(block, name), dynamic=False)
                    block.__dict__[name] = compiled

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed in the compute type."""
        return functional.embedding(tokens, self.model.embed_tokens.weight).to(self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the LM head."""
        return linear(hidden, self.model.embed_tokens.weight)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the trunk's normed hidden states [batch, time, hidden] and the balance loss."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        rope = self.rope(places)
        x = self.embed(tokens)
        total = torch.zeros((), device=tokens.device)
        for layer in self.model.layers:
            x, _, balance = layer(x, rope)
            total = total + balance
        return self.model.norm(x), total

    def draft(
        self,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        past: Keys | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Keys, Tensor]:
        """Run MTP entries: entry i takes the token after i and the hidden state at i.

        Returns the normed output (the next depth's hidden), the keys and the balance loss.
        """
        pair = [
            self.mtp.pre_fc_norm_embedding(self.embed(tokens)),
            self.mtp.pre_fc_norm_hidden(hidden),
        ]
        x = linear(torch.cat(pair, -1), self.mtp.fc.weight)
        rope = self.rope(positions)
        x, keys, balance = self.mtp.layers[0](x, rope, past, mask)
        return self.mtp.norm(x), keys, balance


def published(model: Tiny) -> dict[str, Tensor]:
    """Return bfloat16 weights, float32 where the family wants it, under the published names."""
    tensors: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        dtype = torch.float32 if name.endswith(model.wide) else torch.bfloat16
        weight = weight.detach().to("cpu", dtype)
        prefix, _, part = name.rpartition(".")
        if part in EXPERT_PARTS:
            for index, expert in enumerate(weight):
                tensors[f"{prefix}.{index}.{part}.weight"] = expert.contiguous()
        else:
            tensors[name] = weight.contiguous()
    return model.to_published(tensors)


def export(model: Tiny, out: Path, end: int) -> None:
    """Write weights and configuration as a Hugging Face directory."""
    save_file(published(model), out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    config = json.dumps(model.shape.config(end), indent=2)
    (out / "config.json").write_text(config + "\n")
    tokens = {key: end for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    generation = {"do_sample": False, **tokens}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def reload(model: Tiny, out: Path) -> Tiny:
    """Build a second model from the exported weights: what is shipped is what is measured."""
    fresh = type(model)(model.shape, model.dtype)
    stored = fresh.from_published(load_file(out / "model.safetensors"))
    state: dict[str, Tensor] = {}
    for name in fresh.state_dict():
        prefix, _, part = name.rpartition(".")
        if part in EXPERT_PARTS:
            rows = [stored[f"{prefix}.{e}.{part}.weight"] for e in range(model.shape.experts)]
            state[name] = torch.stack(rows)
        else:
            state[name] = stored[name]
    fresh.load_state_dict(state)
    return fresh.to(next(model.parameters()).device).eval()
