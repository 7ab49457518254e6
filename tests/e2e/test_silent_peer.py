"""A decode worker that never answers: its requests fail in their time, those for others do not notice."""

import pytest
import torch
import zmq

from baton.core.config import KVTransferConfig
from baton.core.errors import RequestCancelled, TransferFailed
from baton.kvtransfer.sender.service import DecodePeer
from baton.tests.e2e.prompts import requests_for, token_prompts
from baton.tests.e2e.topology import QueueSink, Topology

LEASE_S = 2.0
LONG_LEASE_S = 600.0  # nobody is given up within a test


@pytest.fixture
def silent_address():
    """Somebody listens there and never reads, as a stopped process does."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    yield f"tcp://127.0.0.1:{port}"
    context.destroy(linger=0)


def asked(load_tiny, tokenizer, lease_s):
    """Two workers, and the prompts of requests for somebody else."""
    prompts = [prompt + prompt for prompt in token_prompts(tokenizer, 8, max_len=120)[5:8]] * 4
    transfer = KVTransferConfig(lease_s=lease_s)
    model = load_tiny(torch.float32)
    return Topology(model, tokenizer, num_prefill_blocks=40, chunk_len=32, transfer=transfer), prompts


def submit(worker, prompts, address):
    doomed = [(request, QueueSink()) for request in requests_for(prompts, sampled=False, num_drafts=0, tag="s")]
    for request, sink in doomed:
        worker.submit(request, DecodePeer("silent", address, 7), sink)
    return doomed


def test_requests_for_others_do_not_wait_for_a_silent_decode_worker(load_tiny, tokenizer, silent_address):
    topology, prompts = asked(load_tiny, tokenizer, LONG_LEASE_S)
    with topology as deployment:
        worker = deployment.prefill[0].worker
        doomed = submit(worker, prompts, silent_address)
        wanted = requests_for(prompts, sampled=False, num_drafts=0, max_tokens=4)
        assert [outcome.error for outcome in deployment.generate(wanted)] == [None] * len(wanted)
        assert not any(sink.ended for _, sink in doomed), "it has not even been given up yet"
        held = worker.inventory().num_blocks_reserved
        assert 0 < held <= 20, "two that ask, or half of the blocks"
        for request, sink in doomed:
            worker.cancel(request.key)
            with pytest.raises((RequestCancelled, TransferFailed)):
                list(sink.events())


def test_requests_for_a_silent_decode_worker_fail_after_its_lease(load_tiny, tokenizer, silent_address):
    topology, prompts = asked(load_tiny, tokenizer, LEASE_S)
    with topology as deployment:
        worker = deployment.prefill[0].worker
        doomed = submit(worker, prompts, silent_address)
        for _, sink in doomed[:2]:
            with pytest.raises(TransferFailed):
                list(sink.events())
        for request, sink in doomed[2:]:
            worker.cancel(request.key)
            with pytest.raises((RequestCancelled, TransferFailed)):
                list(sink.events())
        deployment.wait_idle(60.0)
