"""Every solver of `rk_solvers` on the same problems and budgets: time of the plan, peak, and seconds of planning.

    python benchmarks/solvers.py --cache folder                   # measures the models once; writes into results/
    python benchmarks/solvers.py --cache folder --problems g1 gpt2-demo --solvers rotor knapsack
    python benchmarks/solvers.py --quick --cache folder --output folder   # tiny models, to see that it runs

Greedy is what all others are compared with. README.md says more.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.random_dags import SIZES, random_problem
from rk_solvers import SOLVERS, Chain, Effort, Problem, check, peak_and_time, smallest_budget
from rk_solvers.blocks import Block, Option
from rk_solvers.knapsack import Knapsack
from rk_solvers.rotor_tables import ChainNumbers, fill
from rockmate.units import format_bytes, format_ms

GREEDY = "greedy"
ALL_SOLVERS = {**SOLVERS, "knapsack": lambda effort: Knapsack()}
MODELS = (
    "gpt2-tiny", "transformer-tiny", "unet-tiny", "mixer-tiny", "regnet-tiny", "resnet50-tiny",
    "gpt2-demo", "resnet50-demo",
)  # fmt: skip
QUICK = ("gpt2-tiny", "unet-tiny", "g1")
BUDGETS = (0.7, 0.5, 0.35)
TIE = 1.001  # within this factor of the fastest plan, a plan is as good as that
ROTOR_S = 0.6
MOST_KEEP_NONE = 10_000  # forward times backward operations: its plan is as long as their product
console = Console()


@dataclass(frozen=True)
class Result:
    """What a solver made of a problem under a budget."""

    problem: str
    budget: float  # part of the peak of keep-all
    budget_bytes: int
    solver: str
    fits: bool
    time_ms: float
    overhead: float  # of the plan's time, relative to keep-all
    peak_bytes: int
    seconds: float


def problem_named(name: str, cache: Path) -> tuple[Problem, Chain | None]:
    """A random graph, or a model's problem with its chain: measured the first time, then read from `cache`."""
    if name in SIZES:
        return random_problem(SIZES[name], seed=0), None
    path = cache / f"{name}.json"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(measured(name)) + "\n", encoding="utf-8")
    content = json.loads(path.read_text(encoding="utf-8"))
    blocks = tuple(range(start, stop) for start, stop in content["blocks"])
    return Problem.from_json(json.dumps(content["problem"])), Chain(blocks, tuple(content["backward_block"]))


def measured(name: str) -> dict[str, Any]:
    """The problem and chain of a zoo model, as JSON has it."""
    from rockmate import zoo  # torch is needed for this only
    from rockmate.planner import PlanRequest, measure

    entry = zoo.get(name)
    found = measure(entry.model, entry.sample, PlanRequest(1.0, entry.loss))
    return {
        "problem": json.loads(found.problem.to_json()),
        "blocks": [[block.start, block.stop] for block in found.chain.blocks],
        "backward_block": list(found.chain.backward_block),
    }


def results(name: str, problem: Problem, chain: Chain | None, options: argparse.Namespace) -> Iterator[Result]:
    """Each solver under each budget; every schedule is replayed by the checker before it counts."""
    most, least_ms = peak_and_time(problem, problem.no_recompute)
    for budget in options.budgets:
        budget_bytes = int(budget * most)
        for solver_name in options.solvers:
            if solver_name == "rotor" and chain is None:
                continue
            if solver_name == "keep-none" and len(problem.forward) * len(problem.backward) > MOST_KEEP_NONE:
                continue
            solver = ALL_SOLVERS[solver_name](Effort(chain, options.time_limit, seed=0))
            start = time.perf_counter()
            solution = solver.solve(problem, budget_bytes)
            seconds = time.perf_counter() - start
            replayed = check(problem, solution.schedule, budget_bytes if solution.status.fits else None)
            yield Result(
                name, budget, budget_bytes, solver_name, solution.status.fits, replayed.time_ms,
                replayed.time_ms / least_ms - 1, replayed.peak_bytes, round(seconds, 4),
            )  # fmt: skip


def fastest(found: list[Result]) -> dict[float, float]:
    """For each budget the least overhead; budgets that no solver fits are left out."""
    best: dict[float, float] = {}
    for result in found:
        if result.fits:
            best[result.budget] = min(result.overhead, best.get(result.budget, result.overhead))
    return best


def is_fastest(result: Result, best: dict[float, float]) -> bool:
    """Whether no plan for the same problem and budget takes noticeably less time."""
    return result.fits and 1 + result.overhead <= TIE * (1 + best[result.budget])


