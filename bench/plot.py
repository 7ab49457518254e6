"""Draws the rows of a measurement. matplotlib is no dependency of Baton: without it a plot is refused by name."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baton.core.errors import ConfigInvalid, PackageMissing

_FORMATS = (".png", ".svg", ".pdf")
_PANELS = (("gbps", "GB/s"), ("exposed_p50_ms", "exposed after the last layer, ms (p50)"))


def require_plot(path: Path) -> None:
    """Check, before anything is measured, that a plot can be written there.

    Raises:
        PackageMissing: matplotlib is not importable.
        ConfigInvalid: the file has no name that says its format, or no folder.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise PackageMissing("--plot needs matplotlib, which is not installed", package="matplotlib")
    if path.suffix not in _FORMATS:
        raise ConfigInvalid(f"--plot {path}: the name must end in {', '.join(_FORMATS)}", keys=["plot"])
    if not path.parent.is_dir():
        raise ConfigInvalid(f"--plot {path}: there is no folder {path.parent}", keys=["plot"])


def plot_kv(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Bars with ranges: one line of panels for each workload, rate on the left, exposed time on the right."""
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    workloads = sorted({row["workload"] for row in rows})
    height = max(2.0, 0.32 * len(rows) / len(workloads) + 1)
    figure, axes = pyplot.subplots(
        len(workloads), len(_PANELS), figsize=(13, height * len(workloads)), squeeze=False, layout="constrained"
    )
    for line, workload in enumerate(workloads):
        shown = [row for row in rows if row["workload"] == workload]
        for column, (key, title) in enumerate(_PANELS):
            axis = axes[line][column]
            found = [row for row in shown if key in row]
            values = [row[key] for row in found]
            low = [row[key] - row[f"{key}_min"] for row in found]
            high = [row[f"{key}_max"] - row[key] for row in found]
            axis.barh([label(row) for row in found], values, xerr=[low, high], color="#4878a8", ecolor="#333333")
            axis.invert_yaxis()
            axis.set_title(f"workload {workload}: {title}")
            axis.grid(axis="x", alpha=0.3)
            if key.endswith("_ms"):
                axis.set_xscale("symlog", linthresh=0.1)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _line_of(row: dict[str, Any]) -> tuple[str, int, bool]:
    return row["scheduling"], row["mtp_k"], row["cuda_graphs"]


def plot_decode(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Time of a token over the batch, and tokens a second: a line for each (scheduling, k, graphs), floors dashed."""
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    figure, axes = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    for line in sorted({_line_of(row) for row in rows}):
        found = [row for row in rows if _line_of(row) == line]
        scheduling, k, has_graphs = line
        label = f"{scheduling}, k = {k}" + (", graphs" if has_graphs else "")
        found.sort(key=lambda row: row["batch"])
        batches = [row["batch"] for row in found]
        for axis, key in zip(axes, ("tpot_ms", "tokens_per_s"), strict=True):
            values = [row[key] for row in found]
            ranges = [
                [row[key] - row[f"{key}_min"] for row in found],
                [row[f"{key}_max"] - row[key] for row in found],
            ]
            axis.errorbar(batches, values, yerr=ranges, marker="o", capsize=3, label=label)
        axes[0].plot(batches, [row["floor_ms"] for row in found], linestyle="--", color="#888888", linewidth=1)
    for axis, title in zip(axes, ("ms a token of one sequence (dashed: floors)", "tokens a second"), strict=True):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("sequences")
        axis.set_title(f"{rows[0]['model']}, {rows[0]['dtype']}: {title}")
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def label(row: dict[str, Any]) -> str:
    """A row's name in a plot or a table."""
    name = str(row["system"])
    if row.get("digest") is not None:
        name += " +digest" if row["digest"] else ""
    if row.get("gil_load", "none") != "none":
        name += f" (busy {row['gil_load']})"
    return name
