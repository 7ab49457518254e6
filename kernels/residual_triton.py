"""Drafts that are judged by chance: the verdict, what they leave over of the target, and the draw from that.

`residual_kernel` sums what is left over in each chunk. Its programs find the verdict from the scan each for themselves,
rather than wait for a launch that tells them, for all drafts at once: what takes time is to wait for memory, not to
compute. The first program of a sequence leaves what it found, so that the decision stands on the same numbers; `pick`
then looks into one chunk alone.

Shapes: N tokens of a chunk, M chunks of a row and P places of a sequence, rounded up to powers of two.
"""

import triton
import triton.language as tl

from baton.kernels.choose_triton import ALIGNED, BLOCK, CHUNK, REJECT, TYPES, is_kept, masses
from baton.kernels.noise_triton import uniform
from baton.kernels.row_triton import num_usable, row_tokens
from baton.kernels.variant import Variant

RESIDUAL_WARPS = 8


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
def at_place(value_P, place, P: tl.constexpr):
    """One of so many numbers."""
    return tl.sum(tl.where(tl.arange(0, P) == place, value_P, 0.0))


@triton.jit
def chances_of(
    logits, row_stride, edited, edited_row, drafts, bound_R, last_R, values, probs, probs_row, t2d, sequence, usable,
    temperature, V, C, num_chunks,
    Q: tl.constexpr, EDITED: tl.constexpr, BOUNDED: tl.constexpr, PROBS: tl.constexpr, M: tl.constexpr,
    P: tl.constexpr,
):  # fmt: skip
    """P and q of each draft, float64, 0 where there is none; the largest logit of each row, and its mass, float64."""
    place_P, chunk_1M = tl.arange(0, P), tl.arange(0, M)[None, :]
    row_P = sequence * Q + tl.minimum(place_P, Q - 1)
    is_draft_P = place_P < usable
    token_P = tl.load(drafts + sequence * (Q - 1) + place_P, mask=is_draft_P, other=0x7FFFFFFF).to(tl.int32)
    at_PM = values + 2 * (row_P[:, None] * num_chunks + chunk_1M)
    is_there_PM = (place_P[:, None] <= usable) & (chunk_1M < num_chunks)
    best_PM = tl.load(at_PM, mask=is_there_PM, other=float("-inf"))
    sum_PM = tl.load(at_PM + 1, mask=is_there_PM, other=0.0)
    best_P = tl.maximum(tl.max(best_PM, axis=1), -3.0e38)
    shift_PM = tl.where(best_PM > float("-inf"), (best_PM - best_P[:, None]) / temperature, 0.0)
    mass_PM = tl.where(best_PM > float("-inf"), sum_PM.to(tl.float64) * tl.exp(shift_PM.to(tl.float64)), 0.0)
    total_P = tl.sum(mass_PM, axis=1)
    total_P = tl.where(total_P > 0.0, total_P, 1.0)  # of rows that may not be read, too
    source_P = row_P * 0 - 1
    if EDITED:
        source_P = tl.load(edited_row + row_P)
    x_P = row_tokens(logits, row_P.to(tl.int64) * row_stride, edited, source_P, token_P, V, EDITED)
    kept_P = is_kept(x_P, token_P, bound_R, last_R, row_P, BOUNDED) & is_draft_P
    p_P = tl.where(kept_P, tl.exp((x_P - best_P) / temperature) / total_P.to(tl.float32), 0.0).to(tl.float64)
    q_P = is_draft_P.to(tl.float64)
    if PROBS > 0:
        if probs_row >= 0:
            column_P = columns_of(t2d, token_P, V, C, PROBS)
            at_P = probs + (probs_row.to(tl.int64) * (Q - 1) + place_P) * C + tl.maximum(column_P, 0)
            q_P = tl.load(at_P, mask=is_draft_P & (column_P >= 0), other=0.0).to(tl.float64)
    return p_P, q_P, best_P, total_P


@triton.jit
def accepted_one_by_one(p_P, q_P, usable, seed, choice, position, P: tl.constexpr):
    """Drafts that stand if each is judged once all before it stand."""
    place_P = tl.arange(0, P)
    draw_P = uniform(place_P, position, choice, tl.full([], 1, tl.int32), seed)
    stands_P = (draw_P < tl.minimum(ratio(p_P, q_P), 1.0)) & (place_P < usable)
    return tl.min(tl.where(stands_P, P, place_P))


