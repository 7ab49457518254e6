"""Prefill workers whose trunk is replayed in pieces: what they push between the pieces is what one process computes."""

import pytest
import torch

from baton.core.numerics import Numerics
from baton.engine.graphs.backend import CallBackend
from baton.model.loader import load_model
from baton.tests.e2e.conftest import TINY
from baton.tests.e2e.prompts import requests_for, token_prompts
from baton.tests.e2e.test_same_tokens import local_tokens
from baton.tests.e2e.topology import Topology
from baton.tests.engine.graphs import graphed
from baton.tests.engine.recorder import RecorderBackend

CHUNK_LEN = 48


# Torch sorts tokens of many experts on the host, which no graph records.
BACKENDS = {"tiny": RecorderBackend, "tiny-hybrid": RecorderBackend, "tiny-mla": CallBackend}


@pytest.mark.parametrize("name", BACKENDS)
def test_tokens_are_those_of_one_process(name, tokenizer):
    path, device = TINY.with_name(name), torch.device("cpu")
    model = load_model(path, dtype=torch.float64, device=device, numerics=Numerics.DEFAULT, with_mtp=True)
    requests = requests_for(token_prompts(tokenizer, 8, max_len=130), sampled=True, num_drafts=2, max_tokens=12)
    wanted = local_tokens(model, tokenizer, requests)
    with Topology(model, tokenizer, num_drafts=2, chunk_len=CHUNK_LEN) as deployment:
        (prefill,) = deployment.prefill
        runner = prefill.worker._runner
        assert runner.graphs is None
        runner.graphs = graphed(model, prefill.pool, k=0, sizes=(), rows=(8, 20, CHUNK_LEN), backend=BACKENDS[name]())
        outcomes = deployment.generate(requests)
        deployment.wait_idle()
        said = prefill.worker.inventory().graphs
    assert [outcome.error for outcome in outcomes] == [None] * len(requests)
    assert [outcome.token_ids for outcome in outcomes] == wanted
    assert (said.num_captured, said.num_steps_replayed) == (3, 0)
    assert said.num_steps_piecewise >= len(requests)
    assert not any(said.num_steps_eager.values())
