"""Draws the rows of `baton bench serve`: latencies and rates of every system over clients or arrivals."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

_PANELS: Final = (
    (("ttft_p50_ms", "ttft_p99_ms"), "TTFT, ms"),
    (("itl_p50_ms", "itl_p99_ms"), "ITL, ms"),
    (("e2e_p50_ms", "e2e_p99_ms"), "E2E, ms"),
    (("steady_itl_p50_ms", "steady_itl_p99_ms"), "ITL of steady streams, ms"),
    (("output_tokens_per_s",), "output tokens/s"),
    (("goodput_share",), "goodput, share of requests"),
)
_STYLES: Final = ("-", "--")  # of p50 and p99


def plot_serve(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """One line of panels for each load, one colour for each system: medians over rounds with their ranges.

    Points at which the clients were the limit are hollow.
    """
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    loads = list(dict.fromkeys(row["load"] for row in rows))
    systems = list(dict.fromkeys(row["system"] for row in rows))
    size = (4 * len(_PANELS), 3.4 * len(loads))
    figure, axes = pyplot.subplots(len(loads), len(_PANELS), figsize=size, squeeze=False, layout="constrained")
    for line, load in zip(axes, loads, strict=True):
        shown = [row for row in rows if row["load"] == load]
        points = sorted({row["at"] for row in shown})
        for axis, (keys, title) in zip(line, _PANELS, strict=True):
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
