"""A model cut over ranks: the same logits, KV heads where the plan says, the same bits in invariant numerics."""

import pytest
import torch

from baton.core.errors import ModelUnsupported
from baton.core.numerics import Numerics
from baton.kvcache.pool import KVPool
from baton.model.config import ModelConfig
from baton.model.loader import load_model
from baton.model.parallel import ShardPlan
from baton.tests.model.harness import Paged, prompt
from baton.tests.model.ranks import on_ranks

DENSE = {"kind": "qwen3", "num_heads": 8, "num_kv_heads": 2, "tie": False}
SPARSE = {"kind": "qwen3_moe", "num_heads": 8, "num_kv_heads": 4}
PROMPT_LEN = 70


def load(path, communicator=None, *, dtype=torch.float64, numerics=Numerics.DEFAULT):
    return load_model(
        path, dtype=dtype, device=torch.device("cpu"), numerics=numerics, with_mtp=True, communicator=communicator
    )


def logits_of(model, group=None):
    """Of a prompt in chunks, of its MTP entries, and of two sequences decoded beside each other."""
    ids = prompt(PROMPT_LEN)
    paged = Paged(model, num_sequences=2, group=group)
    hidden = paged.prefill(ids[:-2], chunk_len=31)
    drafts = paged.mtp(ids[1:-2], hidden[:-1], paged.prefill_batch([(0, 0, PROMPT_LEN - 3)]))
    paged.prefill(ids[:20], sequence=1)
    batch = paged.decode_batch([1, 0], [20, PROMPT_LEN - 2], 2)
    decoded = paged.trunk(torch.stack([ids[20:22], ids[-2:]]), batch)
    return torch.cat([paged.logits(part) for part in (hidden, drafts, decoded)])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_logits_of_any_number_of_ranks(kind, size, tiny_checkpoint):
    path = tiny_checkpoint(**kind)
    wanted = logits_of(load(path))
    for logits in on_ranks(size, lambda group: logits_of(load(path, group), group)):
        assert (logits - wanted).abs().max() <= 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_invariant_numerics_give_the_same_bits(kind, size, dtype, tiny_checkpoint):
    path = tiny_checkpoint(**kind)
    options = {"dtype": dtype, "numerics": Numerics.INVARIANT}
    wanted = logits_of(load(path, **options))
    for logits in on_ranks(size, lambda group: logits_of(load(path, group, **options), group)):
        assert torch.equal(logits, wanted)
