# mypy: ignore-errors
"""What the scan does to the chunks of a row, one after the other, while the next is on its way.

Most rows are bfloat16 and neither edited nor cut: of these two logits stay in one register until each is needed alone,
and the largest is found two at a time. Rows that are raced have a loop of their own, which makes the noise of the next
chunk while that is loaded.

Shapes: N tokens of a chunk, X blocks of four of them, T words of such a block, G tokens of a group.
"""

import triton
import triton.language as tl

from baton.kernels.sampling.noise_triton import quick_exp2
from baton.kernels.sampling.race_triton import bound_of, counts_of, store_nominees, store_race
from baton.kernels.sampling.row_triton import best_of, blocks_of, fours, raw_pairs, raw_tokens, row_tokens
from baton.kernels.variant import Variant


def variants() -> list[Variant]:
    """None: these are parts of `sample_triton`'s scan."""
    return []


@triton.jit
def raw_chunk(logits, base, start, limit, PAIRS: tl.constexpr, N: tl.constexpr):
    """The logits of a chunk as they are stored, in blocks of four; -inf from a limit on."""
    if PAIRS:
        return raw_pairs(logits, base, start, limit, N)
    else:
        return raw_tokens(logits, base, blocks_of(start, N), limit)


@triton.jit
def _first_of(raw_XT, best, start, V, PAIRS: tl.constexpr, N: tl.constexpr):
    """The lowest token of a chunk whose logit is the largest."""
    x_0X, x_1X, x_2X, x_3X = fours(raw_XT, PAIRS)
    place_X = tl.where(x_3X == best, 3, N)
    place_X = tl.where(x_2X == best, 2, place_X)
    place_X = tl.where(x_1X == best, 1, place_X)
    place_X = tl.where(x_0X == best, 0, place_X)
    return tl.minimum(start + tl.min(tl.arange(0, N // 4) * 4 + place_X), V - 1)


@triton.jit
def _sum_of(raw_XT, best, scale, PAIRS: tl.constexpr, QUICK: tl.constexpr):
    """The sum of a chunk's exponentials; added up in one order, however it was loaded."""
    x_0X, x_1X, x_2X, x_3X = fours(raw_XT, PAIRS)
    even_X = quick_exp2((x_0X - best) * scale, QUICK) + quick_exp2((x_2X - best) * scale, QUICK)
    odd_X = quick_exp2((x_1X - best) * scale, QUICK) + quick_exp2((x_3X - best) * scale, QUICK)
    return tl.sum(even_X + odd_X)


@triton.jit
def race_pairs(
    logits, row, base, chunk, stop, limit, num_chunks, raw_X2, scale, seed, choice, position, values, ids,
    N: tl.constexpr, QUICK: tl.constexpr,
):  # fmt: skip
    """The race in chunks of pairs, of which the first is there.

    Registers are what there is least of: the next chunk takes those of the one before it as soon as that is no longer
    needed, and its noise, which waits for nothing, is made while it is on its way.
    """
    W: tl.constexpr = 32 if N >= 32 else N  # `race_triton.num_words`
    count_0X, count_1X, count_2X, count_3X = counts_of(chunk * (N // 4), seed, choice, position, N, QUICK)
    while chunk < stop:
        out = row * num_chunks + chunk
        best = best_of(raw_X2, True, QUICK)
        tl.store(values + 2 * out, best)
        best = tl.maximum(best, -3.0e38)
        bound_X = bound_of(raw_X2, count_0X, count_1X, count_2X, count_3X, best, scale, True, QUICK)
        chunk += 1
        seed += position >> 62  # nothing; but what depends on it is not kept in registers all the while
        raw_X2 = raw_pairs(logits, base, chunk * N, limit, N)
        store_nominees(bound_X, ids + out * W, N)
        if chunk < stop:
            count_0X, count_1X, count_2X, count_3X = counts_of(chunk * (N // 4), seed, choice, position, N, QUICK)


@triton.jit
def look(
    logits, row, base, edited, source, chunk, stop, limit, V, num_chunks, raw_XT, is_greedy, is_cut, is_summed, scale,
    is_raced, seed, choice, position, values, ids, maxima,
    EDITED: tl.constexpr, CUT: tl.constexpr, RACE: tl.constexpr, PAIRS: tl.constexpr,
    N: tl.constexpr, G: tl.constexpr, QUICK: tl.constexpr,
):  # fmt: skip
    """Chunks of a row, of which the first is there; the next is on its way while one is looked at."""
    W: tl.constexpr = 32 if N >= 32 else N  # `race_triton.num_words`
    if not (EDITED or PAIRS):
        raw_XT = raw_XT.to(tl.float32)
    while chunk < stop:
        if EDITED:
            held_XT = row_tokens(logits, base, edited, source, blocks_of(chunk * N, N), V, EDITED)
        else:
            held_XT = raw_XT
            next_XT = raw_chunk(logits, base, chunk * N + N, limit, PAIRS, N)
        out = row * num_chunks + chunk
        best = best_of(held_XT, PAIRS, QUICK)
        tl.store(values + 2 * out, best)
        if is_greedy:
            tl.store(ids + out * W, _first_of(held_XT, best, chunk * N, V, PAIRS, N))
        else:
            best = tl.maximum(best, -3.0e38)
            if CUT:
                if is_cut:
                    maximum_G = tl.max(tl.reshape(held_XT, [N // G, G]), axis=1)
                    tl.store(maxima + out.to(tl.int64) * (N // G) + tl.arange(0, N // G), maximum_G)
            if is_summed:
                tl.store(values + 2 * out + 1, _sum_of(held_XT, best, scale, PAIRS, QUICK))
            if RACE:
                if is_raced:
                    store_race(held_XT, best, scale, chunk * (N // 4), seed, choice, position, ids + out * W, N, QUICK)
        if PAIRS:
            raw_XT = next_XT
        elif not EDITED:
            raw_XT = next_XT.to(tl.float32)
        chunk += 1
