"""Which MoE layers are computed row by row of the experts' weights, without tensor cores, and by what tiles. Pure.

Measured on an H200 with routing, experts out of the cache, on sizes of models and drawn ones
(`benchmarks/results/moe-vector-h200.json`): one token takes 0.38 to 0.89 of the time of the grouped form. Each of
several reads its own experts, so these must seldom meet. Where weights are float8, each program makes float8 of what
lies between the GEMMs, which pays for small ones only.
"""

import functools
from dataclasses import dataclass

MAX_TOKENS = 4
_APART = 8  # times as many experts as choices, so that tokens seldom have one in common
_MAX_HIDDEN = 4096  # a program of the first GEMM has all columns of its rows at once
_MAX_INNER = 16_384  # one of the second those of all choices of a single token
_MAX_INNER_OF_SEVERAL = 8192  # the same, of each of several
_MAX_INNER_FP8 = 8192  # the same where weights are float8, of all tokens together
_LEAST_COLUMNS = 128


@dataclass(frozen=True, slots=True)
class VectorTiles:
    """What programs of both GEMMs have.

    Attributes:
        gated_rows: columns of the intermediate size, for which it reads a row of the gate and one of the up projection.
        gated_columns: the hidden size, padded to a power of two.
        gated_warps: of such a program.
        choices: of a token, padded likewise.
        down_rows: columns of the hidden size.
        down_columns: the intermediate size, padded.
        down_warps: of such a program.
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
    """Of an MoE layer of that size. Where float8 is made, more rows share that."""
    columns, inner, choices = _padded(hidden), _padded(inner_size), 1 << (num_chosen - 1).bit_length()
    if is_fp8:
        return VectorTiles(max(1, min(8, 16_384 // columns)), columns, 8, choices, 8, inner, 8)
    gated_rows, down_rows = (max(1, min(16, 4096 // size)) for size in (columns, choices * inner))
    down_warps = max(4, min(8, down_rows * choices * inner // 1024))
    return VectorTiles(gated_rows, columns, 4, choices, down_rows, inner, down_warps)


def is_quicker(
    num_tokens: int, num_chosen: int, num_experts: int, inner_size: int, hidden: int, *, is_fp8: bool
) -> bool:
    """Whether an MoE layer takes less in this form than in the grouped one, by what was measured.

    Args:
        num_tokens: of the step.
        num_chosen: experts of each.
        num_experts: of the layer, of all ranks.
        inner_size: of an expert, of this rank.
        hidden: size.
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
