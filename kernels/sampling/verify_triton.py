# mypy: ignore-errors
"""The launches of `kernels.sampling.verify`: scan rows, cut them, sum what drafts leave over, decide; what follows.

The sums and the decision may be there as soon as all programs of the launch before them are (`dependent_launch`).

Shapes: N tokens of a chunk, M chunks of a row, rounded up to a power of two.
"""

import torch
import triton
import triton.language as tl

from baton.kernels.dependent_launch import dependent_launch
from baton.kernels.sampling import bounds_triton, residual_triton, sample_triton
from baton.kernels.sampling.drawn_triton import drawn
from baton.kernels.sampling.residual_triton import TYPES_DRAWN
from baton.kernels.sampling.row_triton import num_usable
from baton.kernels.sampling.sample_triton import ALIGNED, BLOCK, CHUNK, FORCE, REJECT, SYNTHETIC, TYPES, choose, made_up
from baton.kernels.sampling.verify import NOT_FINITE
from baton.kernels.variant import Variant

DECIDE_WARPS = 16
# By whether any sequence is judged by chance. If none is, two programs share a multiprocessor; to race a part of a
# chunk again, seldom, would take more. If any is, one has it alone: faster than two of 8 warps at 64 sequences.
DECIDE_REGISTERS = {False: 64, True: 128}
POST_ROWS = 128
_NOT_FINITE = tl.constexpr(NOT_FINITE)


def launch(logits_BQV, rows, drafts, edited, counts_Q, token_ids_BQ, accepted_len_B) -> None:
    """All that verification takes; `drafts` are None where each sequence has one row."""
    num_sequences, num_rows, vocab_size = logits_BQV.shape
    device, count = logits_BQV.device, num_sequences * num_rows
    chunk = sample_triton.CHUNK
    scan = sample_triton.launch_scan(logits_BQV, rows, drafts, edited)
    values, ids, num_chunks = scan.values, scan.ids, scan.values.shape[1]
    bound_R, last_R = values, ids
    is_bounded = rows.truncates
    if is_bounded:
        bound_R = torch.empty(count, dtype=torch.float32, device=device)
        last_R = torch.empty(count, dtype=torch.int32, device=device)
        bounds_triton.launch_rows(logits_BQV, rows, drafts, edited, scan, bound_R, last_R)
    seed_B, none = rows.seed_B, drafts is None
    common = (
        logits_BQV,
        logits_BQV.stride(0 if num_rows == 1 else 1),
        values if edited is None else edited.logits_EV,
        ids if edited is None else edited.place_R,
        seed_B if none else drafts.ids_BK,
        seed_B if none else drafts.cap_B,
        ids if none else drafts.law_B,
        rows.temperature_B,
        seed_B,
        rows.choice_B,
        rows.position_B,
        bound_R,
        last_R,
        values,
    )
    flags = {"Q": num_rows, "EDITED": edited is not None, "BOUNDED": is_bounded}
    by_chance = not none and drafts.by_chance
    left, chances, probs = values, values, None if none else drafts.probs_NKC
    flags |= {"P": triton.next_power_of_2(num_rows), "M": triton.next_power_of_2(num_chunks)}
    if probs is not None:
        left = torch.empty(count, num_chunks, dtype=torch.float64, device=device)
        chances = torch.empty(num_sequences, 3, flags["P"], dtype=torch.float64, device=device)
    t2d_V = None if none else drafts.t2d_V
    by_probs = (
        values if probs is None else probs,
        ids if probs is None else drafts.probs_row_B,
        ids if t2d_V is None else t2d_V,
        left,
        chances,
    )
    num_columns = 0 if probs is None else probs.shape[2]
    flags |= {"PROBS": 0 if probs is None else 1 + (t2d_V is not None), "N": chunk}
    if probs is not None and len(probs):
        residual_triton.launch(
            common, by_probs, vocab_size, num_columns, num_chunks, num_sequences, len(probs), flags, device
        )  # fmt: skip
    _decide_kernel[(num_sequences,)](
        *common, ids, *by_probs, *sample_triton.made_up_arguments(rows, drafts),
        token_ids_BQ, accepted_len_B, accepted_len_B if counts_Q is None else counts_Q, vocab_size, num_columns,
        num_chunks, **flags, LAWS=not none, CHANCE=by_chance, COUNTED=counts_Q is not None,
        QUICK=sample_triton.is_quick(), num_warps=DECIDE_WARPS, **dependent_launch(device),
        **({"maxnreg": DECIDE_REGISTERS[by_chance]} if sample_triton.is_quick() else {}),
    )  # fmt: skip


