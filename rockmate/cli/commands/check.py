"""`rockmate check`: does a plan fit a model, and is training under it exact?"""

from __future__ import annotations

from typing import Any

import click

from rockmate import plan_files
from rockmate.cli.app import examples
from rockmate.cli.commands.verify import verification_content, with_training_options
from rockmate.cli.options import Chosen, json_option, plan_argument, target_options
from rockmate.cli.output import DIFFERENT, GOOD, tell, tell_json
from rockmate.errors import PlanFileMismatch
from rockmate.module import Rockmate
from rockmate.queries.verification import verify


@click.command(
    "check",
    epilog=examples(
        "rockmate check plan.json model.py:make",
        "rockmate check plan.json model.py:make --steps 2 --optimizer adamw --json",
    ),
)
@plan_argument
@target_options
@with_training_options
@json_option
def command(
    plan: str,
    chosen: Chosen,
    as_json: bool,
    **training: Any,
) -> int:
    """Check PLAN, a plan file, against MODEL.

    First the graph of the model on its sample is compared with the plan's. Then copies are trained for a few steps,
    eagerly and under the plan, and outputs, gradients, buffers, the random stream and parameters are compared bit by
    bit. The exit status is 1 where the graph or any bit differs; the differences are printed.
    """
    plan_file = plan_files.load(plan)
    target = chosen.target()
    try:
        planned = Rockmate(target.model, target.sample, plan=plan_file, loss=target.loss)
    except PlanFileMismatch as error:
        if as_json:
            tell_json("check", {"matches": False, "difference": str(error), "exact": False})
        else:
            tell(str(error))
        return DIFFERENT
    found = verify(planned, target.sample, loss=target.loss, **training)
    if as_json:
        tell_json("check", {"matches": True, "difference": None} | verification_content(found))
    else:
        operations = len(plan_file.graph.operations)
        tell(f"the graph is the plan's: {operations} operations of {plan_file.graph.model}\n{found}")
    return GOOD if found.exact else DIFFERENT
