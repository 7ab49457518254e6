# mypy: ignore-errors
"""The float8 GEMM with scales as a Triton kernel: C = A W^T, with 1 x 128 scales of A and 128 x 128 of W.

Hopper's tensor cores take 64 rows at least. With few tokens the operands change sides: rows of the weight are the 64
or 128 rows of an instruction and tokens are its 16 to 64 columns, so nothing is computed for rows that do not exist.
Then the time is that of reading the weight, and all depends on bytes in flight: many stages, and K cut into splits
where the weight has too few rows to occupy all multiprocessors. Splits are added by whichever of them comes last, in
their own order, so the sum has one value. Tiles of 16 or 32 rows need no splits where 64 do; Hopper has no float8
instruction of that height, so they are multiplied in float16, which every float8 value is, at half the rate.

The tensor cores add with fewer bits than float32, therefore each partial sum over 128 columns is scaled and added in
float32 registers. Activations come quantized, or in bfloat16 and are quantized as they are loaded, to the same bits.
Programs may be there before the activations are (`kernels.dependent_launch`), and begin with the weight, which waits
for nothing: so the memory is busy between GEMMs, too.

Shapes: M tokens, N rows of the weight, K columns of both, I and J rows and columns of a tile.
"""

import functools
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from baton.kernels.dependent_launch import dependent_launch
from baton.kernels.gemm.fp8_plan import FEW_ROWS, SIZES, TABLES, GemmPlan, SwapAB, invariant_plan, plan_of
from baton.kernels.gemm.fp8_weight import Fp8Weight
from baton.kernels.gemm.quantize_fp8_triton import quantize_tile
from baton.kernels.gemm.workspace import MAX_TILES
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.prefetch_triton import prefetch
from baton.kernels.tuning import table
from baton.kernels.variant import Variant, with_ue8m0

_MAX_SPLIT_ROWS = 1024  # of a launch with splits, so that the parts stay a few dozen MB

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def _place(work, num_rows, K, num_splits, BM: tl.constexpr, STEP: tl.constexpr):
    """Tile and split of a work, and its steps; tiles of the same rows of the weight are neighbours."""
    num_m = tl.cdiv(num_rows, BM)
    pm = work % num_m
    split = work // num_m % num_splits
    pn = work // num_m // num_splits
    num_steps = K // 128 // STEP
    return pm, pn, split, split * num_steps // num_splits, (split + 1) * num_steps // num_splits


@triton.jit
def _prefetch(w_values, pn, first, last, N, K, BN: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr):
    """Have the weight of the first stages on its way to the L2 cache."""
    n = tl.minimum(pn * BN + tl.arange(0, BN), N - 1)
    at = w_values + n.to(tl.int64) * K + first * (STEP * 128)
    prefetch(at, tl.minimum(last - first, STAGES) * (STEP * 128))


@triton.jit
def _scales(a_scales, w_scales, group, a_scale_stride, m, is_row, QUANTIZE: tl.constexpr):
    """Of the weight, for all rows, and of the rows, if they are known already."""
    if QUANTIZE:
        m_M = tl.full(m.shape, 1.0, tl.float32)
    else:
        m_M = tl.load(a_scales + group * a_scale_stride + m, mask=is_row, other=0.0)
    return tl.load(w_scales + group), m_M


@triton.jit
def _add_group(
    acc, x, weight, scale, BM: tl.constexpr, SWAP: tl.constexpr, QUANTIZE: tl.constexpr, UE8M0: tl.constexpr
):
    """The sum with that of 128 more columns added; in float32, which the tensor cores' own sums are not."""
    if QUANTIZE:
        x, scale_m1 = quantize_tile(x.to(tl.float32), 1, UE8M0)
        scale = tl.reshape(scale_m1, [BM]) * scale
    if SWAP:
        acc += tl.dot(weight, x.T) * scale[None, :]
    else:
        acc += tl.dot(x, weight.T) * scale[:, None]
    return acc


