"""How often the bundled model's drafts stand, in real speculative decoding on text it was not trained on."""

import pytest
import torch

from baton.core.requests.request import AttemptKey, GenerationRequest, SpeculationCounts
from baton.core.requests.sampling import SamplingParams
from baton.engine.local import LocalEngine
from baton.tests.e2e.prompts import token_prompts

NUM_PROMPTS = 24


def speculate(model, tokenizer, num_drafts, temperature):
    engine = LocalEngine(
        model,
        tokenizer,
        num_blocks=1024,
        block_size=16,
        num_draft_tokens=num_drafts,
        chunk_len=512,
        max_num_sequences=8,
    )
    requests = [
        GenerationRequest(
            key=AttemptKey(str(index), 1),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=64, temperature=temperature, seed=index, ignore_eos=True),
            deadline_s=1e12,
            num_draft_tokens=num_drafts,
        )
        for index, prompt in enumerate(token_prompts(tokenizer, NUM_PROMPTS + 8, seed=5)[8:])
    ]
    total = SpeculationCounts()
    for result in engine.generate(requests):
        counts = result.counts
        assert counts.num_draft_tokens == counts.num_accepted_tokens + counts.num_rejected_tokens
        assert counts.num_emitted_tokens == len(result.token_ids) == 64
        total.num_verify_steps += counts.num_verify_steps
        total.num_draft_tokens += counts.num_draft_tokens
        total.num_accepted_tokens += counts.num_accepted_tokens
        total.num_emitted_tokens += counts.num_emitted_tokens - 1  # the first token is prefill's
    return total


@pytest.mark.parametrize(
    ("num_drafts", "temperature", "least_acceptance", "least_tokens_per_step"),
    [(1, 0.0, 0.62, 1.6), (3, 0.0, 0.5, 2.0), (1, 1.0, 0.5, 1.5), (3, 1.0, 0.3, 1.7)],
)
def test_drafts_stand(load_tiny, tokenizer, num_drafts, temperature, least_acceptance, least_tokens_per_step, capsys):
    total = speculate(load_tiny(torch.float32), tokenizer, num_drafts, temperature)
    acceptance = total.num_accepted_tokens / total.num_draft_tokens
    tokens_per_step = total.num_emitted_tokens / total.num_verify_steps
    with capsys.disabled():
        print(f"\nk={num_drafts} T={temperature}: acceptance {acceptance:.3f}, {tokens_per_step:.2f} tokens a step")
    assert acceptance >= least_acceptance
    assert tokens_per_step >= least_tokens_per_step
