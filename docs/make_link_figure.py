"""Draw where data should move, and where they should be computed again, from benchmarks/results/link-speeds.json.

python docs/make_link_figure.py                              # docs/images/link_speeds.svg
python docs/make_link_figure.py results.json picture.svg
"""
# a script, not a package

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
COLOURS = ("#3f8fcb", "#e8a317", "#1fa37c", "#8a4fae", "#cf4a0a", "#20242a")
MARKERS = "os^vDX"


def picture(content: dict[str, Any]) -> Figure:
    """Above, the time that a plan adds; below, how much of what is too much moves. By the speed of the link."""
    shares = sorted({row["share"] for row in content["rows"]}, reverse=True)
    models = list(dict.fromkeys(row["model"] for row in content["rows"] if row["fits"]))
    speeds = sorted({row["gb_per_s"] for row in content["rows"] if row["gb_per_s"]})
    figure = Figure(figsize=(4.6 * len(shares), 6.0), layout="constrained")
    panels = figure.subplots(2, len(shares), sharex=True, squeeze=False)
    for column, share in enumerate(shares):
        for index, model in enumerate(models):
            rows = [row for row in content["rows"] if (row["model"], row["share"]) == (model, share)]
            style = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}
            if any(row["fits"] for row in rows):
                draw(panels[0][column], panels[1][column], rows, model.removesuffix("-demo"), style)
        for panel in panels[:, column]:
            finish(panel, speeds)
        panels[0][column].set_title(f"{share:.0%} of eager's peak", loc="left", fontsize=10)
        panels[1][column].set_xlabel("speed of the link, both ways (GB/s)")
    panels[0][0].set_ylabel("time added (%), predicted")
    panels[1][0].set_ylabel("moved, of what is too much (%)")
    panels[0][0].legend(fontsize=8, framealpha=0.9, edgecolor="none")
    return figure


def draw(times: Axes, moved: Axes, rows: list[dict[str, Any]], label: str, style: dict[str, Any]) -> None:
    """One model: a dashed line where nothing moves."""
    linked = [row for row in rows if row["gb_per_s"] and row["fits"]]
    alone = next((row for row in rows if not row["gb_per_s"] and row["fits"]), None)
    speeds = [row["gb_per_s"] for row in linked]
    times.plot(speeds, [100 * row["overhead"] for row in linked], label=label, linewidth=1.3, markersize=4, **style)
    if alone is not None:
        times.axhline(100 * alone["overhead"], color=style["color"], linewidth=0.8, linestyle=(0, (5, 3)))
    moved.plot(
        speeds,
        [100 * row["moved_bytes"] / max(1, row["activations_bytes"]) for row in linked],
        linewidth=1.3,
        markersize=4,
        **style,
    )


def finish(panel: Axes, speeds: list[float]) -> None:
    """Axes, once all models are drawn."""
    panel.set_xscale("log", base=2)
    panel.set_ylim(0, 1.06 * panel.dataLim.ymax)
    panel.set_xticks(speeds, [f"{speed:g}" for speed in speeds])
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis="y", color="#e4e6ea", linewidth=0.6)


def main(arguments: list[str]) -> None:
    """Run the script."""
    source = Path(arguments[0]) if arguments else ROOT / "benchmarks" / "results" / "link-speeds.json"
    target = Path(arguments[1]) if len(arguments) > 1 else ROOT / "docs" / "images" / "link_speeds.svg"
    with matplotlib.rc_context({"svg.hashsalt": "rockmate", "font.size": 9}):
        picture(json.loads(source.read_text("utf-8"))).savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main(sys.argv[1:])
