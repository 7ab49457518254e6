"""`baton bench router` and `baton bench overload`: a measurement of the bench room, and its rows in print."""

from typing import Any

from baton.cluster.commands.bench import format_verdicts
from baton.cluster.outcome import ExitCode, Output
from baton.cluster.table import format_table

_COST = ("cpu_ms_per_request", "cpu_us_per_token", "requests_per_s", "tokens_per_s", "tokens_per_chunk")
_TIMES = ("ttft_p50_ms", "ttft_p99_ms", "added_p50_ms", "idle_rss_mb")
_OVERLOAD = ("capacity_requests_per_s", "offered_requests_per_s", "goodput_requests_per_s", "goodput_ratio", "num_late")
_REFUSALS = ("refusal_p50_ms", "refusal_p99_ms", "router_cpu", "client_cpu_max", "client_behind_p99_ms")


def bench_router(output: Output, **asked: Any) -> ExitCode:
    """Measure the router's process. PARTIAL when a promise is broken.

    Raises:
        ConfigInvalid: a number that is too small.
        WorkerStartFailed: a process did not come up.
        StepFailed: a request failed that should not.
    """
    from baton.bench.router_bench.router_cost import RouterCostOptions
    from baton.bench.router_bench.router_cost import bench_router as measure
    from baton.cluster.resolve import find_model

    data = measure(RouterCostOptions(**asked), find_model("tiny").path, output.note)
    return _show(output, data, (*_COST, *_TIMES))


def bench_overload(output: Output, **asked: Any) -> ExitCode:
    """Measure admission. PARTIAL when a promise is broken.

    Raises:
        ConfigInvalid: a number that is too small.
        WorkerStartFailed: a process did not come up.
        StepFailed: nothing was finished in time even without overload.
    """
    from baton.bench.router_bench.overload import OverloadOptions
    from baton.bench.router_bench.overload import bench_overload as measure
    from baton.cluster.resolve import find_model

    data = measure(OverloadOptions(**asked), find_model("tiny").path, output.note)
    return _show(output, data, (*_OVERLOAD, *_REFUSALS))


def _show(output: Output, data: dict[str, Any], keys: tuple[str, ...]) -> ExitCode:
    rows = [(row["system"], *(str(row.get(key, "")) for key in keys)) for row in data["rows"]]
    output.emit(data, "\n".join([format_table(("system", *keys), rows), *format_verdicts(data)]))
    return ExitCode.OK if all(check["holds"] for check in data["checks"]) else ExitCode.PARTIAL
