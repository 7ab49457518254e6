# mypy: ignore-errors
"""A cut row's own token: raced in a list of all that stay, or the best of those nominated by the scan that stays.

The scan races all tokens of a row that top-p or min-p cuts. Where what stays is no short list, the cut need not be
known to say which of the nominated tokens stays: a token does if those before it, in order of the row, have less than p
of the mass. So the best few are held against the row, four to a pass, and the first that stays is the row's; most
often it is the first of all. It is certain unless a chunk might have nominated more.

Shapes: N tokens of a chunk, X nominated tokens, T tokens of a tile, M chunks of a row.
"""

import triton
import triton.language as tl

from baton.kernels.sampling.noise_triton import gumbel, quick_exp2
from baton.kernels.sampling.race_triton import from_row, least_reach, nominated, store_race
from baton.kernels.sampling.row_triton import blocks_of, row_tokens
from baton.kernels.sampling.sample_triton import row_best
from baton.kernels.variant import Variant

_ROUNDS = tl.constexpr(4)


def variants() -> list[Variant]:
    """None: these are parts of `bounds_triton`."""
    return []


@triton.jit
def race_of_list(listed_x, listed_id, count, bound, last, best, temperature, seed, choice, position, T: tl.constexpr):
    """The token of a list that stays and wins, by the reference's arithmetic."""
    most, found = tl.full([], float("-inf"), tl.float32), 0
    for start in range(0, count, T):
        place_T = start + tl.arange(0, T)
        x_T = tl.load(listed_x + place_T, mask=place_T < count, other=float("-inf"))
        id_T = tl.load(listed_id + place_T, mask=place_T < count, other=0)
        kept_T = ((x_T > bound) | ((x_T == bound) & (id_T <= last))) & (x_T > float("-inf"))
        noise_T = gumbel(id_T, position, choice, tl.full([], 0, tl.int32), seed)
        score_T = tl.where(kept_T, tl.div_rn(x_T - best, temperature) + noise_T, float("-inf"))
        top = tl.max(score_T)
        found = tl.where(top > most, tl.min(tl.where(score_T == top, id_T, 0x7FFFFFFF)), found)
        most = tl.maximum(most, top)
    return found


