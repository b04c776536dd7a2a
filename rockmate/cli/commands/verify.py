"""`rockmate verify`: training under a budget compared with eager training."""

from __future__ import annotations

from typing import Any

import click

from rockmate.cli.app import examples
from rockmate.cli.options import (
    BudgetText,
    Chosen,
    compile_option,
    json_option,
    kernels_option,
    layout_option,
    offload_options,
    target_options,
)
from rockmate.cli.output import DIFFERENT, GOOD, tell, tell_json
from rockmate.cli.plans import plan_content
from rockmate.kernels.option import Kernels
from rockmate.layouts.option import Layout
from rockmate.offload.option import Offload
from rockmate.options import PlanOptions
from rockmate.queries.verification import OPTIMIZERS, Verification, verify

training_options = (
    click.option(
        "--steps",
        type=click.IntRange(min=1),
        default=3,
        show_default=True,
        metavar="N",
        help="Training steps to compare.",
    ),
    click.option(
        "--optimizer", type=click.Choice(list(OPTIMIZERS)), default="sgd", show_default=True, help="What updates."
    ),
    click.option("--learning-rate", type=float, default=1e-2, show_default=True, metavar="RATE", help="Of that."),
)


def with_training_options(function: Any) -> Any:
    """A command that also takes how training is done."""
    for option in reversed(training_options):
        function = option(function)
    return function


@click.command(
    "verify",
    epilog=examples(
        "rockmate verify mixer-tiny --budget 0.9",
        "rockmate verify model.py:make --budget 0.9 --steps 2 --optimizer adamw",
    ),
)
@target_options
@click.option(
    "--budget",
    type=BudgetText(),
    default=0.6,
    show_default=True,
    help="Part of the eager peak, bytes, or a size: 2GiB.",
)
@with_training_options
@offload_options
@layout_option
@kernels_option
@compile_option
@json_option
def command(
    chosen: Chosen,
    as_json: bool,
    offload: Offload | None,
    layout: Layout,
    kernels: Kernels,
    compile: bool,
    **training: Any,
) -> int:
    """Compare training under a budget with eager training, bit by bit.

    Copies of the model are trained for a few steps, eagerly twice and under a plan. Compared are outputs, gradients,
    buffers, the random stream, and the parameters in the end. The exit status is 0 where they are equal, 1 where they
    are not, and 2 where the input is wrong or cannot be planned.
    """
    target = chosen.target()
    options = PlanOptions(loss=target.loss, offload=offload, layout=layout, kernels=kernels, compile=compile)
    found = verify(target.model, target.sample, options=options, **training)
    if as_json:
        tell_json("verify", verification_content(found) | {"plan": plan_content(found.plan)})
    else:
        tell(f"{found}\n{found.plan}")
    return GOOD if found.exact else DIFFERENT


def verification_content(found: Verification) -> dict[str, Any]:
    """A verification for programs."""
    return {
        "exact": found.exact,
        "first_difference": found.first_difference,
        "largest_gradient_difference": found.largest_gradient_difference,
        "eager_is_deterministic": found.eager_is_deterministic,
        "where": found.where,
        "from_given_layout": found.from_given_layout,
        "from_eager": found.from_eager,
        "from_whole_logits": found.from_whole_logits,
    }
