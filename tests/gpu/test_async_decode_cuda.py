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


@pytest.mark.parametrize("prepare_ahead", [False, True])
@pytest.mark.parametrize("k", [0, 2, 4])
def test_the_same_tokens_and_accepted_lengths(k, prepare_ahead):
    tokenizer = Tokenizer.from_directory(TINY)
    model = load_model(TINY, dtype=torch.float32, device=DEVICE, numerics=Numerics.INVARIANT, with_mtp=True)
    prompts = token_prompts(tokenizer, 12, max_len=100)
    made = []
    for scheduling in ("sync", "async"):
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
        if prepare_ahead and scheduling == "async":
            engine._decode._preparer = StepPreparer(engine.pool)
        results = engine.generate(requests_for(prompts, sampled=True, num_drafts=k, max_tokens=24))
        made.append([(result.token_ids, result.counts) for result in results])
    assert made[0] == made[1]


def test_a_task_sees_its_inputs_and_its_reader_sees_its_work():
    stream = torch.cuda.Stream()
    with AsyncRunner("order", stream) as runner:
        source = torch.zeros(1 << 20, device=DEVICE)
        torch.cuda._sleep(LONG)
        source.fill_(1.0)  # late on the caller's stream

        def task():
            torch.cuda._sleep(LONG)
            return source * 2

        doubled = runner.launch(task).result()
        assert not torch.cuda.current_stream().query()
        assert (doubled + 1).cpu().eq(3.0).all()


def test_copies_do_not_wait_and_arrive():
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    values = torch.arange(1000)
    on_device = to_device(values, DEVICE)
    values.zero_()  # what crosses is a copy
    target = host_buffer(1000, torch.int64, DEVICE)
    copy_to_host(target, on_device)
    done = torch.cuda.Event()
    done.record()
    assert not done.query()
    done.synchronize()
    assert torch.equal(target, torch.arange(1000))
    with pytest.raises(AssertionError, match="pageable"):
        copy_to_host(torch.empty(1000, dtype=torch.int64), on_device)
