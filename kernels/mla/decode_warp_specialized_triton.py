# mypy: ignore-errors
"""Attention of 64 rows of queries over latents: the device code of `kernels.mla.decode_hopper_triton`.

Two warpgroups take turns, and a warp copies. Tiles of positions go in pairs. The left warpgroup has the scores of a
pair's first tile and the left half of the output's columns, the right one the second tile's scores and the right half.
Each multiplies while the other weighs:

    left:   scores 0 | weigh 0 -> weights, maxima | weights 0 x left half of tile 0 | weights 1 x left half of tile 1
    right:  scores 1 | weights 0 x right half of tile 0, and beside it weigh 1 -> weights, maxima | weights 1 x ... 1

So half a tile is free for the next pair's as soon as one warpgroup has multiplied it, and each scores a tile's halves
in the order in which they arrive. Weights and maxima go through shared memory; who may write them next follows from
the copies: a tile's successor arrives only after both warpgroups are through with the tile and its weights.

Of the queries, the columns that a position turned stay in registers: their place in shared memory has weights.

Source of the order: the "seesaw" schedule of FlashMLA (DeepSeek, 2025), which differs in what crosses when.

It refuses to know options, launches and tensors. Shapes are as of `decode_hopper_triton`.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from baton.kernels.mla.decode_triton import STRIDE_UNIT
from baton.kernels.variant import Variant

_LOG2_E = gl.constexpr(1.4426950408889634)
_UNIT = gl.constexpr(STRIDE_UNIT)
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier

# Of a tile's barriers: those of its halves, and of the columns that a position turned.
_LEFT, _RIGHT, _TURNED = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)


@gluon.jit
def _barriers(COUNT: gl.constexpr):
    """So many barriers, each a memory of its own: the compiler would have a warpgroup meet between uses of one."""
    all = ()
    for _ in gl.static_range(COUNT):
        made = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(made, count=1)
        all = all + (made,)  # noqa: RUF005
    return all


@gluon.jit
def _pair(KIND: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """What each warpgroup has one of."""
    return gl.allocate_shared_memory(KIND, SHAPE, LAYOUT), gl.allocate_shared_memory(KIND, SHAPE, LAYOUT)


@gluon.jit
def _blocks_of(table, at, last_block, block_rows, S: gl.constexpr, WORDS: gl.constexpr, TILE: gl.constexpr):
    """Where the blocks of a tile begin, in rows of the pool."""
    blocks: gl.constexpr = TILE // S
    rows = ()
    for b in gl.static_range(blocks):
        block = gl.load(table + gl.minimum(at * blocks + b, last_block) * WORDS)
        rows = rows + (block * block_rows,)  # noqa: RUF005
    return rows


@gluon.jit
def _copy_half(
    box, pieces, full, empty, rows, parity, WHICH: gl.constexpr, HALF: gl.constexpr,
    S: gl.constexpr, TILE: gl.constexpr, C: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Half of the columns of a tile, in groups of panels, each with a barrier."""
    blocks: gl.constexpr = TILE // S
    panels: gl.constexpr = C // 64
    each: gl.constexpr = panels // 2 // GROUPS
    mbarrier.wait(empty[WHICH * 3 + HALF], parity)
    for group in gl.static_range(GROUPS):
        arrived = full[WHICH * (2 * GROUPS + 1) + HALF * GROUPS + group]
        mbarrier.expect(arrived, TILE * each * 64 * 2)
        for index in gl.static_range(each):
            for b in gl.static_range(blocks):
                piece = pieces.index((WHICH * panels + (HALF * GROUPS + group) * each + index) * blocks + b)
                column = ((HALF * GROUPS + group) * each + index) * 64
                tma.async_copy_global_to_shared(box, [rows[b], column], arrived, piece)


