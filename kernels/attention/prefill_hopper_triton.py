# mypy: ignore-errors
"""Causal attention of chunks of prompts over paged KV: the form of `kernels.attention.prefill` for Hopper alone.

What is computed, and over which tiles, is as `kernels.attention.prefill_triton` says. Here the warps of a program are
specialized: one warp copies blocks of K and V to shared memory by TMA, two or three warpgroups of 64 rows each compute.
While one computes a softmax, the tensor cores work for another; and in each the P V matmul of a tile overlaps the next
tile's softmax (PIN: see `_pin`). With TURNS they issue their matmuls strictly by turns, so that they do not fall
into step. PERSISTENT programs are as many as multiprocessors and do one tile of rows after another; of a single chunk
alone, whose tiles grow evenly: those of several are better given to whichever is free.

A block of a head is S rows of D numbers. A box of TMA takes 64 columns of it, which is a swizzle's width, and is put
where a tile of BN rows has them: a tile lies as D // 64 pieces of [BN, 64], so the boxes of its blocks lie one after
the other. Of the tile that reaches past the sequence's end V comes by ordinary loads instead, zero past the end: what
lies there may be NaN, which weights of zero would not take away. K needs no such care, its scores are masked.

Chunks with too few tiles of rows for a GPU have their positions divided, too (`launch_divided`): then a program does
one part of a tile of rows, as `kernels.attention.row_tile_plan_triton` plans, which sums the parts up.

Source: Shah et al. 2024 (FlashAttention-3), section 3. It needs bfloat16 or float16 KV in blocks of 16 or more, and is
written in Gluon, which Triton's interpreter cannot run: `fits` says where it may be used.

Shapes: R rows of a warpgroup (64), N positions of a tile (BN), D head size, S positions of a block.
"""

# mypy: ignore-errors

import functools
from collections.abc import Mapping
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from baton.kernels.attention import prefill_plan, row_tile_plan_triton
from baton.kernels.attention.block_tables import in_words
from baton.kernels.attention.prefill_warp_specialized_triton import prefill_kernel
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.variant import Variant

ROWS = 64  # of a warpgroup
HEAD_DIMS = (64, 128, 256)
BLOCK_SIZES = (16, 32, 64)


@functools.cache
def num_multiprocessors(device_index: int | None) -> int:
    """Of a Hopper GPU; 0 of any other, and of what is none."""
    if device_index is None or torch.version.cuda is None or torch.cuda.get_device_capability(device_index)[0] != 9:
        return 0
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def is_ours(options: Mapping[str, Any]) -> bool:
    """Whether options are of this form."""
    return "TURNS" in options


def fits_size(device_index: int | None, head_dim: int, block_size: int) -> bool:
    """Whether this form is for that GPU, and for heads and blocks of that size."""
    return num_multiprocessors(device_index) > 0 and head_dim in HEAD_DIMS and block_size in BLOCK_SIZES


def fits(query_TAD: torch.Tensor, key_NHSD: torch.Tensor, value_NHSD: torch.Tensor) -> bool:
    """Whether this form can do it: on Hopper, compiled, and KV that TMA can take as rows of one size."""
    num_blocks, _, block_size, head_dim = key_NHSD.shape
    block_stride, head_stride, row_stride, _ = key_NHSD.stride()
    return (
        fits_size(query_TAD.device.index, head_dim, block_size)
        and key_NHSD.dtype == query_TAD.dtype
        and row_stride >= head_dim
        and row_stride % 8 == 0
        and block_stride % row_stride == head_stride % row_stride == 0
        and num_blocks * block_stride // row_stride < 2**31
        and key_NHSD.data_ptr() % 16 == value_NHSD.data_ptr() % 16 == 0
    )


_LAYOUT = gl.NVMMASharedLayout(128, 16, 2)


def _describe(kv_NHSD: torch.Tensor) -> TensorDescriptor:
    """K or V as the rows that lie between its first number and its last."""
    num_blocks, num_heads, block_size, head_dim = kv_NHSD.shape
    block_stride, head_stride, row_stride, _ = kv_NHSD.stride()
    num_rows = ((num_blocks - 1) * block_stride + (num_heads - 1) * head_stride) // row_stride + block_size
    return TensorDescriptor(kv_NHSD, [num_rows, head_dim], [row_stride, 1], [block_size, 64], _LAYOUT)


