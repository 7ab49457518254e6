# mypy: ignore-errors
"""The masked grouped GEMM as a Triton kernel: persistent programs over the tiles that have rows.

The number of rows of each expert lies on the device. Every program adds up all experts' tiles once, and then finds the
expert of each of its tiles by comparing with their ends: no list is made by another launch, and experts without rows
do not exist. Neighbouring programs stream neighbouring weights of one expert.

Shapes: E experts, M rows of each, N outputs, K inputs; tiles of R rows, J outputs, BK inputs.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from baton.kernels.moe.align import GROUP
from baton.kernels.moe.gemm_triton import load_tile
from baton.kernels.variant import Variant

_GROUP = tl.constexpr(GROUP)
_LARGEST = tl.constexpr(448.0)
_SMALLEST = tl.constexpr(1e-10)
QUANTIZE_ROWS = 4
QUANTIZE_GROUPS = 8


@triton.jit(do_not_specialize=["M"])
def _quantize_masked_kernel(
    a, masked_m, values, scales, M: tl.int32, K: tl.constexpr, ROWS: tl.constexpr, G: tl.constexpr
):
    """Rows below masked_m[expert], in groups of 128 columns: a -> float8 and its scales [E, K / 128, M]."""
    expert = tl.program_id(0).to(tl.int64)
    group = tl.program_id(2) * G + tl.arange(0, G)
    row_R = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    count = tl.minimum(tl.load(masked_m + expert).to(tl.int32), M)
    if tl.program_id(1) * ROWS >= count:
        return
    mask_RG = (row_R < count)[:, None] & (group < K // _GROUP)[None, :]
    at_RGK = (
        (expert * M + row_R)[:, None, None] * K + group[None, :, None] * _GROUP + tl.arange(0, _GROUP)[None, None, :]
    )
    value_RGK = tl.load(a + at_RGK, mask=mask_RG[:, :, None], other=0.0).to(tl.float32)
    scale_RG = tl.maximum(tl.max(tl.abs(value_RGK), axis=2), _SMALLEST) / _LARGEST
    value_RGK = value_RGK / scale_RG[:, :, None]
    tl.store(values + at_RGK, value_RGK.to(values.dtype.element_ty), mask=mask_RG[:, :, None])
    at_RG = expert * (K // _GROUP) * M + group[None, :] * M + row_R[:, None]
    tl.store(scales + at_RG, scale_RG, mask=mask_RG)


@triton.jit(do_not_specialize=["M", "num_experts"])
def _masked_kernel(
    a,
    a_scale,
    b,
    b_scale,
    masked_m,
    out,
    num_experts: tl.int32,
    M: tl.int32,
    N: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
    J: tl.constexpr,
    BK: tl.constexpr,
    FP8: tl.constexpr,
    SWAP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out[expert, :masked_m] = a b^T; programs walk over the tiles that have rows: expert, block of rows, J outputs."""
    NUM_TILES: tl.constexpr = (N + J - 1) // J
    G: tl.constexpr = (K + _GROUP - 1) // _GROUP
    its_E = tl.arange(0, E)
    count_E = tl.minimum(tl.load(masked_m + its_E, mask=its_E < num_experts, other=0).to(tl.int32), M)
    tiles_E = (tl.maximum(count_E, 0) + R - 1) // R * NUM_TILES
    end_E = tl.cumsum(tiles_E, axis=0)
    total = tl.sum(tiles_E, axis=0)
    column_K = tl.arange(0, BK)
    for tile in range(tl.program_id(0), total, tl.num_programs(0)):
        is_before_E = end_E <= tile
        number = tl.sum(is_before_E.to(tl.int32), axis=0)
        within = tile - tl.max(tl.where(is_before_E, end_E, 0), axis=0)
        count = tl.sum(tl.where(its_E == number, count_E, 0), axis=0)
        expert = number.to(tl.int64)
        first = within % NUM_TILES * J
        row_R = within // NUM_TILES * R + tl.arange(0, R)
        is_row_R = row_R < count
        its_J = first + tl.arange(0, J)
        is_row_J = its_J < N
        b_at = b + expert * N * K + its_J[:, None] * K + column_K[None, :]
        a_at = a + (expert * M + row_R)[:, None] * K + column_K[None, :]
        if SWAP:
            sum_2D = tl.zeros([J, R], dtype=tl.float32)
        else:
            sum_2D = tl.zeros([R, J], dtype=tl.float32)
        for step in tl.range(0, (K + BK - 1) // BK, num_stages=STAGES):
            at = step * BK
            a_RK = load_tile(a_at + at, is_row_R, at + column_K, K, True, K % BK != 0)
            b_JK = load_tile(b_at + at, is_row_J, at + column_K, K, N % J != 0, K % BK != 0)
            if FP8:
                scale_R = tl.load(a_scale + (expert * G + step) * M + row_R, mask=is_row_R, other=0.0)
                scale_R = scale_R * tl.load(
                    b_scale + (expert * ((N + _GROUP - 1) // _GROUP) + first // _GROUP) * G + step
                )
                if SWAP:
                    sum_2D += tl.dot(b_JK, a_RK.T) * scale_R[None, :]
                else:
                    sum_2D += tl.dot(a_RK, b_JK.T) * scale_R[:, None]
            elif SWAP:
                sum_2D = tl.dot(b_JK, a_RK.T, sum_2D)
            else:
                sum_2D = tl.dot(a_RK, b_JK.T, sum_2D)
        if SWAP:
            sum_2D = sum_2D.T
        out_at = out + (expert * M + row_R)[:, None] * N + its_J[None, :]
        tl.store(out_at, sum_2D.to(out.dtype.element_ty), mask=is_row_R[:, None] & is_row_J[None, :])


def quantize_masked(a_EMK: torch.Tensor, masked_m_E: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that count, in float8_e4m3fn, and their scales, float32 [E, K / 128, M]; others are left as they come."""
    num_experts, num_rows, num_inputs = a_EMK.shape
    values = torch.empty(a_EMK.shape, dtype=torch.float8_e4m3fn, device=a_EMK.device)
    num_groups = num_inputs // GROUP
    scales = torch.empty(num_experts, num_groups, num_rows, dtype=torch.float32, device=a_EMK.device)
    grid = (num_experts, triton.cdiv(num_rows, QUANTIZE_ROWS), triton.cdiv(num_groups, QUANTIZE_GROUPS))
    with torch.cuda.device_of(a_EMK):
        _quantize_masked_kernel[grid](
            a_EMK, masked_m_E, values, scales, num_rows, num_inputs, QUANTIZE_ROWS, QUANTIZE_GROUPS
        )
    return values, scales


def launch(
    a_EMK: torch.Tensor,
    masked_m_E: torch.Tensor,
    b_ENK: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    out_EMN: torch.Tensor,
    tiles: Any,
    swaps: bool,
    num_programs: int,
) -> None:
    """One launch of at most so many programs; tiles are `kernels.moe.gemm_masked.MaskedTiles`."""
    num_experts, num_rows, num_inputs = a_EMK.shape
    num_outputs = b_ENK.shape[1]
    a_scale, b_scale = scales if scales is not None else (out_EMN, out_EMN)  # never read
    most = num_experts * triton.cdiv(num_rows, tiles.rows) * triton.cdiv(num_outputs, tiles.outputs)
    with torch.cuda.device_of(a_EMK):
        _masked_kernel[(min(num_programs, most),)](
            a_EMK,
            a_scale,
            b_ENK,
            b_scale,
            masked_m_E,
            out_EMN,
            num_experts,
            num_rows,
            **constants_of((num_experts, num_outputs, num_inputs), tiles, scales is not None, swaps),
            num_warps=tiles.warps,
        )


def constants_of(shape_ENK: tuple[int, int, int], tiles: Any, is_fp8: bool, swaps: bool) -> dict[str, Any]:
    """The constants of a launch; steps are 128 bytes of a weight's row."""
    num_experts, num_outputs, num_inputs = shape_ENK
    return {
        "N": num_outputs,
        "K": num_inputs,
        "E": triton.next_power_of_2(num_experts),
        "R": tiles.rows,
        "J": tiles.outputs,
        "BK": 128 if is_fp8 else 64,
        "FP8": is_fp8,
        "SWAP": swaps,
        "STAGES": tiles.stages,
    }


def variants() -> list[Variant]:
    """The anchors' shapes, the form that is not swapped, bfloat16, and the quantization before."""
    # Here, since that module imports this one.
    from baton.kernels.moe.gemm_masked import choose_tiles

    found = []
    for shape_ENK, num_rows, is_fp8, swaps in (
        ((128, 1536, 2048), 16, True, True),
        ((128, 1536, 2048), 64, True, True),
        ((32, 4096, 7168), 16, True, True),
        ((128, 1536, 2048), 64, True, False),
        ((128, 1536, 2048), 16, False, True),
    ):
        tiles = choose_tiles(shape_ENK, is_fp8, swaps, num_rows, None)
        matrix = "*fp8e4nv" if is_fp8 else "*bf16"
        types = {"a": matrix, "b": matrix, "masked_m": "*i32", "out": "*bf16", "num_experts": "i32", "M": "i32"}
        scale = "*fp32" if is_fp8 else "*bf16"
        found.append(
            Variant(
                name=f"moe_gemm_masked {'fp8' if is_fp8 else 'bf16'} {'x'.join(map(str, shape_ENK))} rows={num_rows}"
                + ("" if swaps else " unswapped"),
                kernel=_masked_kernel,
                types={**types, "a_scale": scale, "b_scale": scale},
                constants=constants_of(shape_ENK, tiles, is_fp8, swaps),
                aligned=("a", "b", "a_scale", "b_scale", "masked_m", "out"),
                num_warps=tiles.warps,
                contains=("QGMMA" if is_fp8 else "HGMMA", "LDGSTS"),
                lacks=("HMMA",),
                max_registers=min(255, 65_536 // (32 * tiles.warps * tiles.programs) // 8 * 8),
                max_shared_bytes=232_448 // tiles.programs - 1024,
                on_amd=not is_fp8,  # gfx942 has another float8
            )
        )
    types = {"a": "*bf16", "masked_m": "*i32", "values": "*fp8e4nv", "scales": "*fp32", "M": "i32"}
    found.append(
        Variant(
            name="moe_gemm_masked quantize",
            kernel=_quantize_masked_kernel,
            types=types,
            constants={"K": 2048, "ROWS": QUANTIZE_ROWS, "G": QUANTIZE_GROUPS},
            aligned=("a", "masked_m", "values", "scales"),
            max_registers=128,
            on_amd=False,
        )
    )
    return found
