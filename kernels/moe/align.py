"""Sorts routed rows by expert into blocks of one expert each, on the device.

A row is one choice of a token, numbered token * K + choice. Every expert's rows keep their order and are padded to
whole blocks, so that a program of a grouped GEMM has one expert's weights and a fixed number of rows. The number of
blocks is a bound that depends on sizes only: nothing waits for the device, and a captured graph serves any choice of
experts.

Ids outside the range of experts (negative, or too large) get no row. That leaves out padding tokens, and experts that
other ranks hold, whose numbers are below the first of this rank or above its last.

Legend: T tokens, K choices of each, E experts, R rows of a block.
"""

from dataclasses import dataclass

import torch

from baton.kernels.arguments import require, require_rows, require_tensor
from baton.kernels.gemm.quantize_fp8 import raise_scales
from baton.kernels.implementation import Implementation, uses_triton
from baton.kernels.moe import align_triton as moe_align_triton

GROUP = moe_align_triton.GROUP  # columns that share a float8 scale
_LARGEST = 448.0  # largest float8_e4m3fn
_SMALLEST = 1e-10  # so that a group of zeros gets a scale, too


@dataclass(frozen=True, slots=True)
class Alignment:
    """Rows sorted into blocks.

    Attributes:
        rows: int32 [blocks * R], the rows of block after block; -1 pads a block. Blocks without an expert contain
            anything.
        block_expert: int32 [blocks], expert of each block; -1 from the first unused block on.
        block_len: R.
    """

    rows: torch.Tensor
    block_expert: torch.Tensor
    block_len: int


def max_blocks(num_rows: int, num_experts: int, block_len: int) -> int:
    """Maximum number of blocks that `num_rows` rows can need."""
    num_hit = min(num_rows, num_experts)
    return num_hit + (num_rows - num_hit) // block_len


def moe_align(
    expert_TK: torch.Tensor,
    num_experts: int,
    block_len: int = 16,
    *,
    first_expert: int = 0,
    implementation: Implementation = Implementation.AUTO,
) -> Alignment:
    """Sort choices by expert in one launch, without a host sync; the same choices give the same blocks.

    Args:
        expert_TK: int32 or int64 [T, K].
        num_experts: number of experts of the layer, or of those that this rank holds.
        block_len: a power of two.
        first_expert: number of the first expert; blocks count from it.
        implementation: implementation to use.

    Raises:
        KernelArgumentInvalid: `expert_TK`, `num_experts`, `block_len` or `first_expert` does not fit.
    """
    _check(expert_TK, num_experts, block_len, first_expert)
    return _align(expert_TK, num_experts, block_len, first_expert, None, implementation)


