"""What people look at: reports of a plan, made of its plan file, and comparisons of training under budgets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rockmate.errors import ArgumentError
from rockmate.plan_files.content import PlanFile
from rockmate.reports.figure import SUFFIXES, write_figure
from rockmate.reports.html import write_html
from rockmate.reports.measured import MeasuredStep, MeasuredSteps
from rockmate.reports.observed import measured_operations, observe
from rockmate.reports.pareto import ParetoPoint, pareto_points
from rockmate.reports.text import text_report

__all__ = [
    "MeasuredStep",
    "MeasuredSteps",
    "ParetoPoint",
    "measured_operations",
    "observe",
    "pareto_points",
    "text_report",
    "write_figure",
    "write_html",
    "write_report",
]

PAGES = (".html", ".htm")


def write_report(
    plan_file: PlanFile,
    path: str | os.PathLike[str] | None = None,
    measured: MeasuredSteps | None = None,
    sweep: Sequence[ParetoPoint] | None = None,
) -> str | Path:
    """The report of a plan: text where `path` is None, else a page or a figure, as the name of the file ends.

    Returns the text, or the path of the file. Other arguments are as for `write_html`.

    Raises:
        ArgumentError: the name ends in nothing that a report can be.
    """
    if path is None:
        return text_report(plan_file, measured=measured)
    suffix = Path(path).suffix.lower()
    if suffix in PAGES:
        return write_html(plan_file, path, measured, sweep)
    if suffix in SUFFIXES:
        return write_figure(plan_file, path, measured, sweep)
    known = ", ".join((".html", *SUFFIXES))
    raise ArgumentError(f"a report is written to a file whose name ends in {known}, not to {Path(path).name!r}")