@triton.jit
def _partial_sum(
    a, a_scales, w, w_scales, num_rows, N, K, a_stride, a_scale_stride, w_scale_stride, pm, pn, first, last,
    BM: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, COPIED: tl.constexpr,
    SWAP: tl.constexpr, QUANTIZE: tl.constexpr, UE8M0: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """The sum over steps [first, last) of STEP x 128 columns, float32; [BN, BM] if operands are swapped."""
    m = pm * BM + tl.arange(0, BM)
    n = pn * BN + tl.arange(0, BN)
    k = tl.arange(0, 128)
    is_row = m < num_rows
    a_at = a + m[:, None].to(tl.int64) * a_stride + k[None, :]
    if not TMA:
        # Rows past the end read the last one again, which costs less than a mask; they are not stored.
        w_at = w + tl.minimum(n, N - 1)[:, None].to(tl.int64) * K + k[None, :]
    w_scales += (pn * BN // 128).to(tl.int64) * w_scale_stride
    acc = tl.zeros([BN, BM] if SWAP else [BM, BN], tl.float32)
    if not COPIED:
        w_0, m_0 = _scales(a_scales, w_scales, first * STEP, a_scale_stride, m, is_row, QUANTIZE)
        if STEP == 2:
            w_1, m_1 = _scales(a_scales, w_scales, first * STEP + 1, a_scale_stride, m, is_row, QUANTIZE)
    for step in tl.range(first, last, num_stages=STAGES if COPIED else None):
        if not COPIED:
            # Loaded a step ahead, since they are waited for where they are used.
            following = tl.minimum(step + 1, last - 1) * STEP
            scale_0 = w_0 * m_0
            w_0, m_0 = _scales(a_scales, w_scales, following, a_scale_stride, m, is_row, QUANTIZE)
            if STEP == 2:
                scale_1 = w_1 * m_1
                w_1, m_1 = _scales(a_scales, w_scales, following + 1, a_scale_stride, m, is_row, QUANTIZE)
        for part in tl.static_range(STEP):
            group = step * STEP + part
            x = tl.load(a_at + group * 128, mask=is_row[:, None], other=0.0)
            if TMA:
                weight = w.load([pn * BN, group * 128])
            else:
                weight = tl.load(w_at + group * 128, eviction_policy="evict_first" if SWAP else "")
            if COPIED:
                scale = tl.load(w_scales + group + tl.zeros([BM], tl.int32))
                if not QUANTIZE:
                    scale *= tl.load(a_scales + group * a_scale_stride + m, mask=is_row, other=0.0)
            else:
                scale = scale_0 if part == 0 else scale_1
            acc = _add_group(acc, x, weight, scale, BM, SWAP, QUANTIZE, UE8M0)
    return acc


@triton.jit
def _store(c, acc, num_rows, N, c_stride, pm, pn, BM: tl.constexpr, BN: tl.constexpr, SWAP: tl.constexpr):
    m = pm * BM + tl.arange(0, BM)
    n = pn * BN + tl.arange(0, BN)
    if SWAP:
        acc = acc.T
    inside = (m < num_rows)[:, None] & (n < N)[None, :]
    tl.store(c + m[:, None].to(tl.int64) * c_stride + n[None, :], acc.to(c.dtype.element_ty), mask=inside)


@triton.jit
def _sum_of_parts(parts_at, num_splits, UNROLL: tl.constexpr, SIZE: tl.constexpr):
    """All parts of a tile in the order of the splits; UNROLL loads are under way at once."""
    total = tl.load(parts_at, cache_modifier=".cg")
    for start in range(1, num_splits, UNROLL):
        for step in tl.static_range(UNROLL):
            part = start + step
            mask = tl.full(parts_at.shape, True, tl.int1) & (part < num_splits)
            # Adding 0 for a part that is not there would turn -0 to 0, which no sum of products minds.
            total += tl.load(parts_at + part * SIZE, mask=mask, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def _tile(
    work, a, a_scales, w, w_scales, c, partials, counters, num_rows, N, K, a_stride, a_scale_stride, w_scale_stride,
    c_stride, num_splits, BM: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    COPIED: tl.constexpr, SWAP: tl.constexpr, QUANTIZE: tl.constexpr, UE8M0: tl.constexpr, SPLIT: tl.constexpr,
    TMA: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """One split of one tile."""
    pm, pn, split, first, last = _place(work, num_rows, K, num_splits, BM, STEP)
    acc = _partial_sum(
        a, a_scales, w, w_scales, num_rows, N, K, a_stride, a_scale_stride, w_scale_stride, pm, pn, first, last,
        BM, BN, STEP, STAGES, COPIED, SWAP, QUANTIZE, UE8M0, TMA,
    )  # fmt: skip
    if SPLIT:
        SIZE: tl.constexpr = BM * BN
        tile = pn * tl.cdiv(num_rows, BM) + pm
        within = tl.arange(0, acc.shape[0])[:, None] * acc.shape[1] + tl.arange(0, acc.shape[1])[None, :]
        parts_at = partials + tile.to(tl.int64) * num_splits * SIZE + within
        tl.store(parts_at + split * SIZE, acc)
        # All threads' parts are stored before one thread counts, and counted before the last program loads them.
        tl.debug_barrier()
        num_done = tl.atomic_add(counters + tile, 1, sem="acq_rel")
        if num_done == num_splits - 1:
            total = _sum_of_parts(parts_at, num_splits, UNROLL, SIZE)
            tl.store(counters + tile, 0)
            _store(c, total, num_rows, N, c_stride, pm, pn, BM, BN, SWAP)
    else:
        _store(c, acc, num_rows, N, c_stride, pm, pn, BM, BN, SWAP)


@triton.jit(do_not_specialize=["num_rows", "a_scale_stride", "w_scale_stride", "num_splits", "num_works"])
def _gemm_kernel(
    a, a_scales, w, w_values, w_scales, c, partials, counters, num_rows, N, K, a_stride, a_scale_stride,
    w_scale_stride, c_stride, num_splits, num_works, BM: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr, COPIED: tl.constexpr, SWAP: tl.constexpr, QUANTIZE: tl.constexpr, UE8M0: tl.constexpr,
    SPLIT: tl.constexpr, TMA: tl.constexpr, UNROLL: tl.constexpr, CAPPED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program for each split of each tile, or, if the number of programs is capped, several of them for each."""
    if EARLY:
        # The activations are being made: meanwhile the weight, which depends on nothing, is fetched.
        _, pn, _, first, last = _place(tl.program_id(0), num_rows, K, num_splits, BM, STEP)
        _prefetch(w_values, pn, first, last, N, K, BN, STEP, STAGES)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if CAPPED:
        for work in tl.range(tl.program_id(0), num_works, tl.num_programs(0)):
            _tile(
                work, a, a_scales, w, w_scales, c, partials, counters, num_rows, N, K, a_stride, a_scale_stride,
                w_scale_stride, c_stride, num_splits, BM, BN, STEP, STAGES, COPIED, SWAP, QUANTIZE, UE8M0, SPLIT, TMA,
                UNROLL,
            )  # fmt: skip
    else:
        _tile(
            tl.program_id(0), a, a_scales, w, w_scales, c, partials, counters, num_rows, N, K, a_stride,
            a_scale_stride, w_scale_stride, c_stride, num_splits, BM, BN, STEP, STAGES, COPIED, SWAP, QUANTIZE, UE8M0,
            SPLIT, TMA, UNROLL,
        )  # fmt: skip


def launch(
    a_MK: torch.Tensor,
    scales_GM: torch.Tensor | None,
    weight: Fp8Weight,
    c_MN: torch.Tensor,
    plan: GemmPlan,
    counters: torch.Tensor,
    *,
    num_sms: int | None = None,
) -> None:
    """Compute `c_MN`, in several launches if there are many rows and splits.

    Args:
        a_MK: float8, or bfloat16 to be quantized here; rows may be strided.
        scales_GM: of float8 activations; rows may be strided.
        weight: what they are multiplied with.
        c_MN: bfloat16; rows may be strided.
        plan: how.
        counters: int32 zeros [MAX_TILES], of the current stream; left as zeros.
        num_sms: programs at most.
    """
    num_rows = len(a_MK)
    if plan.splits == 1:
        _launch_rows(a_MK, scales_GM, weight, c_MN, plan, counters, num_sms)
        return
    num_tiles_n = triton.cdiv(weight.num_outputs, plan.BN)
    rows_at_once = min(num_rows, _MAX_SPLIT_ROWS, MAX_TILES // num_tiles_n * plan.BM)
    for start in range(0, num_rows, max(1, rows_at_once)):
        rows = slice(start, min(start + rows_at_once, num_rows))
        scales = None if scales_GM is None else scales_GM[:, rows]
        _launch_rows(a_MK[rows], scales, weight, c_MN[rows], plan, counters, num_sms)


def _launch_rows(a, scales, weight, c, plan, counters, num_sms) -> None:
    num_rows, K = a.shape
    N = weight.num_outputs
    num_works = -(-num_rows // plan.BM) * -(-N // plan.BN) * plan.splits
    is_capped = num_sms is not None and num_sms < num_works
    partials = c
    if plan.splits > 1:
        partials = torch.empty(num_works * plan.BM * plan.BN, dtype=torch.float32, device=c.device)
    values, scales_BG = weight.values_NK, weight.scales_BG
    arguments = (
        a,
        scales_BG if scales is None else scales,
        _described(weight, plan.BN) if plan.tma else values,
        values,
        scales_BG,
        c,
        partials,
        counters,
        num_rows,
        N,
        K,
        a.stride(0),
        0 if scales is None else scales.stride(0),
        scales_BG.stride(0),
        c.stride(0),
        plan.splits,
        num_works,
    )
    constants = _launch_constants(plan, scales is None, weight.ue8m0, is_capped, a.device)
    _launch_gemm((num_sms if is_capped else num_works,), arguments, constants)


def _described(weight: Fp8Weight, BN: int) -> TensorDescriptor:
    found = weight.prepared.get(BN)
    if found is None:
        found = weight.prepared[BN] = TensorDescriptor.from_tensor(weight.values_NK, [BN, 128])
    return found


@functools.lru_cache(maxsize=1024)
def _launch_constants(plan: GemmPlan, is_wide: bool, ue8m0: bool, is_capped: bool, device: torch.device) -> Constants:
    options = {"num_warps": plan.warps, "num_stages": plan.stages} | dependent_launch(device, plan.pdl)
    return Constants(_constants(plan, is_wide, ue8m0, is_capped) | options)


def _constants(plan: GemmPlan, is_wide: bool, ue8m0: bool, is_capped: bool) -> dict[str, Any]:
    """All but `EARLY`."""
    values_per_thread = plan.BM * plan.BN // (32 * plan.warps)
    return {
        "BM": plan.BM,
        "BN": plan.BN,
        "STEP": plan.groups,
        "STAGES": plan.stages,
        "COPIED": plan.copied,
        "SWAP": plan.swap,
        "QUANTIZE": is_wide,
        "UE8M0": ue8m0 and is_wide,
        "SPLIT": plan.splits > 1,
        "TMA": plan.tma,
        "UNROLL": max(1, min(8, 64 // values_per_thread)),  # parts of a sum that registers hold at once
        "CAPPED": is_capped,
    }


_launch_gemm = Launcher(_gemm_kernel)


def _variant(plan: GemmPlan, *, is_wide: bool = False, is_capped: bool = False) -> Variant:
    integers = (
        "num_rows", "N", "K", "a_stride", "a_scale_stride", "w_scale_stride", "c_stride", "num_splits", "num_works",
    )  # fmt: skip
    is_low = plan.swap and (
        plan.BN < 64 or plan.BM < 16
    )  # float8 instructions are for larger tiles: these multiply as float16
    types = {
        "a": "*bf16" if is_wide else "*fp8e4nv",
        "a_scales": "*fp32",
        "w": f"tensordesc<fp8e4nv[{plan.BN}, 128]>" if plan.tma else "*fp8e4nv",
        "w_values": "*fp8e4nv",
        "w_scales": "*fp32",
        "c": "*bf16",
        "partials": "*fp32" if plan.splits > 1 else "*bf16",
        "counters": "*i32",
        **dict.fromkeys(integers, "i32"),
    }
    aligned = ["a", "a_scales", "w_values", "w_scales", "c", "partials", "counters", "N", "K", "a_stride", "c_stride"]
    traits = [
        f"{plan.BM}x{plan.BN}x{128 * plan.groups}", f"stages={plan.stages}", f"warps={plan.warps}",
        *[name for name, holds in (
            ("copied", plan.copied),
            ("split", plan.splits > 1), ("tma", plan.tma), ("bf16", is_wide), ("capped", is_capped), ("pdl", plan.pdl)
        ) if holds],
    ]  # fmt: skip
    return Variant(
        name=f"gemm_fp8 {'swap' if plan.swap else 'plain'} {' '.join(traits)}",
        kernel=_gemm_kernel,
        types=types,
        constants=_constants(plan, is_wide, False, is_capped) | {"EARLY": plan.pdl},
        aligned=tuple(aligned if plan.tma else [*aligned, "w"]),
        num_warps=plan.warps,
        num_stages=plan.stages,
        contains=("HMMA" if is_low else "QGMMA", "UTMALDG" if plan.tma else "LDGSTS"),
        lacks=("QGMMA",) if is_low else ("HMMA",),
        on_amd=plan.swap and plan.BM == 16 and not plan.tma and not plan.pdl,
        options={"launch_pdl": True} if plan.pdl else {},
    )


def variants() -> list[Variant]:
    """What the tables and the rules launch for the shapes that are measured, in each form once."""
    shapes = {(4096, 4096), (24576, 4096)}
    shapes |= {tuple(map(int, shape.split("x"))) for name in TABLES for shape in table().get(name, {})}
    found = {}
    for name in TABLES:
        is_linear = name == "linear_fp8"
        for N, K in sorted(shapes):
            for size in (size for size in SIZES if size <= FEW_ROWS):
                plan = plan_of(name, size, N, K, SwapAB.AUTO, can_swap=True, device_index=None)
                if plan is not None and not plan.workers:
                    variant = _variant(plan, is_wide=is_linear and plan.fused)
                    found[variant.name] = variant
    plain = plan_of("gemm_fp8", 4096, 4096, 4096, SwapAB.OFF, can_swap=True, device_index=None)
    for variant in (
        _variant(plain),
        replace(_variant(invariant_plan(4096, 4096)), shapes=("64x64x32",)),
        _variant(GemmPlan(stages=6, pdl=False), is_capped=True),
        _variant(GemmPlan(BN=32, groups=2, stages=6, copied=True)),
        _variant(GemmPlan(swap=False, BM=64, BN=32, stages=10, tma=True)),
        _variant(GemmPlan(groups=2, stages=4, splits=2, tma=True, pdl=True)),
    ):
        found[variant.name] = variant
    wide = min(name for name, variant in found.items() if variant.types["a"] == "*bf16")
    return with_ue8m0([*found.values()], wide)
