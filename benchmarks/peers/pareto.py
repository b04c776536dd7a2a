"""A picture of one model's results: time against memory, a marker for each family, a line for ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks.peers.families import Family
from benchmarks.peers.monet import PUBLISHED
from benchmarks.peers.page import RUNS, title_of

MARKERS = {
    Family.EAGER: ("k", "*", 130),
    Family.CHECKPOINT: ("tab:orange", "s", 40),
    Family.SELECTIVE: ("tab:green", "^", 45),
    Family.COMPILE: ("tab:purple", "D", 34),
    Family.AUTO_SAC: ("tab:brown", "P", 45),
    Family.HUGGING_FACE: ("tab:red", "v", 45),
    Family.OFFLOAD: ("tab:gray", "X", 45),
    Family.LAYOUT: ("tab:blue", "d", 40),
    Family.PARTS: ("tab:blue", "P", 40),
    Family.OTHER_SOLVERS: ("tab:cyan", "o", 30),
}
FIGURE_INCHES = (8.6, 4.2)


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Write the picture of a result file, the same for the same file. Filled markers train right, hollow ones not."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    timed = [result for result in report["contenders"] if result["time_ratio"] is not None]
    with matplotlib.rc_context({"svg.hashsalt": "rockmate", "font.size": 9, "svg.fonttype": "path"}):
        figure, axes = plt.subplots(figsize=FIGURE_INCHES, layout="constrained")
        for family, (colour, marker, size) in MARKERS.items():
            for is_right in (True, False):
                found = [r for r in timed if r["family"] == family and (r["status"] in RUNS) == is_right]
                if found:
                    axes.scatter(
                        [result["peak_share"] for result in found],
                        [result["time_ratio"] for result in found],
                        marker=marker,
                        s=size,
                        facecolors=colour if is_right else "none",
                        edgecolors=colour,
                        label=family.value if is_right else f"{family}, wrong",
                    )
        if report["model"] in PUBLISHED:
            shares, ratios = zip(*PUBLISHED[report["model"]].ratios, strict=True)
            axes.plot(shares, ratios, "+", color="0.45", markersize=7, label="MONeT, as published")
        draw_ours(axes, [result for result in timed if result["family"] == Family.OURS])
        axes.axhline(1.0, color="0.8", linewidth=0.8, zorder=0)
        axes.set(
            title=title_of(report), xlabel="peak memory / eager's", ylabel="time of a step / eager's", xlim=(0, None)
        )
        figure.legend(fontsize=8, loc="outside right upper")  # within the axes it would cover points
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def draw_ours(axes: Any, results: list[Mapping[str, Any]]) -> None:
    """Ours measured as a line, and the bounds that no plan of the same budget is faster than."""
    ours = sorted((r for r in results if r["status"] in RUNS), key=lambda result: result["peak_share"])
    if not ours:
        return
    shares = [result["peak_share"] for result in ours]
    axes.plot(shares, [result["time_ratio"] for result in ours], "o-", color="tab:blue", label=Family.OURS, zorder=3)
    bounds = [(result["peak_share"], result["bound_ratio"]) for result in ours if result["bound_ratio"] is not None]
    if bounds:
        axes.plot(*zip(*bounds, strict=True), ":", color="tab:blue", linewidth=1, label="no plan is faster")
