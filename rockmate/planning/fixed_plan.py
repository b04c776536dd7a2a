"""Follow decisions that were made elsewhere: on another rank, for another shape, or before the process began."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from rk_solvers import Problem, Schedule, Solution, Solver, schedule_of
from rk_solvers.solver import solution_of
from rockmate.errors import PlanMismatch

JSON_VERSION = 1


@dataclass(frozen=True, slots=True)
class PortablePlan:
    """What a plan recomputes, by the names of operations: all that must be known to make the same plan again.

    Names hold for every problem of the same operations, whatever their sizes and times.
    """

    stages: tuple[tuple[str, tuple[str, ...]], ...]  # of each backward operation that has some: what is recomputed
    solver: str  # the name of the one that found them

    @staticmethod
    def of(schedule: Schedule, solver: str) -> PortablePlan:
        """Those of a schedule."""
        return PortablePlan(tuple(schedule.recomputed.items()), solver)

    def schedule_for(self, problem: Problem) -> Schedule:
        """The same decisions for `problem`. Raises `PlanMismatch` naming the first that it cannot follow."""
        index_of = {op.name: index for index, op in enumerate(problem.forward)}
        backward = {op.name for op in problem.backward}
        for stage, names in self.stages:
            if stage not in backward:
                raise _unknown("backward operation", stage, f"recomputes {', '.join(names)} just before it")
            for name in names:
                if name not in index_of:
                    raise _unknown("forward operation", name, f"recomputes it just before {stage}")
                if not problem.forward[index_of[name]].recomputable:
                    raise PlanMismatch(
                        f"the plan recomputes {name} just before {stage}, but {name} must run once here (it is pinned, "
                        "or must never be repeated). Plan this module by itself."
                    )
        return schedule_of(problem, dict(self.stages))

    def to_json(self) -> str:
        """The decisions as versioned JSON text; `from_json` reads it back."""
        stages = [[stage, list(names)] for stage, names in self.stages]
        return json.dumps({"version": JSON_VERSION, "solver": self.solver, "stages": stages})

    @staticmethod
    def from_json(text: str) -> PortablePlan:
        """Read what `to_json` wrote. Raises `ValueError` on anything else."""
        try:
            content = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"these decisions are not JSON: {error}") from None
        version = content.get("version") if isinstance(content, dict) else None
        if version != JSON_VERSION:
            raise ValueError(f"these decisions have version {version!r}; this code reads version {JSON_VERSION}")
        solver, stages = content.get("solver"), content.get("stages")
        if content.keys() != {"version", "solver", "stages"} or not isinstance(solver, str):
            raise ValueError(f"decisions have a version, a solver and stages, but these have {', '.join(content)}")
        if not isinstance(stages, list) or not all(map(_is_stage, stages)):
            raise ValueError("stages must be a list of pairs: a backward operation, and a list of forward operations")
        return PortablePlan(tuple((stage, tuple(names)) for stage, names in stages), solver)


@dataclass(frozen=True, slots=True)
class FixedPlan(Solver):
    """Decides nothing: returns the decisions that it is given, with what they cost in the problem at hand.

    `lower_bound_ms`, if given, is what the problem's other plans are known to take at least.
    """

    decisions: PortablePlan
    lower_bound_ms: float | None = None

    @property
    def name(self) -> str:
        """Short name shown in solutions: of the solver that decided."""
        return self.decisions.solver

    def solve(self, problem: Problem, budget_bytes: int) -> Solution:
        """The decisions as a schedule for `problem`; infeasible if its peak is above `budget_bytes`.

        Raises `PlanMismatch` where the problem has not the operations that are decided upon.
        """
        solution = solution_of(problem, budget_bytes, self.decisions.schedule_for(problem), self.name)
        if self.lower_bound_ms is None or not solution.status.fits:
            return solution
        return replace(solution, lower_bound_ms=min(self.lower_bound_ms, solution.time_ms))


def _is_stage(content: Any) -> bool:
    if not isinstance(content, list) or len(content) != 2 or not isinstance(content[0], str):
        return False
    return isinstance(content[1], list) and all(isinstance(name, str) for name in content[1])


def _unknown(what: str, name: str, decided: str) -> PlanMismatch:
    return PlanMismatch(
        f"there is no {what} {name} here, but the plan to be followed {decided}: it was made for another graph. "
        "Plan this module by itself."
    )
