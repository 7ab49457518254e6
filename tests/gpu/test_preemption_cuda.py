"""Preemption on a GPU: KV goes to pinned host memory and back behind the host's back, and no token changes."""

import pytest
import torch

from baton.core.numerics import Numerics
from baton.core.requests.tokenizer import Tokenizer
from baton.engine.local import LocalEngine
from baton.model.loader import load_model
from baton.tests.e2e.conftest import TINY
from baton.tests.e2e.prompts import requests_for, token_prompts

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("host_kv_bytes", [0, 1 << 26], ids=["recompute", "offload"])
@pytest.mark.parametrize("k", [0, 2])
def test_the_same_tokens_under_pressure(k, host_kv_bytes):
    tokenizer = Tokenizer.from_directory(TINY)
    model = load_model(TINY, dtype=torch.float32, device=DEVICE, numerics=Numerics.INVARIANT, with_mtp=True)
    prompts = token_prompts(tokenizer, 12, max_len=100)
    made = []
    for options in ({"num_blocks": 128}, {"num_blocks": 16, "overcommit": True, "host_kv_bytes": host_kv_bytes}):
        engine = LocalEngine(
            model,
            tokenizer,
            block_size=16,
            num_draft_tokens=k,
            chunk_len=48,
            max_num_sequences=6,
            **({"preempt_at": (9,)} if "overcommit" in options else {}),
            **options,
        )
        results = engine.generate(requests_for(prompts, sampled=True, num_drafts=k, max_tokens=40))
        made.append([(result.token_ids, result.counts) for result in results])
    assert made[0] == made[1]
    assert engine.preemptions.num_preemptions >= len(prompts)
    assert (engine.preemptions.num_restored_blocks > 0) == (host_kv_bytes > 0)
