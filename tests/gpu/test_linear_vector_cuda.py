"""On a GPU: GEMMs of one or two tokens, whose weights are read before the launch before has ended."""

from dataclasses import replace

import pytest
import torch

from baton.kernels.gemm import linear_vector_triton
from baton.kernels.gemm.fp8 import gemm_fp8_reference, linear_fp8
from baton.kernels.gemm.fp8_plan import GemmPlan
from baton.kernels.gemm.fp8_weight import quantize_weight
from baton.kernels.gemm.linear import linear_vector
from baton.kernels.gemm.quantize_fp8 import quantize_fp8
from baton.tests.kernels.harness import Guards, relative_error, same_bits, strided

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
CLOSE = 4e-3  # one rounding to bfloat16
SHAPES = ((2048, 4096), (256, 2048), (64, 128), (1, 1152), (28_672, 4096), (4096, 512), (1000, 3584), (300, 8192))
VECTOR = GemmPlan(vector=True, fused=True)


@pytest.fixture(autouse=True)
def device():
    torch.cuda.set_device(CUDA)
    torch.manual_seed(0)


def data(M, N, K, dtype=torch.bfloat16):
    return (torch.randn(rows, K, device=CUDA).to(dtype) for rows in (M, N))


@pytest.mark.parametrize(("N", "K"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows(N, K, dtype):
    for num_rows in (1, 2):
        x, weight = data(num_rows, N, K, dtype)
        found = linear_vector(x, weight)
        assert relative_error(found, x.double() @ weight.double().T) < CLOSE, num_rows
        assert same_bits(linear_vector(strided(x), weight), found), num_rows


@pytest.mark.parametrize(("N", "K"), SHAPES)
@pytest.mark.parametrize("ue8m0", [False, True])
def test_float8(N, K, ue8m0):
    for num_rows in (1, 2):
        x, wide = data(num_rows, N, K)
        weight = replace(quantize_weight(wide), ue8m0=ue8m0)
        found = linear_fp8(x, weight, plan=VECTOR)
        wanted = gemm_fp8_reference(*quantize_fp8(x, ue8m0=ue8m0), weight, out_dtype=torch.float32)
        assert relative_error(found, wanted.double()) < CLOSE, num_rows


def test_a_chain_in_a_graph_has_the_bits_of_eager_launches():
    """Each GEMM is of the one before; some weights have more programs than there is room for at once."""
    x = torch.randn(1, 2048, device=CUDA).bfloat16()
    sizes = (2048, 4096, 512, 8192, 640, 2048)
    pairs = zip((2048, *sizes), sizes, strict=False)
    weights = [torch.randn(N, K, device=CUDA).bfloat16() / K**0.5 for K, N in pairs]
    weights = [weight if place % 2 else quantize_weight(weight) for place, weight in enumerate(weights)]

    def chain():
        found = [x]
        for weight in weights:
            is_fp8 = not isinstance(weight, torch.Tensor)
            found.append(linear_fp8(found[-1], weight, plan=VECTOR) if is_fp8 else linear_vector(found[-1], weight))
        return found[1:]

    wanted = [gemm.clone() for gemm in chain()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = chain()
    for _ in range(50):
        graph.replay()
        assert all(same_bits(one, other) for one, other in zip(made, wanted, strict=True))


def test_nothing_beside_the_output_is_written():
    guards = Guards(device="cuda")
    for num_rows, N, K in ((1, 70, 256), (2, 1001, 2048), (1, 64, 640)):
        x, weight = data(num_rows, N, K)
        for kind in (guards.copy(weight), quantize_weight(weight)):
            out = guards.empty(num_rows, N)
            linear_vector_triton.launch(guards.copy(x), kind, out)
            guards.check()
            assert torch.isfinite(out).all()
