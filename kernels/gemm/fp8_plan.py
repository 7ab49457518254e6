"""Plans a float8 GEMM for a shape: operand sides, tiles and splits, tuned or else predicted. Pure functions.

There are two tables of `kernels.tuning`: "gemm_fp8" for quantized activations, and "linear_fp8" for activations that
are quantized in the same call. A row holds the fields of a `GemmPlan`, or `{"library": true}` where cuBLASLt is faster.
Shapes and sizes that no table has are planned by `kernels.gemm.fp8_cost` on Hopper and by `rule` elsewhere. Before all
that, one or two rows with a small weight are computed without tensor cores (`kernels.gemm.vector_plan`). Plans change
only at powers of two of the rows, so a warm-up that covers each power covers all plans.
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
SIZES = (8, 16, 32, 64, 128, 1024, 4096)  # tuned numbers of rows
FEW_ROWS = 128  # up to here both tables are tuned, beyond it only "gemm_fp8"
_NUM_PROGRAMS = 264  # two per multiprocessor of an H200
_MIN_STEPS = 4  # minimum steps of 128 columns in a split
_MAX_SPLITS = 16


class SwapAB(Enum):
    """Whether rows of the weight take the M side of the tensor cores' tiles, which has at least 64 rows."""

    AUTO = "auto"  # as measured
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmPlan:
    """How to compute a GEMM.

    Attributes:
        swap: whether the weight's rows take the M side of the tensor cores' tiles.
        BM: tokens of a tile.
        BN: rows of the weight in a tile, 32, 64 or 128; with swapped operands also 16. With workers and without splits
            or swapped operands, also 136 and 192, and with 64 tokens 80 and 160.
        groups: groups of 128 columns in a step, 1 or 2, or 4 if scales are copied; must divide the number of groups in
            K.
        stages: steps in flight at once.
        warps: warps of a program.
        copied: whether scales pass through shared memory like tiles, many steps ahead, or are loaded when needed.
        splits: parts that the columns are cut into (split-K).
        tma: whether the weight is read by TMA descriptors.
        fused: whether bfloat16 activations are quantized as they are loaded, not by a separate launch.
        pdl: whether the GEMM's programs start before the previous launch has ended (programmatic dependent launch).
        workers: warpgroups that multiply while other warps copy (`kernels.gemm.fp8_hopper_triton`), 1 or 2; 0: no warp
            specialization.
        depth: groups that a worker has in the tensor cores at once.
        vector: whether one or two rows, quantized as they are loaded, are computed without tensor cores
            (`kernels.gemm.linear`); the other fields are then ignored.
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
        """The plan as a row of a table."""
        return asdict(self)


INVARIANT_TILE = 64  # tokens; the smallest power of two that is at no batch size slower than narrower tiles


def splits_of(num_outputs: int, num_inputs: int, BN: int, num_row_tiles: int = 1) -> int:
    """Number of splits that gives every multiprocessor work, with no split too short to pay for its sum."""
    num_tiles = -(-num_outputs // BN) * num_row_tiles
    return max(1, min(_NUM_PROGRAMS // num_tiles, num_inputs // 128 // _MIN_STEPS, _MAX_SPLITS))


def rule(num_rows: int, num_outputs: int, num_inputs: int, *, swap: bool) -> GemmPlan:
    """Plan for shapes that were not tuned and cannot be predicted."""
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
    """One plan for any number of rows: tile, splits and order depend on the weight only."""
    splits = splits_of(num_outputs, num_inputs, 64)
    return GemmPlan(BM=INVARIANT_TILE, BN=64, stages=5, warps=4, splits=splits)


def size_of(num_rows: int) -> int:
    """Round the number of rows up to the size that represents it: the next power of two, from 8 on."""
    return max(SIZES[0], 1 << (num_rows - 1).bit_length())


def _row(table: str, num_rows: int, shape: str, device_index: int | None) -> Mapping[str, Any] | None:
    """Find a row of a table; beyond few rows, only rows of "gemm_fp8" that were tuned for many rows count."""
    size = size_of(num_rows)
    if size not in SIZES:
        return None
    if size <= FEW_ROWS:
        return find(table, shape, size, device_index)
    row = find("gemm_fp8", shape, size, device_index)
    return row if row is not None and (row.get("library") or row["BM"] >= FEW_ROWS) else None


@functools.cache
def machine_of(device_index: int | None) -> Machine:
    """Describe a GPU; without one, the GPU that the tables are for."""
    if device_index is None:
        return fp8_cost.H200
    about = torch.cuda.get_device_properties(device_index)
    like = fp8_cost.H200 if "H200" in about.name else fp8_cost.H100
    return Machine(about.multi_processor_count, like.bandwidth)


@functools.lru_cache(maxsize=4096)
def predicted_plan(size: int, num_outputs: int, num_inputs: int, machine: Machine) -> tuple[GemmPlan, bool]:
    """Return Baton's best plan on Hopper by prediction, and whether the library's GEMM is predicted to be faster.

    Args:
        size: number of rows as `size_of` returns it.
        num_outputs: N.
        num_inputs: K.
        machine: GPU.
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
    """Return the plan for a shape; None: the library's GEMM.

    Args:
        table: "gemm_fp8" or "linear_fp8".
        num_rows: rows of the activations.
        num_outputs: N.
        num_inputs: K.
        swap_ab: choice of the caller.
        can_swap: whether the device benefits from swapping.
        device_index: GPU whose table is used.

    Raises:
        KernelArgumentInvalid: swapping is requested, and the device cannot swap.
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
