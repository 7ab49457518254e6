"""The bundled model with its draft head pruned to a quarter: other drafts, the same tokens."""

from pathlib import Path

import pytest
import torch

from baton.core.numerics import Numerics
from baton.core.requests.request import SpeculationCounts
from baton.core.verification import DraftSampleMethod, VerificationConfig, VerificationMode
from baton.engine.local import LocalEngine
from baton.model.loader import load_model
from baton.tests.e2e.prompts import requests_for, token_prompts

PRUNED = Path(__file__).parents[2] / "assets" / "tiny-pruned"
NUM_DRAFTS = 3


@pytest.fixture(scope="module")
def pruned():
    return load_model(PRUNED, dtype=torch.float64, device=torch.device("cpu"), numerics=Numerics.DEFAULT, with_mtp=True)


def run(model, tokenizer, *, sampled, verification=None, num_drafts=NUM_DRAFTS, max_tokens=32):
    engine = LocalEngine(
        model,
        tokenizer,
        num_blocks=512,
        block_size=16,
        num_draft_tokens=num_drafts,
        chunk_len=256,
        max_num_sequences=8,
        verification=verification,
    )
    prompts = token_prompts(tokenizer, 20, seed=6)[8:]
    requests = requests_for(prompts, sampled=sampled, num_drafts=num_drafts, max_tokens=max_tokens)
    total = SpeculationCounts()
    tokens = []
    for result in engine.generate(requests):
        assert result.counts.num_draft_tokens == result.counts.num_accepted_tokens + result.counts.num_rejected_tokens
        total.num_draft_tokens += result.counts.num_draft_tokens
        total.num_accepted_tokens += result.counts.num_accepted_tokens
        tokens.append(result.token_ids)
    return tokens, total.num_accepted_tokens / max(1, total.num_draft_tokens)


@pytest.mark.parametrize("sampled", [False, True])
def test_tokens_are_those_of_the_whole_vocabulary(load_tiny, pruned, tokenizer, sampled, capsys):
    whole_tokens, whole = run(load_tiny(), tokenizer, sampled=sampled)
    pruned_tokens, kept = run(pruned, tokenizer, sampled=sampled)
    with capsys.disabled():
        print(f"\nk={NUM_DRAFTS} sampled={sampled}: acceptance {whole:.3f} whole, {kept:.3f} pruned")
    assert pruned_tokens == whole_tokens
    assert 0.25 < kept <= whole + 0.05


@pytest.mark.parametrize("is_pruned", [False, True])
@pytest.mark.parametrize("method", list(DraftSampleMethod))
def test_rejection_drafts_from_either_vocabulary(load_tiny, pruned, tokenizer, method, is_pruned, capsys):
    verification = VerificationConfig(mode=VerificationMode.REJECTION, draft_sample_method=method)
    model = pruned if is_pruned else load_tiny()
    _, acceptance = run(model, tokenizer, sampled=True, verification=verification)
    with capsys.disabled():
        print(f"\nk={NUM_DRAFTS} rejection, {method.value} drafts, pruned={is_pruned}: acceptance {acceptance:.3f}")
    assert acceptance > 0.2


def test_greedy_requests_are_the_same_under_rejection(load_tiny, pruned, tokenizer):
    wanted, _ = run(load_tiny(), tokenizer, sampled=False, num_drafts=0)
    got, _ = run(pruned, tokenizer, sampled=False, verification=VerificationConfig(mode=VerificationMode.REJECTION))
    assert got == wanted


@pytest.mark.slow
def test_rates_that_are_asked_for_are_met_with_the_model(load_tiny, tokenizer):
    verification = VerificationConfig.synthetic(0.8, 0.7, 0.6)
    _, acceptance = run(load_tiny(), tokenizer, sampled=False, verification=verification, max_tokens=200)
    assert acceptance == pytest.approx(0.7, abs=0.05)
    _, acceptance = run(load_tiny(), tokenizer, sampled=True, verification=VerificationConfig.force(2))
    assert acceptance == pytest.approx(2 / 3, abs=0.07)  # a last step may be cut short
