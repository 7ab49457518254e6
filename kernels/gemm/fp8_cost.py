"""Predicts the time of float8 GEMMs on Hopper: a cost model that plans shapes which no table has.

The predicted time of a launch is a sum of amounts of work, each times a cost per tile that was fitted once
(`kernels/tuned/gemm_fp8_cost.json`, from `scripts/fit_gemm_cost.py`):

    start    1
    group    groups of 128 columns of a program x programs of the busiest multiprocessor
    shared   groups of 128 columns of a program x rounds of programs, where several share a multiprocessor
    round    rounds of programs
    bytes    time to read both operands and write the result once, at the bandwidth of the GPU
    reread   time to read the weight again for each further tile of tokens
    split    1 if columns are split
    joined   time to write the sums of splits

The library's GEMMs are predicted likewise, from tiles of 128 x 128, and only from 128 rows: with fewer they are hardly
ever the faster ones, and costs fitted to those, too, are wrong where the choice is close. Pure functions: no tensors,
no GPU. Legend: M rows, N outputs, K inputs.
"""

import functools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources

GROUP_LEN = 128
LIBRARY_ROWS = 128  # fewest rows that the library is considered for
SPLITS = (1, 2, 3, 4, 6, 8, 12)
_MIN_GROUPS = 3  # minimum groups of a split
_MAX_PROGRAMS = 300  # maximum programs of a split-K GEMM
_FEW_ROWS = 16  # up to here only the smallest tile is considered
_TWO_PARTS_GAIN = 0.03  # least predicted gain for which a tile of two parts is chosen: few shapes were measured with it
_MID_ROWS = 64  # beyond that, tiles of up to this many rows, or up to M if larger, are considered


@dataclass(frozen=True, slots=True)
class Machine:
    """A Hopper GPU.

    Attributes:
        num_sms: number of multiprocessors.
        bandwidth: memory bandwidth in bytes per microsecond.
    """

    num_sms: int
    bandwidth: float


H100 = Machine(132, 3.35e6)
H200 = Machine(132, 4.8e6)


@dataclass(frozen=True, slots=True)
class Tile:
    """Configuration of a program of `kernels.gemm.fp8_hopper_triton`; fields as in `kernels.gemm.fp8_plan.GemmPlan`."""

    swap: bool
    BM: int
    BN: int
    stages: int
    workers: int
    depth: int

    @property
    def is_of_two_parts(self) -> bool:
        """Whether BN is no power of two."""
        return self.BN & (self.BN - 1) != 0


@dataclass(frozen=True, slots=True)
class TileCost:
    """A tile with its fitted costs, in microseconds or as factors of a time.

    Attributes:
        tile: configuration of a program.
        num_at_once: number of programs that fit on a multiprocessor.
        max_rows: most rows that it was measured with; None: any number.
        costs: start, group, shared, round, bytes, reread, split, joined.
    """

    tile: Tile
    num_at_once: int
    max_rows: int | None
    costs: tuple[float, ...]

    def splits(self, M: int, N: int, K: int, machine: Machine) -> Iterator[int]:
        """Numbers of splits to compare; only 1 where a second program fits on the multiprocessor, or of two parts."""
        yield 1
        num_tiles = -(-M // self.tile.BM) * -(-N // self.tile.BN)
        if self.num_at_once > 1 or num_tiles >= machine.num_sms or self.tile.is_of_two_parts:
            return
        for splits in SPLITS[1:]:
            if K // GROUP_LEN >= _MIN_GROUPS * splits and num_tiles * splits <= _MAX_PROGRAMS:
                yield splits

    def is_for(self, M: int) -> bool:
        """Return whether the tile was measured with `M` rows and would not waste much work on padding."""
        most = _FEW_ROWS if M <= _FEW_ROWS else max(M, _MID_ROWS)
        return self.tile.BM <= most and (self.max_rows is None or M <= self.max_rows)


def work_of(tile: Tile, num_at_once: int, splits: int, M: int, N: int, K: int, machine: Machine) -> tuple[float, ...]:
    """Amounts of work of a launch, in the order of `TileCost.costs`."""
    tiles_high = -(-M // tile.BM)
    num_programs = tiles_high * -(-N // tile.BN) * splits
    num_groups = -(-(K // GROUP_LEN) // splits)
    rounds = -(-num_programs // (machine.num_sms * num_at_once))
    is_split = splits > 1
    return (
        1.0,
        float(num_groups * -(-num_programs // machine.num_sms)),
        float(num_groups * rounds),
        float(rounds),
        (N * K + M * K + 2 * M * N) / machine.bandwidth,
        (tiles_high - 1) * N * K / machine.bandwidth,
        float(is_split),
        is_split * num_programs * tile.BM * tile.BN * 4 / machine.bandwidth,
    )


def library_work_of(M: int, N: int, K: int, machine: Machine) -> tuple[float, ...]:
    """Amounts of work of the library's GEMM: start, groups x rounds, rounds, bytes, and groups of the whole GEMM."""
    tiles_high = -(-M // 128)
    rounds = -(-tiles_high * -(-N // 128) // machine.num_sms)
    num_groups = K // GROUP_LEN
    return (
        1.0,
        float(num_groups * rounds),
        float(rounds),
        (N * K + M * K + 2 * M * N) / machine.bandwidth,
        num_groups * tiles_high * N / 128 / machine.num_sms,
    )


@dataclass(frozen=True, slots=True)
class Costs:
    """All fitted costs.

    Attributes:
        tiles: tiles with their costs.
        library: costs of the library, in the order of `library_work_of`.
    """

    tiles: tuple[TileCost, ...]
    library: tuple[float, ...]


def _sum(costs: tuple[float, ...], work: tuple[float, ...]) -> float:
    return sum(cost * amount for cost, amount in zip(costs, work, strict=True))


@dataclass(frozen=True, slots=True)
class Prediction:
    """A tile, its number of splits, and the predicted time of the launch in microseconds."""

    tile: Tile
    splits: int
    us: float


def library_us(M: int, N: int, K: int, machine: Machine) -> float:
    """Predicted time of the library's GEMM in microseconds; of few rows, infinite."""
    return math.inf if M < LIBRARY_ROWS else _sum(fitted().library, library_work_of(M, N, K, machine))


def best(M: int, N: int, K: int, machine: Machine) -> Prediction:
    """Return the tile and number of splits with the shortest predicted time, of two parts only if clearly shorter.

    Args:
        M: rows of the activations, positive.
        N: outputs, positive.
        K: inputs, a multiple of 128.
        machine: GPU.
    """
    found: Prediction | None = None
    shortest = math.inf
    for cost in fitted().tiles:
        if not cost.is_for(M):
            continue
        for splits in cost.splits(M, N, K, machine):
            us = _sum(cost.costs, work_of(cost.tile, cost.num_at_once, splits, M, N, K, machine))
            compared = us / (1 - _TWO_PARTS_GAIN) if cost.tile.is_of_two_parts else us
            if compared < shortest:
                found, shortest = Prediction(cost.tile, splits, us), compared
    assert found is not None, "there are tiles for any number of rows"
    return found


@functools.cache
def fitted() -> Costs:
    """Load the committed costs."""
    read = json.loads((resources.files("baton.kernels") / "tuned" / "gemm_fp8_cost.json").read_text())
    tiles = tuple(
        TileCost(Tile(**row["tile"]), row["num_at_once"], row["max_rows"], tuple(row["costs"])) for row in read["tiles"]
    )
    return Costs(tiles, tuple(read["library"]))
