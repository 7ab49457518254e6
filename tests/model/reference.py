"""What transformers computes for the same directory, and an MTP head written straight from its formulas.

transformers keeps three things in float32 whatever the model's dtype: RMSNorm, the rotary angles and the router's
softmax. In float64 that alone moves logits by 1e-7, so for float64 comparisons those three are replaced by the same
formulas in float64. Nothing else of transformers is touched.
"""

import json

import torch
from safetensors.torch import load_file


class Reference:
    """A transformers model of one directory and dtype, and its MTP head."""

    def __init__(self, path, dtype):
        from transformers import AutoModelForCausalLM

        self.dtype = dtype
        options = {"dtype": dtype, "attn_implementation": "sdpa", "experts_implementation": "eager"}
        self.model = AutoModelForCausalLM.from_pretrained(path, **options).eval()
        self.config = self.model.config
        values = json.loads((path / "config.json").read_text())
        self.tensors = {name: tensor.to(dtype) for name, tensor in load_file(path / "model.safetensors").items()}
        self.mtp_layer = self._mtp_layer() if values.get("mtp_num_hidden_layers") else None
        if dtype == torch.float64:
            for module in [*self.model.modules(), *(self.mtp_layer.modules() if self.mtp_layer else ())]:
                _dequantize(module)

    @torch.no_grad()
    def hidden(self, token_ids):
        """After the final norm, [T, D]."""
        return self.model.model(input_ids=token_ids[None], use_cache=False).last_hidden_state[0]

    @torch.no_grad()
    def logits(self, token_ids):
        return self.model(input_ids=token_ids[None], use_cache=False).logits[0]

    @torch.no_grad()
    def lm_head(self, hidden):
        return self.model.lm_head(hidden)

    @torch.no_grad()
    def mtp(self, next_token_ids, hidden):
        """Entries 0 ... n - 1 from the token after each position and a hidden state each; [n, D] after mtp.norm."""

        def norm(x, name):
            scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps)
            return x * scale * self.tensors[f"mtp.{name}.weight"]

        embedded = self.tensors["model.embed_tokens.weight"][next_token_ids]
        pair = torch.cat([norm(embedded, "pre_fc_norm_embedding"), norm(hidden, "pre_fc_norm_hidden")], dim=-1)
        x = pair @ self.tensors["mtp.fc.weight"].T
        position_ids = torch.arange(len(next_token_ids))[None]
        angles = self.model.model.rotary_emb(x, position_ids)
        out = self.mtp_layer(x[None], attention_mask=None, position_ids=position_ids, position_embeddings=angles)
        return norm(out[0], "norm")

    def _mtp_layer(self):
        layer = type(self.model.model.layers[-1])(self.config, len(self.model.model.layers) - 1)
        prefix = "mtp.layers.0."
        state = {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}
        if "mlp.gate.weight" in state:
            parts = {
                part: torch.stack(
                    [state.pop(f"mlp.experts.{expert}.{part}.weight") for expert in range(self.config.num_experts)]
                )
                for part in ("gate_proj", "up_proj", "down_proj")
            }
            state["mlp.experts.gate_up_proj"] = torch.cat([parts["gate_proj"], parts["up_proj"]], dim=1)
            state["mlp.experts.down_proj"] = parts["down_proj"]
        layer = layer.to(self.dtype).eval()
        layer.load_state_dict(state)
        return layer


def _dequantize(module):
    kind = type(module).__name__
    if kind.endswith("RMSNorm"):

        def norm(x):
            return module.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon))

        module.forward = norm
    elif kind.endswith("RotaryEmbedding") and module.rope_type == "default":

        def rotary(x, position_ids):
            config = module.config
            size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            theta = module.config.rope_parameters["rope_theta"]
            rates = 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
            angles = position_ids[..., None].double() * rates
            angles = torch.cat([angles, angles], dim=-1)
            return angles.cos(), angles.sin()

        module.forward = rotary
    elif kind.endswith("TopKRouter"):

        def router(x):
            logits = torch.nn.functional.linear(x.reshape(-1, module.hidden_dim), module.weight)
            weight, index = torch.topk(logits.softmax(dim=-1), module.top_k, dim=-1)
            if getattr(module, "norm_topk_prob", True):  # Mixtral's has no choice
                weight = weight / weight.sum(dim=-1, keepdim=True)
            return logits, weight, index

        module.forward = router
