"""What a user asks for when a module is to be planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rk_solvers import SOLVERS, Solver
from rk_solvers.registry import DEFAULT_EXTRA_S, DEFAULT_GAP, DEFAULT_TIME_LIMIT_S
from rockmate.errors import LossError, SolverError
from rockmate.memory.budget import Budget, check_budget
from rockmate.memory.optimizer_state import OptimizerLike
from rockmate.memory.split import Scope, check_scope
from rockmate.planning.costs import LossFunction
from rockmate.planning.fixed_plan import PortablePlan
from rockmate.planning.pins import Pin

Progress = Callable[[str, int, int], None]


def no_progress(stage: str, done: int, total: int) -> None:
    """Nobody asked to be told."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What the user asked for."""

    budget: Budget
    loss: LossFunction | None = None
    solver: Solver | str = "auto"
    progress: Progress = no_progress
    time_limit_s: float | None = None  # for one search, None: as `Effort` says; measuring takes time of its own
    gap: float = DEFAULT_GAP  # the search ends where no plan is faster by more than this share of the step's time
    pin: tuple[Pin, ...] = ()  # what is saved and never recomputed
    scope: Scope = "step"  # what the budget is for
    optimizer: OptimizerLike | None = None  # whose state is in a budget for all of training
    may_branch: bool = False  # data that take another branch of the model are planned by themselves
    opaque: tuple[str, ...] = ()  # paths of submodules whose call is one operation, beside compiled ones
    follow: PortablePlan | None = None  # those of another plan: taken where they fit, in place of a search
    may_exceed: bool = False  # where no plan fits the budget, take the one of lowest peak

    @property
    def longest_search_s(self) -> float:
        """Seconds that one search may take; a plan may take a few."""
        return DEFAULT_TIME_LIMIT_S + DEFAULT_EXTRA_S if self.time_limit_s is None else self.time_limit_s


def check_request(request: PlanRequest) -> None:
    """Refuse what could only fail after minutes of measuring.

    Raises `BudgetError`, `SolverError`, `OptimizerError`, `LossError`.
    """
    check_budget(request.budget)
    known = request.solver in SOLVERS if isinstance(request.solver, str) else isinstance(request.solver, Solver)
    if not known:
        raise SolverError(
            f"solver must be one of {', '.join(sorted(SOLVERS))}, or an instance of rk_solvers.Solver such as "
            f'Greedy(), but is {request.solver!r}. Leave it out, or say "auto", to have the best of several.'
        )
    check_scope(request.scope, request.optimizer)
    if request.time_limit_s is not None and not request.time_limit_s >= 0:
        raise SolverError(f"time_limit is {request.time_limit_s!r}; give the seconds that a search may take.")
    if not 0 <= request.gap < 1:
        raise SolverError(
            f"gap is {request.gap!r}; give the share of the step's time that a faster plan may save, such "
            "as 0.01 for 1 %, and 0 for a proof."
        )
    if request.loss is not None and not callable(request.loss):
        raise LossError(f"loss must be a function of the model's output, but is {request.loss!r}.")
