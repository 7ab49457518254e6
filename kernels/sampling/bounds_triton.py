# mypy: ignore-errors
"""Where top-k, top-p and min-p cut a row of logits, without sorting it, and what the scan would leave of the rest.

What stays is a prefix of the tokens in order (the likelier first, among equals the lower id), so that it is said by its
last token: the logit and the id. The scan has shared each row among many programs and left the largest logit of every
group of tokens. As groups have no token in common, the C-th largest of these is a bound that at least C tokens reach,
and seldom many more; only the groups that reach it are read again. The tokens that do are listed, and the border is
found in this list, with the whole numbers of the reference: so a program for each row sees little of the row.

Where the border lies behind the list (a flat row with top-p alone), it is not looked for if a nominee of the scan
settles the row (`nominee_triton`; the bounds then end with the chosen token). Otherwise, for drafts judged by chance, a
k of thousands or a long run of equals, one program closes it in by values, which takes passes over the row.

Shapes: N tokens of a chunk, G of a group, L groups of a row, C listed tokens, T tokens of a tile, S listed tokens that
are few, M chunks of a row, rounded up to a power of two.
"""

import torch
import triton
import triton.language as tl

from baton.kernels.sampling import sample_triton
from baton.kernels.sampling.border_triton import (
    behind_list,
    groups_that_reach,
    lane_bound,
    least_of,
    of_few,
    of_list,
    total_of,
)
from baton.kernels.sampling.nominee_triton import race_of_list, rescan, settle, sums_of_list
from baton.kernels.sampling.race_triton import store_winner
from baton.kernels.sampling.row_triton import cuts_of, row_tokens
from baton.kernels.sampling.sample_triton import BLOCK, CHUNK, CUT_TYPES, GROUP, REJECT, TYPES, is_read, masses
from baton.kernels.variant import Variant

TILE = 2048
LISTED = 1024
FEW = 128
RACED = 256  # listed tokens at a time
NUM_WARPS = 8
NUM_STAGES = 4
MAX_REGISTERS = 128  # so that two programs of 256 threads share a multiprocessor

LEAST = tl.constexpr(-3.4028234663852886e38)  # of finite numbers

_INTERPRETED = bool(triton.knobs.runtime.interpret)


def launch(logits_BQV, rows, drafts, edited, bound_R, last_R) -> None:
    """Bounds of every row. `drafts` are None where each sequence has one row."""
    scan = sample_triton.launch_scan(logits_BQV, rows, drafts, edited)
    launch_rows(logits_BQV, rows, drafts, edited, scan, bound_R, last_R)


def launch_rows(logits_BQV, rows, drafts, edited, scan, bound_R, last_R) -> None:
    """The same where the scan was launched: one program for each row, which changes what was left of cut rows."""
    num_sequences, num_rows, vocab_size = logits_BQV.shape
    count, num_chunks = num_sequences * num_rows, scan.values.shape[1]
    listed_x = torch.empty(count, LISTED, dtype=torch.float32, device=logits_BQV.device)
    listed_id = torch.empty(count, 2, LISTED, dtype=torch.int32, device=logits_BQV.device)
    none, seed_B = drafts is None, rows.seed_B
    _bounds_kernel[(count,)](
        logits_BQV,
        logits_BQV.stride(0 if num_rows == 1 else 1),
        listed_x if edited is None else edited.logits_EV,
        listed_id if edited is None else edited.place_R,
        seed_B if none else drafts.ids_BK,
        seed_B if none else drafts.cap_B,
        last_R if none else drafts.law_B,
        rows.temperature_B,
        seed_B,
        rows.choice_B,
        rows.position_B,
        *sample_triton.cut_arguments(rows),
        *sample_triton.made_up_arguments(rows, drafts),
        bound_R,
        last_R,
        scan.values,
        scan.ids,
        scan.maxima,
        listed_x,
        listed_id,
        vocab_size,
        num_chunks,
        max(1, (vocab_size - 1).bit_length()),
        **sample_triton.cut_flags(rows),
        **sizes(num_chunks, sample_triton.CHUNK, sample_triton.GROUP),
        Q=num_rows,
        LAWS=not none,
        EDITED=edited is not None,
        P=triton.next_power_of_2(num_rows),
        STAGES=1 if edited is not None else NUM_STAGES,
        QUICK=sample_triton.is_quick(),
        num_warps=NUM_WARPS,
        **({} if _INTERPRETED or torch.version.hip else {"maxnreg": MAX_REGISTERS}),
    )


