"""Where data should move, and where they should be computed again: plans by the speed of the link to a second memory.

    python benchmarks/link_speeds.py                                     # five models; some minutes
    python benchmarks/link_speeds.py --models gpt2-demo --shares 0.5     # one of them
    python benchmarks/link_speeds.py --quick --output folder             # a tiny model

Simulated: each model is measured once, and planned for links of several speeds, equal both ways. `alone` recomputes and
moves nothing. Measured: steps of the first model under the last share that it fits follow plans for a file that is made
slower than it is, by turns with eager's and with those of the plan that only recomputes. One of these plans is followed
through still slower files, too, until recomputing alone is faster: that speed, the *crossing*, is told as predicted and
as measured. What transfers cost the computation beside them is what was measured of the file. Nothing else should be
computed on the machine; docs/make_link_figure.py draws what is stored.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from benchmarks.offload import training_step
from benchmarks.reporting import circumstances, code_version, console, new_table, option_parser, write_report
from rk_solvers import Auto, Limits, Link, Problem, SecondMemory, Solution
from rk_solvers.transfers.reading import costs_of
from rk_solvers.transfers.with_moves import WithMoves
from rockmate import Offload, zoo
from rockmate.offload import file_tier
from rockmate.offload.file_tier import FileTier
from rockmate.offload.tiers import Tiers
from rockmate.planning.fixed_plan import FixedPlan, PortablePlan
from rockmate.planning.lowered import planned_as
from rockmate.planning.measured import Measured, measure
from rockmate.planning.plan import Plan
from rockmate.planning.request import PlanRequest

MODELS = ("gpt2-demo", "llama-demo", "bert-demo", "resnet50-demo", "unet-demo")
QUICK = ("gpt2-tiny",)
SHARES = (0.5, 0.3)
SPEEDS = (0.25, 1.0, 4.0, 16.0)  # GB/s
THROTTLED = (0.125, 0.25, 0.5)  # GB/s: slower than most disks
FOLLOWED = 0.25  # the plan for a file of that speed is followed
CROSSED = (0.03125, 0.0625, 0.125)  # through these, too
LATENCY_MS = 0.2
BURDEN = 0.05


@dataclass(frozen=True)
class Row:
    """A plan for a link."""

    model: str
    share: float  # of the eager peak
    gb_per_s: float  # 0 for the plan that moves nothing
    fits: bool
    overhead: float  # predicted: 0.1 is 10 % more than keeping all
    recomputed_ms: float
    moved_bytes: int  # sent there, in all
    activations_bytes: int  # what the step that keeps all holds beyond the budget


@dataclass(frozen=True)
class Throttled:
    """Steps of a plan through a link that was made as slow."""

    planned_gb_per_s: float  # the speed that it was planned for
    gb_per_s: float  # that of the link; 0 where nothing moves
    predicted_over_alone: float
    measured_over_alone: float
    over_eager: float


def link_of(gb_per_s: float, tier: FileTier | None = None) -> SecondMemory:
    """Both links of that speed."""
    link = Link(1e6 * gb_per_s, LATENCY_MS, BURDEN)
    return SecondMemory(link, link, None, FileTier.staging_bytes)


def plans_of(measured: Measured, budget_bytes: int, seconds: float) -> Iterator[tuple[float, Solution]]:
    """The plan that only recomputes, then one for each speed: never slower than that for a slower link."""
    problem = measured.problem
    best = Auto(measured.chain, limits=Limits().within(seconds)).solve(problem, budget_bytes)
    yield 0.0, best
    alone = FixedPlan(PortablePlan.of(best.schedule, best.solver))
    for speed in SPEEDS:
        memory = link_of(speed)
        found = WithMoves(alone, partial(quick, measured), memory, measured.chain, seconds).solve(problem, budget_bytes)
        if best.status.fits:
            again = replace(best, time_ms=costs_of(problem, best.schedule, memory).time_ms)
            again = replace(again, memory=memory if best.schedule.offloaded else None)
            found = min(found, again, key=lambda one: (not one.status.fits, one.time_ms))
        best = found
        yield speed, found


def quick(measured: Measured, seconds: float) -> Auto:
    """A solver that takes at most so long."""
    return Auto(measured.chain, limits=Limits().without_proofs(seconds))


def row_of(name: str, share: float, speed: float, solution: Solution, problem: Problem, excess_bytes: int) -> Row:
    """What a plan does."""
    sizes = {data.name: data.size_bytes for data in problem.data}
    again_ms = {op.name: op.recompute_ms for op in problem.forward}
    recomputed = solution.schedule.recomputed.values()
    return Row(
        name,
        share,
        speed,
        solution.status.fits,
        solution.time_ms / problem.keep_all_time_ms - 1,
        sum(again_ms[op] for group in recomputed for op in group),
        sum(sizes[name] for name in solution.schedule.offloaded),
        excess_bytes,
    )


# ---- measured ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def as_slow_as(gb_per_s: float) -> Iterator[None]:
    """Context in which transfers to files, and back, take as long as at that speed, or longer."""

    def slowed(move: Callable[..., None]) -> Callable[..., None]:
        def moved(self: file_tier._Direction, storages: Any, layout: file_tier._Layout) -> None:
            started = time.perf_counter()
            move(self, storages, layout)
            left_s = layout.size_bytes / (1e9 * gb_per_s) - (time.perf_counter() - started)
            if left_s > 0:
                time.sleep(left_s)

        return moved

    direction: Any = file_tier._Direction
    write, read = direction.write, direction.read
    direction.write, direction.read = slowed(write), slowed(read)
    try:
        yield
    finally:
        direction.write, direction.read = write, read


def slowed_links(real: SecondMemory, gb_per_s: float) -> SecondMemory:
    """Both links of a file in that context: a transfer takes longer, and as much from the computation as before."""

    def slower(link: Link) -> Link:
        speed = min(link.bytes_per_ms, 1e6 * gb_per_s)
        return Link(speed, link.latency_ms, link.burden * speed / link.bytes_per_ms)

    return replace(real, out=slower(real.out), back=slower(real.back))


def step_of(solution: Solution, measured: Measured, entry: zoo.ZooEntry, folder: str) -> Callable[[], None]:
    """A step of a copy of the model that follows a plan."""
    problem = measured.problem
    plan = Plan(
        budget_bytes=solution.peak_bytes,
        peak_bytes=solution.peak_bytes,
        time_ms=solution.time_ms,
        baseline_peak_bytes=measured.eager_peak_bytes,
        baseline_time_ms=problem.keep_all_time_ms,
        solver=solution.solver,
        planning_s=0.0,
        schedule=solution.schedule,
    )
    model = copy.deepcopy(entry.model)
    planned = planned_as(plan, measured, model, FileTier(folder))
    return training_step(planned.runner_for(model, measured), model, entry)


def throttled(
    entry: zoo.ZooEntry, measured: Measured, alone: Solution, budget_bytes: int, options: Any
) -> list[Throttled]:
    """Steps of plans for slow files by turns with eager's, and those of the plan that only recomputes."""
    real = Tiers(Offload("disk", options.folder)).links_on(torch.device("cpu"))
    assert real is not None
    console.print(real)
    seconds = 1.0 if options.quick else options.seconds
    fixed = FixedPlan(PortablePlan.of(alone.schedule, alone.solver))
    plans = {0.0: alone}
    for speed in THROTTLED:
        solver = WithMoves(fixed, partial(quick, measured), slowed_links(real, speed), measured.chain, seconds)
        plans[speed] = solver.solve(measured.problem, budget_bytes)
    model = copy.deepcopy(entry.model)
    eager = training_step(model, model, entry)
    steps = {planned: step_of(solution, measured, entry, options.folder) for planned, solution in plans.items()}
    through = [(speed, speed) for speed in plans] + [(FOLLOWED, speed) for speed in CROSSED]
    eager_ms, *medians = medians_ms([(eager, 0.0)] + [(steps[planned], speed) for planned, speed in through], options)
    found = []
    for (planned, speed), median_ms in zip(through, medians, strict=True):
        predicted = costs_of(measured.problem, plans[planned].schedule, slowed_links(real, speed) if speed else None)
        ratios = predicted.time_ms / alone.time_ms, median_ms / medians[0], median_ms / eager_ms
        found.append(Throttled(planned, speed, *ratios))
    return found


