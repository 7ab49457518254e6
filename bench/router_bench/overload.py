"""`baton bench overload`: open-loop clients offer several times more than the workers can do.

Echo prefill workers compute a fixed number of prompt tokens per second, which is the capacity. It is measured first, by
closed-loop clients. Then Poisson arrivals follow at a multiple of it, on a timetable: times count from when a request
was due, so that clients that fall behind hide nothing.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from baton.bench.actor import SpawnedRemote
from baton.bench.processes import cpu_s
from baton.bench.result import result
from baton.bench.router_bench.echo_fleet import EchoFleet
from baton.bench.router_bench.echo_load import EchoLoad, LoadClient, LoadOutcome
from baton.bench.router_bench.router_cost import request_bytes
from baton.core.errors import ConfigInvalid, StepFailed

NUM_PREFILL: Final = 2
TOKENS_PER_S: Final = 3000.0  # per prefill worker
PROMPT_LEN: Final = 100
ANSWER_LEN: Final = 16
STEP_S: Final = 0.02
NOMINAL: Final = NUM_PREFILL * TOKENS_PER_S / PROMPT_LEN  # requests a second
CHANNELS: Final = 4
REFUSED: Final = "RESOURCE_EXHAUSTED"
AT_MOST: Final = {"refusal_p99_ms": 10.0, "num_late": 0.0}
AT_LEAST: Final = {"goodput_ratio": 0.9}


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadOptions:
    """What is measured.

    Attributes:
        seconds: duration of the overload.
        capacity_s: duration of the capacity measurement.
        factor: offered load, in capacities.
        deadline_s: deadline of each request.
        num_clients: number of client processes.
    """

    seconds: float = 60.0
    capacity_s: float = 20.0
    factor: float = 3.0
    deadline_s: float = 2.0
    num_clients: int = 2

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigInvalid: a number is too small.
        """
        least = {"seconds": 1.0, "capacity_s": 1.0, "factor": 0.1, "deadline_s": 0.5, "num_clients": 1}
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                flag = name.replace("_", "-")
                raise ConfigInvalid(f"--{flag} {getattr(self, name)}: it starts at {lowest}", keys=[name])


def bench_overload(options: OverloadOptions, model_path: Path, note: Callable[[str], None]) -> dict[str, Any]:
    """Measure; see `result`.

    Args:
        options: what to measure.
        model_path: model whose tokenizer the router uses.
        note: called with progress.

    Raises:
        WorkerStartFailed: a process did not start.
        StepFailed: nothing finished in time even without overload.
    """
    fleet = EchoFleet(
        model_path,
        num_prefill=NUM_PREFILL,
        prefill=("--tokens-per-s", TOKENS_PER_S),
        decode=("--step-s", STEP_S),
    )
    with fleet:
        clients: list[SpawnedRemote] = []
        try:
            for _ in range(options.num_clients):
                clients.append(SpawnedRemote(LoadClient, fleet.address, CHANNELS, options.deadline_s))
            row = _measure(options, fleet, clients, note)
        finally:
            for client in clients:
                client.end()
    return result("overload", [row], checks=checks(row))


