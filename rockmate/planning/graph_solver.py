"""Solvers that read more of a module than its numbers."""

from __future__ import annotations

import abc
from collections.abc import Callable

from rk_solvers import Problem, Solution, Solver, solver_named
from rockmate.errors import SolverError
from rockmate.planning.measured import Measured
from rockmate.planning.request import PlanRequest


class GraphSolver(Solver):
    """Is made anew for the graphs of each call that is planned: for its blocks, or for the layers of the module.

    Subclasses are dataclasses of plain values, so that equal ones are known to plan alike.
    """

    @abc.abstractmethod
    def for_measured(self, measured: Measured) -> Solver:
        """The solver for this module and call."""

    def solve(self, problem: Problem, budget_bytes: int) -> Solution:
        """Raises `SolverError`: numbers alone do not tell what it works along."""
        raise SolverError(
            f"the solver {self.name!r} needs the graphs of a module, and is given numbers alone: hand it to "
            "Rockmate(model, solver=...), or take a solver of rk_solvers."
        )


def solver_for(request: PlanRequest, measured: Measured, progress: Callable[[str], None] | None = None) -> Solver:
    """The solver that was asked for, made for what was measured; it tells `progress` how far its search is."""
    if isinstance(request.solver, str):
        return solver_named(request.solver, request.limits, measured.chain, progress)
    return request.solver.for_measured(measured) if isinstance(request.solver, GraphSolver) else request.solver
