"""Draws the rows of a measurement. matplotlib is not a dependency of Baton: without it, --plot is refused."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from baton.bench.crossover import BUSY, CELLS
from baton.core.errors import ConfigInvalid, PackageMissing

_PANELS: Final = (
    ("ttft_ms", "first token, ms"),
    ("second_ms", "second token, ms"),
    ("beside_gap_ms", "longest gap of the streams beside, ms"),
)
_COLOURS: Final = {"local": "#4878a8", "split": "#c8553d", "auto": "#333333"}


def plot_crossover(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw a line of panels for each workload and load: medians with their ranges, `auto` dashed over the others."""
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    figure, axes = pyplot.subplots(
        len(CELLS), len(_PANELS), figsize=(15, 3.4 * len(CELLS)), squeeze=False, layout="constrained"
    )
    for line, (workload, load) in enumerate(CELLS):
        shown = [row for row in rows if (row["workload"], row["load"]) == (workload, load)]
        for axis, (key, title) in zip(axes[line], _PANELS, strict=True):
            if (key.startswith("beside") and load != BUSY) or not any(key in row for row in shown):
                axis.axis("off")
                continue
            for system, colour in _COLOURS.items():
                found = sorted(
                    (row for row in shown if row["system"] == system and key in row), key=lambda row: row["prompt_len"]
                )
                axis.errorbar(
                    [row["prompt_len"] for row in found],
                    [row[key] for row in found],
                    yerr=[
                        [row[key] - row[f"{key}_min"] for row in found],
                        [row[f"{key}_max"] - row[key] for row in found],
                    ],
                    marker="o",
                    capsize=2,
                    linestyle="--" if system == "auto" else "-",
                    color=colour,
                    label=system,
                )
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xlabel("tokens of the prompt")
            axis.set_title(f"{workload} prompts, {load}: {title}")
            axis.grid(alpha=0.3)
    axes[0][0].legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


_SERVE_PANELS: Final = (
    (("ttft_p50_ms", "ttft_p99_ms"), "TTFT, ms"),
    (("itl_p50_ms", "itl_p99_ms"), "ITL, ms"),
    (("e2e_p50_ms", "e2e_p99_ms"), "E2E, ms"),
    (("steady_itl_p50_ms", "steady_itl_p99_ms"), "ITL of steady streams, ms"),
    (("output_tokens_per_s",), "output tokens/s"),
    (("goodput_share",), "goodput, share of requests"),
)
_STYLES: Final = ("-", "--")  # for p50 and p99


