"""Decides which MoE layers are computed row by row of the experts' weights, without tensor cores, and with which tiles.

Pure functions. Measured on an H200 with routing, experts not in the cache, on sizes of models and on random sizes
(`benchmarks/results/moe-vector-h200.json`): one token takes 0.38 to 0.89 of the time of the grouped GEMMs. Each of
several tokens reads its own experts, so tokens must seldom share experts. With float8 weights, each program quantizes
the values between the GEMMs itself, which pays for small ones only.
"""

import functools
from dataclasses import dataclass

MAX_TOKENS = 4
_APART = 8  # this many times more experts than choices, so that tokens seldom share one
_MAX_HIDDEN = 4096  # a program of the first GEMM holds all columns of its rows at once
_MAX_INNER = 16_384  # a program of the second holds those of all choices of a single token
_MAX_INNER_OF_SEVERAL = 8192  # the same for each of several tokens
_MAX_INNER_FP8 = 8192  # the same with float8 weights, for all tokens together
_LEAST_COLUMNS = 128


@dataclass(frozen=True, slots=True)
class VectorTiles:
    """Work of the programs of both GEMMs.

    Attributes:
        gated_rows: columns of the intermediate size, for each of which it reads a gate row and an up row.
        gated_columns: hidden size, padded to a power of two.
        gated_warps: warps of such a program.
        choices: choices of a token, padded likewise.
        down_rows: columns of the hidden size.
        down_columns: intermediate size, padded.
        down_warps: warps of such a program.
    """

    gated_rows: int
    gated_columns: int
    gated_warps: int
    choices: int
    down_rows: int
    down_columns: int
    down_warps: int


def _padded(size: int) -> int:
    return max(_LEAST_COLUMNS, 1 << (size - 1).bit_length())


@functools.lru_cache(maxsize=1024)
def tiles_of(num_chosen: int, inner_size: int, hidden: int, *, is_fp8: bool) -> VectorTiles:
    """Tiles for an MoE layer of that size. With float8, more rows share the quantization."""
    columns, inner, choices = _padded(hidden), _padded(inner_size), 1 << (num_chosen - 1).bit_length()
    if is_fp8:
        return VectorTiles(max(1, min(8, 16_384 // columns)), columns, 8, choices, 8, inner, 8)
    gated_rows, down_rows = (max(1, min(16, 4096 // size)) for size in (columns, choices * inner))
    down_warps = max(4, min(8, down_rows * choices * inner // 1024))
    return VectorTiles(gated_rows, columns, 4, choices, down_rows, inner, down_warps)


def is_quicker(
    num_tokens: int, num_chosen: int, num_experts: int, inner_size: int, hidden: int, *, is_fp8: bool
) -> bool:
    """Return whether an MoE layer is faster in this form than with grouped GEMMs, according to measurements.

    Args:
        num_tokens: tokens of the step.
        num_chosen: experts of each token.
        num_experts: experts of the layer, at all ranks.
        inner_size: intermediate size of an expert at this rank.
        hidden: hidden size.
        is_fp8: whether weights are float8.
    """
    if not 0 < num_tokens <= MAX_TOKENS or num_chosen == 0 or hidden > _MAX_HIDDEN:
        return False
    if num_tokens > 1 and num_tokens * num_chosen * _APART > num_experts:
        return False
    inner = _padded(inner_size) * (1 << (num_chosen - 1).bit_length())
    if is_fp8:
        return num_tokens * inner <= _MAX_INNER_FP8
    return inner <= (_MAX_INNER if num_tokens == 1 else _MAX_INNER_OF_SEVERAL)
