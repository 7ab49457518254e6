"""The scan of rows of logits, and the target's own choice from what it leaves.

`scan_kernel`, one program for a chunk of a row, leaves a few numbers of each: the largest logit, its token, the sum of
exponentials, or the two blocks of four tokens that do best in the race of logits and noise. Noise is made there and
forgotten: what it nominates is raced again in `choose`, by the reference's arithmetic, so how the noise was
approximated shows in no token. Chunks are of one size whatever the batch, and sums over them have one order: a
sequence's tokens so depend on nothing but itself.

Shapes: N tokens of a chunk, X blocks of four of them, M chunks of a row, rounded up to a power of two.
"""

import torch
import triton
import triton.language as tl

from baton.kernels.noise_triton import gumbel, philox, quick_race
from baton.kernels.row_triton import num_usable, row_tokens
from baton.kernels.variant import Variant

CHUNK = 8192
SCAN_WARPS = 16

REJECT = tl.constexpr(1)  # `kernels.choice.Law`
BLOCK = tl.constexpr(2)
FORCE = tl.constexpr(3)
SYNTHETIC = tl.constexpr(4)
_INTERPRETED = bool(triton.knobs.runtime.interpret)


def is_quick() -> bool:
    """Whether kernels may use instructions that NVIDIA's GPUs have."""
    return not _INTERPRETED and torch.version.hip is None


@triton.jit
def is_kept(x_N, token_N, bound_R, last_R, row, BOUNDED: tl.constexpr):
    """Whether a row's bounds leave these tokens."""
    kept_N = x_N > float("-inf")
    if BOUNDED:
        bound, last = tl.load(bound_R + row), tl.load(last_R + row)
        kept_N = kept_N & ((x_N > bound) | ((x_N == bound) & (token_N <= last)))
    return kept_N


