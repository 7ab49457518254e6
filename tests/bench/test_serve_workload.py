"""Workload files of `baton bench serve`, what they refuse, and the schedules they make."""

import dataclasses
import textwrap
import tomllib
from pathlib import Path

import numpy as np
import pytest

from baton.bench.serve.schedule import Key, draw, schedule, steady, tokens_of
from baton.bench.serve.workload import (
    Length,
    OfferedLoad,
    Workload,
    api_keys,
    check_workload,
    read_length,
    read_workload,
    shipped,
)
from baton.core.errors import ConfigInvalid

pytestmark = pytest.mark.fast
KEY = Key(seed=5, load=0, point=0, round=0)
CLOSED = {
    "name": "c",
    "arrival": "closed",
    "clients": [3],
    "requests_per_client": 4,
    "prompt_len": 8,
    "output_len": 2,
}
POISSON = {"name": "p", "arrival": "poisson", "rate": 50, "seconds": 40, "prompt_len": 8, "output_len": 2}


def load_of(base=POISSON, **more) -> OfferedLoad:
    values = {key: value for key, value in (base | more).items() if value is not None}
    return check_workload({"load": [values]}).load[0]


def test_what_ships_is_what_the_docs_say():
    assert shipped() == ["concurrency", "streams"]
    (load,) = read_workload("concurrency").load
    assert (load.clients, load.prompt_len, load.output_len) == ((1, 16, 64, 256), Length(1024, 1024), Length(128, 128))
    (load,) = read_workload("streams").load
    assert load.streams is not None
    assert (load.rate, load.streams.count, load.output_len) == ((15.0,), 64, Length(32, 32))


def test_the_example_of_the_docs_is_a_workload():
    text = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()
    block = text.partition("    seed = 1\n")[2].partition("\n- ")[0]
    workload = check_workload(tomllib.loads(textwrap.dedent("    seed = 1\n" + block)))
    assert [(load.name, load.num_points, sorted(load.tenants)) for load in workload.load] == [
        ("chat", 3, ["free", "paying"]),
        ("batch", 3, []),
    ]


def test_a_file_is_read_by_its_path(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'seed = 3\n[[load]]\nname="a"\narrival="poisson"\nrate=[1,2.5]\nseconds=9\nprompt_len=4\noutput_len=[1,9]\n'
    )
    workload = read_workload(str(path))
    assert isinstance(workload, Workload)
    assert (workload.seed, workload.load[0].rate, workload.load[0].label(1)) == (3, (1.0, 2.5), "2.5/s")
    path.write_text("seed = 3 4")
    with pytest.raises(ConfigInvalid, match=r"mine.toml is not TOML"):
        read_workload(str(path))
    with pytest.raises(ConfigInvalid, match="cannot read"):
        read_workload(str(tmp_path / "none.toml"))
    with pytest.raises(ConfigInvalid, match="one of concurrency, streams"):
        read_workload("concurency")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "load: Field required"),
        ({"load": []}, "load"),
        ({"sed": 1, "load": [CLOSED]}, "no such key 'sed'; the nearest is 'seed'"),
        ({"seed": -1, "load": [CLOSED]}, "seed"),
        ({"load": [CLOSED, CLOSED]}, "two loads are named c"),
        ({"load": [CLOSED | {"promptlen": 3}]}, r"load\[1\].promptlen: no such key .* nearest is 'prompt_len'"),
        ({"load": [CLOSED | {"arrival": "uniform"}]}, "arrival"),
        ({"load": [CLOSED | {"rate": 2}]}, 'rate does not go with arrival = "closed"'),
        ({"load": [POISSON | {"cv": 2}]}, 'cv does not go with arrival = "poisson"'),
        ({"load": [POISSON | {"arrival": "gamma"}]}, "either cv or burstiness"),
        ({"load": [{**CLOSED, "clients": []}]}, "needs clients"),
        ({"load": [CLOSED | {"clients": [0]}]}, "clients"),
        ({"load": [CLOSED | {"clients": list(range(1, 40))}]}, "clients"),
        ({"load": [CLOSED | {"requests_per_client": 100_000, "clients": 100}]}, "at most 1000000"),
        ({"load": [CLOSED | {"requests_per_client": 100_000, "prompt_len": 1000}]}, "prompts of one point"),
        ({"load": [POISSON | {"rate": float("nan")}]}, "rate"),
        ({"load": [POISSON | {"seconds": 0}]}, "seconds"),
        ({"load": [CLOSED | {"prompt_len": True}]}, "prompt_len: a number of tokens"),
        ({"load": [CLOSED | {"prompt_len": [9, 4]}]}, "prompt_len: .* lower bound first"),
        ({"load": [CLOSED | {"prompt_len": 0}]}, "prompt_len"),
        (
            {"load": [CLOSED | {"prompt_len": {"mean": 5, "cv": 1, "mim": 2}}]},
            "no such key 'mim'; the nearest is 'min'",
        ),
        ({"load": [CLOSED | {"prompt_len": {"mean": 5}}]}, "needs mean and cv"),
        ({"load": [CLOSED | {"prompt_len": {"mean": 5, "cv": -1}}]}, "cv within"),
        ({"load": [CLOSED | {"prefixes": {"count": 2, "len": 8}}]}, "longer than its prefix"),
        ({"load": [CLOSED | {"prefixes": {"count": 2, "length": 4}}]}, "nearest is 'len'"),
        ({"load": [CLOSED | {"cancel": {"share": 2, "after_tokens": 1}}]}, "cancel.share"),
        ({"load": [CLOSED | {"tenants": {"a": {"wait": 1}}}]}, "nearest is 'weight'"),
        ({"load": [CLOSED | {"tenants": {"a b": {}}}]}, "tenants"),
        ({"load": [CLOSED | {"tenants": {"a": {"api_key_env": "A B"}}}]}, "api_key_env"),
        ({"load": [CLOSED | {"slo": {"ttft": 1}}]}, "slo.ttft: .* nearest is 'ttft_ms'"),
        ({"load": [CLOSED | {"streams": {"count": 1}}]}, "streams.output_len"),
        ({"load": ["closed"]}, r"load\[1\]"),
    ],
)
def test_what_is_wrong_is_refused_by_name(values, said):
    with pytest.raises(ConfigInvalid, match=said):
        check_workload(values)


