# mypy: ignore-errors
"""Causal attention of chunks over expanded latents: the device code of `kernels.mla.prefill_hopper_triton`.

What it computes and how is said there. It refuses to know options, launches and tensors.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from baton.kernels.attention.prefill_warp_specialized_triton import begin_walk, end_walk, step_walk, store_rows
from baton.kernels.variant import Variant

STRIDE_UNIT = 16
_UNIT = gl.constexpr(STRIDE_UNIT)
_LOG2_E = gl.constexpr(1.4426950408889634)
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


@gluon.jit
def _number(numbers, place, sequence, num_sequences):
    return gl.load(numbers + place * num_sequences + sequence)


@gluon.jit
def _find(num_tiles, together, BM: gl.constexpr):
    """The sequence, the head and the first row of a program.

    So many heads together as the L2 cache holds, of these the longest walks first.
    """
    index = gl.program_id(0)
    group = index // (num_tiles * together)
    index = index % (num_tiles * together)
    head = group * together + index % together
    return gl.program_id(1), head, (num_tiles - 1 - index // together) * BM


@gluon.jit
def _find_walk(numbers, sequence, num_sequences, first_row, BM: gl.constexpr, BN: gl.constexpr):
    """Rows of a sequence and keys of it in the window, keys before its chunk (maybe below zero), and tiles to walk."""
    query_len = _number(numbers, 1, sequence, num_sequences)
    first_key = _number(numbers, 3, sequence, num_sequences)
    key_len = _number(numbers, 4, sequence, num_sequences)
    before = _number(numbers, 5, sequence, num_sequences) - query_len - first_key
    longest = gl.minimum(before + gl.minimum(first_row + BM, query_len), key_len)
    return query_len, key_len, before, (gl.maximum(longest, 0) + BN - 1) // BN


@gluon.jit
def _load_end(value, value_boxes, full, stage, key_stride, num_left, BN: gl.constexpr, V: gl.constexpr):
    """The tile of values that reaches past the sequence's keys, zero there: `num_left` rows from `value` on."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    halves: gl.constexpr = V // 64
    boxes: gl.constexpr = BN // 16
    row_S = gl.arange(0, 16, gl.SliceLayout(1, layout))
    column_C = gl.arange(0, 64, gl.SliceLayout(0, layout))
    at_SC = row_S.to(gl.int64)[:, None] * key_stride + column_C[None, :]
    for box in range(boxes):
        is_there_S1 = (box * 16 + row_S < num_left)[:, None]
        found = ()
        for half in gl.static_range(halves):
            found = found + (gl.load(value + half * 64 + at_SC, mask=is_there_S1, other=0.0),)  # noqa: RUF005
        for half in gl.static_range(halves):
            value_boxes.index((stage * halves + half) * boxes + box).store(found[half])
        value += key_stride * 16
    fence_async_shared()
    _barrier()
    mbarrier.arrive(full.index(stage), count=1)


