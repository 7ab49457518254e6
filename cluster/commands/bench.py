"""Implementations of `baton bench`: each runs a measurement of the bench package and prints its rows."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from baton.cluster.outcome import ExitCode, Output, format_table
from baton.core.errors import ConfigInvalid

_MAX_JOBS = 8


def bench_kernels(output: Output, *, plot: Path | None, device: str, jobs: int | None, **asked: Any) -> ExitCode:
    """Measure kernels. PARTIAL if a system failed or a row was left out.

    Raises:
        ConfigInvalid: a value does not exist, or no row matches the request.
        PackageMissing: `plot` without matplotlib.
    """
    from baton.bench.kernel_bench.kernels import bench_kernels as measure
    from baton.bench.kernel_bench.kernels import read_options
    from baton.bench.plot import plot_kernels, require_plot
    from baton.cluster.resolve import resolve_device

    device = resolve_device(device)
    jobs = min(_MAX_JOBS, len(os.sched_getaffinity(0))) if jobs is None else jobs
    options = read_options(device=device, jobs=jobs, **asked)
    if plot is not None:
        require_plot(plot)
    data = measure(options, output.note)
    if plot is not None and data["rows"]:
        plot_kernels(data["rows"], plot)
    output.emit(data, format_kernels(data))
    return ExitCode.PARTIAL if data["failures"] or data["skipped"] else ExitCode.OK


def format_kernels(data: dict[str, Any]) -> str:
    """Format as text: microseconds, the fraction of the floor, and how much longer other systems take."""
    rates = data["rates"]
    lines = []
    if rates:
        lines.append(
            f"{rates['device']}: copies {rates['copy_gbps']:g} GB/s, reads {rates['read_gbps']:g} GB/s, "
            f"bf16 {rates['bf16_tflops']:g} and fp8 {rates['fp8_tflops']:g} TFLOP/s, "
            f"a launch {rates['launch_ms'] * 1e3:g} us"
        )
    lines += [f"no {name}: {why}" for name, why in data["baselines"].items() if why != "available"]
    rows = [
        (
            row["kernel"],
            row["shape"],
            _us(row, "ms"),
            _us(row, "floor_ms"),
            f"{row['fraction']:.2f}" if "fraction" in row else "",
            f"{row['gbps']:.0f}" if "gbps" in row else "",
            ", ".join(_others(row)),
        )
        for row in data["rows"]
    ]
    lines.append(format_table(("kernel", "shape", "us", "floor us", "of floor", "GB/s", "others us (x ours)"), rows))
    lines += [
        f"failed: {one['kernel']} {one['shape']}: {one['system']}: {one['error']}: {_first_line(one['message'])}"
        for one in data["failures"]
    ]
    return "\n".join(lines + [f"left out: {name}" for name in data["skipped"]])


def _others(row: dict[str, Any]) -> list[str]:
    from baton.bench.plot import others_of

    return [
        f"{name} {_us(row, f'{name}_ms')}" + (f" ({row[f'vs_{name}']:.2f})" if f"vs_{name}" in row else "")
        for name in others_of(row)
    ]


def _us(row: dict[str, Any], key: str) -> str:
    return f"{row[key] * 1e3:.4g}" if key in row else ""


def _first_line(text: str) -> str:
    return next(iter(text.splitlines()), "")[:200]


_COLUMNS: Final = (
    ("out tok/s", "output_tokens_per_s"),
    ("TTFT", "ttft_p50_ms"),
    ("p99", "ttft_p99_ms"),
    ("TPOT", "tpot_p50_ms"),
    ("ITL", "itl_p50_ms"),
    ("p99", "itl_p99_ms"),
    ("E2E", "e2e_p50_ms"),
    ("p99", "e2e_p99_ms"),
    ("good", "goodput_share"),
)
_STEADY: Final = (
    ("chunks/s", "steady_chunks_per_s"),
    ("ITL", "steady_itl_p50_ms"),
    ("p90", "steady_itl_p90_ms"),
    ("p99", "steady_itl_p99_ms"),
    ("max", "steady_itl_max_ms"),
)


def bench_serve(output: Output, *, out: Path | None, plot: Path | None, **asked: Any) -> ExitCode:
    """Measure endpoints. PARTIAL if requests failed or the clients were the bottleneck.

    Raises:
        ConfigInvalid: a workload or value is wrong, or a system refuses it.
        PackageMissing: aiohttp is not installed, or `plot` without matplotlib.
        StartupError: a system does not answer.
        StepFailed: a client process ended.
    """
    from baton.bench.plot import plot_serve, require_plot
    from baton.bench.serve.run import bench_serve as measure
    from baton.bench.serve.run import read_options, write_result

    options = read_options(**asked)
    if plot is not None:
        require_plot(plot)
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise ConfigInvalid(f"--out {out}: no file can be written there", keys=["out"])
    save = (lambda data: None) if out is None else (lambda data: write_result(out, data))
    data = measure(options, output.note, save)
    if plot is not None:
        plot_serve(data["rows"], plot)
    output.emit(data, format_serve(data))
    return ExitCode.OK if all(_is_valid(row) for row in data["rows"]) else ExitCode.PARTIAL


def format_serve(data: dict[str, Any]) -> str:
    """Format as text, within 100 columns for names of usual length."""
    rows = data["rows"]
    header = ("load", "at", "system", "ok", "fail", *(title for title, _ in _COLUMNS))
    cells = [(*_place(row), str(row["num_ok"]), str(row["num_failed"]), *_numbers(row, _COLUMNS)) for row in rows]
    head = f"latencies in ms, p50 unless named; medians of {data['rounds']} rounds, seed {data['seed']}"
    lines = [head, format_table(header, cells)]
    if steady := [row for row in rows if "steady_chunks_per_s" in row]:
        header = ("steady streams", "at", "system", "fail", *(title for title, _ in _STEADY))
        cells = [(*_place(row), str(row["steady_num_failed"]), *_numbers(row, _STEADY)) for row in steady]
        lines += ["", format_table(header, cells)]
    lines += [line for row in rows for line in _remarks(row)]
    if any(row["client_limited"] for row in rows):
        lines.append("the clients were the limit: raise --processes, or run them on another or a less busy machine")
    return "\n".join(lines)


def _place(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["load"], row["point"].partition(" ")[0], row["system"]


def _numbers(row: dict[str, Any], columns: Sequence[tuple[str, str]]) -> list[str]:
    return [_short(row[key]) if key in row else "-" for _, key in columns]


def _short(value: float) -> str:
    """Format with three digits, never as a power of ten."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _is_valid(row: dict[str, Any]) -> bool:
    return not (row["num_failed"] or row.get("steady_num_failed") or row["client_limited"])


