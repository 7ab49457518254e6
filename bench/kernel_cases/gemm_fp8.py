"""Rows of `baton bench kernels` for `gemm_fp8` and `linear_fp8`, and the candidates of their tuned tables.

"gemm_fp8" rows begin with quantized activations; "linear_fp8" rows with bfloat16, beside the GEMM alone, so that the
difference is the cost of the quantization. "torch" is `torch._scaled_mm`, which scales per tensor and so does less.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from baton.bench.kernel_bench.baselines import BlockScaled, deep_gemm
from baton.bench.kernel_bench.case import Call, KernelCase, Systems, TuningPoint
from baton.kernels.gemm.fp8 import gemm_fp8, gemm_fp8_reference, linear_fp8
from baton.kernels.gemm.fp8_hopper_triton import is_form
from baton.kernels.gemm.fp8_plan import FEW_ROWS, SIZES, GemmPlan, SwapAB, plan_of
from baton.kernels.gemm.fp8_weight import Fp8Weight
from baton.kernels.gemm.quantize_fp8 import GROUP_LEN, quantize_fp8
from baton.kernels.gemm.scaled_mm import Library

SHAPES = (
    (4096, 4096), (6144, 4096), (24576, 4096), (4096, 12288),
    (2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048),
)  # fmt: skip
_SMALL = (1, 4, 8, 16, 32, 64, 128)
_LARGE = (1024, 4096)
_LARGE_SHAPES = SHAPES[:4]
_MIN_GROUPS = 4  # minimum groups of 128 columns in a split


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
    """The library's GEMMs, where this device and version have them."""
    if sets[0].a_MK.device.type != "cuda":
        return {}
    one = torch.ones((), device=sets[0].a_MK.device)
    found: dict[str, list[Call]] = {"torch": [partial(_per_tensor, data, one) for data in sets]}
    library = Library()
    if library.gemm(sets[0].a_MK, sets[0].scales_GM, sets[0].weight) is not None:
        found["torch_blockwise"] = [partial(library.gemm, data.a_MK, data.scales_GM, data.weight) for data in sets]
    return found


# Small enough for a memory checker; no table has rows of that size.
_HOPPER_TINY = (
    GemmPlan(stages=4, workers=2),
    GemmPlan(swap=False, BM=64, BN=32, stages=16, workers=2, depth=1, splits=2),
)
_HOPPER = 9


def _prepare_gemm(M: int, N: int, K: int, device: torch.device, num_sets: int) -> Systems:
    sets = _sets(device, num_sets, M, N, K)

    def ours(**options: Any) -> list[Call]:
        return [partial(gemm_fp8, data.a_MK, data.scales_GM, data.weight, **options) for data in sets]

    wide = [torch.randn(N, K, device=device, dtype=torch.bfloat16) for _ in sets]
    plan = plan_of("gemm_fp8", M, N, K, SwapAB.AUTO, can_swap=True, device_index=device.index)
    is_tiny = N * K < 1 << 17 and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == _HOPPER
    late = {"late": ours(plan=replace(plan, pdl=False))} if plan is not None and plan.pdl else {}
    return {
        "ours": ours(),
        **late,
        "swap_on": ours(swap_ab=SwapAB.ON),
        "swap_off": ours(swap_ab=SwapAB.OFF),
        "invariant": ours(invariant=True),
        **{f"hopper_{number}": ours(plan=plan) for number, plan in enumerate(_HOPPER_TINY if is_tiny else ())},
        **_library(sets),
        **deep_gemm([_for_others(data) for data in sets]),
        "bf16": [partial(functional.linear, data.x_MK, wide_NK) for data, wide_NK in zip(sets, wide, strict=True)],
    }


def _prepare_linear(M: int, N: int, K: int, device: torch.device, num_sets: int) -> Systems:
    sets = _sets(device, num_sets, M, N, K)
    return {
        "ours": [partial(linear_fp8, data.x_MK, data.weight) for data in sets],
        "gemm_alone": [partial(gemm_fp8, data.a_MK, data.scales_GM, data.weight) for data in sets],
        "invariant": [partial(linear_fp8, data.x_MK, data.weight, invariant=True) for data in sets],
    }


def cases() -> list[KernelCase]:
    """Each shape at the rows of a decode step, some at those of prefill; a tiny case for CPUs."""
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


def _warp_specialized(BM: int, BN: int, stages: int, workers: int, depth: int, *, swap: bool = False) -> GemmPlan:
    return GemmPlan(swap=swap, BM=BM, BN=BN, stages=stages, workers=workers, depth=depth)