def sizes(num_chunks: int, chunk: int, group: int) -> dict[str, int]:
    """The constants of a vocabulary."""
    num_groups = triton.next_power_of_2(num_chunks * (chunk // group))
    return {
        "N": chunk,
        "G": group,
        "L": num_groups,
        "C": LISTED,
        "T": TILE,
        "S": FEW,
        "A": RACED,
        "M": triton.next_power_of_2(num_chunks),
    }


@triton.jit
def _list(
    logits, base, edited, source, V, maxima, num_groups, reach, listed_x, listed_id,
    EDITED: tl.constexpr, G: tl.constexpr, C: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """List the tokens that reach a bound, in order of ids; how many they are, or more than C if they are."""
    num_hit = groups_that_reach(maxima, num_groups, reach, listed_id + C, C, T)
    count = C + 1
    if num_hit <= C:
        listed_group = listed_id + C
        count = 0
        hit_X1, place_1G = tl.arange(0, T // G)[:, None], tl.arange(0, G)[None, :]
        for start in range(0, num_hit, T // G):
            group_X1 = tl.load(listed_group + start + hit_X1, mask=start + hit_X1 < num_hit, other=0x1FFFFFF)
            token_XG = group_X1 * G + place_1G
            x_XG = row_tokens(logits, base, edited, source, token_XG, V, EDITED)
            is_listed_T = tl.reshape(((x_XG >= reach) & (token_XG < V)).to(tl.int32), [T])
            num_listed = tl.sum(is_listed_T)
            if (num_listed > 0) & (count + num_listed <= C):
                at_T = count + tl.cumsum(is_listed_T, axis=0) - 1
                tl.store(listed_x + at_T, tl.reshape(x_XG, [T]), mask=is_listed_T > 0)
                tl.store(listed_id + at_T, tl.reshape(token_XG, [T]), mask=is_listed_T > 0)
            count += num_listed
        tl.debug_barrier()
    return count


@triton.jit
def _of_listed(
    logits, base, edited, source, V, maxima, num_groups, best, temperature, top_k, top_p, least, whole, listed_x,
    listed_id, id_bits,
    EDITED: tl.constexpr, G: tl.constexpr, L: tl.constexpr, C: tl.constexpr, T: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """The border in a short list of the likeliest, or else a long one; whether it is there, and the list's length."""
    bound, last, count = tl.full([], float("-inf"), tl.float32), V, 0
    is_complete = tl.full([], 0, tl.int32)
    # No token has more mass than the best, which has 1: fewer cannot have what top-p asks for.
    few = tl.where(top_k > 0, top_k, S // 2)
    if (top_k <= 0) & (top_p < 1.0) & (least == float("-inf")) & (top_p * whole > S // 2):
        few = tl.where(top_p * whole > C, 0, C // 2).to(tl.int64)
    wanted = tl.where(few <= C - C // 8, few, 0).to(tl.int32)  # there are some more of them than wanted
    while wanted > 0:
        group_L = tl.arange(0, L)
        maximum_L = tl.load(maxima + group_L, mask=group_L < num_groups, other=float("-inf"))
        # Where too few groups have any token, all tokens that there are: of a grammar's few, say.
        reach = tl.maximum(lane_bound(maximum_L, wanted), LEAST)
        count = _list(logits, base, edited, source, V, maxima, num_groups, reach, listed_x, listed_id, EDITED, G, C, T)
        if count <= C:
            is_all = (count >= V) | (reach <= LEAST)
            if count <= S:
                bound, last, is_found = of_few(
                    listed_x, listed_id, count, is_all, best, temperature, top_k, top_p, least, whole, 62 - id_bits, S
                )
            else:
                bound, last, is_found = of_list(
                    listed_x, listed_id, count, is_all, best, temperature, top_k, top_p, least, whole, 62 - id_bits,
                    id_bits, C,
                )  # fmt: skip
            is_complete = is_found.to(tl.int32)
        wanted = tl.where((is_complete > 0) | (wanted >= C // 2) | (count > C) | (top_k > 0), 0, C // 2)
    return bound, last, is_complete, count


@triton.jit(
    do_not_specialize=[
        "edited", "edited_row", "rates", "forced_len", "maxima", "listed_x", "listed_id", "num_chunks", "id_bits",
    ]
)  # fmt: skip
def _bounds_kernel(  # noqa: C901
    logits, row_stride, edited, edited_row, drafts, cap, law_B, temperature_B, seed_B, choice_B, position_B,
    top_k_B, top_p_B, min_p_B, rates, forced_len, bound_R, last_R, values, ids, maxima, listed_x, listed_id, V,
    num_chunks, id_bits,
    HAS_K: tl.constexpr, HAS_P: tl.constexpr, HAS_MIN: tl.constexpr, Q: tl.constexpr, LAWS: tl.constexpr,
    EDITED: tl.constexpr, P: tl.constexpr, N: tl.constexpr, G: tl.constexpr, L: tl.constexpr, C: tl.constexpr,
    T: tl.constexpr, S: tl.constexpr, A: tl.constexpr, M: tl.constexpr, STAGES: tl.constexpr, QUICK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    sequence, place = row // Q, row % Q
    temperature = tl.load(temperature_B + sequence).to(tl.float32)
    law = 0
    if LAWS:
        law = tl.load(law_B + sequence)
    if not is_read(law, place, forced_len, rates, drafts, cap, sequence, position_B, Q, LAWS, P):
        return
    tl.store(bound_R + row, float("-inf"))
    tl.store(last_R + row, V)
    top_k, top_p, min_p, is_cut = cuts_of(top_k_B, top_p_B, min_p_B, sequence, V, HAS_K, HAS_P, HAS_MIN)
    if (temperature <= 0.0) | (not is_cut):
        return
    temperature = tl.maximum(temperature, 1e-30)
    best, mass_M = masses(values, row, num_chunks, temperature, M)
    if best == float("-inf"):
        store_winner(ids, row, num_chunks, 0, M, N)
        return
    base = row.to(tl.int64) * row_stride
    source = -1
    if EDITED:
        source = tl.load(edited_row + row)
    listed_x += row.to(tl.int64) * C
    listed_id += row.to(tl.int64) * (2 * C)
    whole = tl.sum(mass_M)
    least = tl.full([], float("-inf"), tl.float32)
    if HAS_MIN:
        least = least_of(best, temperature, min_p)
    num_groups = num_chunks * (N // G)
    maxima += row.to(tl.int64) * num_groups
    bound, last, is_complete, count = _of_listed(
        logits, base, edited, source, V, maxima, num_groups, best, temperature, top_k, top_p, least, whole, listed_x,
        listed_id, id_bits, EDITED, G, L, C, T, S,
    )  # fmt: skip
    # Only now, as registers are scarce until here.
    seed, choice = tl.load(seed_B + sequence), tl.load(choice_B + sequence)
    position = tl.load(position_B + sequence) + place
    by_chance = (law == REJECT) | (law == BLOCK)
    scale = 1.4426950408889634 / temperature
    if is_complete > 0:
        last = tl.where(bound < least, V, last)
        bound = tl.maximum(bound, least)
        if by_chance:
            sums_of_list(listed_x, listed_id, count, bound, last, scale, values, row, num_chunks, N, M, 32)
        else:
            token = race_of_list(
                listed_x, listed_id, count, bound, last, best, temperature, seed, choice, position, A
            )  # fmt: skip
            store_winner(ids, row, num_chunks, token, M, N)
    else:
        if HAS_MIN:
            if (min_p > 0.0) & (top_p < 1.0):
                whole = total_of(
                    logits, base, edited, source, V, best, temperature, tl.full([], float("-inf"), tl.float32), V,
                    least, EDITED, T // 2,
                )  # fmt: skip
        is_settled = tl.full([], 0, tl.int1)
        if (not by_chance) & (top_k <= 0):
            bound, last, is_settled = settle(
                logits, base, edited, source, values, ids, row, num_chunks, V, best, temperature, top_p, least, whole,
                seed, choice, position, EDITED, M, N, T, STAGES, QUICK,
            )  # fmt: skip
        if not is_settled:
            bound, last = behind_list(
                logits, base, edited, source, V, best, temperature, top_k, top_p, least, whole, EDITED, T // 2
            )
            last = tl.where(bound < least, V, last)
            bound = tl.maximum(bound, least)
            tl.debug_barrier()
            rescan(
                logits, base, edited, source, bound, last, scale, by_chance, seed, choice, position, values, ids, row,
                num_chunks, V, EDITED, N, QUICK,
            )  # fmt: skip
    tl.store(bound_R + row, bound)
    tl.store(last_R + row, last)


def variants() -> list[Variant]:
    """Those of Qwen's vocabulary, bfloat16 and float32."""
    types = {**TYPES, **CUT_TYPES, "listed_x": "*fp32", "listed_id": "*i32", "id_bits": "i32"}
    found = []
    for dtype, num_rows, has_min, has_p in (
        ("bf16", 1, False, True),
        ("fp32", 1, False, True),
        ("fp32", 4, False, True),
        ("bf16", 4, True, True),
        ("bf16", 1, False, False),
    ):
        constants = {
            "Q": num_rows,
            "LAWS": num_rows > 1,
            "P": num_rows,
            "EDITED": has_min,
            "HAS_K": True,
            "HAS_P": has_p,
        }
        constants |= {"HAS_MIN": has_min, "STAGES": 1 if has_min else NUM_STAGES, "QUICK": not has_min}
        constants |= sizes(38, CHUNK, GROUP)
        found.append(
            Variant(
                name=f"sampling_bounds {dtype} Q={num_rows}{' min-p edited' * has_min}{' top-k alone' * (not has_p)}",
                kernel=_bounds_kernel,
                types={"logits": f"*{dtype}", **types},
                constants=constants,
                aligned=("logits", "row_stride", "V"),
                num_warps=NUM_WARPS,
                max_registers=MAX_REGISTERS,
                may_spill=True,  # numbers of a row, a few dozen, once
                options={"maxnreg": MAX_REGISTERS},
                on_amd=has_min,  # without NVIDIA's own instructions
            )
        )
    return found
