"""`rockmate zoo`: built-in models, and plans that come with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec
import torch

from rkgb import make_sample
from rockmate import plan_files, zoo
from rockmate.cli.app import examples
from rockmate.cli.options import OutputFile, json_option
from rockmate.cli.output import GOOD, pairs, table, tell, tell_json
from rockmate.cli.plans import plan_content, plan_table
from rockmate.cli.targets import TargetError
from rockmate.plan_files.zoo import StoredPlan
from rockmate.units import format_bytes


@click.group("zoo")
def command() -> None:
    """Built-in models, which other commands take by their names, and plans that come with the package."""


@command.command("list", epilog=examples("rockmate zoo list", "rockmate zoo list --json"))
@json_option
def list_command(as_json: bool) -> int:
    """List the models and the plans."""
    plans = plan_files.zoo.entries()
    if as_json:
        tell_json("zoo list", {"models": zoo.names(), "plans": [msgspec.to_builtins(plan) for plan in plans]})
        return GOOD
    tell("models\n" + "\n".join(f"  {name}" for name in zoo.names()))
    if plans:
        headings = ("plan", "budget", "peak", "of eager's", "extra time", "gap", "device")
        tell("\n" + table(headings, [_row(plan) for plan in plans if plan.exists]))
    return GOOD


def _row(plan: StoredPlan) -> tuple[str, ...]:
    sizes = map(format_bytes, (plan.budget_bytes, plan.peak_bytes or 0, plan.eager_peak_bytes))
    gap = "–" if plan.gap is None else f"{plan.gap:.1%}"
    return plan.name, *sizes, f"{plan.overhead or 0.0:+.1%}", gap, plan.device


def _stored_plans() -> dict[str, StoredPlan]:
    return {plan.name: plan for plan in plan_files.zoo.entries() if plan.exists}


@command.command("show", epilog=examples("rockmate zoo show mixer-tiny"))
@click.argument("name", metavar="NAME")
@json_option
def show_command(name: str, as_json: bool) -> int:
    """Show a model: its class, its parameters, its sample; or a plan: what it promises."""
    plans = _stored_plans()
    if name in plans:
        plan = plans[name].load().plan
        if as_json:
            tell_json("zoo show", {"name": name, "kind": "plan"} | plan_content(plan))
        else:
            tell(plan_table(plan))
        return GOOD
    facts = _model_facts(name)
    if as_json:
        tell_json("zoo show", {"name": name, "kind": "model"} | facts)
    else:
        tell(pairs([(key.replace("_bytes", "").replace("_", " "), _shown(key, value)) for key, value in facts.items()]))
    return GOOD


def _model_facts(name: str) -> dict[str, Any]:
    if name not in zoo.names():
        raise _unknown(name)
    entry = zoo.get(name)
    parameters = list(entry.model.parameters())
    return {
        "model": type(entry.model).__name__,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "parameter_bytes": sum(parameter.nbytes for parameter in parameters),
        "modules": sum(1 for _ in entry.model.modules()),
        "sample": [_tensor_text(tensor) for tensor in make_sample(entry.model, entry.sample).tensors],
        "target": _tensor_text(entry.target),
        "loss": getattr(entry.criterion, "__name__", type(entry.criterion).__name__),
    }


def _tensor_text(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _shown(key: str, value: Any) -> str:
    if key.endswith("_bytes"):
        return format_bytes(value)
    return ", ".join(value) if isinstance(value, list) else str(value)


def _unknown(name: str) -> TargetError:
    return TargetError(f"the zoo has no {name!r}; it has {', '.join((*zoo.names(), *_stored_plans()))}")


@command.command("get")
@click.argument("name", metavar="NAME")
@click.option(
    "--budget",
    type=click.FloatRange(min=0, max=1, min_open=True),
    metavar="SHARE",
    help="Where NAME is a model: the plan of the largest budget that is at most this part of its eager peak.",
)
@click.option("-o", "--output", required=True, type=OutputFile(), help="The file.")
@json_option
def get_command(name: str, budget: float | None, output: Path, as_json: bool) -> int:
    """Write a plan of the zoo to a file, for `rockmate explain`, `check`, `report`, or Rockmate(..., plan=file)."""
    plans = _stored_plans()
    if budget is not None:
        found = plan_files.zoo.get(name, budget)
    elif name in plans:
        found = plans[name].load()
    elif name in zoo.names():
        raise TargetError(
            f"{name} is a model of the zoo, not a plan: say --budget 0.5 for the one that comes with the package, if "
            f"one does, or make one, with rockmate plan {name}"
        )
    else:
        raise _unknown(name)
    plan_files.save(found, output)
    if as_json:
        tell_json("zoo get", {"name": name, "file": str(output)})
    else:
        tell(f"written to {output}")
    return GOOD
