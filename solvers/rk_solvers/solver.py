"""What every solver is (`Solver`) and returns (`Solution`)."""

from __future__ import annotations

import abc
import enum
from collections.abc import Sequence
from dataclasses import dataclass

from rk_solvers.groups import normalise
from rk_solvers.links import SecondMemory
from rk_solvers.liveness import Plan, evaluate, recompute_of, schedule_of
from rk_solvers.problem import Problem, Recompute
from rk_solvers.schedule import Schedule

SAME = 1e-5  # times that differ by no more than this share are one: the tolerances of back ends and of sums


class Status(enum.Enum):
    """How a solve ended; the value is the sentence shown to the user."""

    OPTIMAL = "No schedule of this class that fits the budget takes less time."
    FEASIBLE = (
        "The schedule fits the budget. A faster one may exist: raise the solver's time limit or number of "
        "tries to search longer."
    )
    INFEASIBLE = (
        "No schedule known to this solver fits the budget. Raise the budget to at least the smallest one "
        "reported, or reduce the batch."
    )

    @property
    def fits(self) -> bool:
        """Whether a schedule within the budget was found."""
        return self is not Status.INFEASIBLE


@dataclass(frozen=True, slots=True)
class Solution:
    """A schedule with its cost. If infeasible, it is the lowest-peak schedule that the solver knows."""

    status: Status
    schedule: Schedule
    time_ms: float
    peak_bytes: int
    solver: str  # name of the solver that found it
    smallest_budget_bytes: int | None = None  # infeasible only: the peak of this schedule
    binding_op: str | None = None  # infeasible only: the operation of that peak, such as "compute linear_3"
    proven_bytes: int | None = None  # infeasible only: no schedule's peak is lower; None if not known
    lower_bound_ms: float | None = None  # no schedule that fits takes less; infinite if none fits, None if unknown
    interrupted: bool = False  # the user ended the search: a longer one may find a better schedule
    out_of_time: bool = False  # its time limit ended the search, likewise
    stored_bytes: int = 0  # in a second memory at most
    memory: SecondMemory | None = None  # that one, where data move
    alone: Solution | None = None  # beside a plan that moves data, the one that was found of recomputation alone

    @property
    def gap(self) -> float | None:
        """How much of the time a better schedule could save at most: 0.02 is 2 %. None where no bound is known."""
        if self.lower_bound_ms is None or not self.status.fits:
            return None
        return max(0.0, 1 - self.lower_bound_ms / self.time_ms) if self.time_ms > 0 else 0.0

    def __str__(self) -> str:
        count = self.schedule.recomputations
        word = "fits" if self.status.fits else "does not fit"
        return (
            f"Solution({self.solver}: {word}, peak {self.peak_bytes / 2**20:.1f} MiB, "
            f"{self.time_ms:.2f} ms, {count} recomputations{self._moves_text()})"
        )

    def _moves_text(self) -> str:
        moves = len(self.schedule.offloaded)
        return f", {moves} data moved" if moves else ""


class Solver(abc.ABC):
    """Finds a schedule of least time whose peak fits a budget. Options are the subclass's fields."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Short name shown in solutions."""

    @abc.abstractmethod
    def solve(self, problem: Problem, budget_bytes: int) -> Solution:
        """Solve `problem` under `budget_bytes`; a budget that is too small is a `Status`, not an error."""


def solution_of(problem: Problem, budget_bytes: int, plan: Plan, solver: str, *, optimal: bool = False) -> Solution:
    """Evaluate a plan, in its normal form, against a budget."""
    plan = normalise(problem, recompute_of(problem, plan))
    result = evaluate(problem, plan)
    schedule = schedule_of(problem, plan)
    if result.peak_bytes > budget_bytes:
        return Solution(
            Status.INFEASIBLE,
            schedule,
            result.time_ms,
            result.peak_bytes,
            solver,
            result.peak_bytes,
            result.peak_at,
        )
    status = Status.OPTIMAL if optimal or not any(plan) else Status.FEASIBLE
    bound_ms = result.time_ms if status is Status.OPTIMAL else None
    return Solution(status, schedule, result.time_ms, result.peak_bytes, solver, lower_bound_ms=bound_ms)


def best_solution(problem: Problem, budget_bytes: int, plans: Sequence[tuple[str, Plan]]) -> Solution:
    """The fastest of named plans that fits the budget, else that of lowest peak. Raises if there is none."""
    name, plan = best_plan(problem, budget_bytes, plans)
    return solution_of(problem, budget_bytes, plan, name)


def best_plan(problem: Problem, budget_bytes: int, plans: Sequence[tuple[str, Plan]]) -> tuple[str, Recompute]:
    """The plan of `best_solution`, in its normal form, and its name."""
    if not plans:
        raise ValueError("there must be at least one plan to choose from")
    ranked: list[tuple[bool, float, float, int]] = []
    normal = [normalise(problem, recompute_of(problem, plan)) for _, plan in plans]
    for order, plan in enumerate(normal):
        result = evaluate(problem, plan)
        over = result.peak_bytes > budget_bytes
        costs = (result.peak_bytes, result.time_ms) if over else (result.time_ms, result.peak_bytes)
        ranked.append((over, *costs, order))
    best = min(ranked)[-1]
    return plans[best][0], normal[best]
