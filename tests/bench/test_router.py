"""The harness of `baton bench router` and `baton bench overload`: figures, promises, echo workers, and small runs."""

import json

import pytest

from baton.bench.router_bench import overload, router_cost
from baton.bench.router_bench.echo_fleet import EchoFleet
from baton.bench.router_bench.echo_load import EchoLoad, LoadOutcome
from baton.bench.router_bench.overload import OverloadOptions, figures, goodput
from baton.bench.router_bench.router_cost import RouterCostOptions, checks, costs
from baton.client import BatonClient
from baton.cluster.commands.bench import bench_overload, bench_router
from baton.cluster.outcome import Output
from baton.core.errors import ConfigInvalid
from baton.core.requests.sampling import SamplingParams
from baton.tests.e2e.conftest import TINY


@pytest.mark.fast
def test_options_are_checked():
    for wrong in ({"seconds": 0.0}, {"rounds": 0}, {"idle_streams": 0}, {"step_ms": 0.0}):
        with pytest.raises(ConfigInvalid, match="it starts at"):
            RouterCostOptions(**wrong)
    for wrong in ({"seconds": 0.0}, {"factor": 0.0}, {"num_clients": 0}, {"deadline_s": 0.0}, {"capacity_s": 0.0}):
        with pytest.raises(ConfigInvalid, match="it starts at"):
            OverloadOptions(**wrong)


@pytest.mark.fast
def test_the_parts_of_requests_and_tokens_are_told_apart():
    request_s, token_s = 1.2e-3, 40e-6
    work = [(2000, 4000), (900, 14_400), (300, 38_400)]
    samples = [(num * request_s + tokens * token_s, num, tokens) for num, tokens in work]
    assert costs(samples) == pytest.approx((request_s, token_s))
    noisy = [(seconds * (1 + 0.02 * (-1) ** at), num, tokens) for at, (seconds, num, tokens) in enumerate(samples)]
    assert costs(noisy) == pytest.approx((request_s, token_s), rel=0.1)


@pytest.mark.fast
def test_the_rate_of_tokens_is_that_of_the_middle():
    times = [(10.0 + at / 10, 100 if 5 <= at < 35 else 10) for at in range(41)]
    assert router_cost._middle_rate(EchoLoad(token_times=times, seconds=4.0)) == pytest.approx(1000, rel=0.06)


@pytest.mark.fast
def test_promises_of_the_router():
    row = {"cpu_ms_per_request": 1.5, "cpu_us_per_token": 51.0, "added_p50_ms": 1.0, "idle_rss_mb": 300.0}
    row |= {"requests_per_s": 399.0, "tokens_per_s": 12_000.0, "observability_share": 0.021}
    assert {check["name"]: check["holds"] for check in checks(row)} == {
        "cpu_ms_per_request": True,
        "cpu_us_per_token": False,
        "added_p50_ms": True,
        "idle_rss_mb": True,
        "requests_per_s": False,
        "tokens_per_s": True,
        "observability_share": False,
    }


def outcome(due_s, took_s, code="OK", behind_s=0.0):
    sent_s = due_s + behind_s
    return LoadOutcome(due_s, sent_s, sent_s, sent_s + took_s, 16, 16, code, code == overload.REFUSED)


@pytest.mark.fast
def test_goodput_counts_who_ended_in_time_and_refusals_from_when_they_were_due():
    outcomes = [outcome(at / 10, 0.5) for at in range(100)]
    assert goodput(outcomes, 10.0, 1.0) == pytest.approx(9.6)
    assert goodput(outcomes, 10.0, 0.4) == 0.0
    found = figures(
        [
            *outcomes,
            *(outcome(at / 10, 0.002, overload.REFUSED, behind_s=0.03) for at in range(100)),
            outcome(1.0, 1.0, "DEADLINE_EXCEEDED"),
            outcome(1.0, 1.1),
        ],
        12.0,
        10.0,
        1.0,
    )
    assert found["num_late"] == 2
    assert found["goodput_ratio"] == pytest.approx(0.8)
    assert (found["num_refused"], found["num_refused_without_retry_info"]) == (100, 0)
    assert found["refusal_p50_ms"] == pytest.approx(32.0), "a client that falls behind hides nothing"
    assert [check["holds"] for check in overload.checks(found)] == [False, False, False]


@pytest.mark.slow
def test_echo_workers_answer_like_real_ones():
    with (
        EchoFleet(TINY, num_prefill=2, decode=("--step-s", 0.001)) as fleet,
        BatonClient(fleet.address, timeout_s=60.0) as client,
    ):
        for num_tokens in (1, 2, 40):
            sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
            chunks = list(client.generate(token_ids=[5] * 20, sampling=sampling))
            token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
            assert token_ids == list(range(300, 300 + num_tokens))
            stats = chunks[-1].finish.stats
            assert (chunks[-1].finish.reason, stats.prompt_len) == ("length", 20)
            assert stats.num_decode_tokens == num_tokens - 1


def test_what_metrics_and_tracing_take_of_an_answer():
    plain = {"cpu_ms_per_request": 1.0, "cpu_us_per_token": 62.5}
    traced = {"cpu_ms_per_request": 1.1, "cpu_us_per_token": 62.5}
    found = router_cost.observability(traced, plain, 4.0)
    assert found == {"metrics_us": 4.0, "tracing_us": 100.0, "observability_share": round(104 / 5100, 4)}
    assert router_cost.metrics_us() > 0


@pytest.mark.slow
def test_a_small_run_of_bench_router(capsys):
    bench_router(Output(as_json=True), seconds=0.5, rounds=1, idle_streams=20, step_ms=10.0)
    data = json.loads(capsys.readouterr().out)
    assert [row["system"] for row in data["rows"]] == ["direct", "relay", "router, traced", "router"]
    row = data["rows"][-1]
    assert {check["name"] for check in data["checks"]} == {*router_cost.AT_MOST, *router_cost.AT_LEAST}
    assert row["tokens_per_s"] > 0
    assert row["idle_rss_mb"] > row["rss_mb"] / 2


@pytest.mark.slow
def test_a_small_run_of_bench_overload(capsys):
    bench_overload(Output(as_json=True), seconds=3.0, capacity_s=2.0, factor=3.0, deadline_s=2.0, num_clients=2)
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["capacity_requests_per_s"] > 0
    assert sum(row["codes"].values()) == row["num_requests"] > 0
    assert row["num_refused_without_retry_info"] == 0
