# mypy: ignore-errors
"""Causal attention of chunks over expanded latents: the form of `kernels.mla.prefill` for Hopper alone.

What is computed, and how windows carry sums, is as `kernels.mla.prefill_triton` says. Here the warps of a program are
specialized as in `kernels.attention.prefill_hopper_triton`, whose walk this is: one warp copies tiles by TMA, one or
two warpgroups of 64 rows each compute. TURNS, PIN and PERSISTENT programs (see there) were slower here. What was
carried is added at the end of a walk.

A box of TMA takes 64 columns, a swizzle's width, of BN positions of the window; a tile of keys is those of a head and
those with RoPE, which all heads share. Of the tile that reaches past a sequence's keys the values come by masked loads
instead, zero past the end: another sequence's lie there and may be NaN, which weights of zero would not take away. Keys
need no such care, their scores are masked.

It is written in Gluon, which Triton's interpreter cannot run: `fits` says where it may be used.

Shapes: R rows of a warpgroup (64), N columns of a head that no position turned, P those that are turned, V columns of a
value, L positions of a window, X elements of a row, W columns of all heads.
"""

# mypy: ignore-errors

import functools
import math
from collections.abc import Mapping

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from baton.kernels.attention import prefill_hopper_triton as attention_prefill_hopper_triton
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.mla.prefill_warp_specialized_triton import STRIDE_UNIT, mla_prefill_hopper_kernel
from baton.kernels.variant import Variant

ROWS = 64  # of a warpgroup
SIZES = (128, 64, 128)  # N, P and V
_SHARED_BYTES = 32 << 20  # of the L2 cache, for keys and values of the heads that are under way
_LONG = {"GROUPS": 2, "BN": 128, "STAGES": 2}
_SHORT = {"GROUPS": 1, "BN": 64, "STAGES": 2}
_SHORT_LEN = 512  # positions of a sequence up to which these are faster for chunks of any size
_LAYOUT = gl.NVMMASharedLayout(128, 16, 2)


def fits(query_TAE: torch.Tensor, rows_KSX: torch.Tensor, sizes: tuple[int, int, int]) -> bool:
    """Whether this form can do it: on Hopper, compiled, DeepSeek's heads (N, P, V), and rows that TMA can take."""
    on_hopper = attention_prefill_hopper_triton.num_multiprocessors(query_TAE.device.index) > 0
    return on_hopper and sizes == SIZES and rows_KSX.shape[2] % 8 == 0


def default_options(max_query_len: int, most_positions: int) -> Mapping[str, int]:
    """Options for chunks of up to so many rows, of a window that has up to so many positions of a sequence."""
    return _SHORT if max_query_len <= ROWS or most_positions <= _SHORT_LEN else _LONG


def launch(
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
    """One window's share of the attention; everything was checked before, and fits.

    `carried` as for `prefill_triton.attend`; `most_positions` are those of one sequence.
    """
    options = default_options(max_query_len, most_positions)
    num_heads, query_dim = query_TAE.shape[1:]
    nope_dim, value_dim = query_dim - turned_dim, out_TAV.shape[2]
    num_positions, num_columns = expanded_LW.shape
    row_len, num_sequences = rows_LX.shape[1], numbers_6B.shape[1]
    num_tiles = -(-max_query_len // (ROWS * options["GROUPS"]))
    together = _heads_together(num_heads, most_positions * (query_dim + value_dim) * 2)
    arguments = (
        query_TAE,
        TensorDescriptor(expanded_LW, [num_positions, num_columns], [num_columns, 1], [options["BN"], 64], _LAYOUT),
        TensorDescriptor(rows_LX, [num_positions, row_len], [row_len, 1], [options["BN"], 64], _LAYOUT),
        expanded_LW, numbers_6B, out_TAV, *carried, scale,
        query_TAE.stride(0) // STRIDE_UNIT, query_TAE.stride(1) // STRIDE_UNIT, num_sequences, num_heads,
        num_tiles, together,
    )  # fmt: skip
    constants = _constants(nope_dim, turned_dim, value_dim, row_len, *options.items())
    with torch.cuda.device_of(query_TAE):
        _launch_attend((num_tiles * num_heads, num_sequences), arguments, constants)


def _heads_together(num_heads: int, head_bytes: int) -> int:
    """How many heads are under way together: a power of two that divides their number and that the L2 cache holds."""
    held = max(1, _SHARED_BYTES // head_bytes)
    return math.gcd(num_heads, 1 << (held.bit_length() - 1))


@functools.lru_cache(maxsize=64)
def _constants(nope_dim: int, turned_dim: int, value_dim: int, row_len: int, *options: tuple[str, int]) -> Constants:
    sizes = {"N": nope_dim, "P": turned_dim, "V": value_dim, "X": row_len}
    return Constants({**sizes, **dict(options), "num_warps": 4, **_registers(dict(options))})


def _registers(options: Mapping[str, int]) -> Mapping[str, int]:
    """Triton's option for programs of one warpgroup, of which a multiprocessor has two at a time."""
    return {"maxnreg": 128} if options["GROUPS"] == 1 else {}


_launch_attend = Launcher(mla_prefill_hopper_kernel)


def _variant(options: Mapping[str, int]) -> Variant:
    box = f"tensordesc<bf16[{options['BN']}, 64],{_LAYOUT!r}>"
    integers = ("query_stride", "query_head_stride", "num_sequences", "num_heads", "num_tiles", "together")
    return Variant(
        name=f"mla_prefill hopper {ROWS * options['GROUPS']}x{options['BN']} s{options['STAGES']}",
        kernel=mla_prefill_hopper_kernel,
        types={
            **dict.fromkeys(("query", "values", "out"), "*bf16"),
            **dict.fromkeys(("expanded", "turned"), box),
            "numbers": "*i32",
            **dict.fromkeys(("carried", "carried_logs"), "*fp32"),
            **dict.fromkeys(integers, "i32"),
            "scale": "fp32",
        },
        constants=dict(zip("NPVX", (*SIZES, 576), strict=True)) | dict(options),
        aligned=("query", "values", "out", "carried", "carried_logs"),
        num_warps=4,
        contains=("HGMMA", "UTMALDG", "USETMAXREG"),
        lacks=("HMMA",),
        max_registers=168,
        may_spill=True,  # what all warps share, where they branch; the walk has all its tiles in registers
        on_amd=False,
        options=_registers(options),
    )


def variants() -> list[Variant]:
    """What serving launches for DeepSeek-V3's heads: of long walks, and of short ones."""
    return [_variant(options) for options in (_LONG, _SHORT)]
