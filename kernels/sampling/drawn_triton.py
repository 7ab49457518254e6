# mypy: ignore-errors
"""The draw after drafts that are judged by chance, a part of the decision: from what they left over, or the target.

Where a draft is a point mass, it leaves of a chunk what the scan found there, less its own mass; where all drafts
stand, that is all there is. Of drafts that were drawn from probabilities, `residual_triton` has summed it. So the chunk
is found without the row, and only this chunk is looked into.

Subtracting leaves a weight of rounding where there may be no other token: a chunk without one is passed over.

Shapes: X blocks of four of the N tokens of a chunk, M chunks of a row and P places of a sequence, rounded up to powers
of two.
"""

import triton
import triton.language as tl

from baton.kernels.sampling.noise_triton import quick_exp2
from baton.kernels.sampling.residual_triton import (
    accepted_one_by_one,
    at_place,
    chances_of,
    columns_of,
    draws_of,
    fours_of,
    left_over,
    proposed,
    ratio,
    share_of,
)
from baton.kernels.sampling.row_triton import row_tokens
from baton.kernels.sampling.sample_triton import BLOCK, is_kept
from baton.kernels.variant import Variant

_TRIES = tl.constexpr(4)


def variants() -> list[Variant]:
    """None: these are parts of `verify_triton`."""
    return []


