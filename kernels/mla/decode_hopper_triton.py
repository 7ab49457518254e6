# mypy: ignore-errors
"""Attention of 64 rows of queries over latents: the form of `mla_decode` for Hopper alone.

What is computed, and how it is divided, is as `kernels.mla.decode_triton` says. Here the warps of a program are
specialized: one warp copies blocks of the pool to shared memory by TMA, two warpgroups compute. Each has half of a
tile's positions in the scores, and half of the columns in the sums; they exchange softmax weights through shared
memory. Triton would have both compute all scores.

A box of TMA takes 64 columns of a block, a swizzle's width, and is put where a tile of 64 positions has them: a tile
lies as pieces of [64, 64], so the boxes of its blocks lie one after the other. Of the tile that reaches past the
sequence's end, the rows past it are made zero where they lie, for they may be NaN.

It is written in Gluon, which Triton's interpreter cannot run: `fits` says where it may be used.

Shapes: R rows of queries (64), T positions of a tile (64), C length of a latent, P columns that a position turned.
"""

# mypy: ignore-errors

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from baton.kernels.attention.block_tables import in_words
from baton.kernels.attention.merge_triton import merge_parts
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.mla.decode_plan import MLALaunch
from baton.kernels.mla.decode_triton import STRIDE_UNIT
from baton.kernels.variant import Variant

ROWS = 64
TILE = 64
LATENT_DIM, TURNED_DIM = 512, 64
BLOCK_SIZES = (16, 32, 64)
_STAGES = 2
_LOG2_E = gl.constexpr(1.4426950408889634)
_UNIT = gl.constexpr(STRIDE_UNIT)
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


