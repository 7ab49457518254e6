"""The model on CUDA: float64 logits equal the CPU's, and invariant numerics hold in float32 and bfloat16."""

import pytest
import torch

from baton.core.numerics import Numerics
from baton.kernels.selftest import check_invariance
from baton.model.loader import load_model
from baton.tests.model.checkpoints import write_checkpoint
from baton.tests.model.harness import Paged, prompt

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SHAPES = [
    {"kind": "qwen3", "num_heads": 8, "num_kv_heads": 2, "tie": False},
    {"kind": "qwen3_moe"},
    {"kind": "qwen3_moe", "hidden_size": 640, "head_dim": 64, "num_heads": 8, "vocab_size": 1000},
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """One directory for each of SHAPES."""
    return [write_checkpoint(tmp_path_factory.mktemp("model"), **shape) for shape in SHAPES]


def load(path, dtype, device, numerics):
    return load_model(path, dtype=dtype, device=device, numerics=numerics, with_mtp=True)


def run(model, ids):
    """Logits and MTP logits: 60 positions in chunks of 48, the rest as rows of a decode step, on the CPU."""
    ids = ids.to(model.device)
    paged = Paged(model)
    first = paged.prefill(ids[:60], chunk_len=48)
    tail = len(ids) - 60
    hidden = torch.cat([first, paged.trunk(ids[60:], paged.decode_batch([0], [60], tail, bound=100))])
    drafts = paged.mtp(ids[1:], hidden[:-1], paged.prefill_batch([(0, 0, len(ids) - 1)]))
    return paged.logits(hidden).cpu(), paged.logits(drafts).cpu()


@pytest.mark.parametrize("numerics", list(Numerics))
@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_float64_logits_equal_the_cpu(shape, numerics, checkpoints):
    path = checkpoints[shape]
    ids = prompt(64)
    wanted = run(load(path, torch.float64, torch.device("cpu"), Numerics.DEFAULT), ids)
    result = run(load(path, torch.float64, CUDA, numerics), ids)
    for got, want in zip(result, wanted, strict=True):
        assert (got - want).abs().max() <= 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_invariance(shape, dtype, checkpoints):
    model = load(checkpoints[shape], dtype, CUDA, Numerics.INVARIANT)
    check_invariance(model.linear_shapes(), dtype, CUDA)
    ids = prompt(150, seed=4).to(CUDA)
    whole = Paged(model)
    hidden = whole.prefill(ids)
    wanted = whole.logits(hidden)
    for chunk_len in (7, 48, 64):
        paged = Paged(model)
        assert torch.equal(paged.logits(paged.prefill(ids, chunk_len=chunk_len)), wanted), chunk_len
    for num_rows in range(1, 6):
        paged = Paged(model, num_sequences=2)
        paged.prefill(ids[:80], sequence=1)
        paged.prefill(ids[: 150 - num_rows], sequence=0)
        tokens = torch.stack([ids[80 : 80 + num_rows], ids[150 - num_rows :]])
        rows = paged.trunk(tokens, paged.decode_batch([1, 0], [80, 150 - num_rows], num_rows, bound=160))
        logits = paged.logits(rows).unflatten(0, (2, num_rows))
        assert torch.equal(logits[1], wanted[150 - num_rows :]), num_rows
        assert torch.equal(logits[0], wanted[80 : 80 + num_rows]), num_rows


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("numerics", list(Numerics))
@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_a_decode_step_never_waits(shape, numerics, checkpoints):
    model = load(checkpoints[shape], torch.bfloat16, CUDA, numerics)
    ids = prompt(40).to(CUDA)
    paged = Paged(model)
    hidden = paged.prefill(ids[:37])
    paged.mtp(ids[1:38], hidden, paged.prefill_batch([(0, 0, 37)]))
    batch = paged.decode_batch([0], [37], 3, bound=64)
    tokens = ids[37:]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.inference_mode():
            rows = model.trunk(tokens, batch, paged.pool, lambda layer: None)
            out = model.mtp(tokens, rows, batch, paged.pool, lambda layer: None)
            logits = model.logits(out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert logits.isfinite().all()
