"""Attention of short chunks over long prefixes, where `attention_prefill` has too few tiles of rows to fill a GPU.

A chunk of 16 rows over 8,192 positions is one tile of rows for each KV head, and one program would walk over all
positions. Here the positions are split as well (`attention_split_kv`), at the price of two more small launches. The
loops are those of decode steps or, where the options say so, those of the Hopper kernel, whose matmuls are faster.

Positions are not split where a row's result must not depend on the batch, because the split follows from the lengths of
all sequences.

Legend: as in `attention_prefill`.
"""

from collections.abc import Mapping
from typing import Any

import torch

from baton.kernels import tuning
from baton.kernels.arguments import require
from baton.kernels.attention import decode_plan as attention_plan
from baton.kernels.attention import decode_plan as attention_split_kv
from baton.kernels.attention import prefill_hopper_triton as attention_prefill_hopper_triton
from baton.kernels.attention import row_tile_plan_triton
from baton.kernels.attention import split_kv_triton as attention_split_kv_triton
from baton.kernels.attention.decode_plan import PlanOptions, SplitKVPlans, TileDivision
from baton.kernels.attention.decode_triton import STRIDE_UNIT

NAME = "attention_prefill_shares"  # in the tuned table
_FP8 = torch.float8_e4m3fn
_KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16", _FP8: "fp8"}
_TILE_ROWS = 128  # rows of a tile of the kernels that do not split positions
_MAX_PROGRAMS = 96  # up to this many of their programs, most multiprocessors are idle or wait for memory
_MAX_WIDE_PROGRAMS = 33  # the same for chunks of several of our tiles, whose matmuls are slower than theirs
_OUR_ROWS = 64
_MIN_BLOCK_SIZE = 16  # the loops are those of decode steps
_MIN_CONTEXT_LEN = 1024  # from this bound on, the extra launches and the partial results between them pay off
_MIN_WIDE_CONTEXT_LEN = 4096  # the same for chunks of several tiles, which write larger partial results


def is_ours(options: Mapping[str, Any]) -> bool:
    """Return whether a row of the tuned table is for this implementation."""
    return "slots" in options


