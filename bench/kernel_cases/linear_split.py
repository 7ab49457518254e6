"""Rows of `baton bench kernels` for `linear_split` beside the library's GEMM: shapes of serving, and random ones."""

import random
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from baton.bench.decode_bench.cell import kept
from baton.bench.kernel_bench.case import KernelCase, Systems
from baton.kernels.gemm.linear import linear_split

# Outputs and inputs: of a hybrid MoE model its router, gates, shared expert and outputs; of an 8B its outputs.
SHAPES = ((256, 2048), (64, 2048), (1024, 2048), (2048, 512), (2048, 4096), (4096, 4096), (4096, 12_288))
_ROWS = (1, 16, 32)
_NUM_DRAWN = 24


def _drawn() -> list[tuple[int, int, int]]:
    """Draw rows, outputs and inputs that nothing was tuned on, small ones as often as large ones."""
    draw = random.Random(24)
    found = []
    for _ in range(_NUM_DRAWN):
        num_outputs, num_inputs = 16 * round(2 ** draw.uniform(2, 8)), 128 * round(2 ** draw.uniform(1, 7))
        found.append((draw.choice((1, 3, 8, 16, 24, 32)), num_outputs, num_inputs))
    return found


def beside_library(
    gemm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    M: int,
    N: int,
    K: int,
    device: torch.device,
    num_sets: int,
) -> Systems:
    """A bfloat16 GEMM [M, N], and the library's."""

    def draw(rows: int) -> torch.Tensor:
        return torch.randn(rows, K, device=device).bfloat16()

    sets = [(draw(M), draw(N)) for _ in range(num_sets)]
    return {
        "ours": [kept(partial(gemm, *one)) for one in sets],
        "torch": [kept(partial(functional.linear, *one)) for one in sets],
    }


def cases() -> list[KernelCase]:
    """Each shape at rows of decode steps, then the random ones; a tiny case for CPUs."""
    sizes = [(M, *shape, "", True) for shape in SHAPES for M in _ROWS]
    sizes += [(*size, " drawn", True) for size in _drawn()]
    return [
        KernelCase(
            kernel="linear_split",
            shape=f"M={M} N={N} K={K}{mark}",
            num_bytes=2 * (N * K + M * K + M * N),
            num_flops=2 * M * N * K,
            is_read=True,
            set_bytes=2 * N * K,
            prepare=partial(beside_library, linear_split, M, N, K),
            only_gpu=only_gpu,
        )
        for M, N, K, mark, only_gpu in [*sizes, (3, 80, 256, "", False)]
    ]
