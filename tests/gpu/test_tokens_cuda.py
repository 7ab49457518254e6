"""On a GPU: the same tokens as on the CPU in float64, in one process and over the hand-off."""

import pytest
import torch

from baton.core.numerics import Numerics
from baton.core.requests.tokenizer import Tokenizer
from baton.model.loader import load_model
from baton.tests.e2e.conftest import TINY
from baton.tests.e2e.prompts import requests_for, token_prompts
from baton.tests.e2e.test_same_tokens import MAX_TOKENS, WHOLE, local_tokens
from baton.tests.e2e.topology import Topology

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_directory(TINY)


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return token_prompts(tokenizer, 16)


def tiny(dtype, device, numerics=Numerics.DEFAULT):
    return load_model(TINY, dtype=dtype, device=torch.device(device), numerics=numerics, with_mtp=True)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "coupled"])
def test_float64_tokens_equal_the_cpus(tokenizer, prompts, sampled):
    requests = requests_for(prompts, sampled=sampled, num_drafts=2, max_tokens=MAX_TOKENS)
    want = local_tokens(tiny(torch.float64, "cpu"), tokenizer, requests, num_drafts=2)
    model = tiny(torch.float64, "cuda")
    assert local_tokens(model, tokenizer, requests, num_drafts=2, chunk_len=48) == want
    with Topology(model, tokenizer, num_drafts=2, chunk_len=48) as deployment:
        outcomes = deployment.generate(requests)
        deployment.wait_idle()
    assert [outcome.token_ids for outcome in outcomes] == want


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_invariant_tokens_do_not_depend_on_the_hand_off(tokenizer, prompts, dtype):
    requests = requests_for(prompts, sampled=True, num_drafts=2, max_tokens=MAX_TOKENS)
    model = tiny(dtype, "cuda", Numerics.INVARIANT)
    want = local_tokens(model, tokenizer, requests, num_drafts=0, chunk_len=WHOLE)
    with Topology(model, tokenizer, num_prefill=2, num_drafts=2, chunk_len=48) as deployment:
        outcomes = deployment.generate(requests)
        deployment.wait_idle()
    assert [outcome.token_ids for outcome in outcomes] == want
