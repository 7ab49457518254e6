"""On a GPU: a norm, a router and its choice in one launch, whose programs wait for others: eager and in graphs."""

import pytest
import torch

from baton.kernels.gemm.workspace import GemmWorkspace
from baton.kernels.implementation import Implementation
from baton.kernels.moe.norm_route import norm_route
from baton.tests.kernels.harness import relative_error, same_bits
from baton.tests.kernels.moe_inputs import Draw
from baton.tests.kernels.test_norm_route import apart, inputs, parts_of, routed

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
TRITON, REFERENCE = Implementation.TRITON, Implementation.REFERENCE
SHAPES = ((264, 256, 2048, 8, True), (128, 128, 2048, 8, False), (128, 128, 4096, 8, False), (60, 60, 256, 4, True))


@pytest.fixture(autouse=True)
def device():
    torch.cuda.set_device(CUDA)


def options_of(num_experts, has_shared):
    return {"num_experts": num_experts, "plus_one": has_shared, "renormalise": True, "has_shared": has_shared}


@pytest.mark.parametrize(("num_rows", "num_experts", "hidden", "num_chosen", "has_shared"), SHAPES)
def test_rows(num_rows, num_experts, hidden, num_chosen, has_shared):
    """Launches close together have the bits of one, too."""
    workspace, options = GemmWorkspace(CUDA), options_of(num_experts, has_shared)
    for num_tokens in (1, 2, 16, 17, 33, 64):
        given = inputs(Draw(num_tokens, "cuda"), num_tokens, num_rows, hidden)
        many = [
            routed(given, 1e-6, num_chosen, workspace=workspace, implementation=TRITON, **options) for _ in range(50)
        ]
        found, wanted = many[0], routed(given, 1e-6, num_chosen, implementation=REFERENCE, **options)
        for again in many:
            assert all(same_bits(one, other) for one, other in zip(again, found, strict=True)), num_tokens
        assert not workspace.counters.any()
        assert same_bits(found[1], wanted[1])
        assert relative_error(found[0], wanted[0]) < 4e-3
        is_same_T = found[3].eq(wanted[3]).all(dim=1)  # but where sums that round apart make or break a tie
        assert num_tokens < 16 or is_same_T.double().mean() > 0.8
        assert torch.allclose(found[2][is_same_T], wanted[2][is_same_T], rtol=2e-2)


@pytest.mark.parametrize("num_tokens", [1, 5, 40])
def test_where_sums_are_exact_it_has_the_choice_of_launches_of_their_own(num_tokens):
    draw = Draw(num_tokens, "cuda")
    added_TD = draw.integers(-2, 3, num_tokens, 2048).bfloat16()
    x_TD = 4 * (2 * draw.integers(0, 2, num_tokens, 2048) - 1).bfloat16() - added_TD
    given = (
        x_TD, added_TD, draw.integers(-2, 3, 2048).bfloat16(), draw.integers(-1, 2, 264, 2048).bfloat16() / 64,
    )  # fmt: skip
    found = routed(given, 0.0, 8, implementation=TRITON, **options_of(256, True))
    wanted = apart(given, 0.0, 8, **options_of(256, True))
    assert same_bits(found[0], wanted[0])
    assert same_bits(found[1], wanted[1])
    assert same_bits(found[3], wanted[3])
    assert torch.allclose(found[2], wanted[2], rtol=2e-6)


def test_a_chain_in_a_graph_has_the_bits_of_eager_launches():
    workspace, (x_TD, added_TD, weight_D, router_XD) = GemmWorkspace(CUDA), inputs(Draw(3, "cuda"), 16, 264, 2048)

    def chain():
        found = [(x_TD, added_TD)]
        for _ in range(6):
            rows_TD, sum_TD = found[-1][:2]
            made = norm_route(
                rows_TD, sum_TD, weight_D, 1e-6, router_XD, 8, num_experts=256, has_shared=True, workspace=workspace
            )
            found.append(parts_of(made))
        return [part for parts in found[1:] for part in parts]

    wanted = [part.clone() for part in chain()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = chain()
    for _ in range(20):
        graph.replay()
        assert all(same_bits(one, other) for one, other in zip(made, wanted, strict=True))
    assert not workspace.counters.any()
