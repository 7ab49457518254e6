"""`baton bench kernels`: the measurement of the bench room, and its rows in print."""

import os
from pathlib import Path
from typing import Any

from baton.cluster.outcome import ExitCode, Output
from baton.cluster.table import format_table

_MAX_JOBS = 8


def bench_kernels(output: Output, *, plot: Path | None, device: str, jobs: int | None, **asked: Any) -> ExitCode:
    """Measure kernels. PARTIAL when a system failed or a row was left out.

    Raises:
        ConfigInvalid: a value that does not exist, or no row has what was asked for.
        PackageMissing: `plot` without matplotlib.
    """
    from baton.bench.kernel_bench.kernels import bench_kernels as measure
    from baton.bench.kernel_bench.options import read_options
    from baton.bench.kernel_bench.plot_kernels import plot_kernels
    from baton.bench.plot import require_plot
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
    """What a person reads: microseconds, the fraction of the floor, and how much longer others take."""
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
    from baton.bench.kernel_bench.plot_kernels import others_of

    return [
        f"{name} {_us(row, f'{name}_ms')}" + (f" ({row[f'vs_{name}']:.2f})" if f"vs_{name}" in row else "")
        for name in others_of(row)
    ]


def _us(row: dict[str, Any], key: str) -> str:
    return f"{row[key] * 1e3:.4g}" if key in row else ""


def _first_line(text: str) -> str:
    return next(iter(text.splitlines()), "")[:200]
