"""What people look at: the table and the figure that compare training under a budget with eager training.

Pure presentation. Importing this module imports rich and matplotlib, so `import rockmate` does not import it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich import box
from rich.table import Table
from rich.text import Text

from rockmate.units import format_bytes, format_ms

Timeline = Sequence[tuple[float, int]]  # (time_ms, bytes) after each change, in order

MIB = 2**20
EAGER_COLOUR = "#b9bec7"
PLAN_COLOUR = "#2563a8"
BUDGET_COLOUR = "#c0392b"
TEXT_COLOUR = "#2b2f36"
HEADINGS = (
    "budget",
    "in bytes",
    "predicted\npeak",
    "measured\npeak",
    "time\n/ eager",
    "gradients\noff by",
    "planned\nin",
)


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One way to train one model. What eager training itself does not have is None."""

    model: str
    budget_fraction: float | None  # of the eager peak; None for eager training itself
    budget_bytes: int | None
    predicted_peak_bytes: int | None
    measured_peak_bytes: int
    time_ratio: float | None  # of a training step's time to eager's
    largest_gradient_difference: float | None  # from eager's, over all parameters
    planning_s: float | None


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Measured memory over one training step under a budget."""

    label: str
    timeline: Timeline
    budget_bytes: int
    predicted_peak_bytes: int


def comparison_table(rows: Sequence[ComparisonRow], title: str | None = None) -> Table:
    """One line per row, models apart; a peak above its budget and a gradient that differs are red."""
    # Fits the 80 columns of a plain terminal or a log file.
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("model", no_wrap=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for index, row in enumerate(rows):
        is_last_of_model = index + 1 == len(rows) or rows[index + 1].model != row.model
        is_first_of_model = index == 0 or rows[index - 1].model != row.model
        table.add_row(
            row.model if is_first_of_model else "",
            "eager" if row.budget_fraction is None else f"{row.budget_fraction:.2f}",
            optional(row.budget_bytes, format_bytes),
            optional(row.predicted_peak_bytes, format_bytes),
            measured_peak(row),
            optional(row.time_ratio, "{:.3f}×".format),
            gradient_difference(row.largest_gradient_difference),
            optional(row.planning_s, lambda seconds: format_ms(1000 * seconds)),
            end_section=is_last_of_model,
        )
    return table


def split_table(parts: Sequence[tuple[str, int]], total_bytes: int) -> Table:
    """One line per part of a budget of training, with its bytes and its share of `total_bytes`; then the sum."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("memory of", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    for index, (name, size_bytes) in enumerate(parts):
        share = f"{size_bytes / total_bytes:.0%}".replace("%", " %")
        table.add_row(name, format_bytes(size_bytes), share, end_section=index + 1 == len(parts))
    table.add_row("budget", format_bytes(total_bytes), "100 %")
    return table


def optional(value: Any, format_value: Callable[[Any], str]) -> str:
    """The formatted value, or a dash where there is none."""
    return "–" if value is None else format_value(value)


def measured_peak(row: ComparisonRow) -> Text:
    """The peak, green within the row's budget and red above it."""
    text = format_bytes(row.measured_peak_bytes)
    if row.budget_bytes is None:
        return Text(text)
    return Text(text, "green" if row.measured_peak_bytes <= row.budget_bytes else "bold red")


def gradient_difference(largest: float | None) -> Text:
    """The largest difference between two gradients, green when it is exactly zero and red when not."""
    if largest is None:
        return Text("–")
    return Text("0", "green") if largest == 0 else Text(f"{largest:.0e}", "bold red")


def draw_memory_figure(
    path_stem: Path | str, title: str, eager_timeline: Timeline, plans: Sequence[MemoryCurve]
) -> tuple[Path, Path]:
    """Writes `<path_stem>.png` and `.pdf`: memory over a step, a panel per plan with eager training behind.

    Returns the two paths; missing folders are made.

    Raises:
        ValueError: no plans.
    """
    if not plans:
        raise ValueError("draw_memory_figure needs at least one plan to draw")
    figure = Figure(figsize=(1.5 + 3.6 * len(plans), 3.9), layout="constrained")
    panels = figure.subplots(1, len(plans), sharex=True, sharey=True, squeeze=False)[0]
    for panel, plan in zip(panels, plans, strict=True):
        draw_panel(panel, eager_timeline, plan)
    longest_ms = max(time_ms for line in (eager_timeline, *(plan.timeline for plan in plans)) for time_ms, _ in line)
    panels[0].set_xlim(0, 1.01 * longest_ms)
    panels[0].set_ylabel("memory above the start of the step (MiB)", color=TEXT_COLOUR)
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold", color=TEXT_COLOUR)
    figure.supxlabel("time in the step (ms)", fontsize=10, color=TEXT_COLOUR)
    handles, labels = panels[0].get_legend_handles_labels()
    panels[-1].legend(handles, labels, loc="upper right", fontsize=8, frameon=False, labelcolor=TEXT_COLOUR)

    png, pdf = (Path(f"{path_stem}.{suffix}") for suffix in ("png", "pdf"))
    png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png, dpi=160)
    figure.savefig(pdf, metadata={"CreationDate": None})  # the same data give the same file
    return png, pdf


def draw_panel(panel: Axes, eager_timeline: Timeline, plan: MemoryCurve) -> None:
    """Eager training in grey, the plan in colour, its budget a dashed line, its predicted peak a mark."""
    eager_ms, eager_mib = axes_of(eager_timeline)
    plan_ms, plan_mib = axes_of(plan.timeline)
    panel.fill_between(eager_ms, eager_mib, step="post", color=EAGER_COLOUR, alpha=0.45, linewidth=0)
    panel.fill_between(plan_ms, plan_mib, step="post", color=PLAN_COLOUR, alpha=0.25, linewidth=0)
    panel.step(eager_ms, eager_mib, where="post", color=EAGER_COLOUR, linewidth=1.0, label="eager")
    panel.step(plan_ms, plan_mib, where="post", color=PLAN_COLOUR, linewidth=1.1, label="under the budget")
    panel.axhline(plan.budget_bytes / MIB, color=BUDGET_COLOUR, linewidth=1.2, linestyle=(0, (5, 3)), label="budget")
    panel.plot(
        plan_ms[plan_mib.index(max(plan_mib))],
        plan.predicted_peak_bytes / MIB,
        marker="D",
        markersize=5,
        markerfacecolor="white",
        markeredgecolor=PLAN_COLOUR,
        linestyle="none",
        label="predicted peak",
    )
    panel.set_title(plan.label, loc="left", fontsize=10, color=TEXT_COLOUR)
    panel.set_ylim(bottom=0, top=1.12 * max([plan.budget_bytes / MIB, *eager_mib, *plan_mib]))
    panel.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(colors=TEXT_COLOUR, labelsize=9)
    panel.grid(axis="y", color="#e4e6ea", linewidth=0.6)
    panel.set_axisbelow(True)


def scaled_to(timeline: Timeline, duration_ms: float) -> Timeline:
    """The same levels with times stretched so that the last is `duration_ms`: profiled steps run slower."""
    if not timeline or timeline[-1][0] <= 0:
        return timeline
    factor = duration_ms / timeline[-1][0]
    return tuple((factor * time_ms, level) for time_ms, level in timeline)


def axes_of(timeline: Timeline) -> tuple[list[float], list[float]]:
    """(times in ms, levels in MiB), starting from zero at time zero."""
    return [0.0, *(time_ms for time_ms, _ in timeline)], [0.0, *(level / MIB for _, level in timeline)]
