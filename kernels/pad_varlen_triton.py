"""`pad_varlen` in Triton: programs write pieces of block table rows, of what there is for each token, and of lengths.

Every element is written by one thread and depends on the batch alone. L: elements of a piece.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from baton.kernels.dependent_launch import dependent_launch
from baton.kernels.variant import Variant

_PIECE_LEN = 512
_NUM_WARPS = 4
_ORDER = ("cu_query", "cu_kv", "query_lens", "prefix_lens", "block_tables", "positions", "slots")


def launch(batch: Sequence[torch.Tensor], graph: Sequence[torch.Tensor], null_block: int, early: bool = True) -> None:
    """Pad tensors in the order of `VarlenMetadata`; see `pad_varlen`, which has checked them."""
    live_tables, tables, live_slots, slots = batch[4], graph[4], batch[6], graph[6]
    num_pieces = triton.cdiv(tables.shape[1], _PIECE_LEN)
    num_rows = tables.shape[0] if num_pieces else 0
    num_of_tokens = triton.cdiv(len(slots), _PIECE_LEN)
    num_of_lengths = triton.cdiv(len(tables) + 1, _PIECE_LEN)
    _pad_kernel[(num_rows * num_pieces + num_of_tokens + num_of_lengths,)](
        *batch,
        *graph,
        live_tables.stride(0),
        tables.stride(0),
        live_tables.shape[0],
        tables.shape[0],
        live_tables.shape[1],
        tables.shape[1],
        len(live_slots),
        len(slots),
        null_block,
        L=_PIECE_LEN,
        num_warps=_NUM_WARPS,
        **dependent_launch(slots.device, early),
    )


@triton.jit
def _fill(live, padded, num_live, num_padded, place_L, filler):
    value_L = tl.load(live + place_L, mask=place_L < num_live, other=0)
    value_L = tl.where(place_L < num_live, value_L, filler)
    tl.store(padded + place_L, value_L, mask=place_L < num_padded)


_CHANGING = ["live_stride", "stride", "num_live", "num_rows", "num_live_entries", "num_entries", "num_live_tokens"]


@triton.jit(do_not_specialize=[*range(14), *_CHANGING, "num_tokens", "null_block"])
def _pad_kernel(
    live_cu_query,
    live_cu_kv,
    live_query_lens,
    live_prefix_lens,
    live_block_tables,
    live_positions,
    live_slots,
    cu_query,
    cu_kv,
    query_lens,
    prefix_lens,
    block_tables,
    positions,
    slots,
    live_stride: tl.int64,
    stride: tl.int64,
    num_live: tl.int32,
    num_rows: tl.int32,
    num_live_entries: tl.int32,
    num_entries: tl.int32,
    num_live_tokens: tl.int32,
    num_tokens: tl.int32,
    null_block: tl.int32,
    L: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    num_pieces = (num_entries + L - 1) // L
    num_of_tables = num_rows * num_pieces
    num_of_tokens = (num_tokens + L - 1) // L
    if program < num_of_tables:
        row = (program // num_pieces).to(tl.int64)
        place_L = program % num_pieces * L + tl.arange(0, L)
        num_there = tl.where(row < num_live, num_live_entries, 0)
        live_row = live_block_tables + row * live_stride
        _fill(live_row, block_tables + row * stride, num_there, num_entries, place_L, null_block)
    elif program < num_of_tables + num_of_tokens:
        place_L = (program - num_of_tables) * L + tl.arange(0, L)
        _fill(live_positions, positions, num_live_tokens, num_tokens, place_L, 0)
        _fill(live_slots, slots, num_live_tokens, num_tokens, place_L, -1)
    else:
        place_L = (program - num_of_tables - num_of_tokens) * L + tl.arange(0, L)
        is_total_L = place_L <= num_rows
        total_L = tl.load(live_cu_query + tl.minimum(place_L, num_live), mask=is_total_L, other=0)
        tl.store(cu_query + place_L, total_L, mask=is_total_L)
        total_L = tl.load(live_cu_kv + tl.minimum(place_L, num_live), mask=is_total_L, other=0)
        tl.store(cu_kv + place_L, total_L, mask=is_total_L)
        _fill(live_query_lens, query_lens, num_live, num_rows, place_L, 0)
        _fill(live_prefix_lens, prefix_lens, num_live, num_rows, place_L, 0)


def _variant(kind: str, early: bool) -> Variant:
    types = {f"{prefix}{name}": f"*{kind}" for prefix in ("live_", "") for name in _ORDER}
    types |= dict.fromkeys(("live_stride", "stride"), "i64")
    types |= dict.fromkeys((*_CHANGING[2:], "num_tokens", "null_block"), "i32")
    return Variant(
        name=f"pad_varlen {kind}{'' if early else ' late'}",
        kernel=_pad_kernel,
        types=types,
        constants={"L": _PIECE_LEN, "EARLY": early},
        num_warps=_NUM_WARPS,
        max_registers=64,
        max_shared_bytes=0,
        on_amd=not early,
    )


def variants() -> list[Variant]:
    """Of the engine's int64, and of the int32 of other makers' kernels."""
    return [_variant("i64", True), _variant("i64", False), _variant("i32", True)]
