# mypy: ignore-errors
"""The Triton kernel of `kernels.attention.ordered`: one order of sums for prompts and for decode steps.

A program takes 64 rows of one KV head (queries times heads of its group) of one sequence. Positions are cut into parts
of 512 from position 0 on, parts into tiles of 64; a part's tiles are added by an online softmax, and parts are added by
position. Either a program walks over all parts and adds them as it goes, or each part has a program of its own and a
second launch adds them: by the same function, so with the same bits. A tile or a part of which a row sees nothing
changes nothing of that row, not by a bit, so a row's result follows from that row and the keys that it sees.

That holds as long as both ways are compiled to the same arithmetic. Tiles, warps and sides of the matmuls are
constants of the head size, so that the instructions are the same; matmuls and sums are not fused (`FIXED`), and
quotients are rounded correctly, so that no compiler has a choice.

Positions past the last that a program's rows see are read at that place instead: nothing beyond is touched.

Shapes: R rows of a program, T positions of a tile, D head size.
"""

# mypy: ignore-errors

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from baton.kernels.attention.block_tables import in_words
from baton.kernels.variant import Variant

ROWS = 64  # of a program: one instruction's rows
TILE = 64  # positions
PART_LEN = 512
FIXED = {"enable_fp_fusion": False}  # of every launch: what is said is what is computed
_MANY_PROGRAMS = 1024  # from which on programs that take whole sequences fill a GPU evenly
MAX_PARTS_BYTES = 64 << 20  # of the sums of parts that are kept at once; more sequences take several turns
_AT_ONCE = 8  # parts that the second launch loads before it adds them

_ROWS = tl.constexpr(ROWS)
_TILE = tl.constexpr(TILE)
_PART_LEN = tl.constexpr(PART_LEN)
_LOG2_E = tl.constexpr(1.4426950408889634)
_SEARCHED = tl.constexpr(256)  # sequences that are looked at together
_NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def _add_part(most_R, total_R, mixed_RD, part_most_R, part_total_R, part_RD):
    """Sums with those of one more part, which comes after them; maxima are of base 2."""
    new_R = tl.maximum(most_R, part_most_R)
    base_R = tl.where(new_R == _NOTHING, 0.0, new_R)
    fade_R = tl.exp2(most_R - base_R)
    gain_R = tl.exp2(part_most_R - base_R)
    total_R = total_R * fade_R + part_total_R * gain_R
    return new_R, total_R, mixed_RD * fade_R[:, None] + part_RD * gain_R[:, None]


@triton.jit
def _quotient(mixed_RD, total_R):
    """What is stored; 0 for a row that saw nothing."""
    total_R1 = tl.where(total_R > 0, total_R, 1.0)[:, None]
    return tl.div_rn(mixed_RD, tl.broadcast_to(total_R1, mixed_RD.shape))


