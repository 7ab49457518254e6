#!/usr/bin/env python3
"""Fits the costs by which float8 GEMMs are planned (`kernels.gemm.fp8_cost`) to times of drawn shapes.

    python3 scripts/fit_gemm_cost.py measure --seed 11 --shapes 26 --out OUT/times.json   on a Hopper GPU
    python3 scripts/fit_gemm_cost.py fit benchmarks/results/gemm-fp8-drawn-*.json         writes the committed costs
    python3 scripts/fit_gemm_cost.py judge benchmarks/results/gemm-fp8-drawn-*.json       what predictions lose

Weights are read from memory: each call has another one, and together they are larger than the cache. A row of times is
[M, N, K, {plan: microseconds}]; a plan's name is as `name_of` gives it, the library's is "library".
"""

import argparse
import json
import math
import random
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from baton.kernels.gemm import fp8_cost
from baton.kernels.gemm.fp8_cost import (
    H100,
    H200,
    LIBRARY_ROWS,
    Costs,
    Machine,
    Tile,
    TileCost,
    library_work_of,
    work_of,
)
from baton.kernels.gemm.fp8_plan import GemmPlan, size_of

COSTS = Path(fp8_cost.__file__).parents[1] / "tuned" / "gemm_fp8_cost.json"
ROWS = (1, 16, 32, 48, 64, 96, 128, 512, 2048, 8192)
MANY_ROWS = (256, 512, 1024, 2048, 4096, 8192)
_LARGE = 128  # rows beyond which only tiles of 64 x 128 and more are measured
_NAME = re.compile(r"([sp])(\d+)x(\d+)\.(\d+)\.(\d)\.(\d)/(\d+)")
_SWEEPS = 250  # over all costs, until they no longer change
Row = tuple[int, int, int, dict[str, float]]
Point = tuple[tuple[float, ...], float]  # amounts of work, microseconds


def _tile(BM: int, BN: int, stages: int, depth: int, *, swap: bool = False) -> Tile:
    return Tile(swap, BM, BN, stages, 2, depth)


_LARGE_TILES = (
    _tile(128, 128, 6, 1),
    _tile(128, 64, 8, 2),
    _tile(128, 64, 4, 1),
    _tile(64, 128, 8, 2, swap=True),
)
TILES = (
    *_LARGE_TILES,
    Tile(True, 16, 64, 20, 1, 4),
    _tile(16, 64, 20, 2, swap=True),
    _tile(16, 64, 10, 2, swap=True),
    _tile(16, 128, 11, 4, swap=True),
    _tile(16, 128, 5, 4, swap=True),
    _tile(32, 64, 16, 2, swap=True),
    _tile(32, 64, 8, 2, swap=True),
    _tile(32, 128, 10, 2, swap=True),
    _tile(32, 128, 5, 2, swap=True),
    _tile(64, 128, 4, 1, swap=True),
    _tile(64, 64, 12, 2),
    _tile(64, 64, 4, 1),
    _tile(64, 32, 16, 1),
    _tile(64, 32, 8, 2),
    _tile(64, 32, 8, 1),
    _tile(128, 32, 10, 2),
    # Of two parts: BN is no power of two.
    _tile(64, 80, 10, 2),
    _tile(64, 136, 6, 1),
    Tile(False, 64, 160, 7, 1, 1),
    Tile(False, 64, 192, 6, 1, 1),
    _tile(128, 136, 6, 1),
    _tile(128, 192, 5, 1),
)


def name_of(tile: Tile, splits: int) -> str:
    """Of a plan in a row of times."""
    side = "s" if tile.swap else "p"
    return f"{side}{tile.BM}x{tile.BN}.{tile.stages}.{tile.workers}.{tile.depth}/{splits}"


def parsed(name: str) -> tuple[Tile, int] | None:
    """The tile and splits of a name; None if it is none of a plan with workers."""
    match = _NAME.fullmatch(name)
    if match is None or match[5] == "0":
        return None
    BM, BN, stages, workers, depth, splits = map(int, match.groups()[1:])
    return Tile(match[1] == "s", BM, BN, stages, workers, depth), splits


def max_rows(tile: Tile) -> int | None:
    """That a tile is measured with; None: any number."""
    if tile in _LARGE_TILES:
        return None
    return tile.BM if tile.is_of_two_parts else min(_LARGE, 4 * tile.BM)


