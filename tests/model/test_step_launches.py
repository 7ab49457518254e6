"""How many kernels a decode step launches, by name and layer, of a float8 hybrid model's shape as on a Hopper GPU.

A step of few rows takes as long as its launches: one more a layer costs what a launch takes, and nothing else says so.
Nothing is computed: launches are noted instead.
"""

import pytest
import torch

import baton.tests.kernels.interpreter  # noqa: F401  (repairs it)
from baton.core.numerics import Numerics, Quantization
from baton.kernels import ops as ops_module
from baton.kernels.gemm import fp8
from baton.kernels.implementation import Implementation
from baton.kernels.launcher import Launcher
from baton.kernels.memo import Memo
from baton.model.loader import load_model
from baton.scripts.model_shape import write_shape
from baton.tests.kernels.harness import relative_error
from baton.tests.model.harness import Paged

# Of Qwen3.5-35B-A3B, whose layers are as large, with fewer experts and a layer of each kind.
SIZES = {
    "layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2, "num_experts": 16,
    "vocab_size": 256, "eos_token_id": 100, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(
        write_shape("qwen3.5-35b-a3b", tmp_path_factory.mktemp("shape"), **SIZES),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        random_seed=3,
        implementation=Implementation.TRITON,
        quantization=Quantization.FP8,
        numerics=Numerics.DEFAULT,
        with_mtp=False,
    )


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels that were launched, in order."""
    found = []
    monkeypatch.setattr(Launcher, "__call__", lambda self, *_: found.append(self.kernel.fn.__name__.strip("_")))
    monkeypatch.setattr(fp8, "_capability", lambda _: (9, 0))
    for name in [name for name, value in vars(fp8).items() if isinstance(value, Memo)]:
        monkeypatch.setattr(fp8, name, Memo())
    return found


def step(model, num_sequences, launched):
    """Launches of one decode step of sequences that have a state."""
    paged = Paged(model, num_sequences=num_sequences, capacity_len=32)
    launched.clear()
    paged.trunk(
        torch.arange(num_sequences), paged.decode_batch(range(num_sequences), [20] * num_sequences, 1, bound=32)
    )
    return launched


DELTA = ["conv_kernel", "delta_kernel", "norm_kernel"]  # the latter is of the state's outputs
ATTENTION = ["qk_kernel", "attend_kernel", "gate_output_kernel"]
EXPERTS_OF_ONE = ["vector_kernel", "select_kernel", "gated_vector_kernel", "down_vector_kernel"]
EXPERTS = ["norm_route_kernel", "align_kernel", "gated_kernel", "down_kernel"]
STEPS = {
    1: [
        *("norm_kernel", "gemm_kernel", *DELTA, "vector_kernel", "norm_kernel", *EXPERTS_OF_ONE),
        *("norm_kernel", "gemm_kernel", *ATTENTION, "vector_kernel", "norm_kernel", *EXPERTS_OF_ONE),
        "norm_kernel",
    ],
    16: [
        *("norm_kernel", "gemm_kernel", *DELTA, "gemm_kernel", *EXPERTS),
        *("norm_kernel", "gemm_kernel", *ATTENTION, "gemm_kernel", *EXPERTS),
        "norm_kernel",
    ],
}


@pytest.mark.parametrize("num_sequences", [1, 16])
def test_a_decode_step_launches_no_more_than_it_needs(model, num_sequences, launched):
    assert step(model, num_sequences, launched) == STEPS[num_sequences]


def test_state_gates_and_routers_take_a_launch_where_rows_are_many(model, launched, monkeypatch):
    linear = model.ops._linear
    monkeypatch.setattr(model.ops, "_linear", lambda *given: (launched.append("linear"), linear(*given))[1])
    found = [step(model, num_sequences, launched).count("linear") for num_sequences in (64, 65)]
    assert found == [0, 3]  # of two routers, and of the delta net


SMALL = {
    "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 128, "vocab_size": 256, "eos_token_id": 100, "max_position_embeddings": 256,
}  # fmt: skip


def small(shape, path, quantization=Quantization.NONE, **sizes):
    """A model of few and small layers, of which a family without gated delta nets takes what it has."""
    is_hybrid = "shared_expert_intermediate_size" in sizes
    own = {name: size for name, size in SMALL.items() if is_hybrid or not name.startswith(("linear", "layer"))}
    return load_model(
        write_shape(shape, path, **own | sizes), dtype=torch.bfloat16, device=torch.device("cpu"), random_seed=3,
        implementation=Implementation.TRITON, quantization=quantization, numerics=Numerics.DEFAULT, with_mtp=False,
    )  # fmt: skip


@pytest.mark.parametrize("quantization", Quantization)
@pytest.mark.parametrize(
    ("shape", "shared_size", "is_one"),
    [("qwen3.5-35b-a3b", 128, True), ("qwen3.5-35b-a3b", 256, False), ("qwen3-30b-a3b", None, True)],
)
def test_a_norm_and_a_choice_are_one_launch_where_the_router_alone_reads_the_norm(
    shape, shared_size, is_one, quantization, tmp_path
):
    """The layer's output is that of launches of their own; a shared expert with GEMMs of its own has these."""
    sizes = {} if shared_size is None else {"shared_expert_intermediate_size": shared_size}
    model = small(shape, tmp_path, quantization, **sizes)
    layer = model._decoder.layers[0]
    x_TD, added_TD = torch.randn(2, 3, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    made = layer.mlp.route(layer.mlp_norm, x_TD, added_TD)
    assert (made is not None) is is_one
    for given in ((x_TD[:2], added_TD[:2]), (x_TD.repeat(30, 1), added_TD.repeat(30, 1))):
        assert layer.mlp.route(layer.mlp_norm, *given) is None, "for few rows, and for many"
    if made is not None:
        normed_TD, sum_TD = layer.mlp_norm.of_sum(x_TD, added_TD)
        assert torch.equal(made.sum_TD, sum_TD)
        found = layer.mlp(made.rows_TD, may_wait=True, choice=(made.weight_TK, made.expert_TK))
        wanted = layer.mlp(normed_TD, may_wait=True)
        assert relative_error(*(model.ops.added_up(added) for added in (found, wanted))) < 2e-2


@pytest.mark.parametrize("most", [512, 2])
def test_the_activation_of_a_shared_expert_takes_a_launch_beyond_few_rows_alone(most, tmp_path, launched, monkeypatch):
    """To the same bits. Its first GEMM is the router's, too, so that it is there when experts are chosen."""
    monkeypatch.setattr(ops_module, "MAX_BESIDE", most)
    model = small("qwen3.5-35b-a3b", tmp_path, shared_expert_intermediate_size=256)
    layer, rows_TD = model._decoder.layers[0], torch.randn(3, 256).bfloat16()
    launched.clear()
    layer.mlp(rows_TD, may_wait=True)
    assert launched.count("select_kernel") == 1
    assert launched.count("silu_mul_kernel") == (most == 2)
    monkeypatch.undo()
    found = model.ops.added_up(layer.mlp(rows_TD, may_wait=True))
    monkeypatch.setattr(ops_module, "MAX_BESIDE", 0)
    assert torch.equal(found, model.ops.added_up(layer.mlp(rows_TD, may_wait=True)))
