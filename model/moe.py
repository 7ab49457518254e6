"""The sparse MLP: a router and stacked experts. Checkpoints hold one tensor per expert; they are stacked at load."""

import torch

from baton.kernels.ops import Ops
from baton.model.config import ModelConfig
from baton.model.layers import WeightSource


class SparseMLP:
    """Sends each token to its `num_experts_per_token` best experts. Legend: T tokens, D hidden size, E experts."""

    def __init__(self, source: WeightSource, prefix: str, config: ModelConfig, ops: Ops) -> None:
        experts = [f"{prefix}.experts.{expert}" for expert in range(config.num_experts)]
        self.router_ED = source.take(f"{prefix}.gate.weight")
        self.experts = source.take_experts(
            gate_up=[(f"{expert}.gate_proj.weight", f"{expert}.up_proj.weight") for expert in experts],
            down=[(f"{expert}.down_proj.weight",) for expert in experts],
        )
        self._num_chosen = config.num_experts_per_token
        self._renormalise = config.renormalise_experts
        self._ops = ops

    def __call__(self, x_TD: torch.Tensor, *, may_wait: bool) -> torch.Tensor:
        """[T, D] -> [T, D]; only where `may_wait` may the host wait for the device."""
        logits_TE = self._ops.linear(x_TD, self.router_ED)
        weight_TK, expert_TK = self._ops.route(logits_TE, self._num_chosen, self._renormalise)
        return self._ops.experts(x_TD, weight_TK, expert_TK, self.experts, may_wait)
