"""The border of a cut among the tokens of a row: in a list of the likeliest, or wherever it lies, closed in by values.

Shapes: N tokens of a tile, L lanes, C listed tokens.
"""

import triton
import triton.language as tl

from baton.kernels.row_triton import of_order_key, order_key, row_tokens
from baton.kernels.variant import Variant

_MAX_PASSES = tl.constexpr(40)


def variants() -> list[Variant]:
    """None: these are parts of `bounds_triton`."""
    return []


@triton.jit
def lane_bound(lane_L, wanted):
    """A number that at least so many lanes reach; found by its 16 upper bits, which is all of a bfloat16."""
    key_L = order_key(lane_L).to(tl.int64) + 2147483648
    bound = tl.min(key_L * 0)
    for index in range(16):
        trial = bound + (tl.full([], 1, tl.int64) << (31 - index))
        bound = tl.where(tl.sum((key_L >= trial).to(tl.int32)) >= wanted, trial, bound)
    found = of_order_key((bound - 2147483648).to(tl.int32))
    return tl.where(bound <= 0x7FFFFF, float("-inf"), found)


@triton.jit
def weight_of(x_N, best, temperature, by_mass):
    """What tokens count: their mass, or 1."""
    mass_N = tl.exp((x_N - best) / temperature)
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
def of_list(
    listed_x, listed_id, count, best, temperature, top_k, top_p, least, whole, unit_bits, id_bits, C: tl.constexpr
):
    """Of a list with all tokens that reach some bound: the last that stays, and whether that is certain."""
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
    is_complete = ((top_k > 0) & (num_has >= top_k)) | (num_has < count)
    if top_p < 1.0:
        unit = (tl.full([], 1, tl.int64) << unit_bits).to(tl.float64)
        mass_C = tl.floor(tl.exp(scaled_C.to(tl.float64)) * unit + 0.5).to(tl.int64)
        mass_C = tl.where(key_C >= border, mass_C, 0)
        listed = tl.sum(mass_C).to(tl.float64)
        need = top_p * tl.where(top_k > 0, listed, whole * unit)
        if listed >= need:
            is_complete = is_complete | (top_k <= 0)
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
