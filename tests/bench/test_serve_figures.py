"""Figures of `baton bench serve` against plain references, and what the driver sends under virtual time."""

import asyncio
import importlib.util

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.bench.plot import plot_serve
from baton.bench.serve.drive import Driver, Record
from baton.bench.serve.figures import figures, holds, is_client_limited, percentile, row_of
from baton.bench.serve.schedule import Key, schedule, steady
from baton.bench.serve.workload import Slo
from baton.cluster.commands.bench import format_serve
from baton.tests.bench.test_serve_workload import CLOSED, KEY, POISSON, load_of
from baton.tests.bench.virtual_loop import run_virtually

pytestmark = pytest.mark.fast


def answered(due_s, *times_s, late_s=0.0, **more):
    values = {"prompt_len": 10, "output_len": len(times_s), "completion_tokens": len(times_s), "status": 200}
    return Record(due_s, due_s + late_s, **(values | {"chunk_times_s": list(times_s), "end_s": times_s[-1]} | more))


@settings(deadline=None, derandomize=True)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 1))
@pytest.mark.long
def test_percentiles_are_those_of_numpy(values, share):
    assert percentile(sorted(values), share) == pytest.approx(np.quantile(values, share), rel=1e-9, abs=1e-6)


def test_figures_of_a_round_are_those_of_a_plain_reference():
    rng = np.random.default_rng(1)
    records = []
    for at in range(200):
        times = 0.01 * at + np.cumsum(rng.exponential(0.1, size=5))
        records.append(answered(0.01 * at, *times, is_open=True, late_s=0.001, cached_tokens=5))
    found = figures(records, Slo(), begin_s=0.0)
    seconds = max(record.end_s for record in records)
    assert (found["num_requests"], found["num_ok"], found["num_failed"], found["num_cancelled"]) == (200, 200, 0, 0)
    assert found["requests_per_s"] == pytest.approx(200 / seconds)
    assert found["output_tokens_per_s"] == pytest.approx(1000 / seconds)
    assert found["input_tokens_per_s"] == pytest.approx(2000 / seconds)
    assert (found["goodput_share"], found["cached_share"], found["chunks_per_token"]) == (1.0, 0.5, 1.0)
    assert found["send_lag_p99_ms"] == pytest.approx(1.0)
    times = np.array([record.chunk_times_s for record in records])
    due = np.array([record.due_s for record in records])
    for name, values in (
        ("ttft", times[:, 0] - due),
        ("itl", np.diff(times).ravel()),
        ("tpot", (times[:, -1] - times[:, 0]) / 4),
        ("e2e", times[:, -1] - due),
    ):
        for label, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0)):
            assert found[f"{name}_{label}_ms"] == pytest.approx(1e3 * np.quantile(values, share))


def test_failures_and_cancelled_requests_are_counted_and_are_no_latencies():
    failed = Record(0.0, 0.0, 10, 4, error="http_429", detail="full", end_s=1.0, status=429)
    left = Record(0.0, 0.0, 10, 4, chunk_times_s=[1.0, 2.0], cancelled=True, end_s=2.0)
    found = figures([answered(0.0, 1.0, 3.0), failed, left], Slo(ttft_ms=1500), begin_s=0.0)
    assert (found["num_ok"], found["num_failed"], found["num_cancelled"]) == (1, 1, 1)
    assert (found["failures"], found["examples"]) == ({"http_429": 1}, {"http_429": "full"})
    assert found["goodput_share"] == 0.5, "of those that stayed"
    assert found["e2e_max_ms"] == 3000
    assert found["output_tokens_per_s"] == pytest.approx(4 / 3)
    empty = figures([failed], Slo(), begin_s=0.0)
    assert "ttft_p50_ms" not in empty and empty["goodput_share"] == 0


