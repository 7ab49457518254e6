# mypy: ignore-errors
"""The Triton kernel of `attention_decode`, which attends over a part of each sequence.

A program takes the rows of one KV head of one sequence (Q queries times G heads, at most 64 of them), and one part of
the sequence's positions. How many parts there are is the host's choice, from bounds; where they begin follows from the
sequence's own length, on the device. So a graph may replay it for any lengths, and a part that a short sequence does
not need ends at once.

Swapped, K and V are the left operands of both matmuls and the rows the right ones: Hopper's wgmma takes 64 of the
former and as few as 16 of the latter. Plain, 16 or 32 rows are the left operands of mma.sync, and 64 those of wgmma.
Float8 is widened to float16, which holds every value of it, in half the instructions that bfloat16 takes: on its way
through shared memory, or directly, in the registers of the matmuls (`attention_float8_triton`).

Slots past a sequence's last position may hold NaN: their scores are replaced, and their values are not loaded.

Shapes: T keys of a tile, R rows (padded), D head size.
"""

import functools

import torch
import triton
import triton.language as tl

from baton.kernels import tuning
from baton.kernels.attention import decode_plan as attention_plan
from baton.kernels.attention.decode_plan import Launch
from baton.kernels.attention.float8_triton import BITS_SCALE, attend_apart, attend_together
from baton.kernels.attention.merge_triton import merge_parts
from baton.kernels.attention.softmax_triton import softmax_step
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.variant import Variant

MAX_QUERIES = 32  # of a sequence
STRIDE_UNIT = 16  # strides are told in these, so that the compiler knows them to be multiples

_MAX_QUERIES = tl.constexpr(MAX_QUERIES)
_UNIT = tl.constexpr(STRIDE_UNIT)
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _dequantized(kv_TD, DTYPE: tl.constexpr, THROUGH_SHARED: tl.constexpr):
    """K or V in the type of the matmuls.

    Float8 is widened as it was loaded, 16 bytes of a row by each thread, and reaches the layout of a matmul through
    shared memory. The compiler would rather bring float8 into that layout, byte by byte; it does not move what it does
    not understand.
    """
    wide_TD = kv_TD.to(DTYPE)
    if THROUGH_SHARED and not _INTERPRETED:
        wide_TD = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [wide_TD], dtype=wide_TD.dtype, is_pure=False, pack=2
        )
    return wide_TD


@triton.jit
def sequence_bound(positions, position_stride_q, num_queries, max_context_len):
    """Positions that the sequence's furthest row sees; 0 if none sees any."""
    index = tl.arange(0, _MAX_QUERIES)
    mask = index < num_queries
    position = tl.load(positions + index * position_stride_q, mask=mask, other=-1)
    return tl.minimum(tl.max(position).to(tl.int32) + 1, max_context_len)


@triton.jit
def sequence_part(context_len, part, num_parts, part_tiles, TILE: tl.constexpr):
    """First tile of a part and the one after its last; a part is given tiles, or an equal share of the sequence."""
    num_tiles = tl.cdiv(context_len, TILE)
    each = tl.where(part_tiles > 0, part_tiles, tl.cdiv(num_tiles, num_parts))
    return part * each, tl.minimum(part * each + each, num_tiles)