def table_of(found: list[Result], title: str) -> Table:
    """One line per solver, the overhead (best ones bold) and the seconds of planning under each budget."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("", no_wrap=True)
    budgets = list(dict.fromkeys(result.budget for result in found))
    for budget in budgets:
        for heading in (f"at {budget:.2f}:\noverhead", "time\n/ greedy", "peak\n/ budget", "planned\nin"):
            table.add_column(heading, justify="right", no_wrap=True)
    best = fastest(found)
    by_place = {(result.solver, result.budget): result for result in found}
    for solver in dict.fromkeys(result.solver for result in found):
        cells: list[str] = []
        for budget in budgets:
            result, greedy = by_place[solver, budget], by_place.get((GREEDY, budget))
            overhead = f"{100 * result.overhead:.2f} %" if result.fits else "does not fit"
            cells.append(f"[bold]{overhead}[/bold]" if is_fastest(result, best) else overhead)
            comparable = greedy is not None and greedy.fits and result.fits
            cells.append(f"{result.time_ms / greedy.time_ms:.3f}×" if greedy and comparable else "–")
            cells += [f"{result.peak_bytes / result.budget_bytes:.2f}", f"{result.seconds:.2f} s"]
        table.add_row(solver, *cells)
    return table


def summary_of(found: list[Result], solvers: list[str]) -> Table:
    """How often each solver has the fastest plan, fits, and how long it takes."""
    table = Table(title="all together", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in ("tried", "fits", "fastest", "alone", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    winners: dict[str, list[str]] = {}
    for name in dict.fromkeys(result.problem for result in found):
        best = fastest([result for result in found if result.problem == name])
        for result in found:
            if result.problem == name and is_fastest(result, best):
                winners.setdefault(f"{name} {result.budget}", []).append(result.solver)
    for solver in solvers:
        own = [result for result in found if result.solver == solver]
        table.add_row(
            solver,
            str(len(own)),
            str(sum(result.fits for result in own)),
            str(sum(solver in names for names in winners.values())),
            str(sum(names == [solver] for names in winners.values())),
            f"{sum(result.seconds for result in own):.1f}",
        )
    return table


def rotor_bar(repeats: int) -> dict[str, Any]:
    """Rotor's table for 100 blocks, 500 slots and 10 options a block, once the compiled code is there."""
    rng = random.Random(0)

    def option(rank: int) -> Option:
        saved, peak, extra_ms = 12 - rank, rng.randint(8, 20), 0.1 * rank
        return Option(extra_ms, saved, rng.randint(8, 14), peak, 1.0 + extra_ms, peak, ())

    def block(index: int) -> Block:
        options = tuple(option(rank) for rank in range(10))
        return Block(range(index, index + 1), (), rng.random(), rng.random(), 2, (), 2, rng.randint(4, 6), options)

    blocks = tuple(block(index) for index in range(100))
    seconds: list[float] = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        fill(ChainNumbers.of(blocks, 1, 500))
        seconds.append(time.perf_counter() - start)
    reached = statistics.median(seconds[1:])
    return {"label": "rotor's table, 100 blocks x 500 slots x 10 options, seconds", "reached": round(reached, 3),
            "limit": ROTOR_S, "met": reached <= ROTOR_S}  # fmt: skip


def parse_options() -> argparse.Namespace:
    """Options of the command line; with --quick, fewer problems and budgets unless they are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="folder of measured problems, filled as needed")
    parser.add_argument("--problems", nargs="+", help=f"zoo models, or {', '.join(SIZES)}")
    parser.add_argument("--solvers", nargs="+", choices=sorted(ALL_SOLVERS), default=sorted(ALL_SOLVERS))
    parser.add_argument("--budgets", nargs="+", type=float, help="parts of the peak of keep-all (default 0.7 0.5 0.35)")
    parser.add_argument("--time-limit", type=float, help="seconds of one search (default 15; quick 2)")
    parser.add_argument("--quick", action="store_true", help="small problems, and too little time for the solvers")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder")
    options = parser.parse_args()
    options.problems = options.problems or list(QUICK if options.quick else (*MODELS, *SIZES))
    options.budgets = options.budgets or list(BUDGETS[1:2] if options.quick else BUDGETS)
    options.time_limit = options.time_limit or (2.0 if options.quick else 15.0)
    return options


def main() -> None:
    """Runs the benchmark."""
    options = parse_options()
    found: list[Result] = []
    least_bytes: dict[str, int] = {}
    for name in options.problems:
        with console.status(f"{name}: measuring"):
            problem, chain = problem_named(name, options.cache)
        own: list[Result] = []
        with console.status(name) as status:
            for result in results(name, problem, chain, options):
                own.append(result)
                status.update(f"{name}: {result.solver} at {result.budget} took {result.seconds:.1f} s")
            least_bytes[name] = smallest_budget(problem, chain, options.time_limit).budget_bytes
        most, time_ms = peak_and_time(problem, problem.no_recompute)
        console.print(table_of(own, f"{name}: keep-all {format_bytes(most)}, {format_ms(time_ms)}"))
        console.print(f"smallest budget known: {least_bytes[name] / most:.2f} of that peak", highlight=False)
        found += own
    console.print(summary_of(found, options.solvers))
    bar = rotor_bar(repeats=1 if options.quick else 5)
    mark = "[green]met[/green]" if bar["met"] else "[red]not met[/red]"
    console.print(f"{mark}: {bar['label']}: {bar['reached']} ≤ {bar['limit']}", highlight=False)
    report = {
        "circumstances": {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "time_limit_s": options.time_limit,
            "quick": options.quick,
        },
        "smallest_budget_bytes": least_bytes,
        "bars": [bar],
        "results": [asdict(result) for result in found],
    }
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "solvers.json"
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    console.print(f"wrote {path}")


if __name__ == "__main__":
    main()
