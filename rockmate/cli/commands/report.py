"""`rockmate report`: a plan as a page, a figure or text, for people."""

from __future__ import annotations

from pathlib import Path

import click

from rkgb import RockmateError
from rockmate import plan_files
from rockmate.cli.app import examples
from rockmate.cli.options import OutputFile, plan_argument, quiet_option, threads_option
from rockmate.cli.output import GOOD, tell, wants_progress
from rockmate.cli.targets import TargetError, find_source
from rockmate.module import Rockmate


@click.command(
    "report",
    epilog=examples(
        "rockmate report plan.json -o report.html",
        "rockmate report plan.json",
        "rockmate report plan.json --measured model.py:make -o report.pdf",
    ),
)
@plan_argument
@click.option(
    "--measured",
    "model",
    metavar="MODEL",
    help="Run real steps of this model, planned and eager, and show them beside what is predicted.",
)
@threads_option
@click.option(
    "-o",
    "--output",
    type=OutputFile(),
    help="A page (.html) or a figure (.png, .pdf, .svg); without it, text is printed.",
)
@quiet_option
def command(plan: str, model: str | None, output: Path | None, quiet: bool) -> int:
    """Show PLAN, a plan file: memory over the step, operations in lanes, tensors with reasons, memory against time.

    A page is one file that needs no other and no network.
    """
    # Here, so that the help loads neither rich nor matplotlib.
    from rockmate.reports import write_report

    plan_file = plan_files.load(plan)
    try:
        if model is None:
            written = write_report(plan_file, output)
        else:
            target = find_source(model).target()
            planned = Rockmate(
                target.model, target.sample, plan=plan_file, loss=target.loss, progress=wants_progress(quiet)
            )
            written = planned.report(output, sample=target.sample)
    except ValueError as error:
        if isinstance(error, RockmateError):
            raise
        raise TargetError(str(error)) from None  # of the file's name
    tell(str(written).rstrip("\n") if output is None else f"written to {written}")
    return GOOD
