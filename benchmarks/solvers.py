"""Every solver of `rk_solvers` on the same problems and budgets: time of the plan, gap, and seconds of planning.

    python benchmarks/solvers.py --cache folder                   # measures the models once; writes into results/
    python benchmarks/solvers.py --cache folder --problems g1 gpt2-demo --solvers auto rotor
    python benchmarks/solvers.py --quick --cache folder --output folder   # small problems, to see that it runs

The lower bound of a problem and budget is the best that any solver has proven, and holds for all. README.md says more.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from rich.table import Table

from benchmarks.problems import MODELS, problem_named
from benchmarks.random_dags import SIZES
from benchmarks.reporting import bar, circumstances, console, new_table, option_parser, print_bars, write_report
from rk_solvers import (
    SOLVERS,
    BackendUnavailable,
    Chain,
    Checkmate,
    Limits,
    Problem,
    Solver,
    Status,
    check,
    peak_and_time,
    smallest_budget,
    solve_sweep,
    solver_named,
)
from rk_solvers.chain.blocks import Block, BlockOption, sub_problems_of
from rk_solvers.chain.rotor_tables import ChainNumbers, fill
from rk_solvers.liveness import least_bytes
from rockmate.units import format_bytes, format_ms

AUTO, GREEDY = "auto", "greedy"
QUICK = ("gpt2-tiny", "unet-tiny", "g1")
BUDGETS = (0.7, 0.5, 0.35, 0.25)
SMALLEST = 0.0  # stands for the smallest budget, where others do not fit
LIMITS = {"gpt2-demo": {0.7: 0.5, 0.5: 0.5, 0.35: 2.0, 0.25: 3.0}, "gpt2-deep": {0.5: 5.0}}  # gaps in percent
OTHER_LIMIT, OTHER_BUDGETS = 2.0, (0.7, 0.5, 0.35, SMALLEST)
DEEP_S = 60.0  # for the deepest model
TIE = 1.001  # within this factor of the fastest plan, a plan is as good as that
ROTOR_S, BLOCK_S, BLOCK_OPS = 0.6, 1.0, 25
MOST_KEEP_NONE = 10_000  # forward times backward operations: its plan is as long as their product
MOST_EXACT = 60  # forward operations of what the exact solvers are tried on


@dataclass(frozen=True)
class Result:
    """What a solver made of a problem under a budget."""

    problem: str
    budget: float  # part of the peak of keep-all, or `SMALLEST`
    budget_bytes: int
    solver: str
    fits: bool
    time_ms: float
    overhead: float  # of the plan's time, relative to keep-all
    bound_ms: float | None  # proven by this solver
    peak_bytes: int
    seconds: float


def solvers_for(problem: Problem, chain: Chain | None, options: argparse.Namespace) -> Iterator[tuple[str, Solver]]:
    """Those that can be tried."""
    for name in options.solvers:
        needs_chain = name in ("rotor", "rockmate") and chain is None
        too_long = name == "keep-none" and len(problem.forward) * len(problem.backward) > MOST_KEEP_NONE
        too_large = name in ("checkmate", "intervals") and len(problem.forward) > MOST_EXACT
        if not (needs_chain or too_long or too_large):
            limit_s = options.time_limit if name == AUTO else options.others_limit
            yield name, solver_named(name, Limits(gap=options.gap).within(limit_s), chain)


def results(
    name: str, problem: Problem, chain: Chain | None, smallest_bytes: int, options: argparse.Namespace
) -> Iterator[Result]:
    """Each solver under each budget that may fit; every schedule is replayed by the checker before it counts."""
    most, least_ms = peak_and_time(problem, problem.no_recompute)
    budgets = {budget: int(budget * most) for budget in options.budgets}
    if any(budget_bytes < smallest_bytes for budget_bytes in budgets.values()):
        budgets = {budget: size for budget, size in budgets.items() if size >= smallest_bytes}
        budgets[SMALLEST] = smallest_bytes
    out: set[str] = set()  # whose back end is not there
    for budget, budget_bytes in budgets.items():
        for solver_name, solver in solvers_for(problem, chain, options):
            if solver_name in out:
                continue
            start = time.perf_counter()
            try:
                solution = solver.solve(problem, budget_bytes)
            except BackendUnavailable as error:
                console.print(f"{solver_name} sits out: {error}")
                out.add(solver_name)
                continue
            seconds = time.perf_counter() - start
            replayed = check(problem, solution.schedule, budget_bytes if solution.status.fits else None)
            yield Result(
                name, budget, budget_bytes, solver_name, solution.status.fits, replayed.time_ms,
                replayed.time_ms / least_ms - 1, solution.lower_bound_ms, replayed.peak_bytes, round(seconds, 3),
            )  # fmt: skip


def bounds_of(found: list[Result]) -> dict[tuple[str, float], float]:
    """The best lower bound of each problem and budget."""
    best: dict[tuple[str, float], float] = {}
    for result in found:
        key = result.problem, result.budget
        best[key] = max(best.get(key, 0.0), result.bound_ms or 0.0)
    return best


def fastest(found: list[Result]) -> dict[tuple[str, float], float]:
    """For each problem and budget the least time; those that no solver fits are left out."""
    best: dict[tuple[str, float], float] = {}
    for result in found:
        if result.fits:
            key = result.problem, result.budget
            best[key] = min(result.time_ms, best.get(key, result.time_ms))
    return best


def is_fastest(result: Result, best: dict[tuple[str, float], float]) -> bool:
    """Whether no plan for the same problem and budget takes noticeably less time."""
    return result.fits and result.time_ms <= TIE * best[result.problem, result.budget]


def budget_text(budget: float) -> str:
    """A budget in a heading."""
    return "smallest" if budget == SMALLEST else f"{budget:.2f}"


def table_of(found: list[Result], title: str) -> Table:
    """One line per solver: the overhead (best ones bold), time relative to greedy's, gap, and seconds of planning."""
    table = new_table(title)
    budgets = list(dict.fromkeys(result.budget for result in found))
    for budget in budgets:
        for heading in (f"{budget_text(budget)}:\noverhead", "time\n/ greedy", "\ngap", "planned\nin"):
            table.add_column(heading, justify="right", no_wrap=True)
    best, bounds = fastest(found), bounds_of(found)
    by_place = {(result.solver, result.budget): result for result in found}
    for solver in dict.fromkeys(result.solver for result in found):
        cells: list[str] = []
        for budget in budgets:
            result, greedy = by_place[solver, budget], by_place.get((GREEDY, budget))
            if not result.fits:
                cells += ["no", "–", "–", f"{result.seconds:.1f} s"]
                continue
            overhead = f"{100 * result.overhead:.2f} %"
            cells.append(f"[bold]{overhead}[/bold]" if is_fastest(result, best) else overhead)
            cells.append(f"{result.time_ms / greedy.time_ms:.3f}×" if greedy is not None and greedy.fits else "–")
            cells += [f"{gap_percent(result, bounds):.2f} %", f"{result.seconds:.1f} s"]
        table.add_row(solver, *cells)
    return table


