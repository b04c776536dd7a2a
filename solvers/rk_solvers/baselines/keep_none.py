"""Keep-none: all that a backward operation needs is computed again just before it."""

from __future__ import annotations

from dataclasses import dataclass

from rk_solvers.groups import leading_to
from rk_solvers.problem import Problem, Recompute
from rk_solvers.solver import Solution, Solver, solution_of


@dataclass(frozen=True, slots=True)
class KeepNone(Solver):
    """Before each backward operation recompute all that it needs, from held and unrecomputable data only."""

    @property
    def name(self) -> str:
        """Short name shown in solutions."""
        return "keep-none"

    def solve(self, problem: Problem, budget_bytes: int) -> Solution:
        """The plan that keeps least between backward operations; infeasible if above `budget_bytes`."""
        return solution_of(problem, budget_bytes, keep_none_plan(problem), self.name)


def keep_none_plan(problem: Problem) -> Recompute:
    """For each backward operation, everything that leads to it and may be recomputed."""
    return tuple(tuple(sorted(leading_to(problem, op.needs))) for op in problem.backward)
