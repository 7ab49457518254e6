"""Rows of `baton bench kernels` for `gemm_fp8` and `linear_fp8`, and the candidates of their tuned tables.

"gemm_fp8" rows begin with quantized activations; "linear_fp8" rows with bfloat16, beside the product alone, so that the
price of the quantization is the difference. "torch" is `torch._scaled_mm`, which scales per tensor and so does less.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from baton.bench.kernel_baselines_gemm import BlockScaled, deep_gemm
from baton.bench.kernel_case import Call, KernelCase, Systems, TuningPoint
from baton.kernels.fp8_weight import Fp8Weight
from baton.kernels.gemm_fp8 import gemm_fp8, gemm_fp8_reference, linear_fp8
from baton.kernels.gemm_fp8_plan import FEW_ROWS, SIZES, Plan, SwapAB, plan_of
from baton.kernels.quantize_fp8 import GROUP_LEN, quantize_fp8
from baton.kernels.scaled_mm import Library

SHAPES = (
    (4096, 4096), (6144, 4096), (24576, 4096), (4096, 12288),
    (2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048),
)  # fmt: skip
_SMALL = (1, 4, 8, 16, 32, 64, 128)
_LARGE = (1024, 4096)
_LARGE_SHAPES = SHAPES[:4]
# Programs that are aimed at by cutting K: one, two and three for each multiprocessor of an H200.
_PROGRAMS = (132, 264, 396)
_SHARED_BYTES = 227 << 10  # of a multiprocessor


@dataclass(frozen=True, slots=True)
class _Set:
    x_MK: torch.Tensor
    a_MK: torch.Tensor
    scales_GM: torch.Tensor
    weight: Fp8Weight


def _sets(device: torch.device, num_sets: int, M: int, N: int, K: int) -> list[_Set]:
    found = []
    for _ in range(num_sets):
        x_MK = torch.randn(M, K, device=device, dtype=torch.bfloat16)
        values_NK = (
            torch.randn(N, K, device=device, dtype=torch.bfloat16).mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn)
        )
        scales_BG = torch.rand(-(-N // GROUP_LEN), K // GROUP_LEN, device=device) * 1e-3
        found.append(_Set(x_MK, *quantize_fp8(x_MK), Fp8Weight.of(values_NK, scales_BG)))
    return found


def _num_bytes(M: int, N: int, K: int) -> int:
    return N * K + N * K // GROUP_LEN**2 * 4 + M * K + M * K // GROUP_LEN * 4 + 2 * M * N


def _per_tensor(data: _Set, one: torch.Tensor) -> torch.Tensor:
    weight_KN = data.weight.values_NK.t()
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        data.a_MK, weight_KN, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _for_others(data: _Set) -> BlockScaled:
    num_rows = len(data.a_MK)
    return BlockScaled(
        rows_MK=data.a_MK,
        row_scales=data.scales_GM[:, :num_rows].t(),
        weights_NK=data.weight.values_NK,
        weight_scales=data.weight.scales_BG,
    )


def _library(sets: Sequence[_Set]) -> dict[str, list[Call]]:
    """The library's products, as far as this device and version have them."""
    if sets[0].a_MK.device.type != "cuda":
        return {}
    one = torch.ones((), device=sets[0].a_MK.device)
    found: dict[str, list[Call]] = {"torch": [partial(_per_tensor, data, one) for data in sets]}
    library = Library()
    if library.product(sets[0].a_MK, sets[0].scales_GM, sets[0].weight) is not None:
        found["torch_blockwise"] = [partial(library.product, data.a_MK, data.scales_GM, data.weight) for data in sets]
    return found


def _prepare_gemm(M: int, N: int, K: int, device: torch.device, num_sets: int) -> Systems:
    sets = _sets(device, num_sets, M, N, K)

    def ours(**options: Any) -> list[Call]:
        return [partial(gemm_fp8, data.a_MK, data.scales_GM, data.weight, **options) for data in sets]

    wide = [torch.randn(N, K, device=device, dtype=torch.bfloat16) for _ in sets]
    plan = plan_of("gemm_fp8", M, N, K, SwapAB.AUTO, can_swap=True, device_index=device.index)
    late = {"late": ours(plan=replace(plan, pdl=False))} if plan is not None and plan.pdl else {}
    return {
        "ours": ours(),
        **late,
        "swap_on": ours(swap_ab=SwapAB.ON),
        "swap_off": ours(swap_ab=SwapAB.OFF),
        "invariant": ours(invariant=True),
        **_library(sets),
        **deep_gemm([_for_others(data) for data in sets]),
        "bf16": [partial(functional.linear, data.x_MK, wide_NK) for data, wide_NK in zip(sets, wide, strict=True)],
    }


