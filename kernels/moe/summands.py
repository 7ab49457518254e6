"""What an MoE layer made of each token, not yet added up: in steps of few tokens the next norm adds it as it reads it.

So the sum over a token's choices, and that with a shared expert, have no launches of their own. Rows are rounded where
those launches round them: to the dtype of the parts after the choices, and again after the shared expert.

The parts take K times the memory of their sum, until the layer after the next norm is done, so steps of many tokens add
them up at once, as do ranks, which add their results to those of others.

Legend: T tokens, K choices of each, N = T K, D hidden size.
"""

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from baton.kernels.arguments import require, require_tensor
from baton.kernels.implementation import Implementation, uses_triton
from baton.kernels.memo import signature
from baton.kernels.moe import gemm_triton
from baton.kernels.moe.held_experts import HeldExperts
from baton.kernels.pointwise.sigmoid_gate import add_shared

MAX_TOKENS = 512  # of a step whose parts wait for the next norm
_MAX_CHOSEN = 12  # of a norm, which holds all parts of a row in registers
_MAX_LEN = 9 * 8192  # the same, in values
_LONG = 4096  # columns beyond which few rows are quicker added up by launches, which cut rows; measured on an H200
_MANY = 64
_ID_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class Summands:
    """Rows [T, D] that are not added up yet.

    Attributes:
        part_ND: the result of each choice times its weight, a token's choices one after the other; contiguous.
        expert_TK: the choices, contiguous; ids of no expert add nothing, whatever is in their rows.
        num_experts: experts that there are, of this rank.
        held: which these are, as in `ExpertWeights`.
        is_early: whether the launch that adds the choices may begin before the one before it has ended.
        shared_TD: output of a shared expert, contiguous; None: there is none, or it is one of the choices.
        gate_T1: logits of its gate; rows may be strided. None: it has no gate.
    """

    part_ND: torch.Tensor
    expert_TK: torch.Tensor
    num_experts: int
    held: HeldExperts | None = None
    is_early: bool = True
    shared_TD: torch.Tensor | None = None
    gate_T1: torch.Tensor | None = None

    @property
    def signature(self) -> Hashable:
        """Everything that a decision may depend on."""
        tensors = self.part_ND, self.expert_TK, self.shared_TD, self.gate_T1
        return *map(signature, tensors), self.num_experts, self.held

    def check(self, name: str, like_TD: torch.Tensor) -> None:
        """Require that the sum has the shape, dtype and device of other rows."""
        (num_rows, hidden), dtype, device = like_TD.shape, [like_TD.dtype], like_TD.device
        require_tensor(f"{name}.expert_TK", self.expert_TK, [num_rows, None], _ID_DTYPES, device)
        require_tensor(f"{name}.part_ND", self.part_ND, [self.expert_TK.numel(), hidden], dtype, device)
        tensors = {"expert_TK": self.expert_TK, "part_ND": self.part_ND}
        if self.shared_TD is not None:
            require_tensor(f"{name}.shared_TD", self.shared_TD, [num_rows, hidden], dtype, device)
            tensors["shared_TD"] = self.shared_TD
        for part, tensor in tensors.items():
            require(tensor.is_contiguous(), f"{name}.{part}", "is not contiguous")
        if self.gate_T1 is not None:
            require(self.shared_TD is not None, f"{name}.gate_T1", "is there without a shared expert")
            require_tensor(f"{name}.gate_T1", self.gate_T1, [num_rows, 1], dtype, device)
        require(self.expert_TK.shape[1] > 0, f"{name}.expert_TK", "has no choice")
        require(self.held is None, f"{name}.held", "is set: ranks add their results first")


def waits(num_tokens: int, num_chosen: int, hidden: int) -> bool:
    """Whether the parts of a step are left to the next norm."""
    if hidden > _LONG and num_tokens < _MANY:
        return False
    return num_tokens <= MAX_TOKENS and num_chosen <= _MAX_CHOSEN and num_chosen * hidden <= _MAX_LEN


Added = torch.Tensor | Summands
"""What a layer adds to the rows that it was given, [T, D]."""


def add_up(
    summands: Summands,
    *,
    out_dtype: torch.dtype | None = None,
    implementation: Implementation = Implementation.AUTO,
) -> torch.Tensor:
    """Add up what no norm does, [T, D]: one launch for the choices, and one for a shared expert.

    Args:
        summands: rows to add up.
        out_dtype: dtype of the sum of the choices, that of the parts by default.
        implementation: implementation to use.
    """
    part_ND, expert_TK = summands.part_ND, summands.expert_TK
    out_TD = part_ND.new_empty(len(expert_TK), part_ND.shape[1], dtype=out_dtype)
    if uses_triton(part_ND.device, implementation):
        held, is_early = summands.held, summands.is_early
        gemm_triton.launch_sum(part_ND, expert_TK, summands.num_experts, held, out_TD, is_early=is_early)
    else:
        id_TK = expert_TK - (0 if summands.held is None else summands.held.first)
        total_TD = torch.zeros_like(out_TD, dtype=torch.float32)
        is_own_TK1 = ((id_TK >= 0) & (id_TK < summands.num_experts))[..., None]
        for choice, part_TD in enumerate(part_ND.view(*expert_TK.shape, part_ND.shape[1]).unbind(1)):
            total_TD += torch.where(is_own_TK1[:, choice], part_TD.float(), 0.0)
        out_TD.copy_(total_TD)
    if summands.shared_TD is None:
        return out_TD
    return add_shared(out_TD, summands.shared_TD, summands.gate_T1, implementation=implementation)
