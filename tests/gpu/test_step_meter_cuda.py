"""Counters and times of decode steps on a GPU: nothing is lost, nothing waits, and times are the device's own."""

import time

import pytest
import torch

from baton.core.numerics import Numerics
from baton.core.requests.tokenizer import Tokenizer
from baton.engine.local import LocalEngine
from baton.engine.step.executor import StreamExecutor
from baton.engine.step.meter import StepMeter
from baton.kernels.copies import host_buffer
from baton.model.loader import load_model
from baton.tests.e2e.conftest import TINY
from baton.tests.e2e.prompts import requests_for, token_prompts
from baton.tests.engine.test_step_meter import counted

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
LONG = 200_000_000  # cycles, about a tenth of a second


@pytest.mark.parametrize("scheduling", ["sync", "async"])
@pytest.mark.parametrize("k", [0, 3])
def test_nothing_is_lost_between_the_device_and_the_streams(k, scheduling):
    tokenizer = Tokenizer.from_directory(TINY)
    model = load_model(TINY, dtype=torch.float32, device=DEVICE, numerics=Numerics.DEFAULT, with_mtp=True)
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
    report = engine.step_report()
    assert report.computed == report.read
    assert report.kept.num_tokens == sum(len(result.token_ids) - 1 for result in results)
    assert report.num_steps == report.step_s.num
    assert 0 < report.host_gap_s.num <= report.num_steps


def test_times_are_those_of_the_device_and_no_count_waits():
    executor = StreamExecutor(DEVICE)
    meter = StepMeter(2, executor, DEVICE)
    slots_B, caps_B = torch.arange(3, device=DEVICE), torch.full((3,), 2, device=DEVICE)
    accepted_B = torch.tensor([0, 1, 2], device=DEVICE)
    slots = (0, 1, 2)
    launched = []

    def step(times):
        meter.begin(times)
        torch.cuda._sleep(LONG)
        meter.counters.add(slots_B, caps_B, 2, accepted_B[:, None])
        meter.sampled(times)
        meter.end(times)
        return accepted_B

    def launch():
        times = meter.launch(slots)
        buffer = host_buffer(3, torch.int64, DEVICE)
        launched.append((times, executor.submit(lambda: step(times), buffer)))

    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        launch()
        launch()
        assert meter.computed().num_rows == 0
        meter.copy_if_wanted()
        assert not launched[0][1].is_done
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert meter.computed() == counted([(2, 0), (2, 1), (2, 2)] * 2, 2)
    time.sleep(0.2)
    launch()
    for times, future in launched:
        future.get()
        meter.read(times)
    step_s, gap_s = meter.times()
    assert step_s.num == 3
    assert step_s.total > 0.1
    assert gap_s.num == 2, "the first has none before it"
    assert 0.2 <= gap_s.total < 0.4, "one was launched ahead, one came late"
