# mypy: ignore-errors
"""The border of a cut among the tokens of a row: in a list of the likeliest, or wherever it lies, closed in by values.

Shapes: N tokens of a tile, L lanes, C listed tokens.
"""

import triton
import triton.language as tl

from baton.kernels.sampling.row_triton import of_order_key, order_key, row_tokens
from baton.kernels.variant import Variant

_MAX_PASSES = tl.constexpr(40)


def variants() -> list[Variant]:
    """None: these are parts of `bounds_triton`."""
    return []


@triton.jit
def lane_bound(lane_L, wanted):
    """A number that at least so many lanes reach; found by its 16 upper bits, which is all of a bfloat16."""
    key_L = order_key(lane_L).to(tl.uint32, bitcast=True) ^ 0x80000000
    bound, bit = tl.full([], 0, tl.uint32), tl.full([], 0x80000000, tl.uint32)
    for _ in range(16):
        trial = bound | bit
        bit = bit >> 1
        bound = tl.where(tl.sum((key_L >= trial).to(tl.int32)) >= wanted, trial, bound)
    found = of_order_key((bound ^ 0x80000000).to(tl.int32, bitcast=True))
    return tl.where(bound <= 0x7FFFFF, float("-inf"), found)


@triton.jit
def groups_that_reach(maxima, num_groups, reach, groups, limit, T: tl.constexpr):
    """Write down the groups that reach a bound, in order and `limit` at most; how many do.

    They are read again, rather than kept in registers with the sums that say where each goes.
    """
    num_hit = 0
    for start in range(0, num_groups, T):
        group_T = start + tl.arange(0, T)
        maximum_T = tl.load(maxima + group_T, mask=group_T < num_groups, other=float("-inf"))
        has_T = ((maximum_T >= reach) & (group_T < num_groups)).to(tl.int32)
        at_T = num_hit + tl.cumsum(has_T, axis=0) - 1
        tl.store(groups + at_T, group_T, mask=(has_T > 0) & (at_T < limit))
        num_hit += tl.sum(has_T)
    tl.debug_barrier()
    return num_hit


@triton.jit
def least_of(best, temperature, min_p):
    """The least number that min-p leaves, found among all numbers there are; -inf if it cuts nothing."""
    floor = tl.log(tl.maximum(min_p, 1e-300)).to(tl.float32)
    low = order_key(best * 0.0 + float("-inf")).to(tl.int64)  # which it never leaves
    high = order_key(best).to(tl.int64)
    while high - low > 1:
        middle = (low + high) >> 1
        stays = tl.div_rn(of_order_key(middle.to(tl.int32)) - best, temperature) >= floor
        high = tl.where(stays, middle, high)
        low = tl.where(stays, low, middle)
    return tl.where(min_p > 0.0, of_order_key(high.to(tl.int32)), float("-inf"))


@triton.jit
def weight_of(x_N, best, temperature, by_mass):
    """What tokens count: their mass, or 1."""
    mass_N = tl.exp2((x_N - best) * (1.4426950408889634 / temperature))
    return tl.where(by_mass, mass_N, 1.0)


@triton.jit
def total_of(
    logits, base, edited, source, V, best, temperature, bound, last, least, EDITED: tl.constexpr, N: tl.constexpr
):
    """Mass of a row's tokens up to (bound, last), float64."""
    sum_N = tl.zeros([N], tl.float32)
    for start in tl.range(0, V, N, num_stages=1):
        token_N = start + tl.arange(0, N)
        x_N = row_tokens(logits, base, edited, source, token_N, V, EDITED)
        stays_N = ((x_N > bound) | ((x_N == bound) & (token_N <= last))) & (x_N >= least) & (token_N < V)
        sum_N += tl.where(stays_N, weight_of(x_N, best, temperature, True), 0.0)
    return tl.sum(sum_N.to(tl.float64))