def _remarks(row: dict[str, Any]) -> list[str]:
    name = f"{row['load']}, {row['point']}, {row['system']}"
    lines = []
    if row["client_limited"]:
        lag_ms = max(row.get("send_lag_p99_ms_max", 0.0), row["client_loop_lag_p99_ms_max"])
        busy = f"up to {_short(lag_ms)} ms late (p99), {row['client_cpu_max_max']:.0%} CPU"
        lines.append(f"NOT VALID  {name}: clients {busy}")
    return lines + [f"FAILED     {name}: {kind}: {text}" for kind, text in row["examples"].items()]


_KV_COLUMNS = (
    ("GB/s", "gbps"),
    ("exposed p50 ms", "exposed_p50_ms"),
    ("p99 ms", "exposed_p99_ms"),
    ("CPU s/GB", "cpu_s_per_gb"),
)
_DECODE_COLUMNS = (
    ("tpot_ms", "TPOT ms"),
    ("floor_ms", "floor ms"),
    ("tokens_per_s", "tokens/s"),
    ("tokens_per_step", "tokens/step"),
    ("step_ms", "step ms"),
    ("launch_ms", "launch ms"),
    ("device_ms", "device ms"),
    ("idle_ms", "idle ms"),
    ("kernels_ms", "kernels ms"),
    ("num_kernels", "kernels"),
    ("ttft_ms", "TTFT ms"),
)
_DEFAULT_SHAPES = {"cuda": "8b"}
_SINGLE = (("layer ms", "layer_ms"), ("submit us", "submit_us"), ("calls/layer", "calls_per_layer"))


