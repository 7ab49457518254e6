"""EAGLE-3 drafters in both published layouts, and what one computes, written from the paper's and vLLM's equations."""

import json

import torch
from safetensors.torch import load_file, save_file

COLUMNS = 40
# config.json as `speculators` 0.9.0 writes it with transformers 5.23.0, except for sizes and what every config has.
SPECULATORS = {
    "architectures": ["Eagle3DraftModel"], "auto_map": {"": "config.Eagle3SpeculatorConfig"},
    "embed_requires_grad": False, "fc_norm": False, "norm_before_fc": False, "norm_output": False,
    "speculators_config": {
        "algorithm": "eagle3", "default_proposal_method": "greedy",
        "proposal_methods": [
            {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1},
        ],
        "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-8B"},
    },
    "speculators_model_type": "eagle3", "speculators_version": "0.9.0", "target_hidden_size": None,
    "tie_word_embeddings": False,
}  # fmt: skip
# Of its transformer_layer_config, by model_type.
SPECULATORS_LAYERS = {
    "llama": {"mlp_bias": False, "pretraining_tp": 1},
    "qwen3": {
        "layer_types": ["full_attention"], "max_window_layers": 28, "sliding_window": None, "use_sliding_window": False,
    },
}  # fmt: skip


def write_drafter(
    path, target, *, layout="own", num_columns=COLUMNS, seed=5, aux=None, before=False, embeds=False, overrides=None,
    dtype=torch.float64, inner_size=40, num_heads=None, num_kv_heads=None, head_dim=None, kind="llama",
):  # fmt: skip
    """A drafter for the target in a directory; returns `path`."""
    values = json.loads((target / "config.json").read_text())
    path.mkdir(parents=True, exist_ok=True)
    hidden, vocab = values["hidden_size"], values["vocab_size"]
    heads = num_heads or values["num_attention_heads"]
    head_dim, num_kv = head_dim or values["head_dim"], num_kv_heads or values["num_key_value_heads"]
    layer = {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner_size, "num_attention_heads": heads,
        "num_key_value_heads": num_kv, "head_dim": head_dim, "num_hidden_layers": 1, "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0, "max_position_embeddings": 64, "vocab_size": vocab, "hidden_act": "silu",
        "attention_bias": False, "tie_word_embeddings": False,
    }  # fmt: skip
    top = {"draft_vocab_size": num_columns, "norm_before_residual": before}
    if aux:
        top["eagle_aux_hidden_state_layer_ids"] = list(aux)
    if layout == "own":
        config, prefix = layer | top | {"architectures": ["LlamaForCausalLMEagle3"]}, "midlayer"
    else:
        layer |= {
            "model_type": kind,
            "rope_parameters": {"rope_theta": layer.pop("rope_theta"), "rope_type": "default"},
        }
        layer |= SPECULATORS_LAYERS.get(kind, {})
        config, prefix = top | SPECULATORS | {"transformer_layer_config": layer}, "layers.0"
    (path / "config.json").write_text(json.dumps(config | (overrides or {})))
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows, columns, gain=1.0):
        drawn = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
        return (drawn * gain / columns**0.5).to(dtype)

    def norm(length=hidden):
        return (1 + 0.1 * torch.randn(length, generator=generator, dtype=torch.float64)).to(dtype)

    tensors = {"fc.weight": matrix(hidden, 3 * hidden), "norm.weight": norm()}
    tensors["lm_head.weight"] = matrix(num_columns, hidden, gain=2.0)
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        tensors[f"{prefix}.{name}.weight"] = norm()
    for part, rows in (("q", heads * head_dim), ("k", num_kv * head_dim), ("v", num_kv * head_dim)):
        tensors[f"{prefix}.self_attn.{part}_proj.weight"] = matrix(rows, 2 * hidden)
    tensors[f"{prefix}.self_attn.o_proj.weight"] = matrix(hidden, heads * head_dim)
    for part in ("gate", "up"):
        tensors[f"{prefix}.mlp.{part}_proj.weight"] = matrix(inner_size, hidden)
    tensors[f"{prefix}.mlp.down_proj.weight"] = matrix(hidden, inner_size)
    if kind == "qwen3":
        tensors |= {f"{prefix}.self_attn.{part}_norm.weight": norm(head_dim) for part in "qk"}
    if embeds:
        tensors["embed_tokens.weight"] = matrix(vocab, hidden, gain=hidden**0.5 / 8)
    if num_columns < vocab:
        tokens = torch.randperm(vocab, generator=generator)[:num_columns].sort().values
        tensors["d2t"] = tokens - torch.arange(num_columns)  # published as offsets
        tensors["t2d"] = torch.isin(torch.arange(vocab), tokens)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


