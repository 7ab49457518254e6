"""The sparse MLP: a router and stacked experts, and an expert that takes every token where the family has one.

Checkpoints hold one tensor per expert; they are stacked at load. Source of the shared expert: transformers
`Qwen2MoeSparseMoeBlock`.
"""

import torch

from baton.kernels.ops import Ops
from baton.kernels.tiles import wide_dtype
from baton.model.config import ModelConfig
from baton.model.layers import MLP, WeightSource


class SparseMLP:
    """Sends each token to its `num_experts_per_token` best experts. Legend: T tokens, D hidden size, E experts."""

    def __init__(self, source: WeightSource, layer_prefix: str, config: ModelConfig, ops: Ops) -> None:
        prefix = f"{layer_prefix}.{config.sparse_block}"
        experts = [config.expert_names(layer_prefix, expert) for expert in range(config.num_experts)]
        self.router_ED = source.take(f"{prefix}.gate.weight")
        self.experts = source.take_experts(
            gate_up=[(gate, up) for gate, up, _ in experts], down=[(down,) for _, _, down in experts]
        )
        self.shared = _SharedExpert(source, prefix, ops) if config.shared_expert_size else None
        self._num_chosen = config.num_experts_per_token
        self._renormalise = config.renormalise_experts
        self._ops = ops

    def __call__(self, x_TD: torch.Tensor, *, may_wait: bool) -> torch.Tensor:
        """[T, D] -> [T, D]; only where `may_wait` may the host wait for the device."""
        logits_TE = self._ops.linear(x_TD, self.router_ED)
        weight_TK, expert_TK = self._ops.route(logits_TE, self._num_chosen, self._renormalise)
        mixed_TD = self._ops.experts(x_TD, weight_TK, expert_TK, self.experts, may_wait)
        return mixed_TD if self.shared is None else self.shared.add_to(mixed_TD, x_TD)


class _SharedExpert:
    """An MLP that every token goes through, weighted by a sigmoid of the token's own."""

    def __init__(self, source: WeightSource, prefix: str, ops: Ops) -> None:
        self.mlp = MLP(source, f"{prefix}.shared_expert", ops)
        self.gate_1D = source.take(f"{prefix}.shared_expert_gate.weight")
        self._ops = ops

    def add_to(self, mixed_TD: torch.Tensor, x_TD: torch.Tensor) -> torch.Tensor:
        """What the experts made of the tokens x [T, D], and what this one makes, rounded once: [T, D]."""
        wide = wide_dtype(x_TD.dtype)
        # Not `sigmoid`, which rounds a row by its place in the batch on a CPU (`kernels.tiles`).
        weight_T1 = 1 / (1 + torch.exp(-self._ops.linear(x_TD, self.gate_1D).to(wide)))
        shared_TD = self.mlp(x_TD, may_wait=False).to(wide)
        return (mixed_TD.to(wide) + weight_T1 * shared_TD).to(x_TD.dtype)
