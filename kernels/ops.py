"""The operations whose arithmetic depends on the numerics mode, chosen once when a model is built.

RoPE and `kv_write` treat every element alone and are the same in both modes. Two operations sum over a dimension that a
group of ranks may share: `linear_inner` and `experts`; a model built on the operations of a group is that group's
part of it, and says nothing about it.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from baton.core.numerics import Numerics
from baton.kernels import attention, attention_invariant, linear, moe, rms_norm, silu_mul
from baton.kernels.inner_sum import ALONE, InnerSum

Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, moe.ExpertWeights, bool], torch.Tensor]
Route = Callable[[torch.Tensor, int, bool], tuple[torch.Tensor, torch.Tensor]]
AttentionPrefill = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Sequence[int], Sequence[int]], torch.Tensor
]
AttentionDecode = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]


class Ops:
    """One mode's operations; the functions of that name in `baton.kernels` document shapes and sources."""

    def __init__(self, numerics: Numerics, inner: InnerSum = ALONE) -> None:
        self.numerics = numerics
        invariant = numerics is Numerics.INVARIANT
        self.linear = linear.linear_invariant if invariant else linear.linear
        self.linear_inner = inner.linear_invariant if invariant else inner.linear
        self.rms_norm = rms_norm.rms_norm_invariant if invariant else rms_norm.rms_norm
        self.silu_mul = silu_mul.silu_mul_invariant if invariant else silu_mul.silu_mul
        self.route: Route = moe.route_invariant if invariant else moe.route
        self.experts: Experts = partial(moe.experts_invariant if invariant else moe.experts, inner=inner)
        self.attention_prefill: AttentionPrefill = (
            attention_invariant.attention_prefill_invariant if invariant else attention.attention_prefill
        )
        self.attention_decode: AttentionDecode = (
            attention_invariant.attention_decode_invariant if invariant else attention.attention_decode
        )

    def add_rms_norm(
        self, x: torch.Tensor, added: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x + added, and that sum, rounded to the dtype of `x` before it is normalised."""
        total = x + added
        return self.rms_norm(total, weight_D, eps), total
