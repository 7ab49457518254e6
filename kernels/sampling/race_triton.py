# mypy: ignore-errors
"""The race of logits and noise in a chunk of a row: who may win it, and how well any other may do at most.

The scan does not compute scores but bounds of them (`noise_triton.log2_count`), as whole numbers that are in order and
end with a block's place. A chunk has W groups of blocks, each of which lies in one warp, so that no warp waits for
another: of each group it leaves the two blocks whose bounds are largest, and the largest bound of all others. The
kernel that decides computes the scores of the best two blocks of a chunk as the reference does, and knows from the
bounds of what is left whether a better one might be there.

A bound, as it is stored, is log2(e) times the score, counted from the chunk's largest logit, plus 32, or more, all in
parts of 128; what would be negative is 0, which only adds to it. The bits that a place takes are filled with ones where
it is read.

Legend: N tokens of a chunk, X blocks of four, W groups of T times S blocks, M chunks of a row, P rows.
"""

import triton
import triton.language as tl

from baton.kernels.sampling.noise_triton import log2_count, philox
from baton.kernels.sampling.row_triton import fours
from baton.kernels.variant import Variant

NO_BLOCK = tl.constexpr(0x1FFFFFFF)  # beyond any vocabulary
_GROUPS = 8  # as the scan has warps
_UNIT = tl.constexpr(128.0)  # of bounds as they are stored: half of it are those of -log2 of a count of 1
_OFFSET = tl.constexpr(32.0)  # what is left of it, as noise is that of count / 2^32
_LOG2_E = tl.constexpr(1.4426950408889634)
_ULPS = tl.constexpr(1.9073486328125e-06)  # 2^-19: see `least_reach`


def variants() -> list[Variant]:
    """None: these are parts of other kernels."""
    return []


