"""Selects each token's experts and their weights.

Three routers: softmax over all experts (Shazeer et al. 2017); the same, renormalised over the selected experts (Qwen3
MoE); and sigmoid scores, with a bias that affects the selection only, and with groups of experts of which only the best
take part (DeepSeek-V3, section 2.1.2). Among equals the lowest index wins. A logit that is NaN counts as -inf, and +inf
as the largest finite number. Everything is computed in float32, from the token's own logits alone.

A shared expert, which every token is sent to, can be one choice more, behind the others. Its weight is 1, or the
sigmoid of a gate: neither the others' sum nor their scaling changes it.

A selection is never changed here; `kernels.moe.fake_balance` does that, for benchmarks.

Legend: T tokens, E experts, K selected, G groups.
"""

from enum import Enum

import torch

from baton.kernels.arguments import require, require_rows, require_tensor
from baton.kernels.implementation import Implementation, uses_triton
from baton.kernels.memo import Memo, signature
from baton.kernels.moe import select_topk_triton
from baton.kernels.pointwise.silu_mul import silu_mul
from baton.kernels.tiles import ordered_sum, wide_dtype

MAX_EXPERTS = 1024
MAX_CHOSEN = 32
MAX_BESIDE = 512  # tokens of a step whose activation is computed beside: more of them fill a GPU by themselves
_FORMS: Memo[bool] = Memo()  # checked calls, and whether Triton computes them
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LARGEST = torch.finfo(torch.float32).max


class Scoring(Enum):
    """Function applied to the logits."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


def select_topk(
    logits_TE: torch.Tensor,
    num_chosen: int,
    *,
    scoring: Scoring = Scoring.SOFTMAX,
    renormalise: bool = False,
    bias_E: torch.Tensor | None = None,
    num_groups: int = 1,
    num_kept_groups: int = 1,
    scaling: float = 1.0,
    expert_dtype: torch.dtype = torch.int64,
    has_shared: bool = False,
    gate_T1: torch.Tensor | None = None,
    beside: tuple[torch.Tensor, torch.Tensor] | None = None,
    implementation: Implementation = Implementation.AUTO,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights, float32 [T, K], and experts [T, K], best first, in one launch; K + 1 if `has_shared`.

    Softmax selects by logit, sigmoid by score, and both by score + bias where there is a bias; the weights are scores
    without the bias. With groups, a group's rank is the sum of its two best, and experts of groups that are not kept
    count as -inf. Renormalised weights are divided by their sum (0 stays 0); then all weights are multiplied by
    `scaling`.

    Args:
        logits_TE: bfloat16, float16 or float32, rows contiguous.
        num_chosen: K.
        scoring: function applied to the logits.
        renormalise: whether a token's weights are made to sum to 1.
        bias_E: float32, contiguous.
        num_groups: number of equal groups of neighbouring experts.
        num_kept_groups: number of groups that take part.
        scaling: factor of the weights.
        expert_dtype: int32 or int64.
        has_shared: whether expert E is the last choice of every token.
        gate_T1: logits of its weight, in one of the dtypes of `logits_TE`; None: its weight is 1.
        beside: an activation that is computed in the same launch, `kernels.pointwise.silu_mul`: its input [T, 2 I],
            rows contiguous, in the dtype of the logits, and its output [T, I], contiguous, which is written.
        implementation: implementation to use.

    Raises:
        KernelArgumentInvalid: an argument does not fit; the message names it.
    """
    groups = (num_groups, num_kept_groups)
    shared = has_shared, signature(gate_T1), *map(signature, beside or ())
    key = signature(logits_TE), signature(bias_E), num_chosen, groups, expert_dtype, shared, implementation
    uses = _FORMS.find(key)
    if uses is None:
        _check(logits_TE, num_chosen, bias_E, groups, expert_dtype)
        if gate_T1 is not None:
            require(has_shared, "gate_T1", "is given without a shared expert")
            require_tensor("gate_T1", gate_T1, (len(logits_TE), 1), _DTYPES, logits_TE.device)
        if beside is not None:
            _check_beside(logits_TE, *beside)
        uses = _FORMS.keep(key, uses_triton(logits_TE.device, implementation))
    is_sigmoid = scoring is Scoring.SIGMOID
    if not uses:
        weight_TK, expert_TK = select_topk_reference(
            logits_TE, num_chosen, is_sigmoid, renormalise, bias_E, groups, scaling
        )
        if has_shared:
            weight_TK, expert_TK = with_shared(weight_TK, expert_TK, logits_TE.shape[1], gate_T1)
        if beside is not None:
            beside[1].copy_(silu_mul(beside[0]))
        return weight_TK, expert_TK.to(expert_dtype).contiguous()
    shape = (logits_TE.shape[0], num_chosen + has_shared)
    weight_TK = torch.empty(shape, dtype=torch.float32, device=logits_TE.device)
    expert_TK = torch.empty(shape, dtype=expert_dtype, device=logits_TE.device)
    if logits_TE.shape[0] > 0:
        constants = select_topk_triton.prepared(
            logits_TE.device, logits_TE.shape[1], num_chosen, groups, is_sigmoid, bias_E is not None, renormalise,
            has_shared, gate_T1 is not None, 0 if beside is None else beside[1].shape[1],
        )  # fmt: skip
        select_topk_triton.launch(logits_TE, bias_E, weight_TK, expert_TK, scaling, gate_T1, beside, constants)
    return weight_TK, expert_TK


