"""Decode steps ahead of the host on a GPU: the tokens of synchronous scheduling, and order between streams."""

import pytest
import torch

from baton.core.numerics import Numerics
from baton.core.requests.sampling import SamplingParams
from baton.core.requests.tokenizer import Tokenizer
from baton.engine.local import LocalEngine
from baton.engine.step.runner import Runner
from baton.kernels.copies import copy_to_host, host_buffer, to_device
from baton.kvcache.pool import KVPool
from baton.model.loader import load_model
from baton.tests.e2e.conftest import TINY
from baton.tests.e2e.prompts import requests_for, token_prompts
from baton.tests.engine.driver import Driver

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
LONG = 200_000_000  # cycles, about a tenth of a second


def made(device, k, scheduling):
    """Tokens and counts of every request."""
    tokenizer = Tokenizer.from_directory(TINY)
    model = load_model(TINY, dtype=torch.float32, device=device, numerics=Numerics.INVARIANT, with_mtp=True)
    engine = LocalEngine(
        model,
        tokenizer,
        num_blocks=128,
        block_size=16,
        num_draft_tokens=k,
        chunk_len=48,
        max_num_sequences=5,
        scheduling=scheduling,
    )
    prompts = token_prompts(tokenizer, 12, max_len=100)
    results = engine.generate(requests_for(prompts, sampled=True, num_drafts=k, max_tokens=24))
    return [(result.token_ids, result.counts) for result in results]


@pytest.fixture(scope="module")
def made_synchronously():
    return {k: made(DEVICE, k, "sync") for k in (0, 2, 4)}


@pytest.mark.parametrize("k", [0, 2, 4])
def test_the_same_tokens_and_accepted_lengths(k, made_synchronously):
    assert made(DEVICE, k, "async") == made_synchronously[k]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_threads_current_one(made_synchronously):
    assert torch.cuda.current_device() == 0
    assert made(torch.device("cuda", 1), 2, "async") == made_synchronously[2]


def six_steps(driver, slot, *, reads_each=False):
    """Two chunks of a prompt and four decode steps of it."""
    driver.place(slot, range(5, 45), SamplingParams(max_tokens=20, ignore_eos=True, temperature=1.0, seed=1))
    tickets = []
    for step in range(6):
        chunks = [driver.chunk(slot, 20)] if step < 2 else []
        tickets.append(driver.launch(() if chunks else (slot,), chunks=chunks))
        if reads_each:
            tickets[-1].result()
    return tickets


def test_a_prompt_ends_and_decodes_before_the_host_has_read_anything():
    """First token, draft and length are on the device; the tokens are those of a host that reads each step."""
    # Of Triton's kernels: those of the references are more than a device queues, and the host would wait for it.
    model = load_model(TINY, dtype=torch.bfloat16, device=DEVICE, numerics=Numerics.DEFAULT, with_mtp=True)
    found = []
    for reads_each in (True, False):
        pool = KVPool(model.kv_layout(16), 40, DEVICE)
        driver = Driver(Runner(model, pool, max_num_seqs=2, num_draft_tokens=2), pool)
        for ticket in six_steps(driver, 1):  # host memory is pinned, which may wait for the device
            ticket.result()
        driver.release(1)
        driver.runner.drain()
        if not reads_each:
            torch.cuda._sleep(20 * LONG)  # a busy host may take longer than LONG for six steps
        tickets = six_steps(driver, 0, reads_each=reads_each)
        is_under_way = not tickets[0].is_sampled
        assert is_under_way or reads_each
        outputs = [ticket.result() for ticket in tickets]
        found.append([outputs[1].chunks[0].token, *(output.decode[0].token_ids for output in outputs[2:])])
    assert found[0] == found[1]


def test_tokens_cross_to_the_host_while_the_step_still_runs():
    model = load_model(TINY, dtype=torch.float32, device=DEVICE, numerics=Numerics.DEFAULT, with_mtp=True)
    pool = KVPool(model.kv_layout(16), 40, DEVICE)
    driver = Driver(Runner(model, pool, max_num_seqs=2, num_draft_tokens=1), pool)
    driver.start(0, range(5, 45), SamplingParams(max_tokens=20, ignore_eos=True))
    driver.step([0])  # kernels are loaded
    finish = driver.runner._finish
    driver.runner._finish = lambda work: (torch.cuda._sleep(LONG), finish(work))
    ticket = driver.launch([0])
    assert ticket.result().decode[0].token_ids
    assert not ticket.is_done
    driver.runner.drain()
    assert ticket.is_done


def test_copies_do_not_wait_and_arrive():
    for turn in range(2):  # the first time memory is pinned, which may wait for the device
        torch.cuda.synchronize()
        torch.cuda._sleep(LONG)
        values = torch.arange(1000)
        on_device = to_device(values, DEVICE)
        values.zero_()  # what crosses is a copy
        target = host_buffer(1000, torch.int64, DEVICE)
        copy_to_host(target, on_device)
        done = torch.cuda.Event()
        done.record()
        is_under_way = not done.query()
        done.synchronize()
        assert torch.equal(target, torch.arange(1000))
        del target
        assert is_under_way or not turn
    with pytest.raises(AssertionError, match="pageable"):
        copy_to_host(torch.empty(1000, dtype=torch.int64), on_device)
