# mypy: ignore-errors
"""Causal attention of chunks of prompts over paged KV: the device code of `kernels.attention.prefill_hopper_triton`.

What it computes and how is said there. It refuses to know options, launches and tensors.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from baton.kernels.attention.prefill_copies_triton import find_part, find_tile, produce, tile_of
from baton.kernels.variant import Variant

_ANY = [
    "starts", "contexts", "plan", "part_logs", "num_tiles", "num_rounds", "table_stride", "num_sequences", "scale",
]  # fmt: skip
_LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _weigh(score_RN, maximum_R, total_R, factor, MASKED: gl.constexpr):
    """One step of the online softmax, base 2, of scores not yet scaled; the sums stay apart in each thread's lane."""
    new_R = gl.maximum(maximum_R, gl.max(score_RN, axis=1))
    base_R = new_R * factor
    if MASKED:  # a row that has seen nothing yet stays at zero
        base_R = gl.where(new_R == float("-inf"), 0.0, base_R)
    weight_RN = gl.exp2(gl.fma(score_RN, factor, -base_R[:, None]))
    shrink_R = gl.exp2(gl.fma(maximum_R, factor, -base_R))
    return weight_RN, new_R, gl.fma(total_R, shrink_R, gl.sum(weight_RN, axis=1)), shrink_R


@gluon.jit
def _pin(total_R):
    """The same totals, and a store that depends on them but never happens, as no total is below zero.

    Without it the assembler moves the wait for a matmul before the weights that were to be made beside it.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred never;
        .reg .b32 place; mov.b32 place, 0;
        setp.lt.f32 never, $1, 0f00000000;
        @never st.volatile.shared.f32 [place], $1;
        mov.f32 $0, $1;
        }""",
        "=f,f",
        [total_R],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _mask(score_RN, position_R, first, BN: gl.constexpr, layout: gl.constexpr):
    """Scores of positions that a row sees, -inf elsewhere."""
    index_N = first + gl.arange(0, BN, gl.SliceLayout(0, layout))
    return gl.where(index_N[None, :] <= position_R[:, None], score_RN, float("-inf"))


