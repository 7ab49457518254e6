"""The sparse MLP: a router and stacked experts, and a shared expert for every token if the family has one.

Checkpoints hold one tensor per expert; they are stacked at load. Sources: the shared expert is that of transformers'
`Qwen2MoeSparseMoeBlock`, which has a gate, and of `DeepseekV3MoE`, which has none; routing by sigmoids, computed in the
wide dtype from the hidden states on, is `DeepseekV3TopkRouter`'s.

A shared expert that is like the routed ones is stacked behind them, and in steps of few tokens it is one more choice of
every token, which saves its launches (`kernels.moe.shared_plan`). Otherwise its GEMMs are its own: in steps of many
tokens, in batch-invariant numerics, where ranks hold different experts, and where its size or quantization differs.

Legend: T tokens, D hidden size, E routed experts, J outputs of an expert's first GEMM.
"""

from dataclasses import replace

import torch

from baton.kernels.gemm.fp8_weight import Fp8Weight
from baton.kernels.moe import shared_plan
from baton.kernels.moe.expert_slots import ExpertSlots, RoutedRows
from baton.kernels.moe.gemm import Fp8ExpertWeights
from baton.kernels.moe.norm_route import RoutedNorm
from baton.kernels.moe.summands import Added
from baton.kernels.ops import Choice, Experts, Ops, Rows, Weight, plain
from baton.model.config import ModelConfig
from baton.model.layers import MLP, RMSNorm, WeightSource, joined
from baton.model.tensor_spec import mlp_names, router_bias

_GATE_ROWS = 8  # of a shared expert's gate and zeros, so that rows of logits begin at multiples of 16 bytes


