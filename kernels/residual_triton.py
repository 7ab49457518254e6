"""Drafts that are judged by chance: the verdict, what they leave over of the target, and the draw from that.

Most rows are read once, by the scan. Where a draft is a point mass, it leaves of a chunk what the scan found there,
less its own mass; where all drafts stand, that is all there is. `drawn`, a part of the decision, so finds the chunk and
looks into this one alone. Only rows whose drafts were drawn from probabilities are read again: `residual_kernel` sums
what is left over in each of their chunks. It has programs for rows of probabilities, not for sequences, lest most of
them start for nothing; each finds its sequence's verdict from the scan, rather than wait for a launch that tells it.
The first of a sequence leaves what it found, so that the decision stands on the same numbers.

Subtracting leaves a weight of rounding where there may be no other token: a chunk without one is passed over.

Shapes: X blocks of four of the N tokens of a chunk, M chunks of a row and P places of a sequence, rounded up to powers
of two; S sequences that are looked at together.
"""

import triton
import triton.language as tl

from baton.kernels import choose_triton
from baton.kernels.choose_triton import ALIGNED, BLOCK, CHUNK, REJECT, TYPES, is_kept
from baton.kernels.dependent_launch import dependent_launch
from baton.kernels.noise_triton import quick_exp2, uniform
from baton.kernels.row_triton import num_usable, row_tokens
from baton.kernels.variant import Variant

RESIDUAL_WARPS = 4
RESIDUAL_REGISTERS = {False: 128, True: 168}  # by whether rows are cut: so that four or three share a multiprocessor
PROGRAMS = 132 * 6  # of a launch: more would only find the same verdict more often
SEARCHED = 256

_TRIES = tl.constexpr(4)


def launch(common, drawn, vocab_size, num_columns, num_chunks, num_sequences, num_rows_of_probs, flags, device) -> None:
    """Sum what drafts that were drawn from probabilities leave over in each chunk."""
    span = min(num_chunks, triton.cdiv(num_rows_of_probs * num_chunks, PROGRAMS))
    residual_kernel[(triton.cdiv(num_chunks, span), num_rows_of_probs)](
        *common, *drawn, vocab_size, num_columns, num_chunks, num_sequences, span, **flags,
        QUICK=choose_triton.is_quick(), S=SEARCHED, num_warps=RESIDUAL_WARPS, **dependent_launch(device),
        **({"maxnreg": RESIDUAL_REGISTERS[flags["BOUNDED"]]} if choose_triton.is_quick() else {}),
    )  # fmt: skip


@triton.jit
def ratio(above, below):
    """Of two numbers that are not negative; 0 where the second is 0."""
    return tl.where(below > 0.0, above / tl.where(below > 0.0, below, 1.0), 0.0)


@triton.jit
def at_place(value_P, place, P: tl.constexpr):
    """One of so many numbers."""
    return tl.sum(tl.where(tl.arange(0, P) == place, value_P, 0.0))


