"""A plan as a figure: memory over the step, lanes of operations, memory against time, the largest at the peak."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from rk_solvers import LinkUse
from rockmate.errors import ArgumentError
from rockmate.plan_files.content import PlanFile
from rockmate.reports import words
from rockmate.reports.comparison import BUDGET_COLOUR, TEXT_COLOUR, axes_of, scaled_to
from rockmate.reports.explain import explain
from rockmate.reports.measured import MeasuredSteps
from rockmate.reports.pareto import ParetoPoint, pareto_points
from rockmate.reports.step import Computation, computations, keep_all_simulation, link_uses
from rockmate.units import format_bytes

MIB = 2**20
# Told apart by those who do not see some colours, and in grey.
COLOURS = {"kept": "#3f8fcb", "recomputed": "#e8a317", "gradients": "#1fa37c", "workspace": "#c4b5d3"}
LANES = {"forward": "kept", "recompute": "recomputed", "backward": "gradients"}
KEEP_ALL_COLOUR = "#8b95a1"
LINK_COLOUR = "#9a5fb8"
SUFFIXES = (".png", ".pdf", ".svg")
_MARKERS = "os^vDX"
_SERIES = ("#3f8fcb", "#1fa37c", "#8b95a1", "#e8a317", "#9a7fb8", "#20242a")
_LARGEST = 12
_SLOWEST = 2.0  # plans that take more than this many times the longer are named, not drawn


def write_figure(
    plan_file: PlanFile,
    path: str | os.PathLike[str],
    measured: MeasuredSteps | None = None,
    sweep: Sequence[ParetoPoint] | None = None,
) -> Path:
    """Write the report of a plan as a figure of one page, in the format that the name of `path` ends in.

    Arguments, and what is returned, are as for `write_html`. The same arguments give the same bytes.

    Raises:
        ArgumentError: the name does not end in ".png", ".pdf" or ".svg".
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        known = ", ".join(SUFFIXES)
        raise ArgumentError(f"a figure is written to a file whose name ends in {known}, not to {path.name!r}")
    points = pareto_points(plan_file) if sweep is None else sweep
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}.get(path.suffix.lower())
    with matplotlib.rc_context({"svg.hashsalt": "rockmate", "font.size": 9, "text.color": TEXT_COLOUR}):
        figure = plan_figure(plan_file, measured, points)
        figure.savefig(path, dpi=150, metadata=metadata)
    return path


def plan_figure(plan_file: PlanFile, measured: MeasuredSteps | None, points: Sequence[ParetoPoint]) -> Figure:
    """The figure that `write_figure` writes."""
    explanation = explain(plan_file)
    steps = computations(plan_file, explanation)
    figure = Figure(figsize=(11.7, 8.3), layout="constrained")  # A4, in inches
    places = figure.subplot_mosaic(
        [["memory", "memory"], ["lanes", "lanes"], ["pareto", "largest"]],
        height_ratios=[3.4, 0.8, 2.6],
        gridspec_kw={"hspace": 0.06},
    )
    draw_memory(places["memory"], plan_file, steps, measured)
    draw_lanes(places["lanes"], steps, link_uses(plan_file))
    places["lanes"].set_xlim(places["memory"].get_xlim())
    draw_pareto(places["pareto"], plan_file, points)
    draw_largest(places["largest"], words.largest_at_peak(explanation, plan_file.problem, _LARGEST))
    made = plan_file.made
    figure.suptitle(plain(plan_file.graph.model), x=0.012, ha="left", fontsize=15, fontweight="bold")
    subtitle = f"{words.headline(plan_file)}  {made.device}, PyTorch {made.torch}, {plan_file.promise.solver}."
    places["memory"].set_title(plain(subtitle), loc="left", fontsize=9.5, pad=8)
    return figure


def draw_memory(panel: Axes, plan_file: PlanFile, steps: Sequence[Computation], measured: MeasuredSteps | None) -> None:
    """Bytes in layers, keep-all's line, the budget, and what was measured."""
    edges = [steps[0].start_ms, *(step.end_ms for step in steps)]
    below = [0.0] * len(steps)
    for name, colour in COLOURS.items():
        sizes = [getattr(step, f"{name.removesuffix('s') if name == 'gradients' else name}_bytes") for step in steps]
        above = [low + size / MIB for low, size in zip(below, sizes, strict=True)]
        label = "kept from the forward" if name == "kept" else name
        panel.stairs(above, edges, baseline=below, fill=True, color=colour, linewidth=0, label=label)
        below = above
    keep_all = keep_all_simulation(plan_file.problem)
    keep_all_edges = [0.0, *(moment.end_ms for moment in keep_all.moments)]
    keep_all_mib = [moment.peak_bytes / MIB for moment in keep_all.moments]
    panel.stairs(keep_all_mib, keep_all_edges, baseline=None, color=KEEP_ALL_COLOUR, linewidth=1.3, label="keep all")
    if measured is not None:
        times, levels = axes_of(scaled_to(measured.plan.timeline, edges[-1]))  # upon the prediction
        panel.step(times, levels, where="post", color=TEXT_COLOUR, linewidth=0.8, label="measured, time stretched")
    highest = [max(moment.peak_bytes for moment in keep_all.moments), max(step.peak_bytes for step in steps)]
    most_bytes = words.most_shown(plan_file.promise.budget_bytes, highest)
    budget_mib = plan_file.promise.budget_bytes / MIB
    panel.axhline(budget_mib, color=BUDGET_COLOUR, linewidth=1.3, linestyle=(0, (5, 3)), label="budget")
    panel.set_xlim(0, edges[-1] or 1.0)
    panel.set_ylim(0, 1.08 * most_bytes / MIB)
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value * MIB) if value else "0"))
    panel.tick_params(labelbottom=False)
    panel.legend(loc="upper right", fontsize=8.5, ncols=2, framealpha=0.9, edgecolor="none")
    tidy(panel)


