"""Keep-all: the plain step, which recomputes nothing."""

from __future__ import annotations

from dataclasses import dataclass

from rk_solvers.problem import Problem
from rk_solvers.solver import Solution, Solver, solution_of


@dataclass(frozen=True, slots=True)
class KeepAll(Solver):
    """Recompute nothing: the memory and time of the plain step."""

    @property
    def name(self) -> str:
        """Short name shown in solutions."""
        return "keep-all"

    def solve(self, problem: Problem, budget_bytes: int) -> Solution:
        """The plain step; infeasible if its peak is above `budget_bytes`."""
        return solution_of(problem, budget_bytes, problem.no_recompute, self.name)
