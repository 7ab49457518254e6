"""Weights drawn on the GPU: a published shape is loaded in seconds, twice the same, and computes finite numbers."""

import resource
import time

import pytest
import torch

from baton.core.numerics import Numerics
from baton.model.loader import load_model
from baton.scripts.model_shape import write_shape

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
HOST_KIB = 2 << 20


def load(path):
    return load_model(path, dtype=torch.bfloat16, device=CUDA, numerics=Numerics.DEFAULT, with_mtp=True, random_seed=0)


def test_a_published_shape_is_made_on_the_device(tmp_path):
    path = write_shape("qwen3-8b", tmp_path, num_hidden_layers=8)
    torch.zeros(1, device=CUDA)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start_s = time.monotonic()
    one, other = load(path), load(path)
    torch.cuda.synchronize()
    assert time.monotonic() - start_s < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < HOST_KIB, "no weights on the host"
    assert one.config.model_hash == other.config.model_hash
    assert torch.equal(one._lm_head_WD, other._lm_head_WD)
    assert torch.equal(one._decoder.layers[7].mlp.down_DI, other._decoder.layers[7].mlp.down_DI)
    logits = one.logits(torch.randn(16, 4096, device=CUDA, dtype=torch.bfloat16))
    assert logits.isfinite().all()
    assert 1.5 < logits.std() < 6.0
