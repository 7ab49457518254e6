"""The whole product on real Ray: actors, router process, gRPC; one cell of the flagship test, and what kills do."""

import os
import signal
import time

import pytest
import torch

from baton.client import BatonClient
from baton.cluster.deployment import Deployment
from baton.core.config import ServeConfig
from baton.core.errors import BatonError
from baton.tests.e2e.prompts import requests_for, token_prompts
from baton.tests.e2e.test_same_tokens import MAX_TOKENS, local_tokens

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def deployment():
    config = ServeConfig.from_mapping(
        {"prefill": 1, "decode": 1, "mtp": 2, "dtype": "float64", "grpc_port": 0, "chunk_len": 48, "kv_memory_mib": 64}
    )
    with Deployment(config) as running:
        yield running


def idle(client):
    return all(
        worker.state.inventory.num_blocks_free == worker.state.inventory.num_blocks
        and worker.state.inventory.num_attends == 0
        and worker.state.inventory.num_landings == 0
        for worker in client.inventory().workers
        if worker.alive
    )


def wait_idle(client, timeout_s):
    start_s = time.monotonic()
    while not idle(client):
        assert time.monotonic() - start_s < timeout_s, client.inventory()
        time.sleep(0.02)
    return time.monotonic() - start_s


def generate(client, request):
    chunks = list(client.generate(token_ids=request.prompt_token_ids, sampling=request.sampling))
    return [token for chunk in chunks for token in chunk.token_ids], chunks[-1].finish


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "coupled"])
def test_tokens_through_ray_equal_one_process(deployment, tokenizer, load_tiny, sampled):
    prompts = token_prompts(tokenizer, 10)
    requests = requests_for(prompts, sampled=sampled, num_drafts=0, max_tokens=MAX_TOKENS)
    want = local_tokens(load_tiny(torch.float64, with_mtp=False), tokenizer, requests)
    with BatonClient(deployment.address) as client:
        for request, expected in zip(requests, want, strict=True):
            token_ids, finish = generate(client, request)
            assert token_ids == expected
            assert finish.stats.output_len == len(token_ids)
            if finish.stats.decode_worker:
                assert finish.stats.num_decode_tokens + 1 == len(token_ids)
        wait_idle(client, 2.0)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_killed_worker_ends_its_stream_and_comes_back(deployment, tokenizer, role):
    prompt = token_prompts(tokenizer, 8, max_len=1200)[7]
    request = requests_for([prompt], sampled=False, num_drafts=2, max_tokens=400)[0]
    with BatonClient(deployment.address) as client:
        before = {worker.state.worker_id: worker.state.epoch for worker in client.status().workers}
        pid = next(pid for name, pid in deployment.worker_pids().items() if role in name)
        start_s = None
        with pytest.raises(BatonError):
            for index, _ in enumerate(client.generate(token_ids=request.prompt_token_ids, sampling=request.sampling)):
                if role == "decode" and index == 1:
                    os.kill(pid, signal.SIGKILL)
                    start_s = time.monotonic()
                elif role == "prefill" and index == 0:
                    # Its stream may already be handed over; a second request meets the dead worker either way.
                    os.kill(pid, signal.SIGKILL)
                    start_s = time.monotonic()
            generate(client, request)
        assert time.monotonic() - start_s < 5.0
        wait_idle(client, 5.0)
        deadline_s = time.monotonic() + 60.0
        while True:
            states = {w.state.worker_id: w for w in client.status().workers if w.alive}
            if len(states) == len(before) and any(w.state.epoch != before[name] for name, w in states.items()):
                break
            assert time.monotonic() < deadline_s, "the worker did not come back under a new epoch"
            time.sleep(0.1)
        token_ids, _ = generate(client, request)
        assert len(token_ids) > 1
