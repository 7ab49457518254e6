# mypy: ignore-errors
"""The scan of rows of logits, and the target's own choice from what it leaves.

`scan_kernel` leaves a few numbers of each chunk of a row: the largest logit, its token, the sum of exponentials, or
some blocks of four tokens that may win the race of logits and noise (`race_triton`); of a row that may be cut, the
largest logit of each group of tokens too, from which `bounds_triton` goes on. Noise is made there and forgotten: what
it nominates is raced again in `choose`, by the reference's arithmetic, and so is, where others might do as well by
their bounds, which is seldom, all among which they are. So how the noise was approximated shows in no token.

A chunk is worth the same wherever it is computed: chunks are of one size whatever the batch, sums over them have one
order, and a program takes as many neighbours as keep the device busy. A sequence's tokens so depend on itself alone.

Shapes: N tokens of a chunk, X blocks of four of them, G tokens of a group, M chunks of a row, rounded up to a power of
two.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from baton.kernels.dependent_launch import dependent_launch
from baton.kernels.sampling.chunk_triton import look, race_pairs, raw_chunk
from baton.kernels.sampling.noise_triton import gumbel, uniform
from baton.kernels.sampling.race_triton import from_row, least_reach, nominated, num_words, tokens_of_group
from baton.kernels.sampling.row_triton import cuts_of, num_usable, row_tokens
from baton.kernels.variant import Variant

CHUNK = 4096
GROUP = 32
SCAN_WARPS = 8
SCAN_REGISTERS = {2: 64, 4: 80}  # by bytes of a logit: so that four or three programs share a multiprocessor
LETS_NEXT_IN = True  # as soon as all its programs are there
PROGRAMS = 132 * 12  # of a launch, that it is worth starting; more only take turns

REJECT = tl.constexpr(1)  # `kernels.sampling.rows.Law`
BLOCK = tl.constexpr(2)
FORCE = tl.constexpr(3)
SYNTHETIC = tl.constexpr(4)
_INTERPRETED = bool(triton.knobs.runtime.interpret)


@dataclass(frozen=True, slots=True)
class Scan:
    """What the scan leaves of R rows with M chunks each.

    Attributes:
        values: float32 [R, M, 2]; the largest logit, and the sum of exponentials counted from it.
        ids: int32 [R, M, W]; what `race_triton` leaves of the race, or the likeliest token.
        maxima: float32 [R, M, N / G], of rows that are cut; None where no row is.
    """

    values: torch.Tensor
    ids: torch.Tensor
    maxima: torch.Tensor | None


def is_quick() -> bool:
    """Whether kernels may use instructions that NVIDIA's GPUs have."""
    return not _INTERPRETED and torch.version.hip is None