@triton.jit
def fours_of(start, N: tl.constexpr):
    """The tokens of a chunk: [X, 4]."""
    return start + tl.arange(0, N // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]


@triton.jit
def columns_of(t2d, token_N, V, PROBS: tl.constexpr):
    """The draft head's columns of tokens, int32; -1 where it has none."""
    if PROBS == 2:
        return tl.load(t2d + token_N, mask=token_N < V, other=-1).to(tl.int32)
    else:
        return token_N


@triton.jit
def proposed(probs, probs_row, place, column_N, V, C, K: tl.constexpr, PROBS: tl.constexpr):
    """Q of a draft by columns, float32.

    The sum of 32 bits keeps the compiler from holding an address of 64 bits for every token through a loop.
    """
    if PROBS == 2:
        return tl.load(probs + probs_row.to(tl.int64) * K * C + (place * C + column_N), mask=column_N >= 0, other=0.0)
    else:
        return tl.load(probs + (probs_row.to(tl.int64) * K + place) * V + column_N, mask=column_N < V, other=0.0)


@triton.jit
def share_of(x_N, best, scale, over, QUICK: tl.constexpr):
    """P of tokens, float32; `scale` is log2 e over the temperature, `over` one over the row's mass."""
    return quick_exp2((x_N - best) * scale, QUICK) * over


@triton.jit
def left_over(
    logits, row_stride, edited, edited_row, bound_R, last_R, row, best, scale, over, q_N, token_N, V,
    EDITED: tl.constexpr, BOUNDED: tl.constexpr, QUICK: tl.constexpr,
):  # fmt: skip
    """Max(reach p - q, 0) of a row's tokens, float32, where `over` is the reach over the row's mass."""
    source = -1
    if EDITED:
        source = tl.load(edited_row + row)
    x_N = row_tokens(logits, row.to(tl.int64) * row_stride, edited, source, token_N, V, EDITED)
    if BOUNDED:
        x_N = tl.where(is_kept(x_N, token_N, bound_R, last_R, row, BOUNDED), x_N, float("-inf"))
    return tl.maximum(share_of(x_N, best, scale, over, QUICK) - q_N, 0.0)


@triton.jit
def chances_of(
    logits, row_stride, edited, edited_row, drafts, bound_R, last_R, values, probs, probs_row, t2d, sequence, usable,
    temperature, V, C, num_chunks,
    Q: tl.constexpr, EDITED: tl.constexpr, BOUNDED: tl.constexpr, PROBS: tl.constexpr, M: tl.constexpr,
    P: tl.constexpr,
):  # fmt: skip
    """P and q of each draft, float64, 0 where there is none; the largest logit of each row, and its mass, float64.

    What can be loaded is on its way before it is known which drafts count; what then does not count is anything.
    """
    place_P, chunk_1M = tl.arange(0, P), tl.arange(0, M)[None, :]
    row_P = sequence * Q + tl.minimum(place_P, Q - 1)
    at_PM = values + 2 * (row_P[:, None] * num_chunks + chunk_1M)
    best_PM = tl.load(at_PM, mask=chunk_1M < num_chunks, other=float("-inf"))
    sum_PM = tl.load(at_PM + 1, mask=chunk_1M < num_chunks, other=0.0)
    token_P = tl.load(drafts + sequence * (Q - 1) + place_P, mask=place_P < Q - 1, other=-1).to(tl.int32)
    is_draft_P = place_P < usable
    token_P = tl.where(is_draft_P, token_P, 0x7FFFFFFF)
    source_P = row_P * 0 - 1
    if EDITED:
        source_P = tl.load(edited_row + row_P)
    x_P = row_tokens(logits, row_P.to(tl.int64) * row_stride, edited, source_P, token_P, V, EDITED)
    q_P = is_draft_P.to(tl.float64)
    if PROBS > 0:
        column_P = columns_of(t2d, token_P, V, PROBS)
        q_P = proposed(probs, probs_row, tl.minimum(place_P, Q - 2), column_P, V, C, Q - 1, PROBS).to(tl.float64)
    best_PM = tl.where(place_P[:, None] <= usable, best_PM, float("-inf"))
    best_P = tl.maximum(tl.max(best_PM, axis=1), -3.0e38)
    is_there_PM = best_PM > float("-inf")
    shift_PM = tl.where(is_there_PM, (best_PM - best_P[:, None]) / temperature, 0.0)
    mass_PM = tl.where(is_there_PM, sum_PM * tl.exp(shift_PM), 0.0)
    total_P = tl.sum(mass_PM.to(tl.float64), axis=1)
    total_P = tl.where(total_P > 0.0, total_P, 1.0)  # of rows that may not be read, too
    kept_P = is_kept(x_P, token_P, bound_R, last_R, row_P, BOUNDED) & is_draft_P
    p_P = tl.where(kept_P, tl.exp((x_P - best_P) / temperature) / total_P.to(tl.float32), 0.0).to(tl.float64)
    return p_P, q_P, best_P, total_P


@triton.jit
def draws_of(seed, choice, position, P: tl.constexpr):
    """What judges each draft; and in the last place, which no draft has, what the token after them is drawn by."""
    place_P = tl.arange(0, P)
    is_last_P = place_P == P - 1
    return uniform(tl.where(is_last_P, 0, place_P), position, choice, tl.where(is_last_P, 2, 1), seed)


@triton.jit
def accepted_one_by_one(p_P, q_P, draw_P, usable, P: tl.constexpr):
    """Drafts that stand if each is judged once all before it stand."""
    place_P = tl.arange(0, P)
    stands_P = (draw_P < tl.minimum(ratio(p_P, q_P), 1.0)) & (place_P < usable)
    return tl.minimum(tl.min(tl.where(stands_P, P, place_P)), usable)


@triton.jit
def reach_of(p_P, q_P, Q: tl.constexpr, P: tl.constexpr):
    """How far the target covers the prefix before each draft, and the one that ends with it, float64."""
    place_P, reach = tl.arange(0, P), tl.full([], 1.0, tl.float64)
    before_P, reach_P = reach + tl.zeros([P], tl.float64), tl.zeros([P], tl.float64)
    for place in tl.static_range(Q - 1):
        before_P = tl.where(place_P == place, reach, before_P)
        reach = tl.minimum(ratio(reach * at_place(p_P, place, P), at_place(q_P, place, P)), 1.0)
        reach_P = tl.where(place_P == place, reach, reach_P)
    return before_P, reach_P


@triton.jit
def _next_of(probs_row_B, row, sequence, num_sequences, S: tl.constexpr):
    """The first sequence after one whose drafts were drawn from this row of probabilities; their number if none."""
    found, start = num_sequences, sequence + 1
    while start < num_sequences:
        sequence_S = start + tl.arange(0, S)
        row_S = tl.load(probs_row_B + sequence_S, mask=sequence_S < num_sequences, other=-1)
        found = tl.min(tl.where(row_S == row, sequence_S, num_sequences))
        start = tl.where(found < num_sequences, num_sequences, start + S)
    return found


@triton.jit
def _sum_rows(
    logits, row_stride, edited, edited_row, drafts, cap, law, is_judged, temperature, seed, choice, position, bound_R,
    last_R, values, probs, probs_row, t2d, left, chances, V, C, num_chunks, sequence, chunk, stop,
    Q: tl.constexpr, EDITED: tl.constexpr, BOUNDED: tl.constexpr, PROBS: tl.constexpr, M: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, QUICK: tl.constexpr,
):  # fmt: skip
    """Of some chunks of a sequence: of the verdict's row if a draft falls; or of each that a block may end in."""
    usable = num_usable(drafts, cap, sequence, Q - 1)
    p_P, q_P, best_P, total_P = chances_of(
        logits, row_stride, edited, edited_row, drafts, bound_R, last_R, values, probs, probs_row, t2d, sequence,
        usable, temperature, V, C, num_chunks, Q, EDITED, BOUNDED, PROBS, M, P,
    )  # fmt: skip
    first, past = 0, tl.where(is_judged, usable, 0)
    if law == BLOCK:
        before_P, said_P = reach_of(p_P, q_P, Q, P)
    else:
        first = accepted_one_by_one(p_P, q_P, draws_of(seed, choice, position, P), usable, P)
        past = tl.minimum(first + 1, past)
        before_P, said_P = tl.full([P], 1.0, tl.float64), first + tl.zeros([P], tl.float64)
    if chunk == 0:
        at_P = chances + sequence * (3 * P) + tl.arange(0, P)
        tl.store(at_P, said_P)
        tl.store(at_P + P, best_P.to(tl.float64))
        tl.store(at_P + 2 * P, total_P)
    scale, over_P = 1.4426950408889634 / temperature, (before_P / total_P).to(tl.float32)
    while chunk < stop:
        token_X4 = fours_of(chunk * N, N)
        column_X4 = columns_of(t2d, token_X4, V, PROBS)
        place = first
        while place < past:
            row = sequence * Q + place
            q_X4 = proposed(probs, probs_row, place, column_X4, V, C, Q - 1, PROBS)
            weight_X4 = left_over(
                logits, row_stride, edited, edited_row, bound_R, last_R, row, at_place(best_P, place, P), scale,
                at_place(over_P, place, P), q_X4, token_X4, V, EDITED, BOUNDED, QUICK,
            )  # fmt: skip
            tl.store(left + row * num_chunks + chunk, tl.sum(tl.sum(weight_X4, axis=1).to(tl.float64)))
            place += 1
        chunk += 1


@triton.jit(
    do_not_specialize=[
        "edited", "edited_row", "bound_R", "last_R", "probs_row_B", "left", "chances", "C",
        "num_chunks", "num_sequences", "span",
    ]
)  # fmt: skip
def residual_kernel(
    logits, row_stride, edited, edited_row, drafts, cap, law_B, temperature_B, seed_B, choice_B, position_B,
    bound_R, last_R, values, probs, probs_row_B, t2d, left, chances, V, C, num_chunks, num_sequences, span,
    Q: tl.constexpr, EDITED: tl.constexpr, BOUNDED: tl.constexpr, PROBS: tl.constexpr, M: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, S: tl.constexpr, QUICK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The weight that drafts leave over in each chunk, for the sequences of one row of probabilities."""
    chunk, probs_row = tl.program_id(0) * span, tl.program_id(1)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sequence = _next_of(probs_row_B, probs_row, -1, num_sequences, S)
    while sequence < num_sequences:
        law, temperature = tl.load(law_B + sequence), tl.load(temperature_B + sequence).to(tl.float32)
        seed, choice = tl.load(seed_B + sequence), tl.load(choice_B + sequence)
        position = tl.load(position_B + sequence)
        is_judged = ((law == REJECT) | (law == BLOCK)) & (temperature > 0.0)
        _sum_rows(
            logits, row_stride, edited, edited_row, drafts, cap, law, is_judged, tl.maximum(temperature, 1e-30), seed,
            choice, position, bound_R, last_R, values, probs, probs_row, t2d, left, chances, V, C, num_chunks, sequence,
            chunk, tl.minimum(chunk + span, num_chunks), Q, EDITED, BOUNDED, PROBS, M, P, N, QUICK,
        )  # fmt: skip
        sequence = _next_of(probs_row_B, probs_row, sequence, num_sequences, S)


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
                weight_M = tl.load(left + row * num_chunks + chunk_M, mask=is_there_M, other=0.0)
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
        p_P, q_P, best_P, total_P = chances_of(
            logits, row_stride, edited, edited_row, drafts, bound_R, last_R, values, probs, probs_row, t2d, sequence,
            usable, temperature, V, C, num_chunks, Q, EDITED, BOUNDED, 0, M, P,
        )  # fmt: skip
        accepted = accepted_one_by_one(p_P, q_P, draw_P, usable, P)
    last = pick(
        logits, row_stride, edited, edited_row, drafts, bound_R, last_R, values, probs, probs_row, t2d, left, sequence,
        accepted, at_place(best_P, accepted, P), at_place(total_P, accepted, P), usable, reach, temperature,
        at_place(draw_P, P - 1, P), V, C, num_chunks, Q, EDITED, BOUNDED, PROBS, M, N, QUICK,
    )  # fmt: skip
    return accepted, last


TYPES_DRAWN = {"probs": "*fp32", "probs_row_B": "*i32", "t2d": "*i64", "left": "*fp64", "chances": "*fp64", "C": "i32"}


def variants() -> list[Variant]:
    """Three drafts of Qwen's vocabulary, drawn from probabilities over all of it, and over a smaller head."""
    found = []
    for probs, bounded, early in ((1, False, True), (2, False, True), (2, True, True), (2, True, False)):
        registers = RESIDUAL_REGISTERS[bounded]
        constants = {"Q": 4, "EDITED": False, "BOUNDED": bounded, "PROBS": probs, "M": 64, "P": 4}
        constants |= {"N": CHUNK, "S": SEARCHED, "QUICK": early, "EARLY": early}
        cut, portable = " cut" * bounded, " portable" * (not early)
        found.append(
            Variant(
                name=f"draft_residual bf16 Q=4{' head' if probs == 2 else ''}{cut}{portable}",
                kernel=residual_kernel,
                types={"logits": "*bf16", **TYPES, **TYPES_DRAWN, "num_sequences": "i32", "span": "i32"},
                constants=constants,
                aligned=(*ALIGNED, "probs", "t2d"),
                num_warps=RESIDUAL_WARPS,
                max_registers=registers if early else 255,
                may_spill=early,  # a number or two of a row, with the older Triton
                options={"maxnreg": registers} if early else {},
                on_amd=not early,
            )
        )
    return found
