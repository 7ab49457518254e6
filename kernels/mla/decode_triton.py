# mypy: ignore-errors
"""The Triton kernel of `mla_decode`, which attends over a part of each sequence's rows of latents.

A program takes up to 64 rows of queries (Q queries times A heads of one sequence: all heads read the same latents), and
one part of the sequence's positions. A tile of latents is loaded once and used twice: whole as keys, and its first C
columns as values. How many parts there are is the host's choice, from bounds; where they begin follows from the
sequence's own length, on the device. The parts are added up by `kernels.attention.merge_triton`.

Swapped, latents are the left operands of both matmuls and queries the right ones: Hopper's wgmma takes 64 of the
former and as few as 16 of the latter, so few heads cost few matmuls. Plain, 64 queries are on the left.

Slots past a sequence's last position may hold NaN: they are not loaded.

Shapes: T positions of a tile, R rows of queries (padded), C length of a latent, P columns that a position turned.
"""

import functools

import torch
import triton
import triton.language as tl

from baton.kernels.attention.block_tables import in_words
from baton.kernels.attention.decode_triton import sequence_bound, sequence_part, store_part
from baton.kernels.attention.merge_triton import merge_parts
from baton.kernels.attention.softmax_triton import softmax_step
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.mla.decode_plan import MLALaunch, MLAPlanOptions, default_options
from baton.kernels.variant import Variant

STRIDE_UNIT = 16  # strides are told in these, so that the compiler knows rows to begin at 16 bytes