def span_of(num_rows: int, num_chunks: int) -> int:
    """How many chunks a program of the scan takes; no number depends on it."""
    return min(num_chunks, max(1, num_rows * num_chunks // PROGRAMS))


def _has_pairs(logits_BQV) -> bool:
    """Whether logits can be read two at a time."""
    is_even = not (logits_BQV.shape[2] | logits_BQV.stride(0) | logits_BQV.stride(1)) & 1
    return logits_BQV.dtype == torch.bfloat16 and is_even and logits_BQV.data_ptr() % 4 == 0


def launch_scan(logits_BQV, rows, drafts, edited) -> Scan:
    """The scan of all rows that may be read; `drafts` are None where each sequence has one row."""
    num_sequences, num_rows, vocab_size = logits_BQV.shape
    device, count = logits_BQV.device, num_sequences * num_rows
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    values = torch.empty(count, num_chunks, 2, dtype=torch.float32, device=device)
    ids = torch.empty(count, num_chunks, num_words(CHUNK), dtype=torch.int32, device=device)
    maxima = None
    if rows.truncates:
        maxima = torch.empty(count, num_chunks, CHUNK // GROUP, dtype=torch.float32, device=device)
    none, seed_B = drafts is None, rows.seed_B
    span = span_of(count, num_chunks)
    has_pairs = _has_pairs(logits_BQV) and edited is None and not rows.truncates
    scan_kernel[(count, triton.cdiv(num_chunks, span))](
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
        *cut_arguments(rows),
        *made_up_arguments(rows, drafts),
        values,
        ids,
        values if maxima is None else maxima,
        vocab_size,
        num_chunks,
        span,
        int(not none and (drafts.rates_K is not None or drafts.forced_len > 0)),
        **cut_flags(rows),
        Q=num_rows,
        LAWS=not none,
        EDITED=edited is not None,
        PAIRS=has_pairs,
        P=triton.next_power_of_2(num_rows),
        N=CHUNK,
        G=GROUP,
        QUICK=is_quick(),
        EARLY=LETS_NEXT_IN and dependent_launch(device)["EARLY"],  # itself it begins after what was before it
        num_warps=SCAN_WARPS,
        **({} if _INTERPRETED or torch.version.hip else {"maxnreg": SCAN_REGISTERS[logits_BQV.element_size()]}),
    )
    return Scan(values, ids, maxima)


def cut_arguments(rows):
    """Top-k, top-p and min-p of sequences, or something that is not read."""
    return (
        rows.seed_B if rows.top_k_B is None else rows.top_k_B,
        rows.temperature_B if rows.top_p_B is None else rows.top_p_B,
        rows.temperature_B if rows.min_p_B is None else rows.min_p_B,
    )


def made_up_arguments(rows, drafts):
    """The rates of drafts that stand because a benchmark wants it so, or something that is not read; or how many do."""
    has_rates = drafts is not None and drafts.rates_K is not None
    return drafts.rates_K if has_rates else rows.temperature_B, 0 if drafts is None else drafts.forced_len


def cut_flags(rows):
    """Which of these there are."""
    return {
        "HAS_K": rows.top_k_B is not None,
        "HAS_P": rows.top_p_B is not None,
        "HAS_MIN": rows.min_p_B is not None,
    }


@triton.jit
def made_up(law, forced_len, rates, sequence, position, usable, P: tl.constexpr):
    """How many drafts FORCE or SYNTHETIC lets stand."""
    accepted = tl.minimum(forced_len, usable)
    if law == SYNTHETIC:
        place_P = tl.arange(0, P)
        draw_P = uniform(
            place_P, position, sequence, tl.full([], 4, tl.int32), tl.full([], 0x5EED, tl.int64)
        )  # fmt: skip
        rate_P = tl.load(rates + place_P, mask=place_P < usable, other=0.0)
        accepted = tl.min(tl.where(draw_P < rate_P, P, place_P))
    return accepted


@triton.jit
def is_read(
    law, place, forced_len, rates, drafts, cap, sequence, position_B,
    Q: tl.constexpr, LAWS: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Whether a row can say a token: where drafts stand whatever it says, only the one after these can."""
    usable = num_usable(drafts, cap, sequence, Q - 1)
    reads = (law >= 0) & (place <= usable)
    if LAWS:
        if (law == FORCE) | (law == SYNTHETIC):
            position = tl.load(position_B + sequence)
            reads = place == made_up(law, forced_len, rates, sequence, position, usable, P)
    return reads


@triton.jit
def is_kept(x_N, token_N, bound_R, last_R, row, BOUNDED: tl.constexpr):
    """Whether a row's bounds leave these tokens."""
    kept_N = x_N > float("-inf")
    if BOUNDED:
        bound, last = tl.load(bound_R + row), tl.load(last_R + row)
        kept_N = kept_N & ((x_N > bound) | ((x_N == bound) & (token_N <= last)))
    return kept_N


@triton.jit(
    do_not_specialize=["edited", "edited_row", "rates", "forced_len", "maxima", "num_chunks", "span", "may_skip"]
)
def scan_kernel(  # noqa: C901
    logits, row_stride, edited, edited_row, drafts, cap, law_B, temperature_B, seed_B, choice_B, position_B,
    top_k_B, top_p_B, min_p_B, rates, forced_len, values, ids, maxima, V, num_chunks, span, may_skip,
    HAS_K: tl.constexpr, HAS_P: tl.constexpr, HAS_MIN: tl.constexpr, Q: tl.constexpr, LAWS: tl.constexpr,
    EDITED: tl.constexpr, PAIRS: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    G: tl.constexpr, QUICK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """What each chunk of a row is worth; see the module."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()  # which wait for all of this before they look at what it leaves
    row, chunk = tl.program_id(0), tl.program_id(1) * span
    sequence, place = row // Q, row % Q
    base = row.to(tl.int64) * row_stride
    stop = tl.minimum(chunk + span, num_chunks)
    limit = tl.minimum(V, stop * N)
    law = 0
    if not EDITED:
        # Under way before anything is known of the row: to wait for that first would cost as much time again. But where
        # FORCE or SYNTHETIC may decide, most of their rows are not read: there the law comes first.
        first_limit = limit
        if LAWS:
            if may_skip > 0:
                law = tl.load(law_B + sequence)
                first_limit = tl.where((law == FORCE) | (law == SYNTHETIC), 0, limit)
        raw_XT = raw_chunk(logits, base, chunk * N, first_limit, PAIRS, N)
    temperature = tl.load(temperature_B + sequence).to(tl.float32)
    seed, choice = tl.load(seed_B + sequence), tl.load(choice_B + sequence)
    position = tl.load(position_B + sequence) + place
    source = -1
    if EDITED:
        source = tl.load(edited_row + row)
    top_k, _, _, is_cut = cuts_of(top_k_B, top_p_B, min_p_B, sequence, V, HAS_K, HAS_P, HAS_MIN)
    if LAWS:
        law = tl.load(law_B + sequence)
    if not is_read(law, place, forced_len, rates, drafts, cap, sequence, position_B, Q, LAWS, P):
        return
    if EDITED:
        raw_XT = 0  # whatever: each chunk is loaded when it is looked at
    elif LAWS:
        if first_limit < limit:
            raw_XT = raw_chunk(logits, base, chunk * N, limit, PAIRS, N)
    is_greedy = temperature <= 0.0
    by_chance = (law == REJECT) | (law == BLOCK)
    scale = 1.4426950408889634 / tl.maximum(temperature, 1e-30)
    if not PAIRS:
        # Of the k likeliest, few as they are, the bounds hold the race.
        look(
            logits, row, base, edited, source, chunk, stop, limit, V, num_chunks, raw_XT, is_greedy, is_cut,
            by_chance | is_cut, scale, (not by_chance) & (top_k <= 0), seed, choice, position, values, ids, maxima,
            EDITED, HAS_K or HAS_P or HAS_MIN, True, False, N, G, QUICK,
        )  # fmt: skip
    elif is_greedy | by_chance:
        look(
            logits, row, base, edited, source, chunk, stop, limit, V, num_chunks, raw_XT, is_greedy, False, by_chance,
            scale, False, seed, choice, position, values, ids, maxima, False, False, False, True, N, G, QUICK,
        )  # fmt: skip
    else:
        race_pairs(
            logits, row, base, chunk, stop, limit, num_chunks, raw_XT, scale, seed, choice, position, values, ids, N,
            QUICK,
        )  # fmt: skip


@triton.jit
def row_best(values, row, num_chunks, M: tl.constexpr):
    """A row's largest logit, and each chunk's."""
    chunk_M = tl.arange(0, M)
    best_M = tl.load(values + 2 * (row * num_chunks + chunk_M), mask=chunk_M < num_chunks, other=float("-inf"))
    return tl.max(best_M), best_M


@triton.jit
def masses(values, row, num_chunks, temperature, M: tl.constexpr):
    """A row's largest logit, and the sums of exponentials of its chunks, counted from it, float64."""
    chunk_M = tl.arange(0, M)
    best, best_M = row_best(values, row, num_chunks, M)
    sum_M = tl.load(values + 2 * (row * num_chunks + chunk_M) + 1, mask=best_M > float("-inf"), other=0.0)
    shift_M = tl.where(best_M > float("-inf"), (best_M - tl.maximum(best, -3.0e38)) / temperature, 0.0)
    return best, sum_M.to(tl.float64) * tl.exp(shift_M.to(tl.float64))


@triton.jit
def raced(
    logits, base, edited, source, row, token_N, best, temperature, seed, choice, position, bound_R, last_R, V,
    EDITED: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """The scores of tokens, as the reference has them; -inf of those that a cut leaves out. `best` is finite."""
    x_N = row_tokens(logits, base, edited, source, token_N, V, EDITED)
    kept_N = is_kept(x_N, token_N, bound_R, last_R, row, BOUNDED) & (token_N < V)
    noise_N = gumbel(token_N, position, choice, tl.full([], 0, tl.int32), seed)
    scaled_N = tl.div_rn(x_N - best, tl.zeros_like(x_N) + tl.maximum(temperature, 1e-30))
    return tl.where(kept_N, scaled_N + noise_N, float("-inf"))


@triton.jit
def _race_again(
    logits, base, edited, source, row, token_N, best, temperature, seed, choice, position, bound_R, last_R, V, most,
    found,
    EDITED: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """The best of some tokens and one that was found elsewhere."""
    score_N = raced(
        logits, base, edited, source, row, token_N, best, temperature, seed, choice, position, bound_R, last_R, V,
        EDITED, BOUNDED,
    )  # fmt: skip
    top = tl.max(score_N)
    token = tl.min(tl.where(score_N == top, token_N, V))
    found = tl.where(top > most, token, tl.where(top == most, tl.minimum(found, token), found))
    return tl.maximum(most, top), found


@triton.jit
def choose(
    logits, row_stride, edited, edited_row, sequence, seed, choice, position, bound_R, last_R, values, ids,
    temperature, first, usable, V, num_chunks,
    Q: tl.constexpr, EDITED: tl.constexpr, BOUNDED: tl.constexpr, M: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The target's own token of a sequence's rows from `first` to `usable`, int32 [P], P being Q or more."""
    WORDS: tl.constexpr = 32 if N >= 32 else N
    place_P, place_P1 = tl.arange(0, P), tl.arange(0, P)[:, None]
    row_P1 = sequence * Q + tl.minimum(place_P1, Q - 1)
    is_read_P1 = (place_P1 >= first) & (place_P1 <= usable)
    chunk_1M = tl.arange(0, M)[None, :]
    out_PM = row_P1 * num_chunks + chunk_1M
    is_there_PM = is_read_P1 & (chunk_1M < num_chunks)
    best_PM = tl.load(values + 2 * out_PM, mask=is_there_PM, other=float("-inf"))
    best_P1 = tl.max(best_PM, axis=1)[:, None]
    found_P = tl.max((row_P1 * 0).to(tl.int32), axis=1)
    if temperature <= 0.0:
        id_PM = tl.load(ids + out_PM * WORDS, mask=is_there_PM, other=V - 1)
        found_P = tl.min(tl.where(best_PM == best_P1, id_PM, V - 1), axis=1)
    else:
        best_P1 = tl.maximum(best_P1, -3.0e38)
        token_PX, rest_PMW = nominated(ids, row_P1, is_read_P1, num_chunks, M, P, N)
        source_P1 = row_P1 * 0 - 1
        if EDITED:
            source_P1 = tl.load(edited_row + row_P1)
        score_PX = raced(
            logits, row_P1.to(tl.int64) * row_stride, edited, source_P1, row_P1, token_PX, best_P1, temperature, seed,
            choice, position + place_P1, bound_R, last_R, V, EDITED, BOUNDED,
        )  # fmt: skip
        most_P = tl.max(score_PX, axis=1)
        found_P = tl.min(tl.where((score_PX == most_P[:, None]) & (token_PX < V), token_PX, V - 1), axis=1)
        found_P = tl.where(tl.max(best_PM, axis=1) > float("-inf"), found_P, 0)
        # Groups of blocks among which others might do as well.
        W: tl.constexpr = rest_PMW.shape[2]
        rest_PMW = from_row(rest_PMW, best_PM, best_P1, temperature)
        at_PMW = (place_P1[:, :, None] * M + chunk_1M[:, :, None]) * W + tl.arange(0, W)[None, None, :]
        open_PMW = (rest_PMW > float("-inf")) & (rest_PMW >= least_reach(most_P)[:, None, None])
        at = tl.min(tl.where(open_PMW, at_PMW, P * M * W))
        while at < P * M * W:
            place = at // W // M
            row = sequence * Q + place
            source = -1
            if EDITED:
                source = tl.load(edited_row + row)
            most, found = _race_again(
                logits, row.to(tl.int64) * row_stride, edited, source, row, tokens_of_group(at // W % M, at % W, N),
                tl.max(tl.where(place_P1 == place, best_P1, float("-inf"))), temperature, seed, choice,
                position + place, bound_R, last_R, V, tl.max(tl.where(place_P == place, most_P, float("-inf"))),
                tl.max(tl.where(place_P == place, found_P, 0)), EDITED, BOUNDED,
            )  # fmt: skip
            most_P = tl.where(place_P == place, most, most_P)
            found_P = tl.where(place_P == place, found, found_P)
            open_PMW = open_PMW & (at_PMW != at) & (rest_PMW >= least_reach(most_P)[:, None, None])
            at = tl.min(tl.where(open_PMW, at_PMW, P * M * W))
    return found_P


# What the launches that follow the scan take first.
TYPES = {
    "row_stride": "i32", "edited": "*fp32", "edited_row": "*i32", "drafts": "*i64", "cap": "*i64", "law_B": "*i32",
    "temperature_B": "*fp64", "seed_B": "*i64", "choice_B": "*i64", "position_B": "*i64", "bound_R": "*fp32",
    "last_R": "*i32", "values": "*fp32", "ids": "*i32", "V": "i32", "num_chunks": "i32",
}  # fmt: skip
CUT_TYPES = {"top_k_B": "*i64", "top_p_B": "*fp64", "min_p_B": "*fp64", "rates": "*fp64", "forced_len": "i32"}
CUT_TYPES["maxima"] = "*fp32"
ALIGNED = ("logits", "row_stride", "V")


def variants() -> list[Variant]:
    """Those of vocabularies that are multiples of 16, as all that are served; the last without NVIDIA's own."""
    types = {name: kind for name, kind in TYPES.items() if name not in ("bound_R", "last_R")}
    found = []
    for dtype, num_rows, cut, quick, edited in (
        ("bf16", 4, True, True, False), ("bf16", 4, False, True, False), ("fp32", 2, True, True, False),
        ("bf16", 1, False, True, False), ("bf16", 1, True, False, False), ("bf16", 4, True, True, True),
    ):  # fmt: skip
        constants = {"Q": num_rows, "LAWS": num_rows > 1, "EDITED": edited, "N": CHUNK, "G": GROUP, "P": num_rows}
        constants |= {"HAS_K": cut, "HAS_P": cut, "HAS_MIN": edited, "QUICK": quick}
        constants |= {"PAIRS": not cut, "EARLY": quick}
        kind = f"{' cut' * cut}{' min-p edited' * edited}{'' if quick else ' portable'}"
        found.append(
            Variant(
                name=f"token_scan {dtype} Q={num_rows}{kind}",
                kernel=scan_kernel,
                types={"logits": f"*{dtype}", **types, **CUT_TYPES, "span": "i32", "may_skip": "i32"},
                constants=constants,
                aligned=ALIGNED,
                num_warps=SCAN_WARPS,
                max_registers=SCAN_REGISTERS[2 if dtype == "bf16" else 4],
                may_spill=True,  # a few numbers of a row with some compilers: a program less would cost more
                options={"maxnreg": SCAN_REGISTERS[2 if dtype == "bf16" else 4]},
                on_amd=not quick,
            )
        )
    return found