def bench_kv(output: Output, *, plot: Path | None, **asked: Any) -> ExitCode:
    """Measure the hand-off. PARTIAL if a cell failed; broken promises are printed, but do not change the exit code.

    Raises:
        ConfigInvalid: a name or value does not exist.
        PackageMissing: something named needs a package that is not installed.
    """
    from baton.bench.kv_bench.kv import bench_kv as measure
    from baton.bench.kv_bench.options import read_options
    from baton.bench.plot import plot_kv, require_plot

    options = read_options(plot=plot, **asked)
    if plot is not None:
        require_plot(plot)
    data = measure(options, output.note)
    if plot is not None and options.what == "transfer" and data["rows"]:
        plot_kv(data["rows"], plot)
    output.emit(data, format_kv(data))
    return ExitCode.PARTIAL if data["failures"] else ExitCode.OK


def bench_decode(output: Output, *, plot: Path | None, device: str, dtype: str, **asked: Any) -> ExitCode:
    """Measure the decode step.

    Raises:
        ConfigInvalid: a name or value does not exist, or does not fit this machine.
        PackageMissing: `plot` without matplotlib.
    """
    from baton.bench.decode_bench.decode import bench_decode as measure
    from baton.bench.decode_bench.options import read_options
    from baton.bench.plot import plot_decode, require_plot
    from baton.cluster.resolve import resolve_device, resolve_dtype

    device = resolve_device(device)
    shape = asked.pop("shape") or _DEFAULT_SHAPES.get(device, "tiny")
    options = read_options(shape=shape, device=device, dtype=resolve_dtype(dtype, device), **asked)
    if plot is not None:
        require_plot(plot)
    data = measure(options, output.note)
    if plot is not None:
        plot_decode(data["rows"], plot)
    output.emit(data, format_decode(data))
    return ExitCode.OK


def bench_routing(output: Output, **asked: Any) -> ExitCode:
    """Measure the router's policies. PARTIAL if a promise is broken.

    Raises:
        ConfigInvalid: a name or value does not exist.
        WorkerStartFailed: a worker did not start.
    """
    from baton.bench.router_bench.routing import bench_routing as measure
    from baton.bench.router_bench.routing import read_options
    from baton.cluster.resolve import find_model

    options = read_options(**asked)
    data = measure(options, find_model("tiny").path, output.note)
    output.emit(data, format_routing(data))
    return ExitCode.OK if all(check["holds"] for check in data["checks"]) else ExitCode.PARTIAL


def bench_crossover(output: Output, *, plot: Path | None, **asked: Any) -> ExitCode:
    """Measure where prompts are computed fastest. PARTIAL if a promise is broken.

    Raises:
        ConfigInvalid: a value does not exist.
        PackageMissing: `plot` without matplotlib.
        WorkerStartFailed: a worker did not start.
    """
    from baton.bench.crossover import bench_crossover as measure
    from baton.bench.crossover import read_options
    from baton.bench.plot import plot_crossover, require_plot
    from baton.cluster.resolve import find_model

    options = read_options(**asked)
    if plot is not None:
        require_plot(plot)
    data = measure(options, find_model("tiny").path, output.note)
    if plot is not None:
        plot_crossover(data["rows"], plot)
    output.emit(data, format_crossover(data))
    return ExitCode.OK if all(check["holds"] for check in data["checks"]) else ExitCode.PARTIAL


def format_crossover(data: dict[str, Any]) -> str:
    """Format as text."""
    keys = ("ttft_ms", "second_ms", "beside_itl_ms", "beside_gap_ms", "local_share")
    order = ("workload", "load", "prompt_len", "system")
    rows = [
        (*(str(row[key]) for key in order), *(_range(row, key) for key in keys))
        for row in sorted(data["rows"], key=lambda row: tuple(row[key] for key in order))
    ]
    ways = [
        f"{one['workload']}, {one['load']}: "
        + (f"split is faster from {one['split_is_faster_from']} tokens on" if one["split_is_faster_from"] else "local")
        for one in data["crossovers"]
    ]
    return "\n".join([format_table((*order, *keys), rows), *ways, *format_verdicts(data)])


def format_routing(data: dict[str, Any]) -> str:
    """Format as text."""
    keys = ("hit_rate", "ttft_mean_ms", "ttft_p50_ms", "ttft_p99_ms", "queue_mean_ms", "requests_per_s")
    rows = [(row["system"], *(_range(row, key) for key in keys)) for row in data["rows"]]
    return "\n".join([format_table(("policy", *keys), rows), *format_verdicts(data)])


