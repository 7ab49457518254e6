"""Predicted times of float8 GEMMs: what they choose among measured plans, and what they may; phases of stages.

The times are of one H100 and, of many rows, of one H200 (`benchmarks/results/gemm-fp8-drawn-*.json`): shapes that the
costs were fitted to, and shapes that nothing was fitted to.
"""

import json
import random
import statistics
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import baton
from baton.bench.kernel_cases.gemm_fp8 import tuning as tuning_points
from baton.engine.graphs.kernel_warm_up import classes
from baton.kernels.gemm import fp8_cost, vector_plan
from baton.kernels.gemm.fp8_cost import H100, H200, Machine
from baton.kernels.gemm.fp8_hopper_triton import is_form, programs_at_once, turns_of, variants
from baton.kernels.gemm.fp8_plan import SIZES, TABLES, GemmPlan, SwapAB, plan_of, predicted_plan, size_of
from baton.kernels.gemm.fp8_weight import Fp8Weight
from baton.kernels.gemm.scaled_mm import _turned
from baton.kernels.tuning import table
from baton.scripts import fit_gemm_cost
from baton.tests.kernels.test_gemm_fp8 import data

pytestmark = pytest.mark.fast
RESULTS = Path(baton.__file__).parent / "benchmarks/results"
KEPT, MANY = (json.loads((RESULTS / f"gemm-fp8-drawn-{gpu}.json").read_text()) for gpu in ("h100", "h200"))
COUNTERS = 16_384


def plans():
    """All that serving may launch or a tuner try."""
    rows = [row for name in TABLES for sizes in table().get(name, {}).values() for row in sizes.values()]
    rows += [row for point in tuning_points() for row in point.candidates]
    found = {GemmPlan(**row) for row in rows if row.get("workers")}
    found |= {GemmPlan(**asdict(cost.tile)) for cost in fp8_cost.fitted().tiles}
    return sorted(found, key=str)


def test_a_worker_sees_every_phase_of_a_stage_that_it_waits_for():
    """It waits for a parity: having missed a phase it would take the one before for its own, and read old tiles."""
    for plan in plans():
        assert is_form(plan), plan
        turns = turns_of(plan)
        workers_of = [{group % turns for group in range(stage, 64, plan.stages)} for stage in range(plan.stages)]
        assert all(len(workers) == 1 for workers in workers_of), plan
    odd = GemmPlan(swap=False, BM=64, BN=64, stages=5, workers=2, depth=1)
    assert not is_form(odd)
    assert is_form(replace(odd, stages=4))
    assert is_form(replace(odd, BM=128, stages=5)), "each of both has rows of its own, and all stages"


@pytest.mark.long
def test_the_committed_costs_are_those_of_the_kept_times():
    again, kept = fit_gemm_cost.fit(KEPT, MANY), fp8_cost.fitted()
    assert [replace(cost, costs=()) for cost in again.tiles] == [replace(cost, costs=()) for cost in kept.tiles]
    for mine, theirs in zip([*again.tiles, again.library], [*kept.tiles, kept.library], strict=True):
        costs = mine if isinstance(mine, tuple) else mine.costs
        assert costs == pytest.approx(theirs if isinstance(theirs, tuple) else theirs.costs, rel=1e-2, abs=2e-3)


def test_predictions_choose_nearly_the_fastest_measured_plan():
    found = fit_gemm_cost.losses(KEPT["rows"], H100)
    assert set(found) == set(fit_gemm_cost.ROWS)
    assert all(len(losses) > 30 for losses in found.values())
    means = {M: statistics.mean(losses) for M, losses in found.items()}
    assert all(mean > 0.94 for mean in means.values()), means
    assert statistics.mean(means.values()) > 0.965
    assert all(min(losses) > 0.75 for losses in found.values())


def test_of_shapes_that_nothing_was_fitted_to_the_faster_of_both_is_chosen():
    kept = KEPT["held_out"]["rows"]
    drawn = {(N, K) for _, N, K, _ in KEPT["rows"]}
    losses, num_later = [], 0  # tiles of two parts came after these figures
    for M, N, K, times in kept:
        if (N, K) in drawn:
            continue
        plan, is_slower = predicted_plan(size_of(M), N, K, H100)
        num_later += fp8_cost.best(size_of(M), N, K, H100).tile.is_of_two_parts
        if fit_gemm_cost.parsed(times["own_plan"]) == (fp8_cost.best(size_of(M), N, K, H100).tile, plan.splits):
            losses.append(min(times["own"], times["library"]) / (times["library"] if is_slower else times["own"]))
    assert len(losses) + num_later > 150
    assert num_later < 15
    assert statistics.mean(losses) > 0.985
    assert min(losses) > 0.75


