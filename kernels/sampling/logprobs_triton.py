# mypy: ignore-errors
"""The launches of `kernels.sampling.logprobs`: chunks of rows, then rows.

Chunks leave the largest logit of each group of tokens. Groups have no token in common, so the K-th largest of these is
a bound that at least K tokens reach, and seldom many more: few groups are read again, and each listed token's rank is
counted among the others. Where too many tie for that, the best group gives its best token K times. Nothing is added up
in an order that depends on the batch, nor on how many chunks a program takes.

Shapes: N tokens of a chunk, G of a group, L groups of a row, M chunks of a row, rounded up to a power of two, H groups
that are read again, S listed tokens.
"""

import torch
import triton
import triton.language as tl

from baton.kernels.sampling.border_triton import groups_that_reach, lane_bound
from baton.kernels.sampling.noise_triton import quick_exp2
from baton.kernels.sampling.row_triton import blocks_of, of_order_key, order_key, raw_tokens, row_tokens
from baton.kernels.sampling.sample_triton import is_quick, span_of
from baton.kernels.variant import Variant

CHUNK = 4096
GROUP = 32
REREAD = 64
LISTED = 64
CHUNK_WARPS = 8
ROW_WARPS = 8
ROW_REGISTERS = 128  # so that two programs share a multiprocessor

_INTERPRETED = bool(triton.knobs.runtime.interpret)

_NOTHING = tl.constexpr(-(1 << 31))


