"""A decode worker that never answers: its requests fail in their time, those for others do not notice."""

import time

import pytest
import torch
import zmq

from baton.core.errors import RequestCancelled, TransferFailed
from baton.kvtransfer.push import DecodePeer
from baton.tests.e2e.prompts import requests_for, token_prompts
from baton.tests.e2e.topology import QueueSink, Topology

LEASE_S = 2.0


@pytest.fixture
def silent_address():
    """Somebody listens there and never reads, as a stopped process does."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    yield f"tcp://127.0.0.1:{port}"
    context.destroy(linger=0)


def test_requests_for_others_do_not_wait_for_a_silent_decode_worker(load_tiny, tokenizer, silent_address):
    prompts = [prompt + prompt for prompt in token_prompts(tokenizer, 8, max_len=120)[5:8]] * 4
    with Topology(load_tiny(torch.float32), tokenizer, num_prefill_blocks=40, chunk_len=32) as deployment:
        worker = deployment.prefill[0].worker
        doomed = [(request, QueueSink()) for request in requests_for(prompts, sampled=False, num_drafts=0, tag="s")]
        for request, sink in doomed:
            worker.submit(request, DecodePeer("silent", silent_address, 7), sink)
        start_s = time.monotonic()
        wanted = requests_for(prompts, sampled=False, num_drafts=0, max_tokens=4)
        assert [outcome.error for outcome in deployment.generate(wanted)] == [None] * len(wanted)
        assert time.monotonic() - start_s < LEASE_S, "they waited for it"
        assert not any(sink.ended for _, sink in doomed), "it has not even been given up yet"
        held = worker.inventory().num_blocks_reserved
        assert 0 < held <= 20, "two that ask, or half of the blocks"
        for _, sink in doomed[:2]:
            with pytest.raises(TransferFailed):
                list(sink.events(2 * LEASE_S))
        for request, sink in doomed[2:]:
            worker.cancel(request.key)
            with pytest.raises((RequestCancelled, TransferFailed)):
                list(sink.events(1.0))
        deployment.wait_idle(4.0)
