"""The sparse MLP: a router and stacked experts. Checkpoints hold one tensor per expert; they are stacked at load."""

import torch

from baton.kernels.moe import ExpertWeights
from baton.kernels.ops import Ops
from baton.model.config import ModelConfig
from baton.model.layers import WeightSource


class SparseMLP:
    """Sends each token to its `num_experts_per_token` best experts. Legend: T tokens, D hidden size, E experts."""

    def __init__(self, source: WeightSource, prefix: str, config: ModelConfig, ops: Ops) -> None:
        experts = [f"{prefix}.experts.{expert}" for expert in range(config.num_experts)]
        self.router_ED = source.take(f"{prefix}.gate.weight")
        self.experts = ExpertWeights(
            gate_up_EJD=source.take_stacked([(f"{e}.gate_proj.weight", f"{e}.up_proj.weight") for e in experts]),
            down_EDI=source.take_stacked([(f"{e}.down_proj.weight",) for e in experts]),
        )
        self._num_chosen = config.num_experts_per_token
        self._renormalise = config.renormalise_experts
        self._ops = ops

    def __call__(self, x_TD: torch.Tensor, *, may_wait: bool) -> torch.Tensor:
        """[T, D] -> [T, D]; only where `may_wait` may the host wait for the device."""
        logits_TE = self._ops.linear(x_TD, self.router_ED)
        weight_TK, expert_TK = self._ops.route(logits_TE, self._num_chosen, self._renormalise)
        return self._ops.experts(x_TD, weight_TK, expert_TK, self.experts, may_wait)
