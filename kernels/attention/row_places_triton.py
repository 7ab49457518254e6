# mypy: ignore-errors
"""`row_places` in Triton: a thread for each row of a step; all that changes from step to step is told at the launch.

Shapes: R rows of a program.
"""

# mypy: ignore-errors

import functools

import torch
import triton
import triton.language as tl

from baton.kernels.dependent_launch import dependent_launch
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.variant import Variant

_ROWS = 128
_NUM_WARPS = 4
_INTEGERS = ("first_stride", "limit_stride", "table_stride", "scratch_slot", "num_sequences", "num_rows", "block_size")


@triton.jit(do_not_specialize=["first", "limit", "tables", "positions", "slots", *_INTEGERS])
def _places_kernel(
    first, limit, tables, positions, slots,
    first_stride: tl.int64, limit_stride: tl.int64, table_stride: tl.int64, scratch_slot: tl.int64,
    num_sequences: tl.int32, num_rows: tl.int32, block_size: tl.int32, R: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row_R = tl.program_id(0) * R + tl.arange(0, R)
    is_row_R = row_R < num_sequences * num_rows
    sequence_R = (row_R // num_rows).to(tl.int64)
    # Divided as 32 bits, which is many times cheaper.
    wanted_R = tl.load(first + sequence_R * first_stride, mask=is_row_R, other=0).to(tl.int32) + row_R % num_rows
    last_R = tl.load(limit + sequence_R * limit_stride, mask=is_row_R, other=1).to(tl.int32) - 1
    position_R = tl.minimum(wanted_R, last_R)
    at_R = sequence_R * table_stride + position_R // block_size
    block_R = tl.load(tables + at_R, mask=is_row_R, other=0).to(tl.int64)
    slot_R = tl.where(wanted_R > last_R, scratch_slot, block_R * block_size + position_R % block_size)
    tl.store(positions + row_R, position_R.to(tl.int64), mask=is_row_R)
    tl.store(slots + row_R, slot_R, mask=is_row_R)


def launch(
    first_B: torch.Tensor,
    limit_B: torch.Tensor,
    block_tables_BM: torch.Tensor,
    positions_BQ: torch.Tensor,
    slots_BQ: torch.Tensor,
    *,
    block_size: int,
    scratch_slot: int,
    early: bool = True,
) -> None:
    """Write both; see `row_places`, which has checked the arguments."""
    num_sequences, num_rows = positions_BQ.shape
    arguments = (
        first_B, limit_B, block_tables_BM, positions_BQ, slots_BQ, first_B.stride(0), limit_B.stride(0),
        block_tables_BM.stride(0), scratch_slot, num_sequences, num_rows, block_size,
    )  # fmt: skip
    _launch_places((-(-num_sequences * num_rows // _ROWS),), arguments, _constants(first_B.device, early))


@functools.cache
def _constants(device: torch.device, early: bool) -> Constants:
    return Constants({"R": _ROWS, "num_warps": _NUM_WARPS, **dependent_launch(device, early)})


_launch_places = Launcher(_places_kernel)


def _variant(kind: str, early: bool) -> Variant:
    types = dict.fromkeys(("first", "limit", "tables"), f"*{kind}") | dict.fromkeys(("positions", "slots"), "*i64")
    types |= dict.fromkeys(_INTEGERS[:4], "i64") | dict.fromkeys(_INTEGERS[4:], "i32")
    return Variant(
        name=f"row_places {kind}{'' if early else ' late'}",
        kernel=_places_kernel,
        types=types,
        constants={"R": _ROWS, "EARLY": early},
        num_warps=_NUM_WARPS,
        max_registers=64,
        max_shared_bytes=0,
        on_amd=not early,
    )


def variants() -> list[Variant]:
    """Of the engine's int64."""
    return [_variant("i64", True), _variant("i64", False)]