def _measure(
    options: OverloadOptions, fleet: EchoFleet, clients: Sequence[SpawnedRemote], note: Callable[[str], None]
) -> dict[str, Any]:
    request = request_bytes(ANSWER_LEN, PROMPT_LEN)
    concurrency = max(1, round(NOMINAL / len(clients)))  # one second's work, half of which waits
    _all(clients, "closed", [(request, concurrency, 1.0)] * len(clients))  # from here on the router knows the rates
    loads = _all(clients, "closed", [(request, concurrency, options.capacity_s)] * len(clients))
    capacity = goodput([outcome for load in loads for outcome in load.outcomes], options.capacity_s, options.deadline_s)
    if not capacity:
        raise StepFailed("no request was finished within its deadline")
    note(f"capacity: {capacity:.1f} requests a second")
    rate = options.factor * capacity / len(clients)
    before_s, begin_s = cpu_s(fleet.router_pid), time.monotonic()
    loads = _all(clients, "timetable", [(request, rate, options.seconds, 1 + at) for at in range(len(clients))])
    used_s, seconds = cpu_s(fleet.router_pid) - before_s, time.monotonic() - begin_s
    outcomes = [outcome for load in loads for outcome in load.outcomes]
    return {
        "system": "router",
        "workload": "echo-overload",
        "factor": options.factor,
        "seconds": options.seconds,
        "deadline_s": options.deadline_s,
        "nominal_requests_per_s": NOMINAL,
        "capacity_requests_per_s": round(capacity, 2),
        **figures(outcomes, capacity, options.seconds, options.deadline_s),
        "router_cpu": round(used_s / seconds, 3),
        "num_clients": len(clients),
        "client_cpu_max": round(max(load.cpu_s / load.seconds for load in loads), 3),
        "client_behind_p99_ms": round(max(load.behind_p99_ms for load in loads), 3),
    }


def _all(clients: Sequence[SpawnedRemote], method: str, arguments: Sequence[tuple[Any, ...]]) -> list[EchoLoad]:
    waits = [client.post(method, *each) for client, each in zip(clients, arguments, strict=True)]
    return [wait() for wait in waits]


def goodput(outcomes: Sequence[LoadOutcome], seconds: float, deadline_s: float) -> float:
    """Requests per second that finished within their deadline and within `seconds` of the first."""
    begin_s = min(outcome.due_s for outcome in outcomes)
    good = [outcome for outcome in outcomes if outcome.code == "OK" and outcome.end_s - outcome.sent_s <= deadline_s]
    return sum(outcome.end_s - begin_s <= seconds for outcome in good) / seconds


def figures(outcomes: Sequence[LoadOutcome], capacity: float, seconds: float, deadline_s: float) -> dict[str, Any]:
    """Figures of an overload."""
    refused = [outcome for outcome in outcomes if outcome.code == REFUSED]
    accepted = [outcome for outcome in outcomes if outcome.code != REFUSED]
    late = [outcome for outcome in accepted if outcome.code == "DEADLINE_EXCEEDED" or _took_s(outcome) > deadline_s]
    good = goodput(outcomes, seconds, deadline_s)
    refusal_ms = sorted(1e3 * (outcome.end_s - outcome.due_s) for outcome in refused) or [0.0]
    ended_ms = sorted(1e3 * (outcome.end_s - outcome.due_s) for outcome in accepted if outcome.code == "OK") or [0.0]
    return {
        "offered_requests_per_s": round(len(outcomes) / seconds, 2),
        "goodput_requests_per_s": round(good, 2),
        "goodput_ratio": round(good / capacity, 4),
        "num_requests": len(outcomes),
        "num_refused": len(refused),
        "num_refused_without_retry_info": sum(not outcome.has_retry_info for outcome in refused),
        "num_late": len(late),
        "codes": dict(Counter(outcome.code for outcome in outcomes)),
        "refusal_p50_ms": round(_quantile(refusal_ms, 0.5), 3),
        "refusal_p99_ms": round(_quantile(refusal_ms, 0.99), 3),
        "refusal_max_ms": round(refusal_ms[-1], 3),
        "answer_p50_ms": round(_quantile(ended_ms, 0.5), 1),
        "answer_p99_ms": round(_quantile(ended_ms, 0.99), 1),
    }


def _took_s(outcome: LoadOutcome) -> float:
    return outcome.end_s - outcome.sent_s


def _quantile(ordered: Sequence[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def checks(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Check what admission promises."""
    limits = [(name, "at_most", limit) for name, limit in AT_MOST.items()]
    limits += [(name, "at_least", limit) for name, limit in AT_LEAST.items()]
    found = []
    for name, kind, limit in limits:
        holds = row[name] <= limit if kind == "at_most" else row[name] >= limit
        found.append({"name": name, "value": row[name], kind: limit, "holds": holds})
    return found