def with_shared(
    weight_TK: torch.Tensor, expert_TK: torch.Tensor, num_experts: int, gate_T1: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add expert `num_experts` as the last choice of every token, in torch -> weights and experts [T, K + 1].

    A row's result depends on that row alone: torch's own sigmoid rounds by place in the batch on a CPU.
    """
    shared_T1 = torch.ones_like(weight_TK[:, :1])
    if gate_T1 is not None:
        shared_T1 = shared_T1 / (1 + torch.exp(-gate_T1.to(weight_TK.dtype)))
    shared_id_T1 = torch.full_like(expert_TK[:, :1], num_experts)
    return torch.cat([weight_TK, shared_T1], dim=1), torch.cat([expert_TK, shared_id_T1], dim=1)


def _check(
    logits_TE: torch.Tensor,
    num_chosen: int,
    bias_E: torch.Tensor | None,
    groups: tuple[int, int],
    expert_dtype: torch.dtype,
) -> None:
    num_groups, num_kept_groups = groups
    require_tensor("logits_TE", logits_TE, (None, None), _DTYPES)
    require_rows("logits_TE", logits_TE)
    num_experts = logits_TE.shape[1]
    require(0 < num_experts <= MAX_EXPERTS, "logits_TE", f"has {num_experts} experts, not 1 to {MAX_EXPERTS}")
    is_divisor = num_groups > 0 and num_experts % num_groups == 0
    require(is_divisor, "num_groups", f"is {num_groups}, no divisor of {num_experts} experts")
    size = num_experts // num_groups
    require(num_groups == 1 or size >= 2, "num_groups", f"is {num_groups}, so groups have less than two experts")
    require(0 < num_kept_groups <= num_groups, "num_kept_groups", f"is {num_kept_groups}, not 1 to {num_groups}")
    most = min(MAX_CHOSEN, num_kept_groups * size)
    require(0 < num_chosen <= most, "num_chosen", f"is {num_chosen}, not 1 to {most}")
    require(expert_dtype in (torch.int32, torch.int64), "expert_dtype", f"is {expert_dtype}, not int32 or int64")
    if bias_E is not None:
        require_tensor("bias_E", bias_E, (num_experts,), (torch.float32,), logits_TE.device)
        require_rows("bias_E", bias_E)


def _check_beside(logits_TE: torch.Tensor, gate_up_TJ: torch.Tensor, inner_TI: torch.Tensor) -> None:
    num_tokens, dtype, device = len(logits_TE), [logits_TE.dtype], logits_TE.device
    require_tensor("beside", inner_TI, (num_tokens, None), dtype, device)
    require_tensor("beside", gate_up_TJ, (num_tokens, 2 * inner_TI.shape[1]), dtype, device)
    require(inner_TI.shape[1] > 0 and inner_TI.is_contiguous(), "beside", "has an output without columns, or strided")
    require_rows("beside", gate_up_TJ)


def select_topk_reference(
    logits_TE: torch.Tensor,
    num_chosen: int,
    is_sigmoid: bool,
    renormalise: bool,
    bias_E: torch.Tensor | None,
    groups: tuple[int, int],
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute it in torch, float64 in that dtype; experts are int64. A row's result depends on that row alone."""
    negative = float("-inf")
    wide = wide_dtype(logits_TE.dtype)
    logits_TE = logits_TE.to(wide).nan_to_num(nan=negative, posinf=_LARGEST, neginf=negative)
    if is_sigmoid:
        score_TE = choice_TE = 1.0 / (1.0 + torch.exp(-logits_TE))
    else:
        largest_T1 = logits_TE.amax(dim=-1, keepdim=True).clamp(min=-_LARGEST)
        score_TE, choice_TE = torch.exp(logits_TE - largest_T1), logits_TE
        whole_T1 = ordered_sum(score_TE)
        score_TE = score_TE / torch.where(whole_T1 > 0, whole_T1, 1.0)
    if bias_E is not None:
        choice_TE = score_TE + bias_E
        choice_TE = torch.where(choice_TE.isnan(), negative, choice_TE)
    num_groups, num_kept = groups
    if num_kept < num_groups:
        choice_TGe = choice_TE.unflatten(-1, (num_groups, -1))
        rank_TG = choice_TGe.topk(2, dim=-1).values.sum(dim=-1)
        order_TG = torch.sort(rank_TG, dim=-1, descending=True, stable=True).indices
        is_kept_TG = torch.zeros_like(rank_TG, dtype=torch.bool).scatter_(1, order_TG[:, :num_kept], True)
        choice_TE = torch.where(is_kept_TG[..., None], choice_TGe, negative).flatten(-2)
    expert_TK = torch.sort(choice_TE, dim=-1, descending=True, stable=True).indices[:, :num_chosen]
    weight_TK = score_TE.gather(1, expert_TK)
    if renormalise:
        total_T1 = ordered_sum(weight_TK)
        weight_TK = weight_TK / torch.where(total_T1 > 0, total_T1, 1.0)
    return weight_TK * scaling, expert_TK
