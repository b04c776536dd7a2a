"""Follow decisions that were made elsewhere: on another rank, for another shape, or before the process began."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from rk_solvers import Problem, Schedule, SecondMemory, Solution, Solver, Status, schedule_of
from rk_solvers.liveness import recompute_of
from rk_solvers.solver import solution_of
from rk_solvers.transfers.moves import Base, Gap, Move
from rk_solvers.transfers.placing import placed
from rk_solvers.transfers.reading import returns_in
from rockmate.errors import PlanMismatch

JSON_VERSION = 2
_READ_VERSIONS = (1, 2)  # the first has no moves


@dataclass(frozen=True, slots=True)
class PortablePlan:
    """What a plan recomputes and moves, by the names of operations: all that is needed to make the same plan again.

    Names hold for every problem of the same operations, whatever their sizes and times.
    """

    stages: tuple[tuple[str, tuple[str, ...]], ...]  # of each backward operation that has some: what is recomputed
    solver: str  # the name of the one that found them
    moves: tuple[tuple[str, int], ...] = ()  # data, and the computation before which each is back, counted from 0

    @staticmethod
    def of(schedule: Schedule, solver: str) -> PortablePlan:
        """Those of a schedule."""
        return PortablePlan(tuple(schedule.recomputed.items()), solver, returns_in(schedule))

    def schedule_for(self, problem: Problem) -> Schedule:
        """What is recomputed, for `problem`. Raises `PlanMismatch` naming the first that it cannot follow."""
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

    def gaps_in(self, base: Base) -> list[Gap]:
        """When data are away. Raises `PlanMismatch` where one of them has no two such uses."""
        known = {(base.problem.data[gap.data].name, gap.after): gap for gap in base.gaps}
        missing = next((move for move in self.moves if move not in known), None)
        if missing is not None:
            name, after = missing
            raise _unknown("data", name, f"moves it, to be back for the computation {after} of the step")
        return [known[move] for move in self.moves]

    def to_json(self) -> str:
        """The decisions as versioned JSON text; `from_json` reads it back."""
        stages = [[stage, list(names)] for stage, names in self.stages]
        moves = [list(move) for move in self.moves]
        return json.dumps({"version": JSON_VERSION, "solver": self.solver, "stages": stages, "moves": moves})

    @staticmethod
    def from_json(text: str) -> PortablePlan:
        """Read what `to_json` wrote. Raises `ValueError` on anything else."""
        try:
            content = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"these decisions are not JSON: {error}") from None
        version = content.get("version") if isinstance(content, dict) else None
        if version not in _READ_VERSIONS:
            raise ValueError(f"these decisions have version {version!r}; this code reads up to {JSON_VERSION}")
        solver, stages, moves = content.get("solver"), content.get("stages"), content.setdefault("moves", [])
        if content.keys() != {"version", "solver", "stages", "moves"} or not isinstance(solver, str):
            raise ValueError(
                f"decisions have a version, a solver, stages and moves, but these have {', '.join(content)}"
            )
        if not isinstance(moves, list) or not all(map(_is_move, moves)):
            raise ValueError("moves must be a list of pairs: a data, and the computation before which it is back")
        if not isinstance(stages, list) or not all(map(_is_stage, stages)):
            raise ValueError("stages must be a list of pairs: a backward operation, and a list of forward operations")
        decided = tuple((stage, tuple(names)) for stage, names in stages)
        return PortablePlan(decided, solver, tuple((name, after) for name, after in moves))


@dataclass(frozen=True, slots=True)
class FixedPlan(Solver):
    """Decides nothing: returns the decisions that it is given, with what they cost in the problem at hand.

    `lower_bound_ms`, if given, is what the problem's other plans are known to take at least. What moves, moves to
    `memory`.
    """

    decisions: PortablePlan
    lower_bound_ms: float | None = None
    memory: SecondMemory | None = None

    @property
    def name(self) -> str:
        """Short name shown in solutions: of the solver that decided."""
        return self.decisions.solver

    def solve(self, problem: Problem, budget_bytes: int) -> Solution:
        """The decisions as a schedule for `problem`; infeasible if its peak is above `budget_bytes`.

        Raises `PlanMismatch` where the problem has not the operations that are decided upon.
        """
        if self.decisions.moves:
            solution = self._moving(problem, budget_bytes)
        else:
            solution = solution_of(problem, budget_bytes, self.decisions.schedule_for(problem), self.name)
        if self.lower_bound_ms is None or not solution.status.fits:
            return solution
        return replace(solution, lower_bound_ms=min(self.lower_bound_ms, solution.time_ms))

    def _moving(self, problem: Problem, budget_bytes: int) -> Solution:
        if self.memory is None:
            raise PlanMismatch(
                f"the plan moves {len(self.decisions.moves)} data to a second memory, and there is none here: say "
                'offload="auto", or plan this module by itself.'
            )
        recompute = recompute_of(problem, self.decisions.schedule_for(problem))
        base = Base(problem, recompute, self.memory, over_the_turn=True)
        gaps = self.decisions.gaps_in(base)
        moves = placed(base, gaps, budget_bytes)
        fits = moves is not None
        if moves is None:
            moves = [Move(gap, gap.before, gap.after) for gap in gaps]
        costs = base.costs(moves)
        fits = fits and self.memory.has_room_for(costs.stored_bytes)
        return Solution(
            Status.FEASIBLE if fits else Status.INFEASIBLE,
            base.schedule(moves),
            costs.time_ms,
            costs.peak_bytes,
            self.name,
            smallest_budget_bytes=None if fits else costs.peak_bytes,
            stored_bytes=costs.stored_bytes,
            memory=self.memory,
        )


def _is_move(content: Any) -> bool:
    if not isinstance(content, list) or len(content) != 2 or not isinstance(content[0], str):
        return False
    return isinstance(content[1], int) and not isinstance(content[1], bool)


def _is_stage(content: Any) -> bool:
    if not isinstance(content, list) or len(content) != 2 or not isinstance(content[0], str):
        return False
    return isinstance(content[1], list) and all(isinstance(name, str) for name in content[1])


def _unknown(what: str, name: str, decided: str) -> PlanMismatch:
    return PlanMismatch(
        f"there is no {what} {name} here, but the plan to be followed {decided}: it was made for another graph. "
        "Plan this module by itself."
    )
