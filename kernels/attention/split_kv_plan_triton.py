# mypy: ignore-errors
"""The Triton kernel that divides attention by work: shares of all sequences, equally long, from their lengths.

See `attention_split_kv` for what a share and a piece are; it refuses to know what is done with one.

A plan is int32: the first piece of each share, and their number; for each piece its sequence, its first tile, the one
after its last, and the sequence's length; then the first piece of each sequence, and their number.

Shapes: B sequences (as many as are looked at together), I pieces (as many as are written together).
"""

import torch
import triton
import triton.language as tl

from baton.kernels.variant import Variant

PIECE_LEN = 4  # numbers of a piece
_SEARCHED = 256
_WRITTEN = 128

_PIECE_LEN = tl.constexpr(PIECE_LEN)


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
        "lens", "starts", "stride_b", "stride_q", "num_queries", "max_context_len", "num_shares", "most_pieces",
    ]
)  # fmt: skip
def plan_kernel(
    lens, starts, plan, stride_b: tl.int32, stride_q: tl.int32, num_queries: tl.int32, max_context_len: tl.int32,
    num_shares: tl.int32, most_pieces: tl.int32,
    TILE: tl.constexpr, VARLEN: tl.constexpr, SEARCHED: tl.constexpr, WRITTEN: tl.constexpr,
):  # fmt: skip
    """Grid (sequences,): each writes its own pieces, having counted those before; the last, where unused shares begin.

    All count alike, in integers. The tiles of all sequences lie one after the other; share s has those from s * each
    up to (s + 1) * each. So a piece begins at a multiple of `each` or with its sequence, and there are less of them
    than shares and sequences together.
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
    before = 0  # pieces of the sequences before
    place = 0  # of the sequence's first tile
    length = 0
    passed = 0
    for first in range(0, sequence + 1, SEARCHED):
        index_B = first + tl.arange(0, SEARCHED)
        len_B = _lens(
            lens, starts, index_B, num_sequences, stride_b, stride_q, num_queries, max_context_len, VARLEN, SEARCHED
        )
        tiles_B = tl.cdiv(len_B, TILE)
        end_B = passed + tl.cumsum(tiles_B, axis=0)
        count_B = tl.where(tiles_B > 0, (end_B - 1) // each - (end_B - tiles_B) // each + 1, 0)
        before += tl.sum(tl.where(index_B < sequence, count_B, 0))
        place += tl.sum(tl.where(index_B < sequence, tiles_B, 0))
        length += tl.sum(tl.where(index_B == sequence, len_B, 0))
        passed += tl.sum(tiles_B)
    num_tiles = tl.cdiv(length, TILE)
    share = place // each
    count = tl.where(num_tiles > 0, (place + num_tiles - 1) // each - share + 1, 0)
    pieces = plan + num_shares + 1
    for first in range(0, count, WRITTEN):
        index_I = first + tl.arange(0, WRITTEN)
        is_mine_I = index_I < count
        piece_I = pieces + (before + index_I) * _PIECE_LEN
        begin_I = (share + index_I) * each - place
        tl.store(piece_I, tl.zeros_like(index_I) + sequence, mask=is_mine_I)
        tl.store(piece_I + 1, tl.maximum(begin_I, 0), mask=is_mine_I)
        tl.store(piece_I + 2, tl.minimum(begin_I + each, num_tiles), mask=is_mine_I)
        tl.store(piece_I + 3, tl.zeros_like(index_I) + length, mask=is_mine_I)
        tl.store(plan + share + index_I, before + index_I, mask=is_mine_I & (begin_I >= 0))
    begins = pieces + most_pieces * _PIECE_LEN
    tl.store(begins + sequence, before)
    if sequence == num_sequences - 1:
        tl.store(begins + num_sequences, before + count)
        for first in range(tl.cdiv(total, each), num_shares + 1, WRITTEN):
            index_I = first + tl.arange(0, WRITTEN)
            tl.store(plan + index_I, tl.zeros_like(index_I) + before + count, mask=index_I <= num_shares)


def most_pieces(num_shares: int, num_sequences: int) -> int:
    """Pieces that there can be: one begins with each share, and with each sequence."""
    return num_shares + num_sequences


def begins_at(num_shares: int, num_sequences: int) -> int:
    """Where in a plan the sequences' first pieces stand."""
    return num_shares + 1 + most_pieces(num_shares, num_sequences) * PIECE_LEN


def launch_plan(
    lens: torch.Tensor, starts_E: torch.Tensor | None, *, tile: int, num_shares: int, max_context_len: int
) -> torch.Tensor:
    """A plan for these lengths: int32, on their device."""
    num_sequences = lens.shape[0]
    plan_len = begins_at(num_shares, num_sequences) + num_sequences + 1
    plan = torch.empty(plan_len, dtype=torch.int32, device=lens.device)
    varlen = starts_E is not None
    strides = (0, 0, 0) if varlen else (*lens.stride(), lens.shape[1])
    with torch.cuda.device_of(lens):
        plan_kernel[(num_sequences,)](
            lens, starts_E if varlen else lens, plan, *strides, max_context_len, num_shares,
            most_pieces(num_shares, num_sequences),
            TILE=tile, VARLEN=varlen, SEARCHED=_SEARCHED, WRITTEN=_WRITTEN, num_warps=4,
        )  # fmt: skip
    return plan


def variants() -> list[Variant]:
    """For steps, and for chunks."""
    integers = ("stride_b", "stride_q", "num_queries", "max_context_len", "num_shares", "most_pieces")
    return [
        Variant(
            name=f"attention_split_kv plan{' chunks' if varlen else ''}",
            kernel=plan_kernel,
            types={"lens": "*i64", "starts": "*i64", "plan": "*i32", **dict.fromkeys(integers, "i32")},
            constants={"TILE": 64, "VARLEN": varlen, "SEARCHED": _SEARCHED, "WRITTEN": _WRITTEN},
            aligned=("plan",),
            num_warps=4,
            max_registers=128,
        )
        for varlen in (False, True)
    ]
