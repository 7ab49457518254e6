"""What a float8 GEMM takes on Hopper, predicted: a model of the machine that plans shapes which no table has.

The time of a launch is a sum of what it does, each times a cost of its tile that was measured once
(`kernels/tuned/gemm_fp8_cost.json`, from `scripts/fit_gemm_cost.py`):

    start    1
    group    groups of 128 columns of a program x programs of the busiest multiprocessor
    shared   groups of 128 columns of a program x rounds of programs, where several share a multiprocessor
    round    rounds of programs
    bytes    time to read both operands and write the result once, at the bandwidth of the GPU
    reread   time to read the weight again for each further tile of tokens
    split    1 if columns are split
    joined   time to write the sums of splits

The library's GEMMs are predicted alike, from tiles of 128 x 128. Pure: no tensors, no GPU. Legend: M rows, N
outputs, K inputs.
"""

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources

GROUP_LEN = 128
SPLITS = (1, 2, 3, 4, 6, 8, 12)
_MIN_GROUPS = 3  # of a split
_MAX_PROGRAMS = 300  # of a GEMM that is split
_FEW_ROWS = 16  # up to here only the smallest tile is worth a thought
_MID_ROWS = 64  # from more than a few rows on, tiles of as many are


@dataclass(frozen=True, slots=True)
class Machine:
    """A Hopper GPU.

    Attributes:
        num_sms: multiprocessors.
        bandwidth: of its memory, in bytes a microsecond.
    """

    num_sms: int
    bandwidth: float


H100 = Machine(132, 3.35e6)
H200 = Machine(132, 4.8e6)


@dataclass(frozen=True, slots=True)
class Tile:
    """One form of program of `kernels.gemm.fp8_hopper_triton`, as in `kernels.gemm.fp8_plan.GemmPlan`."""

    swap: bool
    BM: int
    BN: int
    stages: int
    workers: int
    depth: int


@dataclass(frozen=True, slots=True)
class TileCost:
    """A tile and the costs of what its programs do, in microseconds or as factors of a time.

    Attributes:
        tile: the form.
        num_at_once: its programs that a multiprocessor has place for.
        max_rows: that it was measured with; None: any number.
        costs: start, group, shared, round, bytes, reread, split, joined.
    """

    tile: Tile
    num_at_once: int
    max_rows: int | None
    costs: tuple[float, ...]

    def splits(self, M: int, N: int, K: int, machine: Machine) -> Iterator[int]:
        """Numbers of splits to compare; one where a second program has place beside the first."""
        yield 1
        num_tiles = -(-M // self.tile.BM) * -(-N // self.tile.BN)
        if self.num_at_once > 1 or num_tiles >= machine.num_sms:
            return
        for splits in SPLITS[1:]:
            if K // GROUP_LEN >= _MIN_GROUPS * splits and num_tiles * splits <= _MAX_PROGRAMS:
                yield splits

    def is_for(self, M: int) -> bool:
        """Whether it was measured with so many rows, and does not compute many in vain."""
        most = _FEW_ROWS if M <= _FEW_ROWS else max(M, _MID_ROWS)
        return self.tile.BM <= most and (self.max_rows is None or M <= self.max_rows)


def work_of(tile: Tile, num_at_once: int, splits: int, M: int, N: int, K: int, machine: Machine) -> tuple[float, ...]:
    """What a launch does, in the order of `TileCost.costs`."""
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
    """What the library does: start, groups of rounds, rounds, bytes, and groups of the whole GEMM."""
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
    """All that was fitted.

    Attributes:
        tiles: the forms of program, and what they cost.
        library: in the order of `library_work_of`.
    """

    tiles: tuple[TileCost, ...]
    library: tuple[float, ...]


def _sum(costs: tuple[float, ...], work: tuple[float, ...]) -> float:
    return sum(cost * amount for cost, amount in zip(costs, work, strict=True))


@dataclass(frozen=True, slots=True)
class Prediction:
    """A tile, its splits and the time of a launch in microseconds."""

    tile: Tile
    splits: int
    us: float


def library_us(M: int, N: int, K: int, machine: Machine) -> float:
    """Time of the library's GEMM in microseconds."""
    return _sum(fitted().library, library_work_of(M, N, K, machine))


def best(M: int, N: int, K: int, machine: Machine) -> Prediction:
    """The fastest tile by prediction.

    Args:
        M: rows of the activations, positive.
        N: outputs, positive.
        K: inputs, a multiple of 128.
        machine: the GPU.
    """
    found: Prediction | None = None
    for cost in fitted().tiles:
        if not cost.is_for(M):
            continue
        for splits in cost.splits(M, N, K, machine):
            us = _sum(cost.costs, work_of(cost.tile, cost.num_at_once, splits, M, N, K, machine))
            if found is None or us < found.us:
                found = Prediction(cost.tile, splits, us)
    assert found is not None, "there are tiles for any number of rows"
    return found


@functools.cache
def fitted() -> Costs:
    """The committed costs."""
    read = json.loads((resources.files("baton.kernels") / "tuned" / "gemm_fp8_cost.json").read_text())
    tiles = tuple(
        TileCost(Tile(**row["tile"]), row["num_at_once"], row["max_rows"], tuple(row["costs"])) for row in read["tiles"]
    )
    return Costs(tiles, tuple(read["library"]))
