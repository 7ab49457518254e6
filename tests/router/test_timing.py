"""The waterfall of requests that were tried again, or whose workers' clocks are others."""

from types import SimpleNamespace

import pytest

from baton.core.telemetry.waterfall import RouterTimes
from baton.proto import inference_pb2, wire, worker_pb2
from baton.router.attempt.stats import add_timing

pytestmark = pytest.mark.fast

PROMPT_LEN = 10
MS = 1_000_000
ROUTER = RouterTimes(received_s=1.0, asked_s=1.01, first_s=1.1, second_s=1.5)


def first(sent_ms, received_ms=1020):
    """Known at `sent_ms`, of which the last 3 are of incoming transfer and 4 of prefill."""
    queue_ms = sent_ms - received_ms - 7
    return worker_pb2.FirstToken(
        queue_ms=queue_ms, grant_wait_ms=3, prefill_ms=4, received_ns=received_ms * MS, sent_ns=sent_ms * MS
    )


def start(landed_ms, draft_ms=5.0, transfer_ms=2.0):
    return worker_pb2.DecodeStart(
        draft_ms=draft_ms,
        transfer_ms=transfer_ms,
        landed_ns=landed_ms * MS,
        verification_ms=1.0,
        admission_ms=2.0,
        step_ms=10.0,
    )


def run(first=None, start=None, num_forced=0):
    return SimpleNamespace(first=first, decode_start=start, request=SimpleNamespace(prompt_len=PROMPT_LEN + num_forced))


def waterfall(*runs, router=ROUTER, shared_clock=True):
    stats = inference_pb2.RequestStats(prompt_len=PROMPT_LEN, ttft_ms=1e3 * (router.first_s - router.received_s))
    given = next(one.first for one in runs if one.first is not None)
    add_timing(stats, router, given, runs, shared_clock=shared_clock)
    data = wire.waterfall_data(stats)
    assert data["first"]["gap"] < 1e-9
    assert "second" not in data or data["second"]["gap"] < 1e-9
    return data


def test_an_attempt_that_handed_over():
    parts = waterfall(run(first(1080), start(1100)))["second"]["parts"]
    assert parts == pytest.approx(
        {
            "router_ms": 20,
            "queue_ms": 53,
            "grant_wait_ms": 3,
            "prefill_ms": 4,
            "retry_ms": 0,
            "draft_ms": 5,
            "transfer_ms": 15,
            "verification_ms": 1,
            "admission_ms": 2,
            "step_ms": 10,
            "publish_ms": 387,
        }
    )


def test_a_hand_off_that_failed_after_the_first_token_is_a_part():
    parts = waterfall(run(first(1080)), run(), run(first(1300), start(1320)))["second"]["parts"]
    assert (parts["retry_ms"], parts["draft_ms"], parts["transfer_ms"]) == pytest.approx((220, 5, 15))


def test_a_second_token_that_a_later_prefill_worker_gave():
    parts = waterfall(run(first(1080)), run(first(1300), start(1600), num_forced=1))["second"]["parts"]
    assert parts["retry_ms"] == pytest.approx(220)
    assert parts["publish_ms"] == pytest.approx(200)
    assert [parts[f"{name}_ms"] for name in ("draft", "transfer", "verification", "admission", "step")] == [0] * 5


def test_an_attempt_that_came_after_the_second_token_is_not_in_it():
    parts = waterfall(run(first(1080), start(1100)), run(first(9000), start(9100), num_forced=40))["second"]["parts"]
    assert (parts["retry_ms"], parts["transfer_ms"]) == pytest.approx((0, 15))


def test_other_clocks_leave_the_network_to_the_last_parts():
    far = 10**6
    data = waterfall(run(first(far + 60, far), start(7 * far)), shared_clock=False)
    assert not data["shared_clock"]
    parts = data["first"]["parts"]
    assert (parts["router_ms"], parts["queue_ms"], parts["publish_ms"]) == pytest.approx((10, 53, 30))
    parts = data["second"]["parts"]
    assert (parts["retry_ms"], parts["draft_ms"], parts["transfer_ms"]) == pytest.approx((0, 5, 2))
    assert parts["publish_ms"] == pytest.approx(500 - 10 - 60 - 5 - 2 - 13)


def test_an_answer_without_a_second_token_or_without_a_word_of_the_decode_worker_has_no_second():
    one = RouterTimes(received_s=1.0, asked_s=1.01, first_s=1.1, second_s=None)
    assert "second" not in waterfall(run(first(1080)), router=one)
    assert "second" not in waterfall(run(first(1080)))
