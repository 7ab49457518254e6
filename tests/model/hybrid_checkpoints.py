"""Tensors of hybrid families (gated delta nets and gated attention) by their published names, and their oracle.

The oracle is transformers' own module with its casts to float32 replaced, so that float64 means float64.
"""

import importlib.util
import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

HYBRIDS = {
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}
MODEL_TYPES = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text", "qwen3_next": "qwen3_next"}
INTERVAL = 2


def hybrid_config(kind, layers):
    """What config.json has beside that of other families."""
    config = {
        "model_type": MODEL_TYPES[kind],
        "layer_types": [("linear_attention", "full_attention")[(i + 1) % INTERVAL == 0] for i in range(layers)],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    }
    if kind != "qwen3_5":
        config |= {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
        config["shared_expert_intermediate_size"] = 40
    if kind == "qwen3_next":
        config |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return config


def hybrid_tensors(weights, config, *, with_mtp, fused=True, mtp_fused=False):
    """Fill `weights` (`checkpoints._RandomWeights`); experts stacked in one tensor, or each by itself."""
    hidden = config["hidden_size"]
    weights.matrix("model.embed_tokens", config["vocab_size"], hidden, gain=hidden**0.5 / 8)
    for index, kind in enumerate(config["layer_types"]):
        _layer(weights, f"model.layers.{index}", config, kind == "linear_attention", fused, index)
    weights.norm("model.norm", hidden, mean=0.0)
    if not config["tie_word_embeddings"]:
        weights.matrix("lm_head", config["vocab_size"], hidden)
    if with_mtp:
        weights.matrix("mtp.fc", hidden, 2 * hidden)
        for name in ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"):
            weights.norm(name, hidden, mean=0.0)
        _layer(weights, "mtp.layers.0", config, False, mtp_fused, None)
    return weights.tensors


def _layer(weights, name, config, is_linear, fused, index):
    hidden, head = config["hidden_size"], config["head_dim"]
    weights.norm(f"{name}.input_layernorm", hidden, mean=0.0)
    weights.norm(f"{name}.post_attention_layernorm", hidden, mean=0.0)
    if is_linear:
        _delta_net(weights, f"{name}.linear_attn", config)
    else:
        queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
        for part, rows in (("q", 2 * queries), ("k", keys), ("v", keys)):
            weights.matrix(f"{name}.self_attn.{part}_proj", rows, hidden)
        weights.matrix(f"{name}.self_attn.o_proj", hidden, queries)
        for part in "qk":
            weights.norm(f"{name}.self_attn.{part}_norm", head, mean=0.5)
    if "num_experts" not in config or index in config.get("mlp_only_layers", ()):
        weights.mlp(f"{name}.mlp", config["intermediate_size"])
        return
    count, inner = config["num_experts"], config["moe_intermediate_size"]
    weights.matrix(f"{name}.mlp.gate", count, hidden, gain=2.0)
    for expert in range(count):
        weights.mlp(f"{name}.mlp.experts.{expert}", inner)
    if fused:
        fuse_experts(weights.tensors, f"{name}.mlp.experts", count)
    weights.mlp(f"{name}.mlp.shared_expert", config["shared_expert_intermediate_size"])
    weights.matrix(f"{name}.mlp.shared_expert_gate", 1, hidden, gain=2.0)


def _delta_net(weights, name, config):
    hidden, taps = config["hidden_size"], config["linear_conv_kernel_dim"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    num_values = config["linear_num_value_heads"]
    values = num_values * config["linear_value_head_dim"]
    if config["model_type"] == "qwen3_next":
        weights.matrix(f"{name}.in_proj_qkvz", 2 * keys + 2 * values, hidden)
        weights.matrix(f"{name}.in_proj_ba", 2 * num_values, hidden)
    else:
        weights.matrix(f"{name}.in_proj_qkv", 2 * keys + values, hidden)
        weights.matrix(f"{name}.in_proj_z", values, hidden)
        for part in "ba":
            weights.matrix(f"{name}.in_proj_{part}", num_values, hidden)
    weights.matrix(f"{name}.conv1d", 2 * keys + values, taps)
    weights.tensors[f"{name}.conv1d.weight"] = weights.tensors[f"{name}.conv1d.weight"][:, None].contiguous()
    # Never narrower than float32, as published; heads that forget at once, and such that hardly do.
    wide = torch.promote_types(weights.dtype, torch.float32)
    weights.tensors[f"{name}.A_log"] = (weights._draw(num_values) - 1).to(wide)
    weights.tensors[f"{name}.dt_bias"] = (weights._draw(num_values) - 2).to(wide)
    weights.tensors[f"{name}.norm.weight"] = (1 + 0.1 * weights._draw(config["linear_value_head_dim"])).to(wide)
    weights.matrix(f"{name}.out_proj", hidden, values)


def fuse_experts(tensors, prefix, count):
    """Stack experts in two tensors: gate above up, and down."""
    gate, up, down = (
        torch.stack([tensors.pop(f"{prefix}.{expert}.{part}_proj.weight") for expert in range(count)])
        for part in ("gate", "up", "down")
    )
    tensors[f"{prefix}.gate_up_proj"], tensors[f"{prefix}.down_proj"] = torch.cat([gate, up], dim=1), down


def _in_float64(kind):
    """transformers' module of the family, or of rope types, computing in float64 where it casts to float32."""
    package = "transformers" if kind is None else f"transformers.models.{kind}"
    name = f"{package}.modeling_{kind or 'rope_utils'}"
    wide_name = f"{package}.float64_{kind or 'rope_utils'}"
    if wide_name not in sys.modules:
        spec = importlib.util.find_spec(name)
        source = spec.loader.get_source(name)
        for narrow, wide in (
            ("torch.float32", "torch.float64"),
            (".float()", ".double()"),
            ("dtype=torch.float)", "dtype=torch.float64)"),
            ("dtype=torch.float,", "dtype=torch.float64,"),
        ):
            source = source.replace(narrow, wide)
        module = importlib.util.module_from_spec(importlib.util.spec_from_loader(wide_name, loader=None))
        # transformers looks for the source of its classes.
        module.__file__ = str(Path(tempfile.mkdtemp()) / f"float64_{kind or 'rope_utils'}.py")
        Path(module.__file__).write_text(source)
        module.__package__ = package
        sys.modules[wide_name] = module
        exec(compile(source, module.__file__, "exec"), vars(module))
        if kind is not None:
            module.ROPE_INIT_FUNCTIONS = _in_float64(None).ROPE_INIT_FUNCTIONS
    return sys.modules[wide_name]


class HybridReference:
    """transformers' logits and MTP entries of a text-only directory."""

    architectures = HYBRIDS
    num_experts = "num_experts"

    @staticmethod
    def mtp_names(values):
        """What names of an MTP head's parts begin with, and what takes its place."""
        del values
        return {
            "mtp.fc.": "eh_proj.", "mtp.pre_fc_norm_embedding.": "enorm.", "mtp.pre_fc_norm_hidden.": "hnorm.",
            "mtp.norm.": "post_norm.", "mtp.layers.0.": "mtp_block.",
        }  # fmt: skip

    def __init__(self, path, kind, dtype):
        from transformers import AutoConfig
        from transformers.modeling_layers import MtpModel

        config = AutoConfig.from_pretrained(path)
        config._attn_implementation = "sdpa"
        if dtype == torch.float64:
            module = _in_float64(kind)
        else:
            module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
        self.model = getattr(module, self.architectures[kind])(config).to(dtype).eval()
        self.model.model.rotary_emb.__init__(config)  # its frequencies were made again, in float32
        self.model.set_experts_implementation("eager")
        tensors = {name: tensor.to(dtype) for name, tensor in load_file(path / "model.safetensors").items()}
        values = json.loads((path / "config.json").read_text())
        for name in [name for name in tensors if name.endswith("experts.0.gate_proj.weight")]:
            fuse_experts(tensors, name.removesuffix(".0.gate_proj.weight"), values[self.num_experts])
        renamed = self.mtp_names(values)
        trunk = {name: tensor for name, tensor in tensors.items() if not name.startswith(tuple(renamed))}
        missing, unexpected = self.model.load_state_dict(trunk, strict=False)
        missing = [name for name in missing if self.model.state_dict()[name].numel()]
        assert not unexpected and set(missing) <= {"lm_head.weight"}
        if "lm_head.weight" in missing:
            self.model.lm_head.weight = self.model.model.embed_tokens.weight
        self._mtp = None
        if len(trunk) < len(tensors):
            self.model.config.num_mtp_layers = 1
            self.model.config.mtp_layer_types = ["full_attention"]
            self._mtp = MtpModel(self.model, 1).to(dtype).eval()
            state = {}
            for name, tensor in tensors.items():
                old = next((old for old in renamed if name.startswith(old)), None)
                if old is not None and renamed[old]:
                    state[f"layers.0.{renamed[old]}{name.removeprefix(old)}"] = tensor
            missing, unexpected = self._mtp.load_state_dict(state, strict=False)
            missing = [name for name in missing if self._mtp.state_dict()[name].numel()]
            assert not unexpected and not any(name.startswith("layers.") for name in missing)

    @torch.no_grad()
    def hidden(self, token_ids):
        """After the final norm, [T, D]."""
        return self.model.model(input_ids=token_ids[None], use_cache=False).last_hidden_state[0]

    @torch.no_grad()
    def lm_head(self, hidden):
        return self.model.lm_head(hidden)

    def logits(self, token_ids):
        return self.lm_head(self.hidden(token_ids))

    @torch.no_grad()
    def mtp(self, next_token_ids, hidden):
        """Entries from the token after each position and a hidden state each; [n, D] after mtp.norm."""
        position_ids = torch.arange(len(next_token_ids))[None]
        return self._mtp.forward_layer(0, hidden[None], position_ids, None, input_ids=next_token_ids[None])[0]