class SparseMLP:
    """Sends each token to its `num_experts_per_token` best experts.

    Attributes:
        experts: the routed experts that this rank holds.
        stack: the same and, as the last one, the shared expert; None: it is not stacked.
        slots: where all experts are, and their loads; None if they do not move.
        router_XD: router and gate of the shared expert, E + 8 outputs, of which `router_ED` is a view; the router alone
            where there is no gate.
        both_ND: the shared expert's first GEMM and those in one, J + X outputs, of which the two are views, because a
            GEMM with few outputs takes as long as its launch. None: there is no shared expert, its weights are float8,
            or the router's logits are wide.
    """

    def __init__(self, source: WeightSource, layer_prefix: str, config: ModelConfig, ops: Ops) -> None:
        prefix = f"{layer_prefix}.{config.sparse_block}"
        names = [config.expert_names(layer_prefix, expert) for expert in range(config.num_experts)]
        self._routing = config.sigmoid_routing
        take = source.take if self._routing is None else source.take_exact
        self.router_ED = self.router_XD = take(f"{prefix}.gate.weight")
        self.bias_E = None if self._routing is None else source.take_wide(router_bias(prefix))
        shared_prefix = f"{layer_prefix}.{config.shared_expert}"
        shared_names = mlp_names(shared_prefix)
        has_shared = bool(config.shared_expert_size)
        has_gate = has_shared and self._routing is None
        if has_gate:
            gate_1D = source.take(f"{shared_prefix}_gate.weight")
            zeros_GD = gate_1D.new_zeros(_GATE_ROWS - 1, gate_1D.shape[1])
            self._set_router(torch.cat([self.router_ED, gate_1D, zeros_GD]))
        may_stack = has_shared and not ops.is_invariant and source.held is None
        self.stack: Experts | None = None
        self.both_ND: torch.Tensor | None = None
        self.shared: _SharedExpert | None = None
        if may_stack and source.may_stack(names, shared_names):
            self.stack = self._take_stack(source, [*names, shared_names], ops)
        else:
            self.experts = source.take_experts(names)
            if has_shared:
                self.shared = _SharedExpert(MLP.take(source, shared_prefix, ops), ops)
                self._join_gemms(self.shared.mlp)
        held = source.held
        self.slots = ExpertSlots(held, source.device) if held is not None and held.may_move else None
        self._stacked_steps = range(0)  # numbers of tokens for which the shared expert is one more choice
        if self.stack is not None:
            _, hidden, inner_size = self.stack.down_EDI.shape
            is_fp8 = isinstance(self.stack, Fp8ExpertWeights)
            self._stacked_steps = shared_plan.steps(inner_size, hidden, is_fp8=is_fp8)
        self._num_chosen = config.num_experts_per_token
        self._renormalise = config.renormalise_experts
        self._ops = ops

    def _set_router(self, router_XD: torch.Tensor) -> None:
        self.router_XD, self.router_ED = router_XD, router_XD[: len(self.router_ED)]

    def _take_stack(self, source: WeightSource, names: list[tuple[str, str, str]], ops: Ops) -> Experts:
        """Read all experts, the shared one as the last, into one stack; the router follows it in memory.

        So the shared expert's first GEMM, the router's, and both in one read the same memory.
        """
        (num_outputs, hidden), num_routed = source.stack_shape(names[-1][:2]), len(names) - 1
        num_stacked, router_XD = len(names) * num_outputs, self.router_XD
        rows_XD = None
        if source.are_wide(names):
            num_beside = len(router_XD) if self._routing is None else 0
            rows_XD = source.new((num_stacked + num_beside, hidden))
        stack = source.take_experts(names, None if rows_XD is None else rows_XD[:num_stacked])
        if rows_XD is not None and self._routing is None:
            rows_XD[num_stacked:] = router_XD
            self._set_router(rows_XD[num_stacked:])
            self.both_ND = rows_XD[num_stacked - num_outputs :]
        self.experts = _first(stack, num_routed)
        self.shared = _SharedExpert(MLP(*_last(stack), ops), ops)
        return replace(stack, has_shared=True)

    def _join_gemms(self, mlp: MLP) -> None:
        """Let the router's GEMM and the first one of the shared expert be one, if they can be."""
        self.both_ND = joined(mlp.gate_up_JD, self.router_XD) if self._routing is None else None
        if self.both_ND is not None:
            mlp.gate_up_JD, router_XD = self.both_ND.tensor_split([-len(self.router_XD)])
            self._set_router(router_XD)

    def reader_of(self, num_rows: int) -> Weight | None:
        """The weight of the shared expert's first GEMM, which reads the rows beside others; None: there is none."""
        return None if self.shared is None or self._is_stacked(num_rows) else self.shared.mlp.reader_of(num_rows)

    def route(self, norm: RMSNorm, x_TD: torch.Tensor, added_TD: torch.Tensor) -> RoutedNorm | None:
        """The norm of x + added, the sum, and the choice of experts by softmax; None: not in one launch.

        A shared expert that is no choice shares its first GEMM with the router, or reads the norm in float8.
        """
        has_shared = self._is_stacked(len(x_TD))
        if self._routing is not None or (self.shared is not None and not has_shared):
            return None
        return norm.route(
            x_TD, added_TD, self.router_XD, len(self.router_ED), self._num_chosen,
            renormalise=self._renormalise, has_shared=has_shared,
        )  # fmt: skip

    def __call__(
        self, x: Rows, *, may_wait: bool, routed: RoutedRows | None = None, choice: Choice | None = None
    ) -> Added:
        """[T, D] -> [T, D], which the next norm may have to add up.

        The host may wait for the device only if `may_wait`. Needs `routed` if experts may move. `choice` is that of
        `route`, if it was made there.
        """
        x_TD = plain(x)
        is_stacked = self._is_stacked(len(x_TD))
        if choice is None:
            (weight_TK, expert_TK), gate_T1, inner = self._choose(x_TD, is_stacked)
        else:
            (weight_TK, expert_TK), gate_T1, inner = choice, None, None
        if is_stacked:
            assert self.stack is not None
            return self._ops.experts(x_TD, weight_TK, expert_TK, self.stack, may_wait)
        if self.slots is not None:
            assert routed is not None
            expert_TK = self.slots.place(expert_TK, routed)
        mixed_TD = self._ops.experts(x_TD, weight_TK, expert_TK, self.experts, may_wait)
        return mixed_TD if self.shared is None else self.shared.add_to(mixed_TD, x, gate_T1, inner)

    def _choose(self, x_TD: torch.Tensor, is_stacked: bool) -> tuple[Choice, torch.Tensor | None, Rows | None]:
        """The choice of the tokens, and of a shared expert its gate and its activation, [T, I], if any.

        The latter is made here only where the router's GEMM and the shared expert's first one are one.
        """
        gate_up_TJ = None
        if is_stacked or self.both_ND is None:
            linear = self._ops.linear if self._routing is None else self._ops.linear_wide
            logits_TX = linear(x_TD, self.router_XD)
        else:
            gate_up_TJ, logits_TX = self._ops.linear(x_TD, self.both_ND).tensor_split([-len(self.router_XD)], dim=1)
        logits_TE, gate_TX = logits_TX.tensor_split([len(self.router_ED)], dim=1)
        gate_T1 = gate_TX[:, :1] if gate_TX.shape[1] else None
        if gate_up_TJ is None:
            return self._route(logits_TE, gate_T1, is_stacked), gate_T1, None
        assert self.shared is not None
        down_DI = self.shared.mlp.down_DI
        choice, inner = self._ops.route_and_gate(logits_TE, self._num_chosen, self._renormalise, gate_up_TJ, down_DI)
        return choice, gate_T1, inner

    def _is_stacked(self, num_rows: int) -> bool:
        """Whether the shared expert is one more choice in a step of so many rows."""
        return num_rows in self._stacked_steps

    def _route(self, logits_TE: torch.Tensor, gate_T1: torch.Tensor | None, has_shared: bool) -> Choice:
        """Weights and experts of the tokens, with the shared one if `has_shared`, which its gate weighs."""
        routing, bias_E = self._routing, self.bias_E
        if routing is None or bias_E is None:
            gate_T1 = gate_T1 if has_shared else None
            return self._ops.route(
                logits_TE, self._num_chosen, self._renormalise, has_shared=has_shared, gate_T1=gate_T1
            )
        groups = (routing.num_groups, routing.num_kept_groups)
        return self._ops.route_by_sigmoid(
            logits_TE, self._num_chosen, self._renormalise, bias_E, groups, routing.scaling, has_shared=has_shared
        )


