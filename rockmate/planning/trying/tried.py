"""A plan on one real step: what that takes decides whether it is within the budget."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from rk_solvers import Solution, check, simulate
from rkgb.devices.out_of_memory import if_it_fits, out_of_memory_told
from rkgb.devices.registry import device_of
from rkgb.state.module_state import for_planning
from rockmate.errors import BudgetError
from rockmate.memory.allocators import StepPeak, allocated_now_bytes
from rockmate.memory.split import MemorySplit
from rockmate.planning.costs import LossFunction
from rockmate.planning.lowered import LoweredPlan, planned_as
from rockmate.planning.measured import Measured, borrowed_with_gradients
from rockmate.planning.plan import Plan
from rockmate.planning.request import PlanRequest
from rockmate.planning.trying.real_step import real_peak_bytes, warm_step
from rockmate.runtime.runner import Runner
from rockmate.units import format_apart, format_bytes

_STEPS_OF_A_REFUSAL = 3  # real steps of the smallest plan, beside the first, before its bytes are named
_HAIR = 0.01  # of a peak: so much less than predicted may be chance


class Tried(NamedTuple):
    """A plan, and what one real step of it took."""

    planned: LoweredPlan
    solution: Solution
    target_bytes: int  # for which it was made
    peak: StepPeak
    stored_bytes: int = 0  # in the second memory at most


class Asked(NamedTuple):
    """Bytes that a plan is made for."""

    budget_bytes: int
    target_bytes: int  # those that its prediction is to be within
    split: MemorySplit | None


def try_plan(
    measured: Measured, request: PlanRequest, module: torch.nn.Module, solution: Solution, asked: Asked
) -> Tried:
    """The plan of a solution, and one real step of it. Raises `BudgetError` where it takes more than there is."""
    planned = as_planned(measured, request, solution, asked, module)
    _refuse_more_than_there_is(planned.plan, measured.device)
    tier = planned.tier
    if tier is not None:
        tier.watch_most()
    peak = measured_peak(module, planned.runner_for(module, measured), measured, request.loss)
    if measured.loss is not None and measured.loss.is_seen:
        peak = peak.or_higher(StepPeak(solution.peak_bytes))  # it is not in the step that was measured
    stored_bytes = 0 if tier is None else tier.most_held_bytes
    return Tried(planned, solution, asked.target_bytes, peak, stored_bytes)


def try_if_it_fits(
    measured: Measured, request: PlanRequest, module: torch.nn.Module, solution: Solution, asked: Asked, is_last: bool
) -> Tried | None:
    """`try_plan`; None where the device's memory does not suffice, and another plan may take less."""
    if is_last or not solution.status.fits:
        return try_plan(measured, request, module, solution, asked)
    found = if_it_fits(lambda: try_plan(measured, request, module, solution, asked))
    if found is None:
        device_of(measured.device).empty_cache()
    return found


def as_planned(
    measured: Measured, request: PlanRequest, solution: Solution, asked: Asked, module: torch.nn.Module
) -> LoweredPlan:
    """The plan of a solution, with its program."""
    problem = measured.problem
    if solution.status.fits:
        check(problem, solution.schedule, None, solution.memory)  # no schedule is believed unchecked
    simulation = simulate(problem, solution.schedule, solution.memory)
    plan = Plan(
        budget_bytes=asked.budget_bytes,
        peak_bytes=simulation.peak_bytes,
        time_ms=solution.time_ms,
        baseline_peak_bytes=measured.eager_peak_bytes,
        baseline_time_ms=measured.eager_time_ms,
        solver=solution.solver,
        planning_s=0.0,
        schedule=solution.schedule,
        memory_split=asked.split,
        calls=str(measured.pattern),
        gradient_bytes=measured.gradient_bytes,
        checkpointed_peak_bytes=measured.checkpointed_peak_bytes,
        memory=solution.memory,
        waiting_ms=simulation.waiting_ms,
        stored_bytes=solution.stored_bytes,
        layout=request.chosen_layout,
        compiled=measured.regions,
        kernels=measured.kernels,
        loss_chunks=request.loss_chunks,
    )
    tier = None if solution.memory is None or request.tiers is None else request.tiers.on(measured.device)
    return planned_as(plan, measured, module, tier)


def _refuse_more_than_there_is(plan: Plan, device: torch.device) -> None:
    """A system may promise more than it has, and end the process that takes it at its word."""
    free_bytes = device_of(device).available_bytes()
    if device_of(device).overcommits and plan.peak_bytes > free_bytes:
        takes, free = format_apart(plan.peak_bytes, free_bytes)
        raise BudgetError(
            f"the budget {format_bytes(plan.budget_bytes)} is more than there is: a step would take {takes}, and "
            f"{free} are free on {device}. Give a budget below that, or None for the free memory less a reserve."
        )


def measured_peak(module: torch.nn.Module, runner: Runner, measured: Measured, loss: LossFunction | None) -> StepPeak:
    """Peak of one real step of the plan on the sample. The module is left as it was."""
    assert measured.sample is not None, "planning needs the sample with which the module was measured"
    doing, graph = "when the module was set aside for a real step of the plan", measured.graphs.D_graph
    borrow = partial(borrowed_with_gradients, module, {measured.device}, graph, measured.gradients)
    with out_of_memory_told(doing, "Free some memory first."), for_planning(module):
        warm_step(runner, measured.sample, loss, measured.device, borrow)
        before_bytes = allocated_now_bytes(measured.device)
        with borrow():
            peak = real_peak_bytes(runner, measured.sample, loss, measured.device, measured.residents)
    return peak.of_training(before_bytes)


def bounded_bytes(peak: StepPeak, request: PlanRequest) -> int:
    """What the budget bounds of a step. Gaps between tensors are not planned: a plan for less leaves room for them."""
    if request.scope != "reserved":
        return peak.allocated_bytes
    assert peak.reserved_bytes is not None  # other devices are refused
    return max(peak.allocated_bytes, peak.reserved_bytes)


def is_within(tried: Tried, request: PlanRequest) -> bool:
    """Whether the step that was run is within the budget."""
    return bounded_bytes(tried.peak, request) <= tried.planned.plan.budget_bytes


def with_margin(tried: Tried, measured: Measured, request: PlanRequest, module: torch.nn.Module) -> int:
    """What the plan of lowest peak surely takes at most: the most of some real steps, and how far apart they were.

    Steps take the same bytes but for workspaces that differ from run to run, as those of some FFTs do. Where a hair
    more is predicted than they took, that counts: the next search holds plans to what is predicted of them.
    """
    peaks = [bounded_bytes(tried.peak, request)]
    for _ in range(_STEPS_OF_A_REFUSAL):
        runner = tried.planned.runner_for(module, measured)
        peaks.append(bounded_bytes(measured_peak(module, runner, measured, request.loss), request))
    most_bytes, predicted_bytes = max(peaks) + (max(peaks) - min(peaks)), tried.solution.peak_bytes
    return predicted_bytes if most_bytes < predicted_bytes <= (1 + _HAIR) * most_bytes else most_bytes