def gap_percent(result: Result, bounds: dict[tuple[str, float], float]) -> float:
    """How much of the plan's time a better one could save at most."""
    return max(0.0, 100 * (1 - bounds[result.problem, result.budget] / result.time_ms))


def summary_of(found: list[Result], solvers: list[str]) -> Table:
    """How often each solver has the fastest plan, fits, and how long it takes."""
    table = new_table("all together")
    for heading in ("tried", "fits", "fastest", "alone", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    winners: dict[tuple[str, float], list[str]] = {}
    best = fastest(found)
    for result in found:
        if is_fastest(result, best):
            winners.setdefault((result.problem, result.budget), []).append(result.solver)
    for solver in solvers:
        own = [result for result in found if result.solver == solver]
        counts = [
            len(own),
            sum(result.fits for result in own),
            sum(solver in names for names in winners.values()),
            sum(names == [solver] for names in winners.values()),
        ]
        table.add_row(solver, *map(str, counts), f"{sum(result.seconds for result in own):.0f}")
    return table


# ---- bars --------------------------------------------------------------------------------------------


def gap_bars(found: list[Result]) -> Iterator[dict[str, Any]]:
    """The gap of the default solver, where a limit is promised: at the smallest budget, if others are below it."""
    bounds = bounds_of(found)
    for result in found:
        limits = LIMITS.get(result.problem, dict.fromkeys(OTHER_BUDGETS, OTHER_LIMIT))
        own = {other.budget for other in found if other.problem == result.problem}
        if result.budget == SMALLEST and own >= set(OTHER_BUDGETS):
            continue
        if result.solver == AUTO and result.problem in MODELS and result.budget in limits and result.fits:
            label = f"{result.problem} at {budget_text(result.budget)}: gap in percent"
            yield bar(label, gap_percent(result, bounds), limits[result.budget])
            if result.problem == "gpt2-deep":
                yield bar(f"{result.problem}: seconds of planning", result.seconds, DEEP_S)


def monotone_bar(name: str, problem: Problem, chain: Chain | None, smallest_bytes: int) -> dict[str, Any]:
    """How often a larger budget has the slower plan, in a sweep of ten budgets."""
    most = peak_and_time(problem, problem.no_recompute)[0]
    budgets = [round(smallest_bytes + (most - smallest_bytes) * part / 9) for part in range(10)]
    solver = solver_named(AUTO, Limits().within(1.0), chain)
    times = [solution.time_ms for solution in solve_sweep(problem, budgets, solver)]
    slower = sum(second > first for first, second in itertools.pairwise(times))
    return bar(f"{name}: larger budgets with a slower plan, of ten", slower, 0)


def block_bar(problems: list[tuple[Problem, Chain | None]]) -> dict[str, Any]:
    """The longest that the exact solver takes for a block of the models, at three budgets, until its proof."""
    blocks = {part.problem for problem, chain in problems if chain for part in sub_problems_of(problem, chain)}
    seconds = [0.0]
    for block in sorted(blocks, key=lambda part: (len(part.forward), part.to_json())):
        if 2 <= len(block.forward) <= BLOCK_OPS and len(block.backward) > 1:
            low, high = least_bytes(block), peak_and_time(block, block.no_recompute)[0]
            for share in (0.1, 0.4, 0.7):
                start = time.perf_counter()
                solution = Checkmate(time_limit_s=30).solve(block, round(low + share * (high - low)))
                proven = solution.status is not Status.FEASIBLE
                seconds.append(time.perf_counter() - start if proven else 30.0)
    label = f"blocks of at most {BLOCK_OPS} operations ({len(blocks)} kinds), proven optimal: most seconds"
    return bar(label, max(seconds), BLOCK_S)


def rotor_bar(repeats: int) -> dict[str, Any]:
    """Rotor's table for 100 blocks, 500 slots and 10 options a block, once the compiled code is there."""
    rng = random.Random(0)

    def option(rank: int) -> BlockOption:
        saved, peak, extra_ms = 12 - rank, rng.randint(8, 20), 0.1 * rank
        return BlockOption(extra_ms, saved, rng.randint(8, 14), peak, 1.0 + extra_ms, peak, ())

    def block(index: int) -> Block:
        options = tuple(option(rank) for rank in range(10))
        return Block(range(index, index + 1), (), rng.random(), rng.random(), 2, (), 2, rng.randint(4, 6), options)

    blocks = tuple(block(index) for index in range(100))
    seconds: list[float] = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        fill(ChainNumbers.of(blocks, 1, 500))
        seconds.append(time.perf_counter() - start)
    label = "rotor's table, 100 blocks x 500 slots x 10 options, seconds"
    return bar(label, statistics.median(seconds[1:]), ROTOR_S)


# ---- the run -----------------------------------------------------------------------------------------


def parse_options() -> argparse.Namespace:
    """Options of the command line; with --quick, fewer problems and budgets unless they are named."""
    parser = option_parser(__doc__, "small problems, and too little time for the solvers")
    parser.add_argument("--cache", type=Path, required=True, help="folder of measured problems, filled as needed")
    parser.add_argument("--problems", nargs="+", help=f"models, or {', '.join(SIZES)}")
    parser.add_argument("--solvers", nargs="+", choices=sorted(SOLVERS), default=sorted(SOLVERS))
    parser.add_argument("--budgets", nargs="+", type=float, help="parts of the peak of keep-all (default: four)")
    parser.add_argument("--time-limit", type=float, help="seconds of the default solver (default 30; quick 2)")
    parser.add_argument("--others-limit", type=float, help="seconds of each of the others (default as many)")
    parser.add_argument("--gap", type=float, default=0.002, help="at which the default solver ends (default 0.002)")
    options = parser.parse_args()
    options.problems = options.problems or list(QUICK if options.quick else (*MODELS, *SIZES))
    options.budgets = options.budgets or list(BUDGETS[1:2] if options.quick else BUDGETS)
    options.time_limit = options.time_limit or (2.0 if options.quick else 30.0)
    options.others_limit = options.others_limit or options.time_limit
    return options


def main() -> None:
    """Runs the benchmark."""
    options = parse_options()
    found: list[Result] = []
    bars: list[dict[str, Any]] = []
    least: dict[str, dict[str, int]] = {}
    problems: list[tuple[Problem, Chain | None]] = []
    for name in options.problems:
        with console.status(f"{name}: measuring"):
            problem, chain = problem_named(name, options.cache)
        problems.append((problem, chain))
        smallest_bytes = smallest_budget(problem, chain, options.others_limit).budget_bytes
        most, time_ms = peak_and_time(problem, problem.no_recompute)
        least[name] = {"keep_all": most, "smallest": smallest_bytes, "one_operation": least_bytes(problem)}
        own: list[Result] = []
        with console.status(name) as status:
            for result in results(name, problem, chain, smallest_bytes, options):
                own.append(result)
                status.update(f"{name}: {result.solver} at {result.budget} took {result.seconds:.1f} s")
            if name in MODELS and name != "gpt2-deep":
                bars.append(monotone_bar(name, problem, chain, smallest_bytes))
        console.print(table_of(own, f"{name}: keep-all {format_bytes(most)}, {format_ms(time_ms)}"))
        text = f"smallest budget known: {smallest_bytes / most:.3f} of that peak; one operation alone takes "
        console.print(f"{text}{least_bytes(problem) / most:.3f}", highlight=False)
        found += own
    console.print(summary_of(found, options.solvers))
    bars = [*gap_bars(found), *bars, block_bar(problems), rotor_bar(repeats=1 if options.quick else 5)]
    print_bars(bars)
    report = {
        "circumstances": circumstances(options)
        | {"time_limit_s": options.time_limit, "others_limit_s": options.others_limit, "gap": options.gap},
        "bytes": least,
        "bars": bars,
        "results": [asdict(result) for result in found],
    }
    write_report(options.output, "solvers.json", report)


if __name__ == "__main__":
    main()
