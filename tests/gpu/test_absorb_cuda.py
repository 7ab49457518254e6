"""On a GPU: up-projections of heads for few rows, at DeepSeek-V3's sizes: eager, in graphs, beside other launches."""

import pytest
import torch

from baton.kernels.gemm.quantize_fp8 import quantize_fp8
from baton.kernels.mla.absorb import absorb_queries, absorb_values
from baton.kernels.pointwise.rms_norm import rms_norm_fused
from baton.tests.kernels.harness import relative_error, same_bits, strided

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
CLOSE = 4e-3  # one rounding to bfloat16
ROWS = (1, 2, 16, 17, 32, 33, 64, 65, 128, 200, 256)


@pytest.fixture(autouse=True)
def device():
    torch.cuda.set_device(CUDA)
    torch.manual_seed(0)


def data(num_rows, num_heads):
    expand = torch.randn(num_heads, 256, 512, device=CUDA).bfloat16() / 22
    query, mixed = (torch.randn(num_rows, num_heads, length, device=CUDA).bfloat16() for length in (192, 512))
    return query, mixed, expand[:, :128], expand[:, 128:]


@pytest.mark.parametrize("num_heads", [1, 16, 64, 128])
@pytest.mark.parametrize("num_rows", ROWS)
def test_rows(num_rows, num_heads):
    query, mixed, key, value = data(num_rows, num_heads)
    found = absorb_queries(query, key)
    wanted = torch.einsum("tan,anc->tac", query[..., :128].double(), key.double())
    assert relative_error(found[..., :512], wanted) < CLOSE
    assert same_bits(found[..., 512:], query[..., 128:])
    assert same_bits(absorb_queries(strided(query), key), found)
    rows = absorb_values(mixed, value).rows
    wanted = torch.einsum("tac,avc->tav", mixed.double(), value.double()).flatten(1)
    assert relative_error(rows, wanted) < CLOSE
    for ue8m0 in (False, True):
        made = absorb_values(strided(mixed), value, num_padded=-(-num_rows // 4) * 4, ue8m0=ue8m0)
        wanted_rows, wanted_scales = quantize_fp8(rows, ue8m0=ue8m0, pad_to=4)
        assert same_bits(made.rows, wanted_rows)
        assert same_bits(made.scale_GR, wanted_scales)


@pytest.mark.parametrize("num_rows", [1, 16, 64, 256])
def test_a_chain_in_a_graph_has_the_bits_of_eager_launches(num_rows):
    """Programs load weights while the launch before still writes what they read next, or reads what they write."""
    query, _, key, value = data(num_rows, 128)
    weight = torch.ones(16_384, device=CUDA).bfloat16()

    def chain():
        found, rows = [], query[..., :128].flatten(1)
        for _ in range(4):
            normed = rms_norm_fused(rows, weight, 1e-6).rows
            turned = torch.nn.functional.pad(normed.unflatten(1, (128, 128)), (0, 64), value=0.5)
            absorbed = absorb_queries(turned, key)
            rows = absorb_values(absorbed[..., :512], value).rows
            found += [absorbed, rows]
        return [*found, absorb_values(absorbed[..., :512], value, num_padded=num_rows).rows]

    wanted = [one.clone() for one in chain()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = chain()
    for _ in range(20):
        graph.replay()
        assert all(same_bits(one, other) for one, other in zip(made, wanted, strict=True))
