"""Draws the rows of `baton bench kernels`: which part of the time the floor and a launch are, ours and the others'."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

_NO_SYSTEMS: Final = ("floor_ms", "launch_ms")
_OURS_COLOUR: Final = "#4878a8"
_COLOURS: Final = ("#c8553d", "#e0a458", "#5b8c5a", "#8a6fa8", "#777777", "#3d8f8f")


def others_of(row: dict[str, Any]) -> list[str]:
    """Names of the systems of a row that are not ours."""
    return [key.removesuffix("_ms") for key in row if key.endswith("_ms") and key not in _NO_SYSTEMS]


def plot_kernels(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """A panel for each kernel, a bar for each row with the others as points; 1 is the floor."""
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    kernels = sorted({row["kernel"] for row in rows})
    shown = {kernel: [row for row in rows if row["kernel"] == kernel] for kernel in kernels}
    names = sorted({name for row in rows for name in others_of(row)})
    colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}
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