def plot_serve(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw a line of panels for each load and a colour for each system: medians over rounds with their ranges.

    Points at which the clients were the bottleneck are hollow.
    """
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    loads = list(dict.fromkeys(row["load"] for row in rows))
    systems = list(dict.fromkeys(row["system"] for row in rows))
    size = (4 * len(_SERVE_PANELS), 3.4 * len(loads))
    figure, axes = pyplot.subplots(len(loads), len(_SERVE_PANELS), figsize=size, squeeze=False, layout="constrained")
    for line, load in zip(axes, loads, strict=True):
        shown = [row for row in rows if row["load"] == load]
        points = sorted({row["at"] for row in shown})
        for axis, (keys, title) in zip(line, _SERVE_PANELS, strict=True):
            if not any(key in row for row in shown for key in keys):
                axis.axis("off")
                continue
            for colour, system in enumerate(systems):
                own = [row for row in shown if row["system"] == system]
                for key, style in zip(keys, _STYLES, strict=False):
                    _draw(axis, own, key, {"linestyle": style, "color": f"C{colour}", "label": _label(system, key)})
            axis.set_title(f"{load}: {title}")
            axis.set_xlabel("clients" if shown[0]["arrival"] == "closed" else "arrivals/s")
            axis.set_xscale("log", base=2)
            axis.set_xticks(points, [f"{point:g}" for point in points])
            if title.endswith("ms"):
                axis.set_yscale("log")
            else:
                axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw(axis: Any, rows: Sequence[dict[str, Any]], key: str, look: dict[str, Any]) -> None:
    found = sorted((row for row in rows if key in row), key=lambda row: row["at"])
    if not found:
        return
    ranges = [
        [row[key] - row[f"{key}_min"] for row in found],
        [row[f"{key}_max"] - row[key] for row in found],
    ]
    at = [row["at"] for row in found]
    axis.errorbar(at, [row[key] for row in found], yerr=ranges, marker="o", capsize=3, **look)
    limited = [row for row in found if row.get("client_limited")]
    hollow = {"marker": "o", "markerfacecolor": "white", "linestyle": "", "color": look["color"], "zorder": 5}
    axis.plot([row["at"] for row in limited], [row[key] for row in limited], **hollow)


def _label(system: str, key: str) -> str:
    return f"{system} {key.split('_')[-2]}" if key.endswith("_ms") else system


_NO_SYSTEMS: Final = ("floor_ms", "launch_ms")
_OURS_COLOUR: Final = "#4878a8"
_KERNEL_COLOURS: Final = ("#c8553d", "#e0a458", "#5b8c5a", "#8a6fa8", "#777777", "#3d8f8f")


def others_of(row: dict[str, Any]) -> list[str]:
    """Names of a row's systems other than ours."""
    return [key.removesuffix("_ms") for key in row if key.endswith("_ms") and key not in _NO_SYSTEMS]


def plot_kernels(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw a panel for each kernel and a bar for each row, with the others as points; 1 is the floor."""
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    kernels = sorted({row["kernel"] for row in rows})
    shown = {kernel: [row for row in rows if row["kernel"] == kernel] for kernel in kernels}
    names = sorted({name for row in rows for name in others_of(row)})
    colours = {name: _KERNEL_COLOURS[index % len(_KERNEL_COLOURS)] for index, name in enumerate(names)}
    heights = [len(found) + 1.5 for found in shown.values()]
    figure, axes = pyplot.subplots(
        len(kernels),
        1,
        figsize=(11, 0.28 * sum(heights) + 0.5),
        squeeze=False,
        layout="constrained",
        gridspec_kw={"height_ratios": heights},
    )
    for axis, (kernel, found) in zip(axes[:, 0], shown.items(), strict=True):
        places = range(len(found))
        axis.barh(places, [row.get("fraction", 0.0) for row in found], color=_OURS_COLOUR)
        for name in names:
            points = [(_fraction(row, name), place) for place, row in zip(places, found, strict=True)]
            points = [(value, place) for value, place in points if value]
            if points:
                values, at = zip(*points, strict=True)
                axis.scatter(values, at, s=16, zorder=3, color=colours[name], label=name)
        axis.set_yticks(list(places), [row["shape"] for row in found], fontsize=7)
        axis.set_ylim(len(found) - 0.4, -0.6)
        axis.set_xlim(0, 1.1)
        axis.axvline(1.0, color="#333333", linewidth=0.8, linestyle="--")
        axis.set_title(f"{kernel}: (floor + launch) / time", fontsize=9)
        axis.grid(axis="x", alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7, loc="lower right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _fraction(row: dict[str, Any], name: str) -> float:
    taken = row.get(f"{name}_ms")
    return (row["floor_ms"] + row["launch_ms"]) / taken if taken else 0.0


_FORMATS = (".png", ".svg", ".pdf")
_KV_PANELS = (("gbps", "GB/s"), ("exposed_p50_ms", "exposed after the last layer, ms (p50)"))


def require_plot(path: Path) -> None:
    """Check, before anything is measured, that a plot can be written to the path.

    Raises:
        PackageMissing: matplotlib is not importable.
        ConfigInvalid: the file name does not state its format, or the folder does not exist.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise PackageMissing("--plot needs matplotlib, which is not installed", package="matplotlib")
    if path.suffix not in _FORMATS:
        raise ConfigInvalid(f"--plot {path}: the name must end in {', '.join(_FORMATS)}", keys=["plot"])
    if not path.parent.is_dir():
        raise ConfigInvalid(f"--plot {path}: there is no folder {path.parent}", keys=["plot"])


def plot_kv(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw bars with ranges: a line of panels for each workload, rate on the left, exposed time on the right."""
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    workloads = sorted({row["workload"] for row in rows})
    height = max(2.0, 0.32 * len(rows) / len(workloads) + 1)
    figure, axes = pyplot.subplots(
        len(workloads), len(_KV_PANELS), figsize=(13, height * len(workloads)), squeeze=False, layout="constrained"
    )
    for line, workload in enumerate(workloads):
        shown = [row for row in rows if row["workload"] == workload]
        for column, (key, title) in enumerate(_KV_PANELS):
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
    """Draw time per token over the batch, and tokens per second: a line per (scheduling, k, graphs), floors dashed."""
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
    """Name of a row in a plot or a table."""
    name = str(row["system"])
    if row.get("digest") is not None:
        name += " +digest" if row["digest"] else ""
    if row.get("gil_load", "none") != "none":
        name += f" (busy {row['gil_load']})"
    return name