@triton.jit
def _attend_part(
    query_RD, position_R, keys, values, table, block_stride, part, last, factor,
    S: tl.constexpr, D: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Maxima, sums of weights and sums of values of one part of the positions up to `last`."""
    kind = query_RD.dtype
    index_T = tl.arange(0, _TILE)
    most_R = tl.full([_ROWS], _NOTHING, tl.float32)
    total_R = tl.zeros([_ROWS], tl.float32)
    mixed_RD = tl.zeros([_ROWS, D], tl.float32)
    end = tl.minimum((part + 1) * (_PART_LEN // _TILE), last // _TILE + 1)
    for tile in tl.range(part * (_PART_LEN // _TILE), end):
        seen_T = tile * _TILE + index_T
        read_T = tl.minimum(seen_T, last)
        at_T = tl.load(table + read_T // S * WORDS).to(tl.int64) * block_stride + (read_T % S) * D
        at_TD = at_T[:, None] + tl.arange(0, D)[None, :]
        score_RT = tl.dot(query_RD, tl.load(keys + at_TD).T) * factor
        score_RT = tl.where(seen_T[None, :] <= position_R[:, None], score_RT, _NOTHING)
        new_R = tl.maximum(most_R, tl.max(score_RT, axis=1))
        base_R = tl.where(new_R == _NOTHING, 0.0, new_R)
        weight_RT = tl.exp2(score_RT - base_R[:, None])
        fade_R = tl.exp2(most_R - base_R)
        total_R = total_R * fade_R + tl.sum(weight_RT, axis=1)
        mixed_RD = tl.dot(weight_RT.to(kind), tl.load(values + at_TD), mixed_RD * fade_R[:, None])
        most_R = new_R
    return most_R, total_R, mixed_RD


@triton.jit
def _find_tile(starts, num_sequences, tile, G: tl.constexpr):
    """The sequence that has this tile of rows of the launch, its first token, and the first row of the tile."""
    sequence = -1
    for first in range(0, num_sequences, _SEARCHED):
        index_B = first + tl.arange(0, _SEARCHED)
        start_B = tl.load(starts + index_B, mask=index_B < num_sequences, other=0).to(tl.int32)
        begins_B = (start_B * G // _ROWS + index_B <= tile) & (index_B < num_sequences)
        sequence += tl.sum(begins_B.to(tl.int32))
    start = tl.load(starts + sequence).to(tl.int32)
    return sequence, start, (tile - (start * G // _ROWS + sequence)) * _ROWS


@triton.jit(
    do_not_specialize=[
        "tables", "places", "contexts", "table_stride", "position_stride_b", "position_stride_q", "number", "max_len",
        "scale",
    ]
)  # fmt: skip
def _attend_kernel(
    query, keys, values, tables, places, contexts, output, parts, sums,
    query_stride_b, query_stride_q, query_stride_a, block_stride, head_stride,
    table_stride: tl.int32, position_stride_b: tl.int32, position_stride_q: tl.int32, number: tl.int32,
    max_len: tl.int32, scale: tl.float32,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, S: tl.constexpr, WORDS: tl.constexpr, DECODE: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:  # fmt: skip
    """A tile of rows of one KV head, and one part of its positions or all; of an entry of `tables` the low word counts.

    In a decode step `places` are positions [B, Q] and `number` is Q; the grid is (heads x tiles of rows, parts, B).
    Else they are the chunks' starts, `contexts` their contexts' lengths and `number` is B; the grid is a bound that the
    host knows, and later tiles, which see more, come first.
    """
    head = tl.program_id(0) % H
    tile = tl.program_id(0) // H
    if DECODE:
        sequence, start, first_row, query_len = tl.program_id(2), 0, tile * _ROWS, number
    else:
        tile = tl.num_programs(0) // H - 1 - tile
        sequence, start, first_row = _find_tile(places, number, tile, G)
        query_len = tl.load(places + sequence + 1).to(tl.int32) - start
        if first_row >= query_len * G:
            return
    row_R = first_row + tl.arange(0, _ROWS)
    is_row_R = row_R < query_len * G
    if DECODE:
        at_R = sequence.to(tl.int64) * position_stride_b + row_R // G * position_stride_q
        position_R = tl.load(places + at_R, mask=is_row_R, other=-1).to(tl.int32)
        position_R = tl.minimum(position_R, max_len - 1)
        token_R = row_R // G
    else:
        first_position = tl.load(contexts + sequence).to(tl.int32) - query_len
        position_R = tl.where(is_row_R, first_position + row_R // G, -1)
        token_R = start + row_R // G
    last = tl.max(position_R, axis=0)
    num_parts = (last + _PART_LEN) // _PART_LEN  # 0 if there is no position
    part = tl.program_id(1)
    if SPLIT:
        if part >= num_parts:
            return
    head_R = head * G + row_R % G
    query += (sequence.to(tl.int64) if DECODE else 0) * query_stride_b
    at_R = token_R.to(tl.int64) * query_stride_q + head_R * query_stride_a
    at_RD = at_R[:, None] + tl.arange(0, D)[None, :]
    query_RD = tl.load(query + at_RD, mask=is_row_R[:, None], other=0.0)
    keys += head.to(tl.int64) * head_stride
    values += head.to(tl.int64) * head_stride
    table = tables + sequence.to(tl.int64) * table_stride
    factor = scale * _LOG2_E
    if SPLIT:
        most_R, total_R, mixed_RD = _attend_part(
            query_RD, position_R, keys, values, table, block_stride, part, last, factor, S, D, WORDS
        )
    else:
        most_R = tl.full([_ROWS], _NOTHING, tl.float32)
        total_R = tl.zeros([_ROWS], tl.float32)
        mixed_RD = tl.zeros([_ROWS, D], tl.float32)
        for each in tl.range(0, num_parts):
            part_most_R, part_total_R, part_RD = _attend_part(
                query_RD, position_R, keys, values, table, block_stride, each, last, factor, S, D, WORDS
            )
            most_R, total_R, mixed_RD = _add_part(most_R, total_R, mixed_RD, part_most_R, part_total_R, part_RD)
    # Places again, for registers are short: what they follow from need not be kept while tiles are read. The compiler
    # does not know that there are never fewer parts than none.
    row_R = first_row + tl.arange(0, _ROWS) + tl.minimum(num_parts, 0)
    if not DECODE:
        start = tl.load(places + sequence).to(tl.int32)
        query_len = tl.load(places + sequence + 1).to(tl.int32) - start
    is_row_R = row_R < query_len * G
    first_token = sequence * query_len if DECODE else start
    row_R = (first_token + row_R // G) * (H * G) + head * G + row_R % G
    if SPLIT:
        part_R = row_R.to(tl.int64) * tl.cdiv(max_len, _PART_LEN) + part
        tl.store(parts + part_R[:, None] * D + tl.arange(0, D)[None, :], mixed_RD, mask=is_row_R[:, None])
        tl.store(sums + part_R * 2, most_R, mask=is_row_R)
        tl.store(sums + part_R * 2 + 1, total_R, mask=is_row_R)
    else:
        at_RD = row_R.to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
        tl.store(output + at_RD, _quotient(mixed_RD, total_R).to(output.dtype.element_ty), mask=is_row_R[:, None])


@triton.jit(do_not_specialize=["positions", "position_stride_b", "position_stride_q", "num_queries", "max_len"])
def _add_kernel(
    parts, sums, positions, output, position_stride_b: tl.int32, position_stride_q: tl.int32, num_queries: tl.int32,
    max_len: tl.int32, A: tl.constexpr, D: tl.constexpr, AT_ONCE: tl.constexpr,
) -> None:  # fmt: skip
    """The parts of one row, as far as it sees any; those beyond were perhaps not written."""
    row = tl.program_id(0).to(tl.int64)
    token = row // A
    at = token // num_queries * position_stride_b + token % num_queries * position_stride_q
    position = tl.minimum(tl.load(positions + at).to(tl.int32), max_len - 1)
    num_parts = (position + _PART_LEN) // _PART_LEN
    first_part = row * tl.cdiv(max_len, _PART_LEN)
    parts += first_part * D
    sums += first_part * 2
    column_1D = tl.arange(0, D)[None, :]
    one = tl.arange(0, 1)
    most_1 = tl.full([1], _NOTHING, tl.float32)
    total_1 = tl.zeros([1], tl.float32)
    mixed_1D = tl.zeros([1, D], tl.float32)
    for first in range(0, num_parts, AT_ONCE):
        for step in tl.static_range(AT_ONCE):
            part_1 = first + step + one
            is_part_1 = part_1 < num_parts
            part_most_1 = tl.load(sums + part_1 * 2, mask=is_part_1, other=_NOTHING)
            part_total_1 = tl.load(sums + part_1 * 2 + 1, mask=is_part_1, other=0.0)
            part_1D = tl.load(parts + part_1[:, None] * D + column_1D, mask=is_part_1[:, None], other=0.0)
            most_1, total_1, mixed_1D = _add_part(most_1, total_1, mixed_1D, part_most_1, part_total_1, part_1D)
    tl.store(output + row * D + column_1D, _quotient(mixed_1D, total_1).to(output.dtype.element_ty))


def launch_prefill(
    query_TAD: torch.Tensor,
    key_NHSD: torch.Tensor,
    value_NHSD: torch.Tensor,
    block_tables_BM: torch.Tensor,
    query_starts_E: torch.Tensor,
    context_lens_B: torch.Tensor,
    output_TAD: torch.Tensor,
    scale: float,
) -> None:
    """Write the output's rows, contiguous; all arguments were checked."""
    num_tokens, num_heads, head_dim = query_TAD.shape
    num_kv_heads = key_NHSD.shape[1]
    num_sequences = block_tables_BM.shape[0]
    num_tiles = num_tokens * (num_heads // num_kv_heads) // ROWS + num_sequences
    tables = in_words(block_tables_BM)
    with torch.cuda.device_of(query_TAD):
        _attend_kernel[(num_tiles * num_kv_heads,)](
            query_TAD, key_NHSD, value_NHSD, tables, query_starts_E, context_lens_B, output_TAD,
            output_TAD, output_TAD,  # no parts
            0, query_TAD.stride(0), query_TAD.stride(1), *key_NHSD.stride()[:2],
            tables.stride(0), 0, 0, num_sequences, 0, scale,
            **_constants(num_heads, key_NHSD, block_tables_BM), DECODE=False, SPLIT=False,
            **options_of(head_dim), **FIXED,
        )  # fmt: skip


def launch_decode(
    query_BQAD: torch.Tensor,
    key_NHSD: torch.Tensor,
    value_NHSD: torch.Tensor,
    block_tables_BM: torch.Tensor,
    positions_BQ: torch.Tensor,
    max_context_len: int,
    output_BQAD: torch.Tensor,
    scale: float,
    is_split: bool | None = None,
) -> None:
    """The same for a decode step; whether parts have programs of their own is a matter of speed alone.

    What parts leave is kept until it is added: of so many sequences at once as `MAX_PARTS_BYTES` are enough for. A row
    depends on no other sequence, so turns change no bit.
    """
    num_sequences, num_queries, num_heads, head_dim = query_BQAD.shape
    num_kv_heads = key_NHSD.shape[1]
    num_tiles = triton.cdiv(num_queries * (num_heads // num_kv_heads), ROWS)
    num_parts = triton.cdiv(max_context_len, PART_LEN)
    if is_split is None:
        is_split = num_parts > 1 and num_tiles * num_kv_heads * num_sequences < _MANY_PROGRAMS
    if not is_split:
        _launch_decode(
            query_BQAD, key_NHSD, value_NHSD, block_tables_BM, positions_BQ, max_context_len, output_BQAD, scale, None
        )
        return
    rows_each = num_queries * num_heads * num_parts
    at_once = min(num_sequences, max(1, MAX_PARTS_BYTES // (4 * (head_dim + 2) * rows_each)))
    scratch = [
        torch.empty(at_once * rows_each, width, dtype=torch.float32, device=query_BQAD.device)
        for width in (head_dim, 2)
    ]
    for first in range(0, num_sequences, at_once):
        turn = slice(first, first + at_once)
        _launch_decode(
            query_BQAD[turn], key_NHSD, value_NHSD, block_tables_BM[turn], positions_BQ[turn], max_context_len,
            output_BQAD[turn], scale, (scratch[0], scratch[1]),
        )  # fmt: skip


def _launch_decode(
    query_BQAD: torch.Tensor,
    key_NHSD: torch.Tensor,
    value_NHSD: torch.Tensor,
    block_tables_BM: torch.Tensor,
    positions_BQ: torch.Tensor,
    max_context_len: int,
    output_BQAD: torch.Tensor,
    scale: float,
    scratch: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Of sequences at once; with room for the sums of parts, these have programs of their own."""
    num_sequences, num_queries, num_heads, head_dim = query_BQAD.shape
    num_kv_heads = key_NHSD.shape[1]
    num_tiles = triton.cdiv(num_queries * (num_heads // num_kv_heads), ROWS)
    num_parts = triton.cdiv(max_context_len, PART_LEN) if scratch else 1
    tables = in_words(block_tables_BM)
    parts, sums = scratch or (output_BQAD, output_BQAD)
    with torch.cuda.device_of(query_BQAD):
        _attend_kernel[(num_tiles * num_kv_heads, num_parts, num_sequences)](
            query_BQAD, key_NHSD, value_NHSD, tables, positions_BQ, positions_BQ, output_BQAD, parts, sums,
            *query_BQAD.stride()[:3], *key_NHSD.stride()[:2],
            tables.stride(0), *positions_BQ.stride(), num_queries, max_context_len, scale,
            **_constants(num_heads, key_NHSD, block_tables_BM), DECODE=True, SPLIT=scratch is not None,
            **options_of(head_dim), **FIXED,
        )  # fmt: skip
        if scratch:
            _add_kernel[(num_sequences * num_queries * num_heads,)](
                parts, sums, positions_BQ, output_BQAD, *positions_BQ.stride(), num_queries, max_context_len,
                A=num_heads, D=head_dim, AT_ONCE=_AT_ONCE, num_warps=_add_warps(head_dim), **FIXED,
            )  # fmt: skip


@functools.cache
def options_of(head_dim: int) -> dict[str, int]:
    """Warps and stages, by the head size alone: warps decide how the matmuls are cut into instructions."""
    return {"num_warps": 8, "num_stages": 2} if head_dim > 128 else {"num_warps": 4, "num_stages": 3}


def _constants(num_heads: int, key_NHSD: torch.Tensor, block_tables_BM: torch.Tensor) -> dict[str, int]:
    _, num_kv_heads, block_size, head_dim = key_NHSD.shape
    words = block_tables_BM.element_size() // 4
    return {"H": num_kv_heads, "G": num_heads // num_kv_heads, "D": head_dim, "S": block_size, "WORDS": words}


def _add_warps(head_dim: int) -> int:
    return max(1, head_dim // 128)


_SERVED = ((32, 8, 128), (16, 2, 256))


def _variant(num_heads: int, num_kv_heads: int, head_dim: int, *, decode: bool, split: bool) -> Variant:
    kind = ("split" if split else "whole") if decode else "prefill"
    sums = "*fp32" if split else "*bf16"
    types = {
        **dict.fromkeys(("query", "keys", "values", "output"), "*bf16"),
        **dict.fromkeys(("tables", "places", "contexts"), "*i64" if decode else "*i32"),
        **{"tables": "*i32", "parts": sums, "sums": sums, "scale": "fp32"},
    }
    strides = ("query_stride_b", "query_stride_q", "query_stride_a", "block_stride", "head_stride")
    integers = (*strides, "table_stride", "position_stride_b", "position_stride_q", "number", "max_len")
    options = options_of(head_dim)
    constants = {"H": num_kv_heads, "G": num_heads // num_kv_heads, "D": head_dim, "S": 16, "WORDS": 2}
    return Variant(
        name=f"attention_ordered {num_heads}/{num_kv_heads}/{head_dim} {kind}",
        kernel=_attend_kernel,
        types=types | dict.fromkeys(integers, "i32"),
        constants={**constants, "DECODE": decode, "SPLIT": split},
        aligned=("query", "keys", "values", "output", "parts", "sums", *strides),
        num_warps=options["num_warps"],
        num_stages=options["num_stages"],
        contains=("HGMMA", "LDGSTS"),
        lacks=("HMMA",),
        # Of both matmuls, the same for prompts and for decode steps; two halves of the warps share wide heads.
        shapes=("64x64x16", "64x128x16") if head_dim == 128 else ("64x32x16", "64x128x16"),
        options=FIXED,
    )


def variants() -> list[Variant]:
    """Both ways of a decode step, prompts' chunks, and the sum of parts."""
    found = [
        _variant(*heads, decode=decode, split=split)
        for heads in _SERVED
        for decode, split in ((False, False), (True, False), (True, True))
    ]
    added: dict[str, Any] = {
        "types": {
            **dict.fromkeys(("parts", "sums"), "*fp32"),
            **{"positions": "*i64", "output": "*bf16"},
            **dict.fromkeys(("position_stride_b", "position_stride_q", "num_queries", "max_len"), "i32"),
        },
        "aligned": ("parts", "sums", "output"),
        "max_registers": 128,
        "options": FIXED,
    }
    found += [
        Variant(
            name=f"attention_ordered add {num_heads}/{head_dim}",
            kernel=_add_kernel,
            constants={"A": num_heads, "D": head_dim, "AT_ONCE": _AT_ONCE},
            num_warps=_add_warps(head_dim),
            **added,
        )
        for num_heads, head_dim in ((32, 128),)
    ]
    return found