def launch_after(token_ids_BQ, accepted_len_B, length_B, logits_BQV, results) -> None:
    """What `kernels.sampling.verify.post_verify` gives, into `results`."""
    num_sequences, num_rows = token_ids_BQ.shape
    _after_kernel[(triton.cdiv(num_sequences, POST_ROWS),)](
        token_ids_BQ, accepted_len_B, length_B, logits_BQV, *logits_BQV.stride()[:2], *results, num_sequences,
        Q=num_rows, B=POST_ROWS, num_warps=4,
    )  # fmt: skip


@triton.jit
def _own_choice(
    logits, row_stride, edited, edited_row, drafts, law, temperature, seed, choice, position, bound_R, last_R, values,
    ids, rates, forced_len, sequence, usable, V, num_chunks,
    Q: tl.constexpr, EDITED: tl.constexpr, BOUNDED: tl.constexpr, M: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Drafts that are the target's own choice, or that FORCE or SYNTHETIC lets stand, and the choice after them."""
    is_made_up = (law == FORCE) | (law == SYNTHETIC)
    first, stop = 0, usable
    if is_made_up:  # no other row was read
        first = made_up(law, forced_len, rates, sequence, position, usable, P)
        stop = first
    chosen_P = choose(
        logits, row_stride, edited, edited_row, sequence, seed, choice, position, bound_R, last_R, values, ids,
        temperature, first, stop, V, num_chunks, Q, EDITED, BOUNDED, M, P, N,
    )  # fmt: skip
    place_P = tl.arange(0, P)
    accepted = first
    if not is_made_up:
        is_draft_P = place_P < usable
        draft_P = tl.load(drafts + sequence * (Q - 1) + place_P, mask=is_draft_P, other=-1)
        accepted = tl.min(tl.where(is_draft_P & (draft_P == chosen_P), P, place_P))
    return accepted, tl.sum(tl.where(place_P == accepted, chosen_P, 0))


@triton.jit(
    do_not_specialize=[
        "edited", "edited_row", "bound_R", "last_R", "probs_row_B", "left", "chances", "rates",
        "forced_len", "C", "num_chunks",
    ]
)  # fmt: skip
def _decide_kernel(
    logits, row_stride, edited, edited_row, drafts, cap, law_B, temperature_B, seed_B, choice_B, position_B,
    bound_R, last_R, values, ids, probs, probs_row_B, t2d, left, chances, rates, forced_len, token_ids,
    accepted_len, counts, V, C, num_chunks,
    Q: tl.constexpr, LAWS: tl.constexpr, EDITED: tl.constexpr, BOUNDED: tl.constexpr, PROBS: tl.constexpr,
    CHANCE: tl.constexpr, COUNTED: tl.constexpr, M: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    QUICK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    law, temperature = 0, tl.load(temperature_B + sequence).to(tl.float32)
    if LAWS:
        law = tl.load(law_B + sequence)
    seed, choice, position = tl.load(seed_B + sequence), tl.load(choice_B + sequence), tl.load(position_B + sequence)
    usable = num_usable(drafts, cap, sequence, Q - 1)
    probs_row = tl.full([], -1, tl.int32)
    if PROBS > 0:
        probs_row = tl.load(probs_row_B + sequence)
    if EARLY:  # all of this was there before the scan began
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if law < 0:
        for place in tl.static_range(Q):
            tl.store(token_ids + sequence * Q + place, 0)
        tl.store(accepted_len + sequence, 0)
        return
    accepted, last = 0, 0
    draws = ((law == REJECT) | (law == BLOCK)) & (temperature > 0.0)
    if draws:
        if CHANCE:
            accepted, last = drawn(
                logits, row_stride, edited, edited_row, drafts, law, temperature, seed, choice, position, bound_R,
                last_R, values, probs, probs_row, t2d, left, chances, sequence, usable, V, C, num_chunks, Q, EDITED,
                BOUNDED, PROBS, M, P, N, QUICK,
            )  # fmt: skip
    else:
        accepted, last = _own_choice(
            logits, row_stride, edited, edited_row, drafts, law, temperature, seed, choice, position, bound_R, last_R,
            values, ids, rates, forced_len, sequence, usable, V, num_chunks, Q, EDITED, BOUNDED, M, P, N,
        )  # fmt: skip
    # No comparison holds for NaN: whatever came of a row of them is an id all the same, which the next launch looks up.
    last = tl.minimum(tl.maximum(last, 0), V - 1)
    for place in tl.static_range(Q):
        token = tl.where(place == accepted, last, 0)
        if place < Q - 1:
            if place < accepted:
                token = tl.load(drafts + sequence * (Q - 1) + place).to(tl.int32)
        tl.store(token_ids + sequence * Q + place, token)
    tl.store(accepted_len + sequence, accepted)
    if COUNTED:
        tl.atomic_add(counts + accepted, 1)


@triton.jit(do_not_specialize=["num_sequences", "sequence_stride", "row_stride"])
def _after_kernel(
    token_ids, accepted_len, length, logits, sequence_stride, row_stride, last_token, new_length, last_row, told_len,
    num_sequences, Q: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    sequence_B = tl.program_id(0) * B + tl.arange(0, B)
    mask_B = sequence_B < num_sequences
    accepted_B = tl.load(accepted_len + sequence_B, mask=mask_B, other=0)
    row_B = sequence_B.to(tl.int64) * Q + accepted_B
    tl.store(last_row + sequence_B, row_B, mask=mask_B)
    tl.store(last_token + sequence_B, tl.load(token_ids + row_B, mask=mask_B, other=0), mask=mask_B)
    length_B = tl.load(length + sequence_B, mask=mask_B, other=0)
    tl.store(new_length + sequence_B, length_B + accepted_B + 1, mask=mask_B)
    is_wrong_B = tl.zeros([B], dtype=tl.int1)
    for place in tl.static_range(Q):
        at_B = sequence_B.to(tl.int64) * sequence_stride + place * row_stride
        x_B = tl.load(logits + at_B, mask=mask_B & (place <= accepted_B), other=0.0).to(tl.float32)
        is_wrong_B |= (x_B != x_B) | (x_B == float("inf"))
    tl.store(told_len + sequence_B, tl.where(is_wrong_B, accepted_B + _NOT_FINITE, accepted_B), mask=mask_B)


def variants() -> list[Variant]:
    """Three drafts, judged in every way or only matched; one row of each sequence; and what follows."""
    own = {
        "rates": "*fp64", "forced_len": "i32", "token_ids": "*i64", "accepted_len": "*i64", "counts": "*i64",
    }  # fmt: skip
    found = []
    for num_rows, by_chance, probs, early, edited, bounded in (
        (4, True, 2, True, False, True),
        (4, True, 0, True, False, True),
        (4, True, 0, False, False, True),
        (4, False, 0, True, False, True),
        (1, False, 0, True, False, True),
        (4, True, 2, True, True, True),
        (4, False, 0, True, False, False),
    ):
        constants = {"Q": num_rows, "LAWS": num_rows > 1, "EDITED": edited, "BOUNDED": bounded, "PROBS": probs}
        constants |= {"CHANCE": by_chance, "COUNTED": num_rows > 1, "M": 64, "P": num_rows, "N": CHUNK}
        constants |= {"QUICK": early, "EARLY": early}
        absent = {} if probs else {"left": "*fp32", "chances": "*fp32", "t2d": "*i32"}  # something else in their places
        kind = f"{' by chance' * by_chance}{' head' * (probs > 0)}{' portable' * (not early)}"
        kind += f"{' edited' * edited}{' uncut' * (not bounded)}"
        found.append(
            Variant(
                name=f"token_decision bf16 Q={num_rows}{kind}",
                kernel=_decide_kernel,
                types={"logits": "*bf16", **TYPES, **TYPES_DRAWN, **own, **absent},
                constants=constants,
                aligned=(*ALIGNED, "probs", "t2d"),
                num_warps=DECIDE_WARPS,
                max_registers=DECIDE_REGISTERS[by_chance] if early else 255,
                may_spill=True,
                options={"maxnreg": DECIDE_REGISTERS[by_chance]} if early else {},
                on_amd=not early,
            )
        )
    names = ("token_ids", "accepted_len", "length", "last_token", "new_length", "last_row", "told_len")
    strides = {"sequence_stride": "i32", "row_stride": "i32"}
    types = {**dict.fromkeys(names, "*i64"), "logits": "*bf16", **strides, "num_sequences": "i32"}
    found.append(Variant(name="post_verify Q=4", kernel=_after_kernel, types=types, constants={"Q": 4, "B": POST_ROWS}))
    return found
