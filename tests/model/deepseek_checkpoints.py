"""Tensors of DeepSeek-V3 and of GLM-4.5 by their published names, and their oracle: transformers in float64."""

from baton.tests.model.hybrid_checkpoints import HybridReference

DEEPSEEKS = {"deepseek_v3": "DeepseekV3ForCausalLM", "glm4_moe": "Glm4MoeForCausalLM"}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 32,
    "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip


def deepseek_config(kind, num_heads):
    """What config.json has beside that of other families."""
    config = {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
    }
    if kind == "glm4_moe":
        rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
        return config | {"n_group": 1, "topk_group": 1, "attention_bias": True, "use_qk_norm": False} | {
            "rope_parameters": rope
        }  # fmt: skip
    return config | {
        "num_key_value_heads": num_heads,
        "n_group": 4,
        "topk_group": 2,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "rope_interleave": True,
        "rope_parameters": YARN,
    }


def deepseek_tensors(weights, config, *, with_mtp, copies=True):
    """Fill `weights` (`checkpoints._RandomWeights`); with `copies` the MTP head stores embedding and LM head again."""
    hidden, num_layers = config["hidden_size"], config["num_hidden_layers"]
    weights.matrix("model.embed_tokens", config["vocab_size"], hidden, gain=hidden**0.5 / 8)
    for index in range(num_layers):
        _layer(weights, f"model.layers.{index}", config, index >= config["first_k_dense_replace"])
    weights.norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        weights.matrix("lm_head", config["vocab_size"], hidden)
    if with_mtp:
        name = f"model.layers.{num_layers}"
        for part in ("enorm", "hnorm", "shared_head.norm"):
            weights.norm(f"{name}.{part}", hidden)
        weights.matrix(f"{name}.eh_proj", hidden, 2 * hidden)
        _layer(weights, name, config, True)
        if copies:
            embedding = weights.tensors["model.embed_tokens.weight"]
            weights.tensors[f"{name}.embed_tokens.weight"] = embedding.clone()
            weights.tensors[f"{name}.shared_head.head.weight"] = weights.tensors.get(
                "lm_head.weight", embedding
            ).clone()
    return weights.tensors


def _layer(weights, name, config, is_sparse):
    hidden = config["hidden_size"]
    weights.norm(f"{name}.input_layernorm", hidden)
    weights.norm(f"{name}.post_attention_layernorm", hidden)
    (_latent_attention if "kv_lora_rank" in config else _attention)(weights, f"{name}.self_attn", config)
    if not is_sparse:
        weights.mlp(f"{name}.mlp", config["intermediate_size"])
        return
    count, inner = config["n_routed_experts"], config["moe_intermediate_size"]
    weights.matrix(f"{name}.mlp.gate", count, hidden, gain=2.0)
    # Never narrower than float32, as published.
    wide = weights.promoted
    weights.tensors[f"{name}.mlp.gate.e_score_correction_bias"] = (0.2 * weights._draw(count)).to(wide)
    for expert in range(count):
        weights.mlp(f"{name}.mlp.experts.{expert}", inner)
    if config["n_shared_experts"]:
        weights.mlp(f"{name}.mlp.shared_experts", config["n_shared_experts"] * inner)


def _attention(weights, name, config):
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    for part, rows in (("q", queries), ("k", keys), ("v", keys)):
        weights.matrix(f"{name}.{part}_proj", rows, hidden)
        if config["attention_bias"]:
            weights.tensors[f"{name}.{part}_proj.bias"] = (0.2 * weights._draw(rows)).to(weights.dtype)
    weights.matrix(f"{name}.o_proj", hidden, queries)
    if config["use_qk_norm"]:
        for part in "qk":
            weights.norm(f"{name}.{part}_norm", head, mean=1.5)


def _latent_attention(weights, name, config):
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    rank, latent, turned = config["q_lora_rank"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    nope, values = config["qk_nope_head_dim"], config["v_head_dim"]
    if rank:
        weights.matrix(f"{name}.q_a_proj", rank, hidden)
        weights.norm(f"{name}.q_a_layernorm", rank, mean=1.5)
        weights.matrix(f"{name}.q_b_proj", heads * (nope + turned), rank)
    else:
        weights.matrix(f"{name}.q_proj", heads * (nope + turned), hidden)
    weights.matrix(f"{name}.kv_a_proj_with_mqa", latent + turned, hidden)
    weights.norm(f"{name}.kv_a_layernorm", latent, mean=1.5)
    weights.matrix(f"{name}.kv_b_proj", heads * (nope + values), latent)
    weights.matrix(f"{name}.o_proj", hidden, heads * values)


class DeepseekReference(HybridReference):
    """transformers' logits and MTP entries of a directory."""

    architectures = DEEPSEEKS
    num_experts = "n_routed_experts"

    @staticmethod
    def mtp_names(values):
        """Parts of the head by their published names, and by transformers'; copies have none."""
        layer = f"model.layers.{values['num_hidden_layers']}."
        parts = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "post_norm"}
        names = {f"{layer}embed_tokens.": "", f"{layer}shared_head.head.": ""}
        names |= {f"{layer}{part}.": f"{new}." for part, new in parts.items()}
        return names | {layer: "mtp_block."}
