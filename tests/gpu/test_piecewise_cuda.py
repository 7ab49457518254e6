"""The trunk in pieces on a GPU: the bits of launched passes, from graphs captured on one device."""

import pytest
import torch

from baton.core.numerics import Numerics
from baton.engine.graphs import piecewise
from baton.engine.graphs.backend import CallBackend, CudaBackend
from baton.kernels.implementation import Implementation
from baton.model.loader import load_model
from baton.model.parallel import Alone
from baton.scripts.model_shape import write_shape
from baton.tests.engine.test_piecewise import Setting, check, hidden_of, trunks_of
from baton.tests.gpu.test_graphs_cuda import DEVICE, SHAPES
from baton.tests.model.checkpoints import write_checkpoint

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numerics", list(Numerics))
def test_replayed_bits_are_those_launched(numerics, dtype, shape, tmp_path):
    # of a hybrid the third and later nets are launched by a tape, and it has one in each two layers
    path = write_checkpoint(tmp_path / shape, **SHAPES[shape], layers=8 if shape == "hybrid" else 4)
    model = load_model(path, dtype=dtype, device=DEVICE, numerics=numerics, with_mtp=True)
    captured, called = Setting(model), Setting(model)
    trunks = trunks_of(captured, CudaBackend(DEVICE, Alone()))
    if numerics is Numerics.DEFAULT:  # its bits depend on how many rows there are, padding too
        wanted = hidden_of(called, trunks_of(called, CallBackend()))
    else:
        wanted = hidden_of(called)
    for _ in range(2):
        captured.begin()
        check(hidden_of(captured, trunks), wanted, 0.0)
    # Delta nets have no form for torch alone, and attention's tape is of the default numerics' kernels.
    has_tape = dtype is torch.bfloat16 and (numerics is Numerics.DEFAULT or shape == "hybrid")
    assert any(trunk.num_taped for trunk in trunks) == has_tape


def test_latents_are_replayed_around_kernels(tmp_path):
    """Prompts expanded and decode rows absorbed between pieces, of a model whose sizes the kernels take."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 4}
    sizes |= {"n_group": 1, "topk_group": 1, "moe_intermediate_size": 128, "q_lora_rank": 64, "eos_token_id": 500}
    path = write_shape("deepseek-v3", tmp_path, **sizes)
    model = load_model(
        path, dtype=torch.bfloat16, device=DEVICE, numerics=Numerics.DEFAULT, with_mtp=True, random_seed=3
    )
    assert model.implementation is Implementation.TRITON
    captured, called = Setting(model), Setting(model)
    wanted = hidden_of(called, trunks_of(called, CallBackend()))
    check(hidden_of(captured, trunks_of(captured, CudaBackend(DEVICE, Alone()))), wanted, 0.0)


def test_states_are_carried_on_around_kernels(tmp_path):
    """Delta nets between pieces, the third and later of a step by a tape; decode rows beside chunks, and alone."""
    layers = ["linear_attention"] * 3 + ["full_attention"]
    sizes = {"hidden_size": 256, "vocab_size": 512, "num_hidden_layers": 8, "layer_types": layers * 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": 500}
    sizes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2}
    sizes |= {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
    path = write_shape("qwen3.5-35b-a3b", tmp_path, **sizes)
    model = load_model(
        path, dtype=torch.bfloat16, device=DEVICE, numerics=Numerics.DEFAULT, with_mtp=True, random_seed=3
    )
    assert model.implementation is Implementation.TRITON
    captured, called = Setting(model), Setting(model)
    trunks, eager = trunks_of(captured, CudaBackend(DEVICE, Alone())), trunks_of(called, CallBackend())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(piecewise, "record", lambda work, own: (work(), None))
        wanted = hidden_of(called, eager)
    check(hidden_of(captured, trunks), wanted, 0.0)
    assert any(trunk.num_taped for trunk in trunks)


def test_bits_at_head_sizes_that_hopper_has_forms_for(tmp_path):
    """Those of an 8B: keys and values come through tensor descriptors, which a tape moves to the next layer's."""
    sizes = {"kind": "qwen3", "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "hidden_size": 256}
    path = write_checkpoint(tmp_path / "wide", **sizes, layers=4)
    model = load_model(path, dtype=torch.bfloat16, device=DEVICE, numerics=Numerics.DEFAULT, with_mtp=True)
    captured, called = Setting(model), Setting(model)
    trunks = trunks_of(captured, CudaBackend(DEVICE, Alone()))
    eager = trunks_of(called, CallBackend())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(piecewise, "record", lambda work, stored: (work(), None))
        wanted = hidden_of(called, eager)
    check(hidden_of(captured, trunks), wanted, 0.0)
    assert any(trunk.num_taped for trunk in trunks)
    assert not any(trunk.num_taped for trunk in eager)
