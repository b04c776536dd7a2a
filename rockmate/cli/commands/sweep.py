"""`rockmate sweep`: memory against time, over budgets and solvers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from rk_solvers import SOLVERS, Limits
from rockmate.cli.app import examples
from rockmate.cli.options import Chosen, OutputFile, compile_option, offload_options, output_options, target_options
from rockmate.cli.output import DIFFERENT, GOOD, finite, table, tell, tell_json, wants_progress
from rockmate.errors import BudgetError
from rockmate.memory.budget import read_budget
from rockmate.queries.sweep import DEFAULT_TIME_LIMIT_S, OURS, Sweep, SweepRow, sweep
from rockmate.units import format_bytes, format_ms

FIGURES = (".png", ".pdf", ".svg", ".html")


class BudgetRange(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # older releases take none
    """A range ("0.3..1.0", "1GiB..4GiB"), or budgets with commas between them."""

    name = "budgets"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Any:
        """A pair of ends, or a list of budgets; a fraction is a float."""
        if not isinstance(value, str):
            return value
        parts = re.split(r"\.\.(?!\.)", value)
        try:
            if len(parts) == 2:
                low, high = map(_budget, parts)
                if type(low) is not type(high) or not low < high:
                    self.fail(
                        f"{value!r} is no range: give two parts of the eager peak, or two sizes, the smaller first"
                    )
                return (low, high)
            return [_budget(part) for part in value.split(",")]
        except ValueError as error:
            self.fail(str(error), param, context)


def _budget(text: str) -> int | float:
    budget = read_budget(text)
    if not isinstance(budget, int | float):
        raise BudgetError(f"{text!r} is no budget to sweep over: give parts of the eager peak, or sizes")
    return budget


def spread(budgets: Any, steps: int) -> list[int | float]:
    """The budgets that a range stands for, `steps` of them at equal distances; a list as it is."""
    if isinstance(budgets, list):
        return budgets
    low, high = budgets
    found = [low + (high - low) * step / max(1, steps - 1) for step in range(steps)] if steps > 1 else [high]
    return found if isinstance(low, float) else [round(one) for one in found]


@click.command(
    "sweep",
    epilog=examples(
        "rockmate sweep model.py:make --budgets 0.4..1.0 --steps 4 --time-limit 1",
        "rockmate sweep model.py:make --budgets 0.5,0.8 --solvers auto,greedy,rotor --figure sweep.html",
        "rockmate sweep model.py:make --budgets 0.6,1.0 --solvers greedy,chen -o sweep.json --json",
    ),
)
@target_options
@click.option(
    "--budgets",
    type=BudgetRange(),
    default="0.3..1.0",
    show_default=True,
    help="Parts of the eager peak or sizes: a range, or several with commas between them.",
)
@click.option(
    "--steps", type=click.IntRange(min=1), default=8, show_default=True, metavar="K", help="Budgets of a range."
)
@click.option(
    "--solvers", metavar="NAMES", help=f"With commas between them, of {', '.join(sorted(SOLVERS))} (default: all)."
)
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0),
    default=DEFAULT_TIME_LIMIT_S,
    show_default=True,
    metavar="SECONDS",
    help="For each solver and budget.",
)
@click.option(
    "--gap",
    type=click.FloatRange(min=0, max=1, max_open=True),
    default=Limits().gap,
    show_default=True,
    help="A search ends once no plan is faster by more than this share of the time.",
)
@offload_options
@compile_option
@click.option("-o", "--output", type=OutputFile(), help="Write all rows as JSON.")
@click.option("--figure", type=OutputFile(), help="Draw it: .png, .pdf, .svg or .html.")
@output_options
def command(
    chosen: Chosen,
    output: Path | None,
    figure: Path | None,
    as_json: bool,
    quiet: bool,
    **asked: Any,
) -> int:
    """Plan MODEL for several budgets by every solver, and compare memory and time.

    The model is measured once. The plans of "auto", which is what Rockmate does, are run, and their peaks measured;
    those of the other solvers are predictions on the same measurements. With --offload, those of "auto" may also move
    data; with --compile, they have compiled parts where they are faster so. The exit status is 1 where no budget fits.
    """
    if figure is not None and figure.suffix.lower() not in FIGURES:
        raise click.UsageError(f"{figure.name} is no figure: end it in {', '.join(FIGURES)}")
    names = None if asked["solvers"] is None else [name.strip() for name in asked["solvers"].split(",")]
    unknown = [name for name in names or () if name not in SOLVERS]
    if unknown:
        raise click.UsageError(f"there is no solver {unknown[0]!r}; there are {', '.join(sorted(SOLVERS))}")
    target = chosen.target()
    found = sweep(
        target.model,
        target.sample,
        spread(asked["budgets"], asked["steps"]),
        loss=target.loss,
        solvers=names,
        time_limit=asked["time_limit"],
        gap=asked["gap"],
        offload=asked["offload"],
        compile=asked["compile"],
        progress=wants_progress(quiet),
    )
    content = {"model": chosen.name} | _content(found)
    if output is not None:
        output.write_text(json.dumps(finite(msgspec.to_builtins(content)), indent=1, allow_nan=False) + "\n")
    if figure is not None:
        # Here, so that the help does not load matplotlib.
        from rockmate.cli.sweep_figure import draw_sweep

        draw_sweep(found, figure, chosen.name)
    if as_json:
        tell_json("sweep", content)
    else:
        tell(sweep_text(found))
        for path in (output, figure):
            if path is not None:
                tell(f"written to {path}")
    return GOOD if any(row.fits for row in found.rows) else DIFFERENT


def sweep_text(found: Sweep) -> str:
    """One table: a line for each budget, a column for each solver; then what is the smallest."""
    rows = [
        (
            format_bytes(budget_bytes),
            f"{budget_bytes / found.eager_peak_bytes:.0%}",
            *(_cell(found.row(solver, budget_bytes)) for solver in found.solvers),
        )
        for budget_bytes in found.budgets
    ]
    lines = [
        f"Time of a step relative to no recomputation ({format_ms(found.keep_all_ms)}), by budget and solver; "
        f"– does not fit.",
        "",
        table(("budget", "of eager", *found.solvers), rows, left=0),
        "",
    ]
    ours = [row for row in found.rows if row.solver == OURS and row.fits]
    if ours:
        short = max(0.0, *((row.measured_peak_bytes or 0) / row.budget_bytes for row in ours))
        lines.append(f"Real steps of {OURS} took at most {short:.1%} of their budgets; the others are predictions.")
    smallest, proven = found.smallest_bytes, found.proven_bytes
    proof = "proven: none takes less" if proven >= 0.999 * smallest else f"none takes less than {format_bytes(proven)}"
    share = smallest / found.eager_peak_bytes
    lines.append(f"The smallest budget found is {format_bytes(smallest)}, {share:.1%} of eager's peak; {proof}.")
    lines += [f"{name} was left out: {reason}" for name, reason in found.left_out]
    return "\n".join(lines)


def _cell(row: SweepRow) -> str:
    return f"{row.slowdown:.3f}×" if row.fits else "–"


def _content(found: Sweep) -> dict[str, Any]:
    rows: Sequence[SweepRow] = found.rows
    return {
        "eager_peak_bytes": found.eager_peak_bytes,
        "keep_all_ms": found.keep_all_ms,
        "smallest_bytes": found.smallest_bytes,
        "proven_bytes": found.proven_bytes,
        "rows": rows,
        "left_out": [{"solver": name, "reason": reason} for name, reason in found.left_out],
    }