def moe_align_quantize(
    x_TD: torch.Tensor,
    expert_TK: torch.Tensor,
    num_experts: int,
    block_len: int = 16,
    *,
    first_expert: int = 0,
    ue8m0: bool = False,
    implementation: Implementation = Implementation.AUTO,
) -> tuple[Alignment, torch.Tensor, torch.Tensor]:
    """Sort as `moe_align` and quantize x in the same launch: float8_e4m3fn [T, D], scales float32 [T, D / 128].

    With `ue8m0` scales are rounded up to powers of two.

    Raises:
        KernelArgumentInvalid: as in `moe_align`, or `x_TD` has another number of tokens or a D that is no multiple of
            128.
    """
    _check(expert_TK, num_experts, block_len, first_expert)
    require_tensor("x_TD", x_TD, (expert_TK.shape[0], None), (torch.bfloat16, torch.float16, torch.float32))
    require_rows("x_TD", x_TD)
    require(x_TD.shape[1] % GROUP == 0, "x_TD", f"has {x_TD.shape[1]} columns, no multiple of {GROUP}")
    require(x_TD.device == expert_TK.device, "x_TD", f"is on {x_TD.device}, not {expert_TK.device}")
    if not uses_triton(x_TD.device, implementation):
        values_TD, scale_TG = quantize_reference(x_TD, ue8m0=ue8m0)
        alignment = _align(expert_TK, num_experts, block_len, first_expert, None, implementation)
        return alignment, values_TD, scale_TG
    values_TD = torch.empty(x_TD.shape, dtype=torch.float8_e4m3fn, device=x_TD.device)
    scale_TG = torch.empty(len(x_TD), x_TD.shape[1] // GROUP, dtype=torch.float32, device=x_TD.device)
    quantized = moe_align_triton.ToQuantize(x_TD, values_TD, scale_TG, ue8m0)
    alignment = _align(expert_TK, num_experts, block_len, first_expert, quantized, implementation)
    return alignment, values_TD, scale_TG


def _check(expert_TK: torch.Tensor, num_experts: int, block_len: int, first_expert: int) -> None:
    require_tensor("expert_TK", expert_TK, (None, None), (torch.int32, torch.int64))
    require(0 < num_experts <= 4096, "num_experts", f"is {num_experts}, not 1 to 4096")
    require(0 <= first_expert <= 4096, "first_expert", f"is {first_expert}, not 0 to 4096")
    is_power = block_len > 0 and block_len & (block_len - 1) == 0
    require(is_power, "block_len", f"is {block_len}, no power of two")
    require(expert_TK.numel() < 1 << 30, "expert_TK", f"has {expert_TK.numel()} choices, 2^30 and more")


def _align(
    expert_TK: torch.Tensor,
    num_experts: int,
    block_len: int,
    first_expert: int,
    quantized: moe_align_triton.ToQuantize | None,
    implementation: Implementation,
) -> Alignment:
    """Sort choices that were checked."""
    if not uses_triton(expert_TK.device, implementation):
        return moe_align_reference(expert_TK, num_experts, block_len, first_expert)
    num_blocks = max_blocks(expert_TK.numel(), num_experts, block_len)
    rows = torch.empty(num_blocks * block_len, dtype=torch.int32, device=expert_TK.device)
    block_expert = torch.empty(num_blocks, dtype=torch.int32, device=expert_TK.device)
    if expert_TK.numel() > 0 or (quantized is not None and len(quantized.x_TD) > 0):
        ids = expert_TK.contiguous()
        moe_align_triton.launch(ids, rows, block_expert, num_experts, block_len, first_expert, quantized)
    return Alignment(rows, block_expert, block_len)


def moe_align_reference(expert_TK: torch.Tensor, num_experts: int, block_len: int, first_expert: int = 0) -> Alignment:
    """Compute it in torch; never waits for the device. Rows of blocks without an expert are -1."""
    flat_N = expert_TK.flatten().long() - first_expert
    num_blocks = max_blocks(len(flat_N), num_experts, block_len)
    id_N = torch.where((flat_N >= 0) & (flat_N < num_experts), flat_N, num_experts)
    order_N = torch.argsort(id_N, stable=True)
    sorted_N = id_N[order_N]
    ones_N = torch.ones_like(id_N)
    count_E = torch.zeros(num_experts + 1, dtype=torch.int64, device=id_N.device).scatter_add_(0, id_N, ones_N)
    blocks_E = (count_E + block_len - 1) // block_len
    end_E = blocks_E[:num_experts].cumsum(0)
    first_E = torch.cumsum(blocks_E, 0) - blocks_E
    rank_N = torch.arange(len(id_N), device=id_N.device) - (count_E.cumsum(0) - count_E)[sorted_N]
    place_N = first_E[sorted_N] * block_len + rank_N
    # Rows without an expert go to one place behind all blocks.
    place_N = torch.where(sorted_N < num_experts, place_N, num_blocks * block_len)
    rows = torch.full((num_blocks * block_len + 1,), -1, dtype=torch.int32, device=id_N.device)
    rows.scatter_(0, place_N, order_N.int())
    block_expert = torch.searchsorted(end_E, torch.arange(num_blocks, device=id_N.device), right=True)
    block_expert = torch.where(block_expert < num_experts, block_expert, -1)
    return Alignment(rows[:-1], block_expert.int(), block_len)


def quantize_reference(x: torch.Tensor, *, ue8m0: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize [..., C] to float8_e4m3fn, with scales [..., C / 128]: a group's largest magnitude becomes 448.

    With `ue8m0` scales are rounded up to powers of two, and it becomes 224 to 448.
    """
    groups = x.float().unflatten(-1, (-1, GROUP))
    scale = groups.abs().amax(dim=-1).clamp(min=_SMALLEST) / _LARGEST
    if ue8m0:
        scale = raise_scales(scale)
    values = (groups / scale[..., None]).clamp(-_LARGEST, _LARGEST)
    return values.flatten(-2).to(torch.float8_e4m3fn), scale
