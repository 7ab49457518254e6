"""On a GPU: float8 quantization and GEMMs in every form, eager and in graphs, against torch in float32."""

import pytest
import torch

from baton.kernels.gemm.fp8 import gemm_fp8, gemm_fp8_reference, linear_fp8
from baton.kernels.gemm.fp8_plan import GemmPlan
from baton.kernels.gemm.fp8_weight import Fp8Weight, quantize_weight
from baton.kernels.gemm.quantize_fp8 import quantize_fp8, quantize_fp8_reference
from baton.kernels.gemm.scaled_mm import Library
from baton.kernels.gemm.workspace import GemmWorkspace, default_workspace
from baton.tests.kernels.harness import Guards, relative_error, same_bits

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
ROWS = (1, 2, 7, 8, 15, 16, 17, 32, 63, 64, 65, 128, 300)
SHAPES = [(4096, 4096), (2112, 7168), (24576, 1536), (200, 384)]
# One rounding to bfloat16, and tensor cores that add 128 products with fewer bits than float32.
CLOSE = 5e-3
PLANS = [
    GemmPlan(),
    GemmPlan(splits=4),
    GemmPlan(splits=4, copied=True),
    GemmPlan(groups=2, stages=4, splits=2),
    GemmPlan(groups=2, stages=4, splits=3, tma=True),
    GemmPlan(groups=2, stages=8, tma=True),
    GemmPlan(BN=128, stages=5, splits=8),
    GemmPlan(BM=64, BN=128, stages=4, warps=8, splits=3),
    GemmPlan(BM=64, BN=128, stages=4, warps=8, tma=True),
    GemmPlan(swap=False, BM=64, BN=128, stages=4, splits=4),
    GemmPlan(swap=False, BM=128, BN=128, stages=4, warps=8, tma=True),
    GemmPlan(BN=32, groups=2, stages=8, copied=True),
    GemmPlan(BM=8, BN=16, groups=4, stages=6, copied=True, splits=2),
    GemmPlan(BN=32, groups=4, stages=4, copied=True, fused=True),
    GemmPlan(splits=4, fused=True, copied=True),
    GemmPlan(splits=4, fused=True),
    GemmPlan(groups=2, stages=4, splits=2, tma=True, fused=True),
    GemmPlan(splits=4, pdl=True),
]


@pytest.fixture(autouse=True)
def device():
    torch.cuda.set_device(CUDA)
    torch.manual_seed(0)
    default_workspace(CUDA)


def data(M, N, K):
    x = torch.randn(M, K, device=CUDA, dtype=torch.bfloat16)
    return x, quantize_weight(torch.randn(N, K, device=CUDA) * torch.rand(N, 1, device=CUDA))


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("num_rows", [1, 7, 64, 65, 2049, 8192])
def test_quantization_has_the_references_bits(num_rows, ue8m0):
    x = torch.randn(num_rows, 4096, device=CUDA) * torch.exp2(torch.randint(-30, 30, (num_rows, 1), device=CUDA))
    x = x.to(torch.bfloat16)
    x[0, :128] = 0
    x[-1, 5] = float("nan")
    found, wanted = (
        quantize_fp8(x, ue8m0=ue8m0, pad_to=4),
        quantize_fp8_reference(x, ue8m0=ue8m0, num_padded=-(-len(x) // 4) * 4),
    )
    is_nan = wanted[0].float().isnan()  # of either sign
    assert torch.equal(found[0].float().isnan(), is_nan)
    assert torch.equal(found[0].float()[~is_nan], wanted[0].float()[~is_nan])
    assert torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("swap_ab", ["auto", "on", "off"])
@pytest.mark.parametrize(("N", "K"), SHAPES)
def test_gemms_of_all_numbers_of_rows(N, K, swap_ab):
    x, weight = data(max(ROWS), N, K)
    wanted = gemm_fp8_reference(*quantize_fp8(x), weight)
    for num_rows in ROWS:
        a, scales = quantize_fp8(x[:num_rows])
        found = gemm_fp8(a, scales, weight, swap_ab=swap_ab)
        assert relative_error(found, wanted[:num_rows]) < CLOSE, num_rows
        assert same_bits(found, gemm_fp8(a, scales, weight, swap_ab=swap_ab)), num_rows
        assert relative_error(linear_fp8(x[:num_rows], weight, swap_ab=swap_ab), wanted[:num_rows]) < CLOSE, num_rows
    assert not default_workspace(CUDA).counters.any()


@pytest.mark.parametrize(
    ("plan", "num_sms"), [(plan, None) for plan in PLANS] + [(PLANS[1], 7), (PLANS[4], 7), (PLANS[-3], 7)]
)
def test_every_form_writes_its_rows_alone_and_the_same_in_one_call(plan, num_sms):
    guards = Guards(device="cuda")
    workspace = GemmWorkspace(CUDA)
    for num_rows in (1, 16, 45, 64):
        x, weight = data(num_rows, 2112, 3072)
        weight = Fp8Weight(guards.copy(weight.values_NK), weight.scales_BG)
        a, scales = quantize_fp8(x)
        out, linear_out = guards.empty(num_rows, 2112), guards.empty(num_rows, 2112)
        gemm_fp8(a, scales, weight, out_MN=out, plan=plan, num_sms=num_sms, workspace=workspace)
        linear_fp8(x, weight, out_MN=linear_out, plan=plan, num_sms=num_sms, workspace=workspace)
        assert relative_error(out, gemm_fp8_reference(a, scales, weight)) < CLOSE
        assert same_bits(out, linear_out)
    guards.check()
    assert not workspace.counters.any()


def test_invariant_rows_know_no_neighbours():
    x, weight = data(1500, 4096, 4096)
    whole = linear_fp8(x, weight, invariant=True)
    for rows in (slice(0, 1), slice(3, 10), slice(60, 130), slice(1000, 1100)):
        assert same_bits(linear_fp8(x[rows], weight, invariant=True), whole[rows].contiguous())
    assert relative_error(whole, linear_fp8(x, weight)) < 2 * CLOSE


@pytest.mark.parametrize("plan", [None, *PLANS[:5], *PLANS[-3:]], ids=str)
def test_in_a_graph_without_a_wait_for_the_device(plan):
    x, weight = data(16, 4096, 4096)
    workspace = GemmWorkspace(CUDA)
    wanted = linear_fp8(x, weight, plan=plan, workspace=workspace)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        linear_fp8(x, weight, plan=plan, workspace=workspace)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [linear_fp8(x, weight, plan=plan, workspace=workspace) for _ in range(3)]
    for round_ in range(3):
        for out in outs:
            out.fill_(float("nan"))
        if round_ == 2:
            x.copy_(torch.randn_like(x))
            wanted = linear_fp8(x, weight, plan=plan, workspace=workspace)
        graph.replay()
        for out in outs:
            assert same_bits(out, wanted)
    assert not workspace.counters.any()


def test_the_library_where_there_is_one_computes_the_same():
    library = Library()
    for num_rows in (3, 256):
        x, weight = data(num_rows, 4096, 4096)
        a, scales = quantize_fp8(x)
        found = library.gemm(a, scales, weight)
        if found is not None:
            assert relative_error(found, gemm_fp8_reference(a, scales, weight)) < CLOSE
    x, weight = data(1024, 4096, 1536)
    assert relative_error(linear_fp8(x, weight), gemm_fp8_reference(*quantize_fp8(x), weight)) < CLOSE
