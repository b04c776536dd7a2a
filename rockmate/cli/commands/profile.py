"""`rockmate profile`: measured steps beside predicted ones, and beside eager's."""

from __future__ import annotations

import click

from rockmate import plan_files
from rockmate.cli.app import examples
from rockmate.cli.options import Chosen, output_options, plan_argument, target_options
from rockmate.cli.output import DIFFERENT, GOOD, table, tell, tell_json, wants_progress
from rockmate.module import Rockmate
from rockmate.progress import progress_display
from rockmate.queries.profiling import OperationProfile, Profile, StepProfile, profile
from rockmate.units import format_bytes, format_ms


@click.command(
    "profile",
    epilog=examples(
        "rockmate profile plan.json model.py:make --steps 5",
        "rockmate profile plan.json model.py:make --per-op --top 5",
        "rockmate profile plan.json model.py:make --json",
    ),
)
@plan_argument
@target_options
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    metavar="N",
    help="Timed steps, eager and planned by turns.",
)
@click.option("--per-op", is_flag=True, help="Measure every operation anew, beside what the plan was made with.")
@click.option("--top", type=click.IntRange(min=1), metavar="N", help="Of the operations, only the slowest.")
@output_options
def command(
    plan: str,
    chosen: Chosen,
    steps: int,
    per_op: bool,
    top: int | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Measure steps of MODEL under PLAN, a plan file, and eager steps beside them.

    Prints medians of times, and peaks counted to the byte, beside what the plan predicts. The exit status is 1 where
    the measured peak is above the budget.
    """
    plan_file = plan_files.load(plan)
    target = chosen.target()
    with progress_display(wants_progress(quiet)) as progress:
        planned = Rockmate(target.model, target.sample, plan=plan_file, loss=target.loss, progress=progress)
        found = profile(planned, target.sample, loss=target.loss, steps=steps, operations=per_op, progress=progress)
    budget_bytes = planned.plan.budget_bytes
    if as_json:
        tell_json("profile", _content(found, budget_bytes))
    else:
        tell(_text(found, budget_bytes))
        if per_op:
            tell(f"\n{_operations_text(found.operations, top)}")
    return GOOD if found.plan.peak_bytes <= budget_bytes else DIFFERENT


def _text(found: Profile, budget_bytes: int) -> str:
    rows = [_row(one) for one in (found.eager, found.plan) if one is not None]
    headings = ("step", "predicted", "measured", "±", "predicted peak", "measured peak")
    lines = [table(headings, rows)]
    if found.overhead is None:
        lines.append("The eager step does not fit the memory.")
    else:
        lines.append(f"Measured, the plan takes {found.overhead:+.1%} of eager's time.")
    verdict = "within" if found.plan.peak_bytes <= budget_bytes else "above"
    lines.append(f"Its peak is {verdict} the budget, {format_bytes(budget_bytes)}.")
    return "\n".join(lines)


def _row(one: StepProfile) -> tuple[str, ...]:
    return (
        one.label,
        format_ms(one.predicted_ms),
        format_ms(one.median_ms),
        f"{one.spread:.1%}",
        format_bytes(one.predicted_peak_bytes),
        format_bytes(one.peak_bytes),
    )


def _operations_text(operations: tuple[OperationProfile, ...], top: int | None) -> str:
    chosen = sorted(operations, key=lambda op: -op.runs * (op.measured_ms or op.planned_ms))[: top or len(operations)]
    rows = [
        (
            op.name,
            str(op.runs),
            format_ms(op.planned_ms),
            "gone" if op.measured_ms is None else format_ms(op.measured_ms),
            format_bytes(op.planned_bytes),
            "gone" if op.measured_bytes is None else format_bytes(op.measured_bytes),
            op.source,
        )
        for op in chosen
    ]
    headings = ("operation", "runs", "time, plan", "now", "bytes, plan", "now", "source")
    planned_ms = sum(op.runs * op.planned_ms for op in operations)
    measured_ms = sum(op.runs * (op.measured_ms or 0.0) for op in operations)
    more = len(operations) - len(rows)
    rest = f"\n… and {more} more, faster ones (--top)" if more else ""
    sums = f"All operations take {format_ms(planned_ms)} by the plan, and {format_ms(measured_ms)} now."
    return f"{table(headings, rows)}{rest}\n{sums}"


def _content(found: Profile, budget_bytes: int) -> dict[str, object]:
    return {
        "budget_bytes": budget_bytes,
        "overhead": found.overhead,
        "plan": _step_content(found.plan),
        "eager": None if found.eager is None else _step_content(found.eager),
        "operations": found.operations,
    }


def _step_content(one: StepProfile) -> dict[str, object]:
    return {
        "predicted_ms": one.predicted_ms,
        "median_ms": one.median_ms,
        "times_ms": one.times_ms,
        "predicted_peak_bytes": one.predicted_peak_bytes,
        "peak_bytes": one.peak_bytes,
    }
