"""Float8 GEMMs for Hopper on the CPU: their source run by a model of Gluon, in tiles of every kind."""

import inspect
import random
from dataclasses import replace

import pytest
import torch

from baton.kernels.gemm import fp8_hopper_triton as hopper
from baton.kernels.gemm import fp8_warp_specialized_triton
from baton.kernels.gemm.fp8 import gemm_fp8_reference
from baton.kernels.gemm.fp8_plan import GemmPlan
from baton.kernels.gemm.quantize_fp8 import quantize_fp8
from baton.kernels.gemm.workspace import GemmWorkspace
from baton.tests.kernels.gluon_model import Box, Model, Race, Stuck
from baton.tests.kernels.harness import Guards, poison, relative_error, same_bits
from baton.tests.kernels.test_gemm_fp8 import data
from baton.tests.kernels.test_gluon_protocols import missed

TURNS = GemmPlan(BM=16, BN=64, stages=4, workers=2, depth=1)  # two warpgroups of the same rows
ONE = GemmPlan(BM=32, BN=64, stages=3, workers=1, depth=2)
HALVES = GemmPlan(BM=64, BN=128, stages=3, workers=2, depth=2)  # 64 rows each
PLAIN = GemmPlan(swap=False, BM=128, BN=32, stages=4, workers=2, depth=2)
# Tiles of two parts.
NARROW = GemmPlan(swap=False, BM=64, BN=80, stages=4, workers=2, depth=2)
BARELY = GemmPlan(swap=False, BM=128, BN=136, stages=3, workers=2, depth=2)
MIDDLE = GemmPlan(swap=False, BM=64, BN=160, stages=3, workers=1, depth=2)
WIDE = GemmPlan(swap=False, BM=128, BN=192, stages=2, workers=2, depth=1)
WIDEST = GemmPlan(swap=False, BM=64, BN=192, stages=2, workers=2, depth=1)
EVEN = {"turns": TURNS, "one": ONE, "halves": HALVES, "plain": PLAIN}
UNEVEN = {"narrow": NARROW, "barely": BARELY, "middle": MIDDLE, "wide": WIDE, "widest": WIDEST}
PLANS = EVEN | UNEVEN
SOURCE = inspect.getsource(fp8_warp_specialized_triton)
CLOSE = 3e-3  # one rounding to bfloat16


@pytest.fixture
def multiply(monkeypatch):
    """Runs a plan on the model; what it gave, and the model."""

    empty = torch.empty

    def run(problem, plan, seed=0, changes=()):
        a, scales, weight = problem
        model = Model(hopper.gemm_kernel, seed, changes)
        monkeypatch.setattr(hopper, "_launch_gemm", model)
        monkeypatch.setattr(hopper, "programs_at_once", lambda _: 1)
        assert hopper.is_form(plan)
        guards, workspace = Guards(), GemmWorkspace(torch.device("cpu"))
        out = guards.empty(len(a), weight.num_outputs)
        with monkeypatch.context() as patch:  # parts are read where they were written, and nowhere else
            patch.setattr(torch, "empty", lambda *sizes, **options: poison(empty(*sizes, **options)))
            hopper.launch(a, scales, weight, out, plan, workspace.counters)
        guards.check()
        assert not workspace.counters.any(), "the next launch finds zeros"
        return out, model

    return run


def problem(M, N, K, seed=0):
    x, weight = data(M, N, K, seed)
    return *quantize_fp8(x), weight


def test_widths_are_powers_of_two_or_one_of_few_sums():
    plan = GemmPlan(swap=False, BM=64, BN=64, stages=4, workers=2, depth=1)
    widths = [BN for BN in range(-8, 300) if hopper.is_form(replace(plan, BN=BN))]
    assert widths == [16, 32, 64, 80, 128, 136, 160, 192]
    tall = replace(plan, BM=128, stages=3)
    assert [BN for BN in range(-8, 300) if hopper.is_form(replace(tall, BN=BN))] == [16, 32, 64, 128, 136, 192]
    assert not hopper.is_form(replace(plan, BM=48))
    full = replace(plan, BN=80, stages=10)
    assert hopper.programs_at_once(full) == 1
    assert hopper.is_form(full)
    assert not hopper.is_form(replace(full, splits=2)), "parts are added for one width alone"
    swapped = GemmPlan(BM=16, BN=64, stages=4, workers=2, depth=1)
    assert hopper.is_form(swapped)
    assert not any(hopper.is_form(replace(swapped, BN=BN)) for BN in (80, 136, 192))
    assert not any(hopper.is_form(replace(swapped, BM=BM)) for BM in (24, 48))


