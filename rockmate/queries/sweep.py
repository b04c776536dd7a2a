"""Memory against time: one model, measured once, under many budgets and by every solver."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rk_solvers import (
    SOLVERS,
    BackendUnavailable,
    Limits,
    Problem,
    Solution,
    Solver,
    normalise,
    peak_and_time,
    solve_sweep,
    solver_named,
)
from rk_solvers.bounds.peak_bound import least_peak_bytes
from rk_solvers.local.min_peak_search import min_peak_plan
from rockmate.choices.module_layout import as_asked
from rockmate.errors import ArgumentError, BudgetTooSmall
from rockmate.memory.budget import resolve_budget
from rockmate.offload.option import Offload
from rockmate.options import PlanOptions
from rockmate.planning.costs import LossFunction
from rockmate.planning.graph_solver import memory_for
from rockmate.planning.measured import Measured, measure
from rockmate.planning.planner import make_plan, planning
from rockmate.planning.request import PlanRequest, check_request
from rockmate.progress import ProgressCallback, progress_display

OURS = "auto"  # what `Rockmate` does by default: its plans are run, too
DEFAULT_TIME_LIMIT_S = 5.0  # for each solver and budget


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One solver under one budget."""

    solver: str
    budget_bytes: int
    fits: bool
    peak_bytes: int  # predicted; of what does not fit, the lowest found
    time_ms: float  # predicted
    slowdown: float  # that, relative to no recomputation: 1.1 is 10 % more
    measured_peak_bytes: int | None  # of a real step of the plan, where one was run
    gap: float | None  # how much of the time a better plan could save at most
    took_s: float
    moves: int = 0  # data that the plan moves


@dataclass(frozen=True, slots=True)
class Sweep:
    """All solvers under all budgets."""

    eager_peak_bytes: int  # measured
    keep_all_ms: float  # the step without recomputation
    smallest_bytes: int  # the lowest peak that was found, predicted or measured
    proven_bytes: int  # no plan takes less
    rows: tuple[SweepRow, ...]  # by solver, then by budget
    left_out: tuple[tuple[str, str], ...]  # solvers that cannot run here, and why

    @property
    def solvers(self) -> tuple[str, ...]:
        """Those that took part, in their order."""
        return tuple(dict.fromkeys(row.solver for row in self.rows))

    @property
    def budgets(self) -> tuple[int, ...]:
        """In bytes, from the smallest."""
        return tuple(sorted({row.budget_bytes for row in self.rows}))

    def row(self, solver: str, budget_bytes: int) -> SweepRow:
        """Of that solver and budget. Raises `KeyError` where there is none."""
        for row in self.rows:
            if (row.solver, row.budget_bytes) == (solver, budget_bytes):
                return row
        raise KeyError(f"{solver} was not run under {budget_bytes} bytes")


def sweep(
    model: torch.nn.Module,
    sample: Any,
    budgets: Sequence[int | float | str],
    *,
    loss: LossFunction | None = None,
    solvers: Sequence[str] | None = None,
    time_limit: float | None = None,
    gap: float | None = None,
    progress: bool | ProgressCallback = False,
    offload: Offload | str | None = None,
    compile: bool = False,
    options: PlanOptions | None = None,
) -> Sweep:
    """Measure `model` once, and plan it for each of `budgets` by each of `solvers` (all there are, if None).

    The plans of "auto" are run, and hold their budgets in real steps; those of the others are predicted, on the same
    measured problem: of each, the plan for a budget is the fastest of all its plans that fit. Solvers that cannot run
    here are left out, with the reason. With `offload`, as for `Rockmate`, plans of "auto" may also move data; the other
    solvers recompute alone. With `compile`, those of "auto" have compiled parts where they are faster so; the other
    solvers plan eager operations.

    `time_limit` are the seconds for each solver and budget, 5 by default; `options` are as for `Rockmate`, of which the
    solver is left out.

    Raises `ArgumentError` for no budget or an unknown solver, and what planning raises.
    """
    names = list(SOLVERS) if solvers is None else list(dict.fromkeys(solvers))
    unknown = [name for name in names if name not in SOLVERS]
    if unknown or not names or not budgets:
        raise ArgumentError(f"there is no solver {unknown[0]!r}" if unknown else "a sweep needs a budget and a solver")
    if time_limit is None and options is None:
        time_limit = DEFAULT_TIME_LIMIT_S
    said = {"loss": loss, "progress": progress, "offload": offload, "compile": compile}
    options = PlanOptions.of(options, said, time_limit, gap)
    with progress_display(options.progress) as tell:
        request = replace(options.request(None), progress=tell, solver=OURS)
        for budget in budgets:
            check_request(replace(request, budget=budget))
        with as_asked(model, sample, request) as request, planning(model):
            ways = [(measure(model, sample, request), request)]
            for one in request.in_each_way()[1:]:
                if not one.is_answered_by(ways[-1][0].regions, ways[-1][0].kernels):
                    ways.append((measure(model, sample, one), one))
            measured, request = ways[-1]  # of eager operations
            resolved = sorted({resolve_budget(one, measured.peak_now_bytes, measured.device) for one in budgets})
            rows: list[SweepRow] = []
            left_out: list[tuple[str, str]] = []
            for done, name in enumerate(names):
                tell("solvers", done, len(names))
                try:
                    rows += (
                        _best_of([_ours(*way, resolved, model) for way in ways])
                        if name == OURS
                        else _baseline(measured, request, resolved, name)
                    )
                except (BackendUnavailable, ValueError) as error:
                    left_out.append((name, str(error)))
            tell("solvers", len(names), len(names))
            may_move = memory_for(request, measured) is not None
    return _sweep(measured, rows, left_out, request.limits, may_move)