@triton.jit(
    do_not_specialize=[
        "edited", "edited_row", "bound_R", "last_R", "probs", "probs_row_B", "t2d", "left", "chances", "C",
        "num_chunks",
    ]
)  # fmt: skip
def residual_kernel(
    logits, row_stride, edited, edited_row, drafts, cap, law_B, temperature_B, seed_B, choice_B, position_B,
    bound_R, last_R, values, probs, probs_row_B, t2d, left, chances, V, C, num_chunks,
    Q: tl.constexpr, EDITED: tl.constexpr, BOUNDED: tl.constexpr, PROBS: tl.constexpr, M: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr,
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
    p_P, q_P, best_P, total_P = chances_of(
        logits, row_stride, edited, edited_row, drafts, bound_R, last_R, values, probs, probs_row, t2d, sequence,
        usable, temperature, V, C, num_chunks, Q, EDITED, BOUNDED, PROBS, M, P,
    )  # fmt: skip
    if chunk == 0:
        at_P = chances + sequence * (4 * P) + tl.arange(0, P)
        tl.store(at_P, p_P)
        tl.store(at_P + P, q_P)
        tl.store(at_P + 2 * P, best_P.to(tl.float64))
        tl.store(at_P + 3 * P, total_P)
    is_block = (law == BLOCK) & (probs_row >= 0)
    place, stop = 0, usable + 1
    if not is_block:
        place = accepted_one_by_one(
            p_P, q_P, usable, tl.load(seed_B + sequence), tl.load(choice_B + sequence),
            tl.load(position_B + sequence), P,
        )  # fmt: skip
        stop = place + 1
    reach = tl.full([], 1.0, tl.float64)
    token_N = chunk * N + tl.arange(0, N)
    while place < stop:
        row = sequence * Q + place
        source = -1
        if EDITED:
            source = tl.load(edited_row + row)
        weight_N, _ = left_over(
            logits, row.to(tl.int64) * row_stride, edited, source, bound_R, last_R, row, at_place(best_P, place, P),
            at_place(total_P, place, P), temperature, drafts, probs, probs_row, t2d, sequence, place, usable, reach,
            token_N, V, C, Q - 1, EDITED, BOUNDED, PROBS,
        )  # fmt: skip
        tl.store(left + row * num_chunks + chunk, tl.sum(weight_N.to(tl.float64)))
        if is_block & (place < usable):
            reach = tl.minimum(ratio(reach * at_place(p_P, place, P), at_place(q_P, place, P)), 1.0)
        place += 1


@triton.jit
def accepted_as_block(
    p_P, q_P, left, sequence, usable, seed, choice, position, num_chunks,
    Q: tl.constexpr, M: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Drafts that stand if the longest prefix that asks to stand is taken, and how far the target covers these."""
    reach, reached = tl.full([], 1.0, tl.float64), tl.full([], 1.0, tl.float64)
    accepted = 0
    place_P, chunk_1M = tl.arange(0, P), tl.arange(0, M)[None, :]
    at_PM = left + (sequence * Q + tl.minimum(place_P, Q - 2) + 1)[:, None] * num_chunks + chunk_1M
    is_there_PM = (place_P[:, None] < usable) & (chunk_1M < num_chunks)
    rest_P = tl.sum(tl.load(at_PM, mask=is_there_PM, other=0.0), axis=1)
    draw_P = uniform(place_P, position, choice, tl.full([], 1, tl.int32), seed)
    for place in range(Q - 1):
        if place < usable:
            reach = tl.minimum(ratio(reach * at_place(p_P, place, P), at_place(q_P, place, P)), 1.0)
            rest = at_place(rest_P, place, P)
            total = rest + (1.0 - reach)
            chance = tl.where(total > 0.0, ratio(rest, total), 1.0)
            stands = at_place(draw_P, place, P) < chance
            accepted = tl.where(stands, place + 1, accepted)
            reached = tl.where(stands, reach, reached)
    return accepted, reached


@triton.jit
def pick(
    logits, row_stride, edited, edited_row, drafts, bound_R, last_R, values, probs, probs_row, t2d, left, sequence,
    place, best, total, usable, reach, temperature, draw, V, C, num_chunks,
    Q: tl.constexpr, EDITED: tl.constexpr, BOUNDED: tl.constexpr, PROBS: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """The first token whose cumulative weight exceeds its part of the sum; of what is left over, or else of all."""
    row = sequence * Q + place
    chunk_M = tl.arange(0, M)
    source = -1
    if EDITED:
        source = tl.load(edited_row + row)
    _, mass_M = masses(values, row, num_chunks, temperature, M)
    weight_M = tl.load(left + row * num_chunks + chunk_M, mask=chunk_M < num_chunks, other=0.0)
    is_empty = tl.sum(weight_M) <= 0.0
    weight_M = tl.where(is_empty, mass_M, weight_M)
    reached_M = tl.cumsum(weight_M, axis=0)
    threshold = draw * tl.sum(weight_M)
    last = tl.max(tl.where(weight_M > 0.0, chunk_M, 0))
    chunk = tl.min(tl.where((reached_M > threshold) & (weight_M > 0.0), chunk_M, last))
    before = tl.sum(tl.where(chunk_M == chunk, reached_M - weight_M, 0.0))
    token_N = chunk * N + tl.arange(0, N)
    left_N, p_N = left_over(
        logits, row.to(tl.int64) * row_stride, edited, source, bound_R, last_R, row, best, total, temperature, drafts,
        probs, probs_row, t2d, sequence, place, usable, reach, token_N, V, C, Q - 1, EDITED, BOUNDED, PROBS,
    )  # fmt: skip
    weight_N = tl.where(token_N < V, tl.where(is_empty, p_N * total.to(tl.float32), left_N), 0.0).to(tl.float64)
    is_past_N = (before + tl.cumsum(weight_N, axis=0) > threshold) & (weight_N > 0.0)
    found = tl.min(tl.where(is_past_N, token_N, V))
    fallback = tl.max(tl.where(weight_N > 0.0, token_N, 0))
    return tl.where(found < V, found, fallback)


TYPES_DRAWN = {"probs": "*fp32", "probs_row_B": "*i32", "t2d": "*i64", "left": "*fp64", "chances": "*fp64", "C": "i32"}


def variants() -> list[Variant]:
    """Three drafts of Qwen's vocabulary: point masses, and probabilities over a smaller head."""
    found = []
    for probs in (0, 2):
        constants = {"Q": 4, "EDITED": False, "BOUNDED": True, "PROBS": probs, "M": 64, "P": 4}
        constants |= {"N": CHUNK}
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
