"""A plan as one page of HTML: everything in one file, for any browser, without a network."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from rockmate.plan_files.content import PlanFile
from rockmate.reports import words
from rockmate.reports.explain import explain
from rockmate.reports.explanation import Explanation
from rockmate.reports.measured import MeasuredSteps
from rockmate.reports.pareto import ParetoPoint, pareto_points
from rockmate.reports.payload import as_script, payload
from rockmate.reports.step import computations
from rockmate.units import format_bytes, format_ms

_SCRIPTS = ("formats.js", "chart.js", "scatter.js", "tables.js", "page.js")


def write_html(
    plan_file: PlanFile,
    path: str | os.PathLike[str],
    measured: MeasuredSteps | None = None,
    sweep: Sequence[ParetoPoint] | None = None,
) -> Path:
    """Write the report of a plan to `path`, one HTML file that needs nothing else; returns the path.

    `measured` shows real steps beside the predicted one (`observe` makes it). `sweep` are the points of memory against
    time, in place of those that `pareto_points` finds within seconds. The same arguments give the same bytes. Missing
    folders are made. Raises `OSError` where the file cannot be written.
    """
    path = Path(path)
    text = html_report(plan_file, measured, sweep)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    return path


def html_report(
    plan_file: PlanFile, measured: MeasuredSteps | None = None, sweep: Sequence[ParetoPoint] | None = None
) -> str:
    """The text of the page that `write_html` writes."""
    import jinja2

    explanation = explain(plan_file)
    steps = computations(plan_file, explanation)
    points = pareto_points(plan_file) if sweep is None else sweep
    script = "\n".join(_asset(name) for name in _SCRIPTS)
    style = _asset("report.css")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"bytes": format_bytes, "ms": format_ms, "percent": words.percent}
    return environment.from_string(_asset("report.html.jinja")).render(
        **_texts(plan_file, explanation, measured),
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
        data=as_script(payload(plan_file, explanation, steps, measured, points)),
    )


def _texts(plan_file: PlanFile, explanation: Explanation, measured: MeasuredSteps | None) -> dict[str, Any]:
    """What stands in the page before its script runs."""
    return {
        "file": plan_file,
        "promise": plan_file.promise,
        "plan": plan_file.plan,
        "headline": words.headline(plan_file),
        "facts": words.facts(plan_file, measured),
        "origin": words.origin(plan_file),
        "memory_bars": words.memory_bars(plan_file, measured),
        "time_bar": words.time_bar(plan_file),
        "story": words.story(plan_file, explanation),
        "peak": explanation.peak,
        "peak_op": words.told(explanation.peak.op, plan_file.problem),
        "binding_op": words.told(explanation.binding_op, plan_file.problem),
        "explanation": explanation,
        "measured": measured,
    }


def _asset(name: str) -> str:
    return resources.files("rockmate.reports").joinpath("assets", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """By which the page's policy knows its own script and style, and lets nothing else run."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