def test_goodput_holds_every_slo():
    record = answered(0.0, 1.0, 1.1, 1.6, late_s=0.5)
    assert holds(record, Slo())
    for name, value in (("ttft_ms", 1000), ("itl_ms", 500), ("tpot_ms", 300), ("e2e_ms", 1600)):
        assert holds(record, Slo(**{name: value + 0.01}))
        assert not holds(record, Slo(**{name: value - 0.01}))


def test_steady_streams_are_reported_apart_and_only_while_requests_are_there():
    stream = Record(0.0, 0.0, 5, 9, chunk_times_s=[0.0, 5.0, 10.0, 11.0, 13.0, 40.0], steady=True, cancelled=True)
    found = figures([stream, answered(10.0, 11.0, 14.0)], Slo(), begin_s=10.0)
    assert found["num_requests"] == 1
    assert (found["steady_itl_p50_ms"], found["steady_itl_max_ms"]) == (2000, 5000)
    assert found["steady_chunks_per_s"] == pytest.approx(3 / 4)
    assert found["itl_max_ms"] == 3000


def test_rows_are_medians_over_rounds():
    rounds = [
        figures([answered(0.0, ttft, ttft + 1)], Slo(), 0.0) | {"client_limited": ttft == 3.0}
        for ttft in (1.0, 3.0, 2.0)
    ]
    row = row_of(rounds, load="x", system="a")
    assert (row["ttft_p50_ms"], row["ttft_p50_ms_min"], row["ttft_p50_ms_max"]) == (2000, 1000, 3000)
    assert (row["rounds"], row["num_ok"], row["client_limited"], row["failures"]) == (3, 3, True, {})


def test_clients_that_are_late_or_busy_are_the_limit():
    assert not is_client_limited(1.0, 1.0, 0.5)
    assert is_client_limited(11.0, 1.0, 0.5)
    assert is_client_limited(1.0, 11.0, 0.5)
    assert is_client_limited(1.0, 1.0, 0.95)


class StallingServer:
    """Answers one request after the other, 10 ms each; from `stall_s` on it stands still for `for_s` seconds."""

    def __init__(self, clock, stall_s=1.0, for_s=0.0):
        self.clock, self.stall_s, self.for_s = clock, stall_s, for_s
        self.turn = asyncio.Lock()

    async def send(self, planned, record, on_first):
        async with self.turn:
            if self.clock.now_s() >= self.stall_s and self.for_s:
                self.for_s, pause_s = 0.0, self.for_s
                await asyncio.sleep(pause_s)
            await asyncio.sleep(0.01)
        record.chunk_times_s = [self.clock.now_s()] * planned.output_len
        on_first()


def drive(load, key=KEY, **stall):
    async def run(clock):
        async def ready():
            return clock.now_s()

        async def arrived():
            await asyncio.sleep(0)

        server = StallingServer(clock, **stall)
        return await Driver(server.send, clock).run(schedule(load, key), steady(load, key), ready, arrived)

    return run_virtually(run)


def test_a_stall_of_the_server_meets_every_request_that_was_due_meanwhile():
    load = load_of(rate=10, seconds=20)
    calm, stalled = drive(load), drive(load, for_s=5.0)
    assert len(calm) == len(stalled) == len(schedule(load, KEY)), "the clients wait for nobody"
    assert [record.due_s for record in stalled] == [planned.due_s for planned in schedule(load, KEY)]
    assert max(record.sent_s - record.due_s for record in stalled) < 1e-6
    figure = figures(stalled, Slo(), 0.0)
    met = [record for record in stalled if 1.0 <= record.due_s < 6.0]
    assert len(met) > 30
    assert all(record.chunk_times_s[0] >= 6.0 for record in met)
    assert figure["ttft_p90_ms"] > 2000 > 200 > figures(calm, Slo(), 0.0)["ttft_max_ms"]


def test_a_closed_loop_hides_the_stall_from_all_but_one_request_of_each_client():
    stalled = drive(load_of(CLOSED, requests_per_client=200, clients=[2]), for_s=5.0)
    assert sum(record.end_s - record.due_s > 1.0 for record in stalled) == 2, "which is why open loops are there"