@triton.jit
def sums_of_list(
    listed_x, listed_id, count, bound, last, scale, values, row, num_chunks, N: tl.constexpr, M: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """What the scan would leave of each chunk if it saw only what stays, all of which is listed."""
    chunk_M = tl.arange(0, M)
    best_M, sum_M = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    for pass_ in tl.static_range(2):
        for start in range(0, count, T):
            place_T = start + tl.arange(0, T)
            x_T = tl.load(listed_x + place_T, mask=place_T < count, other=float("-inf"))
            id_T = tl.load(listed_id + place_T, mask=place_T < count, other=0)
            kept_T = ((x_T > bound) | ((x_T == bound) & (id_T <= last))) & (x_T > float("-inf"))
            home_T = tl.where(kept_T, id_T // N, -1)
            is_home_TM = home_T[:, None] == chunk_M[None, :]
            if pass_ == 0:
                best_M = tl.maximum(best_M, tl.max(tl.where(is_home_TM, x_T[:, None], float("-inf")), axis=0))
            else:
                mass_TM = tl.exp2((x_T[:, None] - tl.maximum(best_M, -3.0e38)[None, :]) * scale)
                sum_M += tl.sum(tl.where(is_home_TM, mass_TM, 0.0), axis=0)
    at_M = values + 2 * (row * num_chunks + chunk_M)
    tl.store(at_M, best_M, mask=chunk_M < num_chunks)
    tl.store(at_M + 1, sum_M, mask=chunk_M < num_chunks)


@triton.jit
def rescan(
    logits, base, edited, source, bound, last, scale, by_chance, seed, choice, position, values, ids, row, num_chunks,
    V, EDITED: tl.constexpr, N: tl.constexpr, QUICK: tl.constexpr,
):  # fmt: skip
    """What the scan would leave of each chunk if it saw only what stays; one program walks the row."""
    W: tl.constexpr = 32 if N >= 32 else N
    for chunk in range(num_chunks):
        token_X4 = blocks_of(chunk * N, N)
        x_X4 = row_tokens(logits, base, edited, source, token_X4, V, EDITED)
        kept_X4 = (x_X4 > bound) | ((x_X4 == bound) & (token_X4 <= last))
        x_X4 = tl.where(kept_X4, x_X4, float("-inf"))
        out = row * num_chunks + chunk
        best = tl.max(x_X4)
        tl.store(values + 2 * out, best)
        best = tl.maximum(best, -3.0e38)
        if by_chance:
            tl.store(values + 2 * out + 1, tl.sum(quick_exp2((x_X4 - best) * scale, QUICK)))
        else:
            store_race(x_X4, best, scale, chunk * (N // 4), seed, choice, position, ids + out * W, N, QUICK)


@triton.jit
def _next(score_X, token_X, x_X):
    """The best nominee: its score, id and logit; and the scores of the others."""
    score = tl.max(score_X)
    token = tl.min(tl.where(score_X == score, token_X, 0x7FFFFFFF))
    x = tl.max(tl.where(token_X == token, x_X, float("-inf")))
    return score, token, x, tl.where(token_X == token, float("-inf"), score_X)


@triton.jit
def _is_before(x_N, token_N, x, token):
    return (x_N > x) | ((x_N == x) & (token_N < token))


@triton.jit
def _masses_before(
    logits, base, edited, source, V, best, temperature, least, x_0, x_1, x_2, x_3, id_0, id_1, id_2, id_3,
    EDITED: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr, QUICK: tl.constexpr,
):  # fmt: skip
    """The mass of the tokens before each of four in the order of a row, float64."""
    scale = 1.4426950408889634 / temperature
    sum_0N, sum_1N, sum_2N, sum_3N = (
        tl.zeros([N], tl.float32), tl.zeros([N], tl.float32), tl.zeros([N], tl.float32), tl.zeros([N], tl.float32),
    )  # fmt: skip
    for start in tl.range(0, V, N, num_stages=STAGES):
        token_N = start + tl.arange(0, N)
        x_N = row_tokens(logits, base, edited, source, token_N, V, EDITED)
        mass_N = tl.where(x_N >= least, quick_exp2((x_N - best) * scale, QUICK), 0.0)
        sum_0N += tl.where(_is_before(x_N, token_N, x_0, id_0), mass_N, 0.0)
        sum_1N += tl.where(_is_before(x_N, token_N, x_1, id_1), mass_N, 0.0)
        sum_2N += tl.where(_is_before(x_N, token_N, x_2, id_2), mass_N, 0.0)
        sum_3N += tl.where(_is_before(x_N, token_N, x_3, id_3), mass_N, 0.0)
    return (
        tl.sum(sum_0N.to(tl.float64)), tl.sum(sum_1N.to(tl.float64)), tl.sum(sum_2N.to(tl.float64)),
        tl.sum(sum_3N.to(tl.float64)),
    )  # fmt: skip


@triton.jit
def settle(
    logits, base, edited, source, values, ids, row, num_chunks, V, best, temperature, top_p, least, whole, seed, choice,
    position, EDITED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, T: tl.constexpr, STAGES: tl.constexpr,
    QUICK: tl.constexpr,
):  # fmt: skip
    """The best nominee that top-p and min-p leave, as a bound that ends with it; and whether it is certain."""
    row_11 = tl.zeros([1, 1], tl.int32) + row
    token_1X, rest_1MW = nominated(ids, row_11, row_11 >= 0, num_chunks, M, 1, N)
    token_X = tl.reshape(token_1X, [8 * M])
    x_X = row_tokens(logits, base, edited, source, token_X, V, EDITED)
    noise_X = gumbel(token_X, position, choice, tl.full([], 0, tl.int32), seed)
    score_X = tl.where(x_X > float("-inf"), tl.div_rn(x_X - best, temperature) + noise_X, float("-inf"))
    _, best_M = row_best(values, row, num_chunks, M)
    rest = tl.max(from_row(rest_1MW, best_M[None, :], best, temperature))  # what was not nominated does no better
    need = tl.where(top_p < 1.0, top_p * whole, float("inf"))
    bound, last, score = tl.full([], float("-inf"), tl.float32), V, tl.full([], float("-inf"), tl.float32)
    index = 0
    while index < _ROUNDS:
        score_0, id_0, x_0, score_X = _next(score_X, token_X, x_X)
        score_1, id_1, x_1, score_X = _next(score_X, token_X, x_X)
        score_2, id_2, x_2, score_X = _next(score_X, token_X, x_X)
        score_3, id_3, x_3, score_X = _next(score_X, token_X, x_X)
        if top_p < 1.0:
            sum_0, sum_1, sum_2, sum_3 = _masses_before(
                logits, base, edited, source, V, best, temperature, least, x_0, x_1, x_2, x_3, id_0, id_1, id_2, id_3,
                EDITED, T, STAGES, QUICK,
            )  # fmt: skip
        else:
            sum_0, sum_1, sum_2, sum_3 = (
                tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64),
                tl.full([], 0.0, tl.float64),
            )  # fmt: skip
        stays_0, stays_1 = (x_0 >= least) & (sum_0 < need), (x_1 >= least) & (sum_1 < need)
        stays_2, stays_3 = (x_2 >= least) & (sum_2 < need), (x_3 >= least) & (sum_3 < need)
        score = tl.where(stays_0, score_0, tl.where(stays_1, score_1, tl.where(stays_2, score_2, score_3)))
        bound = tl.where(stays_0, x_0, tl.where(stays_1, x_1, tl.where(stays_2, x_2, x_3)))
        last = tl.where(stays_0, id_0, tl.where(stays_1, id_1, tl.where(stays_2, id_2, id_3)))
        stays = stays_0 | stays_1 | stays_2 | stays_3
        score = tl.where(stays, score, float("-inf"))
        index = tl.where(stays, _ROUNDS, index + 1)
    return bound, last, (score > float("-inf")) & (rest < least_reach(score))