def _prepare_linear(M: int, N: int, K: int, device: torch.device, num_sets: int) -> Systems:
    sets = _sets(device, num_sets, M, N, K)
    return {
        "ours": [partial(linear_fp8, data.x_MK, data.weight) for data in sets],
        "product_alone": [partial(gemm_fp8, data.a_MK, data.scales_GM, data.weight) for data in sets],
        "invariant": [partial(linear_fp8, data.x_MK, data.weight, invariant=True) for data in sets],
    }


def cases() -> list[KernelCase]:
    """Each shape at the rows of a decode step, some at those of prefill; one tiny one for CPUs."""
    sizes = [(M, N, K, True) for N, K in SHAPES for M in _SMALL]
    sizes += [(M, N, K, True) for N, K in _LARGE_SHAPES for M in _LARGE]
    sizes.append((4, 256, 256, False))
    return [
        KernelCase(
            kernel=kernel,
            shape=f"M={M} N={N} K={K}",
            num_bytes=_num_bytes(M, N, K),
            num_flops=2 * M * N * K,
            flops_dtype="fp8",
            is_read=M <= FEW_ROWS,
            set_bytes=N * K,
            prepare=partial(prepare, M, N, K),
            only_gpu=only_gpu,
        )
        for kernel, prepare in (("gemm_fp8", _prepare_gemm), ("linear_fp8", _prepare_linear))
        for M, N, K, only_gpu in sizes
        if kernel == "gemm_fp8" or M <= FEW_ROWS
    ]


# Tiles to choose from, by the rows that they are for. Stages times bytes of a step are what a program has under way.
_TILES: Mapping[int, Sequence[Plan]] = {
    8: (
        Plan(BM=8, BN=32, groups=2, stages=8, copied=True),
        Plan(BM=8, BN=32, groups=4, stages=4, copied=True),
        Plan(BM=8, BN=64, groups=1, stages=6, copied=True),
        Plan(BM=8, BN=64, groups=2, stages=4, copied=True),
        Plan(BM=8, BN=128, groups=2, stages=3, warps=8, tma=True),
    ),
    16: (
        Plan(BM=16, BN=16, groups=4, stages=6, copied=True),
        Plan(BM=16, BN=32, groups=2, stages=8, copied=True),
        Plan(BM=16, BN=32, groups=4, stages=4, copied=True),
        Plan(BM=16, BN=32, groups=2, stages=8, tma=True),
        Plan(BM=16, BN=64, groups=1, stages=6),
        Plan(BM=16, BN=64, groups=1, stages=6, copied=True),
        Plan(BM=16, BN=64, groups=2, stages=4),
        Plan(BM=16, BN=64, groups=2, stages=4, tma=True),
        Plan(BM=16, BN=64, groups=2, stages=8, tma=True),
        Plan(BM=16, BN=128, groups=1, stages=5),
        Plan(BM=16, BN=128, groups=2, stages=3, warps=8, tma=True),
    ),
    32: (
        Plan(BM=32, BN=32, groups=2, stages=6, copied=True),
        Plan(BM=32, BN=64, groups=1, stages=6),
        Plan(BM=32, BN=64, groups=2, stages=4, tma=True),
        Plan(BM=32, BN=128, groups=1, stages=5, warps=8),
        Plan(BM=32, BN=128, groups=2, stages=3, warps=8, tma=True),
    ),
    64: (
        Plan(BM=64, BN=64, groups=1, stages=5),
        Plan(BM=64, BN=64, groups=2, stages=3, tma=True),
        Plan(BM=64, BN=128, groups=1, stages=4, warps=8),
        Plan(BM=64, BN=128, groups=1, stages=4, warps=8, tma=True),
    ),
    128: (
        Plan(BM=64, BN=128, groups=1, stages=4, warps=8),
        Plan(BM=64, BN=128, groups=1, stages=4, warps=8, tma=True),
        Plan(BM=128, BN=128, groups=1, stages=4, warps=8, tma=True),
        Plan(swap=False, BM=64, BN=128, groups=1, stages=4, warps=4),
        Plan(swap=False, BM=128, BN=128, groups=1, stages=4, warps=8, tma=True),
    ),
}
# Where tokens fill an instruction anyway, tiles of few rows of the weight occupy all multiprocessors without splits.
_PLAIN_TILES: Mapping[int, Sequence[Plan]] = {
    **dict.fromkeys(
        (16, 32, 64),
        (
            Plan(swap=False, BM=64, BN=32, groups=1, stages=10, tma=True),
            Plan(swap=False, BM=64, BN=32, groups=2, stages=5, tma=True),
            Plan(swap=False, BM=64, BN=32, groups=1, stages=10),
            Plan(swap=False, BM=64, BN=64, groups=1, stages=6, tma=True),
            Plan(swap=False, BM=64, BN=128, groups=1, stages=5, tma=True),
            Plan(swap=False, BM=64, BN=128, groups=2, stages=3, warps=8, tma=True),
        ),
    ),
    128: (
        Plan(swap=False, BM=128, BN=32, groups=1, stages=8, warps=8, tma=True),
        Plan(swap=False, BM=64, BN=64, groups=1, stages=6, tma=True),
        Plan(swap=False, BM=128, BN=64, groups=1, stages=6, warps=8, tma=True),
        Plan(swap=False, BM=128, BN=128, groups=1, stages=5, warps=8, tma=True),
    ),
}
_LARGE_TILES = (
    Plan(swap=False, BM=128, BN=128, stages=4, warps=8),
    Plan(swap=False, BM=128, BN=128, stages=4, warps=8, tma=True),
    Plan(BM=128, BN=128, stages=4, warps=8, tma=True),
)
_LIBRARY: Mapping[str, object] = {"library": True}