def medians_ms(steps: list[tuple[Callable[[], None], float]], options: Any) -> list[float]:
    """Of steps that take turns, each through a link as slow as is said with it; as fast as it is for 0."""
    times: list[list[float]] = [[] for _ in steps]
    for turn in range(1 + (2 if options.quick else options.repeats)):
        for (step, speed), found in zip(steps, times, strict=True):
            with as_slow_as(speed) if speed else contextlib.nullcontext():
                started = time.perf_counter()
                step()
                if turn:  # the first one warms up
                    found.append(1e3 * (time.perf_counter() - started))
    return [statistics.median(found) for found in times]


def crossing_gb_per_s(points: list[tuple[float, float]]) -> float | None:
    """The speed at which a plan takes as long as recomputing alone, of speeds with ratios of times; None outside.

    Between two speeds the time is taken as linear in the time of a byte, as it is where the link decides.
    """
    points = sorted(points)
    for (slow, above), (fast, below) in itertools.pairwise(points):
        if above >= 1 > below:
            return 1 / (1 / fast + (1 / slow - 1 / fast) * (1 - below) / (above - below))
    return None


def crossings(steps: list[Throttled]) -> dict[str, float | None]:
    """That of the plan which was followed through slower links, as predicted and as measured."""
    followed = [step for step in steps if step.planned_gb_per_s == FOLLOWED]
    return {
        "predicted_gb_per_s": crossing_gb_per_s([(step.gb_per_s, step.predicted_over_alone) for step in followed]),
        "measured_gb_per_s": crossing_gb_per_s([(step.gb_per_s, step.measured_over_alone) for step in followed]),
    }


