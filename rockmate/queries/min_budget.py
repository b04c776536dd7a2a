"""The smallest budget under which a step is slower by no more than a factor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from rk_solvers import Limits, Schedule, Solver, schedule_of
from rk_solvers.bounds.peak_bound import least_peak_bytes
from rk_solvers.transfers.reading import costs_of
from rkgb import Sample, make_sample
from rkgb.replay.first_call import left_as_it_was
from rockmate.choices.module_layout import as_asked
from rockmate.errors import ArgumentError, BudgetTooSmall
from rockmate.offload.option import Offload
from rockmate.options import PlanOptions
from rockmate.plan_files.content import PlanFile
from rockmate.plan_files.record import plan_file_of
from rockmate.planning.costs import LossFunction
from rockmate.planning.fixed_plan import FixedPlan, PortablePlan
from rockmate.planning.graph_solver import memory_for, solver_for
from rockmate.planning.measured import Measured, measure
from rockmate.planning.plan import Plan
from rockmate.planning.planner import make_plan, planning
from rockmate.planning.request import PlanRequest
from rockmate.progress import ProgressCallback, progress_display

_PRECISION = 0.002  # of the smallest budget, as a share of the eager peak


@dataclass(frozen=True, slots=True)
class Attempt:
    """A budget that was solved."""

    budget_bytes: int
    peak_bytes: int
    slowdown: float  # predicted; 1.1 is 10 % more than without recomputation
    fits: bool  # whether the plan's peak is within the budget
    is_fast_enough: bool  # whether it takes at most as much longer as was asked for


@dataclass(frozen=True, slots=True)
class CheapestBudget:
    """The smallest budget found whose plan is fast enough."""

    budget_bytes: int
    asked_slowdown: float  # the slowdown that was asked for
    slowdown: float  # predicted, of that plan
    plan_file: PlanFile
    attempts: tuple[Attempt, ...]
    eager_peak_bytes: int


def smallest_budget(
    model: torch.nn.Module,
    sample: Any,
    slowdown: float,
    *,
    loss: LossFunction | None = None,
    solver: Solver | str = "auto",
    time_limit: float | None = None,
    gap: float | None = None,
    limits: Limits | None = None,
    progress: bool | ProgressCallback = False,
    offload: Offload | str | None = None,
    compile: bool = False,
    options: PlanOptions | None = None,
) -> CheapestBudget:
    """The smallest budget under which a step takes at most `slowdown` times as long as without recomputation.

    The model is measured once; then budgets are solved, each half way between the smallest that is fast enough and the
    largest that is not. Times are predicted; the bytes of the answer were measured in a real step. With `compile`, that
    is done with compiled parts and without, and the smaller budget is the answer; times are those of eager steps.

    Args:
        model, sample, loss, solver, gap, limits, progress, offload, compile, options: as for `Rockmate`.
        slowdown: 1.1 for 10 % more time; 1 for no recomputation that costs any.
        time_limit: seconds that the search for one budget's plan may take, 15 by default.

    Raises:
        ArgumentError: the slowdown is below 1.
        BudgetError, SampleError, …: as planning does.
    """
    if not slowdown >= 1:
        raise ArgumentError(f"a slowdown of {slowdown!r} would be a speed-up: give 1.1 for 10 % more time")
    if time_limit is None and limits is None and options is None:
        time_limit = Limits().search_s  # many budgets are solved: no extra time for one
    said = {"loss": loss, "solver": solver, "limits": limits, "progress": progress, "offload": offload}
    options = PlanOptions.of(options, said | {"compile": compile}, time_limit, gap)
    with progress_display(options.progress) as tell:
        request = replace(options.request(None), progress=tell)
        call = make_sample(model, sample)
        with (
            as_asked(model, call, request) as request,
            planning(model),
            left_as_it_was(model, call) as first,
            first.told(),
        ):
            found = other = _cheapest(model, call, request, slowdown, None)
            for one in request.in_each_way()[1:]:
                if not one.is_answered_by(other.plan_file.plan.compiled, other.plan_file.plan.kernels):
                    other = _cheapest(model, call, one, slowdown, found)
                    found = min(found, other, key=lambda answer: answer.budget_bytes)
    return found


def _cheapest(
    model: torch.nn.Module, call: Sample, request: PlanRequest, slowdown: float, before: CheapestBudget | None
) -> CheapestBudget:
    measured = measure(model, call, request)
    plan, attempts = _fast_enough(measured, request, slowdown)
    planned = _within_its_peak(measured, request, model, plan)
    return CheapestBudget(
        budget_bytes=planned.budget_bytes,
        asked_slowdown=slowdown,
        slowdown=1 + planned.overhead,
        plan_file=plan_file_of(model, measured, planned, replace(request, budget=planned.budget_bytes)),
        attempts=(*(() if before is None else before.attempts), *attempts),
        eager_peak_bytes=measured.eager_peak_bytes,
    )


def _fast_enough(measured: Measured, request: PlanRequest, slowdown: float) -> tuple[Schedule, list[Attempt]]:
    """The plan of lowest peak, among those found, that takes at most so much longer; and what was tried."""
    problem, memory = measured.problem, memory_for(request, measured)
    limit_ms = slowdown * measured.eager_time_ms * (1 + 1e-9)  # sums of the same times in another order
    best = schedule_of(problem, {})
    high = costs_of(problem, best, memory).peak_bytes
    may_move, proof_s = memory is not None, request.limits.proof_s
    low = least_peak_bytes(problem, high, may_move=may_move, time_limit_s=proof_s) - 1  # proven to be too small
    attempts: list[Attempt] = []
    rounds = max(1, ((high - low) / (_PRECISION * high)).__ceil__().bit_length())
    while high - low > max(1, _PRECISION * measured.eager_peak_bytes):
        request.progress("budgets", min(len(attempts), rounds - 1), rounds)
        middle = (low + high) // 2
        solution = solver_for(request, measured).solve(problem, middle)
        costs = costs_of(problem, solution.schedule, memory)
        is_fast_enough = costs.time_ms <= limit_ms
        taken = costs.time_ms / measured.eager_time_ms
        attempts.append(Attempt(middle, costs.peak_bytes, taken, costs.peak_bytes <= middle, is_fast_enough))
        if is_fast_enough and costs.peak_bytes < high:
            best, high = solution.schedule, costs.peak_bytes  # a plan that does not fit this budget may be the best yet
        if high > middle:
            low = middle
    request.progress("budgets", rounds, rounds)
    return best, attempts


def _within_its_peak(measured: Measured, request: PlanRequest, model: torch.nn.Module, schedule: Schedule) -> Plan:
    """The plan under a budget of what its real step takes."""
    name = request.solver if isinstance(request.solver, str) else request.solver.name
    given = replace(request, solver=FixedPlan(PortablePlan.of(schedule, name)))
    budget_bytes = costs_of(measured.problem, schedule, memory_for(request, measured)).peak_bytes
    try:
        plan = make_plan(measured, replace(given, budget=budget_bytes), model).plan
    except BudgetTooSmall as error:  # more than was predicted: by so much it was measured
        plan = make_plan(measured, replace(given, budget=error.smallest_budget_bytes), model).plan
    assert plan.measured_peak_bytes is not None
    return replace(plan, budget_bytes=max(plan.measured_peak_bytes, plan.peak_bytes))