def test_of_many_rows_the_faster_of_own_plans_and_the_library_is_chosen():
    """With the library's costs of one H100 alone, 128 x 128 tiles were chosen that took up to 1.5 times as long."""
    drawn = {(N, K) for _, N, K, _ in MANY["rows"]}
    assert not drawn & {(N, K) for _, N, K, _ in MANY["held_out"]["rows"]}
    for rows in (MANY["rows"], MANY["held_out"]["rows"]):
        found = fit_gemm_cost.losses(rows, fit_gemm_cost.machine_of(MANY))
        assert set(found) == set(fit_gemm_cost.MANY_ROWS)
        assert sum(map(len, found.values())) == len(rows), "whatever is chosen was measured"
        assert all(statistics.mean(losses) > 0.99 for losses in found.values())
        assert all(min(losses) > 0.85 for losses in found.values())


def test_the_library_is_for_many_rows():
    for rows, machine in ((KEPT["rows"], H100), (MANY["rows"], H200)):
        for N, K in {(N, K) for _, N, K, _ in rows}:
            for M in SIZES:
                assert M >= fp8_cost.LIBRARY_ROWS or not predicted_plan(M, N, K, machine)[1]
    few = [times for M, _, _, times in KEPT["rows"] if size_of(M) < fp8_cost.LIBRARY_ROWS and "library" in times]
    ratios = [min(us for name, us in times.items() if name != "library") / times["library"] for times in few]
    assert max(ratios) < 1.02, "there it was never much faster"


