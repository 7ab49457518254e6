"""On a Hopper GPU: float8 GEMMs with warp specialization, in every tile that is tuned or may be, against torch."""

from dataclasses import asdict, replace

import pytest
import torch

from baton.bench.kernel_cases import gemm_fp8 as cases
from baton.kernels.gemm import fp8_hopper_triton as hopper
from baton.kernels.gemm.fp8 import gemm_fp8, gemm_fp8_reference, linear_fp8
from baton.kernels.gemm.fp8_plan import FEW_ROWS, TABLES, GemmPlan
from baton.kernels.gemm.fp8_weight import quantize_weight
from baton.kernels.gemm.quantize_fp8 import quantize_fp8
from baton.kernels.gemm.workspace import GemmWorkspace, default_workspace
from baton.kernels.tuning import table
from baton.scripts import fit_gemm_cost
from baton.tests.kernels.harness import Guards, relative_error, same_bits, strided

CUDA = torch.device("cuda", 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability(CUDA)[0] != 9, reason="is for Hopper"
    ),
]
# One rounding to bfloat16, and tensor cores that add 128 products with fewer bits than float32.
CLOSE = 5e-3
ROWS = (1, 7, 16, 33, 64, 65, 129)


def plans():
    """Of the tables and of the tuner, without what a launch is told anew: how many splits there are, if any."""
    rows = [row for name in TABLES for sizes in table().get(name, {}).values() for row in sizes.values()]
    rows += [row for point in cases.tuning() if point.size <= FEW_ROWS for row in point.candidates]
    found = [GemmPlan(**row) for row in rows if row.get("workers")]
    found += [GemmPlan(**asdict(tile)) for tile in fit_gemm_cost.TILES if tile.BN & (tile.BN - 1)]
    return sorted({replace(plan, splits=min(plan.splits, 2)) for plan in found}, key=str)


# Tiles that are not split in GEMMs, since a second program has place beside theirs; here they are.
SHARING = [
    GemmPlan(swap=False, BM=64, BN=32, stages=8, workers=1),
    GemmPlan(swap=False, BM=64, BN=32, stages=8, workers=2),
    GemmPlan(swap=False, BM=64, BN=64, stages=6, workers=1),
    GemmPlan(swap=False, BM=128, BN=32, stages=5, workers=2),
    GemmPlan(swap=False, BM=128, BN=64, stages=4, workers=2, depth=1),
    GemmPlan(BM=16, BN=64, stages=10, workers=1, depth=4),
    GemmPlan(BM=32, BN=64, stages=8, workers=1, depth=4),
    GemmPlan(BM=64, BN=64, stages=6, workers=1),
    GemmPlan(BM=32, BN=128, stages=5, workers=2),
]


@pytest.fixture(autouse=True)
def device():
    torch.cuda.set_device(CUDA)
    torch.manual_seed(0)
    default_workspace(CUDA)


def data(M, N, K):
    x = torch.randn(M, K, device=CUDA, dtype=torch.bfloat16)
    return x, quantize_weight(torch.randn(N, K, device=CUDA) * torch.rand(N, 1, device=CUDA))


@pytest.mark.parametrize("plan", plans(), ids=str)
def test_every_tile_writes_its_rows_alone_and_the_same_in_one_call(plan):
    workspace = GemmWorkspace(CUDA)
    for N, K in ((2112, 3072), (200, 384)):
        x, weight = data(max(ROWS), N, K)
        for num_rows in ROWS:
            guards = Guards(device="cuda")
            a, scales = quantize_fp8(x[:num_rows])
            wanted = gemm_fp8_reference(a, scales, weight)
            apart = strided(a.view(torch.uint8)).view(torch.float8_e4m3fn)
            out, again, linear_out = (guards.empty(num_rows, N) for _ in range(3))
            gemm_fp8(apart, scales, weight, out_MN=out, plan=plan, workspace=workspace)
            gemm_fp8(a, scales, weight, out_MN=again, plan=plan, workspace=workspace)
            linear_fp8(x[:num_rows], weight, out_MN=linear_out, plan=plan, workspace=workspace)
            assert relative_error(out, wanted) < CLOSE, (N, K, num_rows)
            assert same_bits(out, again), (N, K, num_rows)
            assert same_bits(out, linear_out), (N, K, num_rows)
            guards.check()
            assert not workspace.counters.any(), (N, K, num_rows)


@pytest.mark.parametrize("plan", [*plans(), *SHARING], ids=str)
def test_many_launches_close_together_have_the_bits_of_one(plan):
    workspace = GemmWorkspace(CUDA)
    for splits in (1,) if hopper.rest_of(plan) else (1, 3):  # a tile of two parts is not split
        plan = replace(plan, splits=splits)
        for num_rows in (17, 100):  # programs for one round of the multiprocessors, and for several
            x, weight = data(num_rows, 7168, 2048)
            a, scales = quantize_fp8(x)
            outs = torch.full((24, num_rows, 7168), float("nan"), dtype=torch.bfloat16, device=CUDA)
            torch.cuda.synchronize()
            for out in outs:
                hopper.launch(a, scales, weight, out, plan, workspace.counters)
            assert relative_error(outs[0], gemm_fp8_reference(a, scales, weight)) < CLOSE, (splits, num_rows)
            assert all(same_bits(out, outs[0]) for out in outs), (splits, num_rows)
            assert not workspace.counters.any(), (splits, num_rows)


@pytest.mark.parametrize("plan", plans(), ids=str)
def test_a_chain_in_a_graph_has_the_bits_of_eager_launches(plan):
    x, weight = data(33, 2048, 2048)
    workspace = GemmWorkspace(CUDA)

    def chain():
        """Each GEMM is of the one before."""
        found = [x]
        for _ in range(4):
            found.append(linear_fp8(found[-1], weight, plan=plan, workspace=workspace).mul_(0.02))
        return found[1:]

    chain()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        chain()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = chain()
    for _ in range(3):
        x.normal_()
        wanted = [out.clone() for out in chain()]
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        assert all(same_bits(out, right) for out, right in zip(outs, wanted, strict=True))
    assert not workspace.counters.any()


def test_what_cannot_be_copied_by_descriptors_takes_the_rules_form(monkeypatch):
    row = GemmPlan(swap=False, BM=64, BN=32, stages=8, workers=2).row()
    monkeypatch.setattr("baton.kernels.gemm.fp8_plan.find", lambda *_: row)
    launched = []
    launch = hopper.launch
    monkeypatch.setattr(hopper, "launch", lambda *arguments: launched.append(launch(*arguments)))
    x, weight = data(40, 520, 1024)
    a, scales = quantize_fp8(x)
    wanted = gemm_fp8_reference(a, scales, weight)
    wide = torch.zeros(40, 1032, dtype=torch.uint8, device=CUDA).view(torch.float8_e4m3fn)
    wide[:, :1024].view(torch.uint8).copy_(a.view(torch.uint8))
    assert relative_error(gemm_fp8(a, scales, weight), wanted) < CLOSE
    assert relative_error(linear_fp8(x, weight), wanted) < CLOSE
    assert len(launched) == 2
    assert relative_error(gemm_fp8(wide[:, :1024], scales, weight), wanted) < CLOSE
    assert relative_error(gemm_fp8(a, scales, weight, num_sms=8), wanted) < CLOSE
    gemm_fp8(a, scales, weight, invariant=True)
    assert len(launched) == 2
