"""`rockmate peak`: who holds the memory of a script at the highest moment of a step."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import click

from rockmate.cli.app import examples
from rockmate.cli.options import OutputFile, json_option
from rockmate.cli.output import GOOD, note, tell, tell_json
from rockmate.observing.page import page_of
from rockmate.observing.peak_report import PeakReport
from rockmate.units import format_bytes

_SHARE = 0.5  # of a step


@click.command(
    "peak",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog=examples("rockmate peak train.py", "rockmate peak -o peak.html train.py --steps 3"),
)
@click.option("--device", metavar="NAME", help="Where the tensors are. [default: the accelerator, or the CPU]")
@click.option("-o", "--output", type=OutputFile(), help="Write the report as a page.")
@click.option("--plan/--no-plan", default=True, help="Whether to tell what a plan for half of a step costs.")
@json_option
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    device: str | None, output: Path | None, plan: bool, as_json: bool, script: str, arguments: tuple[str, ...]
) -> int:
    """Run SCRIPT, a Python file that trains, as it is, and tell who holds the memory at its highest moment.

    By kind, module, line and operation, to the byte; steps of optimizers are where steps end. What lives on from step
    to step, more each time, is told. Options come before SCRIPT; what comes after it is the script's.
    """
    before, folder = sys.argv, str(Path(script).resolve().parent)
    sys.argv = [script, *arguments]
    sys.path.insert(0, folder)
    try:
        with PeakReport(device, keep_model=plan) as report:
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            note(f"{script} ended with {end.code!r}")
    finally:
        sys.argv = before
        sys.path.remove(folder)
    if output is not None:
        output.write_text(page_of(report, f"Peak of {script}"), encoding="utf-8")
    if as_json:
        tell_json("peak", {"script": script, "file": None if output is None else str(output)} | _content(report, plan))
    else:
        tell(str(report))
        if plan:
            tell(_of_a_plan(report))
        if output is not None:
            tell(f"written to {output}")
    return GOOD


def _of_a_plan(report: PeakReport) -> str:
    """What a plan for half of a step costs, in a line."""
    try:
        found = report.estimate(_SHARE)
    except Exception as error:  # noqa: BLE001  whatever a user's module raises without data
        return f"what a plan costs is not known: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    eager = format_bytes(found.eager.step_peak_bytes)
    if found.planned is None:
        why = found.unplanned or "none was found"
        return f"no plan for half of the {eager} that a step takes above what is there before it: {why}"
    planned = format_bytes(found.planned.budget_bytes)
    return (
        f"with a plan, Rockmate(model, sample, {_SHARE}), a step takes {planned} above what is there before it and not "
        f"{eager}, in about {found.planned.overhead:+.0%} of the time (by shapes alone: rockmate estimate)"
    )


def _content(report: PeakReport, plan: bool) -> dict[str, Any]:
    return {
        "plan": _of_a_plan(report) if plan else None,
        "peak_bytes": report.peak_bytes,
        "kinds": report.kinds,
        "steps": [{"peak_bytes": step.peak_bytes, "end_bytes": step.end_bytes} for step in report.steps],
        "holders": [_holder(holder) for holder in report.holders],
        "growing": [_holder(holder) for holder in report.growing],
    }


def _holder(holder: Any) -> dict[str, Any]:
    operation, line, module, phase = holder.label
    where = {"operation": operation, "line": line, "module": module, "phase": phase}
    return {"kind": holder.kind, "size_bytes": holder.size_bytes, "blocks": holder.blocks, **where}
