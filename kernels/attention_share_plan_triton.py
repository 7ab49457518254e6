"""The Triton kernel that divides attention by work: shares of all sequences, about equally long, from their lengths.

See `attention_shares` for what a share is; it refuses to know what is done with one.

A plan is int32: for each share its sequence (-1: there is no such share), its first tile, the one after its last, and
the sequence's length; then the first share of each sequence, and their number.

Shapes: B sequences (as many as are looked at together), I shares (as many as are written together).
"""

import torch
import triton
import triton.language as tl

from baton.kernels.variant import Variant

ENTRY_LEN = 4  # numbers of a share
_SEARCHED = 256
_WRITTEN = 128

_ENTRY_LEN = tl.constexpr(ENTRY_LEN)


@triton.jit
def _lens(
    lens, starts, index_B, num_sequences, stride_b, stride_q, num_queries, max_context_len,
    VARLEN: tl.constexpr, SEARCHED: tl.constexpr,
):  # fmt: skip
    """Positions of each of these sequences; 0 of those that are none, or see nothing."""
    is_one_B = index_B < num_sequences
    if VARLEN:
        start_B = tl.load(starts + index_B, mask=is_one_B, other=0)
        end_B = tl.load(starts + index_B + 1, mask=is_one_B, other=0)
        len_B = tl.load(lens + index_B, mask=is_one_B & (end_B > start_B), other=0).to(tl.int64)
    else:
        len_B = tl.zeros([SEARCHED], tl.int64)
        for query in range(0, num_queries):
            at_B = index_B.to(tl.int64) * stride_b + query * stride_q
            len_B = tl.maximum(len_B, tl.load(lens + at_B, mask=is_one_B, other=-1).to(tl.int64) + 1)
    return tl.minimum(len_B, max_context_len).to(tl.int32)


@triton.jit(
    do_not_specialize=[
        "lens", "starts", "stride_b", "stride_q", "num_queries", "max_context_len", "num_shares", "num_entries",
    ]
)  # fmt: skip
def plan_kernel(
    lens, starts, plan, stride_b: tl.int32, stride_q: tl.int32, num_queries: tl.int32, max_context_len: tl.int32,
    num_shares: tl.int32, num_entries: tl.int32,
    TILE: tl.constexpr, VARLEN: tl.constexpr, SEARCHED: tl.constexpr, WRITTEN: tl.constexpr,
):  # fmt: skip
    """Grid (sequences,): each writes its own shares, having counted those before; the last, what is left of the plan.

    All count alike, in integers. A sequence of n tiles has n / each shares, rounded up, at least one: so all have at
    most num_shares and one more for every sequence, which is what `num_entries` is.
    """
    sequence = tl.program_id(0)
    num_sequences = tl.num_programs(0)
    total = 0
    for first in range(0, num_sequences, SEARCHED):
        index_B = first + tl.arange(0, SEARCHED)
        len_B = _lens(
            lens, starts, index_B, num_sequences, stride_b, stride_q, num_queries, max_context_len, VARLEN, SEARCHED
        )
        total += tl.sum(tl.cdiv(len_B, TILE))
    each = tl.maximum(tl.cdiv(total, num_shares), 1)
    before = 0
    length = 0
    for first in range(0, sequence + 1, SEARCHED):
        index_B = first + tl.arange(0, SEARCHED)
        len_B = _lens(
            lens, starts, index_B, num_sequences, stride_b, stride_q, num_queries, max_context_len, VARLEN, SEARCHED
        )
        count_B = tl.maximum(tl.cdiv(tl.cdiv(len_B, TILE), each), 1)
        before += tl.sum(tl.where(index_B < sequence, count_B, 0))
        length += tl.sum(tl.where(index_B == sequence, len_B, 0))
    num_tiles = tl.cdiv(length, TILE)
    count = tl.maximum(tl.cdiv(num_tiles, each), 1)
    for first in range(0, count, WRITTEN):
        index_I = first + tl.arange(0, WRITTEN)
        is_mine_I = index_I < count
        entry_I = plan + (before + index_I) * _ENTRY_LEN
        tl.store(entry_I, tl.zeros_like(index_I) + sequence, mask=is_mine_I)
        # Not one empty, for there are no more of them than tiles.
        tl.store(entry_I + 1, index_I * num_tiles // count, mask=is_mine_I)
        tl.store(entry_I + 2, (index_I + 1) * num_tiles // count, mask=is_mine_I)
        tl.store(entry_I + 3, tl.zeros_like(index_I) + length, mask=is_mine_I)
    begins = plan + num_entries * _ENTRY_LEN
    tl.store(begins + sequence, before)
    if sequence == num_sequences - 1:
        tl.store(begins + num_sequences, before + count)
        for first in range(before + count, num_entries, WRITTEN):
            index_I = first + tl.arange(0, WRITTEN)
            tl.store(plan + index_I * _ENTRY_LEN, tl.full([WRITTEN], -1, tl.int32), mask=index_I < num_entries)


def num_entries(num_shares: int, num_sequences: int) -> int:
    """Shares that there can be at most: a sequence may need one more than its part of what is wanted."""
    return num_shares + num_sequences


def launch_plan(
    lens: torch.Tensor, starts_E: torch.Tensor | None, *, tile: int, num_shares: int, max_context_len: int
) -> torch.Tensor:
    """A plan for these lengths: int32, on their device."""
    num_sequences = lens.shape[0]
    entries = num_entries(num_shares, num_sequences)
    plan = torch.empty(entries * ENTRY_LEN + num_sequences + 1, dtype=torch.int32, device=lens.device)
    varlen = starts_E is not None
    strides = (0, 0, 0) if varlen else (*lens.stride(), lens.shape[1])
    with torch.cuda.device_of(lens):
        plan_kernel[(num_sequences,)](
            lens, starts_E if varlen else lens, plan, *strides, max_context_len, num_shares, entries,
            TILE=tile, VARLEN=varlen, SEARCHED=_SEARCHED, WRITTEN=_WRITTEN, num_warps=4,
        )  # fmt: skip
    return plan


def variants() -> list[Variant]:
    """For steps, and for chunks."""
    integers = ("stride_b", "stride_q", "num_queries", "max_context_len", "num_shares", "num_entries")
    return [
        Variant(
            name=f"attention_shares plan{' chunks' if varlen else ''}",
            kernel=plan_kernel,
            types={"lens": "*i64", "starts": "*i64", "plan": "*i32", **dict.fromkeys(integers, "i32")},
            constants={"TILE": 64, "VARLEN": varlen, "SEARCHED": _SEARCHED, "WRITTEN": _WRITTEN},
            aligned=("plan",),
            num_warps=4,
            max_registers=128,
        )
        for varlen in (False, True)
    ]
