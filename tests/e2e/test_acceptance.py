"""How often the bundled model's drafts stand, in real speculative decoding on text it was not trained on."""

import pytest
import torch

from baton.core.prompt_lookup import PromptLookup
from baton.core.requests.request import AttemptKey, GenerationRequest, SpeculationCounts
from baton.core.requests.sampling import SamplingParams
from baton.engine.local import LocalEngine
from baton.tests.e2e.conftest import TINY_EAGLE3
from baton.tests.e2e.prompts import token_prompts

NUM_PROMPTS = 24


def speculate(model, tokenizer, num_drafts, temperature, prompts=None, lookup=None):
    prompts = prompts or token_prompts(tokenizer, NUM_PROMPTS + 8, seed=5)[8:]
    engine = LocalEngine(
        model,
        tokenizer,
        num_blocks=1024,
        block_size=16,
        num_draft_tokens=num_drafts,
        chunk_len=512,
        max_num_sequences=8,
        lookup=lookup,
    )
    requests = [
        GenerationRequest(
            key=AttemptKey(str(index), 1),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=64, temperature=temperature, seed=index, ignore_eos=True),
            deadline_s=1e12,
            num_draft_tokens=num_drafts,
        )
        for index, prompt in enumerate(prompts)
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


def check(total, what, least_acceptance, least_tokens_per_step, capsys):
    acceptance = total.num_accepted_tokens / total.num_draft_tokens
    tokens_per_step = total.num_emitted_tokens / total.num_verify_steps
    with capsys.disabled():
        print(f"\n{what}: acceptance {acceptance:.3f}, {tokens_per_step:.2f} tokens a step")
    assert acceptance >= least_acceptance
    assert tokens_per_step >= least_tokens_per_step


@pytest.mark.parametrize(
    ("drafter", "num_drafts", "temperature", "least_acceptance", "least_tokens_per_step"),
    [
        ("mtp", 1, 0.0, 0.62, 1.6),
        ("mtp", 3, 0.0, 0.5, 2.0),
        ("mtp", 1, 1.0, 0.5, 1.5),
        ("mtp", 3, 1.0, 0.3, 1.7),
        ("eagle3", 1, 0.0, 0.6, 1.6),
        ("eagle3", 3, 0.0, 0.4, 2.0),
    ],
)
def test_drafts_stand(
    load_tiny, tokenizer, drafter, num_drafts, temperature, least_acceptance, least_tokens_per_step, capsys
):
    options = {"with_mtp": False, "draft_path": TINY_EAGLE3} if drafter == "eagle3" else {}
    total = speculate(load_tiny(torch.float32, **options), tokenizer, num_drafts, temperature)
    what = f"{drafter} k={num_drafts} T={temperature}"
    check(total, what, least_acceptance, least_tokens_per_step, capsys)


def test_what_is_looked_up_stands_where_text_repeats_itself(load_tiny, tokenizer, capsys):
    prompts = [prompt[:24] * 3 for prompt in token_prompts(tokenizer, NUM_PROMPTS + 8, seed=5)[8:]]
    total = speculate(load_tiny(torch.float32, with_mtp=False), tokenizer, 4, 0.0, prompts, PromptLookup())
    check(total, "ngram k=4", 0.4, 1.8, capsys)
