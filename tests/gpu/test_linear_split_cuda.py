"""On a GPU: GEMMs split among programs, of which any may be the last, which adds: eager, in graphs, in chains."""

import pytest
import torch

from baton.kernels.gemm import linear_split_triton
from baton.kernels.gemm.linear import linear_split, linear_wide
from baton.kernels.gemm.workspace import GemmWorkspace
from baton.kernels.implementation import Implementation
from baton.tests.kernels.harness import Guards, relative_error, same_bits, strided

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
CLOSE = 4e-3  # one rounding to bfloat16
SHAPES = ((2048, 4096), (256, 2048), (64, 128), (1, 1152), (130, 16_384), (4096, 512), (1000, 3584))


@pytest.fixture(autouse=True)
def device():
    torch.cuda.set_device(CUDA)
    torch.manual_seed(0)


def data(M, N, K, dtype=torch.bfloat16):
    return (torch.randn(rows, K, device=CUDA).to(dtype) for rows in (M, N))


@pytest.mark.parametrize(("N", "K"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows(N, K, dtype):
    workspace = GemmWorkspace(CUDA)
    for num_rows in (1, 2, 15, 16, 17, 32):
        x, weight = data(num_rows, N, K, dtype)
        found = linear_split(x, weight, workspace=workspace)
        assert relative_error(found, x.double() @ weight.double().T) < CLOSE, num_rows
        assert same_bits(linear_split(strided(x), weight, workspace=workspace), found), num_rows
        assert not workspace.counters.any(), num_rows


@pytest.mark.parametrize("num_rows", [1, 16, 32, 33, 2048])
def test_sums_may_stay_wide(num_rows):
    x, weight = data(num_rows, 256, 7168)
    wanted = x.double() @ weight.double().T
    found = linear_wide(x, weight, implementation=Implementation.AUTO)
    assert found.dtype == torch.float32
    assert relative_error(found, wanted) < 1e-5
    if num_rows <= 32:
        assert same_bits(found.bfloat16(), linear_split(x, weight))


@pytest.mark.parametrize("num_rows", [1, 16, 30])
def test_many_launches_close_together_have_the_bits_of_one(num_rows):
    """Programs of a launch begin while those of the one before still count."""
    workspace = GemmWorkspace(CUDA)
    for N, K in SHAPES:
        x, weight = data(num_rows, N, K)
        found = [linear_split(x, weight, workspace=workspace) for _ in range(50)]
        assert all(same_bits(one, found[0]) for one in found), (N, K)
        assert not workspace.counters.any()


def test_a_chain_in_a_graph_has_the_bits_of_eager_launches():
    """Each GEMM is of the one before; one weight is long enough that all programs are there at once, one is not."""
    workspace = GemmWorkspace(CUDA)
    x = torch.randn(16, 2048, device=CUDA).bfloat16()
    weights = [torch.randn(2048, 2048, device=CUDA).bfloat16() / 45 for _ in range(6)]

    def chain():
        found = [x]
        for weight in weights:
            found.append(linear_split(found[-1], weight, workspace=workspace))
        return found[1:]

    wanted = [gemm.clone() for gemm in chain()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = chain()
    for _ in range(20):
        graph.replay()
        assert all(same_bits(one, other) for one, other in zip(made, wanted, strict=True))
    assert not workspace.counters.any()


def test_nothing_beside_the_output_is_written():
    guards, workspace = Guards(device="cuda"), GemmWorkspace(CUDA)
    for num_rows, N, K in ((3, 70, 256), (17, 1000, 2048), (32, 64, 128)):
        x, weight = data(num_rows, N, K)
        out = guards.empty(num_rows, N)
        linear_split_triton.launch(guards.copy(x), guards.copy(weight), out, workspace.counters)
        guards.check()
        assert relative_error(out, x.double() @ weight.double().T) < CLOSE
