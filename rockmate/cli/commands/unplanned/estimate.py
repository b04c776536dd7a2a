"""`rockmate estimate`: will it fit? What training takes on a device that need not be there."""

from __future__ import annotations

import contextlib
from typing import Any

import click
import torch

from rockmate.cli.app import examples
from rockmate.cli.options import BudgetText, Bytes, Chosen, offload_options, output_options, sample_options
from rockmate.cli.output import DIFFERENT, GOOD, tell, tell_json
from rockmate.cli.samples import DTYPES
from rockmate.forecast.answer import Estimate, PlannedStep
from rockmate.forecast.estimate import SEARCH_S, estimate
from rockmate.queries.verification import OPTIMIZERS

HALF = ("bfloat16", "float16")


@click.command(
    "estimate",
    epilog=examples(
        "rockmate estimate model.py:make --device 24GiB --optimizer adamw",
        "rockmate estimate model.py:make --device H100 --dtype bfloat16 --meta --json",
        "rockmate estimate model.py:make --device 24GiB --optimizer adamw --autocast bfloat16",
        "rockmate estimate model.py:Net --sample 'float32[64,32]' --memory 2MiB",
        "rockmate estimate model.py:make --device H100 --budget 0.4 --offload host",
    ),
)
@sample_options
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    metavar="NAME",
    help="cpu, an accelerator such as H100, or the memory of one, such as 24GiB.",
)
@click.option("--memory", type=Bytes(), metavar="SIZE", help="What there is, in the place of what the device has.")
@click.option(
    "--budget",
    type=BudgetText(),
    metavar="BUDGET",
    help="Of the step, as for plan: tell what a plan for it costs, and not one for the device's memory.",
)
@click.option("--dtype", type=click.Choice(list(DTYPES)), metavar="TYPE", help="Train in this type: bfloat16, …")
@click.option("--autocast", type=click.Choice(list(HALF)), metavar="TYPE", help="Run the step under autocast to it.")
@click.option("--optimizer", type=click.Choice(list(OPTIMIZERS)), help="Whose state counts.")
@click.option("--flops", type=click.FloatRange(min=0, min_open=True), metavar="N", help="Operations a second.")
@click.option("--bandwidth", type=click.FloatRange(min=0, min_open=True), metavar="N", help="Bytes a second.")
@click.option("--link", type=click.FloatRange(min=0, min_open=True), metavar="N", help="As that, to what --offload is.")
@offload_options
@click.option("--meta", is_flag=True, help="Make the model without data, where it is too large for this machine.")
@click.option("--batches/--no-batches", default=True, help="Whether to tell the largest batch.")
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0),
    default=SEARCH_S,
    show_default=True,
    metavar="SECONDS",
    help="For the search of one plan.",
)
@output_options
def command(chosen: Chosen, meta: bool, as_json: bool, quiet: bool, **asked: Any) -> int:
    """Tell what training MODEL takes on --device, without that device: no kernel runs.

    Prints the eager peak and who holds it, whether it fits, the smallest plan, and the largest batch. The exit status
    is 1 where neither eager training nor a plan fits.
    """
    for name in ("dtype", "autocast"):
        if asked[name] is not None:
            asked[name] = DTYPES[asked[name]]
    with torch.device("meta") if meta else contextlib.nullcontext():
        target = chosen.target()
    found = estimate(target.model, target.sample, loss=target.loss, **asked)
    if as_json:
        tell_json("estimate", {"model": chosen.name} | _content(found))
    else:
        tell(str(found))
    return DIFFERENT if found.fits is False and found.planned is None else GOOD


def _content(found: Estimate) -> dict[str, Any]:
    batch = found.batch
    return {
        "device": found.machine.name,
        "usable_bytes": found.usable_bytes,
        "fits": found.fits,
        "peak_bytes": found.peak_bytes,
        "peak_in": found.peak_in,
        "split": dict(found.split),
        "reserved_bytes": found.reserved_bytes,
        "step_ms": found.step_ms,
        "smallest": _step(found.smallest),
        "proven_bytes": found.proven_bytes,
        "planned": _step(found.planned),
        "asked_bytes": found.asked_bytes,
        "offload": found.offload,
        "unplanned": found.unplanned or None,
        "batch": None
        if batch is None
        else {
            "sample": batch.sample,
            "eager": batch.eager,
            "planned": None if batch.planned is None else batch.planned.batch,
            "overhead": None if batch.planned is None else batch.planned.overhead,
        },
        "unknown": list(found.unknown),
        "took_s": found.took_s,
    }


def _step(step: PlannedStep | None) -> dict[str, Any] | None:
    if step is None:
        return None
    return {
        "budget_bytes": step.budget_bytes,
        "peak_bytes": step.peak_bytes,
        "overhead": step.overhead,
        "moved_bytes": step.moved_bytes,
    }
