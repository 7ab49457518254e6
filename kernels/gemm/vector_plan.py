"""Decides which GEMMs are computed row by row of the weight, without tensor cores, and with which tiles.

Pure functions. Measured on an H200, behind a norm, on shapes of models and on random shapes
(`benchmarks/results/linear-vector-h200.json`): one token with a bfloat16 weight takes 0.43 to 1.03 of the time of the
GEMM used before. With a float8 weight each program quantizes the token itself, which pays for small weights only.
"""

import functools
from dataclasses import dataclass

MAX_TOKENS = 2
GROUP_LEN = 128  # inputs must be a multiple of it
MAX_INPUTS = 8192  # a program holds all columns of its rows at once
_TWO_INPUTS = 4096  # the same for two tokens
_TWO_ELEMENTS = 1 << 24  # maximum elements of a weight with padded columns, for two tokens
_FP8_ELEMENTS = {1: 1 << 23, 2: 1 << 22}  # maximum elements of a float8 weight with padding, by tokens
_LEAST_COLUMNS = 512


@dataclass(frozen=True, slots=True)
class VectorTile:
    """Work of one program.

    Attributes:
        outputs: rows of the weight.
        columns: all columns of these rows, padded to a power of two.
        warps: warps that share them.
    """

    outputs: int
    columns: int
    warps: int


def columns_of(num_inputs: int) -> int:
    """Number of columns including padding."""
    return max(_LEAST_COLUMNS, 1 << (num_inputs - 1).bit_length())


@functools.lru_cache(maxsize=1024)
def tile_of(num_inputs: int, *, is_fp8: bool) -> VectorTile:
    """Tile for weights with `num_inputs` columns. With float8, more rows share the quantization of the tokens."""
    columns = columns_of(num_inputs)
    if is_fp8:
        return VectorTile(min(8, 16_384 // columns), columns, 8 if columns >= 2048 else 4)
    outputs = max(1, 4096 // columns)
    return VectorTile(outputs, columns, outputs * columns // 1024)


def is_quicker(num_tokens: int, num_outputs: int, num_inputs: int, *, is_fp8: bool) -> bool:
    """Return whether such a GEMM is faster in this form than in the others, according to measurements."""
    if not 0 < num_tokens <= MAX_TOKENS or num_inputs % GROUP_LEN or not 0 < num_inputs <= MAX_INPUTS:
        return False
    columns = columns_of(num_inputs)
    if is_fp8:
        return num_outputs * columns <= _FP8_ELEMENTS[num_tokens]
    is_small = num_outputs * num_inputs <= _TWO_ELEMENTS
    return num_tokens == 1 or (num_inputs <= _TWO_INPUTS and (is_small or num_inputs == columns))
