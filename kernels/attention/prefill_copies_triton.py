# mypy: ignore-errors
"""The warp of `kernels.attention.prefill_warp_specialized_triton` that copies K and V, and which tiles a program does.

It refuses to know what is computed of them.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from baton.kernels.attention.row_tile_plan_triton import ENTRY_LEN
from baton.kernels.variant import Variant

_ENTRY_LEN = gl.constexpr(ENTRY_LEN)


@gluon.jit
def find_tile(starts, contexts, num_sequences, tile, G: gl.constexpr, BM: gl.constexpr):
    """The sequence that has this tile, its start, its rows, its keys, and the first row of the tile.

    By halves: of the sequences' first tiles, which grow, the last that is not above this one.
    """
    low = 0
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        start = gl.load(starts + middle).to(gl.int32)
        below = start * G // BM + middle <= tile
        low = gl.where(below, middle, low)
        high = gl.where(below, high, middle)
    start = gl.load(starts + low).to(gl.int32)
    query_len = gl.load(starts + low + 1).to(gl.int32) - start
    context_len = gl.load(contexts + low).to(gl.int32)
    return low, start, query_len, context_len, (tile - (start * G // BM + low)) * BM


@gluon.jit
def tile_of(round, num_tiles, H: gl.constexpr):
    """Which tile and head a program does in a round: large ones first, forth and back, so that all do as much."""
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    place = gl.where(round % 2 == 1, programs - 1 - place, place)
    index = round * programs + place
    return (num_tiles * H - 1 - index) // H, index % H, index < num_tiles * H


@gluon.jit
def _copy(source, rows, pieces, full, stage, D: gl.constexpr, BN: gl.constexpr, S: gl.constexpr):
    """The boxes of a tile of K or V, by TMA."""
    blocks: gl.constexpr = BN // S
    halves: gl.constexpr = D // 64
    mbarrier.expect(full.index(stage), BN * D * 2)
    for half in gl.static_range(halves):
        for b in gl.static_range(blocks):
            piece = pieces.index((stage * halves + half) * blocks + b)
            tma.async_copy_global_to_shared(source, [rows[b], half * 64], full.index(stage), piece)


@gluon.jit
def _load_end(
    value, rows, pieces, full, stage, first, context_len,
    D: gl.constexpr, BN: gl.constexpr, S: gl.constexpr, ROW: gl.constexpr,
):  # fmt: skip
    """The tile of V that reaches past the sequence's end, zero there.

    Its blocks are all asked for before one is waited for: one after another they would take up to ten microseconds.
    """
    blocks: gl.constexpr = BN // S
    halves: gl.constexpr = D // 64
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    slot_S = gl.arange(0, S, gl.SliceLayout(1, layout))
    column_C = gl.arange(0, 64, gl.SliceLayout(0, layout))
    at_SC = (slot_S * ROW)[:, None] + column_C[None, :]
    for b in gl.static_range(blocks):
        block_SC = value + rows[b].to(gl.int64) * ROW + at_SC
        is_there_SC = ((first + b * S + slot_S) < context_len)[:, None] & (column_C >= 0)[None, :]
        for half in gl.static_range(halves):
            piece = pieces.index((stage * halves + half) * blocks + b)
            async_copy.async_copy_global_to_shared(piece, block_SC + half * 64, mask=is_there_SC)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    mbarrier.arrive(full.index(stage), count=1)


@gluon.jit
def find_part(plan, starts):
    """Of a program's part: its sequence, its tiles, that sequence's start, rows and keys, and the first row here."""
    entry = plan + gl.program_id(1) * _ENTRY_LEN
    sequence = gl.load(entry)
    start = gl.load(starts + sequence).to(gl.int32)
    query_len = gl.load(starts + sequence + 1).to(gl.int32) - start
    low, end, context_len, first_row = gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 3), gl.load(entry + 4)
    return sequence, low, end, start, query_len, context_len, first_row


@gluon.jit
def _copy_tiles(
    keys, values, value, key_pieces, value_pieces, key_full, key_empty, value_full, value_empty,
    table, low, high, context_len, last_block, head, block_rows, head_rows, count,
    D: gl.constexpr, S: gl.constexpr, ROW: gl.constexpr, WORDS: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """K and V of tiles `high` - 1 down to `low`; how many were copied before and now."""
    blocks: gl.constexpr = BN // S
    for step in range(high - low):
        at = high - 1 - step
        stage = count % STAGES
        parity = ((count // STAGES) & 1) ^ 1
        rows = ()
        for b in gl.static_range(blocks):
            block = gl.load(table + gl.minimum(at * blocks + b, last_block) * WORDS)
            rows = rows + (block * block_rows + head * head_rows,)  # noqa: RUF005
        mbarrier.wait(key_empty.index(stage), parity)
        _copy(keys, rows, key_pieces, key_full, stage, D, BN, S)
        mbarrier.wait(value_empty.index(stage), parity)
        if (at + 1) * BN <= context_len:
            _copy(values, rows, value_pieces, value_full, stage, D, BN, S)
        else:
            _load_end(value, rows, value_pieces, value_full, stage, at * BN, context_len, D, BN, S, ROW)
        count += 1
    return count


@gluon.jit
def produce(
    keys, values, value, key_pieces, value_pieces, key_full, key_empty, value_full, value_empty,
    tables, starts, contexts, plan, num_sequences, num_tiles, num_rounds, table_stride, block_rows, head_rows,
    H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, S: gl.constexpr, ROW: gl.constexpr, WORDS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, PLANNED: gl.constexpr,
):  # fmt: skip
    """The warp that copies: K and V of every tile, from the last that a program's rows see down to the first."""
    count = 0
    if PLANNED:
        head = gl.program_id(0)
        sequence, low, end, _, query_len, context_len, first_row = find_part(plan, starts)
        if end > low:
            table = tables + sequence.to(gl.int64) * table_stride
            last = context_len - query_len + (gl.minimum(first_row + BM, query_len * G) - 1) // G
            count = _copy_tiles(
                keys, values, value, key_pieces, value_pieces, key_full, key_empty, value_full, value_empty,
                table, low, gl.minimum(end, last // BN + 1), context_len, last // S, head, block_rows, head_rows,
                count, D, S, ROW, WORDS, BN, STAGES,
            )  # fmt: skip
    else:
        for round in range(num_rounds):
            tile, head, exists = tile_of(round, num_tiles, H)
            if exists:
                sequence, _, query_len, context_len, first_row = find_tile(starts, contexts, num_sequences, tile, G, BM)
                if first_row < query_len * G:
                    table = tables + sequence.to(gl.int64) * table_stride
                    last = context_len - query_len + (gl.minimum(first_row + BM, query_len * G) - 1) // G
                    count = _copy_tiles(
                        keys, values, value, key_pieces, value_pieces, key_full, key_empty, value_full, value_empty,
                        table, 0, last // BN + 1, context_len, last // S, head, block_rows, head_rows,
                        count, D, S, ROW, WORDS, BN, STAGES,
                    )  # fmt: skip


def variants() -> list[Variant]:
    """None of its own: they are those of the launches."""
    return []
