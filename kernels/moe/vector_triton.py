# mypy: ignore-errors
"""The GEMMs of an MoE layer for a few tokens, without tensor cores: two launches, and no rows to sort.

A few tokens choose experts of their own, each of which is read once, row by row. So a program needs no more than the
choice: one has some rows of the gate and of the up projection of one choice; one has the same rows of the down
projection of all experts of a token, whose results it weighs and adds. It has asked for these before it waits for the
launch before, since the choice was known before that began.

Float8 is made of tokens, and of what lies between the GEMMs, as in `kernels.moe.gemm`.

A shared expert, the last choice of every token, is not among the padded choices: a ninth would double them.

Shapes: C choices of a token, padded to a power of two, N rows of a weight, K columns, G groups of 128 of them.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from baton.kernels.dependent_launch import dependent_launch
from baton.kernels.gemm.quantize_fp8_triton import raise_scales
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.moe.held_experts import HeldExperts
from baton.kernels.moe.vector_plan import VectorTiles, tiles_of
from baton.kernels.variant import Variant, with_ue8m0

_LARGEST = tl.constexpr(448.0)
_SMALLEST = tl.constexpr(1e-10)


@triton.jit
def _in_float8(x_GC, dtype: tl.constexpr, UE8M0: tl.constexpr):
    """Of groups along the last dimension: float32 values that float8 has, and the groups' scales."""
    scale_G = tl.maximum(tl.max(tl.abs(x_GC), axis=1, keep_dims=True), _SMALLEST) / _LARGEST
    if UE8M0:
        scale_G = raise_scales(scale_G)
    return (x_GC / scale_G).to(dtype).to(tl.float32), scale_G


