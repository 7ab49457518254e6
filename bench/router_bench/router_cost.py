"""`baton bench router`: what a request and a token cost the router's process, and its limits, on this machine.

The router is the real one, in a process of its own; so are the clients and the echo workers, which compute nothing. A
bare relay (`bench.router_bench.relay`), which only passes the same messages on, is measured in the same run; so is a
second router, which traces every request. CPU time is that of one process, read from outside. Answers of different
lengths separate the costs of a request and of a token:

    CPU seconds = requests x a + tokens x b + what the idle process takes
"""

import statistics
import tempfile
import time
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

from baton.bench.actor import SpawnedRemote
from baton.bench.processes import PlainProcess, cpu_s
from baton.bench.result import result, spread
from baton.bench.router_bench.echo_fleet import MODEL, EchoFleet, wait_until
from baton.bench.router_bench.echo_load import STREAMS_PER_CHANNEL, EchoLoad, LoadClient, LoadOutcome
from baton.core.errors import ConfigInvalid, StepFailed
from baton.proto import inference_pb2
from baton.router.metrics import RouterMetrics

PROMPT_LEN: Final = 32
TOKEN: Final = 300
MIB: Final = 1 << 20
IDLE_S: Final = 2.0
OBSERVED_CHUNKS: Final = 64
CELLS: Final = (("requests", 2, 32), ("both", 16, 64), ("tokens", 128, 384))  # name, tokens of an answer, concurrency
AT_MOST: Final = {
    "cpu_ms_per_request": 1.5,
    "cpu_us_per_token": 50.0,
    "added_p50_ms": 1.5,
    "idle_rss_mb": 300.0,
    "observability_share": 0.02,
}
AT_LEAST: Final = {"requests_per_s": 400.0, "tokens_per_s": 12_000.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterCostOptions:
    """What is measured.

    Attributes:
        seconds: duration of each load.
        rounds: how often every load is put on each system.
        idle_streams: number of streams that are open at once.
        step_ms: time between two tokens of a stream.
    """

    seconds: float = 5.0
    rounds: int = 2
    idle_streams: int = 5000
    step_ms: float = 20.0

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigInvalid: a number is too small.
        """
        for name, least in (("seconds", 0.1), ("rounds", 1), ("idle_streams", 1), ("step_ms", 1.0)):
            if getattr(self, name) < least:
                flag = name.replace("_", "-")
                raise ConfigInvalid(f"--{flag} {getattr(self, name)}: it starts at {least}", keys=[name])


@dataclass(slots=True)
class _Sample:
    """One load on one system."""

    cell: str
    seconds: float
    cpu_s: float
    client_cpu_s: float
    num_requests: int
    num_tokens: int
    num_chunks: int
    tokens_per_s: float


@dataclass(slots=True)
class _System:
    """One server that is measured."""

    name: str
    pid: int
    client: SpawnedRemote
    samples: list[_Sample] = field(default_factory=list)
    idle_cpu: float = 0.0  # CPU seconds per second


def bench_router(options: RouterCostOptions, model_path: Path, note: Callable[[str], None]) -> dict[str, Any]:
    """Measure; see `result`.

    Args:
        options: what to measure.
        model_path: model whose tokenizer the router uses.
        note: called with progress.

    Raises:
        WorkerStartFailed: a process did not start.
        StepFailed: a request failed unexpectedly.
    """
    with tempfile.TemporaryDirectory() as folder:
        rows = _measure_load(options, model_path, Path(folder), note)
    rows[-1] |= _measure_idle(options, model_path) | observability(rows[-2], rows[-1], metrics_us())
    note(f"{options.idle_streams} idle streams")
    return result("router", rows, checks=checks(rows[-1]))


def request_bytes(num_tokens: int, prompt_len: int = PROMPT_LEN) -> bytes:
    """Make a request for an answer of `num_tokens` tokens."""
    request = inference_pb2.GenerateRequest(model=MODEL)
    request.token_ids.ids.extend(range(TOKEN, TOKEN + prompt_len))
    request.sampling.max_tokens = num_tokens
    request.sampling.temperature = 0.0
    request.sampling.ignore_eos = True
    return request.SerializeToString()


def _measure_load(
    options: RouterCostOptions, model_path: Path, folder: Path, note: Callable[[str], None]
) -> list[dict[str, Any]]:
    step_s, err = options.step_ms / 1e3, folder / "err"
    decode = ("--step-s", step_s)
    with (
        PlainProcess("baton.bench.router_bench.relay", "--step-s", step_s, err=err) as source,
        EchoFleet(model_path, decode=decode, router=("--trace-file", folder / "spans")) as traced,
        EchoFleet(model_path, decode=decode) as fleet,
    ):
        direct = source.first_line()["address"]
        with PlainProcess("baton.bench.router_bench.relay", "--upstream", direct, err=err) as relay:
            servers = (
                ("direct", source.pid, direct),
                ("relay", relay.pid, relay.first_line()["address"]),
                ("router, traced", traced.router_pid, traced.address),
                ("router", fleet.router_pid, fleet.address),
            )
            systems: list[_System] = []
            try:
                for name, pid, address in servers:
                    systems.append(_System(name, pid, SpawnedRemote(LoadClient, address, 4)))
                return _load(systems, options, note)
            finally:
                for system in systems:
                    system.client.end()


def _load(systems: Sequence[_System], options: RouterCostOptions, note: Callable[[str], None]) -> list[dict[str, Any]]:
    for system in systems:
        _closed(system, CELLS[0], min(1.0, options.seconds))  # warm-up, not counted
        system.samples.clear()
        before_s = cpu_s(system.pid)
        time.sleep(min(IDLE_S, options.seconds))
        system.idle_cpu = (cpu_s(system.pid) - before_s) / min(IDLE_S, options.seconds)
    for at in range(options.rounds):
        for cell in CELLS:
            for system in systems[1:]:
                _closed(system, cell, options.seconds)
        note(f"round {at + 1} of {options.rounds}")
    rate = max(1.0, 0.5 * _rates(systems[-1], "requests", lambda sample: sample.num_requests / sample.seconds)[0])
    latencies = {}
    for system in systems:
        load: EchoLoad = system.client.call("timetable", request_bytes(CELLS[0][1]), rate, options.seconds, 1)
        latencies[system.name] = _require(load, system.name)
        note(f"half load: {system.name}")
    return [_row(system, options, latencies[system.name], latencies["direct"], rate) for system in systems]


def _closed(system: _System, cell: tuple[str, int, int], seconds: float) -> None:
    name, num_tokens, concurrency = cell
    before_s = cpu_s(system.pid)
    load: EchoLoad = system.client.call("closed", request_bytes(num_tokens), concurrency, seconds)
    used_s = cpu_s(system.pid) - before_s
    outcomes = _require(load, system.name)
    system.samples.append(
        _Sample(
            cell=name,
            seconds=load.seconds,
            cpu_s=used_s,
            client_cpu_s=load.cpu_s,
            num_requests=len(outcomes),
            num_tokens=sum(outcome.num_tokens for outcome in outcomes),
            num_chunks=sum(outcome.num_chunks for outcome in outcomes),
            tokens_per_s=_middle_rate(load),
        )
    )


def _require(load: EchoLoad, name: str) -> list[LoadOutcome]:
    wrong = [outcome.code for outcome in load.outcomes if outcome.code != "OK"]
    if wrong or not load.outcomes:
        raise StepFailed(f"{len(wrong)} of {len(load.outcomes)} requests to the {name} failed: {sorted(set(wrong))}")
    return load.outcomes


def _middle_rate(load: EchoLoad) -> float:
    """Tokens per second in the middle half of the time, when all streams run."""
    times = [second for second, _ in load.token_times]
    low, high = times[0], times[-1]
    begin, end = low + 0.25 * (high - low), low + 0.75 * (high - low)
    if end - begin < 0.2:
        return sum(number for _, number in load.token_times) / max(load.seconds, 1e-9)
    return sum(number for second, number in load.token_times if begin <= second < end) / (end - begin)


def costs(samples: Sequence[tuple[float, int, int]]) -> tuple[float, float]:
    """CPU seconds of a request and of a token: a least-squares fit of (CPU seconds, requests, tokens)."""
    work = np.array([[num_requests, num_tokens] for _, num_requests, num_tokens in samples], dtype=np.float64)
    used = np.array([seconds for seconds, _, _ in samples], dtype=np.float64)
    # Each load has the same weight, however much was done in it.
    (request_s, token_s), *_ = np.linalg.lstsq(work / used[:, None], np.ones(len(used)), rcond=None)
    return float(request_s), float(token_s)


def _rates(system: _System, cell: str, rate: Callable[[_Sample], float]) -> list[float]:
    found = [rate(sample) for sample in system.samples if sample.cell == cell]
    return [statistics.median(found), *found] if found else [0.0]


def _row(
    system: _System, options: RouterCostOptions, outcomes: list[LoadOutcome], direct: list[LoadOutcome], rate: float
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "system": system.name,
        "workload": "echo",
        "rounds": options.rounds,
        "seconds": options.seconds,
        "step_ms": options.step_ms,
        "idle_cpu": round(system.idle_cpu, 4),
        "half_load_requests_per_s": round(rate, 1),
    }
    ttft, least = _first_ms(outcomes), _first_ms(direct)
    row |= {"ttft_p50_ms": round(_quantile(ttft, 0.5), 3), "ttft_p99_ms": round(_quantile(ttft, 0.99), 3)}
    row["added_p50_ms"] = round(_quantile(ttft, 0.5) - _quantile(least, 0.5), 3)
    if system.name == "router":
        inside = [outcome.router_ms + outcome.publish_ms for outcome in outcomes]
        row["router_and_publish_p50_ms"] = round(_quantile(inside, 0.5), 3)
    if not system.samples:
        return row
    by_round = [system.samples[at : at + len(CELLS)] for at in range(0, len(system.samples), len(CELLS))]
    found = [
        costs(
            [
                (sample.cpu_s - system.idle_cpu * sample.seconds, sample.num_requests, sample.num_tokens)
                for sample in each
            ]
        )
        for each in by_round
    ]
    row |= spread("cpu_ms_per_request", [1e3 * request_s for request_s, _ in found])
    row |= spread("cpu_us_per_token", [1e6 * token_s for _, token_s in found])
    row |= spread("requests_per_s", _rates(system, "requests", lambda sample: sample.num_requests / sample.seconds)[1:])
    row |= spread("tokens_per_s", _rates(system, "tokens", lambda sample: sample.tokens_per_s)[1:])
    row |= spread(
        "tokens_per_chunk", _rates(system, "tokens", lambda sample: sample.num_tokens / sample.num_chunks)[1:]
    )
    row |= spread("cpu_at_tokens", _rates(system, "tokens", lambda sample: sample.cpu_s / sample.seconds)[1:])
    row |= spread(
        "client_cpu_at_tokens", _rates(system, "tokens", lambda sample: sample.client_cpu_s / sample.seconds)[1:]
    )
    return row


def metrics_us() -> float:
    """Microseconds that the router's metrics take for an answer in `OBSERVED_CHUNKS` chunks: the same calls, alone."""
    metrics = RouterMetrics()

    def answer() -> None:
        with metrics.num_streams_open.track_inprogress():
            metrics.ttft_s.observe(0.01)
            for _ in range(OBSERVED_CHUNKS - 1):
                metrics.itl_s.observe(0.02)
                metrics.generation_tokens.inc(1)
        metrics.answers.labels("split").inc()
        metrics.requests_finished.labels("length").inc()
        for counter in (metrics.prompt_tokens, metrics.cached_tokens, metrics.expected_cached_tokens):
            counter.inc(1)

    return 1e6 * min(timeit.repeat(answer, number=200, repeat=5)) / 200


def observability(traced: dict[str, Any], plain: dict[str, Any], metrics_us: float) -> dict[str, float]:
    """Share of the router's processor time that metrics and tracing every request take, for such an answer.

    Args:
        traced: row of the router that traces.
        plain: row of the router that does not.
        metrics_us: result of `metrics_us`.
    """

    def answer_us(row: dict[str, Any]) -> float:
        return float(1e3 * row["cpu_ms_per_request"] + OBSERVED_CHUNKS * row["cpu_us_per_token"])

    tracing_us = answer_us(traced) - answer_us(plain)
    return {
        "metrics_us": round(metrics_us, 1),
        "tracing_us": round(tracing_us, 1),
        "observability_share": round((metrics_us + tracing_us) / answer_us(traced), 4),
    }


def _first_ms(outcomes: Sequence[LoadOutcome]) -> list[float]:
    return [1e3 * (outcome.first_s - outcome.due_s) for outcome in outcomes]


def _quantile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def _measure_idle(options: RouterCostOptions, model_path: Path) -> dict[str, Any]:
    """Measure the router's memory with streams that wait for their second token."""
    number = options.idle_streams
    with EchoFleet(model_path, decode=("--step-s", 3600)) as fleet:
        router = psutil.Process(fleet.router_pid)
        before = router.memory_info().rss
        client = SpawnedRemote(LoadClient, fleet.address, -(-number // STREAMS_PER_CHANNEL))
        try:
            num_open = 0
            while num_open < number:
                num_open += (some := min(100, number - num_open))
                if client.call("hold", request_bytes(8), some) != some:
                    raise StepFailed(f"of {num_open} streams some were not opened")
            after = router.memory_info().rss
            client.call("release")
            wait_until(lambda: router.is_running(), "the router ended")
        finally:
            client.end()
    return {
        "idle_streams": number,
        "rss_mb": round(before / 1e6, 1),
        "idle_rss_mb": round(after / 1e6, 1),
        "idle_kb_per_stream": round((after - before) / 1e3 / number, 1),
    }


def checks(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Check what the router promises, by its row."""
    limits = [(name, "at_most", limit) for name, limit in AT_MOST.items()]
    limits += [(name, "at_least", limit) for name, limit in AT_LEAST.items()]
    found = []
    for name, kind, limit in limits:
        value = row[name]
        holds = value <= limit if kind == "at_most" else value >= limit
        found.append({"name": name, "value": value, kind: limit, "holds": holds})
    return found