def nonnegative(work_PF: np.ndarray, us_P: np.ndarray) -> tuple[float, ...]:
    """Costs [F] of least squared relative errors, none below zero, by coordinate descent."""
    relative_PF = work_PF / us_P[:, None]
    scale_F = np.sqrt((relative_PF**2).sum(0)) + 1e-12
    relative_PF = relative_PF / scale_F
    square_FF = relative_PF.T @ relative_PF + 1e-6 * np.eye(len(scale_F))
    target_F = relative_PF.sum(0)
    costs_F = np.zeros(len(scale_F))
    for _ in range(_SWEEPS):
        for i in range(len(costs_F)):
            costs_F[i] = max(0.0, costs_F[i] + (target_F[i] - square_FF[i] @ costs_F) / square_FF[i, i])
    return tuple(round(float(cost), 4) for cost in costs_F / scale_F)


def machine_of(kept: Mapping[str, Any]) -> Machine:
    """What times were measured on."""
    return H200 if "H200" in kept["hardware"] else H100


def _rows_of(kept: Mapping[str, Any]) -> Iterator[Row]:
    """To fit to. Beside tiles of two parts only the fastest of the others were measured: those times do not count."""
    yield from kept["rows"]
    for M, N, K, times in kept.get("two_part_tiles", {}).get("rows", ()):
        yield M, N, K, {name: us for name, us in times.items() if (plan := parsed(name)) and plan[0].is_of_two_parts}


def fit(*measured: Mapping[str, Any]) -> Costs:
    """The costs of all tiles and of the library."""
    from baton.kernels.gemm.fp8_hopper_triton import programs_at_once

    points: dict[Tile, list[Point]] = defaultdict(list)
    library = []
    for machine, M, N, K, times in ((machine_of(kept), *row) for kept in measured for row in _rows_of(kept)):
        for name, us in times.items():
            if name == "library":
                if M >= LIBRARY_ROWS:
                    library.append((library_work_of(M, N, K, machine), us))
            elif (plan := parsed(name)) is not None and (plan[0] in TILES or plan[0].is_of_two_parts):
                at_once = programs_at_once(GemmPlan(**asdict(plan[0])))
                points[plan[0]].append((work_of(plan[0], at_once, plan[1], M, N, K, machine), us))
    tiles = []
    for tile in sorted({*points} & {*TILES}, key=lambda tile: name_of(tile, 1)):
        costs = _of_two_parts(tile, points) if tile.is_of_two_parts else _fitted(points[tile])
        tiles.append(TileCost(tile, programs_at_once(GemmPlan(**asdict(tile))), max_rows(tile), costs))
    return Costs(tuple(tiles), _fitted(library))


def _of_two_parts(tile: Tile, points: Mapping[Tile, Sequence[Point]]) -> tuple[float, ...]:
    """Costs of a tile from all measured tiles of two parts with as many tokens, linear in BN.

    Each alone has too few shapes: fitted to half of them, it was often chosen in the other half where it is slower.
    """
    start, group, group_wide, round_, round_wide, read = _fitted(
        [
            ((work[0], work[1], work[1] * other.BN, work[3], work[3] * other.BN, work[4]), us)
            for other, found in points.items()
            if other.is_of_two_parts and other.BM == tile.BM
            for work, us in found
        ]
    )
    costs = (start, group + group_wide * tile.BN, 0.0, round_ + round_wide * tile.BN, read, 0.0, 0.0, 0.0)
    return tuple(round(cost, 4) for cost in costs)


def _fitted(points: Sequence[Point]) -> tuple[float, ...]:
    return nonnegative(np.array([work for work, _ in points]), np.array([us for _, us in points]))


def losses(rows: Sequence[Row], machine: Machine) -> dict[int, list[float]]:
    """By number of rows: time of the best of the plans and the library over that of the chosen one, 1 where they agree.

    Where the library was not measured, or the chosen plan was not, nothing is said of it.
    """
    found = defaultdict(list)
    for M, N, K, times in rows:
        plans = {name: us for name, us in times.items() if parsed(name) or name == "library"}
        best = fp8_cost.best(size_of(M), N, K, machine)
        name = name_of(best.tile, best.splits)
        if "library" in plans and fp8_cost.library_us(size_of(M), N, K, machine) < best.us:
            name = "library"
        if name in plans:
            found[M].append(min(plans.values()) / plans[name])
    return dict(found)


