"""Rows of `baton bench kernels` for routing: selection, sorting by expert, and the balanced pattern for benchmarks."""

from functools import partial

import torch

from baton.bench.kernel_bench.case import Call, KernelCase, Systems
from baton.kernels.implementation import Implementation
from baton.kernels.moe.align import moe_align
from baton.kernels.moe.fake_balance import ACKNOWLEDGEMENT, fake_balance_experts
from baton.kernels.moe.select_topk import Scoring, select_topk

NUM_CHOSEN = 8
NUM_TOKENS = (1, 16, 64, 256, 1024, 8192)
# Stated larger than they are, because in a step logits were just written and are in the L2 cache, too.
SET_BYTES = 4 << 20


def _route(logits_TE: torch.Tensor, bias_E: torch.Tensor | None, implementation: Implementation) -> torch.Tensor:
    """Route as a layer does before its expert GEMMs; returns the weights, by which systems are compared."""
    if bias_E is None:
        weight_TK, expert_TK = select_topk(logits_TE, NUM_CHOSEN, renormalise=True, implementation=implementation)
    else:
        weight_TK, expert_TK = select_topk(
            logits_TE,
            NUM_CHOSEN,
            scoring=Scoring.SIGMOID,
            renormalise=True,
            bias_E=bias_E,
            num_groups=8,
            num_kept_groups=4,
            scaling=2.5,
            implementation=implementation,
        )
    moe_align(expert_TK, logits_TE.shape[1], implementation=implementation)
    return weight_TK


def _prepare(num_tokens: int, num_experts: int, is_grouped: bool, device: torch.device, num_sets: int) -> Systems:
    ours: list[Call] = []
    torch_calls: list[Call] = []
    chosen: list[Call] = []
    balanced: list[Call] = []
    for _ in range(num_sets):
        logits_TE = torch.randn(num_tokens, num_experts, device=device).bfloat16()
        bias_E = torch.randn(num_experts, device=device) if is_grouped else None
        ours.append(partial(_route, logits_TE, bias_E, Implementation.AUTO))
        torch_calls.append(partial(_route, logits_TE, bias_E, Implementation.REFERENCE))
        chosen.append(partial(select_topk, logits_TE, NUM_CHOSEN, renormalise=True))
        weight_TK, expert_TK = select_topk(logits_TE, NUM_CHOSEN)
        balance = partial(fake_balance_experts, num_experts=num_experts, benchmark=ACKNOWLEDGEMENT, ep_size=8)
        balanced.append(partial(balance, expert_TK, weight_TK))
    return {"ours": ours, "torch": torch_calls, "select_alone": chosen, "fake_balance": balanced}


def cases() -> list[KernelCase]:
    """A tiny case for CPUs, then both layer sizes, and DeepSeek-V3's groups."""
    points = [(3, 16, False, False)]
    points += [(num_tokens, num_experts, False, True) for num_experts in (128, 256) for num_tokens in NUM_TOKENS]
    points += [(num_tokens, 256, True, True) for num_tokens in (1, 64, 256)]
    return [
        KernelCase(
            kernel="select_topk",
            shape=f"T={num_tokens} E={num_experts} K={NUM_CHOSEN}{' groups=8' if is_grouped else ''} with moe_align",
            num_bytes=num_tokens * (2 * num_experts + 24 * NUM_CHOSEN),
            set_bytes=max(SET_BYTES, num_tokens * (2 * num_experts + 24 * NUM_CHOSEN)),
            prepare=partial(_prepare, num_tokens, num_experts, is_grouped),
            only_gpu=only_gpu,
        )
        for num_tokens, num_experts, is_grouped, only_gpu in points
    ]
