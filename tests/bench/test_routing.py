"""The harness of `baton bench routing`: options, prompts, figures, promises, and one small run with real workers."""

import json
import random

import pytest

from baton.bench.router_bench import routing
from baton.bench.router_bench.routing import RoutingOptions, checks, read_options
from baton.cluster.commands.bench import bench_routing, format_routing
from baton.cluster.outcome import ExitCode, Output
from baton.core.errors import ConfigInvalid
from baton.proto import inference_pb2
from baton.tests.e2e.conftest import TINY


@pytest.mark.fast
def test_options_are_checked():
    options = read_options("prefix,round_robin,prefix", rounds=1, seed=0)
    assert (options.policies, options.rounds) == (("prefix", "round_robin"), 1)
    with pytest.raises(ConfigInvalid, match="fastest"):
        read_options("prefix,fastest")
    with pytest.raises(ConfigInvalid, match="num-groups"):
        read_options("prefix", num_groups=0)
    with pytest.raises(ConfigInvalid, match="positions"):
        routing.bench_routing(RoutingOptions(prefix_len=5000), TINY, print)


@pytest.mark.fast
def test_prompts_begin_alike_within_a_group_and_end_differently():
    groups = [[1] * 40, [2] * 40]
    prompts = routing._prompts(groups, 3, 8, random.Random(1))
    assert sorted(prompt[0] for prompt in prompts) == [1, 1, 1, 2, 2, 2]
    assert {len(prompt) for prompt in prompts} == {48}
    assert len({tuple(prompt) for prompt in prompts}) == 6


@pytest.mark.fast
def test_figures_and_the_promise():
    stats = [
        inference_pb2.RequestStats(prompt_len=100, num_cached_tokens=at, num_expected_cached_tokens=50, ttft_ms=at + 1)
        for at in (0, 50, 100)
    ]
    figures = routing._figures(stats, 2.0)
    assert figures["hit_rate"] == pytest.approx(0.5)
    assert figures["expected_right"] == pytest.approx(1 / 3)
    assert (figures["ttft_mean_ms"], figures["ttft_p99_ms"], figures["requests_per_s"]) == (51.0, 101.0, 1.5)
    rows = [{"system": "prefix", "ttft_mean_ms": 40.0}, {"system": "round_robin", "ttft_mean_ms": 100.0}]
    assert [(check["value"], check["holds"]) for check in checks(rows)] == [(0.4, True)]
    rows[0]["ttft_mean_ms"] = 60.0
    assert [check["holds"] for check in checks(rows)] == [False]
    assert checks(rows[:1]) == []


@pytest.mark.slow
def test_a_small_run_with_real_workers(capsys):
    small = {"num_groups": 2, "prefix_len": 128, "suffix_len": 8, "num_requests": 2, "cached_groups": 40, "rounds": 1}
    code = bench_routing(Output(as_json=True), policies="prefix", concurrency=2, num_prefill=2, seed=1, **small)
    data = json.loads(capsys.readouterr().out)
    assert code is ExitCode.OK
    (row,) = data["rows"]
    assert (row["system"], row["num_requests"]) == ("prefix", 4)
    assert row["hit_rate"] > 0.8
    assert row["ttft_mean_ms_min"] == row["ttft_mean_ms"] > 0
    assert "prefix" in format_routing(data)
