"""The Triton kernels of `attention_decode`: one that attends over a part of each sequence, one that adds the parts up.

A program takes the rows of one KV head of one sequence (Q queries times G heads, at most 64 of them), and one part of
the sequence's positions. How many parts there are is the host's choice, from bounds; where they begin follows from the
sequence's own length, on the device. So a graph may replay it for any lengths, and a part that a short sequence does
not need ends at once.

Swapped, K and V are the left operands of both products and the rows the right ones: Hopper's wgmma takes 64 of the
former and as few as 16 of the latter. Plain, 16 or 32 rows are the left operands of mma.sync, and 64 those of wgmma.
Float8 is widened to float16, which holds every value of it, in half the instructions that bfloat16 takes.

Slots past a sequence's last position may hold NaN: their scores are replaced, and their values are not loaded.

Shapes: T keys of a tile, R rows (padded), D head size, C parts of a step of the sum.
"""

import torch
import triton
import triton.language as tl

from baton.kernels import attention_plan, tuning
from baton.kernels.attention_plan import Launch
from baton.kernels.variant import Variant

MAX_QUERIES = 32  # of a sequence
STRIDE_UNIT = 16  # strides are told in these, so that the compiler knows them to be multiples

_MAX_QUERIES = tl.constexpr(MAX_QUERIES)
_UNIT = tl.constexpr(STRIDE_UNIT)
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _widened(kv_TD, DTYPE: tl.constexpr, THROUGH_SHARED: tl.constexpr):
    """K or V in the type of the products.

    Float8 is widened as it was loaded, 16 bytes of a row by each thread, and reaches the layout of a product through
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
def _bound(positions, position_stride_b, position_stride_q, num_queries, max_context_len):
    """Positions that the sequence's furthest row sees; 0 if none sees any."""
    index = tl.arange(0, _MAX_QUERIES)
    mask = index < num_queries
    position = tl.load(positions + index * position_stride_q, mask=mask, other=-1)
    return tl.minimum(tl.max(position).to(tl.int32) + 1, max_context_len)


@triton.jit
def _tiles_of_part(context_len, num_parts, part_tiles, TILE: tl.constexpr):
    """Tiles of every part but the last: given, or an equal share of the sequence."""
    return tl.where(part_tiles > 0, part_tiles, tl.cdiv(tl.cdiv(context_len, TILE), num_parts))


