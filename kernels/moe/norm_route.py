"""A norm, the router that reads it, and the choice of experts: one launch, in steps of few tokens.

Such a step takes as long as its launches. The rows are normalised as in `kernels.pointwise.rms_norm`, and experts
chosen as in `kernels.moe.select_topk`. Only the logits are rounded elsewhere: the router multiplies x + added times the
norm's weight, rounded, and the row's factor 1 / sqrt(mean + eps) is applied to the sums. That rounds a row as often as
a router behind a norm does, but other numbers, so it is not for batch-invariant numerics, whose results must not depend
on how many rows there are.

Legend: T tokens, D hidden size, E experts, K selected, X rows of the router.
"""

from dataclasses import dataclass

import torch

from baton.kernels.arguments import require, require_rows, require_tensor
from baton.kernels.gemm.workspace import GemmWorkspace, default_workspace
from baton.kernels.implementation import Implementation, uses_triton
from baton.kernels.memo import Memo, signature
from baton.kernels.moe import norm_route_triton
from baton.kernels.moe.select_topk import MAX_CHOSEN, MAX_EXPERTS, select_topk_reference, with_shared
from baton.kernels.pointwise.rms_norm import MAX_LEN, rms_norm_fused

MAX_TOKENS = 64  # columns of a tile, whose rows are the router's
LEAST_TOKENS = 3  # for fewer the router is read row by row, without tensor cores: three launches are quicker than this
_MAX_PROGRAMS = 132  # all run at once, one on each multiprocessor of an H200: some wait for others
_DTYPE = torch.bfloat16
_ALIGNED = 16  # bytes
_FORMS: Memo[bool] = Memo()  # checked calls, and whether Triton computes them


@dataclass(frozen=True, slots=True)
class RoutedNorm:
    """Result of `norm_route`.

    Attributes:
        rows_TD: the norm.
        sum_TD: x + added, rounded.
        weight_TK: weights of the chosen experts, float32; K + 1 with a shared expert.
        expert_TK: the chosen experts, int64.
    """

    rows_TD: torch.Tensor
    sum_TD: torch.Tensor
    weight_TK: torch.Tensor
    expert_TK: torch.Tensor


def fits(num_tokens: int, router_XD: torch.Tensor, num_experts: int, num_chosen: int) -> bool:
    """Return whether a step is computed so: its programs run at once, and the router is read in whole parts."""
    num_rows, hidden = router_XD.shape
    is_whole = hidden % norm_route_triton.COLUMNS == 0 and 0 < hidden <= MAX_LEN
    is_router = router_XD.dtype == _DTYPE and num_experts <= min(num_rows, MAX_EXPERTS) and 0 < num_chosen <= MAX_CHOSEN
    is_aligned = router_XD.data_ptr() % _ALIGNED == 0 and router_XD.stride(0) * router_XD.element_size() % _ALIGNED == 0
    if not (is_whole and is_router and is_aligned and 0 < num_tokens <= MAX_TOKENS):
        return False
    most = 1 << (num_tokens - 1).bit_length()  # a warm-up covers each power of two
    return norm_route_triton.num_programs(most, num_rows, hidden) <= _MAX_PROGRAMS


