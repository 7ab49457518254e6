"""`baton bench serve`: the measurement of the bench room, and its rows in print."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from baton.cluster.outcome import ExitCode, Output
from baton.cluster.table import format_table
from baton.core.errors import ConfigInvalid

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
    """Measure. PARTIAL when requests failed or the clients were the limit.

    Raises:
        ConfigInvalid: a workload or value that is wrong, or that a system refuses.
        PackageMissing: aiohttp is not installed, or `plot` without matplotlib.
        StartupError: a system does not answer.
        StepFailed: a client process ended.
    """
    from baton.bench.plot import require_plot
    from baton.bench.plot_serve import plot_serve
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
    """What a person reads, within 100 columns for names of usual length."""
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
    """Three digits, never as a power of ten."""
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