@triton.jit
def _add_tile(
    query_RD, key_TD, value_TD, seen_T, position_R, score_scale, most_R, total, mixed,
    SWAP: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """The sums with one more tile of keys."""
    if SWAP:
        score = tl.dot(key_TD, tl.trans(query_RD), input_precision="ieee")
        score = tl.where(seen_T[:, None] <= position_R[None, :], score, float("-inf"))
        weight, most_R, fade = softmax_step(score, most_R, score_scale, 0)
        total = total * fade + weight
        mixed = mixed * fade
        mixed = tl.dot(tl.trans(value_TD), weight.to(value_TD.dtype), mixed, input_precision="ieee")
    else:
        score = tl.dot(query_RD, tl.trans(key_TD), input_precision="ieee")
        score = tl.where(seen_T[None, :] <= position_R[:, None], score, float("-inf"))
        weight, most_R, fade = softmax_step(score, most_R, score_scale, 1)
        total = total * fade + (weight if SPREAD else tl.sum(weight, axis=1)[:, None])
        mixed = mixed * fade
        mixed = tl.dot(weight.to(value_TD.dtype), value_TD, mixed, input_precision="ieee")
    return most_R, total, mixed


@triton.jit
def store_part(out, parts, part_logs, out_R, is_row_R, num_parts, part, mixed_RD, log_R, D: tl.constexpr):
    """With one part, the result; else the part and the logarithms of its weights."""
    column_D = tl.arange(0, D)
    if num_parts == 1:
        tl.store(out + out_R.to(tl.int64)[:, None] * D + column_D[None, :], mixed_RD, mask=is_row_R[:, None])
    else:
        part_R = out_R * num_parts + part
        tl.store(parts + part_R.to(tl.int64)[:, None] * D + column_D[None, :], mixed_RD, mask=is_row_R[:, None])
        tl.store(part_logs + part_R, log_R, mask=is_row_R)


@triton.jit
def attend_tiles(
    query_RD, position_R, key, value, tables, first, end, last, stride_n, score_scale,
    D: tl.constexpr, BLOCK: tl.constexpr, JOINED: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    SWAP: tl.constexpr, VIA_SHARED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attention of rows over tiles [first, end): maxima, sums of weights, and sums of values, [R], [R], [R, D]."""
    # Sums of weights are added up at the end where the keys of a row are spread over warps.
    SPREAD: tl.constexpr = ROWS < 64
    most_R = tl.full([ROWS], float("-inf"), tl.float32)
    if SWAP:
        total = tl.zeros([TILE, ROWS], tl.float32)
        mixed = tl.zeros([D, ROWS], tl.float32)
    else:
        total = tl.zeros([ROWS, TILE if SPREAD else 1], tl.float32)
        mixed = tl.zeros([ROWS, D], tl.float32)
    place_T = tl.arange(0, TILE)
    slot_TD = (place_T % BLOCK)[:, None] * D + tl.arange(0, D)[None, :]
    last_column = last // BLOCK
    block_T = tl.load(tables + tl.minimum((first * TILE + place_T) // BLOCK, last_column))
    for tile in tl.range(first, end, num_stages=STAGES):
        seen_T = tile * TILE + place_T
        offset_T = block_T.to(tl.int32).to(tl.int64) * stride_n
        if TILE < BLOCK:
            offset_T += tile * TILE % BLOCK * D
        key_at = key + offset_T[:, None] + slot_TD
        value_at = key_at + BLOCK * D if JOINED else value + offset_T[:, None] + slot_TD
        key_TD = _dequantized(tl.load(key_at), query_RD.dtype, VIA_SHARED)
        value_TD = tl.load(value_at, mask=(seen_T <= last)[:, None], other=0.0)
        value_TD = _dequantized(value_TD, query_RD.dtype, VIA_SHARED)
        # The next tile's blocks, a step ahead: keys do not wait for them.
        block_T = tl.load(tables + tl.minimum(((tile + 1) * TILE + place_T) // BLOCK, last_column))
        most_R, total, mixed = _add_tile(
            query_RD, key_TD, value_TD, seen_T, position_R, score_scale, most_R, total, mixed, SWAP, SPREAD
        )
    if SWAP:
        total_R, mixed_RD = tl.sum(total, axis=0), tl.trans(mixed)
    else:
        total_R, mixed_RD = tl.sum(total, axis=1), mixed
    return most_R, total_R, mixed_RD


@triton.jit(
    do_not_specialize=[
        "tables", "positions", "key_scale", "value_scale", "table_stride", "position_stride_b", "position_stride_q",
        "query_stride_b", "query_stride_q", "query_stride_a", "key_stride_n", "key_stride_h", "num_queries", "group",
        "num_parts", "part_tiles", "max_context_len", "scale_stride", "scale",
    ]
)  # fmt: skip
def attend_kernel(
    query, key, value, tables, positions, key_scale, value_scale, out, parts, part_logs,
    scale: tl.float32, table_stride: tl.int32, position_stride_b: tl.int32, position_stride_q: tl.int32,
    query_stride_b: tl.int32, query_stride_q: tl.int32, query_stride_a: tl.int32, key_stride_n: tl.int32,
    key_stride_h: tl.int32, scale_stride: tl.int32, num_queries: tl.int32, group: tl.int32, num_parts: tl.int32,
    part_tiles: tl.int32, max_context_len: tl.int32,
    D: tl.constexpr, BLOCK: tl.constexpr, JOINED: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    SWAP: tl.constexpr, SCALED: tl.constexpr, DIRECT: tl.constexpr, APART: tl.constexpr, VIA_SHARED: tl.constexpr,
    PDL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (KV heads times tiles of rows, parts, sequences).

    With one part, the result goes to `out` [B, Q, A, D]; else to `parts` [B, Q, A, num_parts, D] and the logarithms of
    the weights to `part_logs` [B, Q, A, num_parts].
    """
    num_rows = num_queries * group
    row_tiles = tl.cdiv(num_rows, ROWS)
    head, row_tile = tl.program_id(0) // row_tiles, tl.program_id(0) % row_tiles
    num_heads = tl.num_programs(0) // row_tiles * group
    part, sequence = tl.program_id(1), tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    positions += sequence.to(tl.int64) * position_stride_b
    context_len = sequence_bound(positions, position_stride_q, num_queries, max_context_len)
    first, end = sequence_part(context_len, part, num_parts, part_tiles, TILE)
    row_R = row_tile * ROWS + tl.arange(0, ROWS)
    query_R, head_R = row_R // group, head * group + row_R % group
    if (first >= end) & (part > 0):
        log_R = tl.full([ROWS], float("-inf"), tl.float32)
        out_R = (sequence * num_queries + query_R) * num_heads + head_R
        tl.store(part_logs + out_R * num_parts + part, log_R, mask=row_R < num_rows)
        return
    position_R = tl.load(positions + query_R * position_stride_q, mask=row_R < num_rows, other=-1).to(tl.int32)
    query += sequence.to(tl.int64) * (query_stride_b.to(tl.int64) * _UNIT)
    query_R = query_R * (query_stride_q * _UNIT) + head_R * (query_stride_a * _UNIT)
    score_scale = scale * _LOG2_E
    if SCALED:
        score_scale *= tl.load(key_scale + head * scale_stride)
    head_offset = head.to(tl.int64) * (key_stride_h.to(tl.int64) * _UNIT)
    key, value = key + head_offset, value + head_offset
    tables += sequence.to(tl.int64) * table_stride
    last = tl.maximum(context_len - 1, 0)
    is_row_R1 = (row_R < num_rows)[:, None]
    if DIRECT:
        score_scale *= BITS_SCALE if DIRECT == 2 else 1.0
        even_at = query + query_R[:, None] + 2 * tl.arange(0, D // 2)[None, :]
        even_RC = tl.load(even_at, mask=is_row_R1, other=0.0).to(tl.float16)
        odd_RC = tl.load(even_at + 1, mask=is_row_R1, other=0.0).to(tl.float16)
        pair_stride_n = key_stride_n * (_UNIT // 2)
        if APART:
            most_R, total_R, mixed_RD = attend_apart(
                even_RC, odd_RC, position_R, key, value, tables, first, end, last, pair_stride_n, score_scale,
                D, BLOCK, JOINED, TILE, ROWS, APART, DIRECT == 2, VIA_SHARED, STAGES,
            )  # fmt: skip
        else:
            most_R, total_R, mixed_RD = attend_together(
                even_RC, odd_RC, position_R, key, value, tables, first, end, last, pair_stride_n, score_scale,
                D, BLOCK, JOINED, TILE, ROWS, DIRECT == 2, VIA_SHARED, STAGES,
            )  # fmt: skip
    else:
        query_RD = tl.load(query + query_R[:, None] + tl.arange(0, D)[None, :], mask=is_row_R1, other=0.0)
        if SCALED:
            query_RD = query_RD.to(tl.float16)
        stride_n = key_stride_n.to(tl.int64) * _UNIT
        most_R, total_R, mixed_RD = attend_tiles(
            query_RD, position_R, key, value, tables, first, end, last, stride_n, score_scale,
            D, BLOCK, JOINED, TILE, ROWS, SWAP, VIA_SHARED, STAGES,
        )  # fmt: skip
    is_seen_R = total_R > 0
    total_R = tl.where(is_seen_R, total_R, 1.0)
    log_R = tl.where(is_seen_R, most_R * score_scale + tl.log2(total_R), float("-inf"))
    share_R = 1.0 / total_R
    if SCALED:
        share_R *= tl.load(value_scale + head * scale_stride)
    # `end` is never negative, which the compiler does not know: else it would keep the places of rows through the loop.
    row_R = row_tile * ROWS + tl.arange(0, ROWS) + tl.minimum(end, 0)
    out_R = (sequence * num_queries + row_R // group) * num_heads + head * group + row_R % group
    store_part(out, parts, part_logs, out_R, row_R < num_rows, num_parts, part, mixed_RD * share_R[:, None], log_R, D)


def launch(
    query_BQAD: torch.Tensor,
    key_NHSD: torch.Tensor,
    value_NHSD: torch.Tensor,
    block_tables_BM: torch.Tensor,
    positions_BQ: torch.Tensor,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    how: Launch,
) -> torch.Tensor:
    """Attention -> [B, Q, A, D]; everything was checked before."""
    num_sequences, num_queries, num_heads, head_dim = query_BQAD.shape
    num_kv_heads, block_size = key_NHSD.shape[1:3]
    group = num_heads // num_kv_heads
    device = query_BQAD.device
    out_BQAD = torch.empty_like(query_BQAD, memory_format=torch.contiguous_format)
    # What stands for tensors that are not there: never touched, but of their type, so that one binary serves all.
    parts = part_logs = torch.empty(1, dtype=torch.float32, device=device)
    scaled = key_scale is not None
    scales = (key_scale, value_scale) if scaled else (parts, parts)
    if how.num_parts > 1:
        num_rows = num_sequences * num_queries * num_heads * how.num_parts
        parts = torch.empty(num_rows, head_dim, dtype=torch.float32, device=device)
        part_logs = torch.empty(num_rows, dtype=torch.float32, device=device)
    part_bytes = block_size * head_dim * key_NHSD.element_size()
    joined = value_NHSD.data_ptr() == key_NHSD.data_ptr() + part_bytes
    constants = _constants(head_dim, block_size, joined, scaled, query_BQAD.is_cuda, how)
    query_strides, key_strides = query_BQAD.stride(), key_NHSD.stride()
    arguments = (
        query_BQAD, key_NHSD, value_NHSD, block_tables_BM, positions_BQ, *scales, out_BQAD, parts, part_logs,
        how.scale, block_tables_BM.stride(0), *positions_BQ.stride(),
        query_strides[0] // STRIDE_UNIT, query_strides[1] // STRIDE_UNIT, query_strides[2] // STRIDE_UNIT,
        key_strides[0] // STRIDE_UNIT, key_strides[1] // STRIDE_UNIT,
        1 if key_scale is not None and key_scale.numel() > 1 else 0,
        num_queries, group, how.num_parts, how.part_len // how.tile, how.max_context_len,
    )  # fmt: skip
    grid = (num_kv_heads * -(-num_queries * group // how.rows), how.num_parts, num_sequences)
    with torch.cuda.device_of(query_BQAD):
        _launch_attend(grid, arguments, constants)
        if how.num_parts > 1:
            pdl = bool(constants.by_name["PDL"])
            merge_parts(parts, part_logs, out_BQAD, how.num_parts, fixed_len=how.part_len > 0, pdl=pdl)
    return out_BQAD


_launch_attend = Launcher(attend_kernel)


def _constants(head_dim: int, block_size: int, joined: bool, scaled: bool, on_cuda: bool, how: Launch) -> Constants:
    return _constants_of(
        head_dim, block_size, joined, scaled, on_cuda, how.tile, how.rows, how.swap, how.stages, how.warps, how.pdl,
        how.direct, how.apart, how.registers,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _constants_of(
    head_dim: int, block_size: int, joined: bool, scaled: bool, on_cuda: bool, tile: int, rows: int, swap: bool,
    stages: int, warps: int, pdl: bool, direct: int, apart: bool, registers: int,
) -> Constants:  # fmt: skip
    """Of what changes from step to step, the number of parts and the bound, nothing is a constant."""
    on_nvidia = torch.version.hip is None
    limit = {"maxnreg": registers} if registers and on_cuda and on_nvidia else {}
    return Constants({
        "D": head_dim, "BLOCK": block_size, "JOINED": joined, "TILE": tile, "ROWS": rows, "SWAP": swap,
        "SCALED": scaled, "DIRECT": direct if scaled else 0, "APART": warps if apart else 0,
        "VIA_SHARED": scaled and on_nvidia, "PDL": pdl and on_cuda and on_nvidia, "STAGES": stages,
        "num_warps": warps, "num_stages": stages, **limit,
    })  # fmt: skip


_INTEGERS = (
    "table_stride", "position_stride_b", "position_stride_q", "query_stride_b", "query_stride_q", "query_stride_a",
    "key_stride_n", "key_stride_h", "scale_stride", "num_queries", "group", "num_parts", "part_tiles",
    "max_context_len",
)  # fmt: skip
_KINDS = {"fp8": "fp8e4nv", "bf16": "bf16"}
# (rows of a KV head, D, KV, invariant): those of the shapes that are measured, and the tiny model's.
_SERVED = (
    (4, 128, "bf16", False), (32, 128, "bf16", False), (64, 128, "bf16", False), (8, 256, "bf16", False),
    (32, 256, "bf16", False), (4, 128, "fp8", False), (8, 256, "fp8", False), (32, 256, "fp8", False),
    (4, 32, "bf16", False), (8, 256, "bf16", True),
)  # fmt: skip


def variants() -> list[Variant]:
    """What serving launches by the rule and by the committed table, for blocks of 16."""
    found = {}
    for num_rows, head_dim, kind, invariant in _SERVED:
        rule = attention_plan.invariant_options if invariant else attention_plan.default_options
        variant = _attend_variant(head_dim, kind, rule(num_rows, head_dim, 1 if kind == "fp8" else 2))
        found[variant.name] = variant
    for shape, sizes in tuning.table().get("attention_decode", {}).items():
        _, head_dim, kind = attention_plan.read_table_shape(shape)
        for row in sizes.values():
            variant = _attend_variant(head_dim, kind, attention_plan.options_of_row(row))
            found[variant.name] = variant
    return list(found.values())


def _attend_variant(head_dim: int, kind: str, options: attention_plan.PlanOptions) -> Variant:
    # wgmma takes 64 of something on the left: rows of D as V is read, or rows of queries.
    is_wide = head_dim >= 64 if options.swap else options.rows >= 64
    side = "swapped" if options.swap else "plain"
    way = ("", " direct", " moved")[options.direct] + (" apart" if options.apart else "")
    limit = f" registers={options.registers}" if options.registers else ""
    programs = max(1, options.slots // 132)  # on a multiprocessor
    return Variant(
        name=f"attention_decode rows={options.rows} D={head_dim} {kind} {side}{way} tile={options.tile} "
        f"stages={options.stages} warps={options.warps}{limit}",
        kernel=attend_kernel,
        types={
            **dict.fromkeys(("query", "out"), "*bf16"),
            **dict.fromkeys(("key", "value"), f"*{_KINDS[kind]}"),
            **dict.fromkeys(("tables", "positions"), "*i64"),
            **dict.fromkeys(("key_scale", "value_scale", "parts", "part_logs"), "*fp32"),
            **dict.fromkeys(_INTEGERS, "i32"),
            "scale": "fp32",
        },
        constants={
            "D": head_dim,
            "BLOCK": 16,
            "JOINED": True,
            "TILE": options.tile,
            "ROWS": options.rows,
            "SWAP": options.swap,
            "SCALED": kind == "fp8",
            "DIRECT": options.direct,
            "APART": options.warps if options.apart else 0,
            "VIA_SHARED": kind == "fp8",
            "PDL": False,
            "STAGES": options.stages,
        },
        aligned=("query", "key", "value", "out", "parts", "part_logs"),
        num_warps=options.warps,
        num_stages=options.stages,
        contains=("LDGSTS", "HGMMA") if is_wide else ("LDGSTS", "HMMA"),
        lacks=("HMMA",) if is_wide else (),
        # A table may name more programs than fit: what else is parts for them to take in turns.
        max_registers=min(255, 65_536 // (min(programs, 2) * options.warps * 32)),
        on_amd=options.rows == 16 and kind == "bf16",
        options={"maxnreg": options.registers} if options.registers else {},
    )
