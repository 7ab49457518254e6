"""No wrong token, no leaked block, whatever hits the hand-off in whatever state."""

import json
import statistics

import pytest

from baton.core.errors import BatonError
from baton.tests.e2e.faults import MESSAGE_FAULTS, Fault, Injector
from baton.tests.e2e.soak import Soak, expected_tokens, make_requests
from baton.tests.engine.toy_engine import letters_tokenizer

MOMENTS = (
    "send hello",
    "hear hello_reply",
    "send reserve",
    "hear grant",
    "send first frame",
    "send frame",
    "hear credit",
    "send commit",
    "hear commit_ack",
    "send lease",
    "hear lease",
)


def check(requests, ended):
    """Every delivered stream is what it must be, or the beginning of it; those that ended well are whole."""
    want = expected_tokens(requests)
    num_whole = 0
    for request, result in zip(requests, ended, strict=True):
        expected = want[request.prompt_token_ids, request.sampling]
        assert result.token_ids == expected[: len(result.token_ids)], request
        if result.is_whole:
            num_whole += 1
            assert result.token_ids == expected, request
        assert result.error is None or isinstance(result.error, BatonError)
    return num_whole


def soak(num_requests, seed, *, num_at_once=12, flip_rate=1e-3, rate=1e-3, death_rate=2e-5, **where):
    injector = Injector(seed, flip_rate=flip_rate, rate=rate, death_rate=death_rate)
    deployment = Soak(letters_tokenizer(), injector, **where)
    requests = make_requests(num_requests, seed)
    try:
        ended = deployment.run(requests, num_at_once)
        injector.is_on = False
        idle_s = deployment.wait_idle(10.0)
        after = make_requests(12, seed + 1)
        assert check(after, deployment.run(after, 4)) == len(after), "it serves as before"
        deployment.wait_idle(5.0)
    finally:
        deployment.close()
    num_whole = check(requests, ended)
    cancels_ms = sorted(deployment.cancels_ms)
    report = {
        **where,
        "requests": num_requests,
        "whole": num_whole,
        "cancelled": sum(not e.is_whole and e.error is None for e in ended),
        "failed": sum(e.error is not None for e in ended),
        "attempts_max": max(e.num_attempts for e in ended),
        "retried": sum(e.num_attempts > 1 for e in ended),
        "flipped_frames": injector.flipped_frames,
        "idle_s": round(idle_s, 3),
        "cancel_ms_p50": round(statistics.median(cancels_ms), 1) if cancels_ms else None,
        "cancel_ms_p99": round(cancels_ms[int(0.99 * len(cancels_ms))], 1) if cancels_ms else None,
        "faults": sum(injector.hits.values()),
    }
    print(json.dumps(report))
    return injector, ended, report


@pytest.mark.parametrize(
    ("transport", "has_process"), [("zmq", False), ("shm", True)], ids=["zmq, on a thread", "shm, in a process"]
)
def test_a_few_hundred_requests_under_fire(transport, has_process):
    rates = {"flip_rate": 0.02, "rate": 0.003, "death_rate": 3e-4}
    injector, _, report = soak(150, 3, transport=transport, has_process=has_process, **rates)
    assert report["failed"] <= 5
    assert report["flipped_frames"] > 0
    assert len(injector.hits) > 10


@pytest.mark.slow
def test_ten_thousand_requests_hit_in_every_state():
    hits, seen, total = {}, set(), 0
    places = [("zmq", False), ("zmq", True), ("shm", True), ("grpc", True)]
    for index, (transport, has_process) in enumerate(places):
        injector, ended, _ = soak(2500, 100 + index, transport=transport, has_process=has_process)
        total += len(ended)
        seen |= set(injector.seen)
        for (moment, fault), count in injector.hits.items():
            hits[moment, fault] = hits.get((moment, fault), 0) + count
    assert total == 10_000
    for moment in sorted(seen):
        row = {fault.value: hits.get((moment, fault), 0) for fault in Fault}
        print(f"{moment:20}", " ".join(f"{name} {count}" for name, count in row.items()))
    for moment in MOMENTS:
        assert any(hits.get((moment, fault), 0) for fault in MESSAGE_FAULTS), moment
