"""A sweep as a figure: memory against time, a line for each solver."""

from __future__ import annotations

import html
import io
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from rockmate.queries.sweep import OURS, Sweep
from rockmate.reports.figure import plain, tidy
from rockmate.units import format_bytes

MIB = 2**20
_MARKERS = "osD^vPX<>ph"
_COLOURS = (
    "#8b95a1",
    "#3f8fcb",
    "#e8a317",
    "#1fa37c",
    "#8a63c9",
    "#b5651d",
    "#5d6d7e",
    "#d187b9",
    "#7f8c1f",
    "#48b0b0",
)
_OURS_COLOUR = "#c0392b"
_SLOWEST = 2.0  # times that of keep-all: what is slower is told, not drawn


def draw_sweep(found: Sweep, path: Path, model: str) -> None:
    """Write a figure of `found` to `path`, in the format that its name ends in; HTML holds the table, too.

    Raises `OSError` where it cannot be written.
    """
    if path.suffix.lower() == ".html":
        path.write_text(_page(found, model), encoding="utf-8")
        return
    with matplotlib.rc_context({"svg.hashsalt": "rockmate", "font.size": 9}):
        metadata = {"CreationDate": None} if path.suffix.lower() == ".pdf" else None
        sweep_figure(found, model).savefig(path, dpi=160, metadata=metadata)


def sweep_figure(found: Sweep, model: str) -> Figure:
    """Peak of each plan that fits against its time."""
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    panel = figure.add_subplot()
    others = [solver for solver in found.solvers if solver != OURS]
    for index, solver in enumerate([*others, *([OURS] if OURS in found.solvers else [])]):
        points = sorted(
            {(row.peak_bytes / MIB, row.slowdown) for row in found.rows if row.solver == solver and row.fits}
        )
        drawn = [point for point in points if point[1] <= _SLOWEST]
        label = plain(solver)
        if not drawn:
            label += " (nothing fits)" if not points else f" ({min(slow for _, slow in points):.1f}× the time)"
        ours = solver == OURS
        panel.plot(
            [mib for mib, _ in drawn],
            [100 * (slow - 1) for _, slow in drawn],
            marker="*" if ours else _MARKERS[index % len(_MARKERS)],
            markersize=10 if ours else 4.5,
            linewidth=1.6 if ours else 0.9,
            color=_OURS_COLOUR if ours else _COLOURS[index % len(_COLOURS)],
            label=label,
        )
    panel.axvline(
        found.eager_peak_bytes / MIB, color="#8b95a1", linewidth=1.0, linestyle=(0, (1, 2)), label="eager's peak"
    )
    panel.axvspan(0, found.proven_bytes / MIB, color="#f3d9d6", alpha=0.6, linewidth=0, label="proven impossible")
    panel.set_xlim(left=0)
    panel.set_ylim(bottom=-1)
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value * MIB) if value else "0"))
    panel.xaxis.set_major_locator(MaxNLocator(7))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+g} %" if value else "0"))
    panel.set_xlabel("predicted peak of the step")
    panel.set_ylabel("time more than without recomputation")
    panel.set_title(f"{plain(model)}: memory against time", loc="left", fontsize=10)
    figure.legend(loc="outside lower center", frameon=False, fontsize=8, ncols=5)
    tidy(panel)
    return figure


def _page(found: Sweep, model: str) -> str:
    """One page that needs no other file and no network."""
    picture = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "rockmate", "svg.fonttype": "path", "font.size": 9}):
        sweep_figure(found, model).savefig(picture, format="svg", metadata={"Date": None})
    svg = picture.getvalue()[picture.getvalue().index("<svg") :]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("budget", "of eager", *found.solvers))
    body = "\n".join(
        f"<tr><th>{format_bytes(budget)}</th><td>{budget / found.eager_peak_bytes:.0%}</td>"
        + "".join(_cell(found, solver, budget) for solver in found.solvers)
        + "</tr>"
        for budget in found.budgets
    )
    title = html.escape(f"{model}: memory against time")
    style = (
        "body{font-family:system-ui,sans-serif;margin:2em auto;max-width:60em;color:#2b2f36}"
        "svg{max-width:100%;height:auto}"
        "table{border-collapse:collapse;font-size:.9em}td,th{padding:.25em .6em;text-align:right;"
        "border-bottom:1px solid #e4e6ea}.over{color:#8b95a1}"
    )
    told = (
        f"The smallest budget found is {format_bytes(found.smallest_bytes)}; no plan takes less than "
        f"{format_bytes(found.proven_bytes)}. Times are relative to the step without recomputation. Plans of {OURS} "
        "hold their budgets in real steps; those of the others are predictions."
    )
    left_out = "".join(f"<p>{html.escape(name)} was left out: {html.escape(why)}</p>" for name, why in found.left_out)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f"<style>{style}</style>\n</head>\n<body>\n<h1>{title}</h1>\n{svg}\n<table>\n<tr>{head}</tr>\n{body}\n</table>\n"
        f"<p>{told}</p>\n{left_out}\n</body>\n</html>\n"
    )


def _cell(found: Sweep, solver: str, budget_bytes: int) -> str:
    row = found.row(solver, budget_bytes)
    if not row.fits:
        return f'<td class="over" title="lowest peak found: {format_bytes(row.peak_bytes)}">does not fit</td>'
    measured = "" if row.measured_peak_bytes is None else f", measured {format_bytes(row.measured_peak_bytes)}"
    return f'<td title="peak {format_bytes(row.peak_bytes)}{measured}">{row.slowdown:.3f}×</td>'
