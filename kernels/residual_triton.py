"""Drafts that are judged by chance: the verdict, what they leave over of the target, and the draw from that.

`residual_kernel` sums what is left over in each chunk. Its programs find the verdict from the scan each for themselves,
rather than wait for a launch that tells them; `pick` then looks into one chunk alone.

Shapes: N tokens of a chunk, S of a step in it, M chunks of a row, rounded up to a power of two.
"""

import triton
import triton.language as tl

from baton.kernels.choose_triton import ALIGNED, BLOCK, CHUNK, REJECT, TYPES, is_kept, masses
from baton.kernels.noise_triton import uniform
from baton.kernels.row_triton import num_usable, row_tokens
from baton.kernels.variant import Variant

RESIDUAL_WARPS = 16
_STEP = tl.constexpr(1024)


@triton.jit
def ratio(above, below):
    """Of two numbers that are not negative; 0 where the second is 0."""
    return tl.where(below > 0.0, above / tl.where(below > 0.0, below, 1.0), 0.0)


@triton.jit
def columns_of(t2d, token_N, V, C, PROBS: tl.constexpr):
    """The draft head's columns of tokens, -1 where it has none."""
    column_N = token_N
    if PROBS == 2:
        column_N = tl.load(t2d + token_N, mask=token_N < V, other=-1).to(tl.int32)
    return tl.where((column_N < C) & (token_N < V), column_N, -1)


@triton.jit
def draft_chance(drafts, probs, probs_row, t2d, sequence, place, usable, V, C, K: tl.constexpr, PROBS: tl.constexpr):
    """Q of the draft at a place, float64; 0 where there is none."""
    token = tl.load(drafts + sequence * K + place).to(tl.int32)
    column = columns_of(t2d, tl.maximum(token, 0), V, C, PROBS)
    is_there = (place < usable) & (token >= 0)
    at = probs + (tl.maximum(probs_row, 0).to(tl.int64) * K + place) * C + tl.maximum(column, 0)
    chance = tl.load(at, mask=is_there & (probs_row >= 0) & (column >= 0), other=0.0).to(tl.float64)
    return tl.where(probs_row < 0, is_there.to(tl.float64), chance)


@triton.jit
def left_over(
    logits, base, edited, source, bound_R, last_R, row, best, total, temperature, drafts, probs, probs_row, t2d,
    sequence, place, usable, reach, token_N, V, C,
    K: tl.constexpr, EDITED: tl.constexpr, BOUNDED: tl.constexpr, PROBS: tl.constexpr,
):  # fmt: skip
    """Max(reach p - q, 0) of tokens, float32, of the row after `place` drafts; and p."""
    x_N = row_tokens(logits, base, edited, source, token_N, V, EDITED)
    kept_N = is_kept(x_N, token_N, bound_R, last_R, row, BOUNDED)
    p_N = tl.where(kept_N, tl.exp((x_N - best) / temperature) / total.to(tl.float32), 0.0)
    q_N = p_N * 0.0
    if (place < usable) & (K > 0):
        if probs_row < 0:
            q_N = tl.where(token_N == tl.load(drafts + sequence * K + place), 1.0, 0.0)
        else:
            column_N = columns_of(t2d, token_N, V, C, PROBS)
            at_N = probs + (probs_row.to(tl.int64) * K + place) * C + column_N
            q_N = tl.load(at_N, mask=column_N >= 0, other=0.0).to(tl.float32)
    return tl.maximum(p_N * reach.to(tl.float32) - q_N, 0.0), p_N


