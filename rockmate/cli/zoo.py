"""`rockmate zoo`: built-in models, and plans that come with the package."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import click
import torch

from rkgb import make_sample
from rockmate import plan_files, zoo
from rockmate.cli.app import examples
from rockmate.cli.options import json_option
from rockmate.cli.output import GOOD, pairs, table, tell, tell_json
from rockmate.cli.plans import plan_content, plan_table
from rockmate.cli.targets import TargetError
from rockmate.plan_files import PlanFile
from rockmate.units import format_bytes

PLANS = "plans"  # a folder of the zoo: a plan file for each, and an index of them


@dataclass(frozen=True, slots=True)
class StoredPlan:
    """A plan that comes with the package."""

    name: str
    facts: dict[str, Any]  # of the index

    def load(self) -> PlanFile:
        """The plan, checked. Raises `PlanFileError` where the package is damaged."""
        return plan_files.loads(gzip.decompress(_folder().joinpath(f"{self.name}.json.gz").read_bytes()))


def stored_plans() -> dict[str, StoredPlan]:
    """All of them by name."""
    index = _folder().joinpath("index.json")
    if not index.is_file():
        return {}
    entries = json.loads(index.read_text(encoding="utf-8"))["plans"]
    return {entry["name"]: StoredPlan(entry["name"], entry) for entry in entries}


def _folder() -> Traversable:
    return files("rockmate.zoo").joinpath(PLANS)


@click.group("zoo")
def command() -> None:
    """Built-in models, which other commands take by their names, and plans that come with the package."""


@command.command("list", epilog=examples("rockmate zoo list", "rockmate zoo list --json"))
@json_option
def list_command(as_json: bool) -> int:
    """List the models and the plans."""
    plans = stored_plans()
    if as_json:
        tell_json("zoo list", {"models": zoo.names(), "plans": [plan.facts for plan in plans.values()]})
        return GOOD
    tell("models\n" + "\n".join(f"  {name}" for name in zoo.names()))
    if plans:
        columns = [key for key in next(iter(plans.values())).facts if key != "name"]
        rows = [(name, *(_text(key, plan.facts.get(key)) for key in columns)) for name, plan in plans.items()]
        tell("\n" + table(("plan", *(column.removesuffix("_bytes").replace("_", " ") for column in columns)), rows))
    return GOOD


def _text(key: str, value: Any) -> str:
    if value is None:
        return "–"
    if key.endswith("_bytes"):
        return format_bytes(value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)


@command.command("show", epilog=examples("rockmate zoo show mixer-tiny"))
@click.argument("name", metavar="NAME")
@json_option
def show_command(name: str, as_json: bool) -> int:
    """Show a model: its class, its parameters, its sample; or a plan: what it promises."""
    plans = stored_plans()
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
    return TargetError(f"the zoo has no {name!r}; it has {', '.join((*zoo.names(), *stored_plans()))}")


@command.command("get")
@click.argument("name", metavar="NAME")
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The file.")
@json_option
def get_command(name: str, output: Path, as_json: bool) -> int:
    """Write a plan of the zoo to a file, for `rockmate explain`, `check`, `report`, or Rockmate(..., plan=file)."""
    plans = stored_plans()
    if name not in plans:
        if name in zoo.names():
            raise TargetError(f"{name} is a model of the zoo, not a plan: make one, with rockmate plan {name}")
        raise _unknown(name)
    plan_files.save(plans[name].load(), output)
    if as_json:
        tell_json("zoo get", {"name": name, "file": str(output)})
    else:
        tell(f"written to {output}")
    return GOOD