def launch(logits_NV, token_ids_N, num_top, packed_NX) -> None:
    """Both launches."""
    num_rows, vocab_size = logits_NV.shape
    num_chunks, device = triton.cdiv(vocab_size, CHUNK), logits_NV.device
    sums = torch.empty(num_rows, num_chunks, 2, dtype=torch.float32, device=device)
    larger = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=device)
    maxima, groups, listed = sums, larger, larger
    if num_top:
        maxima = torch.empty(num_rows, num_chunks, CHUNK // GROUP, dtype=torch.float32, device=device)
        groups = torch.empty(num_rows, REREAD, dtype=torch.int32, device=device)
        listed = torch.empty(num_rows, LISTED, dtype=torch.int64, device=device)
    span = span_of(num_rows, num_chunks)
    _chunk_kernel[(num_rows, triton.cdiv(num_chunks, span))](
        logits_NV, logits_NV.stride(0), token_ids_N, sums, larger, maxima, vocab_size, num_chunks, span,
        N=CHUNK, G=GROUP, TOP=num_top > 0, QUICK=is_quick(), num_warps=CHUNK_WARPS,
    )  # fmt: skip
    _row_kernel[(num_rows,)](
        logits_NV, logits_NV.stride(0), token_ids_N, sums, larger, maxima, groups, listed, packed_NX, vocab_size,
        num_top, num_chunks, M=triton.next_power_of_2(num_chunks), N=CHUNK, G=GROUP,
        L=triton.next_power_of_2(num_chunks * (CHUNK // GROUP)), H=REREAD, S=LISTED, TOP=num_top > 0,
        num_warps=ROW_WARPS, **({} if _INTERPRETED or torch.version.hip else {"maxnreg": ROW_REGISTERS}),
    )  # fmt: skip


@triton.jit(do_not_specialize=["maxima", "num_chunks", "span"])
def _chunk_kernel(
    logits, row_stride, token_ids, sums, larger, maxima, V, num_chunks, span,
    N: tl.constexpr, G: tl.constexpr, TOP: tl.constexpr, QUICK: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0), tl.program_id(1) * span
    base = row.to(tl.int64) * row_stride
    stop = tl.minimum(chunk + span, num_chunks)
    limit = tl.minimum(V, stop * N)
    raw_X4 = raw_tokens(logits, base, blocks_of(chunk * N, N), limit)
    chosen = tl.load(logits + base + tl.load(token_ids + row)).to(tl.float32)
    while chunk < stop:
        x_X4 = raw_X4.to(tl.float32)
        # The next chunk is on its way while this one is looked at.
        raw_X4 = raw_tokens(logits, base, blocks_of((chunk + 1) * N, N), limit)
        best = tl.max(x_X4)
        at = row * num_chunks + chunk
        tl.store(sums + 2 * at, best)
        mass_X4 = quick_exp2((x_X4 - tl.maximum(best, -3.0e38)) * 1.4426950408889634, QUICK)
        tl.store(sums + 2 * at + 1, tl.sum(mass_X4))
        tl.store(larger + at, tl.sum((x_X4 > chosen).to(tl.int32)))
        if TOP:
            maximum_G = tl.max(tl.reshape(x_X4, [N // G, G]), axis=1)
            tl.store(maxima + at.to(tl.int64) * (N // G) + tl.arange(0, N // G), maximum_G)
        chunk += 1


@triton.jit
def _at_least_lowest(logprob):
    """A log-probability that is finite; float32's lowest where it would be less, or no number."""
    lowest = tl.full([], -3.4028234663852886e38, tl.float64)
    return tl.where(logprob > lowest, logprob, lowest)


@triton.jit
def _or_none(x_N):
    """The same numbers, and -inf for what is none: `max` passes over that, unless all are."""
    return tl.where(x_N == x_N, x_N, float("-inf"))


@triton.jit
def _store_token(packed, place, logit, token, num_top, whole, mask):
    """One of the likeliest, or several."""
    tl.store(packed + 1 + place, _at_least_lowest(logit.to(tl.float64) - whole), mask=mask)
    tl.store(packed + num_top + 2 + place, token.to(tl.float64), mask=mask)


@triton.jit
def _by_rank(
    logits, base, V, groups, num_hit, reach, listed, packed, num_top, whole,
    G: tl.constexpr, H: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Report the likeliest of the groups that reach a bound, if few tokens do; how many do."""
    hit_H = tl.arange(0, H)
    group_H = tl.load(groups + hit_H, mask=hit_H < num_hit, other=0x1FFFFFF)
    token_HG = group_H[:, None] * G + tl.arange(0, G)[None, :]
    x_HG = row_tokens(logits, base, logits, -1, token_HG, V, False)
    is_listed_T = tl.reshape(((x_HG >= reach) & (token_HG < V)).to(tl.int32), [H * G])
    count = tl.sum(is_listed_T)
    if count <= S:
        # The likelier first, among equals the lower id: as one whole number.
        key_HG = (order_key(x_HG).to(tl.int64) << 32) | (0x7FFFFFFF - token_HG).to(tl.int64)
        at_T = tl.cumsum(is_listed_T, axis=0) - 1
        tl.store(listed + at_T, tl.reshape(key_HG, [H * G]), mask=is_listed_T > 0)
        tl.debug_barrier()
        place_S = tl.arange(0, S)
        key_S = tl.load(listed + place_S, mask=place_S < count, other=-(1 << 63))
        rank_S = tl.sum((key_S[None, :] > key_S[:, None]).to(tl.int32), axis=1)
        is_top_S = (place_S < count) & (rank_S < num_top)
        logit_S = of_order_key((key_S >> 32).to(tl.int32))
        _store_token(packed, rank_S, logit_S, 0x7FFFFFFF - (key_S & 0x7FFFFFFF), num_top, whole, is_top_S)
    return count


@triton.jit
def _one_by_one(logits, base, V, key_L, group_L, packed, num_top, whole, G: tl.constexpr):
    """Report the likeliest: each the best of the best group, from which it is then missing."""
    last_L = group_L * 0 - 1  # of a group's tokens that are as likely as its next, the last that was reported
    for index in range(num_top):
        key = tl.max(key_L)
        group = tl.min(tl.where(key_L == key, group_L, 0x7FFFFFFF))
        last = tl.max(tl.where(group_L == group, last_L, -1))
        token_G = group * G + tl.arange(0, G)
        x_G = _or_none(row_tokens(logits, base, logits, -1, token_G, V, False))
        key_G = tl.where(token_G < V, order_key(x_G), _NOTHING)
        token = tl.min(tl.where((key_G == key) & (token_G > last), token_G, 0x7FFFFFFF))
        _store_token(packed, index, of_order_key(key), token, num_top, whole, True)
        is_left_G = (key_G < key) | ((key_G == key) & (token_G > token))
        rest = tl.max(tl.where(is_left_G, key_G, _NOTHING))
        last_L = tl.where(group_L == group, tl.where(rest == key, token, -1), last_L)
        key_L = tl.where(group_L == group, rest, key_L)


@triton.jit(do_not_specialize=["maxima", "groups", "listed", "num_top", "num_chunks"])
def _row_kernel(
    logits, row_stride, token_ids, sums, larger, maxima, groups, listed, packed, V, num_top, num_chunks,
    M: tl.constexpr, N: tl.constexpr, G: tl.constexpr, L: tl.constexpr, H: tl.constexpr, S: tl.constexpr,
    TOP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    base = row.to(tl.int64) * row_stride
    chunk_M = tl.arange(0, M)
    at_M = row * num_chunks + chunk_M
    best_M = tl.load(sums + 2 * at_M, mask=chunk_M < num_chunks, other=float("-inf")).to(tl.float64)
    sum_M = tl.load(sums + 2 * at_M + 1, mask=chunk_M < num_chunks, other=0.0).to(tl.float64)
    best = tl.max(best_M)
    whole = best + tl.log(tl.sum(tl.where(best_M > float("-inf"), sum_M * tl.exp(best_M - best), 0.0)))
    rank = 1 + tl.sum(tl.load(larger + at_M, mask=chunk_M < num_chunks, other=0))
    token = tl.load(token_ids + row)
    chosen = tl.load(logits + base + token).to(tl.float64)
    packed += row.to(tl.int64) * (2 * num_top + 3)
    tl.store(packed, _at_least_lowest(chosen - whole))
    tl.store(packed + num_top + 1, token.to(tl.float64))
    tl.store(packed + 2 * num_top + 2, rank.to(tl.float64))
    if TOP:
        group_L, num_groups = tl.arange(0, L), num_chunks * (N // G)
        maxima += row.to(tl.int64) * num_groups
        groups += row.to(tl.int64) * H
        maximum_L = _or_none(tl.load(maxima + group_L, mask=group_L < num_groups, other=float("-inf")))
        reach = lane_bound(maximum_L, num_top)
        num_hit = groups_that_reach(maxima, num_groups, reach, groups, H, 2048)
        count = S + 1
        if num_hit <= H:
            count = _by_rank(
                logits, base, V, groups, num_hit, reach, listed + row.to(tl.int64) * S, packed, num_top, whole, G, H, S
            )  # fmt: skip
        if (count > S) | (count < num_top):  # fewer only where so many are no number
            maximum_L = _or_none(tl.load(maxima + group_L, mask=group_L < num_groups, other=float("-inf")))
            key_L = tl.where(group_L * G < V, order_key(maximum_L), _NOTHING)
            _one_by_one(logits, base, V, key_L, group_L, packed, num_top, whole, G)


def variants() -> list[Variant]:
    """Of Qwen's vocabulary, with likeliest tokens and without."""
    names = {"row_stride": "i32", "token_ids": "*i64", "sums": "*fp32", "larger": "*i32", "maxima": "*fp32"}
    ints = {"V": "i32", "num_chunks": "i32"}
    found = []
    for dtype, top, quick in (("bf16", True, True), ("fp32", True, True), ("bf16", False, False)):
        found.append(
            Variant(
                name=f"logprobs_chunks {dtype}{'' if top else ' chosen alone, portable'}",
                kernel=_chunk_kernel,
                types={"logits": f"*{dtype}", **names, **ints, "span": "i32"},
                constants={"N": CHUNK, "G": GROUP, "TOP": top, "QUICK": quick},
                aligned=("logits", "row_stride", "V"),
                num_warps=CHUNK_WARPS,
                max_registers=64,
                on_amd=not quick,
            )
        )
    for dtype, top in (("bf16", True), ("fp32", True), ("bf16", False)):
        found.append(
            Variant(
                name=f"logprobs_rows {dtype}{'' if top else ' chosen alone'}",
                kernel=_row_kernel,
                types={
                    "logits": f"*{dtype}",
                    **names,
                    **ints,
                    "num_top": "i32",
                    "groups": "*i32",
                    "listed": "*i64",
                    "packed": "*fp64",
                },
                constants={"M": 64, "N": CHUNK, "G": GROUP, "L": 8192, "H": REREAD, "S": LISTED, "TOP": top},
                aligned=("logits", "row_stride", "V"),
                num_warps=ROW_WARPS,
                max_registers=ROW_REGISTERS,
                may_spill=True,  # a number or two, where they are found one by one
                options={"maxnreg": ROW_REGISTERS},
            )
        )
    return found
