"""`rockmate plan`: a model planned for a budget, and the plan kept in a file."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from rockmate import plan_files
from rockmate.cli.app import examples
from rockmate.cli.options import (
    BudgetText,
    Chosen,
    OutputFile,
    compile_option,
    kernels_option,
    layout_option,
    offload_options,
    output_options,
    solver_options,
    target_options,
)
from rockmate.cli.output import GOOD, tell, tell_json, wants_progress
from rockmate.cli.plans import plan_content, plan_table
from rockmate.cli.targets import Target, TargetError
from rockmate.memory.split import SCOPES
from rockmate.module import Rockmate
from rockmate.queries.verification import OPTIMIZERS


@click.command(
    "plan",
    epilog=examples(
        "rockmate plan model.py:make --budget 0.8 -o plan.json",
        "rockmate plan model.py:Net --sample 'float32[N,32]' --batch 64 --budget 1MiB --json",
        "rockmate plan mixer-tiny --budget 0.8 --solver greedy --time-limit 2 -o mixer.json.gz",
        "rockmate plan model.py:make --budget 2MiB --scope total --optimizer adamw",
        "rockmate plan resnet18-tiny --budget 0.8 --layout auto",
        "rockmate plan llama-demo --budget 0.7 --kernels auto",
        "rockmate plan llama-demo --budget 0.7 --compile",
        "rockmate plan gpt2-demo --budget 0.3 --offload disk:. --offload-limit 4GiB",
    ),
)
@target_options
@click.option(
    "--budget",
    type=BudgetText(),
    default="auto",
    show_default=True,
    help="Part of the eager peak (0.5), bytes, a size (2GiB), or auto: the memory that is free now, less a reserve.",
)
@click.option(
    "--scope",
    type=click.Choice(list(SCOPES)),
    default="step",
    show_default=True,
    help="What the budget bounds: a step, all that training holds, parameters and optimizer state included, or what a "
    "GPU's allocator reserves for a step.",
)
@click.option(
    "--optimizer", type=click.Choice(list(OPTIMIZERS)), help="Under --scope total, whose state is in the budget."
)
@click.option("--pin", multiple=True, metavar="NAME", help="An operation, or the path of a submodule, always kept.")
@click.option("--opaque", multiple=True, metavar="PATH", help="A submodule whose call is one operation.")
@offload_options
@layout_option
@kernels_option
@compile_option
@solver_options
@click.option("-o", "--output", type=OutputFile(), help="Write the plan; packed, if it ends in .gz.")
@click.option("--cache/--no-cache", default=True, help="Whether to look for the plan in the cache, and keep it there.")
@output_options
def command(
    chosen: Chosen,
    output: Path | None,
    as_json: bool,
    quiet: bool,
    **asked: Any,
) -> int:
    """Plan MODEL for a budget: trace it, measure it, search, and run one real step of what was found.

    Prints what the plan promises beside what was measured. The exit status is 1 where no plan fits the budget; then
    the smallest budget is named.
    """
    target = chosen.target()
    planned = plan_target(target, wants_progress(quiet), **asked)
    if output is not None:
        plan_files.save(planned.plan_file(), output)
    if as_json:
        tell_json(
            "plan", {"model": chosen.name, "file": None if output is None else str(output)} | plan_content(planned.plan)
        )
    else:
        tell(plan_table(planned.plan, after=[] if output is None else [("written to", str(output))]))
    return GOOD


def plan_target(target: Target, progress: bool, **asked: Any) -> Rockmate:
    """The planned model; `asked` are the options of the command line by the names of `Rockmate`'s arguments.

    Raises `TargetError` for a submodule that there is not, and what planning raises.
    """
    optimizer = asked.pop("optimizer", None)
    submodules = dict(target.model.named_modules()) if isinstance(target.model, torch.nn.Module) else {}
    for path in asked.get("opaque", ()):
        if path not in submodules:
            raise TargetError(f"--opaque {path}: {type(target.model).__name__} has no such submodule")
    asked["opaque"] = [submodules[path] for path in asked.get("opaque", ())]
    asked["pin"] = [submodules.get(name, name) for name in asked.get("pin", ())]
    return Rockmate(
        target.model,
        target.sample,
        loss=target.loss,
        progress=progress,
        plan_in_background=False,  # what is written is the best there is
        optimizer=None if optimizer is None else partial(OPTIMIZERS[optimizer], lr=1e-3),  # states do not depend on it
        **asked,
    )
