"""Rows of `baton bench kernels` for `linear_vector` beside the library's GEMM: shapes of serving, and random ones."""

import random
from functools import partial

from baton.bench.kernel_bench.case import KernelCase
from baton.bench.kernel_cases.linear_split import beside_library
from baton.kernels.gemm.linear import linear_vector

# Outputs and inputs: of an 8B, of a hybrid MoE model, and of a 32B.
SHAPES = (
    (6144, 4096), (4096, 4096), (28_672, 4096), (12_352, 2048), (2048, 4096), (1280, 2048), (2048, 512), (10_240, 5120),
)  # fmt: skip
_NUM_DRAWN = 16


def _drawn() -> list[tuple[int, int, int]]:
    """Draw rows, outputs and inputs that nothing was tuned on, small ones as often as large ones."""
    draw = random.Random(31)
    return [
        (draw.choice((1, 1, 2)), 16 * round(2 ** draw.uniform(3, 11)), 128 * round(2 ** draw.uniform(1, 5)))
        for _ in range(_NUM_DRAWN)
    ]


def cases() -> list[KernelCase]:
    """Each shape at one row, then the random ones; a tiny case for CPUs."""
    sizes = [(1, *shape, "", True) for shape in SHAPES]
    sizes += [(*size, " drawn", True) for size in _drawn()]
    return [
        KernelCase(
            kernel="linear_vector",
            shape=f"M={M} N={N} K={K}{mark}",
            num_bytes=2 * (N * K + M * K + M * N),
            num_flops=2 * M * N * K,
            is_read=True,
            set_bytes=2 * N * K,
            prepare=partial(beside_library, linear_vector, M, N, K),
            only_gpu=only_gpu,
        )
        for M, N, K, mark, only_gpu in [*sizes, (1, 80, 256, "", False)]
    ]
