"""How a float8 GEMM is computed at a shape: which operand is which side, tiles, splits. Tuned, else predicted; pure.

Two tables of `kernels.tuning`: "gemm_fp8" for quantized activations and "linear_fp8" for those that are quantized in
the same call. A row is the fields of a `GemmPlan`, or `{"library": true}` where cuBLASLt is faster. Shapes and sizes
that no table has are planned on Hopper by `kernels.gemm.fp8_cost`, elsewhere by `rule`. Before all that, one or two
rows and a small weight are computed by vectors (`kernels.gemm.vector_plan`). Plans change at powers of two of the rows
only, so that a warm-up that meets each of these meets all plans.
"""

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

import torch

from baton.kernels.arguments import require
from baton.kernels.gemm import fp8_cost, vector_plan
from baton.kernels.gemm.fp8_cost import Machine
from baton.kernels.tuning import find

GROUP_LEN = 128
TABLES = ("gemm_fp8", "linear_fp8")
SIZES = (8, 16, 32, 64, 128, 1024, 4096)  # rows that are tuned for
FEW_ROWS = 128  # up to here both tables are tuned, beyond it only that of the GEMM
_NUM_PROGRAMS = 264  # two for each multiprocessor of an H200
_MIN_STEPS = 4  # groups of 128 columns of a split
_MAX_SPLITS = 16


class SwapAB(Enum):
    """Whether rows of the weight take the side of the tensor cores that has at least 64."""

    AUTO = "auto"  # as measured
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmPlan:
    """One way to compute.

    Attributes:
        swap: whether the weight's rows are the rows of the tensor cores' tiles.
        BM: tokens of a tile.
        BN: rows of the weight of a tile, 32, 64 or 128; with swapped operands also 16.
        groups: of 128 columns in a step, 1 or 2, or 4 if scales are copied; must divide those of K.
        stages: steps under way at once.
        warps: of a program.
        copied: whether scales pass through shared memory as tiles do, many steps ahead, or are loaded when needed.
        splits: parts that the columns are cut into.
        tma: whether the weight is read by the copy engine of a multiprocessor (descriptors).
        fused: whether activations in bfloat16 are quantized as they are loaded, not by a launch of its own.
        pdl: whether the GEMM's programs start before the launch before it has ended.
        workers: warpgroups that multiply while other warps copy (`kernels.gemm.fp8_hopper_triton`), 1 or 2; 0: all
            warps do everything.
        depth: groups that a worker has in the tensor cores at once.
        vector: one or two rows, quantized as they are loaded, without tensor cores (`kernels.gemm.linear_vector`);
            the other fields say nothing.
    """

    swap: bool = True
    BM: int = 16
    BN: int = 64
    groups: int = 1
    stages: int = 6
    warps: int = 4
    copied: bool = False
    splits: int = 1
    tma: bool = False
    fused: bool = False
    pdl: bool = True
    workers: int = 0
    depth: int = 2
    vector: bool = False

    def row(self) -> dict[str, Any]:
        """As it stands in a table."""
        return asdict(self)


INVARIANT_TILE = 64  # tokens; the smallest power of two that costs no more than the narrower ones at any batch


