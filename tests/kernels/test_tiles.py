"""How invariant numerics cut GEMMs on CUDA, tried on a CPU: the result, and that neighbours do not change a bit."""

import pytest
import torch

from baton.core.numerics import Numerics
from baton.kernels import tiles
from baton.kernels.tiles import matmul_fixed, matmul_groups_fixed, matmul_rows, matmul_slices
from baton.model.loader import load_model
from baton.tests.model.harness import Paged, prompt
from baton.tests.model.ranks import on_ranks

CPU = torch.device("cpu")
SHAPES = {
    "dense": {"kind": "qwen3", "num_heads": 8, "num_kv_heads": 2, "tie": False},
    "sparse": {"kind": "qwen3_moe", "num_heads": 8, "num_kv_heads": 4},
}


def values(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.fixture
def cuda_rules(monkeypatch):
    monkeypatch.setattr(tiles, "has_cpu_rules", lambda device: False)


@pytest.mark.fast
@pytest.mark.parametrize("num_rows", [0, 8, 24])
@pytest.mark.parametrize("num_outputs", [1, 16, 37])
def test_pieces_make_the_gemm(num_rows, num_outputs):
    x_TK, weight_NK = values(num_rows, 12, dtype=torch.float64), values(num_outputs, 12, dtype=torch.float64, seed=1)
    assert torch.allclose(matmul_fixed(x_TK, weight_NK, 8, 16), x_TK @ weight_NK.T, atol=1e-12)


@pytest.mark.fast
@pytest.mark.parametrize("num_groups", [1, 8, 13])
def test_groups_make_the_gemm(num_groups):
    left_GTK, right_GKN = values(num_groups, 16, 12), values(num_groups, 12, 5, seed=1)
    wanted = left_GTK.double() @ right_GKN.double()
    assert torch.allclose(matmul_groups_fixed(left_GTK, right_GKN, 8).double(), wanted, atol=1e-5)


@pytest.mark.fast
def test_a_part_of_rows_outputs_slices_or_groups_has_the_same_bits(cuda_rules):
    x_TK, weight_NK = values(130, 96), values(1500, 96, seed=1)
    whole_TN = matmul_rows(x_TK, weight_NK)
    assert torch.equal(matmul_rows(x_TK[70:71], weight_NK), whole_TN[70:71])
    assert torch.equal(matmul_rows(x_TK, weight_NK[600:640]), whole_TN[:, 600:640])
    slices_CTN = matmul_slices(x_TK, weight_NK, 8)
    half = matmul_slices(x_TK[:, 48:].contiguous(), weight_NK[:, 48:].contiguous(), 4)
    assert torch.equal(half, slices_CTN[4:])
    assert torch.allclose(slices_CTN.sum(dim=0), whole_TN, atol=1e-4)
    left_GTK, right_GKN = values(12, 64, 24), values(12, 24, 32, seed=1)
    groups_GTN = matmul_groups_fixed(left_GTK, right_GKN, 64)
    assert torch.equal(matmul_groups_fixed(left_GTK[5:7], right_GKN[5:7], 64), groups_GTN[5:7])


def run(path, group=None, numerics=Numerics.INVARIANT, dtype=torch.float32):
    """Logits of a prompt in two chunks, and of two rows decoded after it."""
    model = load_model(path, dtype=dtype, device=CPU, numerics=numerics, with_mtp=True, communicator=group)
    ids = prompt(40)
    paged = Paged(model, group=group)
    hidden = paged.prefill(ids[:-2], chunk_len=31)
    decoded = paged.trunk(ids[None, -2:], paged.decode_batch([0], [38], 2))
    return paged.logits(torch.cat([hidden, decoded]))


@pytest.mark.parametrize("kind", SHAPES)
def test_a_model_by_these_rules(kind, cuda_rules, tiny_checkpoint):
    path = tiny_checkpoint(**SHAPES[kind])
    plain = run(path, numerics=Numerics.DEFAULT, dtype=torch.float64)
    assert (run(path, dtype=torch.float64) - plain).abs().max() <= 1e-9
    wanted = run(path)
    for logits in on_ranks(2, lambda group: run(path, group)):
        assert torch.equal(logits, wanted)