@triton.jit(do_not_specialize=["edited", "edited_row", "bound_R", "last_R", "num_chunks"])
def scan_kernel(
    logits, row_stride, edited, edited_row, drafts, cap, law_B, temperature_B, seed_B, choice_B, position_B,
    bound_R, last_R, values, ids, V, num_chunks,
    Q: tl.constexpr, LAWS: tl.constexpr, EDITED: tl.constexpr, BOUNDED: tl.constexpr, N: tl.constexpr,
    QUICK: tl.constexpr,
):  # fmt: skip
    """What each chunk of a row is worth; see the module."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    sequence, place = row // Q, row % Q
    law = 0
    if LAWS:
        law = tl.load(law_B + sequence)
    if (law < 0) | (place > num_usable(drafts, cap, sequence, Q - 1)):
        return
    temperature = tl.load(temperature_B + sequence).to(tl.float32)
    source = -1
    if EDITED:
        source = tl.load(edited_row + row)
    token_N = chunk * N + tl.arange(0, N)
    x_N = row_tokens(logits, row.to(tl.int64) * row_stride, edited, source, token_N, V, EDITED)
    out = row * num_chunks + chunk
    if temperature <= 0.0:
        best = tl.max(x_N)
        tl.store(values + 2 * out, best)
        tl.store(ids + 2 * out, tl.min(tl.where(x_N == best, token_N, V - 1)))
        return
    temperature = tl.maximum(temperature, 1e-30)
    if BOUNDED:
        x_N = tl.where(is_kept(x_N, token_N, bound_R, last_R, row, BOUNDED), x_N, float("-inf"))
    best = tl.max(x_N)
    tl.store(values + 2 * out, best)
    best = tl.maximum(best, -3.0e38)
    scale = 1.4426950408889634 / temperature
    if (law == REJECT) | (law == BLOCK):
        tl.store(values + 2 * out + 1, tl.sum(tl.exp2((x_N - best) * scale)))
        return
    even_XX, odd_XX = tl.split(tl.reshape(x_N, [N // 4, 2, 2]))
    x_0X, x_2X = tl.split(even_XX)
    x_1X, x_3X = tl.split(odd_XX)
    block_X = chunk * (N // 4) + tl.arange(0, N // 4)
    seed, choice = tl.load(seed_B + sequence), tl.load(choice_B + sequence)
    position = tl.load(position_B + sequence) + place
    word_0X, word_1X, word_2X, word_3X = philox(block_X, position, choice, tl.full([], 0, tl.int32), seed, QUICK)
    score_0X = (x_0X - best) * scale + quick_race(word_0X, QUICK)
    score_1X = (x_1X - best) * scale + quick_race(word_1X, QUICK)
    score_2X = (x_2X - best) * scale + quick_race(word_2X, QUICK)
    score_3X = (x_3X - best) * scale + quick_race(word_3X, QUICK)
    score_X = tl.maximum(tl.maximum(score_0X, score_1X), tl.maximum(score_2X, score_3X))
    first = tl.min(tl.where(score_X == tl.max(score_X), block_X, 0x3FFFFFFF))
    score_X = tl.where(block_X == first, float("-inf"), score_X)
    second = tl.min(tl.where(score_X == tl.max(score_X), block_X, 0x3FFFFFFF))
    tl.store(ids + 2 * out, first)
    tl.store(ids + 2 * out + 1, second)


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
    shift_M = tl.where(best_M > float("-inf"), (best_M - best) / temperature, 0.0)
    return best, sum_M.to(tl.float64) * tl.exp(shift_M.to(tl.float64))


@triton.jit
def choose(
    logits, base, edited, source, seed, choice, position, bound_R, last_R, values, ids, row, temperature, V, num_chunks,
    EDITED: tl.constexpr, BOUNDED: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """The target's own token of a row: the likeliest, or the winner of the race."""
    chunk_M = tl.arange(0, M)
    best, best_M = row_best(values, row, num_chunks, M)
    found = V - 1
    if temperature <= 0.0:
        id_M = tl.load(ids + 2 * (row * num_chunks + chunk_M), mask=chunk_M < num_chunks, other=V - 1)
        found = tl.min(tl.where(best_M == best, id_M, V - 1))
    else:
        place_X = tl.arange(0, 8 * M)
        chunk_X = place_X // 8
        at_X = ids + 2 * (row * num_chunks + chunk_X) + (place_X // 4) % 2
        block_X = tl.load(at_X, mask=chunk_X < num_chunks, other=0x3FFFFFF)
        token_X = tl.minimum(block_X, 0x1FFFFFFF) * 4 + place_X % 4
        x_X = row_tokens(logits, base, edited, source, token_X, V, EDITED)
        kept_X = is_kept(x_X, token_X, bound_R, last_R, row, BOUNDED) & (token_X < V)
        noise_X = gumbel(token_X, position, choice, tl.full([], 0, tl.int32), seed)
        score_X = tl.div_rn(x_X - best, tl.maximum(temperature, 1e-30)) + noise_X
        score_X = tl.where(kept_X, score_X, float("-inf"))
        found = tl.min(tl.where((score_X == tl.max(score_X)) & (token_X < V), token_X, V - 1))
    return found


TYPES = {
    "row_stride": "i32", "edited": "*fp32", "edited_row": "*i32", "drafts": "*i64", "cap": "*i64", "law_B": "*i32",
    "temperature_B": "*fp64", "seed_B": "*i64", "choice_B": "*i64", "position_B": "*i64", "bound_R": "*fp32",
    "last_R": "*i32", "values": "*fp32", "ids": "*i32", "V": "i32", "num_chunks": "i32",
}  # fmt: skip
ALIGNED = ("logits", "row_stride", "V")


def variants() -> list[Variant]:
    """Those of vocabularies that are multiples of 16, as all that are served; the last without NVIDIA's own."""
    found = []
    for dtype, num_rows, bounded, quick in (
        ("bf16", 4, True, True), ("bf16", 4, False, True), ("fp32", 2, True, True), ("fp32", 1, True, True),
        ("bf16", 1, True, False),
    ):  # fmt: skip
        constants = {"Q": num_rows, "LAWS": num_rows > 1, "EDITED": False, "BOUNDED": bounded, "N": CHUNK}
        found.append(
            Variant(
                name=f"token_scan {dtype} Q={num_rows}{' bounded' if bounded else ''}{'' if quick else ' portable'}",
                kernel=scan_kernel,
                types={"logits": f"*{dtype}", **TYPES},
                constants={**constants, "QUICK": quick},
                aligned=ALIGNED,
                num_warps=SCAN_WARPS,
                max_registers=128,
                on_amd=not quick,
            )
        )
    return found