def format_decode(data: dict[str, Any]) -> str:
    """Format as text."""
    rows = [
        (
            str(row["batch"]),
            str(row["mtp_k"]),
            row["scheduling"],
            "graphs" if row["cuda_graphs"] else "eager",
            *(_range(row, key) for key, _ in _DECODE_COLUMNS),
        )
        for row in sorted(
            data["rows"], key=lambda row: (row["batch"], row["mtp_k"], row["cuda_graphs"], row["scheduling"])
        )
    ]
    first = data["rows"][0]
    balance = ", experts balanced by a pattern" if first["fake_balance"] else ""
    head = (
        f"{first['model']}, {first['dtype']} on {first['device']}, prompts of {first['prompt_len']}, verification "
        f"{first['verification']}{balance}; copies move {data['copy_gbps']:g} GB/s"
    )
    header = ("batch", "k", "scheduling", "passes", *(title for _, title in _DECODE_COLUMNS))
    return f"{head}\n{format_table(header, rows)}"


def format_kv(data: dict[str, Any]) -> str:
    """Format as text."""
    if any(row.get("what") == "step" for row in data["rows"]):
        return _format_steps(data)
    header = ("workload", "system", *(title for title, _ in (*_KV_COLUMNS, *_SINGLE)))
    rows = [
        (
            row["workload"],
            _label(row),
            *(_range(row, key) for _, key in _KV_COLUMNS),
            *(str(row.get(key, "")) for _, key in _SINGLE),
        )
        for row in sorted(data["rows"], key=lambda row: (row["workload"], row["gil_load"], -row["gbps"]))
    ]
    return "\n".join([format_table(header, rows), *format_verdicts(data)])


def _format_steps(data: dict[str, Any]) -> str:
    keys = ("step_off_ms", "step_on_ms", "step_ratio", "submit_us", "submit_p99_us")
    rows = [(row["workload"], _label(row), *(_range(row, key) for key in keys)) for row in data["rows"]]
    return "\n".join([format_table(("workload", "system", *keys), rows), *format_verdicts(data)])


def format_verdicts(data: dict[str, Any]) -> list[str]:
    """Lines for the promises, and for the cells that failed."""
    lines = []
    for check in data["checks"]:
        limit = f">= {check['at_least']}" if "at_least" in check else f"<= {check['at_most']}"
        lines.append(f"{'holds ' if check['holds'] else 'BROKEN'}  {check['name']}: {check['value']} ({limit})")
    return lines + [f"failed: {failure['cell']}" for failure in data.get("failures", ())]


def _range(row: dict[str, Any], key: str) -> str:
    if key not in row:
        return ""
    return (
        f"{row[key]:.3g} ({row[f'{key}_min']:.3g}-{row[f'{key}_max']:.3g})" if f"{key}_min" in row else f"{row[key]:g}"
    )


def _label(row: dict[str, Any]) -> str:
    from baton.bench.plot import label

    return label(row)


_COST = ("cpu_ms_per_request", "cpu_us_per_token", "requests_per_s", "tokens_per_s", "tokens_per_chunk")
_TIMES = ("ttft_p50_ms", "ttft_p99_ms", "added_p50_ms", "idle_rss_mb")
_OVERLOAD = ("capacity_requests_per_s", "offered_requests_per_s", "goodput_requests_per_s", "goodput_ratio", "num_late")
_REFUSALS = ("refusal_p50_ms", "refusal_p99_ms", "router_cpu", "client_cpu_max", "client_behind_p99_ms")


def bench_router(output: Output, **asked: Any) -> ExitCode:
    """Measure the router's process. PARTIAL if a promise is broken.

    Raises:
        ConfigInvalid: a number is too small.
        WorkerStartFailed: a process did not start.
        StepFailed: a request failed unexpectedly.
    """
    from baton.bench.router_bench.router_cost import RouterCostOptions
    from baton.bench.router_bench.router_cost import bench_router as measure
    from baton.cluster.resolve import find_model

    data = measure(RouterCostOptions(**asked), find_model("tiny").path, output.note)
    return _show(output, data, (*_COST, *_TIMES))


def bench_overload(output: Output, **asked: Any) -> ExitCode:
    """Measure admission. PARTIAL if a promise is broken.

    Raises:
        ConfigInvalid: a number is too small.
        WorkerStartFailed: a process did not start.
        StepFailed: nothing finished in time even without overload.
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
