"""What `baton bench` runs: a measurement of the bench room, and its rows in print."""

from pathlib import Path
from typing import Any

from baton.cluster.outcome import ExitCode, Output
from baton.cluster.table import format_table

_COLUMNS = (
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
    """Measure the hand-off. PARTIAL when a cell failed; broken promises are printed, and change no exit code.

    Raises:
        ConfigInvalid: a name or value that does not exist.
        PackageMissing: something named needs a package that is not there.
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
        ConfigInvalid: a name or value that does not exist, or that does not fit this machine.
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
    """Measure policies of the router. PARTIAL when a promise is broken.

    Raises:
        ConfigInvalid: a name or value that does not exist.
        WorkerStartFailed: a worker did not come up.
    """
    from baton.bench.router_bench.routing import bench_routing as measure
    from baton.bench.router_bench.routing import read_options
    from baton.cluster.resolve import find_model

    options = read_options(**asked)
    data = measure(options, find_model("tiny").path, output.note)
    output.emit(data, format_routing(data))
    return ExitCode.OK if all(check["holds"] for check in data["checks"]) else ExitCode.PARTIAL


def bench_crossover(output: Output, *, plot: Path | None, **asked: Any) -> ExitCode:
    """Measure where prompts are computed best. PARTIAL when a promise is broken.

    Raises:
        ConfigInvalid: a value that does not exist.
        PackageMissing: `plot` without matplotlib.
        WorkerStartFailed: a worker did not come up.
    """
    from baton.bench.crossover import bench_crossover as measure
    from baton.bench.crossover import read_options
    from baton.bench.plot import require_plot
    from baton.bench.plot_crossover import plot_crossover
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
    """What a person reads."""
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
    """What a person reads."""
    keys = ("hit_rate", "ttft_mean_ms", "ttft_p50_ms", "ttft_p99_ms", "queue_mean_ms", "requests_per_s")
    rows = [(row["system"], *(_range(row, key) for key in keys)) for row in data["rows"]]
    return "\n".join([format_table(("policy", *keys), rows), *format_verdicts(data)])


def format_decode(data: dict[str, Any]) -> str:
    """What a person reads."""
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
    head = (
        f"{first['model']}, {first['dtype']} on {first['device']}, prompts of {first['prompt_len']}, verification "
        f"{first['verification']}; copies move {data['copy_gbps']:g} GB/s"
    )
    header = ("batch", "k", "scheduling", "passes", *(title for _, title in _DECODE_COLUMNS))
    return f"{head}\n{format_table(header, rows)}"


def format_kv(data: dict[str, Any]) -> str:
    """What a person reads."""
    if any(row.get("what") == "step" for row in data["rows"]):
        return _format_steps(data)
    header = ("workload", "system", *(title for title, _ in (*_COLUMNS, *_SINGLE)))
    rows = [
        (
            row["workload"],
            _label(row),
            *(_range(row, key) for _, key in _COLUMNS),
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
    """A line for each promise, and for each cell that failed."""
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
