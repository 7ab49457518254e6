"""Forces perfectly balanced routing, for benchmarks of machines only: the answers are meaningless.

With random weights a router sends tokens anywhere, and a benchmark of expert parallelism measures that. This module
replaces a selection, after it was made, by a fixed pattern: choice i of data-parallel rank r goes to expert-parallel
rank (offset(r) + i) mod ep, there to the next expert in turn. A token's experts are distinct. Summed over data-parallel
ranks with equal batches, no expert has over one choice more than another, provided that the number of these ranks or
the number of experts per expert-parallel rank is a multiple of the other.

**Refused while serving.** A model that ran it would answer nonsense at full speed. So it is not an option of any
worker; only `bench/` imports this module or sets `Ops.rechoose`, by which it gets into a model, and tests enforce that;
and a call without the text of `ACKNOWLEDGEMENT` raises an error.

Source of the semantics: rtp-llm's FakeBalanceExpert. Legend: T tokens, K choices of each.
"""

import torch

from baton.kernels.arguments import require, require_rows, require_tensor
from baton.kernels.implementation import Implementation, uses_triton
from baton.kernels.moe import fake_balance_triton

ACKNOWLEDGEMENT = "benchmark only: the answers are meaningless"
_MAX_NUMBER = 1 << 30  # the sum of two numbers below it fits an int32


def fake_balance_experts(
    expert_TK: torch.Tensor,
    weight_TK: torch.Tensor,
    *,
    num_experts: int,
    benchmark: str,
    dp_rank: int = 0,
    dp_size: int = 1,
    ep_size: int = 1,
    implementation: Implementation = Implementation.AUTO,
) -> None:
    """Overwrite experts with the balanced pattern and weights with 1, in place, in one launch.

    Args:
        expert_TK: int32 or int64, rows contiguous.
        weight_TK: float32 or float64, rows contiguous.
        num_experts: experts of the layer, a multiple of `ep_size`.
        benchmark: text of `ACKNOWLEDGEMENT`, verbatim.
        dp_rank: data-parallel rank of this batch.
        dp_size: number of data-parallel ranks.
        ep_size: number of expert-parallel ranks.
        implementation: implementation to use.

    Raises:
        KernelArgumentInvalid: an argument does not fit; the message names it.
    """
    require(benchmark == ACKNOWLEDGEMENT, "benchmark", "made-up choices are for benchmarks, and refused while serving")
    require_tensor("expert_TK", expert_TK, (None, None), (torch.int32, torch.int64))
    require_tensor("weight_TK", weight_TK, expert_TK.shape, (torch.float32, torch.float64), expert_TK.device)
    require_rows("expert_TK", expert_TK)
    require_rows("weight_TK", weight_TK)
    require(ep_size > 0, "ep_size", f"is {ep_size}, not positive")
    is_multiple = num_experts > 0 and num_experts % ep_size == 0
    require(is_multiple, "num_experts", f"is {num_experts}, no multiple of {ep_size} ranks")
    require(num_experts < _MAX_NUMBER, "num_experts", f"is {num_experts}, 2^30 and more")
    require(expert_TK.numel() < _MAX_NUMBER, "expert_TK", f"has {expert_TK.numel()} choices, 2^30 and more")
    require(0 <= dp_rank < dp_size, "dp_rank", f"is {dp_rank}, not below {dp_size}")
    require(expert_TK.shape[1] <= num_experts, "expert_TK", f"has {expert_TK.shape[1]} choices of {num_experts}")
    num_local = num_experts // ep_size
    rank = ep_size * dp_rank // dp_size % ep_size
    local = (dp_rank * num_local // dp_size if num_local >= dp_size else dp_rank) % num_local
    if uses_triton(expert_TK.device, implementation):
        if expert_TK.numel() > 0:
            fake_balance_triton.launch(expert_TK, weight_TK, rank, local, ep_size, num_local)
        return
    its_N = torch.arange(expert_TK.numel(), device=expert_TK.device)
    id_N = (rank + its_N) % ep_size * num_local + (local + its_N // ep_size) % num_local
    expert_TK.copy_(id_N.view(expert_TK.shape))
    weight_TK.fill_(1.0)