@given(
    M=st.integers(1, 20_000),
    N=st.integers(1, 60_000),
    groups=st.integers(1, 300),
    machine=st.sampled_from([H100, H200, Machine(78, 2e6)]),
)
@pytest.mark.long
def test_any_shape_gets_a_form_that_computes_it_whole(M, N, groups, machine):
    plan, _ = predicted_plan(size_of(M), N, 128 * groups, machine)
    assert is_form(plan)
    assert plan.splits <= groups
    tiles = -(-size_of(M) // plan.BM) * -(-N // plan.BN)
    assert plan.splits == 1 or tiles * max(plan.BM, plan.BN) // 64 <= COUNTERS
    best = fp8_cost.best(size_of(M), N, 128 * groups, machine)
    assert 0 < best.us < 1e9
    assert 0 < fp8_cost.library_us(size_of(M), N, 128 * groups, machine)


def test_what_predictions_launch_is_compiled_for_the_gates():
    traits = {variant.name.partition(" pdl")[0] for variant in variants()}
    for cost in fp8_cost.fitted().tiles:
        plan = GemmPlan(**asdict(cost.tile))
        assert cost.num_at_once == programs_at_once(plan), plan
        side = "swap" if plan.swap else "plain"
        name = (
            f"gemm_fp8 hopper {side} {plan.BM}x{plan.BN} stages={plan.stages} workers={plan.workers} depth={plan.depth}"
        )
        assert name in traits
        assert (f"{name} split" in traits) is is_form(replace(plan, splits=2))


def test_tiles_of_two_parts_are_not_split():
    for BN in (32, 80, 128, 136, 160):
        tile = fp8_cost.Tile(False, 64, BN, 6, 2, 1)
        assert is_form(GemmPlan(**asdict(tile))), BN
        splits = [*fp8_cost.TileCost(tile, 1, 128, ()).splits(64, 1024, 8192, H200)]
        assert (len(splits) > 1) is (BN in (32, 128)), BN


def two_part_ratios(rows):
    """What the fastest plan, and the fastest other library, took of the chosen plan's time; how often of two parts."""
    of_best, of_others, num_two_parts = [], [], 0
    for M, N, K, times in rows:
        size = size_of(M)
        best = fp8_cost.best(size, N, K, H200)
        is_two_parts = best.tile.is_of_two_parts and best.us <= fp8_cost.library_us(size, N, K, H200)
        chosen = times[fit_gemm_cost.name_of(best.tile, best.splits) if is_two_parts else "default"]
        plans = [us for name, us in times.items() if fit_gemm_cost.parsed(name) or name in ("default", "library")]
        of_best.append(min(plans) / chosen)
        of_others.append(min(times[name] for name in ("library", "deep_gemm") if name in times) / chosen)
        num_two_parts += is_two_parts
        assert not is_two_parts or chosen < 1.01 * times["default"], (M, N, K)
    return of_best, of_others, num_two_parts


def test_tiles_of_two_parts_are_chosen_where_they_were_the_fastest():
    """Before them the fastest other library took 1.006 times as long as the chosen plan, in 22 cells less than 0.9."""
    of_best, of_others, num_two_parts = two_part_ratios(MANY["two_part_tiles"]["rows"])
    assert len(of_best) == 58
    assert num_two_parts > 15
    assert statistics.mean(of_best) > 0.98
    assert min(of_best) > 0.84
    assert statistics.mean(of_others) > 1.05
    assert min(of_others) > 0.83
    assert sum(ratio < 0.9 for ratio in of_others) < 10


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_tiles_of_two_parts_are_chosen_so_at_shapes_that_they_were_not_fitted_to(monkeypatch, seed):
    rows = MANY["two_part_tiles"]["rows"]
    shapes = sorted({(N, K) for _, N, K, _ in rows})
    random.Random(seed).shuffle(shapes)
    of_best, of_others = [], []
    for half in (shapes[::2], shapes[1::2]):
        inside, outside = ([row for row in rows if ((row[1], row[2]) in half) is kind] for kind in (True, False))
        costs = fit_gemm_cost.fit(KEPT, {**MANY, "two_part_tiles": {"rows": inside}})
        monkeypatch.setattr(fp8_cost, "fitted", lambda costs=costs: costs)
        found = two_part_ratios(outside)
        of_best += found[0]
        of_others += found[1]
    assert statistics.mean(of_best) > 0.97
    assert statistics.mean(of_others) > 1.04


def test_a_tile_of_two_parts_must_be_clearly_faster_by_prediction(monkeypatch):
    costs = fp8_cost.fitted()
    halves = [[cost for cost in costs.tiles if cost.tile.is_of_two_parts is kind] for kind in (False, True)]

    def best_of(tiles, shape):
        with monkeypatch.context() as patch:
            patch.setattr(fp8_cost, "fitted", lambda: replace(costs, tiles=tuple(tiles)))
            return fp8_cost.best(*shape, H200)

    kinds = set()
    for shape in ((M, N, 128 * groups) for M in (32, 64, 128) for N in range(4096, 32_768, 512) for groups in (8, 32)):
        even, two_parts = (best_of(tiles, shape) for tiles in halves)
        gain = 1 - two_parts.us / even.us
        assert fp8_cost.best(*shape, H200) == (two_parts if gain > 0.03 else even), (shape, gain)
        kinds.add("clearly" if gain > 0.03 else "barely" if gain > 0 else "slower")
    assert kinds == {"clearly", "barely", "slower"}


def test_a_tile_of_two_parts_is_for_no_more_rows_than_it_has():
    """It was measured with no second row of tiles."""
    for cost in fp8_cost.fitted().tiles:
        if cost.tile.is_of_two_parts:
            assert cost.is_for(cost.tile.BM)
            assert not cost.is_for(2 * cost.tile.BM)


def test_more_bandwidth_helps_and_more_work_costs():
    for M in (1, 64, 128, 4096):
        for N, K in ((1024, 1024), (5120, 5120), (27_648, 5120)):
            assert fp8_cost.best(M, N, K, H200).us <= fp8_cost.best(M, N, K, H100).us
            assert fp8_cost.best(M, 2 * N, K, H100).us > fp8_cost.best(M, N, K, H100).us


def test_plans_change_at_powers_of_two_of_the_rows_only():
    """The warm-up meets each of them (`engine.graphs.kernel_warm_up.classes`), so no step compiles one."""
    for N, K in ((5120, 5120), (4096, 4096), (1152, 640), (2048, 4096)):
        for table_name in TABLES:
            by_size = {}
            for M in range(1, 3000):
                plan = plan_of(table_name, M, N, K, SwapAB.AUTO, can_swap=True, device_index=None)
                kind = M if M <= vector_plan.MAX_TOKENS else size_of(M)
                assert by_size.setdefault(kind, plan) == plan, (M, N, K)
    assert {*range(1, vector_plan.MAX_TOKENS + 1), 3} <= {*classes(8)}, "the warm-up meets these, too"
    assert [size_of(M) for M in (1, 8, 9, 16, 17, 4096, 4097)] == [8, 8, 16, 16, 32, 4096, 8192]
    assert all(size == size_of(size) for size in SIZES)


def test_the_library_is_given_scales_of_padded_columns():
    """Groups of K beyond a multiple of four are part of what torch asks for."""
    for K in (128, 512, 640, 1536):
        _, weight = data(1, 300, K)
        values_KN, scales_GB = _turned(weight)
        padded = -(-K // 512) * 4
        assert scales_GB.shape == (padded, 3)
        assert scales_GB.stride() == (1, padded)
        assert values_KN.shape == (K, 300)
        assert scales_GB[: K // 128].t().equal(weight.scales_BG)
        assert isinstance(weight, Fp8Weight)
