# mypy: ignore-errors
"""The Triton kernels of `mla_prefill`: one lays rows of latents side by side, one attends to what was expanded of them.

Keys and values of a *window* of positions lie expanded, [L, A, N + V], sequence after sequence. A program takes a tile
of one head's rows of a chunk, and walks over what the window has of its sequence. A sequence that goes on in the next
window carries its sums there: outputs in float32 and the logarithms of the weights, from which the online softmax goes
on as if it had not stopped.

The numbers of a window are int32 [6, B]: where a sequence's rows begin, how many they are, where its keys begin among
those of the window, the position of the first of them, how many they are, and how long its context is.

Shapes: R rows of a tile, K keys of a step, N columns of a head that no position turned, P those that are turned,
V columns of a value, L positions of a window, X elements of a row.
"""

import functools

import torch
import triton
import triton.language as tl

from baton.kernels.attention.block_tables import in_words
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.variant import Variant

_ROWS = 128  # of queries that a program takes
_SHORT_ROWS = 64  # where no chunk has more
_KEYS = 64
_GATHERED = 16  # rows that a program lays down
_LOG2_E = tl.constexpr(1.4426950408889634)
_UNIT = tl.constexpr(16)


@triton.jit
def _number(numbers, place, sequence, num_sequences):
    return tl.load(numbers + place * num_sequences + sequence)