@triton.jit
def draft_ratio(
    logits, row_stride, edited, edited_row, drafts, bound_R, last_R, values, probs, probs_row, t2d, sequence, place,
    usable, temperature, V, C, num_chunks,
    Q: tl.constexpr, EDITED: tl.constexpr, BOUNDED: tl.constexpr, PROBS: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """P and q of the draft at a place, float64; of one that is there."""
    row = sequence * Q + place
    source = -1
    if EDITED:
        source = tl.load(edited_row + row)
    best, mass_M = masses(values, row, num_chunks, temperature, M)
    token = tl.maximum(tl.load(drafts + sequence * (Q - 1) + place).to(tl.int32), 0)
    x = row_tokens(logits, row.to(tl.int64) * row_stride, edited, source, token, V, EDITED)
    kept = is_kept(x, token, bound_R, last_R, row, BOUNDED)
    p = tl.where(kept, tl.exp((x - best) / temperature) / tl.sum(mass_M).to(tl.float32), 0.0)
    q = draft_chance(drafts, probs, probs_row, t2d, sequence, place, usable, V, C, Q - 1, PROBS)
    return p.to(tl.float64), q


@triton.jit
def accepted_one_by_one(
    logits, row_stride, edited, edited_row, drafts, bound_R, last_R, values, probs, probs_row, t2d, sequence,
    usable, temperature, seed, choice, position, V, C, num_chunks,
    Q: tl.constexpr, EDITED: tl.constexpr, BOUNDED: tl.constexpr, PROBS: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Drafts that stand if each is judged once all before it stand."""
    accepted = 0
    for place in range(Q - 1):
        if (accepted == place) & (place < usable):
            p, q = draft_ratio(
                logits, row_stride, edited, edited_row, drafts, bound_R, last_R, values, probs, probs_row, t2d,
                sequence, place, usable, temperature, V, C, num_chunks, Q, EDITED, BOUNDED, PROBS, M,
            )  # fmt: skip
            draw = uniform(place + tl.full([], 0, tl.int32), position, choice, tl.full([], 1, tl.int32), seed)
            accepted += (draw < tl.minimum(ratio(p, q), 1.0)).to(tl.int32)
    return accepted


@triton.jit(
    do_not_specialize=["edited", "edited_row", "bound_R", "last_R", "probs", "probs_row_B", "t2d", "C", "num_chunks"]
)
def residual_kernel(
    logits, row_stride, edited, edited_row, drafts, cap, law_B, temperature_B, seed_B, choice_B, position_B,
    bound_R, last_R, values, probs, probs_row_B, t2d, left, V, C, num_chunks,
    Q: tl.constexpr, EDITED: tl.constexpr, BOUNDED: tl.constexpr, PROBS: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """The weight that drafts leave over in each chunk: of the verdict's row, or of every row of a block."""
    sequence, chunk = tl.program_id(0), tl.program_id(1)
    law, temperature = tl.load(law_B + sequence), tl.load(temperature_B + sequence).to(tl.float32)
    if ((law != REJECT) & (law != BLOCK)) | (temperature <= 0.0):
        return
    temperature = tl.maximum(temperature, 1e-30)
    probs_row = -1
    if PROBS > 0:
        probs_row = tl.load(probs_row_B + sequence)
    usable = num_usable(drafts, cap, sequence, Q - 1)
    is_block = (law == BLOCK) & (probs_row >= 0)
    place, stop = 0, usable + 1
    if not is_block:
        place = accepted_one_by_one(
            logits, row_stride, edited, edited_row, drafts, bound_R, last_R, values, probs, probs_row, t2d, sequence,
            usable, temperature, tl.load(seed_B + sequence), tl.load(choice_B + sequence),
            tl.load(position_B + sequence), V, C, num_chunks, Q, EDITED, BOUNDED, PROBS, M,
        )  # fmt: skip
        stop = place + 1
    reach = tl.full([], 1.0, tl.float64)
    token_N = chunk * N + tl.arange(0, N)
    while place < stop:
        row = sequence * Q + place
        source = -1
        if EDITED:
            source = tl.load(edited_row + row)
        best, mass_M = masses(values, row, num_chunks, temperature, M)
        weight_N, _ = left_over(
            logits, row.to(tl.int64) * row_stride, edited, source, bound_R, last_R, row, best, tl.sum(mass_M),
            temperature, drafts, probs, probs_row, t2d, sequence, place, usable, reach, token_N, V, C, Q - 1, EDITED,
            BOUNDED, PROBS,
        )  # fmt: skip
        tl.store(left + row * num_chunks + chunk, tl.sum(weight_N.to(tl.float64)))
        if is_block & (place < usable):
            p, q = draft_ratio(
                logits, row_stride, edited, edited_row, drafts, bound_R, last_R, values, probs, probs_row, t2d,
                sequence, place, usable, temperature, V, C, num_chunks, Q, EDITED, BOUNDED, PROBS, M,
            )  # fmt: skip
            reach = tl.minimum(ratio(reach * p, q), 1.0)
        place += 1


@triton.jit
def accepted_as_block(
    logits, row_stride, edited, edited_row, drafts, bound_R, last_R, values, probs, probs_row, t2d, left, sequence,
    usable, temperature, seed, choice, position, V, C, num_chunks,
    Q: tl.constexpr, EDITED: tl.constexpr, BOUNDED: tl.constexpr, PROBS: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Drafts that stand if the longest prefix that asks to stand is taken, and how far the target covers these."""
    reach, reached = tl.full([], 1.0, tl.float64), tl.full([], 1.0, tl.float64)
    accepted = 0
    chunk_M = tl.arange(0, M)
    for place in range(Q - 1):
        if place < usable:
            p, q = draft_ratio(
                logits, row_stride, edited, edited_row, drafts, bound_R, last_R, values, probs, probs_row, t2d,
                sequence, place, usable, temperature, V, C, num_chunks, Q, EDITED, BOUNDED, PROBS, M,
            )  # fmt: skip
            reach = tl.minimum(ratio(reach * p, q), 1.0)
            at_M = left + (sequence * Q + place + 1) * num_chunks + chunk_M
            rest = tl.sum(tl.load(at_M, mask=chunk_M < num_chunks, other=0.0))
            total = rest + (1.0 - reach)
            chance = tl.where(total > 0.0, ratio(rest, total), 1.0)
            draw = uniform(place + tl.full([], 0, tl.int32), position, choice, tl.full([], 1, tl.int32), seed)
            accepted = tl.where(draw < chance, place + 1, accepted)
            reached = tl.where(draw < chance, reach, reached)
    return accepted, reached


@triton.jit
def pick(
    logits, row_stride, edited, edited_row, drafts, bound_R, last_R, values, probs, probs_row, t2d, left, sequence,
    place, usable, reach, temperature, draw, V, C, num_chunks,
    Q: tl.constexpr, EDITED: tl.constexpr, BOUNDED: tl.constexpr, PROBS: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """The first token whose cumulative weight exceeds its part of the sum; of what is left over, or else of all."""
    row = sequence * Q + place
    chunk_M = tl.arange(0, M)
    source = -1
    if EDITED:
        source = tl.load(edited_row + row)
    best, mass_M = masses(values, row, num_chunks, temperature, M)
    total = tl.sum(mass_M)
    weight_M = tl.load(left + row * num_chunks + chunk_M, mask=chunk_M < num_chunks, other=0.0)
    is_empty = tl.sum(weight_M) <= 0.0
    weight_M = tl.where(is_empty, mass_M, weight_M)
    reached_M = tl.cumsum(weight_M, axis=0)
    threshold = draw * tl.sum(weight_M)
    last = tl.max(tl.where(weight_M > 0.0, chunk_M, 0))
    chunk = tl.min(tl.where((reached_M > threshold) & (weight_M > 0.0), chunk_M, last))
    before = tl.sum(tl.where(chunk_M == chunk, reached_M - weight_M, 0.0))
    found, fallback = V, 0
    start = chunk * N
    stop = tl.minimum(start + N, V)
    while start < stop:
        token_S = start + tl.arange(0, _STEP)
        left_S, p_S = left_over(
            logits, row.to(tl.int64) * row_stride, edited, source, bound_R, last_R, row, best, total, temperature,
            drafts, probs, probs_row, t2d, sequence, place, usable, reach, token_S, V, C, Q - 1, EDITED, BOUNDED,
            PROBS,
        )  # fmt: skip
        inside_S = token_S < stop
        weight_S = tl.where(inside_S, tl.where(is_empty, p_S * total.to(tl.float32), left_S), 0.0).to(tl.float64)
        is_past_S = (before + tl.cumsum(weight_S, axis=0) > threshold) & (weight_S > 0.0)
        found = tl.min(tl.where(is_past_S, token_S, found))
        fallback = tl.maximum(fallback, tl.max(tl.where(weight_S > 0.0, token_S, 0)))
        before += tl.sum(weight_S)
        start = tl.where(found < V, stop, start + _STEP)
    return tl.where(found < V, found, fallback)


TYPES_DRAWN = {"probs": "*fp32", "probs_row_B": "*i32", "t2d": "*i64", "left": "*fp64", "C": "i32"}


def variants() -> list[Variant]:
    """Three drafts of Qwen's vocabulary: point masses, and probabilities over a smaller head."""
    found = []
    for probs in (0, 2):
        constants = {"Q": 4, "EDITED": False, "BOUNDED": True, "PROBS": probs, "M": 32, "N": CHUNK}
        found.append(
            Variant(
                name=f"draft_residual bf16 Q=4{' head' if probs else ''}",
                kernel=residual_kernel,
                types={"logits": "*bf16", **TYPES, **TYPES_DRAWN},
                constants=constants,
                aligned=ALIGNED,
                num_warps=RESIDUAL_WARPS,
                max_registers=128,
            )
        )
    return found