@gluon.jit
def _produce(
    expanded, turned, values, nope_pieces, turned_tiles, value_pieces, value_boxes, key_full, key_empty, value_full,
    value_empty, numbers, num_sequences, num_heads, num_tiles, together,
    N: gl.constexpr, P: gl.constexpr, V: gl.constexpr, X: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that copies: keys and values of every tile, from the last that a program's rows see to the first."""
    key_halves: gl.constexpr = N // 64
    halves: gl.constexpr = V // 64
    sequence, head, first_row = _find(num_tiles, together, BM)
    query_len, key_len, _, high = _find_walk(numbers, sequence, num_sequences, first_row, BM, BN)
    if first_row < query_len:
        start = _number(numbers, 2, sequence, num_sequences)
        column = head * (N + V)
        for step in range(high):
            at = high - 1 - step
            row = start + at * BN
            stage = step % STAGES
            parity = ((step // STAGES) & 1) ^ 1
            mbarrier.wait(key_empty.index(stage), parity)
            mbarrier.expect(key_full.index(stage), BN * (N + P) * 2)
            for half in gl.static_range(key_halves):
                piece = nope_pieces.index(stage * key_halves + half)
                tma.async_copy_global_to_shared(expanded, [row, column + half * 64], key_full.index(stage), piece)
            turned_tile = turned_tiles.index(stage)
            tma.async_copy_global_to_shared(turned, [row, X - P], key_full.index(stage), turned_tile)
            mbarrier.wait(value_empty.index(stage), parity)
            if (at + 1) * BN <= key_len:
                mbarrier.expect(value_full.index(stage), BN * V * 2)
                for half in gl.static_range(halves):
                    piece = value_pieces.index(stage * halves + half)
                    tma.async_copy_global_to_shared(
                        expanded, [row, column + N + half * 64], value_full.index(stage), piece
                    )  # fmt: skip
            else:
                key_stride = num_heads.to(gl.int64) * (N + V)
                value = values + row.to(gl.int64) * key_stride + (column + N)
                _load_end(value, value_boxes, value_full, stage, key_stride, key_len - at * BN, BN, V)


@gluon.jit
def _load_queries(
    query, nope_tile, turned_tile, start, query_len, first_row, query_stride, WHICH: gl.constexpr,
    N: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """The warpgroup's 64 rows, zero past the chunk's."""
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // N, N // 8], [4, 1], [1, 0])
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [256 // P, P // 8], [4, 1], [1, 0])
    row_R = first_row + WHICH * 64 + gl.arange(0, 64, gl.SliceLayout(1, wide))
    at_R1 = ((start + row_R).to(gl.int64) * query_stride)[:, None]
    column_N = gl.arange(0, N, gl.SliceLayout(0, wide))
    nope_RN = gl.load(query + at_R1 + column_N[None, :], mask=(row_R < query_len)[:, None], other=0.0)
    row_R = first_row + WHICH * 64 + gl.arange(0, 64, gl.SliceLayout(1, narrow))
    at_R1 = ((start + row_R).to(gl.int64) * query_stride)[:, None]
    column_P = N + gl.arange(0, P, gl.SliceLayout(0, narrow))
    turned_RP = gl.load(query + at_R1 + column_P[None, :], mask=(row_R < query_len)[:, None], other=0.0)
    nope_tile.store(nope_RN)
    turned_tile.store(turned_RP)
    fence_async_shared()


@gluon.jit
def _walk(
    queries, key_tiles, value_tiles, key_full, key_empty, value_full, value_empty, key_len, before, first_row, high,
    factor, WHICH: gl.constexpr, V: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The 64 rows' sums over tiles `high` - 1 down to 0, of which there is one: of values, of weights, and maxima."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    # Tiles that all rows of both warpgroups see to their ends; the first is masked even if it is one.
    num_full = gl.minimum(gl.maximum(before + first_row + 1, 0), key_len) // BN
    num_masked = gl.maximum(high - num_full, 1)
    row_R = first_row + WHICH * 64 + gl.arange(0, 64, gl.SliceLayout(1, scores))
    last_R = gl.minimum(before + row_R, key_len - 1)  # the last key that a row sees
    maximum_R = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, scores))
    total_R = gl.zeros([64], gl.float32, gl.SliceLayout(1, scores))
    mixed_RV = gl.zeros([64, V], gl.float32, acc_layout)
    weight_RN, maximum_R, total_R = begin_walk(
        queries, key_tiles, key_full, key_empty, None, maximum_R, total_R, last_R,
        (high - 1) * BN, factor, 0, WHICH, BN, V, STAGES, False,
    )  # fmt: skip
    for step in range(1, num_masked):
        weight_RN, mixed_RV, maximum_R, total_R = step_walk(
            queries, key_tiles, value_tiles, key_full, key_empty, value_full, value_empty, None,
            weight_RN, mixed_RV, maximum_R, total_R, last_R, (high - 1 - step) * BN, factor,
            step, WHICH, BN, V, STAGES, False, False, True,
        )  # fmt: skip
    for step in range(num_masked, high):
        weight_RN, mixed_RV, maximum_R, total_R = step_walk(
            queries, key_tiles, value_tiles, key_full, key_empty, value_full, value_empty, None,
            weight_RN, mixed_RV, maximum_R, total_R, last_R, 0, factor,
            step, WHICH, BN, V, STAGES, False, False, False,
        )  # fmt: skip
    mixed_RV = end_walk(value_tiles, value_full, value_empty, weight_RN, mixed_RV, high, STAGES)
    return mixed_RV, total_R, maximum_R


@gluon.jit
def _finish(
    mixed_RV, total_R, log_R, numbers, sequence, num_sequences, out, carried, carried_logs, nope_tile,
    head, first_row, num_heads, WHICH: gl.constexpr, V: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """Add what earlier windows carried, and write the rows, or carry them.

    `log_R` is the logarithm of a weight of 1 in the sums; a row that saw nothing has -inf, and a total of zero.
    """
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    # Loaded again, for registers are short.
    start = _number(numbers, 0, sequence, num_sequences)
    query_len = _number(numbers, 1, sequence, num_sequences)
    first_key = _number(numbers, 3, sequence, num_sequences)
    end = first_key + _number(numbers, 4, sequence, num_sequences)
    context_len = _number(numbers, 5, sequence, num_sequences)
    row_R = first_row + WHICH * 64 + gl.arange(0, 64, gl.SliceLayout(1, scores))
    log_at_R = carried_logs + ((start + row_R).to(gl.int64) * num_heads + head)
    mixed_row_R = first_row + WHICH * 64 + gl.arange(0, 64, gl.SliceLayout(1, acc_layout))
    column_V = gl.arange(0, V, gl.SliceLayout(0, acc_layout))
    mixed_at_R = ((start + mixed_row_R).to(gl.int64) * num_heads + head) * V
    mixed_at_RV = carried + mixed_at_R[:, None] + column_V[None, :]
    if first_key > 0:
        carried_R = gl.load(log_at_R, mask=row_R < query_len, other=float("-inf"))
        most_R = gl.maximum(log_R, carried_R)
        base_R = gl.where(most_R == float("-inf"), 0.0, most_R)
        own_R = gl.exp2(log_R - base_R)
        carried_R = gl.exp2(carried_R - base_R)
        total_R = gl.fma(total_R, own_R, carried_R)
        log_R = most_R
        sums_RV = gl.load(mixed_at_RV, mask=(mixed_row_R < query_len)[:, None], other=0.0)
        mixed_RV = mixed_RV * gl.convert_layout(own_R, gl.SliceLayout(1, acc_layout))[:, None]
        mixed_RV += sums_RV * gl.convert_layout(carried_R, gl.SliceLayout(1, acc_layout))[:, None]
    is_seen_R = total_R > 0
    total_R = gl.where(is_seen_R, total_R, 1.0)
    mixed_RV = mixed_RV / gl.convert_layout(total_R, gl.SliceLayout(1, acc_layout))[:, None]
    if end < context_len:
        log_R = gl.where(is_seen_R, log_R + gl.log2(total_R), float("-inf"))
        gl.store(log_at_R, log_R, mask=row_R < query_len)
        gl.store(mixed_at_RV, mixed_RV, mask=(mixed_row_R < query_len)[:, None])
    else:
        store_rows(mixed_RV, out, nope_tile, start, query_len, first_row, head, num_heads * V, V, WHICH, 1, V)


@gluon.jit
def _consume(
    query, out, carried, carried_logs, nope_queries, turned_queries, nope_tiles, turned_tiles, value_tiles,
    key_full, key_empty, value_full, value_empty, numbers, num_sequences, num_heads, num_tiles, together,
    query_stride, query_head_stride, factor, WHICH: gl.constexpr, N: gl.constexpr, P: gl.constexpr, V: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup that has 64 of the program's rows."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    nope_tile = nope_queries.index(WHICH)
    turned_tile = turned_queries.index(WHICH)
    sequence, head, first_row = _find(num_tiles, together, BM)
    query_len, key_len, before, high = _find_walk(numbers, sequence, num_sequences, first_row, BM, BN)
    if (first_row < query_len) & (key_len > 0):
        if high > 0:
            start = _number(numbers, 0, sequence, num_sequences)
            query_at = query + head * (query_head_stride * _UNIT)
            _load_queries(
                query_at, nope_tile, turned_tile, start, query_len, first_row, query_stride.to(gl.int64) * _UNIT,
                WHICH, N, P,
            )  # fmt: skip
            mixed_RV, total_R, maximum_R = _walk(
                (nope_tile, turned_tile), (nope_tiles, turned_tiles), value_tiles, key_full, key_empty,
                value_full, value_empty, key_len, before, first_row, high, factor, WHICH, V, BN, STAGES,
            )  # fmt: skip
            _finish(
                mixed_RV, total_R, maximum_R * factor, numbers, sequence, num_sequences, out, carried, carried_logs,
                nope_tile, head, first_row, num_heads, WHICH, V, BN,
            )  # fmt: skip
        else:  # rows that see nothing of this window have been carried here
            nothing_R = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, scores))
            zero_R = gl.zeros([64], gl.float32, gl.SliceLayout(1, scores))
            _finish(
                gl.zeros([64, V], gl.float32, acc_layout), zero_R, nothing_R, numbers, sequence, num_sequences, out,
                carried, carried_logs, nope_tile, head, first_row, num_heads, WHICH, V, BN,
            )  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        "numbers", "query_stride", "query_head_stride", "num_sequences", "num_heads", "num_tiles", "together", "scale",
    ]
)  # fmt: skip
def mla_prefill_hopper_kernel(
    query, expanded, turned, values, numbers, out, carried, carried_logs, scale: gl.float32, query_stride: gl.int32,
    query_head_stride: gl.int32, num_sequences: gl.int32, num_heads: gl.int32, num_tiles: gl.int32,
    together: gl.int32,
    N: gl.constexpr, P: gl.constexpr, V: gl.constexpr, X: gl.constexpr, GROUPS: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:  # fmt: skip
    """Grid (tiles of rows of all heads, sequences); `values` are `expanded`, for ordinary loads."""
    kind: gl.constexpr = query.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    nope_queries = gl.allocate_shared_memory(kind, [GROUPS, 64, N], swizzled)
    turned_queries = gl.allocate_shared_memory(kind, [GROUPS, 64, P], swizzled)
    nope_pieces = gl.allocate_shared_memory(kind, [STAGES * (N // 64), BN, 64], swizzled)
    turned_tiles = gl.allocate_shared_memory(kind, [STAGES, BN, P], swizzled)
    value_pieces = gl.allocate_shared_memory(kind, [STAGES * (V // 64), BN, 64], swizzled)
    nope_tiles = nope_pieces._reinterpret(kind, [STAGES, BN, N], swizzled)
    value_boxes = value_pieces._reinterpret(kind, [STAGES * (V // 64) * (BN // 16), 16, 64], swizzled)
    value_tiles = value_pieces._reinterpret(kind, [STAGES, BN, V], swizzled)
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    key_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    key_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    value_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    value_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    for stage in gl.static_range(STAGES):
        mbarrier.init(key_full.index(stage), count=1)
        mbarrier.init(value_full.index(stage), count=1)
        mbarrier.init(key_empty.index(stage), count=GROUPS)
        mbarrier.init(value_empty.index(stage), count=GROUPS)
    fence_async_shared()
    factor = scale * _LOG2_E
    BM: gl.constexpr = 64 * GROUPS
    if GROUPS == 2:  # registers of 128 threads: 504 in all
        gl.warp_specialize(
            [
                (_consume, (
                    query, out, carried, carried_logs, nope_queries, turned_queries, nope_tiles, turned_tiles,
                    value_tiles, key_full, key_empty, value_full, value_empty, numbers, num_sequences,
                    num_heads, num_tiles, together, query_stride, query_head_stride, factor, gl.constexpr(0),
                    N, P, V, BM, BN, STAGES,
                )),
                (_consume, (
                    query, out, carried, carried_logs, nope_queries, turned_queries, nope_tiles, turned_tiles,
                    value_tiles, key_full, key_empty, value_full, value_empty, numbers, num_sequences,
                    num_heads, num_tiles, together, query_stride, query_head_stride, factor, gl.constexpr(1),
                    N, P, V, BM, BN, STAGES,
                )),
                (_produce, (
                    expanded, turned, values, nope_pieces, turned_tiles, value_pieces, value_boxes, key_full,
                    key_empty, value_full, value_empty, numbers, num_sequences, num_heads, num_tiles, together,
                    N, P, V, X, BM, BN, STAGES,
                )),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    query, out, carried, carried_logs, nope_queries, turned_queries, nope_tiles, turned_tiles,
                    value_tiles, key_full, key_empty, value_full, value_empty, numbers, num_sequences,
                    num_heads, num_tiles, together, query_stride, query_head_stride, factor, gl.constexpr(0),
                    N, P, V, BM, BN, STAGES,
                )),
                (_produce, (
                    expanded, turned, values, nope_pieces, turned_tiles, value_pieces, value_boxes, key_full,
                    key_empty, value_full, value_empty, numbers, num_sequences, num_heads, num_tiles, together,
                    N, P, V, X, BM, BN, STAGES,
                )),
            ],
            [1],
            [40],
        )  # fmt: skip


def variants() -> list[Variant]:
    """None of its own: they are those of the launches."""
    return []