@triton.jit(do_not_specialize=["tables", "numbers", "table_stride", "row_stride_n", "num_sequences"])
def mla_gather_kernel(
    rows, tables, numbers, out, table_stride: tl.int32, row_stride_n: tl.int32, num_sequences: tl.int32,
    C: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, WORDS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of positions, sequences): the window's rows of a sequence to their places in `out` [L, X]."""
    tile, sequence = tl.program_id(0), tl.program_id(1)
    key_start = _number(numbers, 2, sequence, num_sequences)
    first = _number(numbers, 3, sequence, num_sequences)
    key_len = _number(numbers, 4, sequence, num_sequences)
    index_T = tile * TILE + tl.arange(0, TILE)
    is_one_T = index_T < key_len
    position_T = first + index_T
    tables += sequence.to(tl.int64) * table_stride
    block_T = tl.load(tables + position_T // BLOCK * WORDS, mask=is_one_T, other=0)
    from_T = block_T.to(tl.int64) * (row_stride_n.to(tl.int64) * _UNIT) + position_T % BLOCK * (C + P)
    to_T = (key_start + index_T).to(tl.int64) * (C + P)
    column_C, column_P = tl.arange(0, C), C + tl.arange(0, P)
    latent_TC = tl.load(rows + from_T[:, None] + column_C[None, :], mask=is_one_T[:, None])
    turned_TP = tl.load(rows + from_T[:, None] + column_P[None, :], mask=is_one_T[:, None])
    tl.store(out + to_T[:, None] + column_C[None, :], latent_TC, mask=is_one_T[:, None])
    tl.store(out + to_T[:, None] + column_P[None, :], turned_TP, mask=is_one_T[:, None])


@triton.jit
def _walk(
    nope_RN, turned_RP, keys, turned, seen_R, first, end, key_len, key_stride, turned_stride, factor,
    most_R, total_R, mixed_RV,
    N: tl.constexpr, P: tl.constexpr, V: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Tiles [first, end) of keys; row r sees the first `seen_R[r]` keys."""
    index_K = tl.arange(0, KEYS)
    for tile in tl.range(first, end, num_stages=STAGES):
        place_K = tile * KEYS + index_K
        key_at = keys + place_K.to(tl.int64)[:, None] * key_stride
        turned_at = turned + place_K.to(tl.int64)[:, None] * turned_stride + tl.arange(0, P)[None, :]
        if MASKED:
            is_key_K1 = (place_K < key_len)[:, None]
            nope_KN = tl.load(key_at + tl.arange(0, N)[None, :], mask=is_key_K1, other=0.0)
            turned_KP = tl.load(turned_at, mask=is_key_K1, other=0.0)
            value_KV = tl.load(key_at + N + tl.arange(0, V)[None, :], mask=is_key_K1, other=0.0)
        else:
            nope_KN = tl.load(key_at + tl.arange(0, N)[None, :])
            turned_KP = tl.load(turned_at)
            value_KV = tl.load(key_at + N + tl.arange(0, V)[None, :])
        score_RK = tl.dot(nope_RN, tl.trans(nope_KN), input_precision="ieee")
        score_RK = tl.dot(turned_RP, tl.trans(turned_KP), score_RK, input_precision="ieee") * factor
        if MASKED:
            score_RK = tl.where(place_K[None, :] < seen_R[:, None], score_RK, float("-inf"))
        new_R = tl.maximum(most_R, tl.max(score_RK, axis=1))
        base_R = tl.where(new_R == float("-inf"), 0.0, new_R)
        weight_RK = tl.exp2(score_RK - base_R[:, None])
        fade_R = tl.exp2(most_R - base_R)
        total_R = total_R * fade_R + tl.sum(weight_RK, axis=1)
        mixed_RV = mixed_RV * fade_R[:, None]
        mixed_RV = tl.dot(weight_RK.to(value_KV.dtype), value_KV, mixed_RV, input_precision="ieee")
        most_R = new_R
    return most_R, total_R, mixed_RV


@triton.jit(
    do_not_specialize=["numbers", "query_stride", "query_head_stride", "num_sequences", "num_heads", "scale"]
)  # fmt: skip
def mla_prefill_kernel(
    query, keys, turned, numbers, out, carried, carried_logs, scale: tl.float32, query_stride: tl.int32,
    query_head_stride: tl.int32, num_sequences: tl.int32, num_heads: tl.int32,
    N: tl.constexpr, P: tl.constexpr, V: tl.constexpr, X: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows, heads, sequences): the longest walks come first.

    The rows of a sequence whose context ends in this window go to `out` [T, A, V]; those of others, and the logarithms
    of their weights, to `carried` [T, A, V] and `carried_logs` [T, A], from where they are taken in the next window.
    """
    tile, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    sequence = tl.program_id(2)
    query_len = _number(numbers, 1, sequence, num_sequences)
    key_len = _number(numbers, 4, sequence, num_sequences)
    first_row = tile * ROWS
    if (first_row >= query_len) | (key_len <= 0):
        return
    start = _number(numbers, 0, sequence, num_sequences).to(tl.int64)
    key_start = _number(numbers, 2, sequence, num_sequences).to(tl.int64)
    first_key = _number(numbers, 3, sequence, num_sequences)
    context_len = _number(numbers, 5, sequence, num_sequences)
    row_R = first_row + tl.arange(0, ROWS)
    is_row_R = row_R < query_len
    query += start * (query_stride.to(tl.int64) * _UNIT) + head * (query_head_stride * _UNIT)
    query_at = query + (row_R * (query_stride * _UNIT))[:, None]
    nope_RN = tl.load(query_at + tl.arange(0, N)[None, :], mask=is_row_R[:, None], other=0.0)
    turned_RP = tl.load(query_at + N + tl.arange(0, P)[None, :], mask=is_row_R[:, None], other=0.0)
    key_stride = num_heads.to(tl.int64) * (N + V)
    keys += key_start * key_stride + head * (N + V)
    turned += key_start * X + (X - P)
    before = context_len - query_len - first_key  # keys of the window that come before the chunk; may be negative
    seen_R = tl.minimum(before + row_R + 1, key_len)
    longest = tl.minimum(before + tl.minimum(first_row + ROWS, query_len), key_len)
    num_tiles = tl.cdiv(tl.maximum(longest, 0), KEYS)
    num_full = tl.minimum(tl.maximum(before + first_row + 1, 0), key_len) // KEYS
    out_R = (start + row_R) * num_heads + head
    most_R = tl.full([ROWS], float("-inf"), tl.float32)
    total_R = tl.zeros([ROWS], tl.float32)
    mixed_RV = tl.zeros([ROWS, V], tl.float32)
    column_V = tl.arange(0, V)
    if first_key > 0:
        most_R = tl.load(carried_logs + out_R, mask=is_row_R, other=float("-inf"))
        total_R += 1.0  # which fades to nothing where a row saw none
        mixed_RV = tl.load(carried + out_R[:, None] * V + column_V[None, :], mask=is_row_R[:, None], other=0.0)
    factor = scale * _LOG2_E
    most_R, total_R, mixed_RV = _walk(
        nope_RN, turned_RP, keys, turned, seen_R, 0, num_full, key_len, key_stride, X, factor,
        most_R, total_R, mixed_RV, N, P, V, KEYS, False, STAGES,
    )  # fmt: skip
    most_R, total_R, mixed_RV = _walk(
        nope_RN, turned_RP, keys, turned, seen_R, num_full, num_tiles, key_len, key_stride, X, factor,
        most_R, total_R, mixed_RV, N, P, V, KEYS, True, STAGES,
    )  # fmt: skip
    # A row that saw nothing yet has no weight.
    mixed_RV = mixed_RV * (1.0 / tl.where(total_R > 0, total_R, 1.0))[:, None]
    out_at = out_R[:, None] * V + column_V[None, :]
    if first_key + key_len < context_len:
        log_R = tl.where(total_R > 0, most_R + tl.log2(tl.where(total_R > 0, total_R, 1.0)), float("-inf"))
        tl.store(carried_logs + out_R, log_R, mask=is_row_R)
        tl.store(carried + out_at, mixed_RV, mask=is_row_R[:, None])
    else:
        tl.store(out + out_at, mixed_RV.to(out.dtype.element_ty), mask=is_row_R[:, None])


_launch_gather = Launcher(mla_gather_kernel)
_launch_attend = Launcher(mla_prefill_kernel)


def gather(
    rows_NSX: torch.Tensor,
    block_tables_BM: torch.Tensor,
    numbers_6B: torch.Tensor,
    *,
    num_positions: int,
    most_positions: int,
    latent_dim: int,
) -> torch.Tensor:
    """Rows of a window, [L, X]; `most_positions` are those of one sequence."""
    row_len = rows_NSX.shape[2]
    out_LX = rows_NSX.new_empty(num_positions, row_len)
    words = block_tables_BM.element_size() // 4
    tables = in_words(block_tables_BM) if words == 2 else block_tables_BM
    num_sequences = numbers_6B.shape[1]
    arguments = (rows_NSX, tables, numbers_6B, out_LX, tables.stride(0), rows_NSX.stride(0) // 16, num_sequences)
    constants = _gather_constants(latent_dim, row_len - latent_dim, rows_NSX.shape[1], words)
    with torch.cuda.device_of(rows_NSX):
        _launch_gather((-(-most_positions // _GATHERED), num_sequences), arguments, constants)
    return out_LX


def attend(
    query_TAE: torch.Tensor,
    expanded_LW: torch.Tensor,
    rows_LX: torch.Tensor,
    numbers_6B: torch.Tensor,
    out_TAV: torch.Tensor,
    carried: tuple[torch.Tensor, torch.Tensor],
    *,
    max_query_len: int,
    most_positions: int,
    turned_dim: int,
    scale: float,
) -> None:
    """One window's share of the attention; everything was checked before.

    `carried` are sums and logarithms, float32, never touched where one window has all contexts to their ends;
    `most_positions` are those of one sequence, which decide nothing here.
    """
    num_heads, query_dim = query_TAE.shape[1:]
    arguments = (
        query_TAE, expanded_LW, rows_LX, numbers_6B, out_TAV, *carried, scale,
        query_TAE.stride(0) // 16, query_TAE.stride(1) // 16, numbers_6B.shape[1], num_heads,
    )  # fmt: skip
    sizes = query_dim - turned_dim, turned_dim, out_TAV.shape[2], rows_LX.shape[1]
    constants = _attend_constants(*sizes, max_query_len <= _SHORT_ROWS)
    grid = (-(-max_query_len // int(constants.by_name["ROWS"])), num_heads, numbers_6B.shape[1])
    with torch.cuda.device_of(query_TAE):
        _launch_attend(grid, arguments, constants)


@functools.cache
def _gather_constants(latent_dim: int, turned_dim: int, block_size: int, words: int) -> Constants:
    return Constants({
        "C": latent_dim, "P": turned_dim, "BLOCK": block_size, "WORDS": words, "TILE": _GATHERED, "num_warps": 4,
    })  # fmt: skip


@functools.cache
def _attend_constants(nope_dim: int, turned_dim: int, value_dim: int, row_len: int, is_short: bool) -> Constants:
    rows, warps, stages = (_SHORT_ROWS, 4, 2) if is_short else (_ROWS, 8, 3)
    return Constants({
        "N": nope_dim, "P": turned_dim, "V": value_dim, "X": row_len, "ROWS": rows, "KEYS": _KEYS, "STAGES": stages,
        "num_warps": warps, "num_stages": stages,
    })  # fmt: skip


def variants() -> list[Variant]:
    """What serving launches for DeepSeek-V3's heads, in blocks of 16."""
    found = [
        Variant(
            name="mla_prefill gather",
            kernel=mla_gather_kernel,
            types={
                **dict.fromkeys(("rows", "out"), "*bf16"),
                **dict.fromkeys(("tables", "numbers"), "*i32"),
                **dict.fromkeys(("table_stride", "row_stride_n", "num_sequences"), "i32"),
            },
            constants={"C": 512, "P": 64, "BLOCK": 16, "WORDS": 2, "TILE": _GATHERED},
            aligned=("rows", "out"),
            num_warps=4,
            max_registers=128,
        )
    ]
    for is_short in (False, True):
        constants = dict(_attend_constants(128, 64, 128, 576, is_short).by_name)
        warps, stages = constants.pop("num_warps"), constants.pop("num_stages")
        found.append(
            Variant(
                name=f"mla_prefill rows={constants['ROWS']}",
                kernel=mla_prefill_kernel,
                types={
                    **dict.fromkeys(("query", "keys", "turned", "out"), "*bf16"),
                    "numbers": "*i32",
                    **dict.fromkeys(("carried", "carried_logs"), "*fp32"),
                    **dict.fromkeys(("query_stride", "query_head_stride", "num_sequences", "num_heads"), "i32"),
                    "scale": "fp32",
                },
                constants=constants,
                aligned=("query", "keys", "turned", "out", "carried", "carried_logs"),
                num_warps=warps,
                num_stages=stages,
                contains=("LDGSTS", "HGMMA"),
                lacks=("HMMA",),
                on_amd=False,
            )
        )
    return found