_UNIT = tl.constexpr(STRIDE_UNIT)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_latents(
    latent_RC, turned_RP, position_R, rows, tables, first, end, last, stride_n, score_scale,
    C: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, SWAP: tl.constexpr,
    WORDS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attention of rows over tiles [first, end): maxima, sums of weights, and sums of latents, [R], [R], [R, C]."""
    most_R = tl.full([ROWS], float("-inf"), tl.float32)
    if SWAP:  # a row's weights are spread over warps: sums stay apart, and are added up at the end
        total = tl.zeros([TILE, ROWS], tl.float32)
        mixed = tl.zeros([C, ROWS], tl.float32)
    else:
        total = tl.zeros([ROWS, 1], tl.float32)
        mixed = tl.zeros([ROWS, C], tl.float32)
    place_T = tl.arange(0, TILE)
    slot_T = place_T % BLOCK * (C + P)
    last_column = last // BLOCK
    block_T = tl.load(tables + tl.minimum((first * TILE + place_T) // BLOCK, last_column) * WORDS)
    for tile in tl.range(first, end, num_stages=STAGES):
        seen_T = tile * TILE + place_T
        offset_T = block_T.to(tl.int64) * stride_n + slot_T
        if TILE < BLOCK:
            offset_T += tile * TILE % BLOCK * (C + P)
        row_at = rows + offset_T[:, None]
        is_row_T1 = (seen_T <= last)[:, None]
        latent_TC = tl.load(row_at + tl.arange(0, C)[None, :], mask=is_row_T1, other=0.0)
        turned_TP = tl.load(row_at + C + tl.arange(0, P)[None, :], mask=is_row_T1, other=0.0)
        # The next tile's blocks, a step ahead: latents do not wait for them.
        block_T = tl.load(tables + tl.minimum(((tile + 1) * TILE + place_T) // BLOCK, last_column) * WORDS)
        if SWAP:
            score = tl.dot(latent_TC, tl.trans(latent_RC), input_precision="ieee")
            score = tl.dot(turned_TP, tl.trans(turned_RP), score, input_precision="ieee")
            score = tl.where(seen_T[:, None] <= position_R[None, :], score, float("-inf"))
            weight, most_R, fade = softmax_step(score, most_R, score_scale, 0)
            total = total * fade + weight
            mixed = mixed * fade
            mixed = tl.dot(tl.trans(latent_TC), weight.to(latent_TC.dtype), mixed, input_precision="ieee")
        else:
            score = tl.dot(latent_RC, tl.trans(latent_TC), input_precision="ieee")
            score = tl.dot(turned_RP, tl.trans(turned_TP), score, input_precision="ieee")
            score = tl.where(seen_T[None, :] <= position_R[:, None], score, float("-inf"))
            weight, most_R, fade = softmax_step(score, most_R, score_scale, 1)
            total = total * fade + tl.sum(weight, axis=1)[:, None]
            mixed = mixed * fade
            mixed = tl.dot(weight.to(latent_TC.dtype), latent_TC, mixed, input_precision="ieee")
    if SWAP:
        total_R, mixed_RC = tl.sum(total, axis=0), tl.trans(mixed)
    else:
        total_R, mixed_RC = tl.sum(total, axis=1), mixed
    return most_R, total_R, mixed_RC


@triton.jit(
    do_not_specialize=[
        "tables", "positions", "table_stride", "position_stride_b", "position_stride_q", "query_stride_b",
        "query_stride_q", "query_stride_a", "row_stride_n", "num_queries", "num_heads", "num_parts",
        "max_context_len", "scale",
    ]
)  # fmt: skip
def mla_attend_kernel(
    query, rows, tables, positions, out, parts, part_logs,
    scale: tl.float32, table_stride: tl.int32, position_stride_b: tl.int32, position_stride_q: tl.int32,
    query_stride_b: tl.int32, query_stride_q: tl.int32, query_stride_a: tl.int32, row_stride_n: tl.int32,
    num_queries: tl.int32, num_heads: tl.int32, num_parts: tl.int32,
    max_context_len: tl.int32,
    C: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, SWAP: tl.constexpr,
    WORDS: tl.constexpr, PDL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows, parts, sequences).

    With one part the result goes to `out` [B, Q, A, C]; else to `parts` [B, Q, A, num_parts, C] and the logarithms of
    the weights to `part_logs` [B, Q, A, num_parts].
    """
    num_rows = num_queries * num_heads
    row_tile, part, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    positions += sequence.to(tl.int64) * position_stride_b
    context_len = sequence_bound(positions, position_stride_q, num_queries, max_context_len)
    first, end = sequence_part(context_len, part, num_parts, 0, TILE)
    row_R = row_tile * ROWS + tl.arange(0, ROWS)
    query_R, head_R = row_R // num_heads, row_R % num_heads
    if (first >= end) & (part > 0):
        log_R = tl.full([ROWS], float("-inf"), tl.float32)
        tl.store(part_logs + (sequence * num_rows + row_R) * num_parts + part, log_R, mask=row_R < num_rows)
        return
    position_R = tl.load(positions + query_R * position_stride_q, mask=row_R < num_rows, other=-1).to(tl.int32)
    query += sequence.to(tl.int64) * (query_stride_b.to(tl.int64) * _UNIT)
    query_at = query + (query_R * (query_stride_q * _UNIT) + head_R * (query_stride_a * _UNIT))[:, None]
    is_row_R1 = (row_R < num_rows)[:, None]
    latent_RC = tl.load(query_at + tl.arange(0, C)[None, :], mask=is_row_R1, other=0.0)
    turned_RP = tl.load(query_at + C + tl.arange(0, P)[None, :], mask=is_row_R1, other=0.0)
    score_scale = scale * _LOG2_E
    tables += sequence.to(tl.int64) * table_stride
    last = tl.maximum(context_len - 1, 0)
    most_R, total_R, mixed_RC = attend_latents(
        latent_RC, turned_RP, position_R, rows, tables, first, end, last, row_stride_n.to(tl.int64) * _UNIT,
        score_scale, C, P, BLOCK, TILE, ROWS, SWAP, WORDS, STAGES,
    )  # fmt: skip
    is_seen_R = total_R > 0
    total_R = tl.where(is_seen_R, total_R, 1.0)
    log_R = tl.where(is_seen_R, most_R * score_scale + tl.log2(total_R), float("-inf"))
    # `end` is never negative, which the compiler does not know: else it would keep the places of rows through the loop.
    row_R = row_tile * ROWS + tl.arange(0, ROWS) + tl.minimum(end, 0)
    mixed_RC = mixed_RC * (1.0 / total_R)[:, None]
    store_part(
        out, parts, part_logs, sequence * num_rows + row_R, row_R < num_rows, num_parts, part, mixed_RC, log_R, C
    )


_launch_attend = Launcher(mla_attend_kernel)


def launch(
    query_BQAX: torch.Tensor,
    rows_NSX: torch.Tensor,
    block_tables_BM: torch.Tensor,
    positions_BQ: torch.Tensor,
    how: MLALaunch,
) -> torch.Tensor:
    """Attention -> [B, Q, A, C]; everything was checked before."""
    num_sequences, num_queries, num_heads, row_len = query_BQAX.shape
    device, latent_dim = query_BQAX.device, how.latent_dim
    out_BQAC = query_BQAX.new_empty(num_sequences, num_queries, num_heads, latent_dim)
    parts = part_logs = torch.empty(1, dtype=torch.float32, device=device)  # never touched if there is one part
    if how.num_parts > 1:
        num_rows = num_sequences * num_queries * num_heads * how.num_parts
        parts = torch.empty(num_rows, latent_dim, dtype=torch.float32, device=device)
        part_logs = torch.empty(num_rows, dtype=torch.float32, device=device)
    words = block_tables_BM.element_size() // 4
    tables = in_words(block_tables_BM) if words == 2 else block_tables_BM
    sizes = latent_dim, row_len - latent_dim, rows_NSX.shape[1], words
    constants = _constants(*sizes, query_BQAX.is_cuda, how.options)
    arguments = (
        query_BQAX, rows_NSX, tables, positions_BQ, out_BQAC, parts, part_logs,
        how.scale, tables.stride(0), *positions_BQ.stride(),
        *(stride // STRIDE_UNIT for stride in (*query_BQAX.stride()[:3], rows_NSX.stride(0))),
        num_queries, num_heads, how.num_parts, how.max_context_len,
    )  # fmt: skip
    grid = (-(-num_queries * num_heads // how.options.rows), how.num_parts, num_sequences)
    with torch.cuda.device_of(query_BQAX):
        _launch_attend(grid, arguments, constants)
        if how.num_parts > 1:
            pdl = bool(constants.by_name["PDL"])
            merge_parts(parts, part_logs, out_BQAC, how.num_parts, fixed_len=False, pdl=pdl)
    return out_BQAC


@functools.lru_cache(maxsize=256)
def _constants(
    latent_dim: int, turned_dim: int, block_size: int, words: int, on_cuda: bool, options: MLAPlanOptions
) -> Constants:
    """Of what changes from step to step, the number of parts and the bound, nothing is a constant."""
    pdl = options.pdl and on_cuda and torch.version.hip is None
    return Constants({
        "C": latent_dim, "P": turned_dim, "BLOCK": block_size, "TILE": options.tile, "ROWS": options.rows,
        "SWAP": options.swap, "WORDS": words, "PDL": pdl, "STAGES": options.stages,
        "num_warps": options.warps, "num_stages": options.stages,
    })  # fmt: skip


_INTEGERS = (
    "table_stride", "position_stride_b", "position_stride_q", "query_stride_b", "query_stride_q", "query_stride_a",
    "row_stride_n", "num_queries", "num_heads", "num_parts", "max_context_len",
)  # fmt: skip


def variants() -> list[Variant]:
    """What serving launches by the rule for DeepSeek-V3's latents, in blocks of 16."""
    return [_variant(default_options(num_rows)) for num_rows in (16, 32, 64)]


def _variant(options: MLAPlanOptions) -> Variant:
    return Variant(
        name=f"mla_decode rows={options.rows} {'swapped' if options.swap else 'plain'} tile={options.tile} "
        f"stages={options.stages} warps={options.warps}",
        kernel=mla_attend_kernel,
        types={
            **dict.fromkeys(("query", "rows", "out"), "*bf16"),
            **{"tables": "*i32", "positions": "*i64"},
            **dict.fromkeys(("parts", "part_logs"), "*fp32"),
            **dict.fromkeys(_INTEGERS, "i32"),
            "scale": "fp32",
        },
        constants={
            "C": 512, "P": 64, "BLOCK": 16, "TILE": options.tile, "ROWS": options.rows, "SWAP": options.swap,
            "WORDS": 2, "PDL": False, "STAGES": options.stages,
        },
        aligned=("query", "rows", "out", "parts", "part_logs"),
        num_warps=options.warps,
        num_stages=options.stages,
        contains=("LDGSTS", "HGMMA"),
        lacks=("HMMA",),
        may_spill=True,  # what is kept of addresses between tiles; matmuls wait for memory, not for these
        max_registers=min(255, 65_536 // (options.warps * 32)),
        on_amd=False,  # whose multiprocessors do not hold a tile of such rows twice
    )  # fmt: skip