def num_words(chunk: int) -> int:
    """How many int32 the race leaves of a chunk: of each group its two nominees, and what others do at most, twice."""
    return 4 * min(_GROUPS, chunk // 4)


@triton.jit
def counts_of(first_block, seed, choice, position, N: tl.constexpr, QUICK: tl.constexpr):
    """How many words are above those of a chunk's noise: a tensor for each place in a block."""
    purpose = tl.full([], 0, tl.int32)
    word_0X, word_1X, word_2X, word_3X = philox(
        first_block + tl.arange(0, N // 4), position, choice, purpose, seed, QUICK
    )  # fmt: skip
    return word_0X ^ 0xFFFFFFFF, word_1X ^ 0xFFFFFFFF, word_2X ^ 0xFFFFFFFF, word_3X ^ 0xFFFFFFFF


@triton.jit
def bound_of(
    raw_XT, count_0X, count_1X, count_2X, count_3X, best, scale, PAIRS: tl.constexpr, QUICK: tl.constexpr
):  # fmt: skip
    """The bound of each block of a chunk; `best` is finite."""
    x_0X, x_1X, x_2X, x_3X = fours(raw_XT, PAIRS)
    lag_0X = (best - x_0X) * scale + log2_count(count_0X, QUICK)
    lag_1X = (best - x_1X) * scale + log2_count(count_1X, QUICK)
    lag_2X = (best - x_2X) * scale + log2_count(count_2X, QUICK)
    lag_3X = (best - x_3X) * scale + log2_count(count_3X, QUICK)
    lag_X = tl.minimum(tl.minimum(lag_0X, lag_1X), tl.minimum(lag_2X, lag_3X))
    if QUICK:
        return tl.inline_asm_elementwise(
            "fma.rn.sat.f32 $0, $1, 0fBC000000, 0f3F000000;", "=f,f", [lag_X], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.minimum(tl.maximum(0.5 - lag_X / _UNIT, 0.0), 1.0)


@triton.jit
def store_nominees(bound_X, words, N: tl.constexpr):
    """Nominate two blocks of each group of a chunk and leave a bound of the others."""
    W: tl.constexpr = 8 if N >= 32 else N // 4
    S: tl.constexpr = 32 if N // 4 >= 32 * W else N // 4 // W
    T: tl.constexpr = N // 4 // (W * S)
    place_X = tl.arange(0, N // 4)
    index_X = (place_X // (W * S)) * S + place_X % S
    key_TWS = tl.reshape((bound_X.to(tl.int32, bitcast=True) & -(T * S)) | index_X, [T, W, S])
    first_W = tl.max(tl.max(key_TWS, axis=0), axis=1)
    key_TWS = tl.where(key_TWS == first_W[None, :, None], 0, key_TWS)
    second_W = tl.max(tl.max(key_TWS, axis=0), axis=1)
    key_TWS = tl.where(key_TWS == second_W[None, :, None], 0, key_TWS)
    rest_W = tl.max(tl.max(key_TWS, axis=0), axis=1)
    # All at once, as each store waits for all warps.
    word_W22 = tl.join(tl.join(first_W, rest_W), tl.join(second_W, rest_W))
    tl.store(words + tl.arange(0, 4 * W), tl.reshape(word_W22, [4 * W]))


@triton.jit
def store_race(raw_XT, best, scale, first_block, seed, choice, position, words, N: tl.constexpr, QUICK: tl.constexpr):
    """What a chunk of float32 leaves of the race; `best` is finite."""
    count_0X, count_1X, count_2X, count_3X = counts_of(first_block, seed, choice, position, N, QUICK)
    bound_X = bound_of(raw_XT, count_0X, count_1X, count_2X, count_3X, best, scale, False, QUICK)
    store_nominees(bound_X, words, N)


@triton.jit
def store_winner(words, row, num_chunks, token, M: tl.constexpr, N: tl.constexpr):
    """Nominate one token of a row; every other nominee does worse, and the bounds of the rest are the least."""
    W: tl.constexpr = 8 if N >= 32 else N // 4
    S: tl.constexpr = 32 if N // 4 >= 32 * W else N // 4 // W
    chunk_M1, word_1W = tl.arange(0, M)[:, None], tl.arange(0, 4 * W)[None, :]
    place = token % N // 4
    key = 0x3F000000 | (place // (W * S) * S + place % S)  # a bound of 32
    is_its_MW = (chunk_M1 == token // N) & (word_1W == place // S % W * 4)
    at_MW = words + (row * num_chunks + chunk_M1) * (4 * W) + word_1W
    tl.store(at_MW, tl.where(is_its_MW, key, 0), mask=chunk_M1 < num_chunks)


@triton.jit
def nominated(words, row_P1, is_read_P1, num_chunks, M: tl.constexpr, P: tl.constexpr, N: tl.constexpr):
    """The tokens of the best two blocks of each chunk, [P, 8 M]; and the bounds of all others, [P, M, W]."""
    W: tl.constexpr = 8 if N >= 32 else N // 4
    S: tl.constexpr = 32 if N // 4 >= 32 * W else N // 4 // W
    T: tl.constexpr = N // 4 // (W * S)
    chunk_1M1, word_11W = tl.arange(0, M)[None, :, None], tl.arange(0, 2 * W)[None, None, :]
    at_PM1 = words + (row_P1[:, :, None] * num_chunks + chunk_1M1) * (4 * W)
    is_there_PM1 = is_read_P1[:, :, None] & (chunk_1M1 < num_chunks)
    key_PMW = tl.load(at_PM1 + word_11W // 2 * 4 + word_11W % 2, mask=is_there_PM1, other=-1)
    rest_PMW = tl.load(at_PM1 + 2 + tl.arange(0, W)[None, None, :] * 4, mask=is_there_PM1, other=0)
    first_PM, word_PM = tl.max(key_PMW, axis=2, return_indices=True)
    block_0PM = _block_of(first_PM, word_PM, N, W, S, T)
    key_PMW = tl.where(word_11W == word_PM[:, :, None], -1, key_PMW)
    second_PM, word_PM = tl.max(key_PMW, axis=2, return_indices=True)
    block_1PM = _block_of(second_PM, word_PM, N, W, S, T)
    key_PMW = tl.where(word_11W == word_PM[:, :, None], -1, key_PMW)
    left_PMW = tl.max(tl.reshape(key_PMW, [P, M, W, 2]), axis=3)
    rest_PMW = tl.maximum(tl.maximum(rest_PMW, left_PMW), 0)
    block_PM2 = tl.join(block_0PM, block_1PM)
    token_PX4 = tl.reshape(block_PM2, [P, 2 * M])[:, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    rest_PMW = (rest_PMW | (T * S - 1)).to(tl.float32, bitcast=True) * _UNIT - _OFFSET
    return tl.reshape(token_PX4, [P, 8 * M]), rest_PMW


@triton.jit
def tokens_of_group(chunk, group, N: tl.constexpr):
    """The tokens of a group of a chunk."""
    W: tl.constexpr = 8 if N >= 32 else N // 4
    S: tl.constexpr = 32 if N // 4 >= 32 * W else N // 4 // W
    place_N = tl.arange(0, N // W)
    block_N = place_N // (4 * S) * (W * S) + group * S + place_N // 4 % S
    return chunk * N + block_N * 4 + place_N % 4


@triton.jit
def _block_of(key_PM, word_PM, N: tl.constexpr, W: tl.constexpr, S: tl.constexpr, T: tl.constexpr):
    """The block that a key of a group stands for."""
    index_PM = key_PM & (T * S - 1)
    first_PM = tl.arange(0, key_PM.shape[1])[None, :] * (N // 4)
    block_PM = first_PM + (index_PM // S) * (W * S) + (word_PM // 2) * S + index_PM % S
    return tl.where(key_PM < 0, NO_BLOCK, block_PM)


@triton.jit
def from_row(rest_PMW, best_PM, best_P1, temperature):
    """Bounds of groups, counted from the row's largest logit as scores are; -inf of chunks without any token."""
    is_any_PM = best_PM > float("-inf")
    shift_PM = tl.where(is_any_PM, best_PM - best_P1, 0.0) * (_LOG2_E / tl.maximum(temperature, 1e-30))
    return tl.where(is_any_PM[:, :, None], rest_PMW + shift_PM[:, :, None], float("-inf"))


@triton.jit
def least_reach(score):
    """The least bound that one may have whose score, as the reference rounds it, is not below this.

    Rounded are: the difference of logits, its scaling, the noise and their sum, there and here, each to 2^-24 of it;
    here the logarithm to 2^-22 of at most 32, and a bound to 2^-18. A token that could win has noise of at most 23, and
    so lies no further below the best than that and the score. 2^-19 of the score and 64 is several times their sum.
    """
    least = score * _LOG2_E
    return tl.where(score > float("-inf"), least - (tl.abs(least) + 64.0) * _ULPS, float("-inf"))