@gluon.jit
def _produce(
    box, latent_pieces, turned_pieces, full, empty, table, first, end, last_block, block_rows,
    S: gl.constexpr, WORDS: gl.constexpr, TILE: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that copies: tiles [first, end) of a sequence."""
    blocks: gl.constexpr = TILE // S
    panels: gl.constexpr = C // 64
    for at in range(first, end):
        count = at - first
        stage = count % STAGES
        rows = ()
        for b in gl.static_range(blocks):
            block = gl.load(table + gl.minimum(at * blocks + b, last_block) * WORDS)
            rows = rows + (block * block_rows,)  # noqa: RUF005
        mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), TILE * (C + 64) * 2)
        for panel in gl.static_range(panels):
            for b in gl.static_range(blocks):
                piece = latent_pieces.index((stage * panels + panel) * blocks + b)
                tma.async_copy_global_to_shared(box, [rows[b], panel * 64], full.index(stage), piece)
        for b in gl.static_range(blocks):
            piece = turned_pieces.index(stage * blocks + b)
            tma.async_copy_global_to_shared(box, [rows[b], C], full.index(stage), piece)


@gluon.jit
def _clear(latent_panels, stage, num_left, TILE: gl.constexpr, C: gl.constexpr):
    """Make the rows of a tile past the first `num_left` zero."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    place_T = gl.arange(0, TILE, gl.SliceLayout(1, layout))
    panels: gl.constexpr = C // 64
    for panel in gl.static_range(panels):
        piece = latent_panels.index(stage * panels + panel)
        part_TE = piece.load(layout)
        piece.store(gl.where((place_T < num_left)[:, None], part_TE, gl.zeros_like(part_TE)))
    fence_async_shared()


@gluon.jit
def _consume(
    query, query_latent, query_turned, latent_tiles, turned_tiles, latent_panels, weights, full, empty,
    positions, out, parts, part_logs, first, end, context_len, first_row, first_out, num_rows, num_heads, num_parts,
    part, query_stride_q, query_stride_a, position_stride_q, factor,
    C: gl.constexpr, TILE: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The two warpgroups that multiply and weigh."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, TILE // 2, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, C // 2, 16])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    kind: gl.constexpr = query_latent.dtype
    wide_R = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, wide))
    at_R = wide_R // num_heads * query_stride_q + wide_R % num_heads * query_stride_a
    column_C = gl.arange(0, C, gl.SliceLayout(0, wide))
    query_latent.store(gl.load(query + at_R[:, None] + column_C[None, :], mask=(wide_R < num_rows)[:, None], other=0.0))
    narrow_R = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, narrow))
    at_R = narrow_R // num_heads * query_stride_q + narrow_R % num_heads * query_stride_a
    column_P = C + gl.arange(0, 64, gl.SliceLayout(0, narrow))
    is_row_R1 = (narrow_R < num_rows)[:, None]
    query_turned.store(gl.load(query + at_R[:, None] + column_P[None, :], mask=is_row_R1, other=0.0))
    fence_async_shared()
    _barrier()
    row_R = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, scores))
    position_at = positions + row_R // num_heads * position_stride_q
    position_R = gl.load(position_at, mask=row_R < num_rows, other=-1).to(gl.int32)
    place_T = gl.arange(0, TILE, gl.SliceLayout(0, scores))
    most_R = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, scores))
    total_RT = gl.zeros([ROWS, TILE], gl.float32, scores)
    mixed_RC = gl.zeros([ROWS, C], gl.float32, acc_layout)
    for at in range(first, end):
        count = at - first
        stage = count % STAGES
        mbarrier.wait(full.index(stage), (count // STAGES) & 1)
        if (at + 1) * TILE > context_len:
            _clear(latent_panels, stage, context_len - at * TILE, TILE, C)
            _barrier()
        zero_RT = gl.zeros([ROWS, TILE], gl.float32, scores)
        latent_CT = latent_tiles.index(stage).permute((1, 0))
        score_RT = warpgroup_mma(query_latent, latent_CT, zero_RT, use_acc=False, is_async=True)
        score_RT = warpgroup_mma(query_turned, turned_tiles.index(stage).permute((1, 0)), score_RT, is_async=True)
        score_RT = warpgroup_mma_wait(0, deps=[score_RT])
        is_seen_RT = (at * TILE + place_T)[None, :] <= position_R[:, None]
        score_RT = gl.where(is_seen_RT, score_RT, float("-inf"))
        new_R = gl.maximum(most_R, gl.max(score_RT, axis=1))
        base_R = gl.where(new_R == float("-inf"), 0.0, new_R * factor)
        weight_RT = gl.exp2(gl.fma(score_RT, gl.full([ROWS, TILE], factor, gl.float32, scores), -base_R[:, None]))
        fade_R = gl.exp2(most_R * factor - base_R)
        most_R = new_R
        total_RT = total_RT * fade_R[:, None] + weight_RT
        weights.store(weight_RT.to(kind))
        mixed_RC = mixed_RC * gl.convert_layout(fade_R, gl.SliceLayout(1, acc_layout))[:, None]
        fence_async_shared()
        _barrier()
        mixed_RC = warpgroup_mma(weights, latent_tiles.index(stage), mixed_RC, is_async=True)
        mixed_RC = warpgroup_mma_wait(0, deps=[mixed_RC])
        _barrier()  # for both warpgroups: their memory is one
        mbarrier.arrive(empty.index(stage), count=1)
    total_R = gl.sum(total_RT, axis=1)
    is_seen_R = total_R > 0
    total_R = gl.where(is_seen_R, total_R, 1.0)
    mixed_RC = mixed_RC * (1.0 / gl.convert_layout(total_R, gl.SliceLayout(1, acc_layout)))[:, None]
    if num_parts == 1:
        _barrier()
        query_latent.store(mixed_RC.to(kind))  # through the place of the queries, to rows of whole sectors
        _barrier()
        result_RC = query_latent.load(wide)
        wide_R = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, wide))
        out_R = (first_out + wide_R).to(gl.int64) * C
        gl.store(out + out_R[:, None] + column_C[None, :], result_RC, mask=(wide_R < num_rows)[:, None])
    else:
        log_R = gl.where(is_seen_R, most_R * factor + gl.log2(total_R), float("-inf"))
        gl.store(part_logs + (first_out + row_R) * num_parts + part, log_R, mask=row_R < num_rows)
        mixed_R = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, acc_layout))
        mixed_C = gl.arange(0, C, gl.SliceLayout(0, acc_layout))
        part_R = ((first_out + mixed_R) * num_parts + part).to(gl.int64) * C
        gl.store(parts + part_R[:, None] + mixed_C[None, :], mixed_RC, mask=(mixed_R < num_rows)[:, None])


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
    STAGES: gl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows, parts, sequences); what goes where is as of `mla_attend_kernel`."""
    kind: gl.constexpr = query.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    row_tile = gl.program_id(0)
    part = gl.program_id(1)
    sequence = gl.program_id(2)
    num_rows = num_queries * num_heads
    positions += sequence.to(gl.int64) * position_stride_b
    furthest = gl.load(positions).to(gl.int32)
    for index in range(1, num_queries):
        furthest = gl.maximum(furthest, gl.load(positions + index * position_stride_q).to(gl.int32))
    context_len = gl.maximum(gl.minimum(furthest + 1, max_context_len), 0)
    num_tiles = (context_len + TILE - 1) // TILE
    each = (num_tiles + num_parts - 1) // num_parts
    first = part * each
    end = gl.minimum(first + each, num_tiles)
    first_row = row_tile * ROWS
    first_out = sequence * num_rows
    if (first >= end) & (part > 0):
        narrow: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
        row_R = first_row + gl.arange(0, ROWS, narrow)
        nothing_R = gl.full([ROWS], float("-inf"), gl.float32, narrow)
        gl.store(part_logs + (first_out + row_R) * num_parts + part, nothing_R, mask=row_R < num_rows)
        return
    pieces: gl.constexpr = STAGES * (TILE // S)
    panels: gl.constexpr = C // 64
    query_latent = gl.allocate_shared_memory(kind, [ROWS, C], swizzled)
    query_turned = gl.allocate_shared_memory(kind, [ROWS, 64], swizzled)
    weights = gl.allocate_shared_memory(kind, [ROWS, TILE], swizzled)
    latent_pieces = gl.allocate_shared_memory(kind, [pieces * panels, S, 64], swizzled)
    turned_pieces = gl.allocate_shared_memory(kind, [pieces, S, 64], swizzled)
    latent_tiles = latent_pieces._reinterpret(kind, [STAGES, TILE, C], swizzled)
    latent_panels = latent_pieces._reinterpret(kind, [STAGES * panels, TILE, 64], swizzled)
    turned_tiles = turned_pieces._reinterpret(kind, [STAGES, TILE, 64], swizzled)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    # Strides are told in units, so that the compiler knows rows to begin at 16 bytes.
    query += sequence.to(gl.int64) * (query_stride_b.to(gl.int64) * _UNIT)
    table = tables + sequence.to(gl.int64) * table_stride
    last_block = gl.maximum(context_len - 1, 0) // S
    factor = scale * _LOG2_E
    gl.warp_specialize(
        [
            (_consume, (
                query, query_latent, query_turned, latent_tiles, turned_tiles, latent_panels, weights, full, empty,
                positions, out, parts, part_logs, first, end, context_len, first_row, first_out, num_rows, num_heads,
                num_parts, part, query_stride_q * _UNIT, query_stride_a * _UNIT, position_stride_q, factor,
                C, TILE, ROWS, STAGES,
            )),
            (_produce, (
                box, latent_pieces, turned_pieces, full, empty, table, first, end, last_block, block_rows,
                S, WORDS, TILE, C, STAGES,
            )),
        ],
        [1],
        [56],
    )  # fmt: skip


@functools.cache
def _is_hopper(device_index: int | None) -> bool:
    if device_index is None or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device_index)[0] == 9


def fits(query_BQAX: torch.Tensor, rows_NSX: torch.Tensor, latent_dim: int) -> bool:
    """Whether this form can do it: on Hopper, compiled, DeepSeek's latents, and a pool that TMA can take as rows."""
    num_blocks, block_size, row_len = rows_NSX.shape
    block_stride = rows_NSX.stride(0)
    return (
        _is_hopper(query_BQAX.device.index)
        and (latent_dim, row_len - latent_dim) == (LATENT_DIM, TURNED_DIM)
        and block_size in BLOCK_SIZES
        and block_stride % row_len == 0
        and num_blocks * block_stride // row_len < 2**31
    )


