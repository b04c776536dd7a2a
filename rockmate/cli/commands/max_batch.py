"""`rockmate max-batch`: the largest batch for a budget, or the smallest budget for a slowdown."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from rockmate import plan_files
from rockmate.cli.app import examples
from rockmate.cli.options import (
    BudgetText,
    Chosen,
    OutputFile,
    compile_option,
    offload_options,
    output_options,
    solver_options,
    target_options,
)
from rockmate.cli.output import GOOD, counted, table, tell, tell_json, wants_progress
from rockmate.cli.plans import plan_content, plan_table
from rockmate.cli.targets import Source
from rockmate.memory.budget import Budget
from rockmate.queries.batch_search import LargestBatch, Trial
from rockmate.queries.max_batch import max_batch
from rockmate.queries.min_budget import CheapestBudget, smallest_budget
from rockmate.queries.verification import OPTIMIZERS
from rockmate.units import format_bytes


@click.command(
    "max-batch",
    epilog=examples(
        "rockmate max-batch model.py:make --budget 200KiB --solver greedy --time-limit 2",
        "rockmate max-batch model.py:Net --sample 'float32[N,32]' --budget 100KB --time-limit 2 --json",
        "rockmate max-batch model.py:make --slowdown 1.1 --time-limit 2 -o plan.json",
    ),
)
@target_options
@click.option(
    "--budget", type=BudgetText(), metavar="SIZE", help="Bytes, a size (2GiB), or auto: the memory that is free now."
)
@click.option(
    "--slowdown",
    type=click.FloatRange(min=1),
    metavar="FACTOR",
    help="Find the smallest budget whose plan takes at most so many times as long: 1.1 for 10 % more.",
)
@click.option(
    "--most", type=click.IntRange(min=1), default=1 << 20, show_default=True, metavar="N", help="No larger batch."
)
@click.option("--multiple-of", type=click.IntRange(min=1), default=1, metavar="N", help="Only multiples of N.")
@click.option(
    "--measurements",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    metavar="N",
    help="So many batches are measured at most, once one fits.",
)
@click.option(
    "--scope", type=click.Choice(["step", "total"]), default="step", show_default=True, help="What the budget bounds."
)
@click.option("--optimizer", type=click.Choice(list(OPTIMIZERS)), help="Under --scope total, whose state counts.")
@solver_options
@offload_options
@compile_option
@click.option("-o", "--output", type=OutputFile(), help="Write the plan of the answer to a file.")
@output_options
def command(chosen: Chosen, output: Path | None, as_json: bool, quiet: bool, **asked: Any) -> int:
    """Find the largest batch of MODEL that can be trained within --budget, or the smallest budget for --slowdown.

    For a budget, the batch is varied where MODEL says how: a name of the zoo, a factory with a parameter `batch`, or a
    --sample with N. Else the dimension of the sample along which the model repeats its outputs is found by trial.
    --batch is where the search begins. Batches are measured and planned until one fits, and the next larger one does
    not, or --measurements were made. The exit status is 1 where no batch fits.

    For a slowdown, the model is measured once, and budgets are solved. Times are predicted.

    With --offload, plans may also move data; with --compile, they have compiled parts where that is better.
    """
    budget, slowdown, most = (asked.pop(name) for name in ("budget", "slowdown", "most"))
    scope, optimizer = asked.pop("scope"), asked.pop("optimizer")
    multiple, measurements = asked.pop("multiple_of"), asked.pop("measurements")
    if (budget is None) == (slowdown is None):
        raise click.UsageError("give --budget for the largest batch, or --slowdown for the smallest budget")
    asked["progress"] = wants_progress(quiet)
    found: LargestBatch | CheapestBudget
    if slowdown is None:
        made = None if optimizer is None else partial(OPTIMIZERS[optimizer], lr=1e-3)  # states do not depend on it
        bounds = {"most": most, "measurements": measurements}
        if multiple > 1:
            bounds["among"] = range(multiple, most + 1, multiple)
        found = _largest(chosen, budget, scope=scope, optimizer=made, **bounds, **asked)
    else:
        target = chosen.target()
        found = smallest_budget(target.model, target.sample, slowdown, loss=target.loss, **asked)
    if output is not None:
        plan_files.save(found.plan_file, output)
    if as_json:
        content = _batch_content(found) if isinstance(found, LargestBatch) else _budget_content(found)
        file = None if output is None else str(output)
        tell_json("max-batch", {"model": chosen.name, "file": file} | content)
    else:
        tried, answer = _batch_text(found) if isinstance(found, LargestBatch) else _budget_text(found)
        written = [] if output is None else [("written to", str(output))]
        tell(f"{tried}\n\n{plan_table(found.plan_file.plan, answer, written)}")
    return GOOD


def _largest(chosen: Chosen, budget: Budget, **options: Any) -> LargestBatch:
    source = chosen.source()
    if source.takes_batch:
        return max_batch(partial(_made, source), None, budget, start=chosen.batch, **options)
    target = source.target()
    return max_batch(target.model, target.sample, budget, loss=target.loss, start=chosen.batch, **options)


def _made(source: Source, batch: int) -> tuple[Any, Any, Any]:
    target = source.target(batch)
    return target.model, target.sample, target.loss


# ---- text and content ------------------------------------------------------------------------------------


def _batch_text(found: LargestBatch) -> tuple[str, list[tuple[str, str]]]:
    """A table of what was tried, and rows of the answer."""
    rows = [(str(trial.batch), _verdict(trial), f"{trial.took_s:.1f} s") for trial in found.trials]
    tried = table(("batch", "", "took"), rows, left=2)
    answer = [("largest batch", f"{found.batch}{'' if found.is_largest else f', {found.ended}'}")]
    if found.eager_batch is not None:
        answer.append(("without a plan", f"about {found.eager_batch}, by interpolation"))
    answer.append(("batch varied", found.found))
    return tried, answer


def _verdict(trial: Trial) -> str:
    if trial.plan is None:
        return f"does not fit: {trial.why}"
    peak_bytes = trial.plan.measured_peak_bytes or trial.plan.peak_bytes
    return f"fits: measured {format_bytes(peak_bytes)}, {trial.plan.overhead:+.1%} time"


def _budget_text(found: CheapestBudget) -> tuple[str, list[tuple[str, str]]]:
    """As `_batch_text`."""
    rows = [
        (
            format_bytes(attempt.budget_bytes),
            format_bytes(attempt.peak_bytes),
            f"{attempt.slowdown:.3f}×",
            "yes" if attempt.fits else "no",
            "yes" if attempt.is_fast_enough else "no",
        )
        for attempt in found.attempts
    ]
    tried = table(("budget", "peak found", "time", "fits", f"within {found.asked_slowdown:g}×"), rows, left=0)
    answer = [
        ("smallest budget", f"{format_bytes(found.budget_bytes)}, {counted(found.budget_bytes, 'byte')}"),
        ("slowdown", f"{found.slowdown:.3f}×, predicted"),
    ]
    return tried, answer


def _batch_content(found: LargestBatch) -> dict[str, Any]:
    return {
        "batch": found.batch,
        "is_largest": found.is_largest,
        "ended": found.ended,
        "eager_batch": found.eager_batch,
        "budget_bytes": found.budget_bytes,
        "found": found.found,
        "trials": [
            {
                "batch": trial.batch,
                "fits": trial.fits,
                "why": trial.why,
                "eager_peak_bytes": trial.eager_peak_bytes,
                "took_s": trial.took_s,
            }
            for trial in found.trials
        ],
        "plan": plan_content(found.plan_file.plan),
    }


def _budget_content(found: CheapestBudget) -> dict[str, Any]:
    return {
        "budget_bytes": found.budget_bytes,
        "asked_slowdown": found.asked_slowdown,
        "slowdown": found.slowdown,
        "eager_peak_bytes": found.eager_peak_bytes,
        "attempts": found.attempts,
        "plan": plan_content(found.plan_file.plan),
    }
