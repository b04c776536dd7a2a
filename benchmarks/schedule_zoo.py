"""Make the plans that come with the package: models of the zoo at the budgets of MONeT's table, as parts of the peak.

python benchmarks/schedule_zoo.py                      # all models, about half an hour on two cores
python benchmarks/schedule_zoo.py --models unet-demo   # the others are left as they are
python benchmarks/schedule_zoo.py --output demo_output # elsewhere

Writes a plan file for each into rockmate/zoo/plans/, and an index. `python docs/make_tables.py` makes the table of it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.reporting import code_version, console, option_parser
from rk_solvers import Limits
from rockmate import BudgetTooSmall, plan_files, zoo
from rockmate.plan_files.record import made_here, plan_file_of
from rockmate.plan_files.zoo import StoredPlan
from rockmate.planning.measured import Measured, measure
from rockmate.planning.planner import make_plan, planning
from rockmate.planning.request import PlanRequest
from rockmate.units import format_bytes

MODELS = (
    "resnet50-demo",
    "googlenet-demo",
    "unet-demo",
    "mobilenet-v2-demo",
    "vgg16-demo",
    "gpt2-demo",
    "vit-demo",
    "llama-demo",
)
TINY = ("resnet50-tiny", "gpt2-tiny")
# 10, 9, 8, 7, 6 and 5 GB of about 15 in MONeT's table (Shah et al., ICLR 2021, table 2).
SHARES = tuple(round(gigabytes / 15, 4) for gigabytes in (10, 9, 8, 7, 6, 5))


def main() -> None:
    """Plan each model once it is measured, and write what was found."""
    options = _options()
    torch.set_num_threads(options.threads)
    code = code_version()  # plans that are written make a clone dirty
    options.output.mkdir(parents=True, exist_ok=True)
    index = options.output / "index.json"
    known: list[Any] = json.loads(index.read_text(encoding="utf-8"))["plans"] if index.exists() else []
    names = dict.fromkeys((*MODELS, *options.models))
    found = {name: [entry for entry in known if entry["model"] == name] for name in names}
    for name in options.models:
        found[name] = [msgspec.to_builtins(entry) for entry in plans_of(name, options)]
        rows = [entry for entries in found.values() for entry in entries]
        content = {"code": code, "plans": rows}
        index.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def plans_of(name: str, options: argparse.Namespace) -> list[StoredPlan]:
    """Plans for one model, written into the folder; the index has an entry for each budget."""
    entry = zoo.get(name, device=options.device)
    request = PlanRequest(1.0, entry.loss, limits=Limits().within(options.time_limit))
    for old in options.output.glob(f"{name}-0.*.json.gz"):
        old.unlink()
    rows = []
    with planning(entry.model):
        measured = measure(entry.model, entry.sample, request)
        for share in SHARES:
            rows.append(_plan(name, share, measured, dataclasses.replace(request, budget=share), entry.model, options))
            console.print(_told(rows[-1]))
    return rows


def _plan(
    name: str, share: float, measured: Measured, request: PlanRequest, model: torch.nn.Module, options: Any
) -> StoredPlan:
    made = made_here(measured.device)
    facts = {
        "name": f"{name}-{share:.2f}",
        "model": name,
        "share": share,
        "budget_bytes": round(share * measured.eager_peak_bytes),
        "eager_peak_bytes": measured.eager_peak_bytes,
        "device": made.device,
        "torch": made.torch,
    }
    try:
        plan = make_plan(measured, request, model).plan
    except BudgetTooSmall as error:
        nothing = dict.fromkeys(("peak_bytes", "overhead", "gap", "recomputations", "solver", "seconds"))
        return msgspec.convert({**facts, **nothing, "smallest_budget_bytes": error.smallest_budget_bytes}, StoredPlan)
    plan_files.save(plan_file_of(model, measured, plan, request), options.output / f"{facts['name']}.json.gz")
    numbers = {
        "peak_bytes": plan.measured_peak_bytes,
        "overhead": plan.overhead,
        "gap": plan.gap,
        "recomputations": plan.recomputations,
        "solver": plan.solver,
        "seconds": round(plan.planning_s - measured.measuring_s, 2),
    }
    return msgspec.convert({**facts, **numbers}, StoredPlan)


def _told(entry: StoredPlan) -> str:
    if entry.peak_bytes is None:
        return f"{entry.name}: no plan; the smallest budget is {format_bytes(entry.smallest_budget_bytes or 0)}"
    overhead, gap = entry.overhead or 0.0, entry.gap or 0.0
    return (
        f"{entry.name}: {format_bytes(entry.peak_bytes)} of {format_bytes(entry.eager_peak_bytes)}, {overhead:+.1%}, "
        f"gap {gap:.1%}, {entry.solver}, {entry.seconds:.1f} s"
    )


def _options() -> argparse.Namespace:
    parser = option_parser(__doc__, "tiny models")
    parser.set_defaults(output=Path(__file__).resolve().parent.parent / "rockmate" / "zoo" / "plans")
    parser.add_argument("--models", nargs="+", default=None, help="names of the zoo")
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds for one search (default 10)")
    parser.add_argument("--device", default="cpu", help="default: cpu")
    options = parser.parse_args()
    options.models = options.models or (TINY if options.quick else MODELS)
    return options


if __name__ == "__main__":
    main()
