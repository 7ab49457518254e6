"""Cancels, deaths and refusals: every stream ends with a typed error and both sides give everything back."""

import threading
import time

import pytest
import torch

from baton.core.config import KVTransferConfig
from baton.core.errors import (
    BatonError,
    PromptTooLong,
    RequestCancelled,
    RequestDeadlineExceeded,
    TransferFailed,
    WorkerLost,
)
from baton.tests.e2e.prompts import requests_for, token_prompts
from baton.tests.e2e.topology import Topology

LEASE = KVTransferConfig(lease_s=2.0)  # by whose end a death is noticed


@pytest.fixture
def model(load_tiny):
    return load_tiny(torch.float32)


@pytest.fixture
def long_request(tokenizer):
    prompt = token_prompts(tokenizer, 9, max_len=300)[7]
    return lambda tag, **more: requests_for([prompt], sampled=False, num_drafts=2, max_tokens=64, tag=tag, **more)[0]


# Ten points of a request's life, as fractions of its undisturbed duration, and the two ends.
POINTS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 0.95)


@pytest.mark.parametrize("chunk_len", [48])
def test_cancel_at_ten_points_leaves_nothing(model, tokenizer, long_request, chunk_len):
    with Topology(model, tokenizer, num_drafts=2, chunk_len=chunk_len, prefix_cache=False) as deployment:
        start_s = time.monotonic()
        want = deployment.generate([long_request("whole")])[0]
        duration_s = time.monotonic() - start_s
        assert want.finish_reason == "length" or want.finish_reason == "stop"
        for index, point in enumerate(POINTS):
            running = deployment.start(long_request(f"cancel{index}-"))
            time.sleep(point * duration_s)
            deployment.cancel(running)
            outcome = deployment.finish(running, timeout_s=5)
            assert outcome.error is None or isinstance(outcome.error, RequestCancelled)
            deployment.wait_idle()
            assert outcome.token_ids == want.token_ids[: len(outcome.token_ids)]
        again = deployment.generate([long_request("after")])[0]
        assert again.token_ids == want.token_ids


def test_a_request_that_ends_at_its_first_token_leaves_no_incoming(model, tokenizer):
    prompts = token_prompts(tokenizer, 6)
    with Topology(model, tokenizer, num_drafts=2) as deployment:
        outcomes = deployment.generate(requests_for(prompts, sampled=False, num_drafts=2, max_tokens=1))
        assert [len(outcome.token_ids) for outcome in outcomes] == [1] * 6
        assert {outcome.finish_reason for outcome in outcomes} == {"length"}
        assert not any(outcome.prefill_done.handed_off for outcome in outcomes)
        deployment.wait_idle()


def test_pushes_that_never_arrive_fail_the_request(model, tokenizer, long_request):
    transfer = KVTransferConfig(drop_pushes=True, commit_timeout_s=1.0)
    with Topology(model, tokenizer, num_drafts=2, transfer=transfer) as deployment:
        outcome = deployment.generate([long_request("dropped")])[0]
        assert isinstance(outcome.error, TransferFailed)
        assert len(outcome.token_ids) == 1, "the first token needs no transfer; nothing may follow it"
        deployment.wait_idle(6.0)


def test_a_prefill_worker_that_dies_mid_push_is_fenced(model, tokenizer, long_request):
    with Topology(
        model, tokenizer, num_prefill=2, num_drafts=2, chunk_len=16, prefix_cache=False, transfer=LEASE
    ) as deployment:
        want = deployment.generate([long_request("before0-"), long_request("before1-")])
        deployment.wait_idle()
        running = deployment.start(long_request("orphan"))
        while deployment.decode[0].worker.inventory().num_kv_receives == 0:
            time.sleep(0.001)
        dead = deployment.prefill[0]
        dead.worker._loop.close()
        dead.push.close()  # the process is gone: no abort, no more leases
        outcome_error = []

        def read():
            outcome_error.append(next_error(running[4]))

        reader = threading.Thread(target=read)
        reader.start()
        reader.join(30.0)
        assert not reader.is_alive(), "the decode worker never noticed"
        assert isinstance(outcome_error[0], TransferFailed)
        start_s = time.monotonic()
        while deployment.decode[0].worker.inventory().num_blocks_reserved:
            assert time.monotonic() - start_s < 30.0
            time.sleep(0.005)
        deployment.prefill = deployment.prefill[1:]
        again = deployment.generate([long_request("after")])[0]
        assert again.token_ids == want[0].token_ids


def next_error(sink):
    try:
        for _ in sink.events(30.0):
            pass
    except BatonError as error:
        return error
    return None


def test_a_decode_worker_that_dies_mid_push_fails_its_requests(model, tokenizer, long_request):
    with Topology(model, tokenizer, num_decode=2, num_drafts=2, chunk_len=16, transfer=LEASE) as deployment:
        want = deployment.generate([long_request("before0-"), long_request("before1-")])
        deployment.wait_idle()
        running = deployment.start(long_request("orphan"))
        while deployment.prefill[0].worker.inventory().num_kv_receives == 0:
            time.sleep(0.001)
        dead = deployment.decode[0]
        dead.incoming.close()
        error = next_error(running[3])
        assert isinstance(error, TransferFailed | WorkerLost)
        start_s = time.monotonic()
        while deployment.prefill[0].worker.inventory().num_blocks_reserved:
            assert time.monotonic() - start_s < 30.0
            time.sleep(0.005)
        deployment.decode = deployment.decode[1:]
        again = deployment.generate([long_request("after")])[0]
        assert again.token_ids == want[0].token_ids
        dead.worker._loop.close()


@pytest.mark.parametrize("only_decode_looks", [False, True])
@pytest.mark.parametrize("left_s", [0.0, 0.02])
def test_a_deadline_ends_the_request_on_both_sides(model, tokenizer, long_request, only_decode_looks, left_s):
    with Topology(model, tokenizer, num_drafts=2, chunk_len=16) as deployment:
        if only_decode_looks:  # what prefill hears of it is that its incoming transfer was refused, or its push failed
            deployment.prefill[0].worker.engine._expire = lambda: None
        outcome = deployment.generate([long_request("late", deadline_s=time.monotonic() + left_s)])[0]
        assert isinstance(outcome.error, RequestDeadlineExceeded | RequestCancelled)
        deployment.wait_idle()


def test_more_than_the_pool_is_refused_and_queues_hold_nothing(model, tokenizer, long_request):
    with Topology(model, tokenizer, num_drafts=2, num_blocks=8) as deployment:
        with pytest.raises(PromptTooLong):
            deployment.start(long_request("huge"))
        deployment.wait_idle()


def test_requests_beyond_the_pool_wait_their_turn(model, tokenizer):
    prompts = token_prompts(tokenizer, 24, max_len=60)
    requests = requests_for(prompts, sampled=False, num_drafts=2, max_tokens=12)
    with Topology(model, tokenizer, num_drafts=2) as roomy:
        want = [outcome.token_ids for outcome in roomy.generate(requests)]
    with Topology(model, tokenizer, num_drafts=2, num_blocks=12, max_num_seqs=2) as tight:
        outcomes = tight.generate(requests)
        tight.wait_idle()
    assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
    assert len(want) == len(outcomes)