_LAYOUT = gl.NVMMASharedLayout(128, 16, 2)


def launch(
    query_BQAX: torch.Tensor,
    rows_NSX: torch.Tensor,
    block_tables_BM: torch.Tensor,
    positions_BQ: torch.Tensor,
    how: MLALaunch,
) -> torch.Tensor:
    """Attention -> [B, Q, A, C]; everything was checked before, and fits."""
    num_sequences, num_queries, num_heads, row_len = query_BQAX.shape
    num_blocks, block_size, _ = rows_NSX.shape
    device, block_rows = query_BQAX.device, rows_NSX.stride(0) // row_len
    out_BQAC = query_BQAX.new_empty(num_sequences, num_queries, num_heads, how.latent_dim)
    parts = part_logs = torch.empty(1, dtype=torch.float32, device=device)  # never touched if there is one part
    if how.num_parts > 1:
        num_rows = num_sequences * num_queries * num_heads * how.num_parts
        parts = torch.empty(num_rows, how.latent_dim, dtype=torch.float32, device=device)
        part_logs = torch.empty(num_rows, dtype=torch.float32, device=device)
    words = block_tables_BM.element_size() // 4
    tables = in_words(block_tables_BM) if words == 2 else block_tables_BM
    all_rows = (num_blocks - 1) * block_rows + block_size
    box = TensorDescriptor(rows_NSX, [all_rows, row_len], [row_len, 1], [block_size, 64], _LAYOUT)
    arguments = (
        query_BQAX, box, tables, positions_BQ, out_BQAC, parts, part_logs,
        how.scale, tables.stride(0), *positions_BQ.stride(),
        *(stride // STRIDE_UNIT for stride in query_BQAX.stride()[:3]), block_rows,
        num_queries, num_heads, how.num_parts, how.max_context_len,
    )  # fmt: skip
    grid = (-(-num_queries * num_heads // ROWS), how.num_parts, num_sequences)
    with torch.cuda.device_of(query_BQAX):
        _launch_attend(grid, arguments, _constants(how.latent_dim, block_size, words))
        if how.num_parts > 1:
            merge_parts(parts, part_logs, out_BQAC, how.num_parts, fixed_len=False, pdl=False)
    return out_BQAC


_launch_attend = Launcher(mla_hopper_kernel)


@functools.cache
def _constants(latent_dim: int, block_size: int, words: int) -> Constants:
    return Constants({
        "C": latent_dim, "S": block_size, "WORDS": words, "TILE": TILE, "ROWS": ROWS, "STAGES": _STAGES, "num_warps": 8,
    })  # fmt: skip


_INTEGERS = (
    "table_stride", "position_stride_b", "position_stride_q", "query_stride_b", "query_stride_q", "query_stride_a",
    "block_rows", "num_queries", "num_heads", "num_parts", "max_context_len",
)  # fmt: skip


def variants() -> list[Variant]:
    """What serving launches, in blocks of 16 and of 64."""
    return [
        Variant(
            name=f"mla_decode hopper S={block_size}",
            kernel=mla_hopper_kernel,
            types={
                **dict.fromkeys(("query", "out"), "*bf16"),
                "box": f"tensordesc<bf16[{block_size}, 64],{_LAYOUT!r}>",
                "tables": "*i32",
                "positions": "*i64",
                **dict.fromkeys(("parts", "part_logs"), "*fp32"),
                **dict.fromkeys(_INTEGERS, "i32"),
                "scale": "fp32",
            },
            constants={
                "C": LATENT_DIM, "S": block_size, "WORDS": 2, "TILE": TILE, "ROWS": ROWS, "STAGES": _STAGES,
            },
            aligned=("query", "out", "parts", "part_logs"),
            num_warps=8,
            contains=("HGMMA", "UTMALDG", "USETMAXREG"),
            lacks=("HMMA",),
            max_registers=168,
            may_spill=True,  # where the warps branch; the walk has all its tiles in registers
            on_amd=False,
        )
        for block_size in (16, 64)
    ]  # fmt: skip
