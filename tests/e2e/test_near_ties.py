"""Default float32: tokens may differ from the reference only where two candidates nearly tie.

Each divergence is judged by a teacher-forced pass over the common prefix: the scores (logits over temperature plus
the position's noise) of the two tokens must lie within the bound.
"""

import numpy as np
import pytest
import torch

from baton.core.numerics import Numerics
from baton.engine.sampling.sampler import draw_noise, process_logits, sampling_rows
from baton.engine.step.batch import ChunkRows, prefill_inputs
from baton.kvcache.allocator import BlockAllocator
from baton.kvcache.pool import KVPool
from baton.tests.e2e.prompts import requests_for, token_prompts
from baton.tests.e2e.test_same_tokens import SAMPLED, WHOLE, cell_id, disaggregated, local_tokens

NEAR_TIE = 1e-4
CELLS = [
    ("greedy", 2, 48, "2P1D"),
    pytest.param(("coupled", 2, WHOLE, "1P2D"), marks=pytest.mark.slow),
    pytest.param(("coupled", 4, 16, "1P2D"), marks=pytest.mark.slow),
]


def scores(model, prompt, output, sampling):
    """Score of every token at the position after prompt + output, from one teacher-forced pass, float64 [V]."""
    token_ids = (*prompt, *output)
    pool = KVPool(model.kv_layout(16), 64, model.device)
    chunk = ChunkRows(
        token_ids=np.array(token_ids),
        start=0,
        length=len(token_ids),
        blocks=BlockAllocator(64, 16).reserve(len(token_ids)).blocks,
        knows_next=False,
    )
    inputs = prefill_inputs([chunk], pool)
    with torch.inference_mode():
        hidden_TD = model.trunk(inputs.token_ids_T, inputs.batch, pool, lambda layer: None)
        logits_11V = model.logits(hidden_TD[-1:])[None]
        rows = sampling_rows([sampling], model.device)
        if rows is None:
            return logits_11V[0, 0].double()
        noise_11V = draw_noise(rows, torch.tensor([len(token_ids)]), 1, logits_11V.shape[-1], logits_11V.dtype)
        return (process_logits(logits_11V, rows) + noise_11V)[0, 0].double()


@pytest.mark.parametrize("cell", CELLS, ids=cell_id)
def test_default_float32_diverges_only_at_near_ties(load_tiny, tokenizer, cell, record_property, capsys):
    prompts = token_prompts(tokenizer, 48)
    sampled = SAMPLED[cell[0]]
    requests = requests_for(prompts, sampled=sampled, num_drafts=0)
    model = load_tiny(torch.float32, Numerics.DEFAULT, with_mtp=False)
    expected = local_tokens(model, tokenizer, requests, chunk_len=WHOLE)
    got = disaggregated(load_tiny, tokenizer, prompts, cell, torch.float32)
    num_tokens = num_diverged = 0
    for request, want, have in zip(requests, expected, got, strict=True):
        num_tokens += len(want)
        at = next((i for i, pair in enumerate(zip(want, have, strict=False)) if pair[0] != pair[1]), None)
        if at is None:
            assert want == have
            continue
        num_diverged += 1
        score_V = scores(model, request.prompt_token_ids, want[:at], request.sampling)
        gap = abs(float(score_V[want[at]] - score_V[have[at]]))
        assert gap <= NEAR_TIE, f"{request.key} diverges at {at} with a gap of {gap}"
    rate = f"{cell[0]}: {num_diverged} of {len(requests)} requests diverged ({num_tokens} tokens)"
    record_property("divergence", rate)
    with capsys.disabled():
        print(f"\ndefault float32, {rate}")