def launch(
    query_TAD: torch.Tensor,
    key_NHSD: torch.Tensor,
    value_NHSD: torch.Tensor,
    block_tables_BM: torch.Tensor,
    query_starts_E: torch.Tensor,
    context_lens_B: torch.Tensor,
    output_TAD: torch.Tensor,
    *,
    scale: float,
    options: Mapping[str, Any],
) -> None:
    """Write the output's rows; all arguments were checked and fit. Grid and constants follow from shapes alone."""
    num_tokens, num_heads, _ = query_TAD.shape
    num_kv_heads = key_NHSD.shape[1]
    num_sequences = block_tables_BM.shape[0]
    num_tiles = num_tokens * (num_heads // num_kv_heads) // (ROWS * options["GROUPS"]) + num_sequences
    total = num_tiles * num_kv_heads
    is_persistent = options["PERSISTENT"] and num_sequences == 1
    num_programs = min(total, num_multiprocessors(query_TAD.device.index)) if is_persistent else total
    nothing = output_TAD, context_lens_B, context_lens_B  # in the place of parts, their logarithms, and a plan
    places = query_TAD, key_NHSD, value_NHSD, block_tables_BM, query_starts_E, context_lens_B, output_TAD
    _launch((num_programs,), places, nothing, num_tiles, -(-total // num_programs), scale, options)


def launch_divided(
    query_TAD: torch.Tensor,
    key_NHSD: torch.Tensor,
    value_NHSD: torch.Tensor,
    block_tables_BM: torch.Tensor,
    query_starts_E: torch.Tensor,
    context_lens_B: torch.Tensor,
    plan: torch.Tensor,
    *,
    max_query_len: int,
    scale: float,
    options: Mapping[str, Any],
) -> torch.Tensor:
    """The same with positions divided by a plan of `row_tile_plan_triton` for tiles of GROUPS * 64 rows and of BN."""
    num_kv_heads, num_sequences = key_NHSD.shape[1], block_tables_BM.shape[0]
    num_slots, tile_rows = plan.shape[0] // row_tile_plan_triton.ENTRY_LEN, ROWS * options["GROUPS"]
    output_TAD = torch.empty(query_TAD.shape, dtype=query_TAD.dtype, device=query_TAD.device)
    parts = row_tile_plan_triton.make_parts(query_TAD, num_slots, num_kv_heads, tile_rows)
    places = query_TAD, key_NHSD, value_NHSD, block_tables_BM, query_starts_E, context_lens_B, output_TAD
    _launch((num_kv_heads, num_slots), places, (*parts, plan), 0, 0, scale, options)
    row_tile_plan_triton.merge(
        *parts, query_starts_E, plan, output_TAD, num_kv_heads=num_kv_heads, tile_rows=tile_rows,
        num_sequences=num_sequences, max_query_len=max_query_len,
    )  # fmt: skip
    return output_TAD


_Seven = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]  # fmt: skip


def _launch(
    grid: tuple[int, ...],
    places: _Seven,
    planned: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    num_tiles: int,
    num_rounds: int,
    scale: float,
    options: Mapping[str, Any],
) -> None:
    """By tiles and rounds, or by a plan if there are neither."""
    query_TAD, key_NHSD, value_NHSD, block_tables_BM, query_starts_E, context_lens_B, output_TAD = places
    num_heads, head_dim = query_TAD.shape[1:]
    num_kv_heads, block_size = key_NHSD.shape[1:3]
    tables = in_words(block_tables_BM)
    block_stride, head_stride, row_stride, _ = key_NHSD.stride()
    parts, part_logs, plan = planned
    arguments = (
        query_TAD,
        _describe(key_NHSD),
        _describe(value_NHSD),
        value_NHSD,
        output_TAD,
        parts,
        part_logs,
        tables,
        query_starts_E,
        context_lens_B,
        plan,
        query_TAD.stride(0),
        query_TAD.stride(1),
        output_TAD.stride(0),
        output_TAD.stride(1),
        block_stride // row_stride,
        head_stride // row_stride,
        num_tiles,
        num_rounds,
        tables.stride(0),
        block_tables_BM.shape[0],
        scale,
    )
    shape = num_kv_heads, num_heads // num_kv_heads, head_dim, block_size, row_stride
    words = block_tables_BM.element_size() // 4
    ways = tuple((name, options[name]) for name in _WAYS)
    with torch.cuda.device_of(query_TAD):
        _launch_prefill(grid, arguments, _constants(*shape, words, num_tiles == 0, *ways))


_WAYS = ("GROUPS", "BN", "STAGES", "TURNS", "PIN")


@functools.lru_cache(maxsize=256)
def _constants(
    num_kv_heads: int, group: int, head_dim: int, block_size: int, row_stride: int, words: int, planned: bool,
    *options: tuple[str, Any],
) -> Constants:  # fmt: skip
    shape = {"H": num_kv_heads, "G": group, "D": head_dim, "S": block_size, "ROW": row_stride, "WORDS": words}
    return Constants(shape | {"PLANNED": planned, "num_warps": 4, **dict(options)})


_launch_prefill = Launcher(prefill_kernel)


# What is compiled ahead of time: query heads, KV heads, head size, positions of a block, of a tile, tiles under way.
_SERVED = ((32, 8, 128, 16, 128, 2), (32, 8, 128, 64, 128, 2), (32, 4, 128, 16, 128, 2), (16, 2, 256, 16, 64, 2))


def _variant(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, options: Mapping[str, Any], planned: bool
) -> Variant:
    box = f"tensordesc<bf16[{block_size}, 64],{gl.NVMMASharedLayout(128, 16, 2)!r}>"
    types = (
        dict.fromkeys(("query", "value", "output"), "*bf16")
        | {"parts": "*fp32" if planned else "*bf16"}
        | dict.fromkeys(("keys", "values"), box)
    )
    types |= dict.fromkeys(("tables", "starts", "contexts", "plan"), "*i32")
    types |= {"scale": "fp32", "part_logs": "*fp32" if planned else "*i32"}
    strides = ("query_stride", "query_head_stride", "output_stride", "output_head_stride", "block_rows", "head_rows")
    types |= dict.fromkeys((*strides, "num_tiles", "num_rounds", "table_stride", "num_sequences"), "i32")
    words = [word for word in ("TURNS", "PIN") if options[word]] + ["shares"] * planned
    tile = " ".join([f"{ROWS * options['GROUPS']}x{options['BN']} s{options['STAGES']}", *words]).lower()
    return Variant(
        name=f"attention_prefill hopper {num_heads}/{num_kv_heads}/{head_dim} S={block_size} {tile}",
        kernel=prefill_kernel,
        types=types,
        constants={
            "H": num_kv_heads,
            "G": num_heads // num_kv_heads,
            "D": head_dim,
            "S": block_size,
            "ROW": head_dim,
            "WORDS": 2,
            **{name: options[name] for name in _WAYS},
            "PLANNED": planned,
        },
        aligned=("query", "value", "output", "parts", "tables", *strides),
        num_warps=4,
        contains=("HGMMA", "UTMALDG", "USETMAXREG"),
        lacks=("HMMA",),
        max_registers=168,
        may_spill=True,  # what all warps share, where they branch; the walk has all its tiles in registers
        on_amd=False,
    )


def variants() -> list[Variant]:
    """Of each served shape all options that may be chosen, and two that only the tuner and tests use."""
    found: dict[str, Variant] = {}
    for num_heads, num_kv_heads, head_dim, block_size, keys, stages in _SERVED:
        first = {"GROUPS": 2, "BN": keys, "STAGES": stages, "TURNS": True, "PIN": True}
        for options in (first, {**first, "TURNS": False, "PIN": False}, *prefill_plan.hopper_options(head_dim)):
            variant = _variant(num_heads, num_kv_heads, head_dim, block_size, options, "slots" in options)
            found[variant.name] = variant
    return list(found.values())