def draw_lanes(panel: Axes, steps: Sequence[Computation], uses: Sequence[LinkUse] = ()) -> None:
    """A row of bars for each of forward, recompute and backward, and for each link that is used."""
    rows = [
        (lane, COLOURS[colour], [(step.start_ms, step.end_ms - step.start_ms) for step in steps if step.lane == lane])
        for lane, colour in LANES.items()
    ]
    for lane, is_out in (("out", True), ("back", False)) if uses else ():
        bars = [(use.start_ms, use.end_ms - use.start_ms) for use in uses if use.is_out == is_out]
        rows.append((lane, LINK_COLOUR, bars))
    for row, (_, colour, bars) in enumerate(rows):
        panel.broken_barh(bars, (-row - 0.4, 0.8), facecolors=colour, linewidth=0)
    panel.set_yticks([-row for row in range(len(rows))], [lane for lane, _, _ in rows])
    panel.set_xlabel("time in the step (ms), predicted")
    tidy(panel, grid="x")


def draw_pareto(panel: Axes, plan_file: PlanFile, points: Sequence[ParetoPoint]) -> None:
    """Peak against extra time; each solver has its marker."""
    promise = plan_file.promise
    base_ms = promise.baseline_time_ms or 1.0
    usual = max(_SLOWEST, 1.3 * promise.time_ms / base_ms)
    for index, solver in enumerate(sorted({point.solver for point in points})):
        own = [point for point in points if point.solver == solver]
        drawn = [point for point in own if point.time_ms <= usual * base_ms]
        beyond = "" if drawn else f" ({min(point.time_ms for point in own) / base_ms:.1f}× the time)"
        panel.plot(
            [point.peak_bytes / MIB for point in drawn],
            [100 * (point.time_ms / base_ms - 1) for point in drawn],
            marker=_MARKERS[index % len(_MARKERS)],
            markersize=4,
            linewidth=0.9,
            color=_SERIES[index % len(_SERIES)],
            label=plain(solver) + beyond,
        )
    own_mib, own_extra = promise.peak_bytes / MIB, 100 * (promise.time_ms / base_ms - 1)
    panel.plot([own_mib], [own_extra], "*", markersize=13, color=BUDGET_COLOUR, label="this plan")
    panel.axvline(promise.budget_bytes / MIB, color=BUDGET_COLOUR, linewidth=1.1, linestyle=(0, (5, 3)))
    peaks = [promise.peak_bytes, *(point.peak_bytes for point in points)]
    panel.set_xlim(0, 1.05 * words.most_shown(promise.budget_bytes, peaks) / MIB)
    panel.set_ylim(bottom=0)
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value * MIB) if value else "0"))
    panel.xaxis.set_major_locator(MaxNLocator(6))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"+{value:g} %"))
    panel.set_title("memory against time", loc="left", fontsize=10)
    panel.set_xlabel("predicted peak")
    panel.legend(fontsize=8, framealpha=0.9, edgecolor="none")
    tidy(panel)


def draw_largest(panel: Axes, rows: Sequence[tuple[str, int, str]]) -> None:
    """Bars of what is in memory at the peak, the largest first."""
    for index, (name, size_bytes, decision) in enumerate(rows):
        kind = name if name in COLOURS else ("recomputed" if decision == "recomputed" else "kept")
        panel.barh(-index, size_bytes / MIB, height=0.7, color=COLOURS[kind])
        panel.annotate(
            f"{format_bytes(size_bytes)}, {plain(decision)}",
            (size_bytes / MIB, -index),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=7.5,
        )
    names = [plain(name if len(name) <= 32 else f"{name[:15]}…{name[-15:]}") for name, _, _ in rows]
    panel.set_yticks([-index for index in range(len(rows))], names, fontsize=8)
    panel.set_xlim(0, 1.6 * max([size_bytes / MIB for _, size_bytes, _ in rows], default=1.0))
    panel.set_xticks([])
    panel.set_title("largest in memory at the peak", loc="left", fontsize=10)
    tidy(panel, grid=None)
    panel.spines["bottom"].set_visible(False)


def tidy(panel: Axes, grid: str | None = "y") -> None:
    """What all panels have in common."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(colors=TEXT_COLOUR, labelsize=8.5)
    if grid == "x":
        panel.grid(axis="x", color="#e4e6ea", linewidth=0.6)
    elif grid == "y":
        panel.grid(axis="y", color="#e4e6ea", linewidth=0.6)
    panel.set_axisbelow(True)


def plain(text: str) -> str:
    """`text` as it is: matplotlib takes what is between dollars for formulas."""
    return text.replace("$", r"\$")
