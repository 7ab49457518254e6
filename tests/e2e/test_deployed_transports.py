"""Every transport that a CPU can use, in a real deployment: the same tokens, and the data path that was asked for."""

import time

import pytest
import torch

from baton.client import BatonClient
from baton.cluster.deployment import Deployment
from baton.core.config import ServeConfig
from baton.core.kv_transports import KV_TRANSPORTS, TRANSPORT_NAMES
from baton.tests.e2e.prompts import requests_for, token_prompts
from baton.tests.e2e.test_same_tokens import MAX_TOKENS, local_tokens

pytestmark = pytest.mark.ray
CONFIG = {
    "num_speculative_tokens": 2,
    "dtype": "float64",
    "grpc_port": 0,
    "max_num_batched_tokens": 48,
    "kv_memory_mib": 64,
}


AUTO = next(name for name, declared in KV_TRANSPORTS.items() if declared.is_auto and declared.memory != "GPU")


def cells():
    """(transport, its data path) of all that pools in host memory can use here."""
    for name in TRANSPORT_NAMES:
        declared = KV_TRANSPORTS[AUTO if name == "auto" else name]
        if declared.memory != "GPU" and not declared.problem:
            yield pytest.param(name, declared.data_path, marks=pytest.mark.slow)


@pytest.mark.parametrize(("transport", "data_path"), list(cells()))
def test_it_carries_requests_to_the_same_tokens(load_tiny, tokenizer, transport, data_path):
    requests = requests_for(
        token_prompts(tokenizer, 4), sampled=False, num_drafts=2, max_tokens=MAX_TOKENS, tag=transport
    )
    want = local_tokens(load_tiny(torch.float64, with_mtp=False), tokenizer, requests)
    with Deployment(ServeConfig.from_mapping({**CONFIG, "transport": transport, "local_prefill": "never"})) as running:
        with BatonClient(running.address) as client:
            for request, tokens in zip(requests, want, strict=True):
                chunks = list(client.generate(token_ids=request.prompt_token_ids, sampling=request.sampling))
                assert [token for chunk in chunks for token in chunk.token_ids] == list(tokens)
            data_paths, until_s = set(), time.monotonic() + 5.0
            while not data_paths and time.monotonic() < until_s:  # the next heartbeat says it
                workers = client.inventory().workers
                data_paths = {path.data_path for worker in workers for path in worker.state.inventory.transfer.paths}
                time.sleep(0.05)
    assert data_paths == {data_path}