def _first(stack: Experts, count: int) -> Experts:
    """The first experts of a stack, as views."""
    gate_up_EJD, down_EDI = stack.gate_up_EJD[:count], stack.down_EDI[:count]
    if not isinstance(stack, Fp8ExpertWeights):
        return replace(stack, gate_up_EJD=gate_up_EJD, down_EDI=down_EDI)
    gate_up_scale, down_scale = stack.gate_up_scale[:count], stack.down_scale[:count]
    return replace(
        stack, gate_up_EJD=gate_up_EJD, gate_up_scale=gate_up_scale, down_EDI=down_EDI, down_scale=down_scale
    )


def _last(stack: Experts) -> tuple[Weight, Weight]:
    """Both weights of the last expert of a stack, as views; rows of float8's scales are padded copies."""
    if not isinstance(stack, Fp8ExpertWeights):
        return stack.gate_up_EJD[-1], stack.down_EDI[-1]
    gate_up = Fp8Weight.of(stack.gate_up_EJD[-1], stack.gate_up_scale[-1], ue8m0=stack.ue8m0)
    return gate_up, Fp8Weight.of(stack.down_EDI[-1], stack.down_scale[-1], ue8m0=stack.ue8m0)


class _SharedExpert:
    """An MLP for every token, whose output is weighted by a sigmoid of the token if the family has a gate."""

    def __init__(self, mlp: MLP, ops: Ops) -> None:
        self.mlp = mlp
        self._ops = ops

    def add_to(self, mixed_TD: Added, x: Rows, gate_T1: torch.Tensor | None, inner: Rows | None = None) -> Added:
        """Sum of the experts' output and this one's for the tokens, [T, D], rounded once: [T, D].

        Args:
            mixed_TD: the experts' output.
            x: the tokens.
            gate_T1: logits of its gate, if it has one.
            inner: this one's activation, if already computed.
        """
        shared_TD = self.mlp(x, may_wait=False) if inner is None else self.mlp.end(inner)
        return self._ops.add_shared(mixed_TD, shared_TD, gate_T1)