# Rows, outputs, inputs. Tiles that are not full, and boxes of rows past the last; tiles over two blocks of scales, of
# which the last tile has no second; one group, and more than there are stages.
SHAPES = [(5, 200, 384), (16, 320, 640), (33, 640, 256), (1, 72, 128), (96, 384, 512), (130, 150, 256), (48, 896, 128)]


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_tile_in_any_order(multiply, plan, shape):
    given = problem(*shape)
    out, model = multiply(given, plan)
    assert relative_error(out, gemm_fp8_reference(*given)) < CLOSE
    model.check_order()
    assert same_bits(multiply(given, plan, 1)[0], out)


@pytest.mark.parametrize("width", [80, 136, 160, 192])
def test_a_tile_of_any_two_parts_finds_its_blocks_of_scales(multiply, width):
    """Their scales differ by orders of magnitude; rows of the weight are as many as end in each place of a block."""
    plan = GemmPlan(swap=False, BM=64, BN=width, stages=2, workers=1, depth=1)
    a, scales, weight = problem(3, 128 * 10 - 8, 256)
    weight.scales_BG.mul_(10.0 ** (torch.arange(10) % 4)[:, None])
    out, _ = multiply((a, scales, weight), plan)
    wanted = gemm_fp8_reference(a, scales, weight)
    for begin in range(0, out.shape[1], 8):
        assert relative_error(out[:, begin : begin + 8], wanted[:, begin : begin + 8]) < 2 * CLOSE, begin


@pytest.mark.parametrize("seed", range(8))
def test_drawn_shapes(multiply, seed):
    draw = random.Random(seed)
    plan = draw.choice([*PLANS.values()])
    shape = draw.randint(1, 140), draw.randrange(8, 800, 8), 128 * draw.randint(1, 6)
    given = problem(*shape, seed)
    out, model = multiply(given, plan)
    assert relative_error(out, gemm_fp8_reference(*given)) < CLOSE, (shape, plan)
    model.check_order()


@pytest.mark.parametrize("splits", [2, 3, 5])
@pytest.mark.parametrize("plan", EVEN.values(), ids=EVEN)
def test_splits_are_added_in_one_order(multiply, plan, splits):
    given = problem(40, 150, 640)
    plan = replace(plan, splits=splits)
    out, model = multiply(given, plan)
    assert relative_error(out, gemm_fp8_reference(*given)) < CLOSE
    model.check_order()
    assert same_bits(multiply(given, plan, seed=1)[0], out)


@pytest.mark.parametrize("plan", [HALVES, PLAIN, BARELY, WIDE], ids=["halves", "plain", "barely", "wide"])
@pytest.mark.parametrize("num_rows", [16, 17, 48, 100])
def test_tma_fills_in_no_more_than_the_rest_of_a_box(multiply, monkeypatch, plan, num_rows):
    """Rows of zeros take longer than rows that are copied: of a tile and a group at most 15 are such."""
    given, filled = problem(num_rows, 256, 256), {num_rows: 0, 256: 0}
    part = Box.part

    def watched(box, row, column):
        filled[len(box.rows)] += max(0, row + box.shape[0] - len(box.rows))
        return part(box, row, column)

    monkeypatch.setattr(Box, "part", watched)
    multiply(given, plan)
    num_groups, num_tiles = 2, -(-256 // plan.BN)
    assert filled == {num_rows: -num_rows % 16 * num_groups * num_tiles, 256: 0}


# Changes of the source: what must not be done, and is to be seen in some order.
FAULTS = {
    "a stage is filled while it is read": (
        "        mbarrier.wait(empty.index(stage), parity)\n        mbarrier.expect", "        mbarrier.expect",
    ),
    "a stage is given back before its second part is multiplied": (
        "warpgroup_mma_wait(2 * (DEPTH - 1 - i)", "warpgroup_mma_wait(2 * (DEPTH - 1 - i) + 1",
    ),
    "a warpgroup's sums are read before they are stored": ("            mbarrier.wait(joined, 0)\n", ""),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_protocol_are_found(multiply, fault):
    assert FAULTS[fault][0] in SOURCE
    with pytest.raises((Race, Stuck)):
        multiply(problem(16, 320, 896), NARROW, changes=[FAULTS[fault]])[1].check_order()


def test_every_wait_and_arrival_is_needed(multiply):
    for plan in (TURNS, HALVES, NARROW, BARELY):
        _, model = multiply(problem(16, 128, 896), plan)
        for machine in model.machines:
            assert not [*missed(machine)]