def splits_of(num_outputs: int, num_inputs: int, BN: int, num_row_tiles: int = 1) -> int:
    """Splits that give every multiprocessor something to read, none of them too short to be worth its sum."""
    num_tiles = -(-num_outputs // BN) * num_row_tiles
    return max(1, min(_NUM_PROGRAMS // num_tiles, num_inputs // 128 // _MIN_STEPS, _MAX_SPLITS))


def rule(num_rows: int, num_outputs: int, num_inputs: int, *, swap: bool) -> GemmPlan:
    """What is used where nothing was tuned and nothing can be predicted."""
    if not swap:
        BM = 64 if num_rows <= 64 else 128
        splits = splits_of(num_outputs, num_inputs, 128, -(-num_rows // BM))
        return GemmPlan(swap=False, BM=BM, BN=128, stages=4, warps=8 if BM == 128 else 4, splits=splits)
    BM = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    wide = BM == 64
    BN = 128 if wide else 64
    splits = splits_of(num_outputs, num_inputs, BN, -(-num_rows // BM))
    return GemmPlan(BM=BM, BN=BN, stages=5 if wide else 6, warps=8 if wide else 4, splits=splits, fused=num_rows <= 16)


def invariant_plan(num_outputs: int, num_inputs: int) -> GemmPlan:
    """One for every number of rows: tile, splits and order are the weight's alone."""
    splits = splits_of(num_outputs, num_inputs, 64)
    return GemmPlan(BM=INVARIANT_TILE, BN=64, stages=5, warps=4, splits=splits)


def size_of(num_rows: int) -> int:
    """The number of rows that stands for these: the next power of two, from 8 on."""
    return max(SIZES[0], 1 << (num_rows - 1).bit_length())


def _row(table: str, num_rows: int, shape: str, device_index: int | None) -> Mapping[str, Any] | None:
    """The row of a table; what was tuned for few rows says nothing of many."""
    size = size_of(num_rows)
    if size not in SIZES:
        return None
    if size <= FEW_ROWS:
        return find(table, shape, size, device_index)
    row = find("gemm_fp8", shape, size, device_index)
    return row if row is not None and (row.get("library") or row["BM"] >= FEW_ROWS) else None


@functools.cache
def machine_of(device_index: int | None) -> Machine:
    """What is known of a GPU; that of the tables where there is none."""
    if device_index is None:
        return fp8_cost.H200
    about = torch.cuda.get_device_properties(device_index)
    like = fp8_cost.H200 if "H200" in about.name else fp8_cost.H100
    return Machine(about.multi_processor_count, like.bandwidth)


@functools.lru_cache(maxsize=4096)
def predicted_plan(size: int, num_outputs: int, num_inputs: int, machine: Machine) -> tuple[GemmPlan, bool]:
    """The best plan of Baton's own on Hopper by prediction, and whether the library's GEMM takes less.

    Args:
        size: as `size_of` gives it.
        num_outputs: N.
        num_inputs: K.
        machine: the GPU.
    """
    found = fp8_cost.best(size, num_outputs, num_inputs, machine)
    plan = GemmPlan(**asdict(found.tile), splits=found.splits)
    return plan, fp8_cost.library_us(size, num_outputs, num_inputs, machine) < found.us


def plan_of(
    table: str,
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    swap_ab: SwapAB,
    *,
    can_swap: bool,
    device_index: int | None,
) -> GemmPlan | None:
    """The plan for a shape; None: the library's GEMM.

    Args:
        table: "gemm_fp8" or "linear_fp8".
        num_rows: of the activations.
        num_outputs: N.
        num_inputs: K.
        swap_ab: what the caller wants.
        can_swap: whether the device gains by it.
        device_index: of the GPU, whose table is asked.

    Raises:
        KernelArgumentInvalid: it shall be swapped and cannot.
    """
    require(can_swap or swap_ab is not SwapAB.ON, "swap_ab", "is on, but the device has no instructions for it (sm_90)")
    if swap_ab is SwapAB.AUTO and can_swap and table == "linear_fp8":
        if vector_plan.is_quicker(num_rows, num_outputs, num_inputs, is_fp8=True):
            return GemmPlan(vector=True, fused=True)
    row = _row(table, num_rows, f"{num_outputs}x{num_inputs}", device_index)
    if swap_ab is SwapAB.AUTO and can_swap:
        if row is None:
            machine = machine_of(device_index)
            plan, is_slower = predicted_plan(size_of(num_rows), num_outputs, num_inputs, machine)
            return None if is_slower else plan
        return None if row.get("library") else GemmPlan(**row)
    swap = swap_ab is SwapAB.ON
    if row is not None and row.get("swap") is swap:
        return GemmPlan(**row)
    return rule(num_rows, num_outputs, num_inputs, swap=swap)