def norm_route(
    x_TD: torch.Tensor,
    added_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    router_XD: torch.Tensor,
    num_chosen: int,
    *,
    num_experts: int | None = None,
    plus_one: bool = False,
    renormalise: bool = False,
    has_shared: bool = False,
    workspace: GemmWorkspace | None = None,
    implementation: Implementation = Implementation.AUTO,
) -> RoutedNorm:
    """Normalise x + added, and choose each token's experts by softmax. A row depends on that row alone.

    Args:
        x_TD: bfloat16; rows may be strided.
        added_TD: the same.
        weight_D: the norm's weight, bfloat16.
        eps: added to the mean square.
        router_XD: bfloat16, rows contiguous, at multiples of 16 bytes; D is a multiple of 256. Rows beyond the experts'
            are a shared expert's gate, and what is not read.
        num_chosen: K.
        num_experts: E; None: X.
        plus_one: multiply by 1 + w.
        renormalise: whether a token's weights are made to sum to 1.
        has_shared: whether expert E is the last choice of every token. Its weight is the sigmoid of row E of the
            router, or 1 if there is no such row.
        workspace: workspace of the current stream; None: the device's, which is then used on one stream only.
        implementation: implementation to use.

    Raises:
        KernelArgumentInvalid: an argument does not fit; nothing was launched.
    """
    num_experts = len(router_XD) if num_experts is None else num_experts
    key = (
        signature(x_TD), signature(added_TD), signature(weight_D), signature(router_XD), num_chosen, num_experts,
        implementation,
    )  # fmt: skip
    in_triton = _FORMS.find(key)
    if in_triton is None:
        _check(x_TD, added_TD, weight_D, router_XD, num_chosen, num_experts)
        in_triton = _FORMS.keep(key, uses_triton(x_TD.device, implementation))
    is_gated = has_shared and len(router_XD) > num_experts
    if not in_triton:
        return _reference(
            x_TD, added_TD, weight_D, eps, router_XD[: num_experts + is_gated], num_chosen, num_experts,
            plus_one=plus_one, renormalise=renormalise, has_shared=has_shared,
        )  # fmt: skip
    (num_tokens, hidden), device = x_TD.shape, x_TD.device
    shape = num_tokens, num_chosen + has_shared
    made = (
        torch.empty(num_tokens, hidden, dtype=x_TD.dtype, device=device),
        torch.empty(num_tokens, hidden, dtype=x_TD.dtype, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.int64, device=device),
    )
    norm_route_triton.launch(
        x_TD, added_TD, weight_D, eps, router_XD, made, num_experts, (workspace or default_workspace(device)).counters,
        plus_one=plus_one, renormalises=renormalise, has_shared=has_shared, is_gated=is_gated,
    )  # fmt: skip
    return RoutedNorm(*made)


def _check(
    x_TD: torch.Tensor,
    added_TD: torch.Tensor,
    weight_D: torch.Tensor,
    router_XD: torch.Tensor,
    num_chosen: int,
    num_experts: int,
) -> None:
    require_tensor("x_TD", x_TD, (None, None), (_DTYPE,))
    require_rows("x_TD", x_TD)
    hidden, device = x_TD.shape[1], x_TD.device
    require_tensor("added_TD", added_TD, x_TD.shape, (_DTYPE,), device)
    require_rows("added_TD", added_TD)
    require_tensor("weight_D", weight_D, (hidden,), (_DTYPE,), device)
    require_rows("weight_D", weight_D)
    require_tensor("router_XD", router_XD, (None, hidden), (_DTYPE,), device)
    require_rows("router_XD", router_XD)
    require(0 < num_experts <= len(router_XD), "num_experts", f"is {num_experts}, of {len(router_XD)} rows")
    require(0 < num_chosen <= num_experts, "num_chosen", f"is {num_chosen}, not 1 to {num_experts}")
    is_fit = fits(len(x_TD), router_XD, num_experts, num_chosen)
    require(is_fit, "router_XD", f"has {list(router_XD.shape)} rows and columns, which do not fit {len(x_TD)} tokens")


def _reference(
    x_TD: torch.Tensor,
    added_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    router_XD: torch.Tensor,
    num_chosen: int,
    num_experts: int,
    *,
    plus_one: bool,
    renormalise: bool,
    has_shared: bool,
) -> RoutedNorm:
    """Compute it in torch."""
    reference = Implementation.REFERENCE
    made = rms_norm_fused(x_TD, weight_D, eps, residual_TD=added_TD, plus_one=plus_one, implementation=reference)
    assert made.sum_TD is not None
    wide_TD = made.sum_TD.float()
    factor_T1 = torch.rsqrt(wide_TD.square().mean(dim=-1, keepdim=True) + eps)
    weighted_TD = (wide_TD * (weight_D.float() + (1 if plus_one else 0))).to(x_TD.dtype)
    logits_TX = ((weighted_TD.float() @ router_XD.float().t()) * factor_T1).to(x_TD.dtype)
    logits_TE, gate_TX = logits_TX.tensor_split([num_experts], dim=1)
    weight_TK, expert_TK = select_topk_reference(
        logits_TE, num_chosen, is_sigmoid=False, renormalise=renormalise, bias_E=None, groups=(1, 1), scaling=1.0
    )
    if has_shared:
        weight_TK, expert_TK = with_shared(weight_TK, expert_TK, num_experts, gate_TX if gate_TX.shape[1] else None)
    return RoutedNorm(made.rows, made.sum_TD, weight_TK, expert_TK)
