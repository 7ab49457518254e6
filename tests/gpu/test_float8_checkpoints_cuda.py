"""Published float8 checkpoints on CUDA: float8 weights as stored, and logits near those of a CPU's reference."""

import pytest
import torch

from baton.core.numerics import Numerics
from baton.kernels.gemm.fp8_weight import Fp8Weight
from baton.kernels.moe.gemm import Fp8ExpertWeights
from baton.model.loader import load_model
from baton.tests.kernels.harness import relative_error
from baton.tests.model.fp8_checkpoints import EXPERTS, LAYOUTS, write_float8
from baton.tests.model.harness import Paged, prompt
from baton.tests.model.test_float8_checkpoints import NUM_TOKENS, weights_of

pytestmark = pytest.mark.gpu


def load(path, device):
    numerics = Numerics.DEFAULT
    return load_model(path, dtype=torch.bfloat16, device=torch.device(device), numerics=numerics, with_mtp=True)


def prefilled(model, num_tokens):
    """Logits of a prompt of many rows, whose GEMMs are those of a prefill."""
    paged = Paged(model)
    return paged.logits(paged.prefill(prompt(num_tokens).to(model.device), chunk_len=96)).cpu()


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_the_cpus(layout, kind, tmp_path):
    """Each token goes to all experts: near a tie rounding would choose others."""
    overrides = {"num_experts_per_tok": EXPERTS["num_experts"]} if kind == "qwen3_moe" else {}
    path, _ = write_float8(tmp_path, LAYOUTS[layout], kind=kind, seed=5, overrides=overrides)
    here, there = load(path, "cuda"), load(path, "cpu")
    float8, wanted = ([type(weight) for _, weight in weights_of(model)] for model in (here, there))
    assert float8 == wanted, "the same weights stay float8"
    assert any(each in (Fp8Weight, Fp8ExpertWeights) for each in float8) != LAYOUTS[layout].wide
    for num_tokens in (NUM_TOKENS, 170):
        error = relative_error(prefilled(here, num_tokens), prefilled(there, num_tokens))
        assert error < 0.1, f"{num_tokens} tokens: {error}"