def _shared_bytes(tile: Plan) -> int:
    """That a program takes, about."""
    return tile.stages * tile.groups * GROUP_LEN * (tile.BN + (2 if tile.fused else 1) * tile.BM)


def _with_splits(tile: Plan, size: int, N: int, K: int) -> list[Plan]:
    """The tile with each number of splits that is worth a try at a shape."""
    num_steps = K // GROUP_LEN // tile.groups
    if K // GROUP_LEN % tile.groups:
        return []
    num_tiles = -(-N // tile.BN) * -(-size // tile.BM)
    wanted = {max(1, programs // num_tiles) for programs in _PROGRAMS}
    if _shared_bytes(tile) > _SHARED_BYTES // 2:  # fills a multiprocessor alone
        wanted = {1, max(1, _PROGRAMS[0] // num_tiles)}
    return [Plan(**{**tile.row(), "splits": splits}) for splits in sorted(wanted) if splits <= max(1, num_steps // 2)]


def _candidates(kernel: str, size: int, N: int, K: int) -> list[Mapping[str, object]]:
    if size > FEW_ROWS:
        return [_LIBRARY, *[tile.row() for tile in _LARGE_TILES]]
    tiles = (*_TILES[size], *_PLAIN_TILES.get(size, ()))
    plans = [plan for tile in tiles for plan in _with_splits(tile, size, N, K)]
    late = [replace(plan, pdl=False).row() for plan in plans]
    if kernel == "gemm_fp8":
        return [*[plan.row() for plan in plans], *late, *([_LIBRARY] if size == 128 else [])]
    fused = [replace(plan, fused=True) for plan in plans if size <= 32 and plan.swap]
    inside = [plan.row() for plan in fused if _shared_bytes(plan) < _SHARED_BYTES]
    return [
        *inside,
        *[plan.row() for plan in plans],
        replace(plans[0], pdl=False).row(),
        *([_LIBRARY] if size == 128 else []),
    ]


def _prepare_candidate(
    kernel: str, M: int, N: int, K: int, device: torch.device, num_sets: int, options: Mapping[str, object]
) -> Sequence[Call]:
    sets = _sets(device, num_sets, M, N, K)
    plan = None if options.get("library") else Plan(**options)  # type: ignore[arg-type]
    if plan is None:
        return [partial(_library_or_reference, kernel, data) for data in sets]
    if kernel == "gemm_fp8":
        return [partial(gemm_fp8, data.a_MK, data.scales_GM, data.weight, plan=plan) for data in sets]
    return [partial(linear_fp8, data.x_MK, data.weight, plan=plan) for data in sets]


_LIBRARY_HERE = Library()


def _library_or_reference(kernel: str, data: _Set) -> torch.Tensor:
    """Where the library refuses, something slow: a refusal takes no time and must not win."""
    a_MK, scales_GM = data.a_MK, data.scales_GM
    if kernel == "linear_fp8":
        a_MK, scales_GM = quantize_fp8(data.x_MK, pad_to=4)
    found = _LIBRARY_HERE.product(a_MK, scales_GM, data.weight)
    return gemm_fp8_reference(a_MK, scales_GM, data.weight) if found is None else found


def tuning() -> list[TuningPoint]:
    """Each shape at the sizes of both tables; for many rows there is one."""
    return [
        TuningPoint(
            kernel=kernel,
            shape=f"{N}x{K}",
            size=size,
            candidates=_candidates(kernel, size, N, K),
            set_bytes=N * K,
            prepare=partial(_prepare_candidate, kernel, size, N, K),
        )
        for kernel in ("gemm_fp8", "linear_fp8")
        for N, K in SHAPES
        for size in SIZES
        if size <= FEW_ROWS or kernel == "gemm_fp8"
    ]