def write(costs: Costs, hardware: str, path: Path) -> None:
    """The committed file: a line for each tile."""
    lines = ",\n".join(f"  {json.dumps({**asdict(cost), 'costs': list(cost.costs)})}" for cost in costs.tiles)
    head = f' "fitted_on": {json.dumps(hardware)},\n "library": {json.dumps(list(costs.library))},\n "tiles": [\n'
    path.write_text("{\n" + head + lines + "\n ]\n}\n")


def drawn(seed: int, num_shapes: int, most: float = 300e6) -> list[tuple[int, int]]:
    """(N, K): multiples of 128 from 1,024 to 32,768, evenly on a scale of logarithms, of at most so many elements."""
    source = random.Random(seed)
    found: list[tuple[int, int]] = []
    while len(found) < num_shapes:
        N, K = (round(math.exp(source.uniform(math.log(8), math.log(256)))) * 128 for _ in range(2))
        if N * K <= most and (N, K) not in found:
            found.append((N, K))
    return found


def _plans(M: int, N: int, K: int) -> Iterator[GemmPlan]:
    from baton.kernels.gemm.fp8_hopper_triton import programs_at_once

    for tile in TILES if M <= _LARGE else _LARGE_TILES:
        plan = GemmPlan(**asdict(tile))
        cost = TileCost(tile, programs_at_once(plan), max_rows(tile), ())
        if cost.is_for(size_of(M)):
            yield from (replace(plan, splits=splits) for splits in cost.splits(M, N, K, H100))


def measure(seed: int, num_shapes: int, num_rows: Sequence[int] = ROWS) -> tuple[str, list[Row]]:
    """Times of all plans and of the library on the GPU here."""
    import torch

    from baton.bench.kernel_bench.timing import GraphTimer
    from baton.kernels.gemm.fp8 import gemm_fp8
    from baton.kernels.gemm.fp8_weight import Fp8Weight
    from baton.kernels.gemm.quantize_fp8 import quantize_fp8
    from baton.kernels.gemm.scaled_mm import ROWS_MULTIPLE, Library

    device, cache_bytes = torch.device("cuda", 0), 130_000_000
    library = Library()
    rows: list[Row] = []

    def us_of(calls: list[Callable[[], Any]]) -> float:
        return GraphTimer(calls, device, 3.0).measure_ms() * 1e3

    for N, K in drawn(seed, num_shapes):
        weights = []
        for _ in range(min(96, -(-cache_bytes // (N * K)))):
            values = torch.randint(0, 0x7E, (N, K), dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
            weights.append(Fp8Weight.of(values, torch.rand(N // 128, K // 128, device=device) * 1e-3))
        for M in num_rows:
            a, scales = quantize_fp8(torch.randn(M, K, device=device, dtype=torch.bfloat16), pad_to=ROWS_MULTIPLE)
            times = {}
            for plan in _plans(M, N, K):
                tile = Tile(plan.swap, plan.BM, plan.BN, plan.stages, plan.workers, plan.depth)
                times[name_of(tile, plan.splits)] = us_of(
                    [partial(gemm_fp8, a[:M], scales[:, :M], weight, plan=plan) for weight in weights]
                )
            if library.gemm(a, scales, weights[0]) is not None:
                times["library"] = us_of([partial(library.gemm, a, scales, weight) for weight in weights])
            rows.append((M, N, K, {name: round(us, 2) for name, us in times.items()}))
            torch.cuda.empty_cache()
    return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}", rows


def main() -> None:
    """As the module says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "fit", "judge"))
    parser.add_argument("files", nargs="*", type=Path, help="of times, to fit or to judge")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--shapes", type=int, default=26)
    parser.add_argument(
        "--many-rows", action="store_true", help="measure 256 to 8,192 rows, where the library is chosen"
    )
    parser.add_argument("--out", type=Path, default=COSTS)
    args = parser.parse_args()
    if args.what == "measure":
        hardware, rows = measure(args.seed, args.shapes, MANY_ROWS if args.many_rows else ROWS)
        args.out.write_text(json.dumps({"hardware": hardware, "rows": rows}))
        return
    measured = [json.loads(file.read_text()) for file in args.files]
    if args.what == "fit":
        write(fit(*measured), "; ".join(kept["hardware"] for kept in measured), args.out)
        return
    for kept in measured:
        print(kept["hardware"])
        for M, found in sorted(losses(kept["rows"], machine_of(kept)).items()):
            print(f"M={M}: {len(found)} shapes, mean {statistics.mean(found):.3f}, worst {min(found):.2f}")


if __name__ == "__main__":
    main()
