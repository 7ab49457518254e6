"""The sparse MLP: a router and stacked experts, and a shared expert for every token if the family has one.

Checkpoints hold one tensor per expert; they are stacked at load. Sources: the shared expert is that of transformers'
`Qwen2MoeSparseMoeBlock`, which has a gate, and of `DeepseekV3MoE`, which has none; routing by sigmoids, computed in the
wide dtype from the hidden states on, is `DeepseekV3TopkRouter`'s.
"""

import torch

from baton.kernels.moe.expert_slots import ExpertSlots, RoutedRows
from baton.kernels.ops import Ops, Rows, Weight, plain
from baton.model.config import ModelConfig
from baton.model.layers import MLP, WeightSource, joined
from baton.model.tensor_spec import router_bias


class SparseMLP:
    """Sends each token to its `num_experts_per_token` best experts. Legend: T tokens, D hidden size, E experts.

    Attributes:
        experts: the experts that this rank holds.
        slots: where all experts are, and their loads; None if they do not move.
        both_ND: the shared expert's first GEMM and the router's in one, J + E outputs, of which the two are views,
            because a GEMM with few outputs takes as long as its launch. None: there is no shared expert, its weights
            are float8, or the router's logits are wide.
    """

    def __init__(self, source: WeightSource, layer_prefix: str, config: ModelConfig, ops: Ops) -> None:
        prefix = f"{layer_prefix}.{config.sparse_block}"
        experts = [config.expert_names(layer_prefix, expert) for expert in range(config.num_experts)]
        self._routing = config.sigmoid_routing
        take = source.take if self._routing is None else source.take_exact
        self.router_ED = take(f"{prefix}.gate.weight")
        self.bias_E = None if self._routing is None else source.take_wide(router_bias(prefix))
        self.experts = source.take_experts(experts)
        held = source.held
        self.slots = ExpertSlots(held, source.device) if held is not None and held.may_move else None
        self.shared = _SharedExpert(source, layer_prefix, config, ops) if config.shared_expert_size else None
        self.both_ND = None
        if self.shared is not None and self._routing is None:
            self.both_ND = joined(self.shared.mlp.gate_up_JD, self.router_ED)
        if self.shared is not None and self.both_ND is not None:
            self.shared.mlp.gate_up_JD, self.router_ED = self.both_ND.tensor_split([-config.num_experts])
        self._num_chosen = config.num_experts_per_token
        self._renormalise = config.renormalise_experts
        self._ops = ops

    @property
    def reader(self) -> Weight | None:
        """The weight of the shared expert's first GEMM, which reads the rows beside others; None: there is none."""
        return None if self.shared is None else self.shared.mlp.reader

    def __call__(self, x: Rows, *, may_wait: bool, routed: RoutedRows | None = None) -> torch.Tensor:
        """[T, D] -> [T, D]; the host may wait for the device only if `may_wait`. Needs `routed` if experts may move."""
        x_TD, gate_up_TJ = plain(x), None
        if self.both_ND is None:
            linear = self._ops.linear if self._routing is None else self._ops.linear_wide
            logits_TE = linear(x_TD, self.router_ED)
        else:
            gate_up_TJ, logits_TE = self._ops.linear(x_TD, self.both_ND).tensor_split([-len(self.router_ED)], dim=1)
        routing, bias_E = self._routing, self.bias_E
        if routing is None or bias_E is None:
            weight_TK, expert_TK = self._ops.route(logits_TE, self._num_chosen, self._renormalise)
        else:
            groups = (routing.num_groups, routing.num_kept_groups)
            weight_TK, expert_TK = self._ops.route_by_sigmoid(
                logits_TE, self._num_chosen, self._renormalise, bias_E, groups, routing.scaling
            )
        if self.slots is not None:
            assert routed is not None
            expert_TK = self.slots.place(expert_TK, routed)
        mixed_TD = self._ops.experts(x_TD, weight_TK, expert_TK, self.experts, may_wait)
        return mixed_TD if self.shared is None else self.shared.add_to(mixed_TD, x, gate_up_TJ)


class _SharedExpert:
    """An MLP for every token, whose output is weighted by a sigmoid of the token if the family has a gate."""

    def __init__(self, source: WeightSource, layer_prefix: str, config: ModelConfig, ops: Ops) -> None:
        prefix = f"{layer_prefix}.{config.shared_expert}"
        self.mlp = MLP(source, prefix, ops)
        self.gate_1D = source.take(f"{prefix}_gate.weight") if config.sigmoid_routing is None else None
        self._ops = ops

    def add_to(self, mixed_TD: torch.Tensor, x: Rows, gate_up_TJ: torch.Tensor | None = None) -> torch.Tensor:
        """Sum of the experts' output and this one's for the tokens, [T, D], rounded once: [T, D].

        Args:
            mixed_TD: the experts' output.
            x: the tokens.
            gate_up_TJ: output of this one's first GEMM, if already computed.
        """
        shared_TD = self.mlp(x, may_wait=False) if gate_up_TJ is None else self.mlp.go_on(gate_up_TJ)
        return self._ops.add_shared(mixed_TD, shared_TD, plain(x), self.gate_1D)
