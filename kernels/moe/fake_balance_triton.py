# mypy: ignore-errors
"""The balanced pattern of `kernels.moe.fake_balance` in one launch, so that a benchmark's step is not longer by ten."""

import torch
import triton
import triton.language as tl

from baton.kernels.variant import Variant

BLOCK = 1024


@triton.jit(do_not_specialize=["num_ids", "rank", "local", "ep_size", "num_local"])
def _fake_balance_kernel(
    experts,
    weights,
    num_ids: tl.int32,
    rank: tl.int32,
    local: tl.int32,
    ep_size: tl.int32,
    num_local: tl.int32,
    B: tl.constexpr,
) -> None:
    its_B = tl.program_id(0) * B + tl.arange(0, B)
    id_B = (rank + its_B) % ep_size * num_local + (local + its_B // ep_size) % num_local
    tl.store(experts + its_B, id_B.to(experts.dtype.element_ty), mask=its_B < num_ids)
    tl.store(weights + its_B, 1.0, mask=its_B < num_ids)


def launch(
    expert_TK: torch.Tensor, weight_TK: torch.Tensor, rank: int, local: int, ep_size: int, num_local: int
) -> None:
    """Of contiguous tensors."""
    num_ids = expert_TK.numel()
    with torch.cuda.device_of(expert_TK):
        _fake_balance_kernel[(triton.cdiv(num_ids, BLOCK),)](
            expert_TK, weight_TK, num_ids, rank, local, ep_size, num_local, BLOCK
        )


def variants() -> list[Variant]:
    """The one."""
    types = {"experts": "*i64", "weights": "*fp32"}
    types |= dict.fromkeys(("num_ids", "rank", "local", "ep_size", "num_local"), "i32")
    return [
        Variant(
            name="fake_balance_experts",
            kernel=_fake_balance_kernel,
            types=types,
            constants={"B": BLOCK},
            aligned=("experts", "weights"),
            max_registers=64,
        )
    ]
