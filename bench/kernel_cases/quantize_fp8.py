"""Rows of `baton bench kernels` for `quantize_fp8`: bfloat16 in, float8 and scales out."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import cast

import torch

from baton.bench.kernel_bench.baselines import torch_compiled
from baton.bench.kernel_bench.case import Call, KernelCase, Systems, TuningPoint
from baton.kernels.gemm.quantize_fp8 import GROUP_LEN, quantize_fp8, quantize_fp8_reference
from baton.kernels.gemm.quantize_fp8_triton import SIZES, launch

_ROWS = (1, 8, 64, 512, 2048, 8192)


def _num_bytes(num_rows: int, K: int) -> int:
    return num_rows * K * 3 + num_rows * K // GROUP_LEN * 4


def _inputs(device: torch.device, num_sets: int, num_rows: int, K: int) -> list[torch.Tensor]:
    return [torch.randn(num_rows, K, device=device, dtype=torch.bfloat16) for _ in range(num_sets)]


def _prepare(num_rows: int, K: int, device: torch.device, num_sets: int) -> Systems:
    inputs = _inputs(device, num_sets, num_rows, K)
    return {
        "ours": [partial(quantize_fp8, x_TK) for x_TK in inputs],
        "ue8m0": [partial(quantize_fp8, x_TK, ue8m0=True) for x_TK in inputs],
        "torch": [partial(quantize_fp8_reference, x_TK) for x_TK in inputs],
        **torch_compiled(quantize_fp8_reference, [(x_TK,) for x_TK in inputs]),
    }


def cases() -> list[KernelCase]:
    """Rows of a decode step and of a prefill chunk, at the sizes of an 8B model; a tiny case for CPUs."""
    shapes = [(num_rows, 4096) for num_rows in _ROWS] + [(16, 12288), (8192, 12288)]
    found = [(shape, True) for shape in shapes] + [((8, 256), False)]
    return [
        KernelCase(
            kernel="quantize_fp8",
            shape=f"T={num_rows} K={K}",
            num_bytes=_num_bytes(num_rows, K),
            set_bytes=_num_bytes(num_rows, K),
            prepare=partial(_prepare, num_rows, K),
            only_gpu=only_gpu,
        )
        for (num_rows, K), only_gpu in found
    ]


def _prepare_tile(
    num_rows: int, K: int, device: torch.device, num_sets: int, options: Mapping[str, object]
) -> Sequence[Call]:
    tile = cast(tuple[int, int, int], (options["ROWS"], options["GROUPS"], options["num_warps"]))
    calls = []
    for x_TK in _inputs(device, num_sets, num_rows, K):
        q_TK = torch.empty(num_rows, K, dtype=torch.float8_e4m3fn, device=device)
        scales_GT = torch.empty(K // GROUP_LEN, num_rows, device=device)
        calls.append(partial(launch, x_TK, q_TK, scales_GT, ue8m0=False, tile=tile))
    return calls


def tuning() -> list[TuningPoint]:
    """Tiles for few rows, which must be spread out, and for many, which need long contiguous accesses."""
    small = [(rows, groups, 1) for rows in (1, 2, 4) for groups in (1, 2)] + [(8, 2, 2), (8, 4, 4)]
    small += [(1, 8, 4), (2, 4, 4), (4, 2, 4), (4, 4, 8), (1, 4, 1)]
    middle = [
        (8, 4, 4),
        (8, 4, 8),
        (8, 2, 4),
        (8, 2, 2),
        (4, 4, 4),
        (4, 2, 2),
        (4, 4, 2),
        (4, 8, 8),
        (2, 8, 4),
        (8, 1, 2),
    ]
    large = [(8, 4, 4), (8, 2, 2), (16, 2, 4), (16, 4, 4), (16, 4, 8), (32, 1, 4), (32, 2, 8), (4, 8, 4), (8, 8, 8)]
    return [
        TuningPoint(
            kernel="quantize_fp8",
            shape="any",
            size=size,
            candidates=[
                {"ROWS": rows, "GROUPS": groups, "num_warps": num_warps}
                for rows, groups, num_warps in (small if size <= 64 else middle if size <= 512 else large)
            ],
            set_bytes=_num_bytes(size, 4096),
            prepare=partial(_prepare_tile, size, 4096),
        )
        for size in SIZES
    ]
