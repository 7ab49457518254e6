"""Rows of `baton bench kernels` for `linear_ordered`: batch-invariant bfloat16 GEMMs beside the library's.

"torch" is what default numerics compute, so `vs_torch` is the cost of batch invariance. Output and down projections add
eight slices of their inner dimension, as ranks would share them; the others add two.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch.nn import functional

from baton.bench.kernel_bench.case import Call, KernelCase, Systems, TuningPoint
from baton.kernels.gemm.linear import linear_ordered
from baton.kernels.gemm.linear_ordered_triton import NAME

# Outputs, inputs and slices: an 8B model's QKV, attention output, gate and up, down, and LM head; a 30B's attention and
# router.
SHAPES = (
    (6144, 4096, 2), (4096, 4096, 8), (24_576, 4096, 2), (4096, 12_288, 8), (151_936, 4096, 2),
    (5120, 2048, 2), (2048, 4096, 8), (128, 2048, 2),
)  # fmt: skip
_ROWS = (1, 16, 64, 256, 2048, 8192)
_FEW = 128


def _sets(device: torch.device, num_sets: int, M: int, N: int, K: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [
        (
            torch.randn(M, K, device=device, dtype=torch.bfloat16),
            torch.randn(N, K, device=device, dtype=torch.bfloat16) / K**0.5,
        )
        for _ in range(num_sets)
    ]


def _prepare(M: int, N: int, K: int, slices: int, device: torch.device, num_sets: int) -> Systems:
    sets = _sets(device, num_sets, M, N, K)
    return {
        "ours": [partial(linear_ordered, *one, num_slices=slices) for one in sets],
        "torch": [partial(functional.linear, *one) for one in sets],
    }


def cases() -> list[KernelCase]:
    """Each shape at the rows of decode steps and of prompts; a tiny case for CPUs."""
    sizes = [(M, *shape, True) for shape in SHAPES for M in _ROWS if M <= _FEW or shape[0] < 100_000]
    sizes.append((3, 64, 128, 8, False))
    return [
        KernelCase(
            kernel=NAME,
            shape=f"M={M} N={N} K={K} slices={slices}",
            num_bytes=2 * (N * K + M * K + M * N),
            num_flops=2 * M * N * K,
            is_read=M <= _FEW,
            set_bytes=2 * N * K,
            prepare=partial(_prepare, M, N, K, slices),
            only_gpu=only_gpu,
        )
        for M, N, K, slices, only_gpu in sizes
    ]


def _candidates(M: int, slices: int) -> list[Mapping[str, object]]:
    """Rows of the weight, warps, stages, and slices per program."""
    tiles = ((64, 4, 4), (64, 4, 6), (64, 4, 8), (128, 4, 4), (128, 8, 4), (128, 8, 5))
    if M > _FEW:
        tiles = ((128, 4, 4), (128, 8, 3), (128, 8, 4), (128, 8, 5), (256, 8, 3), (256, 8, 4))
    owns = [own for own in (1, 2, 4, 8) if own <= slices]
    return [
        {"outputs": outputs, "slices": own, "warps": warps, "stages": stages}
        for own in (owns if M <= _FEW else owns[-1:])
        for outputs, warps, stages in tiles
        if outputs < 256 or own <= 2  # registers hold no more sums
    ]


def _prepare_candidate(
    M: int, N: int, K: int, slices: int, device: torch.device, num_sets: int, options: Mapping[str, object]
) -> Sequence[Call]:
    sets = _sets(device, num_sets, M, N, K)
    return [partial(linear_ordered, *one, num_slices=slices, options=options) for one in sets]


def tuning() -> list[TuningPoint]:
    """Each shape except the LM head: for few rows, for a batch, and for a chunk."""
    return [
        TuningPoint(
            kernel=NAME,
            shape=f"{N}x{K} {slices}",
            size=M,
            candidates=_candidates(M, slices),
            set_bytes=2 * N * K,
            prepare=partial(_prepare_candidate, M, N, K, slices),
        )
        for N, K, slices in SHAPES
        for M in (16, 64, 2048)
        if N < 100_000
    ]
