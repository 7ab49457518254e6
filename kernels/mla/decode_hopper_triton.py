# mypy: ignore-errors
"""Attention of 64 rows of queries over latents: the form of `mla_decode` for Hopper alone.

What is computed, and how it is divided, is as `kernels.mla.decode_triton` says. Here the warps of a program are
specialized: one warp copies blocks of the pool to shared memory by TMA, two warpgroups compute. Each has the scores of
every other tile, and half of the columns of all sums; one multiplies while the other weighs. Few rows take it as well:
their step is bound by reading latents, which TMA delivers sooner than loads.

A box of TMA takes 64 columns of a block, a swizzle's width, and is put where a tile of 64 positions has them: a tile
lies as pieces of [64, 64], so the boxes of its blocks lie one after the other. Of the tile that reaches past the
sequence's end, the rows past it are made zero where they lie, for they may be NaN.

It is written in Gluon, which Triton's interpreter cannot run: `fits` says where it may be used.

Shapes: R rows of queries (64), T positions of a tile (64), C length of a latent, P columns that a position turned.
"""

# mypy: ignore-errors

import functools

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from baton.kernels.attention.block_tables import in_words
from baton.kernels.attention.merge_triton import merge_parts
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.mla.decode_plan import MLALaunch
from baton.kernels.mla.decode_triton import STRIDE_UNIT
from baton.kernels.mla.decode_warp_specialized_triton import mla_hopper_kernel
from baton.kernels.variant import Variant

ROWS = 64
TILE = 64
LATENT_DIM, TURNED_DIM = 512, 64
BLOCK_SIZES = (16, 32, 64)
_GROUPS = 2  # of panels in half a tile, each with a barrier of its own


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
        "C": latent_dim, "S": block_size, "WORDS": words, "TILE": TILE, "ROWS": ROWS, "GROUPS": _GROUPS, "num_warps": 4,
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
                "C": LATENT_DIM, "S": block_size, "WORDS": 2, "TILE": TILE, "ROWS": ROWS, "GROUPS": _GROUPS,
            },
            aligned=("query", "out", "parts", "part_logs"),
            num_warps=4,
            contains=("HGMMA", "UTMALDG", "USETMAXREG"),
            lacks=("HMMA",),
            max_registers=168,
            on_amd=False,
        )
        for block_size in (16, 64)
    ]  # fmt: skip