# Tiles to choose from, by the rows that they are for, of the Hopper kernel only. Their stages fill a multiprocessor's
# shared memory, or half of it, so that programs of the next launch can be resident already. The plan tuned before,
# which is in the table, is one more candidate.
_TILES: Mapping[int, Sequence[GemmPlan]] = {
    **dict.fromkeys(
        (8, 16),
        (
            _warp_specialized(16, 64, 20, 1, 4, swap=True),
            _warp_specialized(16, 64, 20, 2, 2, swap=True),
            _warp_specialized(16, 128, 11, 2, 4, swap=True),
            _warp_specialized(16, 64, 10, 2, 2, swap=True),
            _warp_specialized(16, 128, 5, 2, 4, swap=True),
        ),
    ),
    32: (
        _warp_specialized(32, 64, 16, 2, 2, swap=True),
        _warp_specialized(32, 128, 10, 2, 2, swap=True),
        _warp_specialized(64, 64, 12, 2, 2),
        _warp_specialized(32, 64, 8, 2, 2, swap=True),
        _warp_specialized(32, 128, 5, 2, 2, swap=True),
    ),
    64: (
        _warp_specialized(64, 64, 12, 2, 2),
        _warp_specialized(64, 64, 12, 2, 2, swap=True),
        _warp_specialized(64, 128, 8, 2, 1),
        _warp_specialized(64, 32, 16, 2, 1),
        _warp_specialized(64, 32, 8, 2, 2),
        _warp_specialized(64, 32, 8, 2, 1),
        _warp_specialized(64, 64, 4, 2, 1),
        _warp_specialized(64, 128, 4, 2, 1, swap=True),
    ),
    128: (
        _warp_specialized(64, 64, 12, 2, 2),
        _warp_specialized(128, 64, 8, 2, 2),
        _warp_specialized(64, 128, 8, 2, 1),
        _warp_specialized(128, 32, 10, 2, 2),
        _warp_specialized(64, 128, 8, 2, 2, swap=True),
        _warp_specialized(128, 128, 6, 2, 1),
        _warp_specialized(64, 64, 4, 2, 1),
        _warp_specialized(128, 64, 4, 2, 1),
        _warp_specialized(128, 32, 5, 2, 2),
    ),
}
_SPLITS = (1, 2, 4)  # tried where tiles alone leave multiprocessors idle
_FEW_TILES = 100
_MOST = 12  # maximum candidates for few rows
_LARGE_TILES = (
    GemmPlan(swap=False, BM=128, BN=128, stages=4, warps=8),
    GemmPlan(swap=False, BM=128, BN=128, stages=4, warps=8, tma=True),
    GemmPlan(BM=128, BN=128, stages=4, warps=8, tma=True),
)
_LIBRARY: Mapping[str, object] = {"library": True}


def _with_splits(tile: GemmPlan, size: int, N: int, K: int) -> list[GemmPlan]:
    """The tile with each number of splits worth trying at a shape."""
    num_tiles = -(-N // tile.BN) * -(-size // tile.BM)
    splits = [number for number in _SPLITS if number == 1 or number * _MIN_GROUPS <= K // GROUP_LEN]
    if num_tiles >= _FEW_TILES:
        splits = splits[:1]
    plans = [replace(tile, splits=number) for number in splits]
    return [plan for plan in plans if is_form(plan)]


def _candidates(kernel: str, size: int, N: int, K: int) -> list[Mapping[str, object]]:
    """Candidates; for few rows, `linear_fp8` has its earlier plan and the GEMM's, so tune the GEMM first."""
    if size > FEW_ROWS:
        return [_LIBRARY, *[tile.row() for tile in _LARGE_TILES]]
    before = _row_of(kernel, size, N, K)
    if kernel == "linear_fp8":
        gemm = _row_of("gemm_fp8", size, N, K)
        found = [before, gemm if gemm.get("library") else {**gemm, "fused": False}]
        return found[:1] if found[0] == found[1] else found
    plans = [plan for tile in _TILES[size] for plan in _with_splits(tile, size, N, K)]
    plans.sort(key=lambda plan: plan.splits == 4)  # the least likely are left out
    rows = [before, *[plan.row() for plan in plans[: _MOST - 1]]]
    return [row for place, row in enumerate(rows) if row not in rows[:place]]


def _row_of(kernel: str, size: int, N: int, K: int) -> Mapping[str, object]:
    """The plan in use, with all of its fields."""
    plan = plan_of(kernel, size, N, K, SwapAB.AUTO, can_swap=True, device_index=None)
    return _LIBRARY if plan is None else plan.row()


def _prepare_candidate(
    kernel: str, M: int, N: int, K: int, device: torch.device, num_sets: int, options: Mapping[str, object]
) -> Sequence[Call]:
    sets = _sets(device, num_sets, M, N, K)
    plan = None if options.get("library") else GemmPlan(**options)  # type: ignore[arg-type]
    if plan is None:
        return [partial(_library_or_reference, kernel, data) for data in sets]
    if kernel == "gemm_fp8":
        return [partial(gemm_fp8, data.a_MK, data.scales_GM, data.weight, plan=plan) for data in sets]
    return [partial(linear_fp8, data.x_MK, data.weight, plan=plan) for data in sets]


_LIBRARY_HERE = Library()


def _library_or_reference(kernel: str, data: _Set) -> torch.Tensor:
    """Use the slow reference where the library refuses, because a refusal takes no time and must not win."""
    a_MK, scales_GM = data.a_MK, data.scales_GM
    if kernel == "linear_fp8":
        a_MK, scales_GM = quantize_fp8(data.x_MK, pad_to=4)
    found = _LIBRARY_HERE.gemm(a_MK, scales_GM, data.weight)
    return gemm_fp8_reference(a_MK, scales_GM, data.weight) if found is None else found


def tuning() -> list[TuningPoint]:
    """Each shape at the sizes of both tables; for many rows there is only one table."""
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
