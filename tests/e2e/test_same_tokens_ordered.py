"""The flagship by the Triton kernels of invariant numerics: disaggregated output equals one-process output.

In the interpreter, which has one state for all threads: so one request at a time, whose prompt is done before it is
decoded. What kernels do on a GPU is shown by `tests/gpu/test_invariant_cuda.py`.
"""

import pytest
import torch

import baton.tests.kernels.interpreter  # noqa: F401  (repairs it)
from baton.core.numerics import Numerics
from baton.core.requests.tokenizer import Tokenizer
from baton.kernels.implementation import Implementation
from baton.model.loader import load_model
from baton.scripts.model_shape import write_shape
from baton.tests.e2e.prompts import requests_for
from baton.tests.e2e.test_same_tokens import local_tokens
from baton.tests.e2e.topology import Topology

SIZES = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 512, "head_dim": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": 500}
PROMPTS = [tuple(range(3, 3 + length)) for length in (5, 21)]


@pytest.mark.slow
@pytest.mark.parametrize("sampled", [False, True])
def test_tokens_are_identical(tmp_path, sampled):
    path = write_shape("qwen3-8b", tmp_path, **SIZES)
    model = load_model(
        path, dtype=torch.bfloat16, device=torch.device("cpu"), numerics=Numerics.INVARIANT, with_mtp=True,
        random_seed=3, implementation=Implementation.TRITON,
    )  # fmt: skip
    tokenizer = Tokenizer.byte_level(path, 512)
    requests = requests_for(PROMPTS, sampled=sampled, num_drafts=0, max_tokens=5)
    wanted = local_tokens(model, tokenizer, requests)  # both at once, prompts whole
    assert len({tuple(tokens) for tokens in wanted}) == 2
    drafting = requests_for(PROMPTS, sampled=sampled, num_drafts=1, max_tokens=5)
    with Topology(model, tokenizer, num_drafts=1, chunk_len=16) as deployment:
        for request, tokens in zip(drafting, wanted, strict=True):
            (outcome,) = deployment.generate([request])
            assert outcome.error is None
            assert outcome.token_ids == tokens
        deployment.wait_idle()
