"""One solver under several budgets, where each plan serves every budget that it fits.

Solved one by one, a larger budget may get a slower plan: the solvers are heuristics, or out of time. Here the plan of
each budget is the fastest of all that were found for any of them and fit it; so more memory never costs time. Bounds go
the other way: what fits a budget fits a larger one too, so no plan for the smaller is faster than the larger's bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from rk_solvers.problem import Problem
from rk_solvers.solver import Solution, Solver, Status, solution_of


def solve_sweep(problem: Problem, budgets: Sequence[int], solver: Solver) -> list[Solution]:
    """A solution for each of `budgets` (in bytes, in any order), in their order.

    Of two budgets, the larger never has the slower plan, nor the greater bound. Where no plan fits a budget, the
    solution is the plan of lowest peak of all of them. Raises what `solver.solve` raises.
    """
    found = {budget: solver.solve(problem, budget) for budget in sorted(set(budgets))}
    best: dict[int, Solution] = {}
    bound_ms, proven_ms = -math.inf, -math.inf  # of all budgets from this one on
    for budget in sorted(found, reverse=True):
        own, solution = found[budget], _best(problem, budget, list(found.values()))
        if own.lower_bound_ms is not None:
            bound_ms = max(bound_ms, own.lower_bound_ms)
        if own.status is Status.OPTIMAL:
            proven_ms = max(proven_ms, own.time_ms)
        if solution.status.fits and solution.time_ms <= proven_ms:
            # It comes from another budget, but is as good as one that was proven best here or for more memory.
            solution = replace(solution, status=Status.OPTIMAL)
        # What a solver proves is proven up to rounding: no bound may be above a plan that fits.
        known_ms = min(bound_ms, solution.time_ms) if solution.status.fits else bound_ms
        best[budget] = replace(solution, lower_bound_ms=known_ms if known_ms > -math.inf else None)
    return [best[budget] for budget in budgets]


def _best(problem: Problem, budget_bytes: int, solutions: list[Solution]) -> Solution:
    """The fastest of the plans that fit a budget, else that of lowest peak, as a solution for this budget."""
    fitting = [solution for solution in solutions if solution.peak_bytes <= budget_bytes]
    if fitting:
        chosen = min(fitting, key=lambda solution: (solution.time_ms, solution.peak_bytes))
    else:
        chosen = min(solutions, key=lambda solution: (solution.peak_bytes, solution.time_ms))
    return solution_of(problem, budget_bytes, chosen.schedule, chosen.solver)