@triton.jit
def _gated_vector_kernel(
    x, gate_up, gate_up_scale, expert, inner, x_stride, CHOSEN: tl.constexpr, FIRST: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, INNER: tl.constexpr, D: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    FP8: tl.constexpr, UE8M0: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """inner[choice] = silu(gate x) * (up x) of N columns of one choice."""
    NUM_TILES: tl.constexpr = (INNER + N - 1) // N
    choice = tl.program_id(0) // NUM_TILES
    first = tl.program_id(0) % NUM_TILES * N
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    own = tl.load(expert + choice).to(tl.int64) - FIRST
    if (own < 0) | (own >= NUM_EXPERTS):
        return
    row_N = first + tl.arange(0, N)
    column_K = tl.arange(0, K)
    # Rows past the end read the last one again, which costs less than a mask; they are not stored.
    at_NK = gate_up + own * (2 * INNER * D) + tl.minimum(row_N, INNER - 1)[:, None] * D + column_K[None, :]
    if K == D:
        gate_NK, up_NK = tl.load(at_NK), tl.load(at_NK + INNER * D)
    else:
        is_in_1K = (column_K < D)[None, :]
        gate_NK = tl.load(at_NK, mask=is_in_1K, other=0.0)
        up_NK = tl.load(at_NK + INNER * D, mask=is_in_1K, other=0.0)
    x += (choice // CHOSEN) * x_stride
    if FP8:
        GROUPS: tl.constexpr = D // 128
        group_G = tl.arange(0, K // 128)
        is_group_G = group_G < GROUPS
        at_GC = group_G[:, None] * 128 + tl.arange(0, 128)[None, :]
        x_GC = tl.load(x + at_GC, mask=is_group_G[:, None], other=0.0).to(tl.float32)
        x_GC, scale_G1 = _in_float8(x_GC, gate_up.dtype.element_ty, UE8M0)
        scales_at = gate_up_scale + own * (2 * INNER // 128 * GROUPS) + first // 128 * GROUPS + group_G
        gate_scale_G = tl.load(scales_at, mask=is_group_G, other=0.0)
        up_scale_G = tl.load(scales_at + INNER // 128 * GROUPS, mask=is_group_G, other=0.0)
        gate_x_K = tl.reshape(x_GC * (scale_G1 * gate_scale_G[:, None]), [K])
        up_x_K = tl.reshape(x_GC * (scale_G1 * up_scale_G[:, None]), [K])
    else:
        gate_x_K = tl.load(x + column_K, mask=column_K < D, other=0.0).to(tl.float32)
        up_x_K = gate_x_K
    gate_N = tl.sum(gate_NK.to(tl.float32) * gate_x_K[None, :], axis=1)
    up_N = tl.sum(up_NK.to(tl.float32) * up_x_K[None, :], axis=1)
    inner_N = gate_N / (1.0 + tl.exp(-gate_N)) * up_N
    tl.store(inner + choice * INNER + row_N, inner_N.to(inner.dtype.element_ty), mask=row_N < INNER)


@triton.jit
def _down_vector_kernel(
    inner, down, down_scale, expert, weight, out, CHOSEN: tl.constexpr, FIRST: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, INNER: tl.constexpr, D: tl.constexpr, C: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, FP8: tl.constexpr, UE8M0: tl.constexpr, ROUNDED: tl.constexpr, SHARED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """out[token] = the sum over its choices of weight * (down inner), N columns of it, each rounded as ROUNDED is.

    The choice is read before the wait: it was there before the launch before began, which has waited for all before it.
    SHARED: the last choice is the last expert for every token.
    """
    NUM_TILES: tl.constexpr = (D + N - 1) // N
    ROUTED: tl.constexpr = CHOSEN - SHARED
    token = tl.program_id(0) // NUM_TILES
    first = tl.program_id(0) % NUM_TILES * N
    choice_C = tl.arange(0, C)
    is_choice_C = choice_C < ROUTED
    own_C = tl.load(expert + token * CHOSEN + choice_C, mask=is_choice_C, other=-1).to(tl.int64) - FIRST
    is_own_C = is_choice_C & (own_C >= 0) & (own_C < NUM_EXPERTS)
    row_N = first + tl.arange(0, N)
    column_K = tl.arange(0, K)
    at_CN = tl.where(is_own_C, own_C, 0)[:, None] * (D * INNER) + tl.minimum(row_N, D - 1)[None, :] * INNER
    is_read_C1K = is_own_C[:, None, None] & (column_K < INNER)[None, None, :]
    down_CNK = tl.load(down + at_CN[:, :, None] + column_K[None, None, :], mask=is_read_C1K, other=0.0)
    weight_C = tl.load(weight + token * CHOSEN + choice_C, mask=is_own_C, other=0.0).to(tl.float32)
    if SHARED:
        at_NK = (NUM_EXPERTS - 1) * (D * INNER) + tl.minimum(row_N, D - 1)[:, None] * INNER + column_K[None, :]
        shared_NK = tl.load(down + at_NK, mask=(column_K < INNER)[None, :], other=0.0)
        shared_weight = tl.load(weight + token * CHOSEN + ROUTED).to(tl.float32)
    if FP8:
        GROUPS: tl.constexpr = INNER // 128
        pair_P = tl.arange(0, C * (K // 128))  # a choice and a group
        its_P, group_P = pair_P // (K // 128), pair_P % (K // 128)
        own_P = tl.load(expert + token * CHOSEN + its_P, mask=its_P < ROUTED, other=-1).to(tl.int64) - FIRST
        is_own_P = (its_P < ROUTED) & (group_P < GROUPS) & (own_P >= 0) & (own_P < NUM_EXPERTS)
        scales_at = down_scale + tl.where(is_own_P, own_P, 0) * (D // 128 * GROUPS) + first // 128 * GROUPS + group_P
        down_scale_P = tl.load(scales_at, mask=is_own_P, other=0.0)
        if SHARED:
            group_G = tl.arange(0, K // 128)
            is_group_G = group_G < GROUPS
            scale_at = (NUM_EXPERTS - 1) * (D // 128 * GROUPS) + first // 128 * GROUPS + group_G
            down_scale_G = tl.load(down_scale + scale_at, mask=is_group_G, other=0.0)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    inner += token * CHOSEN * INNER
    if FP8:
        at_P = its_P * INNER + group_P * 128
        inner_PC = tl.load(inner + at_P[:, None] + tl.arange(0, 128)[None, :], mask=is_own_P[:, None], other=0.0)
        inner_PC, scale_P1 = _in_float8(inner_PC, down.dtype.element_ty, UE8M0)
        inner_CK = tl.reshape(inner_PC * (scale_P1 * down_scale_P[:, None]), [C, K])
    else:
        is_in_CK = is_own_C[:, None] & (column_K < INNER)[None, :]
        at_CK = choice_C[:, None] * INNER + column_K[None, :]
        inner_CK = tl.load(inner + at_CK, mask=is_in_CK, other=0.0).to(tl.float32)
    part_CN = tl.sum(down_CNK.to(tl.float32) * inner_CK[:, None, :], axis=2) * weight_C[:, None]
    part_CN = tl.where(is_own_C[:, None], part_CN.to(ROUNDED).to(tl.float32), 0.0)
    sum_N = tl.sum(part_CN, axis=0)
    if SHARED:
        inner += ROUTED * INNER
        if FP8:
            at_GC = group_G[:, None] * 128 + tl.arange(0, 128)[None, :]
            inner_GC = tl.load(inner + at_GC, mask=is_group_G[:, None], other=0.0)
            inner_GC, scale_G1 = _in_float8(inner_GC, down.dtype.element_ty, UE8M0)
            inner_K = tl.reshape(inner_GC * (scale_G1 * down_scale_G[:, None]), [K])
        else:
            inner_K = tl.load(inner + column_K, mask=column_K < INNER, other=0.0).to(tl.float32)
        shared_N = tl.sum(shared_NK.to(tl.float32) * inner_K[None, :], axis=1) * shared_weight
        sum_N += shared_N.to(ROUNDED).to(tl.float32)
    tl.store(out + token * D + row_N, sum_N.to(out.dtype.element_ty), mask=row_N < D)


_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def launch(
    x_TD: torch.Tensor, expert_TK: torch.Tensor, weight_TK: torch.Tensor, weights: Any, out_TD: torch.Tensor
) -> None:
    """Write `out_TD`, contiguous; all arguments were checked.

    Args:
        x_TD: bfloat16 or float16, rows contiguous.
        expert_TK: the choice, contiguous.
        weight_TK: float32, contiguous.
        weights: of the experts, of one of the two kinds of `kernels.moe.gemm`.
        out_TD: the MoE output.
    """
    num_experts, hidden, inner_size = weights.down_EDI.shape
    num_tokens, num_chosen = expert_TK.shape
    is_fp8 = weights.down_EDI.element_size() == 1
    dtype = torch.float32 if is_fp8 else x_TD.dtype
    inner = torch.empty(num_tokens * num_chosen, inner_size, dtype=dtype, device=x_TD.device)
    gate_up_scale, down_scale = (weights.gate_up_scale, weights.down_scale) if is_fp8 else (weight_TK, weight_TK)
    tiles = tiles_of(num_chosen - weights.has_shared, inner_size, hidden, is_fp8=is_fp8)
    gated, down = _constants(
        tiles, num_experts, num_chosen, inner_size, hidden, is_fp8, is_fp8 and weights.ue8m0, x_TD.dtype,
        weights.held, weights.has_shared, x_TD.device,
    )  # fmt: skip
    x_stride = x_TD.stride(0) if num_tokens > 1 else hidden  # a single row's stride may be anything
    to_inner = (x_TD, weights.gate_up_EJD, gate_up_scale, expert_TK, inner, x_stride)
    to_out = (inner, weights.down_EDI, down_scale, expert_TK, weight_TK, out_TD)
    with torch.cuda.device_of(x_TD):
        _launch_gated((num_tokens * num_chosen * -(-inner_size // tiles.gated_rows),), to_inner, gated)
        _launch_down((num_tokens * -(-hidden // tiles.down_rows),), to_out, down)


@functools.lru_cache(maxsize=256)
def _constants(
    tiles: VectorTiles,
    num_experts: int,
    num_chosen: int,
    inner_size: int,
    hidden: int,
    is_fp8: bool,
    ue8m0: bool,
    dtype: torch.dtype,
    held: HeldExperts | None,
    has_shared: bool,
    device: torch.device,
) -> tuple[Constants, Constants]:
    """Of both launches."""
    early = dependent_launch(device)
    gated, down = _by_name(tiles, num_experts, num_chosen, inner_size, hidden, is_fp8, ue8m0, dtype, held, has_shared)
    gated["num_warps"], down["num_warps"] = tiles.gated_warps, tiles.down_warps
    return Constants(gated | early), Constants(down | early)


def _by_name(
    tiles: VectorTiles,
    num_experts: int,
    num_chosen: int,
    inner_size: int,
    hidden: int,
    is_fp8: bool,
    ue8m0: bool,
    dtype: torch.dtype,
    held: HeldExperts | None,
    has_shared: bool,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """All but `EARLY`."""
    both = {
        "CHOSEN": num_chosen,
        "FIRST": 0 if held is None else held.first,
        "NUM_EXPERTS": num_experts,
        "INNER": inner_size,
        "D": hidden,
        "FP8": is_fp8,
        "UE8M0": ue8m0,
    }
    gated = both | {"N": tiles.gated_rows, "K": tiles.gated_columns}
    down = both | {"C": tiles.choices, "N": tiles.down_rows, "K": tiles.down_columns, "ROUNDED": _TYPES[dtype]}
    return gated, down | {"SHARED": has_shared}


_launch_gated = Launcher(_gated_vector_kernel)
_launch_down = Launcher(_down_vector_kernel)


def variants() -> list[Variant]:
    """Of MoE layers as they are published, also with a shared expert, of all experts and of those that a rank holds."""
    found = []
    for num_experts, num_chosen, inner_size, hidden, is_fp8, has_all, has_shared in (
        (256, 8, 512, 2048, False, True, False),
        (256, 8, 512, 2048, True, True, False),
        (257, 9, 512, 2048, False, True, True),
        (257, 9, 512, 2048, True, True, True),
        (128, 8, 768, 2048, False, True, False),
        (128, 8, 768, 2048, True, True, False),
        (512, 10, 512, 2048, False, True, False),
        (512, 10, 512, 2048, True, True, False),
        (64, 6, 1408, 2048, False, True, False),
        (128, 8, 1536, 4096, False, True, False),
        (128, 8, 512, 2048, False, False, False),
        (128, 8, 512, 2048, True, False, False),
    ):
        early = has_all  # of those that ranks share, the form for other devices
        tiles = tiles_of(num_chosen - has_shared, inner_size, hidden, is_fp8=is_fp8)
        held = None if has_all else HeldExperts(num_experts, num_experts, 2 * num_experts)
        sizes = num_experts, num_chosen, inner_size, hidden
        both = _by_name(tiles, *sizes, is_fp8, False, torch.bfloat16, held, has_shared)
        matrix, inner = ("*fp8e4nv", "*fp32") if is_fp8 else ("*bf16", "*bf16")
        types = {"x": "*bf16", "gate_up": matrix, "down": matrix, "inner": inner, "out": "*bf16", "x_stride": "i32"}
        types |= dict.fromkeys(("gate_up_scale", "down_scale", "weight"), "*fp32") | {"expert": "*i64"}
        for name, kernel, constants, warps in (
            ("gated", _gated_vector_kernel, both[0], tiles.gated_warps),
            ("down", _down_vector_kernel, both[1], tiles.down_warps),
        ):
            its = tuple(argument for argument in kernel.arg_names if argument not in constants and argument != "EARLY")
            kind = f"{'fp8' if is_fp8 else 'bf16'}{'' if early else ' late'}"
            found.append(
                Variant(
                    name=f"moe_vector {name} {num_chosen} of {num_experts}x{inner_size}x{hidden} {kind}",
                    kernel=kernel,
                    types={argument: types[argument] for argument in its},
                    constants=constants | {"EARLY": early},
                    aligned=its,
                    num_warps=warps,
                    lacks=("HMMA", "HGMMA", "QGMMA"),
                    on_amd=not early and not is_fp8,  # gfx942 has another float8, and launches nothing early
                    options={"launch_pdl": True} if early else {},
                )
            )
    rounded = "gated 8 of 256", "down 8 of 256", "down 9 of 257"
    return with_ue8m0(found, *(f"moe_vector {name}x512x2048 fp8" for name in rounded))