@triton.jit
def accepted_as_block(
    reach_P, draw_P, left, sequence, usable, num_chunks,
    Q: tl.constexpr, M: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Drafts that stand if the longest prefix that asks to stand is taken, and how far the target covers these."""
    place_P, chunk_1M = tl.arange(0, P), tl.arange(0, M)[None, :]
    at_PM = left + (sequence * Q + tl.minimum(place_P + 1, Q - 1))[:, None] * num_chunks + chunk_1M
    is_there_PM = (place_P[:, None] + 1 < usable) & (chunk_1M < num_chunks)
    rest_P = tl.sum(tl.load(at_PM, mask=is_there_PM, other=0.0), axis=1)
    rest_P = tl.where(place_P + 1 == usable, reach_P, rest_P)  # no draft after it takes any of its reach
    total_P = rest_P + (1.0 - reach_P)
    chance_P = tl.where(total_P > 0.0, ratio(rest_P, total_P), 1.0)
    accepted = tl.max(tl.where((draw_P < chance_P) & (place_P < usable), place_P + 1, 0))
    return accepted, tl.where(accepted > 0, at_place(reach_P, accepted - 1, P), 1.0)


@triton.jit
def first_past(weight_X4, threshold, N: tl.constexpr):
    """The first place of a chunk where the sum of weights exceeds a number, or the last that has any; -1 if none has.

    Four at a time are added up as float32, and these sums as float64.
    """
    place_X4 = fours_of(0, N)
    sum_X = tl.sum(weight_X4, axis=1).to(tl.float64)
    need_X = (threshold - (tl.cumsum(sum_X, axis=0) - sum_X)).to(tl.float32)
    is_past_X4 = tl.cumsum(weight_X4, axis=1) > need_X[:, None]
    # Those that are past come first, in order, then the others from behind: so one search finds either.
    found = tl.min(tl.where(weight_X4 > 0.0, tl.where(is_past_X4, place_X4, 2 * N - place_X4), 3 * N))
    return tl.where(found < N, found, tl.where(found < 3 * N, 2 * N - found, -1))


@triton.jit
def pick(
    logits, row_stride, edited, edited_row, drafts, bound_R, last_R, values, probs, probs_row, t2d, left, sequence,
    place, best, total, usable, reach, temperature, draw, V, C, num_chunks,
    Q: tl.constexpr, EDITED: tl.constexpr, BOUNDED: tl.constexpr, PROBS: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, QUICK: tl.constexpr,
):  # fmt: skip
    """The first token whose cumulative weight exceeds its part of the sum; of what is left over, or else of all."""
    row, chunk_M = sequence * Q + place, tl.arange(0, M)
    at_M, is_there_M = values + 2 * (row * num_chunks + chunk_M), chunk_M < num_chunks
    best_M = tl.load(at_M, mask=is_there_M, other=float("-inf"))
    sum_M = tl.load(at_M + 1, mask=is_there_M, other=0.0)
    scale, whole = 1.4426950408889634 / temperature, (1.0 / total).to(tl.float32)
    # 0 where each token's share is; so a chunk that is taken for its mass has a token to be taken.
    share_M = tl.where(best_M > float("-inf"), share_of(best_M, best, scale, whole, QUICK), 0.0)
    whole_M = tl.where(share_M > 0.0, share_M * sum_M, 0.0).to(tl.float64)
    weight_M, draft = whole_M, -1
    if Q > 1:
        if place < usable:
            token = tl.load(drafts + sequence * (Q - 1) + place).to(tl.int32)
            if probs_row >= 0:
                weight_M = tl.load(left + row * num_chunks + chunk_M, mask=is_there_M, other=0.0).to(tl.float64)
            else:
                draft = token
                source = -1
                if EDITED:
                    source = tl.load(edited_row + row)
                token_M = chunk_M * 0 + token
                x_M = row_tokens(logits, row.to(tl.int64) * row_stride, edited, source, token_M, V, EDITED)
                is_home_M = (chunk_M == token // N) & is_kept(x_M, token_M, bound_R, last_R, row, BOUNDED)
                below_M = tl.where(is_home_M, x_M, 0.0) - tl.where(is_home_M, best_M, 0.0)
                own_M = tl.where(is_home_M, quick_exp2(below_M * scale, QUICK), 0.0)
                rest_M = tl.maximum(sum_M - own_M, 0.0)
                weight_M = tl.where(share_M > 0.0, share_M * rest_M, 0.0).to(tl.float64)
    reach = tl.where(place < usable, reach, 1.0)
    over = (reach / total).to(tl.float32)
    found, index = -1, 0
    while index < _TRIES:
        is_empty = (tl.max((weight_M > 0.0).to(tl.int32)) == 0).to(tl.int32)
        taken_M = tl.where(is_empty > 0, whole_M, weight_M)
        reached_M = tl.cumsum(taken_M, axis=0)
        threshold = draw * tl.sum(taken_M)
        order_M = tl.where(reached_M > threshold, chunk_M, 2 * M - chunk_M)
        chunk = tl.min(tl.where(taken_M > 0.0, order_M, 2 * M))
        chunk = tl.where(chunk < M, chunk, 2 * M - chunk)  # past the sum, by rounding: the last that has any
        before = tl.sum(tl.where(chunk_M == chunk, reached_M - taken_M, 0.0))
        token_X4 = fours_of(chunk * N, N)
        q_X4 = tl.where((token_X4 == draft) & (is_empty == 0), 1.0, 0.0)
        if PROBS > 0:
            if (probs_row >= 0) & (place < usable) & (is_empty == 0):
                column_X4 = columns_of(t2d, token_X4, V, PROBS)
                q_X4 = proposed(probs, probs_row, place, column_X4, V, C, Q - 1, PROBS)
        weight_X4 = left_over(
            logits, row_stride, edited, edited_row, bound_R, last_R, row, best, scale,
            tl.where(is_empty > 0, whole, over), q_X4, token_X4, V, EDITED, BOUNDED, QUICK,
        )  # fmt: skip
        found = first_past(weight_X4, threshold - before, N)
        found = tl.where(found >= 0, chunk * N + found, -1)
        weight_M = tl.where(chunk_M == chunk, 0.0, weight_M)
        index = tl.where(found >= 0, _TRIES, index + 1)
    return tl.maximum(found, 0)


@triton.jit
def _points(
    logits, row_stride, edited, edited_row, drafts, temperature, bound_R, last_R, values, probs, t2d, sequence, usable,
    draw_P, V, C, num_chunks,
    Q: tl.constexpr, EDITED: tl.constexpr, BOUNDED: tl.constexpr, M: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """How many drafts that are point masses stand; the largest logit and the mass of each row."""
    p_P, q_P, best_P, total_P = chances_of(
        logits, row_stride, edited, edited_row, drafts, bound_R, last_R, values, probs, -1, t2d, sequence, usable,
        temperature, V, C, num_chunks, Q, EDITED, BOUNDED, 0, M, P, False,
    )  # fmt: skip
    return accepted_one_by_one(p_P, q_P, draw_P, usable, P), best_P, total_P


@triton.jit
def drawn(
    logits, row_stride, edited, edited_row, drafts, law, temperature, seed, choice, position, bound_R, last_R, values,
    probs, probs_row, t2d, left, chances, sequence, usable, V, C, num_chunks,
    Q: tl.constexpr, EDITED: tl.constexpr, BOUNDED: tl.constexpr, PROBS: tl.constexpr, M: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, QUICK: tl.constexpr,
):  # fmt: skip
    """Drafts that stand by chance, and the draw after them; of a temperature above 0."""
    temperature = tl.maximum(temperature, 1e-30)
    draw_P = draws_of(seed, choice, position, P)
    reach = tl.full([], 1.0, tl.float64)
    if PROBS > 0:
        if probs_row >= 0:
            at_P = chances + sequence * (3 * P) + tl.arange(0, P)
            said_P, best_P, total_P = tl.load(at_P), tl.load(at_P + P).to(tl.float32), tl.load(at_P + 2 * P)
            if law == BLOCK:
                accepted, reach = accepted_as_block(
                    said_P, draw_P, left, sequence, usable, num_chunks, Q, M, P
                )  # fmt: skip
            else:
                accepted = tl.max(said_P).to(tl.int32)
        else:
            accepted, best_P, total_P = _points(
                logits, row_stride, edited, edited_row, drafts, temperature, bound_R, last_R, values, probs, t2d,
                sequence, usable, draw_P, V, C, num_chunks, Q, EDITED, BOUNDED, M, P,
            )  # fmt: skip
    else:
        accepted, best_P, total_P = _points(
            logits, row_stride, edited, edited_row, drafts, temperature, bound_R, last_R, values, probs, t2d, sequence,
            usable, draw_P, V, C, num_chunks, Q, EDITED, BOUNDED, M, P,
        )  # fmt: skip
    last = pick(
        logits, row_stride, edited, edited_row, drafts, bound_R, last_R, values, probs, probs_row, t2d, left, sequence,
        accepted, at_place(best_P, accepted, P), at_place(total_P, accepted, P), usable, reach, temperature,
        at_place(draw_P, P - 1, P), V, C, num_chunks, Q, EDITED, BOUNDED, PROBS, M, N, QUICK,
    )  # fmt: skip
    return accepted, last
