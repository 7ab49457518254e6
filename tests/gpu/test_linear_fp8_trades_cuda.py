"""On a Hopper GPU: programs that quantize their rows have the bits of a quantization and a product of the same plan."""

from dataclasses import replace

import pytest
import torch

from baton.bench.kernel_cases import gemm_fp8 as cases
from baton.kernels import gemm_fp8_hopper_triton as hopper
from baton.kernels.fp8_weight import quantize_weight
from baton.kernels.gemm_fp8 import Workspace, default_workspace, gemm_fp8, linear_fp8
from baton.kernels.gemm_fp8_plan import FEW_ROWS, TABLES, Plan
from baton.kernels.quantize_fp8 import quantize_fp8
from baton.kernels.tuning import table
from baton.tests.kernels.harness import Guards, bits, same_bits, strided

CUDA = torch.device("cuda", 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability(CUDA)[0] != 9, reason="is for Hopper"
    ),
]
ROWS = (1, 2, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 70)


def plans():
    """Of the tables and of the tuner, with and without splits where there may be some."""
    rows = [row for name in TABLES for sizes in table().get(name, {}).values() for row in sizes.values()]
    rows += [row for point in cases.tuning() if point.size <= FEW_ROWS for row in point.candidates]
    found = {replace(Plan(**row), splits=1) for row in rows if row.get("workers") and row.get("fused")}
    found |= {replace(plan, splits=3) for plan in found}
    return sorted((plan for plan in found if hopper.is_form(plan)), key=str)


@pytest.fixture(autouse=True)
def device():
    torch.cuda.set_device(CUDA)
    torch.manual_seed(0)
    default_workspace(CUDA)


def data(M, N, K):
    x = torch.randn(M, K, device=CUDA) * torch.exp2(
        torch.randint(-20, 20, (M, K // 128), device=CUDA)
    ).repeat_interleave(128, 1)
    return x.to(torch.bfloat16), quantize_weight(torch.randn(N, K, device=CUDA) * torch.rand(N, 1, device=CUDA))


def in_two_calls(x, weight, plan, workspace, ue8m0=False):
    a, scales = quantize_fp8(x, ue8m0=ue8m0)
    return gemm_fp8(a, scales, weight, plan=replace(plan, fused=False), workspace=workspace)


def same_numbers(found, wanted):
    """Bit for bit, but for what a NaN carries."""
    is_nan = wanted.isnan()
    return torch.equal(found.isnan(), is_nan) and torch.equal(bits(found)[~is_nan], bits(wanted)[~is_nan])


@pytest.mark.parametrize("plan", plans(), ids=str)
@pytest.mark.parametrize("ue8m0", [False, True])
def test_the_bits_are_those_of_two_calls(plan, ue8m0):
    workspace = Workspace(CUDA)
    for N, K in ((2112, 7168), (200, 384), (64, 128)):
        if plan.splits > K // 128:
            continue
        x, weight = data(max(ROWS), N, K)
        for num_rows in ROWS:
            guards = Guards(device="cuda")
            out = guards.empty(num_rows, N)
            rows = guards.copy(x[:num_rows])
            wanted = in_two_calls(rows, weight, plan, workspace, ue8m0)
            for given in (rows, strided(rows)):
                out.fill_(float("nan"))
                linear_fp8(given, weight, out_MN=out, ue8m0=ue8m0, plan=plan, workspace=workspace)
                assert same_bits(out, wanted), (N, K, num_rows, given.stride())
            guards.check()
            assert not workspace.counters.any(), (N, K, num_rows)


@pytest.mark.parametrize("plan", plans(), ids=str)
def test_rows_of_nothing_and_of_no_numbers(plan):
    workspace = Workspace(CUDA)
    x, weight = data(16, 520, 1024)
    clean = x.clone()
    nan, infinite = float("nan"), float("inf")
    x[1] = 0
    x[2, 128:256] = 0
    x[3, 5] = nan
    x[4, 300] = infinite
    x[5, 300:302] = torch.tensor([-infinite, nan], device=CUDA, dtype=x.dtype)
    x[6, 256:384] = nan
    x[7, 400] = -nan
    x[9] = torch.finfo(torch.bfloat16).max
    x[10] = torch.finfo(torch.bfloat16).tiny
    x[11, ::2] = nan  # all first ones of pairs
    x[12, 1::2] = -0.0
    x[13] = 2.0**-130  # subnormal
    for num_rows in (8, 16):
        found = linear_fp8(x[:num_rows], weight, plan=plan, workspace=workspace)
        assert same_numbers(found, in_two_calls(x[:num_rows], weight, plan, workspace))
        untouched = linear_fp8(clean[:num_rows], weight, plan=plan, workspace=workspace)
        for row in {0, 8, 14, 15} & set(range(num_rows)):
            assert same_bits(found[row], untouched[row]), "a row knows none of its neighbours"


@pytest.mark.parametrize("plan", plans(), ids=str)
def test_many_launches_close_together_and_replays_have_the_bits_of_one(plan):
    workspace = Workspace(CUDA)
    x, weight = data(33, 7168, 2048)
    graphs = []
    for num_rows in (3, 16, 33):
        rows = x[:num_rows]
        outs = torch.full((24, num_rows, 7168), float("nan"), dtype=torch.bfloat16, device=CUDA)
        hopper.launch(rows, None, weight, outs[0], plan, workspace.counters)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for out in outs:
                hopper.launch(rows, None, weight, out, plan, workspace.counters)
        graphs.append((graph, rows, outs))
    for _ in range(2):
        x.copy_(data(33, 128, 2048)[0])
        for graph, rows, outs in graphs:
            outs.fill_(float("nan"))
            graph.replay()
            wanted = in_two_calls(rows, weight, plan, workspace)
            assert all(same_bits(out, wanted) for out in outs), len(rows)
    assert not workspace.counters.any()


def test_what_cannot_be_loaded_so_is_quantized_by_a_launch_of_its_own(monkeypatch):
    plan = Plan(stages=20, workers=2, fused=True)
    workspace = Workspace(CUDA)
    x, weight = data(9, 520, 1024)
    wanted = linear_fp8(x, weight, plan=plan, workspace=workspace)
    given = []
    launch = hopper.launch
    monkeypatch.setattr(hopper, "launch", lambda *args, **options: given.append(args[1]) or launch(*args, **options))
    wide = torch.full((9, 1032), float("nan"), dtype=torch.bfloat16, device=CUDA)
    for columns in (slice(0, 1024), slice(3, 1027)):
        wide[:, columns].copy_(x)
        assert same_bits(linear_fp8(wide[:, columns], weight, plan=plan, workspace=workspace), wanted)
        assert given.pop() is not None