def test_requests_that_a_client_sends_late_count_from_when_they_were_due():
    late = answered(1.0, 1.5, 2.0, late_s=0.4, is_open=True)
    found = figures([late], Slo(), 0.0)
    assert (found["ttft_max_ms"], found["e2e_max_ms"]) == (500, 1000)
    assert found["send_lag_max_ms"] == pytest.approx(400)


def test_closed_clients_send_one_request_after_the_other():
    records = drive(load_of(CLOSED))
    assert len(records) == 12
    for at in np.arange(0.005, max(record.end_s for record in records), 0.01):
        assert sum(record.sent_s <= at < record.end_s for record in records) <= 3


def test_streams_decode_before_anything_arrives_and_end_after_it():
    load = load_of(rate=10, seconds=5, streams={"count": 3, "output_len": 4})
    seen = []

    async def run(clock):
        async def send(planned, record, on_first):
            for _ in range(planned.output_len):
                await asyncio.sleep(0.5)
                record.chunk_times_s.append(clock.now_s())
                on_first()

        async def ready():
            seen.append(clock.now_s())
            return clock.now_s() + 1.0

        async def arrived():
            seen.append(clock.now_s())
            await asyncio.sleep(3.0)

        return await Driver(send, clock).run(schedule(load, KEY), steady(load, KEY), ready, arrived)

    records = run_virtually(run)
    streams = [record for record in records if record.steady]
    assert seen[0] == 0.5
    assert max(record.end_s for record in streams) == pytest.approx(seen[1] + 3.0)
    assert sum(record.cancelled for record in streams) == 3, "one each, the last"
    assert min(record.due_s for record in records if not record.steady) >= 1.5


def test_a_stream_that_fails_keeps_nobody_from_beginning():
    load = load_of(rate=10, seconds=1, streams={"count": 1, "output_len": 4})

    async def run(clock):
        async def send(planned, record, on_first):
            record.error = "connect"
            await asyncio.sleep(0)

        async def ready():
            return clock.now_s()

        async def arrived():
            await asyncio.sleep(0)

        return await Driver(send, clock).run(schedule(load, KEY), steady(load, KEY), ready, arrived)

    found = figures(run_virtually(run), Slo(), 0.0)
    assert found["steady_num_failed"] >= 1
    assert found["num_failed"] == len(schedule(load, KEY))


def rows():
    found = []
    for system, factor in (("baton", 1.0), ("other-engine", 2.0)):
        for clients in (1, 256):
            records = [answered(0.0, *np.arange(1, 130) * 0.021 * factor) for _ in range(clients)]
            records.append(Record(0, 0, 5, 9, chunk_times_s=[0.1, 0.2, 1.3], steady=True, cancelled=True))
            one = figures(records, Slo(), 0.0) | {
                "client_limited": clients == 256,
                "client_loop_lag_p99_ms": 12.0,
                "client_cpu_max": 0.5,
            }
            names = {"load": "1024->128", "arrival": "closed", "point": f"{clients} clients", "at": clients}
            found.append(row_of([one, one], **names, system=system))
    return found


def test_the_table_fits_a_terminal_and_says_what_is_not_valid():
    text = format_serve({"rows": rows(), "rounds": 2, "seed": 1})
    lines = text.splitlines()
    assert max(map(len, lines[:12])) <= 100
    assert sum(line.startswith("NOT VALID  1024->128, 256 clients") for line in lines) == 2
    assert "steady streams" in text


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is no dependency")
def test_a_plot_is_drawn(tmp_path):
    plot_serve(rows(), tmp_path / "serve.svg")
    assert (tmp_path / "serve.svg").stat().st_size > 1000


def test_rounds_share_no_seed():
    load = load_of(POISSON)
    assert len({schedule(load, Key(1, 0, 0, number))[0].due_s for number in range(-2, 5)}) == 7