def test_keys_come_from_the_environment():
    workload = check_workload({"load": [CLOSED | {"tenants": {"a": {"api_key_env": "KEY_A"}, "b": {}}}]})
    assert api_keys(workload, {"KEY_A": "secret"}) == {"KEY_A": "secret"}
    for value in ("", "two words", "line\n"):
        with pytest.raises(ConfigInvalid, match="KEY_A holds no API key"):
            api_keys(workload, {"KEY_A": value})


def test_lengths_are_drawn_as_they_are_described():
    rng = np.random.default_rng(1)
    assert draw(read_length(7), 3, rng) == [7, 7, 7]
    uniform = draw(read_length([3, 5]), 9000, rng)
    assert set(uniform) == {3, 4, 5}
    assert np.bincount(uniform)[3:] == pytest.approx(3000, rel=0.1)
    values = np.array(draw(read_length({"mean": 500, "cv": 0.5}), 20000, rng))
    assert values.mean() == pytest.approx(500, rel=0.02)
    assert values.std() / values.mean() == pytest.approx(0.5, rel=0.05)
    clipped = draw(read_length({"mean": 50, "cv": 2, "min": 40, "max": 60}), 500, rng)
    assert (min(clipped), max(clipped)) == (40, 60)


@pytest.mark.parametrize(
    ("more", "cv"), [({}, 1.0), ({"arrival": "gamma", "cv": 0.2}, 0.2), ({"arrival": "gamma", "burstiness": 0.25}, 2.0)]
)
def test_arrivals_have_the_rate_and_the_burstiness_that_was_asked_for(more, cv):
    load = load_of(rate=200, seconds=50, **more)
    due_s = np.array([planned.due_s for planned in schedule(load, KEY)])
    gaps_s = np.diff(due_s)
    assert 0 <= due_s[0] and due_s[-1] < 50 and (gaps_s >= 0).all()
    assert len(due_s) == pytest.approx(10_000, rel=0.06)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(cv, rel=0.06)


def test_shares_of_cancels_tenants_and_prefixes():
    load = load_of(
        rate=200,
        cancel={"share": 0.25, "after_tokens": [1, 3]},
        tenants={"big": {"weight": 3}, "small": {}},
        prefixes={"count": 4, "len": 5},
    )
    planned = schedule(load, KEY)
    cancels = [each.cancel_after for each in planned if each.cancel_after is not None]
    assert len(cancels) / len(planned) == pytest.approx(0.25, abs=0.02)
    assert set(cancels) == {1, 2, 3}
    assert sum(each.tenant == "big" for each in planned) / len(planned) == pytest.approx(0.75, abs=0.02)
    assert {each.prompt.prefix for each in planned} == {0, 1, 2, 3}


@pytest.mark.parametrize("base", [CLOSED, POISSON])
@pytest.mark.parametrize("num", [1, 2, 5])
def test_the_parts_of_all_processes_are_the_whole(base, num):
    load = load_of(base, prompt_len=[4, 99], output_len=[1, 9], streams={"count": 7, "output_len": [5, 50]})
    parts = [schedule(load, KEY, process, num) for process in range(num)]
    assert sorted((each for part in parts for each in part), key=lambda each: each.index) == schedule(load, KEY)
    streams = [stream for process in range(num) for stream in steady(load, KEY, process, num)]
    assert sorted(streams, key=lambda stream: stream[0].client) == steady(load, KEY)
    owners = [{each.client for each in part} for part in parts]
    assert base is POISSON or sum(map(len, owners)) == 3, "a client is of one process"


def test_a_schedule_depends_on_nothing_but_its_key():
    load = load_of(prompt_len=[4, 99])
    assert schedule(load, KEY) == schedule(load, KEY)
    for change in ({"seed": 6}, {"load": 1}, {"point": 0, "round": 1}):
        assert schedule(load, dataclasses.replace(KEY, **change)) != schedule(load, KEY)


def test_closed_clients_have_all_their_requests():
    planned = schedule(load_of(CLOSED), KEY)
    assert [sum(each.client == client for each in planned) for client in range(3)] == [4, 4, 4]
    assert all(each.due_s is None for each in planned)


def test_prompts_are_within_the_vocabulary_and_share_only_their_prefixes():
    load = load_of(rate=2, prompt_len=[12, 20], prefixes={"count": 2, "len": 8})
    rounds = [schedule(load, dataclasses.replace(KEY, round=number)) for number in (0, 1)]
    planned = [each for part in rounds for each in part]
    prompts = [tokens_of(each.prompt, load, 5, 0, (100, 4000)) for each in planned]
    assert [len(prompt) for prompt in prompts] == [each.prompt.length for each in planned]
    assert all(100 <= token <= 4000 for prompt in prompts for token in prompt)
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 2, "prefixes are those of the round before"
    assert len({tuple(prompt[8:]) for prompt in prompts}) == len(prompts)
    assert prompts == [tokens_of(each.prompt, load, 5, 0, (100, 4000)) for each in planned]
