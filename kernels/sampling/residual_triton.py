# mypy: ignore-errors
"""Drafts that are judged by chance: the verdict, and what those leave over that were drawn from probabilities.

Most rows are read once, by the scan, which leaves what is needed to draw from them (`drawn_triton`). Only rows whose
drafts were drawn from probabilities are read again: `residual_kernel` sums what is left over in each of their chunks.
It has programs for rows of probabilities, not for sequences, lest most of them start for nothing; each finds its
sequence's verdict from the scan, rather than wait for a launch that tells it. The first of a sequence leaves what it
found, so that the decision stands on the same numbers. Programs are there while the last of the scan run, and load what
does not come from it.

Shapes: X blocks of four of the N tokens of a chunk or H of a part of it, M chunks of a row and P places of a sequence,
rounded up to powers of two; S sequences that are looked at together.
"""

import triton
import triton.language as tl

from baton.kernels.dependent_launch import dependent_launch
from baton.kernels.sampling import sample_triton
from baton.kernels.sampling.noise_triton import quick_exp2, uniform
from baton.kernels.sampling.row_triton import num_usable, row_tokens
from baton.kernels.sampling.sample_triton import ALIGNED, BLOCK, CHUNK, REJECT, TYPES, is_kept
from baton.kernels.variant import Variant

RESIDUAL_WARPS = 4
PARTS = 2  # of a chunk, one after the other
RESIDUAL_REGISTERS = {False: 96, True: 128}  # by whether rows are cut: so that five or four share a multiprocessor
PROGRAMS = 132 * 5  # of a launch: more would take turns, and each find the same verdict once more
SEARCHED = 256


def launch(common, drawn, vocab_size, num_columns, num_chunks, num_sequences, num_rows_of_probs, flags, device) -> None:
    """Sum what drafts that were drawn from probabilities leave over in each chunk."""
    span = min(num_chunks, triton.cdiv(num_rows_of_probs * num_chunks, PROGRAMS))
    residual_kernel[(triton.cdiv(num_chunks, span), num_rows_of_probs)](
        *common, *drawn, vocab_size, num_columns, num_chunks, num_sequences, span, **flags,
        H=flags["N"] // PARTS, QUICK=sample_triton.is_quick(), S=SEARCHED, num_warps=RESIDUAL_WARPS,
        **dependent_launch(device),
        **({"maxnreg": RESIDUAL_REGISTERS[flags["BOUNDED"]]} if sample_triton.is_quick() else {}),
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
    P: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """P and q of each draft, float64, 0 where there is none; the largest logit of each row, and its mass, float64.

    What can be loaded is on its way before it is known which drafts count; what then does not count is anything. What
    the scan did not write, before it is known that the scan is over.
    """
    place_P, chunk_1M = tl.arange(0, P), tl.arange(0, M)[None, :]
    row_P = sequence * Q + tl.minimum(place_P, Q - 1)
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
    if WAITS:
        tl.extra.cuda.gdc_wait()
    at_PM = values + 2 * (row_P[:, None] * num_chunks + chunk_1M)
    best_PM = tl.load(at_PM, mask=chunk_1M < num_chunks, other=float("-inf"))
    sum_PM = tl.load(at_PM + 1, mask=chunk_1M < num_chunks, other=0.0)
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
    P: tl.constexpr, N: tl.constexpr, H: tl.constexpr, QUICK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Of some chunks of a sequence: of the verdict's row if a draft falls; or of each that a block may end in."""
    usable = num_usable(drafts, cap, sequence, Q - 1)
    draw_P = draws_of(seed, choice, position, P)
    p_P, q_P, best_P, total_P = chances_of(
        logits, row_stride, edited, edited_row, drafts, bound_R, last_R, values, probs, probs_row, t2d, sequence,
        usable, temperature, V, C, num_chunks, Q, EDITED, BOUNDED, PROBS, M, P, EARLY,
    )  # fmt: skip
    first, past = 0, tl.where(is_judged, usable, 0)
    if law == BLOCK:
        before_P, said_P = reach_of(p_P, q_P, Q, P)
    else:
        first = accepted_one_by_one(p_P, q_P, draw_P, usable, P)
        past = tl.minimum(first + 1, past)
        before_P, said_P = tl.full([P], 1.0, tl.float64), first + tl.zeros([P], tl.float64)
    if chunk == 0:
        at_P = chances + sequence * (3 * P) + tl.arange(0, P)
        tl.store(at_P, said_P)
        tl.store(at_P + P, best_P.to(tl.float64))
        tl.store(at_P + 2 * P, total_P)
    scale, over_P = 1.4426950408889634 / temperature, (before_P / total_P).to(tl.float32)
    while chunk < stop:
        place = first
        while place < past:
            row, start, sum_X = sequence * Q + place, chunk * N, tl.zeros([H // 4], tl.float64)
            best, over = at_place(best_P, place, P), at_place(over_P, place, P)
            while start < chunk * N + N:  # part by part, in fewer registers: so that all programs fit at once
                token_X4 = fours_of(start, H)
                column_X4 = columns_of(t2d, token_X4, V, PROBS)
                q_X4 = proposed(probs, probs_row, place, column_X4, V, C, Q - 1, PROBS)
                weight_X4 = left_over(
                    logits, row_stride, edited, edited_row, bound_R, last_R, row, best, scale, over, q_X4, token_X4, V,
                    EDITED, BOUNDED, QUICK,
                )  # fmt: skip
                sum_X += tl.sum(weight_X4, axis=1).to(tl.float64)
                start += H
            tl.store(left + row * num_chunks + chunk, tl.sum(sum_X))
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
    P: tl.constexpr, N: tl.constexpr, H: tl.constexpr, S: tl.constexpr, QUICK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The weight that drafts leave over in each chunk, for the sequences of one row of probabilities."""
    chunk, probs_row = tl.program_id(0) * span, tl.program_id(1)
    if EARLY:
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
            chunk, tl.minimum(chunk + span, num_chunks), Q, EDITED, BOUNDED, PROBS, M, P, N, H, QUICK, EARLY,
        )  # fmt: skip
        sequence = _next_of(probs_row_B, probs_row, sequence, num_sequences, S)
    if EARLY:
        tl.extra.cuda.gdc_wait()  # also where there was none: that this launch is over says that the scan is


TYPES_DRAWN = {"probs": "*fp32", "probs_row_B": "*i32", "t2d": "*i32", "left": "*fp64", "chances": "*fp64", "C": "i32"}


def variants() -> list[Variant]:
    """Three drafts of Qwen's vocabulary, drawn from probabilities over all of it, and over a smaller head."""
    found = []
    for probs, bounded, early, edited in (
        (1, False, True, False),
        (2, False, True, False),
        (2, True, True, False),
        (2, True, False, False),
        (2, True, True, True),
    ):
        registers = RESIDUAL_REGISTERS[bounded]
        constants = {"Q": 4, "EDITED": edited, "BOUNDED": bounded, "PROBS": probs, "M": 64, "P": 4}
        constants |= {"N": CHUNK, "H": CHUNK // PARTS, "S": SEARCHED, "QUICK": early, "EARLY": early}
        cut, portable = " cut" * bounded + " edited" * edited, " portable" * (not early)
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