def _sweep(
    measured: Measured, rows: list[SweepRow], left_out: list[tuple[str, str]], limits: Limits, may_move: bool
) -> Sweep:
    problem = measured.problem
    plan = min_peak_plan(problem, [], measured.chain, time.monotonic() + limits.search_s)
    smallest = peak_and_time(problem, normalise(problem, plan))[0]
    found = [row.measured_peak_bytes or row.peak_bytes for row in rows]
    smallest = min([smallest, *found])
    proven = least_peak_bytes(problem, max(1, smallest), may_move=may_move, time_limit_s=limits.proof_s)
    return Sweep(
        eager_peak_bytes=measured.eager_peak_bytes,
        keep_all_ms=problem.keep_all_time_ms,
        smallest_bytes=smallest,
        proven_bytes=min(smallest, proven),
        rows=tuple(rows),
        left_out=tuple(left_out),
    )


def _ours(measured: Measured, request: PlanRequest, budgets: list[int], model: torch.nn.Module) -> list[SweepRow]:
    """As `Rockmate` plans: each plan is run, and corrected if need be."""
    rows = []
    for budget_bytes in budgets:
        started = time.perf_counter()
        try:
            plan = make_plan(measured, replace(request, budget=budget_bytes), model).plan
        except BudgetTooSmall as error:
            rows.append(_refused(measured.problem, budget_bytes, error, time.perf_counter() - started))
            continue
        rows.append(
            SweepRow(
                solver=OURS,
                budget_bytes=budget_bytes,
                fits=True,
                peak_bytes=plan.peak_bytes,
                time_ms=plan.time_ms,
                slowdown=1 + plan.overhead,
                measured_peak_bytes=plan.measured_peak_bytes,
                gap=plan.gap,
                took_s=time.perf_counter() - started,
                moves=plan.moves,
            )
        )
    return rows


def _best_of(ways: list[list[SweepRow]]) -> list[SweepRow]:
    """Of each budget the fastest plan, or the lowest peak where none fits."""
    return [
        replace(min(rows, key=lambda row: (row.time_ms, row.peak_bytes)), took_s=sum(row.took_s for row in rows))
        for rows in zip(*ways, strict=True)
    ]


def _refused(problem: Problem, budget_bytes: int, error: BudgetTooSmall, took_s: float) -> SweepRow:
    smallest = error.smallest_budget_bytes
    return SweepRow(OURS, budget_bytes, False, smallest, float("inf"), float("inf"), smallest, None, took_s)


class _Timed(Solver):
    """A solver that notes how long each budget took."""

    def __init__(self, solver: Solver) -> None:
        self._solver = solver
        self.took_s: dict[int, float] = {}

    @property
    def name(self) -> str:
        """That solver's."""
        return self._solver.name

    def solve(self, problem: Problem, budget_bytes: int) -> Solution:
        """What that solver finds."""
        started = time.perf_counter()
        solution = self._solver.solve(problem, budget_bytes)
        self.took_s[budget_bytes] = time.perf_counter() - started
        return solution


def _baseline(measured: Measured, request: PlanRequest, budgets: list[int], name: str) -> list[SweepRow]:
    problem = measured.problem
    solver = _Timed(solver_named(name, request.limits, measured.chain))
    return [
        SweepRow(
            solver=name,
            budget_bytes=budget_bytes,
            fits=solution.status.fits,
            peak_bytes=solution.peak_bytes,
            time_ms=solution.time_ms,
            slowdown=solution.time_ms / problem.keep_all_time_ms if problem.keep_all_time_ms else 1.0,
            measured_peak_bytes=None,
            gap=solution.gap,
            took_s=solver.took_s[budget_bytes],
        )
        for budget_bytes, solution in zip(budgets, solve_sweep(problem, budgets, solver), strict=True)
    ]