def parse_options() -> argparse.Namespace:
    """Options of the command line."""
    parser = option_parser(__doc__, quick="a tiny model, few steps")
    parser.set_defaults(threads=1)
    parser.add_argument("--models", nargs="+", help=f"of the zoo (default: {' '.join(MODELS)})")
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES), help="of the eager peak")
    parser.add_argument("--seconds", type=float, default=15.0, help="for each plan")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where the file is")
    return parser.parse_args()


def main() -> None:
    """Run the script."""
    options = parse_options()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    rows: list[Row] = []
    steps: list[Throttled] = []
    last: tuple[Solution, int] | None = None  # of the first model: the plan that only recomputes, and its budget
    for name in options.models or (QUICK if options.quick else MODELS):
        entry = zoo.get(name)
        measured = measure(copy.deepcopy(entry.model), entry.sample, PlanRequest(None, entry.loss))
        for share in options.shares:
            budget_bytes = int(share * measured.eager_peak_bytes)
            excess_bytes = measured.eager_peak_bytes - budget_bytes
            plans = dict(plans_of(measured, budget_bytes, 1.0 if options.quick else options.seconds))
            rows += [row_of(name, share, *found, measured.problem, excess_bytes) for found in plans.items()]
            show(rows, name, share)
            if plans[0.0].status.fits and not steps:
                last = plans[0.0], budget_bytes
        if not steps and last is not None:
            steps = throttled(entry, measured, *last, options)
            for one in [*steps, crossings(steps)]:
                console.print(one)
    content = {
        "circumstances": circumstances(options) | {"code": code_version()},
        "latency_ms": LATENCY_MS,
        "burden": BURDEN,
        "rows": [asdict(row) for row in rows],
        "throttled": [asdict(one) for one in steps],
        "crossing": crossings(steps),
    }
    write_report(options.output, "link-speeds.json", content)


def show(rows: list[Row], name: str, share: float) -> None:
    """A table of one model under one budget."""
    table = new_table(f"{name} at {share:g}")
    for heading in ("GB/s", "overhead", "recomputed", "moved"):
        table.add_column(heading, justify="right")
    for row in rows:
        if (row.model, row.share) == (name, share):
            overhead = f"{row.overhead:+.1%}" if row.fits else "does not fit"
            moved = f"{row.moved_bytes / max(1, row.activations_bytes):.0%} of what is too much"
            table.add_row(f"{row.gb_per_s:g}", overhead, f"{row.recomputed_ms:.0f} ms", moved)
    console.print(table)


if __name__ == "__main__":
    main()
