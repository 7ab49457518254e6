"""Draws the rows of `baton bench crossover`: times over the length of the prompt, and where the lines cross."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from baton.bench.crossover import BUSY, CELLS

_PANELS: Final = (
    ("ttft_ms", "first token, ms"),
    ("second_ms", "second token, ms"),
    ("beside_gap_ms", "longest gap of the streams beside, ms"),
)
_COLOURS: Final = {"local": "#4878a8", "split": "#c8553d", "auto": "#333333"}


def plot_crossover(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """One line of panels for each workload and load; medians with their ranges, `auto` dashed over the others."""
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