@triton.jit
def lowest_of(logits, base, edited, source, V, best, EDITED: tl.constexpr, N: tl.constexpr):
    """A row's least logit that is not -inf."""
    lowest_N = tl.full([N], float("inf"), tl.float32)
    for start in tl.range(0, V, N, num_stages=1):
        x_N = row_tokens(logits, base, edited, source, start + tl.arange(0, N), V, EDITED)
        lowest_N = tl.minimum(lowest_N, tl.where(x_N == float("-inf"), best, x_N))
    return tl.min(lowest_N)


@triton.jit
def close_in(
    logits, base, edited, source, V, best, temperature, bound, last, least, lowest, by_mass, need,
    EDITED: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The largest number v such that tokens of at least v weigh `need`, of those up to (bound, last)."""
    low, high = tl.maximum(bound, lowest), tl.full([], float("inf"), tl.float32)
    found = low
    index = 0
    while index < _MAX_PASSES:
        if index < 6:
            step = (tl.minimum(high, best) - low) * 0.25
            pivot_0, pivot_1, pivot_2 = low + step, low + 2 * step, low + 3 * step
        else:
            low_key, high_key = order_key(low).to(tl.int64), order_key(high).to(tl.int64)
            pivot_0 = of_order_key((low_key + (high_key - low_key) // 4).to(tl.int32))
            pivot_1 = of_order_key((low_key + (high_key - low_key) // 2).to(tl.int32))
            pivot_2 = of_order_key((high_key - (high_key - low_key) // 4).to(tl.int32))
        sum_0N, sum_1N, sum_2N = tl.zeros([N], tl.float32), tl.zeros([N], tl.float32), tl.zeros([N], tl.float32)
        top_N, bottom_N = tl.full([N], float("-inf"), tl.float32), tl.full([N], float("inf"), tl.float32)
        for start in range(0, V, N):
            token_N = start + tl.arange(0, N)
            x_N = row_tokens(logits, base, edited, source, token_N, V, EDITED)
            stays_N = ((x_N > bound) | ((x_N == bound) & (token_N <= last))) & (x_N >= least) & (token_N < V)
            weight_N = tl.where(stays_N, weight_of(x_N, best, temperature, by_mass), 0.0)
            sum_0N += tl.where(x_N >= pivot_0, weight_N, 0.0)
            sum_1N += tl.where(x_N >= pivot_1, weight_N, 0.0)
            sum_2N += tl.where(x_N >= pivot_2, weight_N, 0.0)
            top_N = tl.maximum(top_N, tl.where(stays_N & (x_N < high), x_N, float("-inf")))
            bottom_N = tl.minimum(bottom_N, tl.where(stays_N & (x_N >= low), x_N, float("inf")))
        top, bottom = tl.max(top_N), tl.min(bottom_N)
        found = top
        if top <= bottom:  # one number is left
            index = _MAX_PASSES
        else:
            reaches_0 = tl.sum(sum_0N.to(tl.float64)) >= need
            reaches_1 = tl.sum(sum_1N.to(tl.float64)) >= need
            reaches_2 = tl.sum(sum_2N.to(tl.float64)) >= need
            high = tl.where(reaches_2, high, tl.where(reaches_1, pivot_2, tl.where(reaches_0, pivot_1, pivot_0)))
            low = tl.where(reaches_2, pivot_2, tl.where(reaches_1, pivot_1, tl.where(reaches_0, pivot_0, low)))
            index += 1
    return found


@triton.jit
def last_equal(
    logits, base, edited, source, V, best, temperature, bound, last, least, value, by_mass, need,
    EDITED: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The id, among tokens equal to `value`, with which `need` is reached."""
    above_N = tl.zeros([N], tl.float32)
    for start in tl.range(0, V, N, num_stages=1):
        token_N = start + tl.arange(0, N)
        x_N = row_tokens(logits, base, edited, source, token_N, V, EDITED)
        above_N += tl.where(x_N > value, weight_of(x_N, best, temperature, by_mass), 0.0)
    weight = weight_of(value, best, temperature, by_mass).to(tl.float64)
    wanted = tl.ceil(((need - tl.sum(above_N.to(tl.float64))) / weight).to(tl.float32)).to(tl.int32)
    wanted = tl.maximum(wanted, 1)
    seen = 0
    found = V - 1
    for start in tl.range(0, V, N, num_stages=1):
        token_N = start + tl.arange(0, N)
        x_N = row_tokens(logits, base, edited, source, token_N, V, EDITED)
        stays_N = ((x_N > bound) | ((x_N == bound) & (token_N <= last))) & (x_N >= least)
        equal_N = ((x_N == value) & stays_N & (token_N < V)).to(tl.int32)
        count = tl.sum(equal_N)
        if (seen < wanted) & (seen + count >= wanted):
            is_it_N = (tl.cumsum(equal_N, axis=0) == wanted - seen) & (equal_N > 0)
            found = tl.min(tl.where(is_it_N, token_N, V))
        seen += count
    return found


@triton.jit
def border_of(key_C, weight_C, need, num_bits):
    """The largest key, of so many bits, such that what is not below it weighs `need`; 0 if all weigh less."""
    found = tl.full([], 0, tl.int64)
    for index in range(num_bits):
        trial = found | (tl.full([], 1, tl.int64) << (num_bits - 1 - index))
        reached = tl.sum(tl.where(key_C >= trial, weight_C, 0))
        found = tl.where(reached.to(tl.float64) >= need, trial, found)
    return found


@triton.jit
def _listed(listed_x, listed_id, start, count, best, temperature, least, N: tl.constexpr):
    """Tokens of a list from a place on: their places, whether they are there, their logits less the best, and ids."""
    place_N = start + tl.arange(0, N)
    x_N = tl.load(listed_x + place_N, mask=place_N < count, other=float("-inf"))
    id_N = tl.load(listed_id + place_N, mask=place_N < count, other=-1)
    has_N = (place_N < count) & (x_N >= least)
    return place_N, has_N, tl.where(has_N, tl.div_rn(x_N - best, temperature), float("-inf")), x_N, id_N


@triton.jit
def _mass_of(scaled_N, has_N, unit):
    """Masses as the reference has them, int64."""
    return tl.where(has_N, tl.floor(tl.exp(scaled_N.to(tl.float64)) * unit + 0.5), 0.0).to(tl.int64)


@triton.jit
def of_few(
    listed_x, listed_id, count, is_all, best, temperature, top_k, top_p, least, whole, unit_bits, S: tl.constexpr
):
    """As `of_list`, of at most S tokens: each is held against each, which takes no searching."""
    unit = (tl.full([], 1, tl.int64) << unit_bits).to(tl.float64)
    place_S, has_S, scaled_S, x_S, id_S = _listed(listed_x, listed_id, 0, count, best, temperature, least, S)
    rank_S, before_S = tl.zeros([S], tl.int32), tl.zeros([S], tl.int64)
    for start in range(0, count, 32):
        place_T, has_T, scaled_T, _, _ = _listed(listed_x, listed_id, start, count, best, temperature, least, 32)
        is_equal_ST = (scaled_T[None, :] == scaled_S[:, None]) & (place_T[None, :] < place_S[:, None])
        is_before_ST = ((scaled_T[None, :] > scaled_S[:, None]) | is_equal_ST) & has_T[None, :]
        rank_S += tl.sum(is_before_ST.to(tl.int32), axis=1)
        if top_p < 1.0:
            before_S += tl.sum(tl.where(is_before_ST, _mass_of(scaled_T, has_T, unit)[None, :], 0), axis=1)
    num_has = tl.sum(has_S.to(tl.int32))
    kept_S = has_S & ((top_k <= 0) | (rank_S < top_k))
    is_all = is_all | (num_has < count)  # nothing that stays is beyond the list
    is_complete = ((top_k > 0) & (num_has >= top_k)) | is_all
    if top_p < 1.0:
        listed = tl.sum(tl.where(kept_S, _mass_of(scaled_S, has_S, unit), 0)).to(tl.float64)
        need = top_p * tl.where((top_k > 0) | is_all, listed, whole * unit)
        # Of a row that min-p cuts, `whole` has the mass that it cuts, too.
        is_complete = is_complete | ((top_k <= 0) & (listed >= need) & (least == float("-inf")))
        kept_S = kept_S & ((before_S.to(tl.float64) < need) | (rank_S == 0))
    is_last_S = kept_S & (rank_S == tl.max(tl.where(kept_S, rank_S, -1)))
    last = tl.max(tl.where(is_last_S, id_S, -1))
    bound = tl.max(tl.where(is_last_S, x_S, float("-inf")))
    return bound, last, is_complete


@triton.jit
def of_list(
    listed_x, listed_id, count, is_all, best, temperature, top_k, top_p, least, whole, unit_bits, id_bits,
    C: tl.constexpr,
):  # fmt: skip
    """Of a list with all tokens that reach a bound, or all there are: the last that stays, and if that is certain."""
    place_C = tl.arange(0, C)
    x_C = tl.load(listed_x + place_C, mask=place_C < count, other=float("-inf"))
    id_C = tl.load(listed_id + place_C, mask=place_C < count, other=0)
    scaled_C = tl.div_rn(x_C - best, temperature)
    has_C = (place_C < count) & (x_C >= least)
    num_has = tl.sum(has_C.to(tl.int32))
    last_id = (tl.full([], 1, tl.int64) << id_bits) - 1
    key_C = ((order_key(scaled_C).to(tl.int64) + 2147483648) << id_bits) | (last_id - id_C)
    key_C = tl.where(has_C, key_C, -1)
    border = tl.full([], 0, tl.int64)
    if top_k > 0:
        border = border_of(key_C, has_C.to(tl.int64), top_k.to(tl.float64), 32 + id_bits)
    is_all = is_all | (num_has < count)  # nothing that stays is beyond the list
    is_complete = ((top_k > 0) & (num_has >= top_k)) | is_all
    if top_p < 1.0:
        unit = (tl.full([], 1, tl.int64) << unit_bits).to(tl.float64)
        mass_C = tl.floor(tl.exp(scaled_C.to(tl.float64)) * unit + 0.5).to(tl.int64)
        mass_C = tl.where(key_C >= border, mass_C, 0)
        listed = tl.sum(mass_C).to(tl.float64)
        need = top_p * tl.where((top_k > 0) | is_all, listed, whole * unit)
        if listed >= need:
            # Of a row that min-p cuts, `whole` has the mass that it cuts, too.
            is_complete = is_complete | ((top_k <= 0) & (least == float("-inf")))
            border = tl.maximum(border, border_of(key_C, mass_C, need, 32 + id_bits))
    # Without any border, the least of the list.
    border = tl.maximum(border, tl.min(tl.where(has_C, key_C, 0x7FFFFFFFFFFFFFFF)))
    last = (last_id - (border & last_id)).to(tl.int32)
    # Read again, rather than kept in registers all the while.
    x_C = tl.load(listed_x + place_C, mask=place_C < count, other=float("-inf"))
    id_C = tl.load(listed_id + place_C, mask=place_C < count, other=-1)
    bound = tl.max(tl.where(id_C == last, x_C, float("-inf")))
    return bound, last, is_complete


@triton.jit
def behind_list(
    logits, base, edited, source, V, best, temperature, top_k, top_p, least, whole, EDITED: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """The last token that stays, where the list does not say it."""
    bound, last = tl.full([], float("-inf"), tl.float32), V
    lowest = lowest_of(logits, base, edited, source, V, best, EDITED, N)
    for stage in range(2):  # by count, then by mass
        by_mass = stage == 1
        need = tl.where(by_mass, 0.0, top_k.to(tl.float64))
        if by_mass & (top_p < 1.0):
            if top_k > 0:
                whole = total_of(logits, base, edited, source, V, best, temperature, bound, last, least, EDITED, N)
            need = top_p * whole
        if need > 0.0:
            value = close_in(
                logits, base, edited, source, V, best, temperature, bound, last, least, lowest, by_mass, need,
                EDITED, N,
            )  # fmt: skip
            last = last_equal(
                logits, base, edited, source, V, best, temperature, bound, last, least, value, by_mass, need,
                EDITED, N,
            )  # fmt: skip
            bound = value
    return bound, last