@gluon.jit
def _scores(queries, key_tiles, stage, BN: gl.constexpr):
    """Issue the matmuls of queries and keys, whose columns lie in one part or in several."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    zero_RN = gl.zeros([64, BN], gl.float32, scores)
    key_DN = key_tiles[0].index(stage).permute((1, 0))
    score_RN = warpgroup_mma(queries[0], key_DN, zero_RN, use_acc=False, is_async=True)
    for part in gl.static_range(1, len(queries)):
        score_RN = warpgroup_mma(queries[part], key_tiles[part].index(stage).permute((1, 0)), score_RN, is_async=True)
    return score_RN


@gluon.jit
def step_walk(
    queries, key_tiles, value_tiles, key_full, key_empty, value_full, value_empty, turns, weight_RN, mixed_RD,
    maximum_R, total_R, position_R, first, factor, count, WHICH: gl.constexpr,
    BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr, PIN: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """The scores of a tile and, while they are weighed, the P V matmul of the tile before."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    stage = count % STAGES
    before = (count + STAGES - 1) % STAGES
    mbarrier.wait(key_full.index(stage), (count // STAGES) & 1)
    if TURNS:
        mbarrier.wait(turns.index(WHICH), (count & 1) ^ (WHICH == 0))
    score_RN = _scores(queries, key_tiles, stage, BN)
    mbarrier.wait(value_full.index(before), ((count - 1) // STAGES) & 1)
    mixed_RD = warpgroup_mma(weight_RN, value_tiles.index(before), mixed_RD, is_async=True)
    if TURNS:
        mbarrier.arrive(turns.index((WHICH + 1) % turns.shape[0]), count=1)
    score_RN = warpgroup_mma_wait(1, deps=[score_RN])
    mbarrier.arrive(key_empty.index(stage), count=1)
    if MASKED:
        score_RN = _mask(score_RN, position_R, first, BN, scores)
    wide_RN, maximum_R, total_R, shrink_R = _weigh(score_RN, maximum_R, total_R, factor, MASKED)
    if PIN:
        total_R = _pin(total_R)
    # The weights go through the wait, so that they are not made after it.
    mixed_RD, wide_RN = warpgroup_mma_wait(0, deps=[mixed_RD, wide_RN])
    mbarrier.arrive(value_empty.index(before), count=1)
    mixed_RD = mixed_RD * gl.convert_layout(shrink_R, gl.SliceLayout(1, acc_layout))[:, None]
    weight_RN = gl.convert_layout(wide_RN.to(queries[0].dtype), gl.DotOperandLayout(0, acc_layout, 2))
    return weight_RN, mixed_RD, maximum_R, total_R


@gluon.jit
def begin_walk(
    queries, key_tiles, key_full, key_empty, turns, maximum_R, total_R, position_R, first, factor, count,
    WHICH: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """The weights of the first tile."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    stage = count % STAGES
    mbarrier.wait(key_full.index(stage), (count // STAGES) & 1)
    if TURNS:
        mbarrier.wait(turns.index(WHICH), (count & 1) ^ (WHICH == 0))
    score_RN = _scores(queries, key_tiles, stage, BN)
    if TURNS:
        mbarrier.arrive(turns.index((WHICH + 1) % turns.shape[0]), count=1)
    score_RN = warpgroup_mma_wait(0, deps=[score_RN])
    mbarrier.arrive(key_empty.index(stage), count=1)
    score_RN = _mask(score_RN, position_R, first, BN, scores)
    wide_RN, maximum_R, total_R, _ = _weigh(score_RN, maximum_R, total_R, factor, True)
    weight_RN = gl.convert_layout(wide_RN.to(queries[0].dtype), gl.DotOperandLayout(0, acc_layout, 2))
    return weight_RN, maximum_R, total_R


@gluon.jit
def end_walk(value_tiles, value_full, value_empty, weight_RN, mixed_RD, count, STAGES: gl.constexpr):
    """With the P V matmul of the last tile."""
    before = (count + STAGES - 1) % STAGES
    mbarrier.wait(value_full.index(before), ((count - 1) // STAGES) & 1)
    mixed_RD = warpgroup_mma(weight_RN, value_tiles.index(before), mixed_RD, is_async=True)
    mixed_RD = warpgroup_mma_wait(0, deps=[mixed_RD])
    mbarrier.arrive(value_empty.index(before), count=1)
    return mixed_RD


@gluon.jit
def _attend(
    query, query_tile, key_tiles, value_tiles, key_full, key_empty, value_full, value_empty, turns,
    start, query_len, first_position, first_row, low, high, head, query_stride, query_head_stride, factor, count,
    WHICH: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    TURNS: gl.constexpr, PIN: gl.constexpr,
):  # fmt: skip
    """The 64 rows' sums over tiles `high` - 1 down to `low`, of which there is one: of values, of weights, and maxima.

    Last, how many tiles were taken before and now.
    """
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    # Tiles that all rows of both warpgroups see to their ends; the first is masked even if it is one.
    num_masked = gl.maximum(high - gl.maximum((first_position + first_row // G + 1) // BN, low), 1)
    row_R = first_row + WHICH * 64 + gl.arange(0, 64, gl.SliceLayout(1, wide))
    column_D = gl.arange(0, D, gl.SliceLayout(0, wide))
    is_row_R1 = (row_R < query_len * G)[:, None]
    at_R = (start + row_R // G).to(gl.int64) * query_stride + (head * G + row_R % G) * query_head_stride
    query_RD = gl.load(query + at_R[:, None] + column_D[None, :], mask=is_row_R1, other=0.0)
    query_tile.store(query_RD)
    fence_async_shared()
    own_R = first_row + WHICH * 64 + gl.arange(0, 64, gl.SliceLayout(1, scores))
    position_R = first_position + own_R // G
    maximum_R = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, scores))
    total_R = gl.zeros([64], gl.float32, gl.SliceLayout(1, scores))
    mixed_RD = gl.zeros([64, D], gl.float32, acc_layout)
    weight_RN, maximum_R, total_R = begin_walk(
        (query_tile,), (key_tiles,), key_full, key_empty, turns, maximum_R, total_R, position_R,
        (high - 1) * BN, factor, count, WHICH, BN, D, STAGES, TURNS,
    )  # fmt: skip
    count += 1
    for step in range(1, num_masked):
        weight_RN, mixed_RD, maximum_R, total_R = step_walk(
            (query_tile,), (key_tiles,), value_tiles, key_full, key_empty, value_full, value_empty, turns,
            weight_RN, mixed_RD, maximum_R, total_R, position_R, (high - 1 - step) * BN, factor,
            count, WHICH, BN, D, STAGES, TURNS, PIN, True,
        )  # fmt: skip
        count += 1
    for _ in range(num_masked, high - low):
        weight_RN, mixed_RD, maximum_R, total_R = step_walk(
            (query_tile,), (key_tiles,), value_tiles, key_full, key_empty, value_full, value_empty, turns,
            weight_RN, mixed_RD, maximum_R, total_R, position_R, 0, factor,
            count, WHICH, BN, D, STAGES, TURNS, PIN, False,
        )  # fmt: skip
        count += 1
    mixed_RD = end_walk(value_tiles, value_full, value_empty, weight_RN, mixed_RD, count, STAGES)
    return mixed_RD, total_R, maximum_R, count


@gluon.jit
def store_rows(
    mixed_RD, output, query_tile, start, query_len, first_row, head, output_stride, output_head_stride,
    WHICH: gl.constexpr, G: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Results, through the place of the queries, which are not read any more, to rows of whole sectors."""
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    query_tile.store(mixed_RD.to(query_tile.dtype))
    result_RD = query_tile.load(wide)
    row_R = first_row + WHICH * 64 + gl.arange(0, 64, gl.SliceLayout(1, wide))
    column_D = gl.arange(0, D, gl.SliceLayout(0, wide))
    is_row_R1 = (row_R < query_len * G)[:, None]
    at_R = (start + row_R // G).to(gl.int64) * output_stride + (head * G + row_R % G) * output_head_stride
    gl.store(output + at_R[:, None] + column_D[None, :], result_RD, mask=is_row_R1)


@gluon.jit
def _store_part(
    parts, part_logs, mixed_RD, log_R, query_len, first_row, head, WHICH: gl.constexpr, H: gl.constexpr,
    G: gl.constexpr, D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """A part of a tile, [parts, H, BM, D], and the logarithms of its weights."""
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    _store_logs(part_logs, log_R, query_len, first_row, head, WHICH, H, G, BM, BN)
    base = parts + ((gl.program_id(1) * H + head) * BM + WHICH * 64).to(gl.int64) * D
    row_R = gl.arange(0, 64, gl.SliceLayout(1, acc_layout))
    column_D = gl.arange(0, D, gl.SliceLayout(0, acc_layout))
    is_row_R1 = (first_row + WHICH * 64 + row_R < query_len * G)[:, None]
    gl.store(base + (row_R * D)[:, None] + column_D[None, :], mixed_RD, mask=is_row_R1)


@gluon.jit
def _store_logs(
    part_logs, log_R, query_len, first_row, head, WHICH: gl.constexpr, H: gl.constexpr, G: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    row_R = WHICH * 64 + gl.arange(0, 64, gl.SliceLayout(1, scores))
    at_R = (gl.program_id(1) * H + head) * BM + row_R
    gl.store(part_logs + at_R, log_R, mask=first_row + row_R < query_len * G)


@gluon.jit
def _consume(
    query, output, parts, part_logs, query_tiles, key_tiles, value_tiles, key_full, key_empty, value_full, value_empty,
    turns, starts, contexts, plan, num_sequences, num_tiles, num_rounds,
    query_stride, query_head_stride, output_stride, output_head_stride, factor, WHICH: gl.constexpr,
    H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    TURNS: gl.constexpr, PIN: gl.constexpr, PLANNED: gl.constexpr,
):  # fmt: skip
    """A warpgroup that has 64 rows of every tile of the program."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    query_tile = query_tiles.index(WHICH)
    count = 0
    if PLANNED:
        head = gl.program_id(0)
        _, low, end, start, query_len, context_len, first_row = find_part(plan, starts)
        if end > low:
            first_position = context_len - query_len
            last = first_position + (gl.minimum(first_row + BM, query_len * G) - 1) // G
            high = gl.minimum(end, last // BN + 1)
            if high > low:
                mixed_RD, total_R, maximum_R, count = _attend(
                    query, query_tile, key_tiles, value_tiles, key_full, key_empty, value_full, value_empty, turns,
                    start, query_len, first_position, first_row, low, high, head, query_stride, query_head_stride,
                    factor, count, WHICH, G, D, BN, STAGES, TURNS, PIN,
                )  # fmt: skip
                is_seen_R = total_R > 0
                total_R = gl.where(is_seen_R, total_R, 1.0)
                mixed_RD = mixed_RD / gl.convert_layout(total_R, gl.SliceLayout(1, acc_layout))[:, None]
                # Loaded again, for registers are short.
                _, low, end, start, query_len, context_len, first_row = find_part(plan, starts)
                if (low == 0) & (end * BN >= context_len):
                    store_rows(
                        mixed_RD, output, query_tile, start, query_len, first_row, head, output_stride,
                        output_head_stride, WHICH, G, D,
                    )  # fmt: skip
                else:
                    log_R = gl.where(is_seen_R, maximum_R * factor + gl.log2(total_R), float("-inf"))
                    _store_part(
                        parts, part_logs, mixed_RD, log_R, query_len, first_row, head, WHICH, H, G, D, BM, BN
                    )  # fmt: skip
            else:
                nothing_R = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, scores))
                _store_logs(part_logs, nothing_R, query_len, first_row, head, WHICH, H, G, BM, BN)
    else:
        for round in range(num_rounds):
            tile, head, exists = tile_of(round, num_tiles, H)
            if exists:
                _, start, query_len, context_len, first_row = find_tile(starts, contexts, num_sequences, tile, G, BM)
                if first_row < query_len * G:
                    first_position = context_len - query_len
                    last = first_position + (gl.minimum(first_row + BM, query_len * G) - 1) // G
                    mixed_RD, total_R, maximum_R, count = _attend(
                        query, query_tile, key_tiles, value_tiles, key_full, key_empty, value_full, value_empty, turns,
                        start, query_len, first_position, first_row, 0, last // BN + 1, head, query_stride,
                        query_head_stride, factor, count, WHICH, G, D, BN, STAGES, TURNS, PIN,
                    )  # fmt: skip
                    mixed_RD = mixed_RD / gl.convert_layout(total_R, gl.SliceLayout(1, acc_layout))[:, None]
                    store_rows(
                        mixed_RD, output, query_tile, start, query_len, first_row, head, output_stride,
                        output_head_stride, WHICH, G, D,
                    )  # fmt: skip


@gluon.jit(do_not_specialize=_ANY)
def prefill_kernel(
    query, keys, values, value, output, parts, part_logs, tables, starts, contexts, plan,
    query_stride, query_head_stride, output_stride, output_head_stride, block_rows, head_rows,
    num_tiles: gl.int32, num_rounds: gl.int32, table_stride: gl.int32, num_sequences: gl.int32,
    scale: gl.float32,
    H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, S: gl.constexpr, ROW: gl.constexpr, WORDS: gl.constexpr,
    GROUPS: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr, PIN: gl.constexpr,
    PLANNED: gl.constexpr,
) -> None:  # fmt: skip
    """Tiles of rows of a KV head; specialized on the strides of a model, never on what a step changes."""
    kind: gl.constexpr = query.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    pieces: gl.constexpr = STAGES * (D // 64) * (BN // S)
    query_tiles = gl.allocate_shared_memory(kind, [GROUPS, 64, D], swizzled)
    key_pieces = gl.allocate_shared_memory(kind, [pieces, S, 64], swizzled)
    value_pieces = gl.allocate_shared_memory(kind, [pieces, S, 64], swizzled)
    key_tiles = key_pieces._reinterpret(kind, [STAGES, BN, D], swizzled)
    value_tiles = value_pieces._reinterpret(kind, [STAGES, BN, D], swizzled)
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    key_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    key_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    value_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    value_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    turns = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], barriers)
    for stage in gl.static_range(STAGES):
        mbarrier.init(key_full.index(stage), count=1)
        mbarrier.init(value_full.index(stage), count=1)
        mbarrier.init(key_empty.index(stage), count=GROUPS)
        mbarrier.init(value_empty.index(stage), count=GROUPS)
    if TURNS:  # else its memory has other uses, which must not find a barrier there
        for which in gl.static_range(GROUPS):
            mbarrier.init(turns.index(which), count=1)
    fence_async_shared()
    if PLANNED:
        gdc_launch_dependents()
    factor = scale * _LOG2_E
    BM: gl.constexpr = 64 * GROUPS
    if GROUPS == 2:  # registers of 128 threads: 504 in all, or 512
        gl.warp_specialize(
            [
                (_consume, (
                    query, output, parts, part_logs, query_tiles, key_tiles, value_tiles, key_full, key_empty,
                    value_full, value_empty, turns, starts, contexts, plan, num_sequences, num_tiles, num_rounds,
                    query_stride, query_head_stride, output_stride, output_head_stride, factor, gl.constexpr(0),
                    H, G, D, BM, BN, STAGES, TURNS, PIN, PLANNED,
                )),
                (_consume, (
                    query, output, parts, part_logs, query_tiles, key_tiles, value_tiles, key_full, key_empty,
                    value_full, value_empty, turns, starts, contexts, plan, num_sequences, num_tiles, num_rounds,
                    query_stride, query_head_stride, output_stride, output_head_stride, factor, gl.constexpr(1),
                    H, G, D, BM, BN, STAGES, TURNS, PIN, PLANNED,
                )),
                (produce, (
                    keys, values, value, key_pieces, value_pieces, key_full, key_empty, value_full, value_empty,
                    tables, starts, contexts, plan, num_sequences, num_tiles, num_rounds, table_stride, block_rows,
                    head_rows, H, G, D, S, ROW, WORDS, BM, BN, STAGES, PLANNED,
                )),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    query, output, parts, part_logs, query_tiles, key_tiles, value_tiles, key_full, key_empty,
                    value_full, value_empty, turns, starts, contexts, plan, num_sequences, num_tiles, num_rounds,
                    query_stride, query_head_stride, output_stride, output_head_stride, factor, gl.constexpr(0),
                    H, G, D, BM, BN, STAGES, TURNS, PIN, PLANNED,
                )),
                (_consume, (
                    query, output, parts, part_logs, query_tiles, key_tiles, value_tiles, key_full, key_empty,
                    value_full, value_empty, turns, starts, contexts, plan, num_sequences, num_tiles, num_rounds,
                    query_stride, query_head_stride, output_stride, output_head_stride, factor, gl.constexpr(1),
                    H, G, D, BM, BN, STAGES, TURNS, PIN, PLANNED,
                )),
                (_consume, (
                    query, output, parts, part_logs, query_tiles, key_tiles, value_tiles, key_full, key_empty,
                    value_full, value_empty, turns, starts, contexts, plan, num_sequences, num_tiles, num_rounds,
                    query_stride, query_head_stride, output_stride, output_head_stride, factor, gl.constexpr(2),
                    H, G, D, BM, BN, STAGES, TURNS, PIN, PLANNED,
                )),
                (produce, (
                    keys, values, value, key_pieces, value_pieces, key_full, key_empty, value_full, value_empty,
                    tables, starts, contexts, plan, num_sequences, num_tiles, num_rounds, table_stride, block_rows,
                    head_rows, H, G, D, S, ROW, WORDS, BM, BN, STAGES, PLANNED,
                )),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )  # fmt: skip


def variants() -> list[Variant]:
    """None of its own: they are those of the launches."""
    return []
