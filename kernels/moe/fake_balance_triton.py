# mypy: ignore-errors
"""The balanced pattern of `kernels.moe.fake_balance` in one launch, so that a benchmark's step is not longer by ten."""

import torch
import triton
import triton.language as tl

from baton.kernels.variant import Variant

BLOCK = 1024


@triton.jit(
    do_not_specialize=["expert_row", "weight_row", "num_ids", "rank", "local", "ep_size", "num_local"],
)
def _fake_balance_kernel(
    experts,
    weights,
    expert_row: tl.int32,
    weight_row: tl.int32,
    num_ids: tl.int32,
    rank: tl.int32,
    local: tl.int32,
    ep_size: tl.int32,
    num_local: tl.int32,
    K: tl.constexpr,
    B: tl.constexpr,
) -> None:
    its_B = tl.program_id(0) * B + tl.arange(0, B)
    id_B = (rank + its_B) % ep_size * num_local + (local + its_B // ep_size) % num_local
    row_B, choice_B = (its_B // K).to(tl.int64), its_B % K
    tl.store(experts + row_B * expert_row + choice_B, id_B.to(experts.dtype.element_ty), mask=its_B < num_ids)
    tl.store(weights + row_B * weight_row + choice_B, 1.0, mask=its_B < num_ids)


def launch(
    expert_TK: torch.Tensor, weight_TK: torch.Tensor, rank: int, local: int, ep_size: int, num_local: int
) -> None:
    """Of tensors with contiguous rows."""
    num_ids = expert_TK.numel()
    with torch.cuda.device_of(expert_TK):
        _fake_balance_kernel[(triton.cdiv(num_ids, BLOCK),)](
            expert_TK, weight_TK, expert_TK.stride(0), weight_TK.stride(0),
            num_ids, rank, local, ep_size, num_local, expert_TK.shape[1], BLOCK,
        )  # fmt: skip


def variants() -> list[Variant]:
    """The one."""
    types = {"experts": "*i64", "weights": "*fp32"}
    numbers = "expert_row", "weight_row", "num_ids", "rank", "local", "ep_size", "num_local"
    types |= dict.fromkeys(numbers, "i32")
    return [
        Variant(
            name="fake_balance_experts",
            kernel=_fake_balance_kernel,
            types=types,
            constants={"K": 8, "B": BLOCK},
            aligned=("experts", "weights"),
            max_registers=64,
        )
    ]
