"""The waterfall of requests that a router process and whole workers served: parts, sums, and what a client measured."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from baton.client import BatonClient
from baton.core.requests.sampling import SamplingParams
from baton.core.telemetry.waterfall import CLOSED
from baton.proto.wire import FIRST, SECOND, waterfall_data
from baton.tests.e2e.test_metrics import Running, prompt_of

NOISE_MS = 1e-3  # of readings that were rounded to whole nanoseconds on their way


@pytest.fixture(scope="module")
def running():
    deployment = Running()
    yield deployment
    deployment.close()


def ask(client, prompt, **sampling):
    """Stats of one request, and what the client saw: milliseconds to the first and the second token."""
    begin_s = time.perf_counter()
    seen_ms, stats, num_tokens = [], None, 0
    for chunk in client.generate(token_ids=prompt, sampling=SamplingParams(temperature=0.0, **sampling)):
        num_tokens += len(chunk.token_ids)
        while len(seen_ms) < min(num_tokens, 2):  # one chunk may have both
            seen_ms.append(1e3 * (time.perf_counter() - begin_s))
        if chunk.HasField("finish"):
            stats = chunk.finish.stats
    return stats, seen_ms


def ask_many(address, num, workers=6):
    local = threading.local()

    def one(at):
        if not hasattr(local, "client"):
            local.client = BatonClient(address)
        return ask(local.client, prompt_of(at % 60), max_tokens=2 + at % 7, ignore_eos=True)

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(one, range(num)))


def check(found):
    """Every sum closes, no part is negative, and a client on this host saw the same times, a little later."""
    gaps, apart_ms = [], []
    for stats, seen_ms in found:
        assert stats.shared_clock
        data = waterfall_data(stats)
        for whole, total_ms, seen in zip(
            (data["first"], data["second"]), (stats.ttft_ms, stats.second.total_ms), seen_ms, strict=True
        ):
            assert min(whole["parts"].values()) >= -NOISE_MS, whole
            assert whole["gap"] <= CLOSED, whole
            gaps.append(whole["gap"])
            assert seen >= total_ms - NOISE_MS, "the client cannot have it before it left"
            apart_ms.append(seen - whole["sum_ms"])
        assert stats.second.retry_ms == 0.0
        assert stats.second.step_ms > 0
        assert stats.second.draft_ms > 0
        assert stats.prefill_ms > 0
    return max(gaps), sorted(apart_ms)


def test_sums_close_for_30_requests(running):
    found = ask_many(running.address, 30)
    worst, apart_ms = check(found)
    print(f"worst gap {worst:.2e}; the client saw tokens {apart_ms[len(apart_ms) // 2]:.2f} ms later (median)")
    data = waterfall_data(found[0][0])
    assert tuple(data["first"]["parts"]) == FIRST
    assert tuple(data["second"]["parts"]) == (*FIRST[:-1], *SECOND)


@pytest.mark.slow
def test_sums_close_for_1000_requests(running):
    worst, apart_ms = check(ask_many(running.address, 1000))
    print(f"worst gap {worst:.2e}; the client saw tokens {apart_ms[len(apart_ms) // 2]:.2f} ms later (median)")


def test_one_token_has_no_second(running):
    with BatonClient(running.address) as client:
        stats, seen_ms = ask(client, prompt_of(1), max_tokens=1)
    data = waterfall_data(stats)
    assert len(seen_ms) == 1
    assert "second" not in data
    assert data["first"]["gap"] <= CLOSED
