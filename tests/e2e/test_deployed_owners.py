"""`baton serve --enable-dp-attention` with prefill workers, on real Ray: every prompt is handed to its owner's pool."""

import time

import pytest

from baton.client import BatonClient
from baton.cluster.deployment import Deployment
from baton.core.config import ServeConfig
from baton.model.loader import load_model
from baton.tests.e2e.prompts import requests_for, token_prompts
from baton.tests.e2e.test_dealt_attention import MLA, MODEL
from baton.tests.e2e.test_deployment import generate
from baton.tests.e2e.test_same_tokens import local_tokens

pytestmark = [pytest.mark.ray, pytest.mark.slow]
CONFIG = {
    "model": "tiny-mla",
    "num_speculative_tokens": 2,
    "dtype": "float64",
    "grpc_port": 0,
    "max_num_batched_tokens": 48,
    "kv_memory_mib": 64,
    "tp_prefill": 2,
    "tp_decode": 2,
    "enable_dp_attention": True,
    "local_prefill": "never",
}
IDLE_S = 20.0  # until the heartbeats say so


@pytest.mark.parametrize("transport", ["auto", "grpc"])
def test_prompts_are_handed_to_their_owners(transport, tokenizer):
    """Without --prefill, which is 1 on CPUs; no decode worker may compute a prompt."""
    prompts = token_prompts(tokenizer, 6, max_len=120)
    requests = [
        request
        for sampled in (False, True)
        for request in requests_for(prompts, sampled=sampled, num_drafts=2, tag=f"{sampled}-")
    ]
    wanted = local_tokens(load_model(MLA, **MODEL | {"with_mtp": False}), tokenizer, requests)
    config = ServeConfig.from_mapping(CONFIG | {"transport": transport})
    with Deployment(config) as deployment, BatonClient(deployment.address) as client:
        for request, tokens in zip(requests, wanted, strict=True):
            assert generate(client, request)[0] == list(tokens)
        end_s = time.monotonic() + IDLE_S
        while True:
            held = {worker.state.worker_id: worker.state.inventory for worker in client.status().workers}
            prefill, decode = held["prefill-0"], held["decode-0"]
            if decode.num_requests_finished == len(requests) and decode.num_blocks_free == decode.num_blocks:
                break
            assert time.monotonic() < end_s, decode
            time.sleep(0.02)
        assert decode.num_blocks == 2 * prefill.num_blocks, "a pool at each rank"
