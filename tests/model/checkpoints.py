"""Tiny random Hugging Face directories, written without transformers. Reached through the `tiny_checkpoint` fixture."""

import functools
import json

import torch
from safetensors.torch import save_file

from baton.tests.model.deepseek_checkpoints import DEEPSEEKS, deepseek_config, deepseek_tensors
from baton.tests.model.hybrid_checkpoints import HYBRIDS, hybrid_config, hybrid_tensors

VOCAB_SIZE = 96
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def write_checkpoint(
    path,
    *,
    kind="qwen3_moe",
    tie=True,
    num_heads=4,
    num_kv_heads=2,
    layers=2,
    seed=0,
    with_mtp=True,
    dtype=torch.float32,
    hidden_size=32,
    head_dim=16,
    vocab_size=VOCAB_SIZE,
    overrides=None,
    tokenizer=False,
    **forms,
):
    """Write config.json and model.safetensors into `path`; returns `path`.

    `forms` are those of `hybrid_tensors` and `deepseek_tensors`.
    """
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": [(ARCHITECTURES | HYBRIDS | DEEPSEEKS)[kind]],
        "model_type": kind,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": 512,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": tie,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
    if kind in ("qwen2_moe", "qwen3_moe"):
        config |= {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": kind == "qwen3_moe",
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    if kind == "qwen2_moe":
        config["shared_expert_intermediate_size"] = 40
    if kind == "mixtral":
        config |= {"num_local_experts": 8, "num_experts_per_tok": 2}
    if kind in HYBRIDS:
        config |= hybrid_config(kind, layers)
        del config["rope_theta"], config["rope_scaling"]
    if kind in DEEPSEEKS:
        config |= deepseek_config(kind, num_heads) | {"num_nextn_predict_layers": int(with_mtp)}
        del config["rope_theta"], config["rope_scaling"]
        if kind == "deepseek_v3":
            del config["head_dim"]
    elif with_mtp or kind == "qwen3_next":  # which has one where its config.json does not say
        config["mtp_num_hidden_layers"] = int(with_mtp)
    config |= overrides or {}
    (path / "config.json").write_text(json.dumps(config, indent=2))
    tensors = _drawn(json.dumps(config), seed, with_mtp, dtype, tuple(forms.items()))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    if tokenizer:
        write_tokenizer(path, vocab_size)
    return path


@functools.lru_cache(maxsize=4)
def _drawn(config, seed, with_mtp, dtype, forms):
    """Tests one after the other write the same weights in other layouts, and change none of them."""
    return random_tensors(json.loads(config), seed=seed, with_mtp=with_mtp, dtype=dtype, **dict(forms))


def random_tensors(config, *, seed, with_mtp, dtype, **forms):
    """Weights of about unit gain, so that logits differ clearly and attention is far from uniform."""
    weights = _RandomWeights(config, seed, dtype)
    if config["architectures"][0] in HYBRIDS.values():
        return hybrid_tensors(weights, config, with_mtp=with_mtp, **forms)
    if config["architectures"][0] in DEEPSEEKS.values():
        return deepseek_tensors(weights, config, with_mtp=with_mtp, **forms)
    hidden = config["hidden_size"]
    weights.matrix("model.embed_tokens", config["vocab_size"], hidden, gain=hidden**0.5 / 8)
    for index in range(config["num_hidden_layers"]):
        is_sparse = "num_local_experts" in config or (
            "num_experts" in config
            and index not in config["mlp_only_layers"]
            and (index + 1) % config["decoder_sparse_step"] == 0
        )
        weights.layer(f"model.layers.{index}", is_sparse)
    weights.norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        weights.matrix("lm_head", config["vocab_size"], hidden)
    if with_mtp:
        weights.matrix("mtp.fc", hidden, 2 * hidden)
        for name in ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"):
            weights.norm(name, hidden)
        weights.layer("mtp.layers.0", "num_experts_per_tok" in config)
    return weights.tensors


class _RandomWeights:
    """Tensors by their published names, drawn in the order they are asked for."""

    def __init__(self, config, seed, dtype):
        self.config = config
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(seed)
        self.tensors = {}
        self.promoted = torch.promote_types(dtype, torch.float32)

    def _draw(self, *shape):
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def matrix(self, name, rows, columns, gain=1.0):
        self.tensors[f"{name}.weight"] = (self._draw(rows, columns) * gain / columns**0.5).to(self.dtype)

    def norm(self, name, size, mean=1.0):
        self.tensors[f"{name}.weight"] = (mean + 0.1 * self._draw(size)).to(self.dtype)

    def mlp(self, name, inner):
        hidden = self.config["hidden_size"]
        self.matrix(f"{name}.gate_proj", inner, hidden)
        self.matrix(f"{name}.up_proj", inner, hidden)
        self.matrix(f"{name}.down_proj", hidden, inner)

    def layer(self, name, is_sparse):
        hidden, head = self.config["hidden_size"], self.config["head_dim"]
        queries, keys = self.config["num_attention_heads"] * head, self.config["num_key_value_heads"] * head
        self.norm(f"{name}.input_layernorm", hidden)
        self.norm(f"{name}.post_attention_layernorm", hidden)
        for part, rows in (("q", queries), ("k", keys), ("v", keys)):
            self.matrix(f"{name}.self_attn.{part}_proj", rows, hidden)
        self.matrix(f"{name}.self_attn.o_proj", hidden, queries)
        if self.config["model_type"].startswith("qwen3"):
            self.norm(f"{name}.self_attn.q_norm", head, mean=1.5)
            self.norm(f"{name}.self_attn.k_norm", head, mean=1.5)
        if self.config["model_type"].startswith("qwen2") and self.config.get("qkv_bias", True):
            for part, rows in (("q", queries), ("k", keys), ("v", keys)):
                self.tensors[f"{name}.self_attn.{part}_proj.bias"] = (0.2 * self._draw(rows)).to(self.dtype)
        if not is_sparse:
            self.mlp(f"{name}.mlp", self.config["intermediate_size"])
            return
        if self.config["model_type"] == "mixtral":
            self.matrix(f"{name}.block_sparse_moe.gate", self.config["num_local_experts"], hidden, gain=2.0)
            for expert in range(self.config["num_local_experts"]):
                inner = self.config["intermediate_size"]
                for part, shape in (("w1", (inner, hidden)), ("w2", (hidden, inner)), ("w3", (inner, hidden))):
                    self.matrix(f"{name}.block_sparse_moe.experts.{expert}.{part}", *shape)
            return
        self.matrix(f"{name}.mlp.gate", self.config["num_experts"], hidden, gain=2.0)
        for expert in range(self.config["num_experts"]):
            self.mlp(f"{name}.mlp.experts.{expert}", self.config["moe_intermediate_size"])
        if "shared_expert_intermediate_size" in self.config:
            self.mlp(f"{name}.mlp.shared_expert", self.config["shared_expert_intermediate_size"])
            self.matrix(f"{name}.mlp.shared_expert_gate", 1, hidden, gain=2.0)


def write_tokenizer(path, vocab_size):
    """A word-level tokenizer of `vocab_size` words: w2 ... and <end> as id 1."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<unknown>": 0, "<end>": 1} | {f"w{index}": index for index in range(2, vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "model_max_length": 512}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
