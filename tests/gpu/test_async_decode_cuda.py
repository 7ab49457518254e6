"""Decode steps ahead of the host on a GPU: the tokens of synchronous scheduling, and order between streams."""

import pytest
import torch

from baton.core.numerics import Numerics
from baton.core.tokenizer import Tokenizer
from baton.engine.async_runner import AsyncRunner
from baton.engine.local import LocalEngine
from baton.engine.prepare import StepPreparer
from baton.kernels.copies import copy_to_host, host_buffer, to_device
from baton.model.loader import load_model
from baton.tests.e2e.conftest import TINY
from baton.tests.e2e.prompts import requests_for, token_prompts

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
LONG = 200_000_000  # cycles, about a tenth of a second


def made(device, k, scheduling, *, prepare_ahead=False):
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
    if prepare_ahead:
        engine._decode._preparer = StepPreparer(engine.pool)
    prompts = token_prompts(tokenizer, 12, max_len=100)
    results = engine.generate(requests_for(prompts, sampled=True, num_drafts=k, max_tokens=24))
    return [(result.token_ids, result.counts) for result in results]


@pytest.fixture(scope="module")
def made_synchronously():
    return {k: made(DEVICE, k, "sync") for k in (0, 2, 4)}


@pytest.mark.parametrize("prepare_ahead", [False, True])
@pytest.mark.parametrize("k", [0, 2, 4])
def test_the_same_tokens_and_accepted_lengths(k, prepare_ahead, made_synchronously):
    assert made(DEVICE, k, "async", prepare_ahead=prepare_ahead) == made_synchronously[k]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("prepare_ahead", [False, True])
def test_a_device_that_is_not_the_threads_current_one(prepare_ahead, made_synchronously):
    assert torch.cuda.current_device() == 0
    assert made(torch.device("cuda", 1), 2, "async", prepare_ahead=prepare_ahead) == made_synchronously[2]


def test_a_task_sees_its_inputs_and_its_reader_sees_its_work():
    stream = torch.cuda.Stream()
    with AsyncRunner("order", stream) as runner:
        for turn in range(2):  # the first time kernels are loaded, which waits for the device
            source = torch.zeros(1 << 20, device=DEVICE)
            torch.cuda._sleep(LONG)
            source.fill_(1.0)  # late on the caller's stream

            def task(source=source):
                torch.cuda._sleep(LONG)
                return source * 2

            doubled = runner.launch(task).result()
            is_under_way = not torch.cuda.current_stream().query()
            assert (doubled + 1).cpu().eq(3.0).all()
            torch.cuda.synchronize()
            assert is_under_way or not turn


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