@gluon.jit
def _copy_turned(
    box, pieces, full, empty, rows, parity, WHICH: gl.constexpr,
    S: gl.constexpr, TILE: gl.constexpr, C: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    blocks: gl.constexpr = TILE // S
    mbarrier.wait(empty[WHICH * 3 + _TURNED], parity)
    arrived = full[WHICH * (2 * GROUPS + 1) + 2 * GROUPS]
    mbarrier.expect(arrived, TILE * 64 * 2)
    for b in gl.static_range(blocks):
        tma.async_copy_global_to_shared(box, [rows[b], C], arrived, pieces.index(WHICH * blocks + b))


@gluon.jit
def _produce(
    box, latent_pieces, turned_pieces, full, empty, table, first, end, last_block, block_rows,
    S: gl.constexpr, WORDS: gl.constexpr, TILE: gl.constexpr, C: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """The warp that copies: tiles [first, end) of a sequence, in the order in which their places become free."""
    rows_0 = _blocks_of(table, first, last_block, block_rows, S, WORDS, TILE)
    rows_1 = _blocks_of(table, first + 1, last_block, block_rows, S, WORDS, TILE)
    for pair in range((end - first + 1) // 2):
        at = first + pair * 2
        parity = (pair & 1) ^ 1
        _copy_turned(box, turned_pieces, full, empty, rows_0, parity, 0, S, TILE, C, GROUPS)
        if at + 1 < end:
            _copy_turned(box, turned_pieces, full, empty, rows_1, parity, 1, S, TILE, C, GROUPS)
        # Long before they are needed.
        next_0 = _blocks_of(table, at + 2, last_block, block_rows, S, WORDS, TILE)
        next_1 = _blocks_of(table, at + 3, last_block, block_rows, S, WORDS, TILE)
        _copy_half(box, latent_pieces, full, empty, rows_0, parity, 0, _LEFT, S, TILE, C, GROUPS)
        _copy_half(box, latent_pieces, full, empty, rows_0, parity, 0, _RIGHT, S, TILE, C, GROUPS)
        if at + 1 < end:
            _copy_half(box, latent_pieces, full, empty, rows_1, parity, 1, _RIGHT, S, TILE, C, GROUPS)
            _copy_half(box, latent_pieces, full, empty, rows_1, parity, 1, _LEFT, S, TILE, C, GROUPS)
        rows_0 = next_0
        rows_1 = next_1


@gluon.jit
def _clear(latent_panels, num_left, WHICH: gl.constexpr, TILE: gl.constexpr, C: gl.constexpr):
    """Make the rows of a tile past the first `num_left` zero."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    place_T = gl.arange(0, TILE, gl.SliceLayout(1, layout))
    panels: gl.constexpr = C // 64
    for panel in gl.static_range(panels):
        piece = latent_panels.index(WHICH * panels + panel)
        part_TE = piece.load(layout)
        piece.store(gl.where((place_T < num_left)[:, None], part_TE, gl.zeros_like(part_TE)))
    fence_async_shared()
    _barrier()


@gluon.jit
def _hidden_zero(of):
    """Zero, of which the compiler does not know: what follows from it is computed again in every step of a loop.

    Else descriptors of all operands, which are the same in every step, are kept in registers, of which there are few.
    """
    return gl.inline_asm_elementwise("and.b32 $0, $1, 0;", "=r,r", [of], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _score_group(
    queries, latent_groups, full, parity, zero, score_RT, WHICH: gl.constexpr, INDEX: gl.constexpr, GROUPS: gl.constexpr
):  # fmt: skip
    """Issue the matmuls of a group of columns; the half that arrives first is the first."""
    group: gl.constexpr = (INDEX + WHICH * GROUPS) % (2 * GROUPS)
    mbarrier.wait(full[WHICH * (2 * GROUPS + 1) + group], parity)
    latent_CT = latent_groups.index(zero + WHICH * 2 * GROUPS + group).permute((1, 0))
    return warpgroup_mma(queries.index(zero + group), latent_CT, score_RT, is_async=True)


@gluon.jit
def _score(
    queries, turned_RP, latent_groups, latent_panels, turned_tiles, full, empty, mixed_RH, at, parity,
    context_len, num_seen, position_R,
    WHICH: gl.constexpr, C: gl.constexpr, TILE: gl.constexpr, ROWS: gl.constexpr, GROUPS: gl.constexpr,
    BESIDE: gl.constexpr,
):  # fmt: skip
    """A tile's scores, -inf where a row does not see, and the sums: BESIDE the last matmul of a pair, or after it."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    tile: gl.constexpr = WHICH * (2 * GROUPS + 1)
    if (at + 1) * TILE > context_len:
        for group in gl.static_range(2 * GROUPS):
            mbarrier.wait(full[tile + group], parity)
        _clear(latent_panels, context_len - at * TILE, WHICH, TILE, C)
    zero = _hidden_zero(at)
    zero_RT = gl.zeros([ROWS, TILE], gl.float32, scores)
    mbarrier.wait(full[tile + 2 * GROUPS], parity)
    turned_PT = turned_tiles.index(WHICH).permute((1, 0))
    score_RT = warpgroup_mma(turned_RP, turned_PT, zero_RT, use_acc=False, is_async=True)
    if BESIDE:
        mixed_RH = warpgroup_mma_wait(1, deps=[mixed_RH])
        _barrier()
        mbarrier.arrive(empty[3 + _LEFT], count=1)
    for index in gl.static_range(2 * GROUPS):
        score_RT = _score_group(queries, latent_groups, full, parity, zero, score_RT, WHICH, index, GROUPS)
    score_RT = warpgroup_mma_wait(0, deps=[score_RT])
    _barrier()
    mbarrier.arrive(empty[WHICH * 3 + _TURNED], count=1)
    if (at + 1) * TILE > num_seen:
        place_T = at * TILE + gl.arange(0, TILE, gl.SliceLayout(0, scores))
        score_RT = gl.where(place_T[None, :] <= position_R[:, None], score_RT, float("-inf"))
    return score_RT, mixed_RH


@gluon.jit
def _base(most_R, factor):
    """What is subtracted from scores; a row that has seen nothing yet stays at zero."""
    return gl.where(most_R == float("-inf"), 0.0, most_R * factor)


@gluon.jit
def _weigh(
    score_RT, highest_R, weights, maxima, ready, most_R, total_R, factor,
    WHICH: gl.constexpr, TILE: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Weigh a tile for both warpgroups: its weights, by what sums before it fade, maxima and totals with it."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    new_R = gl.maximum(most_R, highest_R)
    base_R = _base(new_R, factor)
    weight_RT = gl.exp2(gl.fma(score_RT, gl.full([ROWS, TILE], factor, gl.float32, scores), -base_R[:, None]))
    short_RT = weight_RT.to(weights[0].dtype)
    weights[WHICH].store(short_RT)
    maxima[WHICH].store(new_R)
    fence_async_shared()
    _barrier()
    mbarrier.arrive(ready[WHICH], count=1)
    fade_R = gl.exp2(most_R * factor - base_R)
    return short_RT, fade_R, new_R, gl.fma(total_R, fade_R, gl.sum(weight_RT, axis=1))


@gluon.jit
def _fade(maxima_R, mixed_RH, most_R, total_R, factor, C: gl.constexpr, TILE: gl.constexpr):
    """Sums, maxima and totals behind a tile that the other warpgroup weighs."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C // 2, 16])
    new_R = maxima_R.load(gl.SliceLayout(1, scores))
    fade_R = gl.exp2(most_R * factor - _base(new_R, factor))
    total_R = total_R * fade_R
    mixed_RH = mixed_RH * gl.convert_layout(fade_R, gl.SliceLayout(1, acc_layout))[:, None]
    return mixed_RH, new_R, total_R


@gluon.jit
def _weigh_left(
    score_RT, latent_halves, weights, maxima, empty, ready, mixed_RH, most_R, total_R, factor,
    C: gl.constexpr, TILE: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Weigh a pair's first tile, and add its left half."""
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C // 2, 16])
    short_RT, fade_R, new_R, total_R = _weigh(
        score_RT, gl.max(score_RT, axis=1), weights, maxima, ready, most_R, total_R, factor, 0, TILE, ROWS
    )
    mixed_RH = mixed_RH * gl.convert_layout(fade_R, gl.SliceLayout(1, acc_layout))[:, None]
    own_RT = gl.convert_layout(short_RT, gl.DotOperandLayout(0, acc_layout, 2))
    mixed_RH = warpgroup_mma(own_RT, latent_halves.index(0), mixed_RH, is_async=True)
    mixed_RH = warpgroup_mma_wait(0, deps=[mixed_RH])
    _barrier()
    mbarrier.arrive(empty[_LEFT], count=1)
    return mixed_RH, new_R, total_R


@gluon.jit
def _mix_left(
    latent_halves, weights, maxima, full, ready, mixed_RH, most_R, total_R, parity, factor,
    C: gl.constexpr, TILE: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Begin to add the left half of a pair's second tile, which the other warpgroup weighs."""
    mbarrier.wait(ready[1], parity)
    mixed_RH, new_R, total_R = _fade(maxima[1], mixed_RH, most_R, total_R, factor, C, TILE)
    for group in gl.static_range(GROUPS):  # they have arrived: it sees what the copies wrote
        mbarrier.wait(full[2 * GROUPS + 1 + group], parity)
    mixed_RH = warpgroup_mma(weights[1], latent_halves.index(2), mixed_RH, is_async=True)
    return mixed_RH, new_R, total_R


@gluon.jit
def _walk_left(
    queries, turned_RP, latent_groups, latent_panels, latent_halves, turned_tiles, weights, maxima, full, empty, ready,
    mixed_RH, most_R, total_R, position_R, first, end, context_len, num_seen, factor,
    C: gl.constexpr, TILE: gl.constexpr, ROWS: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """What the left warpgroup does of tiles [first, end), of which there is one.

    A pair's scores begin while the sums of the pair before are multiplied: a step of the loop ends with the next
    pair's, so that no matmul is on its way from one step to another, for which the assembler would have all wait.
    """
    last = (end - first + 1) // 2 - 1
    score_RT, mixed_RH = _score(
        queries, turned_RP, latent_groups, latent_panels, turned_tiles, full, empty, mixed_RH, first, 0,
        context_len, num_seen, position_R, 0, C, TILE, ROWS, GROUPS, False,
    )  # fmt: skip
    for pair in range(last):
        mixed_RH, most_R, total_R = _weigh_left(
            score_RT, latent_halves, weights, maxima, empty, ready, mixed_RH, most_R, total_R, factor, C, TILE, ROWS
        )
        mixed_RH, most_R, total_R = _mix_left(
            latent_halves, weights, maxima, full, ready, mixed_RH, most_R, total_R, pair & 1, factor, C, TILE, GROUPS
        )
        score_RT, mixed_RH = _score(
            queries, turned_RP, latent_groups, latent_panels, turned_tiles, full, empty, mixed_RH,
            first + pair * 2 + 2, (pair + 1) & 1, context_len, num_seen, position_R, 0, C, TILE, ROWS, GROUPS, True,
        )  # fmt: skip
    mixed_RH, most_R, total_R = _weigh_left(
        score_RT, latent_halves, weights, maxima, empty, ready, mixed_RH, most_R, total_R, factor, C, TILE, ROWS
    )
    if first + last * 2 + 1 < end:
        mixed_RH, most_R, total_R = _mix_left(
            latent_halves, weights, maxima, full, ready, mixed_RH, most_R, total_R, last & 1, factor, C, TILE, GROUPS
        )
        mixed_RH = warpgroup_mma_wait(0, deps=[mixed_RH])
    return mixed_RH, most_R, total_R


@gluon.jit
def _step_right(
    queries, turned_RP, latent_groups, latent_panels, latent_halves, turned_tiles, weights, maxima, full, empty, ready,
    mixed_RH, most_R, total_R, position_R, first, pair, context_len, num_seen, factor,
    C: gl.constexpr, TILE: gl.constexpr, ROWS: gl.constexpr, GROUPS: gl.constexpr, ALONE: gl.constexpr,
):  # fmt: skip
    """What the right warpgroup does of a pair, or of a tile alone."""
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C // 2, 16])
    parity = pair & 1
    if not ALONE:
        score_RT, mixed_RH = _score(
            queries, turned_RP, latent_groups, latent_panels, turned_tiles, full, empty, mixed_RH,
            first + pair * 2 + 1, parity, context_len, num_seen, position_R, 1, C, TILE, ROWS, GROUPS, False,
        )  # fmt: skip
        highest_R = gl.max(score_RT, axis=1)
    mbarrier.wait(ready[0], parity)
    mixed_RH, new_R, total_R = _fade(maxima[0], mixed_RH, most_R, total_R, factor, C, TILE)
    for group in gl.static_range(GROUPS):
        mbarrier.wait(full[GROUPS + group], parity)
    mixed_RH = warpgroup_mma(weights[0], latent_halves.index(1), mixed_RH, is_async=True)
    if not ALONE:
        short_RT, fade_R, new_R, total_R = _weigh(
            score_RT, highest_R, weights, maxima, ready, new_R, total_R, factor, 1, TILE, ROWS
        )
    mixed_RH = warpgroup_mma_wait(0, deps=[mixed_RH])
    _barrier()
    mbarrier.arrive(empty[_RIGHT], count=1)
    if not ALONE:
        mixed_RH = mixed_RH * gl.convert_layout(fade_R, gl.SliceLayout(1, acc_layout))[:, None]
        own_RT = gl.convert_layout(short_RT, gl.DotOperandLayout(0, acc_layout, 2))
        mixed_RH = warpgroup_mma(own_RT, latent_halves.index(3), mixed_RH, is_async=True)
        mixed_RH = warpgroup_mma_wait(0, deps=[mixed_RH])
        _barrier()
        mbarrier.arrive(empty[3 + _RIGHT], count=1)
    return mixed_RH, new_R, total_R


@gluon.jit
def _walk_right(
    queries, turned_RP, latent_groups, latent_panels, latent_halves, turned_tiles, weights, maxima, full, empty, ready,
    mixed_RH, most_R, total_R, position_R, first, end, context_len, num_seen, factor,
    C: gl.constexpr, TILE: gl.constexpr, ROWS: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """What the right warpgroup does of tiles [first, end), of which there is one."""
    num_pairs = (end - first) // 2
    for pair in range(num_pairs):
        mixed_RH, most_R, total_R = _step_right(
            queries, turned_RP, latent_groups, latent_panels, latent_halves, turned_tiles, weights, maxima, full,
            empty, ready, mixed_RH, most_R, total_R, position_R, first, pair, context_len, num_seen, factor,
            C, TILE, ROWS, GROUPS, False,
        )  # fmt: skip
    if first + num_pairs * 2 < end:
        mixed_RH, most_R, total_R = _step_right(
            queries, turned_RP, latent_groups, latent_panels, latent_halves, turned_tiles, weights, maxima, full,
            empty, ready, mixed_RH, most_R, total_R, position_R, first, num_pairs, context_len, num_seen, factor,
            C, TILE, ROWS, GROUPS, True,
        )  # fmt: skip
    return mixed_RH, most_R, total_R


@gluon.jit
def _consume(
    query, queries, query_halves, latent_groups, latent_panels, latent_halves, turned_tiles, weights, maxima, totals,
    full, empty, ready, loaded, ended, positions, out, parts, part_logs, first, end, num_seen, context_len, first_row,
    first_out, num_rows, num_heads, num_parts, part, query_stride_q, query_stride_a, position_stride_q, factor,
    WHICH: gl.constexpr, C: gl.constexpr, TILE: gl.constexpr, ROWS: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """A warpgroup: half of the queries' columns to load, half of the output's."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C // 2, 16])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    walk: gl.constexpr = _walk_right if WHICH else _walk_left
    column: gl.constexpr = WHICH * (C // 2)
    own_half = query_halves.index(WHICH)
    wide_R = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, wide))
    at_R = wide_R // num_heads * query_stride_q + wide_R % num_heads * query_stride_a
    column_H = column + gl.arange(0, C // 2, gl.SliceLayout(0, wide))
    own_half.store(gl.load(query + at_R[:, None] + column_H[None, :], mask=(wide_R < num_rows)[:, None], other=0.0))
    narrow_R = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, narrow))
    at_R = narrow_R // num_heads * query_stride_q + narrow_R % num_heads * query_stride_a
    column_P = C + gl.arange(0, 64, gl.SliceLayout(0, narrow))
    turned_RP = gl.load(query + at_R[:, None] + column_P[None, :], mask=(narrow_R < num_rows)[:, None], other=0.0)
    weights[WHICH].store(turned_RP)  # on the way to registers
    fence_async_shared()
    _barrier()
    mbarrier.arrive(loaded[WHICH], count=1)
    turned_RP = weights[WHICH].load(gl.DotOperandLayout(0, scores, 2))
    row_R = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, scores))
    position_at = positions + row_R // num_heads * position_stride_q
    position_R = gl.load(position_at, mask=row_R < num_rows, other=-1).to(gl.int32)
    most_R = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, scores))
    total_R = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, scores))
    mixed_RH = gl.zeros([ROWS, C // 2], gl.float32, acc_layout)
    mbarrier.wait(loaded[1 - WHICH], 0)
    if first < end:
        mixed_RH, most_R, total_R = walk(
            queries, turned_RP, latent_groups, latent_panels, latent_halves, turned_tiles, weights, maxima, full,
            empty, ready, mixed_RH, most_R, total_R, position_R, first, end, context_len, num_seen, factor,
            C, TILE, ROWS, GROUPS,
        )  # fmt: skip
    totals[WHICH].store(total_R)
    _barrier()
    mbarrier.arrive(ended[WHICH], count=1)
    mbarrier.wait(ended[1 - WHICH], 0)
    other_R = totals[1 - WHICH].load(gl.SliceLayout(1, scores))
    total_R = total_R + other_R
    is_seen_R = total_R > 0
    total_R = gl.where(is_seen_R, total_R, 1.0)
    mixed_RH = mixed_RH * (1.0 / gl.convert_layout(total_R, gl.SliceLayout(1, acc_layout)))[:, None]
    if num_parts == 1:
        own_half.store(mixed_RH.to(out.dtype.element_ty))  # through the place of queries, to rows of whole sectors
        _barrier()
        result_RH = own_half.load(wide)
        wide_R = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, wide))
        column_H = column + gl.arange(0, C // 2, gl.SliceLayout(0, wide))
        out_R = (first_out + wide_R).to(gl.int64) * C
        gl.store(out + out_R[:, None] + column_H[None, :], result_RH, mask=(wide_R < num_rows)[:, None])
    else:
        if WHICH == 0:
            log_R = gl.where(is_seen_R, most_R * factor + gl.log2(total_R), float("-inf"))
            gl.store(part_logs + (first_out + row_R) * num_parts + part, log_R, mask=row_R < num_rows)
        mixed_R = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, acc_layout))
        mixed_H = column + gl.arange(0, C // 2, gl.SliceLayout(0, acc_layout))
        part_R = ((first_out + mixed_R) * num_parts + part).to(gl.int64) * C
        gl.store(parts + part_R[:, None] + mixed_H[None, :], mixed_RH, mask=(mixed_R < num_rows)[:, None])


@gluon.jit(
    do_not_specialize=[
        "tables", "positions", "table_stride", "position_stride_b", "position_stride_q", "query_stride_b",
        "query_stride_q", "query_stride_a", "block_rows", "num_queries", "num_heads", "num_parts", "max_context_len",
        "scale",
    ]
)  # fmt: skip
def mla_hopper_kernel(
    query, box, tables, positions, out, parts, part_logs,
    scale: gl.float32, table_stride: gl.int32, position_stride_b: gl.int32, position_stride_q: gl.int32,
    query_stride_b: gl.int32, query_stride_q: gl.int32, query_stride_a: gl.int32, block_rows: gl.int32,
    num_queries: gl.int32, num_heads: gl.int32, num_parts: gl.int32, max_context_len: gl.int32,
    C: gl.constexpr, S: gl.constexpr, WORDS: gl.constexpr, TILE: gl.constexpr, ROWS: gl.constexpr,
    GROUPS: gl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows, parts, sequences); what goes where is as of `mla_attend_kernel`."""
    kind: gl.constexpr = query.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    row_tile = gl.program_id(0)
    part = gl.program_id(1)
    sequence = gl.program_id(2)
    num_rows = num_queries * num_heads
    positions += sequence.to(gl.int64) * position_stride_b
    furthest = gl.load(positions).to(gl.int32)
    nearest = furthest
    for index in range(1, num_queries):
        position = gl.load(positions + index * position_stride_q).to(gl.int32)
        furthest = gl.maximum(furthest, position)
        nearest = gl.minimum(nearest, position)
    context_len = gl.maximum(gl.minimum(furthest + 1, max_context_len), 0)
    num_seen = gl.maximum(gl.minimum(nearest + 1, max_context_len), 0)  # by every row
    num_tiles = (context_len + TILE - 1) // TILE
    each = (num_tiles + num_parts - 1) // num_parts
    first = part * each
    end = gl.minimum(first + each, num_tiles)
    first_row = row_tile * ROWS
    first_out = sequence * num_rows
    if (first >= end) & (part > 0):
        narrow: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        row_R = first_row + gl.arange(0, ROWS, narrow)
        nothing_R = gl.full([ROWS], float("-inf"), gl.float32, narrow)
        gl.store(part_logs + (first_out + row_R) * num_parts + part, nothing_R, mask=row_R < num_rows)
        return
    blocks: gl.constexpr = TILE // S
    panels: gl.constexpr = C // 64
    width: gl.constexpr = C // 2 // GROUPS
    queries = gl.allocate_shared_memory(kind, [2 * GROUPS, ROWS, width], swizzled)
    query_halves = queries._reinterpret(kind, [2, ROWS, C // 2], swizzled)
    weights = _pair(kind, [ROWS, TILE], swizzled)
    latent_pieces = gl.allocate_shared_memory(kind, [2 * blocks * panels, S, 64], swizzled)
    turned_pieces = gl.allocate_shared_memory(kind, [2 * blocks, S, 64], swizzled)
    latent_panels = latent_pieces._reinterpret(kind, [2 * panels, TILE, 64], swizzled)
    latent_groups = latent_pieces._reinterpret(kind, [4 * GROUPS, TILE, width], swizzled)
    latent_halves = latent_pieces._reinterpret(kind, [4, TILE, C // 2], swizzled)
    turned_tiles = turned_pieces._reinterpret(kind, [2, TILE, 64], swizzled)
    maxima = _pair(gl.float32, [ROWS], flat)
    totals = _pair(gl.float32, [ROWS], flat)
    full = _barriers(2 * (2 * GROUPS + 1))
    empty = _barriers(6)
    ready = _barriers(2)
    loaded = _barriers(2)
    ended = _barriers(2)
    fence_async_shared()
    # Strides are told in units, so that the compiler knows rows to begin at 16 bytes.
    query += sequence.to(gl.int64) * (query_stride_b.to(gl.int64) * _UNIT)
    table = tables + sequence.to(gl.int64) * table_stride
    last_block = gl.maximum(context_len - 1, 0) // S
    factor = scale * _LOG2_E
    gl.warp_specialize(
        [
            (_consume, (
                query, queries, query_halves, latent_groups, latent_panels, latent_halves, turned_tiles, weights,
                maxima, totals, full, empty, ready, loaded, ended, positions, out, parts, part_logs, first, end,
                num_seen, context_len, first_row, first_out, num_rows, num_heads, num_parts, part,
                query_stride_q * _UNIT, query_stride_a * _UNIT, position_stride_q, factor, gl.constexpr(0),
                C, TILE, ROWS, GROUPS,
            )),
            (_consume, (
                query, queries, query_halves, latent_groups, latent_panels, latent_halves, turned_tiles, weights,
                maxima, totals, full, empty, ready, loaded, ended, positions, out, parts, part_logs, first, end,
                num_seen, context_len, first_row, first_out, num_rows, num_heads, num_parts, part,
                query_stride_q * _UNIT, query_stride_a * _UNIT, position_stride_q, factor, gl.constexpr(1),
                C, TILE, ROWS, GROUPS,
            )),
            (_produce, (
                box, latent_pieces, turned_pieces, full, empty, table, first, end, last_block, block_rows,
                S, WORDS, TILE, C, GROUPS,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def variants() -> list[Variant]:
    """None of its own: those of `decode_hopper_triton` are."""
    return []
