# mypy: ignore-errors
"""The Triton kernels of attention that is divided by work: one attends to a share, one adds pieces up.

See `attention_split_kv` for what these are. The rows are those of a decode step, [B, Q], or chunks of prompts that lie
one after the other (VARLEN): then row i of a sequence of n rows stands at position context - n + i. A program takes the
rows of one KV head, or a tile of them, and one share; what it does with each of its pieces is what `attention_decode`
does with a part. A sequence of one piece has its result at once; of several, they are added up in order of positions.

The plan, which says whose piece is which, comes from `attention_split_kv_plan_triton`.

Shapes: T keys of a tile, R rows (padded), D head size, C pieces of a step of the sum.
"""

import torch
import triton
import triton.language as tl

from baton.kernels import tuning
from baton.kernels.attention import decode_plan as attention_plan
from baton.kernels.attention.decode_plan import PlanOptions
from baton.kernels.attention.decode_triton import STRIDE_UNIT, attend_tiles
from baton.kernels.attention.float8_triton import BITS_SCALE, attend_apart, attend_together
from baton.kernels.attention.merge_triton import add_parts, merge_shape
from baton.kernels.attention.split_kv_plan_triton import PIECE_LEN, begins_at, most_pieces
from baton.kernels.variant import Variant

_PIECE_LEN = tl.constexpr(PIECE_LEN)
_UNIT = tl.constexpr(STRIDE_UNIT)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend_piece(
    query, key, value, tables, positions, starts, key_scale, value_scale, out, parts, part_logs, piece, entry,
    scale, table_stride, position_stride_b, position_stride_q, query_stride_b, query_stride_q,
    query_stride_a, key_stride_n, key_stride_h, scale_stride, num_queries, group,
    D: tl.constexpr, BLOCK: tl.constexpr, JOINED: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    SWAP: tl.constexpr, SCALED: tl.constexpr, DIRECT: tl.constexpr, APART: tl.constexpr, VIA_SHARED: tl.constexpr,
    VARLEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What a share has of one sequence, for a tile of its rows; `entry` is where the plan says what."""
    sequence = tl.load(entry)
    first = tl.load(entry + 1)
    end = tl.load(entry + 2)
    context_len = tl.load(entry + 3)
    row_tiles = tl.cdiv(num_queries * group, ROWS)
    head, row_tile = tl.program_id(0) // row_tiles, tl.program_id(0) % row_tiles
    # `piece` is never negative, which the compiler does not know: else it would keep what follows from piece to piece.
    row_R = row_tile * ROWS + tl.arange(0, ROWS) + tl.minimum(piece, 0)
    query_R, head_R = row_R // group, head * group + row_R % group
    own_queries = num_queries
    if VARLEN:
        start = tl.load(starts + sequence).to(tl.int32)
        own_queries = tl.load(starts + sequence + 1).to(tl.int32) - start
        position_R = tl.where(query_R < own_queries, context_len - own_queries + query_R, -1)
        query += start.to(tl.int64) * (query_stride_q.to(tl.int64) * _UNIT)
    else:
        positions += sequence.to(tl.int64) * position_stride_b
        position_R = tl.load(positions + query_R * position_stride_q, mask=query_R < num_queries, other=-1).to(tl.int32)
        query += sequence.to(tl.int64) * (query_stride_b.to(tl.int64) * _UNIT)
    query_R = query_R * (query_stride_q * _UNIT) + head_R * (query_stride_a * _UNIT)
    score_scale = scale * _LOG2_E
    if SCALED:
        score_scale *= tl.load(key_scale + head * scale_stride)
    head_offset = head.to(tl.int64) * (key_stride_h.to(tl.int64) * _UNIT)
    key, value = key + head_offset, value + head_offset
    tables += sequence.to(tl.int64) * table_stride
    last = tl.maximum(context_len - 1, 0)
    is_row_R1 = (row_R < own_queries * group)[:, None]
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
    mixed_RD = mixed_RD * share_R[:, None]
    # Loaded again, for registers are short: what the places follow from need not be kept while the tiles are walked.
    sequence = tl.load(entry)
    first = tl.load(entry + 1)
    is_whole = (first == 0) & (tl.load(entry + 2) == tl.cdiv(tl.load(entry + 3), TILE))
    own_queries = num_queries
    if VARLEN:
        start = tl.load(starts + sequence).to(tl.int32)
        own_queries = tl.load(starts + sequence + 1).to(tl.int32) - start
    row_R = row_tile * ROWS + tl.arange(0, ROWS) + tl.minimum(first, 0)
    is_row_R = row_R < own_queries * group
    num_heads = tl.num_programs(0) // row_tiles * group
    head_R = head * group + row_R % group
    column_D = tl.arange(0, D)
    if is_whole:
        start = start if VARLEN else sequence * num_queries
        out_R = (start + row_R // group).to(tl.int64) * num_heads + head_R
        tl.store(out + out_R[:, None] * D + column_D[None, :], mixed_RD, mask=is_row_R[:, None])
    else:
        part_R = (piece * num_queries + row_R // group) * num_heads + head_R
        tl.store(parts + part_R.to(tl.int64)[:, None] * D + column_D[None, :], mixed_RD, mask=is_row_R[:, None])
        tl.store(part_logs + part_R, log_R, mask=is_row_R)


@triton.jit(
    do_not_specialize=[
        "tables", "positions", "starts", "key_scale", "value_scale", "plan", "table_stride", "position_stride_b",
        "position_stride_q", "query_stride_b", "query_stride_q", "query_stride_a", "key_stride_n", "key_stride_h",
        "num_queries", "group", "scale_stride", "scale",
    ]
)  # fmt: skip
def attend_share_kernel(
    query, key, value, tables, positions, starts, key_scale, value_scale, plan, out, parts, part_logs,
    scale: tl.float32, table_stride: tl.int32, position_stride_b: tl.int32, position_stride_q: tl.int32,
    query_stride_b: tl.int32, query_stride_q: tl.int32, query_stride_a: tl.int32, key_stride_n: tl.int32,
    key_stride_h: tl.int32, scale_stride: tl.int32, num_queries: tl.int32, group: tl.int32,
    D: tl.constexpr, BLOCK: tl.constexpr, JOINED: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    SWAP: tl.constexpr, SCALED: tl.constexpr, DIRECT: tl.constexpr, APART: tl.constexpr, VIA_SHARED: tl.constexpr,
    VARLEN: tl.constexpr, PDL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (KV heads times tiles of rows, shares).

    A piece that is a whole sequence goes to `out` [B, Q, A, D], or [rows of all, A, D]; any other to `parts`
    [pieces, Q, A, D], and the logarithms of its weights to `part_logs` [pieces, Q, A].
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    share = tl.program_id(1)
    pieces = plan + tl.num_programs(1) + 1
    row_tile = tl.program_id(0) % tl.cdiv(num_queries * group, ROWS)
    for piece in tl.range(tl.load(plan + share), tl.load(plan + share + 1), num_stages=1):
        entry = pieces + piece * _PIECE_LEN
        own_queries = num_queries
        if VARLEN:
            sequence = tl.load(entry)
            own_queries = (tl.load(starts + sequence + 1) - tl.load(starts + sequence)).to(tl.int32)
        if row_tile * ROWS < own_queries * group:
            _attend_piece(
                query, key, value, tables, positions, starts, key_scale, value_scale, out, parts, part_logs, piece,
                entry, scale, table_stride, position_stride_b, position_stride_q, query_stride_b, query_stride_q,
                query_stride_a, key_stride_n, key_stride_h, scale_stride, num_queries, group,
                D, BLOCK, JOINED, TILE, ROWS, SWAP, SCALED, DIRECT, APART, VIA_SHARED, VARLEN, STAGES,
            )  # fmt: skip


@triton.jit(do_not_specialize=["starts", "plan", "num_heads", "begins_at"])
def merge_share_kernel(
    parts, part_logs, starts, plan, out, num_heads: tl.int32, begins_at: tl.int32,
    D: tl.constexpr, PARTS: tl.constexpr, VARLEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows of a sequence, sequences): a row's pieces in order; zero if it has none, nothing of one."""
    row, sequence = tl.program_id(0), tl.program_id(1)
    num_rows = tl.num_programs(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    begins = plan + begins_at + sequence
    begin = tl.load(begins)
    count = tl.load(begins + 1) - begin
    if count == 1:
        return
    out_row = sequence.to(tl.int64) * num_rows + row
    if VARLEN:
        start = tl.load(starts + sequence).to(tl.int64)
        if row // num_heads >= tl.load(starts + sequence + 1).to(tl.int64) - start:
            return
        out_row = start * num_heads + row
    first_row = begin.to(tl.int64) * num_rows + row
    mixed_D = add_parts(parts + first_row * D, part_logs + first_row, count, num_rows.to(tl.int64), D, PARTS)
    tl.store(out + out_row * D + tl.arange(0, D), mixed_D)


def launch(
    query: torch.Tensor,
    key_NHSD: torch.Tensor,
    value_NHSD: torch.Tensor,
    block_tables_BM: torch.Tensor,
    positions_BQ: torch.Tensor | None,
    starts_E: torch.Tensor | None,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    plan: torch.Tensor,
    *,
    num_queries: int,
    scale: float,
    num_shares: int,
    how: PlanOptions,
) -> torch.Tensor:
    """Attention of rows [B, Q, A, D] at positions, or of chunks [T, A, D] that begin at starts; as `query` is.

    Everything was checked before. `num_queries` is the most that a sequence has, `num_shares` as the plan's.
    """
    num_heads, head_dim = query.shape[-2:]
    num_kv_heads, block_size = key_NHSD.shape[1:3]
    group, num_sequences = num_heads // num_kv_heads, block_tables_BM.shape[0]
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    parts, part_logs = make_parts(query, num_shares, num_sequences, num_queries)
    # What stands for tensors that are not there is never touched.
    scales = (part_logs, part_logs) if key_scale is None else (key_scale, value_scale)
    positions = starts_E if positions_BQ is None else positions_BQ
    position_strides = (0, 0) if positions_BQ is None else positions_BQ.stride()
    query_strides = (0, *query.stride()[:2]) if query.dim() == 3 else query.stride()[:3]
    scaled, varlen = key_scale is not None, starts_E is not None
    joined = value_NHSD.data_ptr() == key_NHSD.data_ptr() + block_size * head_dim * key_NHSD.element_size()
    on_nvidia = torch.version.hip is None
    pdl = how.pdl and query.is_cuda and on_nvidia
    limit = {"maxnreg": how.registers} if how.registers and query.is_cuda and on_nvidia else {}
    with torch.cuda.device_of(query):
        attend_share_kernel[(num_kv_heads * triton.cdiv(num_queries * group, how.rows), num_shares)](
            query, key_NHSD, value_NHSD, block_tables_BM, positions, starts_E if varlen else positions, *scales, plan,
            out, parts, part_logs, scale, block_tables_BM.stride(0), *position_strides,
            *(stride // STRIDE_UNIT for stride in query_strides),
            *(stride // STRIDE_UNIT for stride in key_NHSD.stride()[:2]),
            1 if key_scale is not None and key_scale.numel() > 1 else 0, num_queries, group,
            D=head_dim, BLOCK=block_size, JOINED=joined, TILE=how.tile, ROWS=how.rows, SWAP=how.swap, SCALED=scaled,
            DIRECT=how.direct if scaled else 0, APART=how.warps if how.apart else 0,
            VIA_SHARED=scaled and on_nvidia, VARLEN=varlen, PDL=pdl, STAGES=how.stages,
            num_warps=how.warps, num_stages=how.stages, **limit,
        )  # fmt: skip
    merge(
        parts, part_logs, starts_E, plan, out, num_queries=num_queries, num_shares=num_shares,
        num_sequences=num_sequences, pdl=pdl,
    )  # fmt: skip
    return out


def make_parts(
    query: torch.Tensor, num_shares: int, num_sequences: int, num_queries: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of the rows of all pieces there can be, [pieces, Q, A, D] float32, and of the logarithms of weights."""
    num_heads, head_dim = query.shape[-2:]
    num_rows = most_pieces(num_shares, num_sequences) * num_queries * num_heads
    parts = torch.empty(num_rows, head_dim, dtype=torch.float32, device=query.device)
    return parts, torch.empty(num_rows, dtype=torch.float32, device=query.device)


def merge(
    parts: torch.Tensor,
    part_logs: torch.Tensor,
    starts_E: torch.Tensor | None,
    plan: torch.Tensor,
    out: torch.Tensor,
    *,
    num_queries: int,
    num_shares: int,
    num_sequences: int,
    pdl: bool = False,
) -> None:
    """Add the pieces of every row up, those of sequences of one piece left as they are."""
    num_heads, head_dim = out.shape[-2:]
    # Of chunks, whose rows are many, as few parts at once as one of mean length has: programs of one warp are quicker.
    num_parts = num_shares if starts_E is None else num_shares // num_sequences + 1
    step, num_warps = merge_shape(num_parts, head_dim, fixed_len=False)
    with torch.cuda.device_of(out):
        merge_share_kernel[(num_queries * num_heads, num_sequences)](
            parts, part_logs, plan if starts_E is None else starts_E, plan, out, num_heads,
            begins_at(num_shares, num_sequences),
            D=head_dim, PARTS=step, VARLEN=starts_E is not None, PDL=pdl, num_warps=num_warps,
            **({"launch_pdl": True} if pdl else {}),
        )  # fmt: skip


_INTEGERS = (
    "table_stride", "position_stride_b", "position_stride_q", "query_stride_b", "query_stride_q", "query_stride_a",
    "key_stride_n", "key_stride_h", "scale_stride", "num_queries", "group",
)  # fmt: skip
_KINDS = {"fp8": "fp8e4nv", "bf16": "bf16"}
# Chunks of prompts: rows of a KV head, D, KV.
_CHUNKS = ((64, 128, "bf16"), (16, 128, "bf16"), (64, 256, "bf16"), (64, 128, "fp8"), (16, 128, "fp8"))


def variants() -> list[Variant]:
    """What serving launches for short chunks by the rule, for steps by the committed table, in blocks of 16."""
    found = {}
    for num_rows, head_dim, kind in _CHUNKS:
        rule = attention_plan.default_options(num_rows, head_dim, 1 if kind == "fp8" else 2)
        variant = _attend_variant(head_dim, kind, rule, varlen=True)
        found[variant.name] = variant
    for name in ("attention_decode", "attention_prefill_shares"):
        for shape, sizes in tuning.table().get(name, {}).items():
            _, head_dim, kind = attention_plan.read_table_shape(shape)
            rows = [row for row in sizes.values() if row.get("shares")]  # others are for other forms
            for options in map(attention_plan.options_of_row, rows):
                variant = _attend_variant(head_dim, kind, options, varlen=name != "attention_decode")
                found[variant.name] = variant
    # One that is there before the table has any.
    swapped = attention_plan.default_options(16, 128, 2)
    variant = _attend_variant(128, "bf16", swapped, varlen=False)
    found[variant.name] = variant
    for varlen in (False, True):
        found |= {variant.name: variant for variant in _merge_variants(varlen)}
    return list(found.values())


def _merge_variants(varlen: bool) -> list[Variant]:
    return [
        Variant(
            name=f"attention_split_kv merge{' chunks' if varlen else ''} D={head_dim}",
            kernel=merge_share_kernel,
            types={
                **dict.fromkeys(("parts", "part_logs"), "*fp32"),
                "starts": "*i64",
                "plan": "*i32",
                "out": "*bf16",
                "num_heads": "i32",
                "begins_at": "i32",
            },
            constants={"D": head_dim, "PARTS": 32, "VARLEN": varlen, "PDL": False},
            aligned=("parts", "part_logs", "out"),
            num_warps=merge_shape(32, head_dim, fixed_len=False)[1],
            max_registers=128,
        )
        for head_dim in (128, 256)
    ]


def _attend_variant(head_dim: int, kind: str, options: PlanOptions, *, varlen: bool) -> Variant:
    is_wide = head_dim >= 64 if options.swap else options.rows >= 64
    side = "swapped" if options.swap else "plain"
    way = ("", " direct", " moved")[options.direct] + (" apart" if options.apart else "")
    limit = f" registers={options.registers}" if options.registers else ""
    return Variant(
        name=f"attention_split_kv{' chunks' if varlen else ''} rows={options.rows} D={head_dim} {kind} {side}{way} "
        f"tile={options.tile} stages={options.stages} warps={options.warps}{limit}",
        kernel=attend_share_kernel,
        types={
            **dict.fromkeys(("query", "out"), "*bf16"),
            **dict.fromkeys(("key", "value"), f"*{_KINDS[kind]}"),
            **dict.fromkeys(("tables", "positions", "starts"), "*i64"),
            **dict.fromkeys(("key_scale", "value_scale", "parts", "part_logs"), "*fp32"),
            **dict.fromkeys(_INTEGERS, "i32"),
            "plan": "*i32",
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
            "VARLEN": varlen,
            "PDL": False,
            "STAGES": options.stages,
        },
        aligned=("query", "key", "value", "out", "parts", "part_logs"),
        num_warps=options.warps,
        num_stages=options.stages,
        contains=("LDGSTS", "HGMMA") if is_wide else ("LDGSTS", "HMMA"),
        lacks=("HMMA",) if is_wide else (),
        max_registers=min(255, 65_536 // (min(max(1, options.slots // 132), 2) * options.warps * 32)),
        may_spill=varlen and options.apart,  # a few numbers, of short chunks over float8
        on_amd=options.rows == 16 and kind == "bf16",
        options={"maxnreg": options.registers} if options.registers else {},
    )
