"""How many kernels a decode step launches, by name and layer, of a float8 hybrid model's shape as on a Hopper GPU.

A step of few rows takes as long as its launches: one more a layer costs what a launch takes, and nothing else says so.
Nothing is computed: launches are noted instead.
"""

import pytest
import torch

import baton.tests.kernels.interpreter  # noqa: F401  (repairs it)
from baton.core.numerics import Numerics, Quantization
from baton.kernels.gemm import fp8
from baton.kernels.implementation import Implementation
from baton.kernels.launcher import Launcher
from baton.kernels.memo import Memo
from baton.model.loader import load_model
from baton.scripts.model_shape import write_shape
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
EXPERTS = ["split_kernel", "select_kernel", "align_kernel", "gated_kernel", "down_kernel"]
STEPS = {
    1: [
        *("norm_kernel", "gemm_kernel", *DELTA, "vector_kernel", "norm_kernel", *EXPERTS_OF_ONE),
        *("norm_kernel", "gemm_kernel", *ATTENTION, "vector_kernel", "norm_kernel", *EXPERTS_OF_ONE),
        "norm_kernel",
    ],
    16: [
        *("norm_kernel", "gemm_kernel", *DELTA, "gemm_kernel", "norm_kernel", *EXPERTS),
        *("norm_kernel", "gemm_kernel", *ATTENTION, "gemm_kernel", "norm_kernel", *EXPERTS),
        "norm_kernel",
    ],
}


@pytest.mark.parametrize("num_sequences", [1, 16])
def test_a_decode_step_launches_no_more_than_it_needs(model, num_sequences, launched):
    assert step(model, num_sequences, launched) == STEPS[num_sequences]


def test_state_gates_take_a_launch_where_rows_are_many(model, launched, monkeypatch):
    linear = model.ops._linear
    monkeypatch.setattr(model.ops, "_linear", lambda *given: (launched.append("linear"), linear(*given))[1])
    found = [step(model, num_sequences, launched).count("linear") for num_sequences in (64, 65)]
    assert found == [2, 3]  # of routers, and of the delta net
