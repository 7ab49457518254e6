# mypy: ignore-errors
"""The GEMMs of an MoE layer as Triton kernels, rows gathered by expert.

Few rows reach an expert in a decode step, so its weights decide: their rows are the wgmma's M side (64 at a time), up
to 16 rows its N side, and several programs on each multiprocessor keep 100 KB and more of weights on the way. Of chunks
of prompts, blocks are of up to 128 rows, so that weights are read few times. Programs that are neighbours stream
neighbouring weights. The tiles and the order of every sum are constants of a launch: what a row becomes does not depend
on the rows beside it.

The first GEMM reads the gate's rows and the up projection's in one program, so that silu(gate) * up, and where
weights are FP8 its quantization (one group of 128 columns is one program's), never leave it.

Shapes: T tokens, R rows of a block (of one expert), J weight rows of a tile, K of their columns in one step, INNER the
intermediate size, D the hidden size, G groups of 128.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from baton.kernels.dependent_launch import dependent_launch
from baton.kernels.gemm.quantize_fp8_triton import raise_scales
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.moe.align import GROUP, Alignment
from baton.kernels.moe.held_experts import HeldExperts
from baton.kernels.variant import Variant, with_ue8m0

_GROUP = tl.constexpr(GROUP)
_LARGEST = tl.constexpr(448.0)
_SMALLEST = tl.constexpr(1e-10)
SUM_COLUMNS = 512
FEW = 16  # rows of a block up to which programs are few enough to begin before the launch before has ended


@triton.jit
def _silu_mul(gate, up):
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def load_tile(pointers, is_row, column_K, num_columns, MASK_ROWS: tl.constexpr, MASK_COLUMNS: tl.constexpr):
    """What lies outside of the tensor, or belongs to no row, is 0 and costs no traffic."""
    if MASK_ROWS and MASK_COLUMNS:
        return tl.load(pointers, mask=is_row[:, None] & (column_K < num_columns)[None, :], other=0.0)
    if MASK_ROWS:
        return tl.load(pointers, mask=is_row[:, None], other=0.0)
    if MASK_COLUMNS:
        return tl.load(pointers, mask=(column_K < num_columns)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def _gated_kernel(
    x,
    x_scale,
    gate_up,
    gate_up_scale,
    rows,
    block_expert,
    inner,
    inner_scale,
    CHOSEN: tl.constexpr,
    INNER: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    FP8: tl.constexpr,
    UE8M0: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """inner[row] = silu(gate x) * (up x) of the row's token and expert; one program for a block and J columns."""
    NUM_TILES: tl.constexpr = (INNER + J - 1) // J
    block = tl.program_id(0) // NUM_TILES
    first = tl.program_id(0) % NUM_TILES * J
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(block_expert + block).to(tl.int64)
    if expert < 0:
        return
    row_R = tl.load(rows + block * R + tl.arange(0, R))
    is_row_R = row_R >= 0
    token_R = tl.where(is_row_R, row_R // CHOSEN, 0).to(tl.int64)
    column_K = tl.arange(0, K)
    its_J = first + tl.arange(0, J)
    is_row_J = its_J < INNER
    gate_at = gate_up + expert * (2 * INNER * D) + its_J[:, None] * D + column_K[None, :]
    x_at = x + token_R[:, None] * D + column_K[None, :]
    gate_JR = tl.zeros([J, R], dtype=tl.float32)
    up_JR = tl.zeros([J, R], dtype=tl.float32)
    for step in tl.range(0, (D + K - 1) // K, num_stages=STAGES):
        at = step * K
        x_RK = load_tile(x_at + at, is_row_R, at + column_K, D, True, D % K != 0)
        gate_JK = load_tile(gate_at + at, is_row_J, at + column_K, D, INNER % J != 0, D % K != 0)
        up_JK = load_tile(gate_at + (INNER * D + at), is_row_J, at + column_K, D, INNER % J != 0, D % K != 0)
        if FP8:
            G: tl.constexpr = D // _GROUP
            scale_R = tl.load(x_scale + token_R * G + step, mask=is_row_R, other=0.0)
            scale_at = gate_up_scale + expert * (2 * INNER // _GROUP * G) + first // _GROUP * G + step
            gate_JR += tl.dot(gate_JK, x_RK.T) * (scale_R * tl.load(scale_at))[None, :]
            up_JR += tl.dot(up_JK, x_RK.T) * (scale_R * tl.load(scale_at + INNER // _GROUP * G))[None, :]
        else:
            gate_JR = tl.dot(gate_JK, x_RK.T, gate_JR)
            up_JR = tl.dot(up_JK, x_RK.T, up_JR)
    inner_JR = _silu_mul(gate_JR, up_JR)
    inner_at = inner + row_R.to(tl.int64)[:, None] * INNER + its_J[None, :]
    if FP8:
        scale_R = tl.maximum(tl.max(tl.abs(inner_JR), axis=0), _SMALLEST) / _LARGEST
        if UE8M0:
            scale_R = raise_scales(scale_R)
        value_JR = inner_JR / scale_R[None, :]
        tl.store(inner_at, value_JR.T.to(inner.dtype.element_ty), mask=is_row_R[:, None])
        tl.store(inner_scale + row_R.to(tl.int64) * (INNER // _GROUP) + first // _GROUP, scale_R, mask=is_row_R)
    else:
        mask_RJ = is_row_R[:, None] & is_row_J[None, :]
        tl.store(inner_at, inner_JR.T.to(inner.dtype.element_ty), mask=mask_RJ)


@triton.jit
def _down_kernel(
    inner,
    inner_scale,
    down,
    down_scale,
    rows,
    block_expert,
    weight,
    part,
    INNER: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    FP8: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """part[row] = weight[row] * (down inner[row]); one program for a block and J columns of the hidden size."""
    NUM_TILES: tl.constexpr = (D + J - 1) // J
    block = tl.program_id(0) // NUM_TILES
    first = tl.program_id(0) % NUM_TILES * J
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(block_expert + block).to(tl.int64)
    if expert < 0:
        return
    row_R = tl.load(rows + block * R + tl.arange(0, R))
    is_row_R = row_R >= 0
    its_R = tl.where(is_row_R, row_R, 0).to(tl.int64)
    weight_R = tl.load(weight + its_R, mask=is_row_R, other=0.0)
    column_K = tl.arange(0, K)
    its_J = first + tl.arange(0, J)
    is_row_J = its_J < D
    down_at = down + expert * (D * INNER) + its_J[:, None] * INNER + column_K[None, :]
    inner_at = inner + its_R[:, None] * INNER + column_K[None, :]
    sum_JR = tl.zeros([J, R], dtype=tl.float32)
    for step in tl.range(0, (INNER + K - 1) // K, num_stages=STAGES):
        at = step * K
        inner_RK = load_tile(inner_at + at, is_row_R, at + column_K, INNER, True, INNER % K != 0)
        down_JK = load_tile(down_at + at, is_row_J, at + column_K, INNER, D % J != 0, INNER % K != 0)
        if FP8:
            G: tl.constexpr = INNER // _GROUP
            scale_R = tl.load(inner_scale + its_R * G + step, mask=is_row_R, other=0.0)
            scale = tl.load(down_scale + expert * (D // _GROUP * G) + first // _GROUP * G + step)
            sum_JR += tl.dot(down_JK, inner_RK.T) * (scale_R * scale)[None, :]
        else:
            sum_JR = tl.dot(down_JK, inner_RK.T, sum_JR)
    part_RJ = (sum_JR * weight_R[None, :]).T
    mask_RJ = is_row_R[:, None]
    if D % J != 0:
        mask_RJ = mask_RJ & is_row_J[None, :]
    tl.store(part + its_R[:, None] * D + its_J[None, :], part_RJ.to(part.dtype.element_ty), mask=mask_RJ)


@triton.jit
def _sum_kernel(
    part,
    expert,
    out,
    FIRST: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    D: tl.constexpr,
    B: tl.constexpr,
    SOME: tl.constexpr,
    EARLY: tl.constexpr,
):
    """out[token] = its chosen experts' parts, added in the order they were chosen; ids of no expert add nothing.

    SOME: many ids are none of these experts, and their parts are not read.
    """
    token = tl.program_id(0).to(tl.int64)
    column_B = tl.program_id(1) * B + tl.arange(0, B)
    mask_B = column_B < D
    sum_B = tl.zeros([B], dtype=tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for choice in tl.static_range(CHOSEN):
        its = tl.load(expert + token * CHOSEN + choice) - FIRST
        is_own = (its >= 0) & (its < NUM_EXPERTS)
        # Else loaded whether or not it is used, so that no load waits for another.
        is_read_B = mask_B & is_own if SOME else mask_B
        part_B = tl.load(part + (token * CHOSEN + choice) * D + column_B, mask=is_read_B, other=0.0).to(tl.float32)
        sum_B += tl.where(is_own, part_B, 0.0)
    tl.store(out + token * D + column_B, sum_B.to(out.dtype.element_ty), mask=mask_B)


@dataclass(frozen=True, slots=True)
class GroupedGemm:
    """What the launches of an MoE layer share.

    Attributes:
        alignment: rows by expert.
        weights: of the experts, of one of the two kinds of `kernels.moe.gemm`.
        tiles: how the GEMMs are cut, `kernels.moe.gemm.Tiles`.
        weight_TK: of the choice, float32, contiguous.
        part_dtype: of a choice's result, and of what lies between the GEMMs unless weights are float8.
    """

    alignment: Alignment
    weights: Any
    tiles: Any
    weight_TK: torch.Tensor
    part_dtype: torch.dtype


def launch(gemm: GroupedGemm, x_TD: torch.Tensor, x_scale: torch.Tensor | None) -> torch.Tensor:
    """Two launches, of x in float8 where it has scales, contiguous: the parts of each choice, [N, D].

    Scales that are none are never read.
    """
    weights, tiles, weight_TK, is_fp8 = gemm.weights, gemm.tiles, gemm.weight_TK, x_scale is not None
    _, hidden, inner_size = weights.down_EDI.shape
    num_rows, num_chosen, device = weight_TK.numel(), weight_TK.shape[1], x_TD.device
    inner = torch.empty(num_rows, inner_size, dtype=x_TD.dtype, device=device)
    part = torch.empty(num_rows, hidden, dtype=gemm.part_dtype, device=device)
    gate_up_scale = down_scale = inner_scale = weight_TK
    if is_fp8:
        inner_scale = torch.empty(num_rows, inner_size // GROUP, dtype=torch.float32, device=device)
        gate_up_scale, down_scale = weights.gate_up_scale, weights.down_scale
    rows, block_expert = gemm.alignment.rows, gemm.alignment.block_expert
    gated, down = _constants(inner_size, hidden, num_chosen, tiles, is_fp8, is_fp8 and weights.ue8m0, device)
    num_blocks = len(block_expert)
    to_inner = (
        x_TD, x_scale if is_fp8 else weight_TK, weights.gate_up_EJD, gate_up_scale, rows, block_expert, inner,
        inner_scale,
    )  # fmt: skip
    to_part = (inner, inner_scale, weights.down_EDI, down_scale, rows, block_expert, weight_TK, part)
    with torch.cuda.device_of(x_TD):
        _launch_gated((num_blocks * -(-inner_size // tiles.gated_outputs),), to_inner, gated)
        _launch_down((num_blocks * -(-hidden // tiles.down_outputs),), to_part, down)
    return part


def launch_sum(
    part_ND: torch.Tensor,
    expert_TK: torch.Tensor,
    num_experts: int,
    held: HeldExperts | None,
    out_TD: torch.Tensor,
    *,
    is_early: bool,
) -> None:
    """Add the parts of each token's choices; all are contiguous."""
    (num_tokens, num_chosen), hidden = expert_TK.shape, part_ND.shape[1]
    total = _total_constants(num_experts, num_chosen, hidden, held, is_early, part_ND.device)
    _launch_sum((num_tokens, -(-hidden // SUM_COLUMNS)), (part_ND, expert_TK, out_TD), total)


@functools.lru_cache(maxsize=256)
def _constants(
    inner_size: int, hidden: int, num_chosen: int, tiles: Any, is_fp8: bool, ue8m0: bool, device: torch.device
) -> tuple[Constants, Constants]:
    """Of both GEMMs."""
    early = dependent_launch(device, tiles.block_len <= FEW)
    gated = gated_constants(inner_size, hidden, num_chosen, tiles, is_fp8) | {"num_warps": tiles.gated_warps}
    gated["UE8M0"] = ue8m0
    down = down_constants(inner_size, hidden, tiles, is_fp8) | {"num_warps": tiles.down_warps}
    return Constants(gated | early), Constants(down | early)


@functools.lru_cache(maxsize=256)
def _total_constants(
    num_experts: int, num_chosen: int, hidden: int, held: HeldExperts | None, is_early: bool, device: torch.device
) -> Constants:
    """Of the sum over a token's choices."""
    by_name = sum_constants(num_experts, num_chosen, hidden, held) | {"num_warps": 2}
    return Constants(by_name | dependent_launch(device, is_early))


_launch_gated = Launcher(_gated_kernel)
_launch_down = Launcher(_down_kernel)
_launch_sum = Launcher(_sum_kernel)


def gated_constants(inner_size: int, hidden: int, num_chosen: int, tiles: Any, is_fp8: bool) -> dict[str, Any]:
    """The constants of the first GEMM; steps are 128 bytes of a weight's row."""
    return {
        "CHOSEN": num_chosen,
        "INNER": inner_size,
        "D": hidden,
        "R": tiles.block_len,
        "J": tiles.gated_outputs,
        "K": 128 if is_fp8 else 64,
        "FP8": is_fp8,
        "UE8M0": False,
        "STAGES": tiles.gated_stages,
    }


def down_constants(inner_size: int, hidden: int, tiles: Any, is_fp8: bool) -> dict[str, Any]:
    """The constants of the second GEMM."""
    return {
        "INNER": inner_size,
        "D": hidden,
        "R": tiles.block_len,
        "J": tiles.down_outputs,
        "K": 128 if is_fp8 else 64,
        "FP8": is_fp8,
        "STAGES": tiles.down_stages,
    }


def sum_constants(num_experts: int, num_chosen: int, hidden: int, held: HeldExperts | None) -> dict[str, Any]:
    """The constants of the sum over a token's choices."""
    return {
        "FIRST": 0 if held is None else held.first,
        "NUM_EXPERTS": num_experts,
        "CHOSEN": num_chosen,
        "D": hidden,
        "B": SUM_COLUMNS,
        "SOME": held is not None,
    }


def variants() -> list[Variant]:
    """Both GEMMs, in float8 and bfloat16, at the tiles for few rows and for many, and the sums."""
    # Here, since that module imports this one.
    from baton.kernels.moe.gemm import choose_tiles

    found = []
    for is_fp8, num_experts, inner_size, num_rows, early in (
        (True, 128, 768, 8, True),
        (True, 128, 768, 512, True),
        (True, 256, 512, 16384, False),
        (False, 128, 768, 8, True),
        (False, 128, 768, 8, False),
        (False, 128, 768, 512, True),
        (False, 256, 512, 8192, False),
        (False, 256, 512, 32_768, False),
        (False, 128, 768, None, True),  # invariant
    ):
        tiles = choose_tiles(num_experts, inner_size, 2048, is_fp8, num_rows, 8)
        kind, matrix = ("fp8", "*fp8e4nv") if is_fp8 else ("bf16", "*bf16")
        types = dict.fromkeys(("x", "gate_up", "inner", "down"), matrix) | {"part": "*bf16"}
        types |= dict.fromkeys(("x_scale", "gate_up_scale", "inner_scale", "down_scale", "weight"), "*fp32")
        types |= dict.fromkeys(("rows", "block_expert"), "*i32")
        common: Mapping[str, Any] = {
            "types": types,
            "contains": ("QGMMA" if is_fp8 else "HGMMA", "LDGSTS"),
            "lacks": ("HMMA",),
            "max_registers": 144 if tiles.block_len < 32 else 255,
            "on_amd": not is_fp8 and not early,  # gfx942 has another float8, and launches nothing early
            # Any number of rows is multiplied by one instruction where no row may depend on it.
            "shapes": ("64x16x16",) if num_rows is None else (),
        }
        size = "invariant" if num_rows is None else f"rows={num_rows}"
        is_late = tiles.block_len <= FEW and not early
        name = f"{kind} {num_experts}x{inner_size}x2048 {size}{' late' * is_late}"
        gated = gated_constants(inner_size, 2048, 8, tiles, is_fp8) | {"EARLY": early}
        down = down_constants(inner_size, 2048, tiles, is_fp8) | {"EARLY": early}
        for gemm, kernel, constants, warps in (
            ("gated", _gated_kernel, gated, tiles.gated_warps),
            ("down", _down_kernel, down, tiles.down_warps),
        ):
            aligned = tuple(argument for argument in kernel.arg_names if argument not in constants)
            found.append(
                Variant(
                    name=f"moe_gemm {gemm} {name}",
                    kernel=kernel,
                    constants=constants,
                    aligned=aligned,
                    num_warps=warps,
                    **common,
                )
            )
    for name, held in (("sum", None), ("sum of some experts", HeldExperts(64, 64, 128))):
        found.append(
            Variant(
                name=f"moe_gemm {name}",
                kernel=_sum_kernel,
                types={"part": "*bf16", "expert": "*i64", "out": "*bf16"},
                constants=sum_constants(128 if held is None else held.count, 8, 2048, held) | {"EARLY": held is None},
                aligned=("part", "expert", "out"),
                num_warps=2,
                max_registers=128,
                on_amd=held is not None,  # which launches nothing early
            )
        )
    return with_ue8m0(found, "moe_gemm gated fp8 128x768x2048 rows=8")
