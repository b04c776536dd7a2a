"""Steps that recompute, that move data to a second memory, and that do both, beside eager's: time and bytes.

    python benchmarks/offload.py                                    # GPT-2 and ResNet-50 and a file; some minutes
    python benchmarks/offload.py --models gpt2-demo --shares 0.5    # one of them
    python benchmarks/offload.py --quick --output folder            # tiny models

All take turns, step by step, from the same parameters; ratios are of medians. `moved` is what offloading by hand does:
all that is saved and large leaves at once. Plans with moves are made by `rk_solvers.transfers`, which nothing that
users call uses yet. Nothing else should be computed on the machine.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from benchmarks.move_everything import MoveEverything
from benchmarks.reporting import circumstances, code_version, console, new_table, option_parser, write_report
from rk_solvers import Auto, check
from rk_solvers.links import SecondMemory
from rk_solvers.transfers.search import Moved, MoveSearch
from rockmate import BudgetTooSmall, PeakMemory, Rockmate, zoo
from rockmate.offload.file_tier import FileTier
from rockmate.offload.speed import measured_links
from rockmate.offload.tier import Tier
from rockmate.planning.measured import Measured, measure
from rockmate.planning.plan import Plan
from rockmate.planning.planner import planned_as
from rockmate.planning.request import PlanRequest
from rockmate.runtime.moves import MovingStep
from rockmate.units import format_bytes

MODELS = ("gpt2-demo", "resnet50-demo")
QUICK = ("gpt2-tiny",)
SHARES = (0.5, 0.3)
CPU = torch.device("cpu")
Step = Callable[[], None]


@dataclass(frozen=True)
class Row:
    """One way to run a step of a model under a budget."""

    model: str
    share: float  # of the eager peak; 1 where there is no budget
    way: str
    peak_bytes: int
    stored_bytes: int  # in the second memory at most
    median_ms: float
    over_eager: float
    predicted_over_eager: float | None
    recomputations: int
    moves: int


def training_step(forward: Callable[..., Any], model: torch.nn.Module, entry: zoo.ZooEntry) -> Step:
    """Forward and backward; gradients go afterwards."""

    def step() -> None:
        model.zero_grad()
        entry.loss(forward(*entry.sample)).backward()

    return step


def moving_forward(
    measured: Measured, model: torch.nn.Module, found: Moved, budget_bytes: int, tier: Tier
) -> Callable[..., Any]:
    """What runs a plan with moves in the place of `model`."""
    plan = Plan(
        budget_bytes=budget_bytes,
        peak_bytes=found.costs.peak_bytes,
        time_ms=found.costs.time_ms,
        baseline_peak_bytes=measured.eager_peak_bytes,
        baseline_time_ms=measured.problem.keep_all_time_ms,
        solver="moves",
        planning_s=0.0,
        schedule=found.schedule,
    )
    planned = planned_as(plan, measured, model)
    runner = planned.runner_for(model, measured)
    if planned.program.moves is not None:
        runner.make_step = partial(MovingStep, moves=planned.program.moves, tier=tier)
    return runner


def ways_of(
    entry: zoo.ZooEntry, share: float, links: SecondMemory, folder: str, seconds: float
) -> dict[str, tuple[Step, Tier | None, float | None, int, int]]:
    """By name a step, its second memory, its predicted time over that of keeping all, recomputations and moves."""
    found: dict[str, tuple[Step, Tier | None, float | None, int, int]] = {}
    eager = copy.deepcopy(entry.model)
    found["eager"] = training_step(eager, eager, entry), None, None, 0, 0
    by_hand, tier = copy.deepcopy(entry.model), FileTier(folder)

    def moved_forward(*args: Any) -> Any:
        with MoveEverything(tier, by_hand.parameters()):
            return by_hand(*args)

    found["moved"] = training_step(moved_forward, by_hand, entry), tier, None, 0, 0
    model = copy.deepcopy(entry.model)
    measured = measure(model, entry.sample, PlanRequest(None, entry.loss))
    budget_bytes = int(share * measured.eager_peak_bytes)
    try:
        planned = Rockmate(copy.deepcopy(entry.model), entry.sample, budget_bytes, loss=entry.loss)
        plan = planned.plan
        step = training_step(planned, planned, entry)
        found["recomputed"] = step, None, 1 + plan.overhead, plan.recomputations, 0
    except BudgetTooSmall as error:
        console.print(f"{entry.name} at {share:g}: {error}")
    search = MoveSearch(
        measured.problem,
        links,
        lambda limit_s: Auto(measured.chain, time_limit_s=limit_s),
        chain=measured.chain,
        time_limit_s=seconds,
        over_the_turn=True,
    )
    both = search.solve(budget_bytes)
    if both is not None:
        check(measured.problem, both.schedule, budget_bytes, links)
        second = FileTier(folder)
        forward = moving_forward(measured, model, both, budget_bytes, second)
        predicted = both.costs.time_ms / measured.problem.keep_all_time_ms
        step = training_step(forward, model, entry)
        found["both"] = step, second, predicted, both.schedule.recomputations, len(both.moves)
    return found


def rows_of(name: str, share: float, links: SecondMemory, options: argparse.Namespace) -> list[Row]:
    """All ways by turns."""
    entry = zoo.get(name)
    ways = ways_of(entry, share, links, options.folder, 4.0 if options.quick else 30.0)
    peaks: dict[str, int] = {}
    for way, (step, *_) in ways.items():
        step()
        with PeakMemory(CPU) as memory:
            step()
        peaks[way] = memory.peak_bytes
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(2 if options.quick else options.repeats):
        for way, (step, *_) in ways.items():
            started = time.perf_counter()
            step()
            times[way].append((time.perf_counter() - started) * 1e3)
    eager_ms = statistics.median(times["eager"])
    rows = []
    for way, (_, tier, predicted, recomputations, moves) in ways.items():
        median_ms = statistics.median(times[way])
        stored_bytes = 0 if tier is None else tier.most_held_bytes
        over_eager = median_ms / eager_ms
        rows.append(
            Row(name, share, way, peaks[way], stored_bytes, median_ms, over_eager, predicted, recomputations, moves)
        )
        if tier is not None:
            tier.close()
    return rows


def parse_options() -> argparse.Namespace:
    """Options of the command line."""
    parser = option_parser(__doc__, quick="tiny models, few steps")
    parser.set_defaults(threads=1)
    parser.add_argument("--models", nargs="+", help=f"of the zoo (default: {' '.join(MODELS)})")
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES), help="of the eager peak")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where the file is")
    return parser.parse_args()


def main() -> None:
    """Run the script."""
    options = parse_options()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    tier = FileTier(options.folder)
    links = measured_links(tier, CPU)
    tier.close()
    speeds = f"out {links.out.bytes_per_ms / 1e6:.2f} GB/s, back {links.back.bytes_per_ms / 1e6:.2f} GB/s"
    console.print(speeds)
    rows: list[Row] = []
    for name in options.models or (QUICK if options.quick else MODELS):
        for share in options.shares:
            rows += rows_of(name, share, links, options)
            table = new_table(f"{name} at {share:g}; {speeds}")
            for heading in ("peak", "stored", "time", "of eager's", "predicted", "recomputed", "moved"):
                table.add_column(heading, justify="right")
            for row in rows:
                if (row.model, row.share) == (name, share):
                    predicted = "" if row.predicted_over_eager is None else f"{row.predicted_over_eager:.3f}"
                    sizes = format_bytes(row.peak_bytes), format_bytes(row.stored_bytes)
                    counts = str(row.recomputations), str(row.moves)
                    ratio = f"{row.median_ms:.0f} ms", f"{row.over_eager:.3f}", predicted
                    table.add_row(row.way, *sizes, *ratio, *counts)
            console.print(table)
    where = {"code": code_version(), "links": asdict(links)}
    content = {"circumstances": circumstances(options) | where, "rows": [asdict(row) for row in rows]}
    write_report(options.output, "offload-cpu.json", content)


if __name__ == "__main__":
    main()
