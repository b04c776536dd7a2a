"""Where the gap of a plan stays open: small budgets, what proves how much there, and how long it takes.

    python benchmarks/small_budgets.py --cache folder                  # 20 minutes; results/small-budgets.json
    python benchmarks/small_budgets.py --cache folder --seconds 600 --cases transformer@0.2 --add
    python benchmarks/small_budgets.py --quick --cache folder --output folder   # tiny models, too little time

Each problem is measured once, into the cache. The usual search has 30 s. Where its gap is above 1 %, the bound alone
has `--seconds` after that, given the plan. A case is quick to search, so nothing else should be computed meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from benchmarks.peers.models import RECIPES, case_named
from benchmarks.problems import kept_problem, problem_named
from benchmarks.reporting import circumstances, code_version, console, new_table, option_parser, write_report
from rk_solvers import (
    Chain,
    Limits,
    Problem,
    lower_bound_ms,
    peak_and_time,
    smallest_budget,
    solver_named,
)
from rk_solvers.liveness import Plan
from rockmate.planning.measured import Measured, measure
from rockmate.planning.request import PlanRequest

RESULTS = "small-budgets.json"
SMALLEST = "least"  # in place of a share: the smallest budget that is found
TIMES = "*"  # between that and a factor: the gap closes as the budget grows
CASES = (
    "transformer@0.2", "hf-bert@0.2", "hf-llama@0.2", "resnet101-demo@0.3", "gpt2-deep@0.25",
    "transformer@least", "transformer@least*1.03", "transformer@least*1.06", "transformer@least*1.12",
    "hf-bert@least", "hf-bert@least*1.03", "hf-bert@least*1.06", "hf-bert@least*1.12",
    "resnet101-demo@least", "resnet101-demo@least*1.03", "resnet101-demo@least*1.06", "resnet101-demo@least*1.12",
)  # fmt: skip
QUICK = ("transformer@0.3", "hf-bert@least", "hf-bert@least*1.5")
SEARCH_S, QUICK_S = 30.0, 2.0  # of the usual search
OPEN = 0.01  # a gap above this is open
SMALLEST_S = 15.0  # to find the smallest budget


@dataclass(frozen=True)
class Found:
    """A plan, and what is proven. Times are above that of keeping all, as parts of it."""

    seconds: float
    plan: float
    bound: float
    gap: float  # of the plan's time
    solver: str


def main() -> None:
    """Search, prove, and write what was found after each case."""
    options = _options()
    torch.set_num_threads(options.threads)
    path = options.output / RESULTS
    known = json.loads(path.read_text(encoding="utf-8"))["cases"] if options.add and path.exists() else []
    rows = {row["case"]: row for row in known}  # one that is searched anew keeps its place
    for case in options.cases or (QUICK if options.quick else CASES):
        rows[case] = row_of(case, options)
        write_report(options.output, RESULTS, {"cases": list(rows.values())}, quietly=True)
    console.print(table(list(rows.values())))


def row_of(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """All that is measured of one case, and the code and circumstances of that."""
    name, share = case.split("@")
    problem, chain = _problem(name, options.cache, options.quick)
    budget_bytes, proven_bytes = _budget(problem, chain, share, options)
    search_s = QUICK_S if options.quick else SEARCH_S
    first, plan = search(problem, chain, budget_bytes, Limits().within(search_s))
    row: dict[str, Any] = {
        "case": case,
        "code": code_version(),
        "circumstances": {**circumstances(options), "usable_cores": len(os.sched_getaffinity(0))},
        "given_s": options.seconds,
        "budget_bytes": budget_bytes,
        "share": budget_bytes / peak_and_time(problem, problem.no_recompute)[0],
        "proven_bytes": proven_bytes,
        "first": asdict(first),
    }
    bound = first.bound
    if first.gap > OPEN:
        start = time.perf_counter()
        alone_ms = lower_bound_ms(problem, budget_bytes, chain, options.seconds, integer=True, plan=plan)
        bound = max(bound, min(alone_ms / problem.keep_all_time_ms - 1, first.plan))
        row["alone"] = {"seconds": time.perf_counter() - start, "bound": bound, "gap": _gap(first.plan, bound)}
    row["bracket"] = {"plan": first.plan, "bound": bound, "gap": _gap(first.plan, bound)}
    console.print(f"{case}: {row['bracket']}")
    return row


def search(problem: Problem, chain: Chain | None, budget_bytes: int, limits: Limits) -> tuple[Found, Plan]:
    """What the usual search finds and proves within the limits."""
    start = time.perf_counter()
    solution = solver_named("auto", limits, chain).solve(problem, budget_bytes)
    if not solution.status.fits or solution.lower_bound_ms is None:
        raise RuntimeError(f"no plan was found within {budget_bytes} bytes: give the search more seconds")
    plan, bound = (time_ms / problem.keep_all_time_ms - 1 for time_ms in (solution.time_ms, solution.lower_bound_ms))
    found = Found(time.perf_counter() - start, plan, bound, _gap(plan, bound), solution.solver)
    return found, solution.schedule


def table(rows: list[dict[str, Any]]) -> Any:
    """Overheads in percent of keep-all's time."""
    made = new_table("Small budgets: % above keep-all")
    for column in ("plan", "bound", "gap", "bound alone", "gap"):
        made.add_column(column, justify="right")
    for row in rows:
        found = [row["first"][key] for key in ("plan", "bound", "gap")]
        found += [row["alone"][key] if "alone" in row else None for key in ("bound", "gap")]
        made.add_row(row["case"], *("–" if part is None else f"{100 * part:.2f}" for part in found))
    return made


def _gap(plan: float, bound: float) -> float:
    return max(0.0, 1 - (1 + bound) / (1 + plan))


def _problem(name: str, cache: Path, quick: bool) -> tuple[Problem, Chain | None]:
    """That of a model of `benchmarks/peers`, or as `problem_named` has it."""
    if name not in RECIPES:
        return problem_named(name, cache)

    def measured() -> Measured:
        case = case_named(name, "cpu", quick)
        return measure(case.model, case.sample, PlanRequest(1.0, case.loss))

    return kept_problem(cache / f"{name}{'-quick' if quick else ''}.json", measured)


def _budget(problem: Problem, chain: Chain | None, share: str, options: Any) -> tuple[int, int | None]:
    """A part of keep-all's peak, or the smallest budget, or so many times that; and what is proven of the smallest."""
    smallest, _, factor = share.partition(TIMES)
    if smallest != SMALLEST:
        return int(float(share) * peak_and_time(problem, problem.no_recompute)[0]), None
    found = smallest_budget(problem, chain, QUICK_S if options.quick else SMALLEST_S)
    return int(found.budget_bytes * float(factor or 1)), found.proven_bytes


def _options() -> argparse.Namespace:
    parser = option_parser(__doc__, "tiny models and little time, to see that it runs")
    parser.add_argument("--cache", type=Path, required=True, help="folder of measured problems, filled as needed")
    parser.add_argument(
        "--cases",
        nargs="+",
        help=f"model@share, model@{SMALLEST} or model@{SMALLEST}{TIMES}1.1 (default: {' '.join(CASES)})",
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of the bound alone (default 60)")
    parser.add_argument("--add", action="store_true", help="keep other cases of the file of results that is there")
    options = parser.parse_args()
    if options.quick:
        options.seconds = min(options.seconds, QUICK_S)
    return options


if __name__ == "__main__":
    main()
