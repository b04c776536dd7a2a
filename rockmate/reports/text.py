"""A plan as text for terminals: the promise, a small plot of the memory, the largest tensors at the peak."""

from __future__ import annotations

import io
import shutil
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rockmate.plan_files.content import PlanFile
from rockmate.reports import words
from rockmate.reports.explain import explain
from rockmate.reports.measured import MeasuredSteps
from rockmate.reports.step import Computation, computations, keep_all_simulation, link_uses
from rockmate.units import format_bytes, format_ms

LEAST_WIDTH = 40  # narrower terminals break the lines
MOST_WIDTH = 110
_ROWS = 10  # of the plot
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_SHADES = "·░▒▓█"  # of a column, by the part of its time that a lane is busy
_LANES = ("forward", "recompute", "backward")
_LARGEST = 8


class Report(str):
    """Text that shows itself as it is where an interactive session displays it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def text_report(plan_file: PlanFile, width: int | None = None, measured: MeasuredSteps | None = None) -> Report:
    """The report of a plan in plain text, without colours, `width` columns wide: those of the terminal where None.

    `measured` adds what `observe` saw.
    """
    asked = shutil.get_terminal_size((80, 24)).columns if width is None else width
    width = max(LEAST_WIDTH, min(MOST_WIDTH, asked))
    stream = io.StringIO()
    console = Console(
        file=stream,
        width=width,
        force_terminal=False,
        force_jupyter=False,  # in a notebook, rich would show what it prints instead of writing it to the stream
        no_color=True,
        highlight=False,
        markup=False,
    )
    explanation = explain(plan_file)
    steps = computations(plan_file, explanation)
    console.print(Text(plan_file.graph.model, "bold"))
    console.print(words.headline(plan_file))
    console.print(" · ".join(fact.value for fact in words.origin(plan_file)))
    console.print()
    console.print(_facts(plan_file, measured, width))
    console.print()
    console.print(plot(plan_file, steps, width))
    problem, peak = plan_file.problem, explanation.peak
    console.print(_largest(words.largest_at_peak(explanation, problem, _LARGEST), peak.peak_bytes))
    place = f", {peak.source}" if peak.source else ""
    console.print(
        f"The peak is at {words.told(peak.op, problem)}{place}. No budget below "
        f"{format_bytes(explanation.binding_bytes)} can be met: so much "
        f"{words.told(explanation.binding_op, problem)} holds at once."
    )
    return Report("\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n")


def _facts(plan_file: PlanFile, measured: MeasuredSteps | None, width: int) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, collapse_padding=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    marks = {"good": "✓ ", "bad": "✗ "}
    for fact in words.facts(plan_file, measured):
        beside = marks.get(fact.verdict, "") + fact.beside
        table.add_row(fact.name, fact.value, beside if width > LEAST_WIDTH + 12 or fact.verdict == "bad" else "")
    return table


def _largest(rows: Sequence[tuple[str, int, str]], peak_bytes: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("at the peak", overflow="fold")
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("is", overflow="fold")
    for name, size_bytes, decision in rows:
        table.add_row(name, format_bytes(size_bytes), words.percent(size_bytes / max(1, peak_bytes), 1), decision)
    return table


# ---- the plot ----------------------------------------------------------------------------------------


def plot(plan_file: PlanFile, steps: Sequence[Computation], width: int) -> str:
    """Memory over the step in blocks, dots for the step that keeps everything, dashes for the budget; lanes below."""
    budget_bytes = plan_file.promise.budget_bytes
    keep_all = keep_all_simulation(plan_file.problem)
    most = words.most_shown(budget_bytes, [keep_all.peak_bytes, *(step.peak_bytes for step in steps)])
    margin = max(len(format_bytes(most)), *map(len, _LANES)) + 1
    columns = max(8, width - margin - 1)
    last_ms = max(steps[-1].end_ms, 1e-9)
    spans = [_columns_of(step.start_ms, step.end_ms, last_ms, columns) for step in steps]
    plan = _highest([step.peak_bytes for step in steps], spans, columns)
    eager_spans = [_columns_of(one.start_ms, one.end_ms, last_ms, columns) for one in keep_all.moments]
    eager = _highest([one.peak_bytes for one in keep_all.moments], eager_spans, columns)
    lines = []
    for row in reversed(range(_ROWS)):
        low, high = most * row / _ROWS, most * (row + 1) / _ROWS
        cells = [_cell(plan[at], eager[at], budget_bytes, low, high) for at in range(columns)]
        label = format_bytes(most) if row == _ROWS - 1 else ("0 B" if row == 0 else "")
        if low < budget_bytes <= high:
            label = format_bytes(budget_bytes)
        lines.append(f"{label:>{margin}} {''.join(cells)}")
    for lane in _LANES:
        times = [(step.start_ms, step.end_ms) for step in steps if step.lane == lane]
        shades = _shares(times, last_ms, columns)
        lines.append(f"{lane:>{margin}} " + "".join(_SHADES[-int(-4 * share // 1)] for share in shades))
    for lane, is_out in (("out", True), ("back", False)) if plan_file.promise.memory is not None else ():
        uses = [(use.start_ms, use.end_ms) for use in link_uses(plan_file) if use.is_out == is_out]
        shades = _shares(uses, last_ms, columns)
        lines.append(f"{lane:>{margin}} " + "".join(_SHADES[-int(-4 * share // 1)] for share in shades))
    end = format_ms(last_ms)
    lines.append(f"{'':>{margin}} 0{end:>{columns - 1}}")
    budget = "  ╌ budget" if budget_bytes <= most else ""
    lines.append(f"{'':>{margin}} █ plan  ░ keep all{budget}")
    return "\n".join(lines)


def _columns_of(start_ms: float, end_ms: float, last_ms: float, columns: int) -> range:
    """The columns that an operation touches; one at least."""
    first = min(columns - 1, int(columns * start_ms / last_ms))
    last = min(columns, -int(-columns * end_ms // last_ms))
    return range(first, max(last, first + 1))


def _highest(levels: Sequence[int], spans: Sequence[range], columns: int) -> list[int]:
    found = [0] * columns
    for level, span in zip(levels, spans, strict=True):
        for at in span:
            found[at] = max(found[at], level)
    return found


def _shares(times: Sequence[tuple[float, float]], last_ms: float, columns: int) -> list[float]:
    """Of each column, the part that is covered by `times`, which do not overlap."""
    width_ms = last_ms / columns
    found = [0.0] * columns
    for start_ms, end_ms in times:
        for at in _columns_of(start_ms, end_ms, last_ms, columns):
            covered_ms = min(end_ms, (at + 1) * width_ms) - max(start_ms, at * width_ms)
            found[at] += max(0.0, covered_ms) / width_ms
    return [min(1.0, round(share, 6)) for share in found]


def _cell(plan: int, eager: int, budget: int, low: float, high: float) -> str:
    filled = round(8 * (plan - low) / (high - low))
    if filled > 0:
        return _EIGHTHS[min(8, filled)]
    if low < budget <= high:
        return "╌"
    return "░" if eager > (low + high) / 2 else " "
