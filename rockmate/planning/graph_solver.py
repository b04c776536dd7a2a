"""Solvers that read more of a module than its numbers."""

from __future__ import annotations

import abc

from rk_solvers import Problem, Solution, Solver
from rockmate.errors import SolverError
from rockmate.planning.measured import Measured


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
