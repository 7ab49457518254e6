"""Plans how `attention_decode` uses a GPU: tile and pipeline from a committed table or a rule, parts from bounds.

Plans depend only on sizes that the host knows, so that they are the same for every replay of a CUDA graph; the contents
of tensors are never read.

Legend: a *part* is the share of a sequence's positions that one program takes; a *tile* is what it takes in one step.
"""

import functools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from baton.kernels.attention import row_tile_plan_triton
from baton.kernels.attention import split_kv_plan_triton as attention_split_kv_plan_triton

Kept = TypeVar("Kept")


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Inputs of a plan, besides lengths.

    Attributes:
        tile: positions of a tile.
        num_shares: number of shares per KV head and tile of rows.
        max_context_len: upper bound of every length.
    """

    tile: int
    num_shares: int
    max_context_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TileDivision:
    """Inputs of a plan of `row_tile_plan_triton`, besides starts and lengths.

    Attributes:
        tile: positions of a step.
        tile_rows: rows of a tile.
        group: query heads of a KV head.
        num_slots: programs of a KV head, at least as many as there are tiles of rows.
        max_context_len: upper bound of every length.
    """

    tile: int
    tile_rows: int
    group: int
    num_slots: int
    max_context_len: int


def division(*, slots: int, num_programs: int, tile: int, max_context_len: int) -> Division:
    """Make as many shares as give each of `slots` one, if each share takes `num_programs` programs."""
    return Division(tile=tile, num_shares=max(1, slots // num_programs), max_context_len=max_context_len)


class SplitKVPlans:
    """The plans of one pass over the same sequences: the first layer makes them, and all layers use them."""

    def __init__(self) -> None:
        self._made: list[tuple[torch.Tensor, torch.Tensor | None, Division | TileDivision, torch.Tensor]] = []
        self._kept: dict[Hashable, Any] = {}

    def keep(self, key: Hashable, make: Callable[[], Kept]) -> Kept:
        """Return the value that the layers of the pass share under `key`; the first layer that asks makes it."""
        if key not in self._kept:
            self._kept[key] = make()
        found: Kept = self._kept[key]
        return found

    def find(self, lens: torch.Tensor, starts_E: torch.Tensor | None, wanted: Division | TileDivision) -> torch.Tensor:
        """Return the plan for sequences of these lengths, matched by tensor identity, not by contents.

        Args:
            lens: positions of rows [B, Q], whose largest ends a sequence; with `starts_E`, context lengths [B].
            starts_E: where the rows of each sequence begin; a sequence without rows counts as empty.
            wanted: how to divide the positions.
        """
        for known_lens, known_starts, known, plan in self._made:
            if known_lens is lens and known_starts is starts_E and known == wanted:
                return plan
        plan = make_plan(lens, starts_E, wanted)
        self._made.append((lens, starts_E, wanted, plan))
        return plan


def make_plan(lens: torch.Tensor, starts_E: torch.Tensor | None, wanted: Division | TileDivision) -> torch.Tensor:
    """Make one plan in the format of its kernel; never waits for the device."""
    if isinstance(wanted, TileDivision):
        assert starts_E is not None
        return row_tile_plan_triton.launch_plan(
            starts_E, lens, group=wanted.group, tile_rows=wanted.tile_rows, tile=wanted.tile,
            num_slots=wanted.num_slots, max_context_len=wanted.max_context_len,
        )  # fmt: skip
    return attention_split_kv_plan_triton.launch_plan(
        lens, starts_E, tile=wanted.tile, num_shares=wanted.num_shares, max_context_len=wanted.max_context_len
    )


MAX_PARTS = 128
INVARIANT_PART_LEN = 512  # positions of a part with batch-invariant numerics
_MAX_PART_LEN = 4096  # so that one long sequence among short ones does not leave the GPU idle for long
_BYTES_PER_NS = 4200.0  # H200 memory bandwidth; the relative cost of a part matters more than the exact value
_PROGRAM_BYTES_PER_NS = 24.0  # most that one program can request, however few programs run
_START_NS = 2500.0  # from a program's start to its first tile
_MERGE_NS = 2500.0  # the second kernel
_MERGE_STEP_NS = 800.0  # for each 32 parts after the first


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Tuned options; the fields of a row of the committed table.

    Attributes:
        tile: keys of a step.
        rows: rows of a program, padded; a power of two from 16 on.
        swap: whether K and V are the left operands.
        stages: pipeline stages.
        warps: warps of a program.
        slots: programs that the GPU runs at once.
        max_part_len: maximum positions of a part.
        pdl: whether the second kernel uses programmatic dependent launch.
        direct: how float8 is widened: 1 by conversion in the matmuls' registers, 2 there by moving bits, 0 through
            shared memory.
        apart: whether each warp keeps its own sums over its share of a tile's keys; only with `direct`.
        registers: maximum registers of a thread; 0: chosen by the compiler.
        shares: whether work is partitioned across sequences (`attention_split_kv`), `slots` being the number of
            programs wanted; otherwise each sequence has the same number of parts.
    """

    tile: int
    rows: int
    swap: bool
    stages: int
    warps: int
    slots: int
    max_part_len: int = _MAX_PART_LEN
    pdl: bool = False
    direct: int = 0
    apart: bool = False
    registers: int = 0
    shares: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Parameters of one call, besides its tensors.

    Attributes:
        scale: factor of scores.
        max_context_len: upper bound of every position + 1; the tables cover it.
        num_parts: parts of each sequence.
        part_len: positions of a part; 0: equal shares of the sequence.
        tile: keys of a step.
        rows: rows of a program.
        swap: whether K and V are the left operands.
        stages: tiles in flight, including the one being computed.
        warps: warps of a program.
        pdl: whether the second kernel is started early and waits for the first by itself (programmatic dependent
            launch).
        direct: as in `PlanOptions`.
        apart: as in `PlanOptions`.
        registers: as in `PlanOptions`.
    """

    scale: float
    max_context_len: int
    num_parts: int
    part_len: int
    tile: int
    rows: int
    swap: bool
    stages: int
    warps: int
    pdl: bool
    direct: int
    apart: bool
    registers: int


def rows_of_program(num_rows: int) -> int:
    """Rows of one KV head, padded for tensor cores; at most 64, so more rows take several programs."""
    return min(64, max(16, 1 << (num_rows - 1).bit_length()))


def default_options(num_rows: int, head_dim: int, kv_item_bytes: int) -> PlanOptions:
    """Options by rule, for shapes that no table has."""
    rows = rows_of_program(num_rows)
    if kv_item_bytes == 4:
        return PlanOptions(tile=32, rows=16, swap=False, stages=2, warps=4, slots=264)
    if kv_item_bytes == 1:
        return _float8_options(rows, head_dim)
    if head_dim > 128:
        if rows > 32:
            return PlanOptions(tile=64, rows=64, swap=False, stages=2, warps=8, slots=132)
        return PlanOptions(tile=32, rows=rows, swap=False, stages=3, warps=4, slots=396 if rows == 16 else 264)
    if head_dim < 128 and rows < 64:
        return PlanOptions(tile=64, rows=rows, swap=False, stages=3, warps=4, slots=396, max_part_len=8192, pdl=True)
    return PlanOptions(tile=64, rows=rows, swap=rows < 64, stages=3, warps=4, slots=264)


def _float8_options(rows: int, head_dim: int) -> PlanOptions:
    """Options by rule for float8 KV, which is widened in registers except for many rows and for heads under 64."""
    if rows > 32:
        tile, warps = (32, 8) if head_dim > 128 else (64, 4)
        return PlanOptions(tile=tile, rows=64, swap=False, stages=3, warps=warps, slots=132 if head_dim > 128 else 264)
    if head_dim < 64:
        return PlanOptions(tile=64, rows=rows, swap=False, stages=3, warps=4, slots=396 if rows == 16 else 264)
    base = PlanOptions(tile=64, rows=rows, swap=False, stages=3, warps=4, slots=396, direct=1)
    if head_dim > 128:
        return replace(base, slots=264)
    return replace(base, apart=True, registers=168) if rows == 16 else base


def invariant_options(num_rows: int, head_dim: int, kv_item_bytes: int) -> PlanOptions:
    """Batch-invariant options: the same arithmetic for any number of rows, with no table and fixed operand sides.

    A column of a matmul's result does not depend on the number of columns, so more rows may be padded to more columns.
    """
    if kv_item_bytes != 2:
        return default_options(16, head_dim, kv_item_bytes)
    rows = min(rows_of_program(num_rows), 32)
    if head_dim > 128:
        return PlanOptions(tile=64, rows=rows, swap=True, stages=3, warps=8, slots=132)
    return PlanOptions(tile=64, rows=rows, swap=True, stages=3, warps=4, slots=264)


def options_of_row(row: Mapping[str, Any]) -> PlanOptions:
    """Convert a row of the committed table."""
    return PlanOptions(**row)


def table_shape(num_rows: int, head_dim: int, kv_dtype_name: str, num_queries: int | None = None) -> str:
    """Name of a shape in the committed table: for one number of queries, or for any with as many rows."""
    shape = f"rows={rows_of_program(num_rows)} D={head_dim} {kv_dtype_name}"
    return shape if num_queries is None else f"{shape} q={num_queries}"


def read_table_shape(shape: str) -> tuple[int, int, str]:
    """Parse a `table_shape` into rows, D and the name of the dtype."""
    rows, head_dim, kind = shape.split()[:3]
    return int(rows.removeprefix("rows=")), int(head_dim.removeprefix("D=")), kind


@functools.lru_cache(maxsize=4096)
def num_parts(num_programs: int, max_context_len: int, kv_row_bytes: int, out_bytes: int, options: PlanOptions) -> int:
    """Choose the number of parts of a sequence with the least predicted time; among near equals, the smallest.

    Args:
        num_programs: programs of one part: sequences times KV heads times tiles of rows.
        max_context_len: upper bound of every sequence.
        kv_row_bytes: bytes of K and V at one position of one head.
        out_bytes: bytes that a program writes for a part, if there are several.
        options: options of the launch.
    """
    num_tiles = -(-max_context_len // options.tile)
    fewest = min(MAX_PARTS, num_tiles, -(-max_context_len // options.max_part_len))
    best, best_ns = fewest, float("inf")
    for count in range(fewest, min(MAX_PARTS, num_tiles) + 1):
        total = num_programs * count
        tile_bytes = options.tile * kv_row_bytes
        tile_ns = tile_bytes * max(1 / _PROGRAM_BYTES_PER_NS, min(total, options.slots) / _BYTES_PER_NS)
        waves = -(-total // options.slots)
        time_ns = waves * -(-num_tiles // count) * tile_ns + _START_NS * (1 + (waves - 1) / 4)
        if count > 1:
            time_ns += _MERGE_NS + (count - 1) // 32 * _MERGE_STEP_NS + 2 * total * out_bytes / _BYTES_PER_NS
        if time_ns < best_ns * 0.995:
            best, best_ns = count, time_ns
    return best