def is_better(query_TAD: torch.Tensor, key_NHSD: torch.Tensor, num_sequences: int, bound: int, longest: int) -> bool:
    """Return whether unsplit programs would be too few, judging by sequences, positions and rows known on the host.

    It is asked where the Hopper kernel cannot take the KV (`kernels.attention.prefill_plan` elsewhere).
    """
    num_tokens, num_heads, _ = query_TAD.shape
    num_kv_heads = key_NHSD.shape[1]
    group = num_heads // num_kv_heads
    num_tiles = min(num_tokens * group // _TILE_ROWS + num_sequences, num_sequences * -(-longest * group // _TILE_ROWS))
    is_wide = longest * group > _OUR_ROWS
    least, most = (_MIN_WIDE_CONTEXT_LEN, _MAX_WIDE_PROGRAMS) if is_wide else (_MIN_CONTEXT_LEN, _MAX_PROGRAMS)
    return bound >= least and num_tiles * num_kv_heads <= most


def fits(
    query_TAD: torch.Tensor, key_NHSD: torch.Tensor, value_NHSD: torch.Tensor, key_scale: torch.Tensor | None
) -> bool:
    """Return whether the kernel can take these tensors: 16-byte aligned rows, and scales with float8 only."""
    unit = STRIDE_UNIT
    aligned = all(
        tensor.data_ptr() % 16 == 0 and all(stride % unit == 0 for stride in tensor.stride()[:-1])
        for tensor in (query_TAD, key_NHSD, value_NHSD)
    )
    is_dense = key_NHSD.stride()[2:] == (query_TAD.shape[2], 1)
    is_scaled = (key_NHSD.dtype == _FP8) == (key_scale is not None)
    is_served = key_NHSD.shape[2] >= _MIN_BLOCK_SIZE
    return aligned and is_dense and is_scaled and is_served and key_NHSD.stride(0) < 1 << 32


def attend(
    query_TAD: torch.Tensor,
    key_NHSD: torch.Tensor,
    value_NHSD: torch.Tensor,
    block_tables_BM: torch.Tensor,
    query_starts_E: torch.Tensor,
    context_lens_B: torch.Tensor,
    *,
    max_query_len: int,
    scale: float,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    plans: SplitKVPlans,
    options: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    """Compute `attention_prefill` for tensors that fit; the caller has checked all arguments."""
    num_heads, head_dim = query_TAD.shape[1:]
    num_kv_heads, block_size = key_NHSD.shape[1:3]
    group = num_heads // num_kv_heads
    row = _row(max_query_len, group, head_dim, key_NHSD) if options is None else options
    hopper = attention_prefill_hopper_triton
    on_hopper = _is_for_hopper(row) and hopper.fits(query_TAD, key_NHSD, value_NHSD)
    is_possible = options is None or on_hopper or not _is_for_hopper(options)
    require(is_possible, "options", "are of the form for Hopper, which cannot take these tensors here")
    max_context_len = block_tables_BM.shape[1] * block_size
    if on_hopper:
        tile_rows, tile = hopper.ROWS * row["GROUPS"], row["BN"]
        num_slots = row_tile_plan_triton.num_slots_of(
            num_multiprocessors=row["slots"], num_kv_heads=num_kv_heads, num_tokens=query_TAD.shape[0],
            num_sequences=block_tables_BM.shape[0], group=group, tile_rows=tile_rows, max_query_len=max_query_len,
        )  # fmt: skip
        tiles = TileDivision(
            tile=tile, tile_rows=tile_rows, group=group, num_slots=num_slots, max_context_len=max_context_len
        )
        return hopper.launch_divided(
            query_TAD, key_NHSD, value_NHSD, block_tables_BM, query_starts_E, context_lens_B,
            plans.find(context_lens_B, query_starts_E, tiles), max_query_len=max_query_len, scale=scale, options=row,
        )  # fmt: skip
    how = _options(max_query_len * group, head_dim, key_NHSD, row)
    wanted = attention_split_kv.division(
        slots=how.slots,
        num_programs=num_kv_heads * -(-max_query_len * group // how.rows),
        tile=how.tile,
        max_context_len=max_context_len,
    )
    plan = plans.find(context_lens_B, query_starts_E, wanted)
    return attention_split_kv_triton.launch(
        query_TAD, key_NHSD, value_NHSD, block_tables_BM, None, query_starts_E, key_scale, value_scale, plan,
        num_queries=max_query_len, scale=scale, num_shares=wanted.num_shares, how=how,
    )  # fmt: skip


def shape_of(max_query_len: int, group: int, head_dim: int, kv_dtype: torch.dtype) -> str:
    """Name of a shape in the tuned table."""
    return f"{attention_plan.table_shape(max_query_len * group, head_dim, _KINDS[kv_dtype])} G={group}"


def _row(max_query_len: int, group: int, head_dim: int, key_NHSD: torch.Tensor) -> Mapping[str, Any]:
    """Row of the tuned table; empty if there is none."""
    shape = shape_of(max_query_len, group, head_dim, key_NHSD.dtype)
    return tuning.find(NAME, shape, max_query_len, key_NHSD.device.index) or {}


def _is_for_hopper(row: Mapping[str, Any]) -> bool:
    return attention_prefill_hopper_triton.is_ours(row)


def _options(num_rows: int, head_dim: int, key_NHSD: torch.Tensor, row: Mapping[str, Any]) -> PlanOptions:
    """Options of the decode-step loops: from the table row, or by rule."""
    if row and not _is_for_hopper(row):
        return attention_plan.options_of_row(row)
    return attention_plan.default_options(num_rows, head_dim, key_NHSD.element_size())