class EagleReference:
    """A drafter without paging, over whole texts; `truth` is the target's reference."""

    def __init__(self, path, truth):
        config = json.loads((path / "config.json").read_text())
        self.layer = config.get("transformer_layer_config", config)
        self.before = config["norm_before_residual"]
        num_layers = truth.config.num_hidden_layers
        default = [2, num_layers // 2, num_layers - 3]
        outputs = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")  # of SpecForge and SGLang
        default = [layer + 1 for layer in outputs] if outputs else default
        self.aux = config.get("eagle_aux_hidden_state_layer_ids", default)
        self.tensors = {
            name.replace("midlayer.", "layers.0."): tensor.to(truth.dtype) if tensor.is_floating_point() else tensor
            for name, tensor in load_file(path / "model.safetensors").items()
        }
        self.truth = truth

    def tokens(self):
        """Of each column."""
        offsets = self.tensors.get("d2t")
        columns = torch.arange(len(self.tensors["lm_head.weight"]))
        return columns if offsets is None else columns + offsets

    @torch.no_grad()
    def features(self, token_ids):
        """Of the target's layers, joined."""
        states = self.truth.model.model(input_ids=token_ids[None], use_cache=False, output_hidden_states=True)
        aux = torch.cat([states.hidden_states[layer][0] for layer in self.aux], dim=-1)
        return aux @ self.tensors["fc.weight"].T

    def norm(self, x, name):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.layer["rms_norm_eps"])
        return x * scale * self.tensors[f"{name}.weight"]

    def entries(self, next_token_ids, hidden):
        """Entries 0 ... n - 1, [n, D], before the norm."""
        own = self.tensors.get("embed_tokens.weight", self.truth.tensors["model.embed_tokens.weight"])
        normed = self.norm(hidden, "layers.0.hidden_norm")
        pair = torch.cat([self.norm(own[next_token_ids], "layers.0.input_layernorm"), normed], dim=-1)
        residual = (normed if self.before else hidden) + self.attend(pair)
        x = self.norm(residual, "layers.0.post_attention_layernorm")
        gate, up, down = (self.tensors[f"layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return residual + (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def attend(self, pair):
        size, length = self.layer["head_dim"], len(pair)
        base = self.layer.get("rope_parameters", self.layer)["rope_theta"]
        rates = base ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
        turn = torch.exp(1j * torch.arange(length).double()[:, None] * rates)[:, None]
        heads = []
        for part in "qkv":
            rows = pair @ self.tensors[f"layers.0.self_attn.{part}_proj.weight"].T
            rows = rows.view(length, -1, size)
            if f"layers.0.self_attn.{part}_norm.weight" in self.tensors:
                rows = self.norm(rows, f"layers.0.self_attn.{part}_norm")
            if part != "v":
                turned = torch.complex(rows[..., : size // 2], rows[..., size // 2 :]) * turn
                rows = torch.cat([turned.real, turned.imag], dim=-1)
            heads.append(rows)
        query, key, value = heads
        shared = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
        scores = torch.einsum("qhe,khe->hqk", query, key) / size**0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        mixed = torch.einsum("hqk,khe->qhe", scores.softmax(dim=-1), value).flatten(1)
        return mixed @ self.tensors["layers.0.self_attn.o_proj.weight"].T

    def logits(self, entries):
        """Over the columns of its head."""
        return self.norm(entries, "norm") @ self.tensors["lm_head.weight"].T