@triton.jit(
    do_not_specialize=[
        "tables", "positions", "key_scale", "value_scale", "table_stride", "position_stride_b", "position_stride_q",
        "query_stride_b", "query_stride_q", "query_stride_a", "key_stride_n", "key_stride_h", "num_queries", "group",
        "num_parts", "part_tiles", "max_context_len", "scale_stride", "scale",
    ]
)  # fmt: skip
def attend_kernel(
    query,
    key,
    value,
    tables,
    positions,
    key_scale,
    value_scale,
    out,
    parts,
    part_logs,
    scale: tl.float32,
    table_stride: tl.int32,
    position_stride_b: tl.int32,
    position_stride_q: tl.int32,
    query_stride_b: tl.int32,
    query_stride_q: tl.int32,
    query_stride_a: tl.int32,
    key_stride_n: tl.int32,
    key_stride_h: tl.int32,
    scale_stride: tl.int32,
    num_queries: tl.int32,
    group: tl.int32,
    num_parts: tl.int32,
    part_tiles: tl.int32,
    max_context_len: tl.int32,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    JOINED: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    SWAP: tl.constexpr,
    SCALED: tl.constexpr,
    VIA_SHARED: tl.constexpr,
    PDL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (KV heads times tiles of rows, parts, sequences).

    With one part, the result goes to `out` [B, Q, A, D]; else to `parts` [B, Q, A, num_parts, D] and the logarithms of
    the weights to `part_logs` [B, Q, A, num_parts].
    """
    row_tiles = tl.cdiv(num_queries * group, ROWS)
    head = tl.program_id(0) // row_tiles
    row_tile = tl.program_id(0) % row_tiles
    num_kv_heads = tl.num_programs(0) // row_tiles
    part = tl.program_id(1)
    sequence = tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    positions += sequence.to(tl.int64) * position_stride_b
    context_len = _bound(positions, position_stride_b, position_stride_q, num_queries, max_context_len)
    tiles_each = _tiles_of_part(context_len, num_parts, part_tiles, TILE)
    first = part * tiles_each
    end = tl.minimum(first + tiles_each, tl.cdiv(context_len, TILE))
    row_R = row_tile * ROWS + tl.arange(0, ROWS)
    query_R = row_R // group
    head_R = head * group + row_R % group
    is_row_R = row_R < num_queries * group
    if (first >= end) & (part > 0):
        log_R = tl.full([ROWS], float("-inf"), tl.float32)
        out_R = (sequence * num_queries + query_R) * (num_kv_heads * group) + head_R
        tl.store(part_logs + out_R * num_parts + part, log_R, mask=is_row_R)
        return
    last = tl.maximum(context_len - 1, 0)
    tables += sequence.to(tl.int64) * table_stride
    place_T = tl.arange(0, TILE)
    last_column = last // BLOCK
    block_T = tl.load(tables + tl.minimum((first * TILE + place_T) // BLOCK, last_column))
    column_D = tl.arange(0, D)
    position_R = tl.load(positions + query_R * position_stride_q, mask=is_row_R, other=-1).to(tl.int32)
    query += sequence.to(tl.int64) * (query_stride_b.to(tl.int64) * _UNIT)
    query_offset_R = query_R * (query_stride_q * _UNIT) + head_R * (query_stride_a * _UNIT)
    query_RD = tl.load(query + query_offset_R[:, None] + column_D[None, :], mask=is_row_R[:, None], other=0.0)
    score_scale = scale * _LOG2_E
    if SCALED:
        score_scale *= tl.load(key_scale + head * scale_stride)
        query_RD = query_RD.to(tl.float16)
    DOT: tl.constexpr = tl.float16 if SCALED else query.dtype.element_ty
    stride_n = key_stride_n.to(tl.int64) * _UNIT
    key_base = key + head.to(tl.int64) * (key_stride_h.to(tl.int64) * _UNIT)
    value_base = value + head.to(tl.int64) * (key_stride_h.to(tl.int64) * _UNIT)
    slot_TD = (place_T % BLOCK)[:, None] * D + column_D[None, :]

    # Sums of weights are added up at the end where the keys of a row are spread over warps.
    SPREAD: tl.constexpr = ROWS < 64
    most_R = tl.full([ROWS], float("-inf"), tl.float32)
    if SWAP:
        total = tl.zeros([TILE, ROWS], tl.float32)
        mixed = tl.zeros([D, ROWS], tl.float32)
    else:
        total = tl.zeros([ROWS, TILE if SPREAD else 1], tl.float32)
        mixed = tl.zeros([ROWS, D], tl.float32)
    for tile in tl.range(first, end, num_stages=STAGES):
        seen_T = tile * TILE + place_T
        offset_T = block_T.to(tl.int32).to(tl.int64) * stride_n
        if TILE < BLOCK:
            offset_T += tile * TILE % BLOCK * D
        key_at = key_base + offset_T[:, None] + slot_TD
        value_at = key_at + BLOCK * D if JOINED else value_base + offset_T[:, None] + slot_TD
        key_TD = _widened(tl.load(key_at), DOT, VIA_SHARED)
        value_TD = _widened(tl.load(value_at, mask=(seen_T <= last)[:, None], other=0.0), DOT, VIA_SHARED)
        # The next tile's blocks, a step ahead: keys do not wait for them.
        block_T = tl.load(tables + tl.minimum(((tile + 1) * TILE + place_T) // BLOCK, last_column))
        if SWAP:
            score = tl.dot(key_TD, tl.trans(query_RD), input_precision="ieee")
            score = tl.where(seen_T[:, None] <= position_R[None, :], score, float("-inf"))
            new_R = tl.maximum(most_R, tl.max(score, axis=0))
            # Rows that have seen nothing yet: the difference of two infinities would be NaN.
            base_R = tl.where(new_R == float("-inf"), 0.0, new_R) * score_scale
            weight = tl.exp2(score * score_scale - base_R[None, :])
            fade_R = tl.exp2(most_R * score_scale - base_R)
            total = total * fade_R[None, :] + weight
            mixed = mixed * fade_R[None, :]
            mixed = tl.dot(tl.trans(value_TD), weight.to(DOT), mixed, input_precision="ieee")
        else:
            score = tl.dot(query_RD, tl.trans(key_TD), input_precision="ieee")
            score = tl.where(seen_T[None, :] <= position_R[:, None], score, float("-inf"))
            new_R = tl.maximum(most_R, tl.max(score, axis=1))
            base_R = tl.where(new_R == float("-inf"), 0.0, new_R) * score_scale
            weight = tl.exp2(score * score_scale - base_R[:, None])
            fade_R = tl.exp2(most_R * score_scale - base_R)
            total = total * fade_R[:, None] + (weight if SPREAD else tl.sum(weight, axis=1)[:, None])
            mixed = mixed * fade_R[:, None]
            mixed = tl.dot(weight.to(DOT), value_TD, mixed, input_precision="ieee")
        most_R = new_R

    if SWAP:
        total_R = tl.sum(total, axis=0)
        mixed_RD = tl.trans(mixed)
    else:
        total_R = tl.sum(total, axis=1)
        mixed_RD = mixed
    is_seen_R = total_R > 0
    total_R = tl.where(is_seen_R, total_R, 1.0)
    share_R = 1.0 / total_R
    if SCALED:
        share_R *= tl.load(value_scale + head * scale_stride)
    mixed_RD = mixed_RD * share_R[:, None]
    # `end` is never negative, which the compiler does not know: else it would keep the places of rows through the loop.
    row_R = row_tile * ROWS + tl.arange(0, ROWS) + tl.minimum(end, 0)
    is_row_R = row_R < num_queries * group
    out_R = (sequence * num_queries + row_R // group) * (num_kv_heads * group) + head * group + row_R % group
    if num_parts == 1:
        tl.store(out + out_R.to(tl.int64)[:, None] * D + column_D[None, :], mixed_RD, mask=is_row_R[:, None])
    else:
        part_R = out_R * num_parts + part
        log_R = tl.where(is_seen_R, most_R * score_scale + tl.log2(total_R), float("-inf"))
        tl.store(parts + part_R.to(tl.int64)[:, None] * D + column_D[None, :], mixed_RD, mask=is_row_R[:, None])
        tl.store(part_logs + part_R, log_R, mask=is_row_R)


@triton.jit(do_not_specialize=["num_parts"])
def merge_kernel(
    parts,
    part_logs,
    out,
    num_parts: tl.int32,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (rows,): the parts of a row [num_parts, D], each with the logarithm of its weight, to `out`.

    Parts are added in their order, PARTS at a time. Those of weight 0 change nothing, not by a bit, so the result does
    not depend on how many of them follow.
    """
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
    column_D = tl.arange(0, D)
    part_C = tl.arange(0, PARTS)
    parts += row * num_parts * D
    part_logs += row * num_parts
    most = float("-inf")
    total = 0.0
    mixed_D = tl.zeros([D], tl.float32)
    for first in range(0, num_parts, PARTS):
        is_part_C = first + part_C < num_parts
        log_C = tl.load(part_logs + first + part_C, mask=is_part_C, other=float("-inf"))
        part_CD = tl.load(parts + (first + part_C)[:, None] * D + column_D[None, :], mask=is_part_C[:, None], other=0.0)
        new = tl.maximum(most, tl.max(log_C))
        base = tl.where(new == float("-inf"), 0.0, new)
        weight_C = tl.exp2(log_C - base)
        fade = tl.exp2(most - base)
        # Nobody wrote parts of weight 0.
        share_CD = tl.where(weight_C[:, None] > 0, weight_C[:, None] * part_CD, 0.0)
        mixed_D = mixed_D * fade + tl.sum(share_CD, axis=0)
        total = total * fade + tl.sum(weight_C)
        most = new
    tl.store(out + row * D + column_D, mixed_D / tl.where(total > 0, total, 1.0))


def parts_of_step(num_parts: int, part_len: int) -> int:
    """Parts that a program of the second kernel adds at a time; of one number wherever parts have a fixed length."""
    return 8 if num_parts <= 8 and part_len == 0 else 32


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
    pdl = how.pdl and query_BQAD.is_cuda and torch.version.hip is None
    with torch.cuda.device_of(query_BQAD):
        attend_kernel[(num_kv_heads * triton.cdiv(num_queries * group, how.rows), how.num_parts, num_sequences)](
            query_BQAD, key_NHSD, value_NHSD, block_tables_BM, positions_BQ, *scales, out_BQAD, parts, part_logs,
            how.scale, block_tables_BM.stride(0), positions_BQ.stride(0), positions_BQ.stride(1),
            *(stride // STRIDE_UNIT for stride in query_BQAD.stride()[:3]),
            *(stride // STRIDE_UNIT for stride in key_NHSD.stride()[:2]),
            1 if scaled and scales[0].numel() > 1 else 0,
            num_queries, group, how.num_parts, how.part_len // how.tile, how.max_context_len,
            D=head_dim, BLOCK=block_size, JOINED=joined, TILE=how.tile, ROWS=how.rows, SWAP=how.swap, SCALED=scaled,
            VIA_SHARED=scaled and torch.version.hip is None, PDL=pdl, STAGES=how.stages,
            num_warps=how.warps, num_stages=how.stages,
        )  # fmt: skip
        if how.num_parts > 1:
            step = parts_of_step(how.num_parts, how.part_len)
            options = {"launch_pdl": True} if pdl else {}
            merge_kernel[(num_sequences * num_queries * num_heads,)](
                parts, part_logs, out_BQAD, how.num_parts, D=head_dim, PARTS=step, PDL=pdl,
                num_warps=max(1, step * head_dim // 1024), **options,
            )  # fmt: skip
    return out_BQAD


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
_MERGED = ((128, 8), (128, 32), (256, 8), (256, 32))  # D, parts of a step


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
    for head_dim, step in _MERGED:
        name = f"attention_decode merge D={head_dim} parts={step}"
        found[name] = Variant(
            name=name,
            kernel=merge_kernel,
            types={"parts": "*fp32", "part_logs": "*fp32", "out": "*bf16", "num_parts": "i32"},
            constants={"D": head_dim, "PARTS": step, "PDL": False},
            aligned=("parts", "part_logs", "out"),
            num_warps=max(1, step * head_dim // 1024),
            max_registers=128,
        )
    return list(found.values())


def _attend_variant(head_dim: int, kind: str, options: attention_plan.Options) -> Variant:
    # wgmma takes 64 of something on the left: rows of D as V is read, or rows of queries.
    is_wide = head_dim >= 64 if options.swap else options.rows >= 64
    side = "swapped" if options.swap else "plain"
    programs = max(1, options.slots // 132)  # on a multiprocessor
    return Variant(
        name=f"attention_decode rows={options.rows} D={head_dim} {kind} {side} tile={options.tile} "
        f"stages={options.stages} warps={options.warps}",
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
    )
