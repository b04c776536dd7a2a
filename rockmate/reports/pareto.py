"""Memory against time: what solvers find for several budgets, beside the plan. Needs no model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rk_solvers import Chain, Greedy, KeepAll, KeepNone, Knapsack, Problem, Rotor, Schedule, evaluate, schedule_of
from rk_solvers.baselines.chen import chen_plans
from rockmate.plan_files.content import PlanFile

# Forward operations times the backward's. Up to so many, all take part, and answer within seconds …
SMALL = 70_000
LARGE = 250_000  # … and beyond so many, only "chen" does: "keep-none" recomputes as often as that.
_TRIES = 24  # of "chen", and fewer for large problems
_SLOTS = 200  # of the dynamic program, for all budgets together


@dataclass(frozen=True, slots=True)
class ParetoPoint:
    """A plan that a solver found."""

    solver: str
    peak_bytes: int  # predicted
    time_ms: float  # predicted


def pareto_points(plan_file: PlanFile, budgets: int = 8) -> tuple[ParetoPoint, ...]:
    """Plans of the quick solvers and the baselines at `budgets` budgets, from the lowest peak of "chen" to keep-all's.

    Of each solver, only plans that none of its own beats in both peak and time. Which solvers take part depends on the
    size of the problem, never on how fast the machine is: the same file gives the same points.

    Raises:
        ValueError: fewer than two budgets.
    """
    if budgets < 2:
        raise ValueError(f"a curve needs at least two budgets, not {budgets}")
    problem, chain = plan_file.problem, plan_file.solver_chain
    size = len(problem.forward) * len(problem.backward)
    points = [_point(problem, "keep-all", KeepAll().solve(problem, 0).schedule)]
    if size <= LARGE:
        points.append(_point(problem, "keep-none", KeepNone().solve(problem, 0).schedule))
    tries = min(_TRIES, max(4, 8_000_000 // max(1, size)))
    chen = [_point(problem, "chen", schedule_of(problem, plan)) for plan in chen_plans(problem, chain, tries)]
    points += best_of(chen)
    if size <= SMALL:
        low_bytes = min(min(point.peak_bytes for point in chen), plan_file.promise.budget_bytes)
        span_bytes = points[0].peak_bytes - low_bytes
        asked = sorted({low_bytes + span_bytes * step // (budgets - 1) for step in range(budgets)})
        points += _searched(problem, chain, asked)
    return tuple(sorted(points, key=lambda point: (point.solver, point.peak_bytes)))


def best_of(points: Iterable[ParetoPoint]) -> list[ParetoPoint]:
    """Those of lower time than all of a lower or equal peak, by peak."""
    found: list[ParetoPoint] = []
    for point in sorted(points, key=lambda point: (point.peak_bytes, point.time_ms)):
        if not found or point.time_ms < found[-1].time_ms:
            found.append(point)
    return found


def _searched(problem: Problem, chain: Chain, budgets: list[int]) -> list[ParetoPoint]:
    table = Rotor(chain, slots=_SLOTS).prepare(problem, budgets[-1])
    # Without a limit of time, within which a faster machine would find more.
    greedy = Greedy(tries=2, rounds=20, time_limit_s=float("inf"))
    found: list[ParetoPoint] = []
    for solutions in (
        [table.solve(budget) for budget in budgets],
        [Knapsack().solve(problem, budget) for budget in budgets],
        [greedy.solve(problem, budget) for budget in budgets],
    ):
        fitting = [solution for solution in solutions if solution.status.fits]
        found += best_of(_point(problem, solution.solver, solution.schedule) for solution in fitting)
    return found


def _point(problem: Problem, solver: str, schedule: Schedule) -> ParetoPoint:
    result = evaluate(problem, schedule)
    return ParetoPoint(solver, result.peak_bytes, result.time_ms)
