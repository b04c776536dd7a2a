"""From a module, a sample and a budget to a compiled plan."""

from __future__ import annotations

import contextlib
import math
import sys
import time
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from rk_solvers import KeepAll, SecondMemory, Solution
from rk_solvers.bounds.time_bound import lower_bound_ms
from rk_solvers.liveness import least_bytes
from rk_solvers.transfers.bound import lower_bound_with_moves_ms
from rkgb.devices.out_of_memory import out_of_memory_told
from rkgb.devices.registry import device_of
from rkgb.process.garbage import own_garbage_collected
from rkgb.process.surroundings import surroundings_aside
from rkgb.process.turns import TURNS
from rkgb.state.module_state import module_devices
from rockmate.errors import FragmentationWarning, PlanMismatch
from rockmate.guards.checkpointing import OwnCheckpointing
from rockmate.guards.sharded import refuse_what_spans_ranks
from rockmate.memory.allocators import StepPeak, fragmentation_text
from rockmate.memory.budget import AboveResidents, is_fraction, read_budget, resolve_budget
from rockmate.memory.split import MemorySplit, Residents
from rockmate.planning.fixed_plan import FixedPlan, PortablePlan
from rockmate.planning.graph_solver import memory_for, solver_for, with_memory
from rockmate.planning.lowered import LoweredPlan
from rockmate.planning.measured import Measured
from rockmate.planning.refusal import too_small
from rockmate.planning.request import PlanRequest
from rockmate.planning.trying.moving import FreeLinks, the_quicker, timed_anew
from rockmate.planning.trying.tried import (
    Asked,
    Tried,
    as_planned,
    bounded_bytes,
    is_within,
    try_if_it_fits,
    try_plan,
    with_margin,
)
from rockmate.progress import ProgressCallback
from rockmate.resting.tensors import all_awake
from rockmate.runtime.windows import window_for
from rockmate.units import format_bytes

_FOR_GAPS = 0.05  # of a budget, more each time: less for tensors where a real step finds no memory
_ATTEMPTS = 6  # corrections of a plan whose real step took more than predicted
_ATTEMPTS_BETWEEN = 4  # corrections back, where a plan was found after those
_CLOSE = 0.02  # of a budget: plans for so much more are hardly faster
_POOR_GAP = 0.1  # a part of the step's time that a better plan might save, and that the user should hear of
_LEAST_STEP = 1.1  # of what one operation takes: so much a window leaves to the step at least
_BENEFIT_OF_DOUBT = 1.02  # a plan without recomputation is run if its prediction is this close to the budget


# By module, the plan of a refusal: whoever raises the budget to the bytes that were named is to have a plan, though the
# search may end by its clock before it finds that one again.
_LOWEST: weakref.WeakKeyDictionary[torch.nn.Module, PortablePlan] = weakref.WeakKeyDictionary()


def _tell_news(progress: ProgressCallback, news: str) -> None:
    """How far a search is."""
    progress(f"solve ({news})", 0, 1)


def make_plan(measured: Measured, request: PlanRequest, module: torch.nn.Module) -> LoweredPlan:
    """The fastest plan within the budget. Its peak is checked on one real step, and corrected if need be.

    Raises `BudgetTooSmall` naming the smallest budget that would do and the operation that binds it; where the request
    says that a plan may exceed the budget, it is the one of lowest peak then. Warns by
    `FragmentationWarning` where CUDA's allocator reserves much more for the step than the budget.
    """
    started = time.perf_counter()
    budget_bytes, split = _resolved(measured, request)
    with FreeLinks(request, measured, round(_BENEFIT_OF_DOUBT * budget_bytes)):
        tried = _tried_within(measured, request, module, budget_bytes, split)
        tried = _or_that_of_a_refusal(tried, measured, request, module, split)
        whole = _is_the_whole_step(request) and measured.checkpointed_peak_bytes is None
        if whole and (request.scope == "reserved" or tried.peak.allocated_bytes > budget_bytes):
            tried = _tried_as_eager(measured, request, module, split)
            budget_bytes = tried.planned.plan.budget_bytes
        asked, until = Asked(budget_bytes, tried.target_bytes, split), started + request.limits.longest_s
        tried = the_quicker(measured, request, module, tried, asked, until)
    tried = timed_anew(tried, request, measured)
    planned, solution, target_bytes, peak, _ = tried
    if bounded_bytes(peak, request) > budget_bytes and not request.may_exceed:
        told = None if isinstance(request.budget, AboveResidents) else split  # in whose terms a refusal is told
        needed_bytes = with_margin(tried, measured, request, module)
        _LOWEST[module] = PortablePlan.of(solution.schedule, solution.solver)
        raise too_small(measured, solution, budget_bytes, needed_bytes, told, request)
    planned.is_complete = not solution.interrupted
    request.progress("check", _ATTEMPTS, _ATTEMPTS)
    request.progress("bound", 0, 1)
    bound_ms = _lower_bound_ms(measured, solution, target_bytes, budget_bytes, request)
    request.progress("bound", 1, 1)
    planning_s = measured.measuring_s + time.perf_counter() - started
    planned.plan = replace(
        planned.plan,
        planning_s=planning_s,
        measured_peak_bytes=peak.allocated_bytes,
        measured_reserved_bytes=peak.reserved_bytes,
        measured_stored_bytes=None if planned.tier is None else tried.stored_bytes,
        predicted_reserved_bytes=peak.predicted_reserved_bytes,
        bounds_reserved=request.scope == "reserved",
        lower_bound_ms=bound_ms,
    )
    planned.is_out_of_time = solution.out_of_time
    if request.scope != "reserved":
        _tell_fragmentation(peak, budget_bytes, measured.device)
    return planned


def poor_plan_text(planned: LoweredPlan, request: PlanRequest) -> str | None:
    """What to tell of a plan that a longer search may well better; None of any other."""
    plan = planned.plan
    if not planned.is_out_of_time or plan.gap is None or plan.gap <= _POOR_GAP:
        return None
    limits = request.limits
    limit = "" if limits.extra_s else f" within time_limit={limits.search_s:g} s"
    more = max(60, math.ceil(4 * limits.longest_s))
    return (
        f"the plan found{limit} takes {plan.overhead:+.0%} time, and one that is up to {plan.gap:.0%} faster may "
        f"exist under {format_bytes(plan.budget_bytes)}. Let the search go on for longer (time_limit={more}), or "
        "raise the budget."
    )


def _tried_within(
    measured: Measured, request: PlanRequest, module: torch.nn.Module, budget_bytes: int, split: MemorySplit | None
) -> Tried:
    """The first plan whose real step is within the budget; where there is none, the one of lowest peak."""
    target_bytes = too_much_bytes = budget_bytes
    for attempt in range(_ATTEMPTS):
        request.progress("solve", attempt, _ATTEMPTS)
        solution = _solve(measured, request, module, target_bytes, first=attempt == 0)
        request.progress("check", attempt, _ATTEMPTS)
        asked = Asked(budget_bytes, target_bytes, split)
        tried = try_if_it_fits(measured, request, module, solution, asked, is_last=attempt + 1 == _ATTEMPTS)
        if tried is None:  # gaps, and buffers of libraries, take what the tensors leave
            too_much_bytes = target_bytes
            target_bytes -= int((attempt + 1) * _FOR_GAPS * target_bytes)
            continue
        peak_bytes = bounded_bytes(tried.peak, request)
        if peak_bytes <= budget_bytes and attempt and request.scope == "reserved":
            return _with_smaller_gaps(measured, request, module, tried, too_much_bytes, split)
        if peak_bytes <= budget_bytes or not solution.status.fits:
            return tried  # whatever was predicted: this was measured
        if solution.peak_bytes > target_bytes:
            continue  # without recomputation it does not fit, after all
        # The prediction was short by this much: ask for that much less, and more so each time.
        too_much_bytes = target_bytes
        target_bytes -= (attempt + 1) * (peak_bytes - budget_bytes) + (1 << 10)
    return try_plan(
        measured, request, module, _solve(measured, request, module, 1, False), Asked(budget_bytes, 1, split)
    )


def _or_that_of_a_refusal(
    tried: Tried, measured: Measured, request: PlanRequest, module: torch.nn.Module, split: MemorySplit | None
) -> Tried:
    """Where what was found exceeds the budget: the plan of a refusal, which named these bytes, if its step is within.

    Whatever is predicted of it: the bytes that were named were measured.
    """
    lowest = _LOWEST.get(module)
    if lowest is None or is_within(tried, request) or isinstance(request.solver, FixedPlan):
        return tried
    budget_bytes = tried.planned.plan.budget_bytes
    solution = _followed(lowest, measured, request, sys.maxsize)
    if solution is None:
        return tried
    asked = Asked(budget_bytes, budget_bytes, split)
    again = try_if_it_fits(measured, request, module, solution, asked, is_last=False)
    return again if again is not None and is_within(again, request) else tried


def _with_smaller_gaps(
    measured: Measured,
    request: PlanRequest,
    module: torch.nn.Module,
    fitting: Tried,
    too_much_bytes: int,
    split: MemorySplit | None,
) -> Tried:
    """The fastest of plans between one that fits and `too_much_bytes` for tensors, whose gaps are beyond the budget.

    Gaps jump from plan to plan: what was taken off for those of one is often more than another needs.
    """
    budget_bytes, enough_bytes = fitting.planned.plan.budget_bytes, fitting.target_bytes
    for attempt in range(_ATTEMPTS_BETWEEN):
        if too_much_bytes - enough_bytes <= _CLOSE * budget_bytes or fitting.planned.plan.keeps_all:
            break
        request.progress("gaps", attempt, _ATTEMPTS_BETWEEN)
        target_bytes = (enough_bytes + too_much_bytes) // 2
        solution = _solve(measured, request, module, target_bytes, first=False)
        asked = Asked(budget_bytes, target_bytes, split)
        tried = try_if_it_fits(measured, request, module, solution, asked, is_last=False)
        if tried is None or bounded_bytes(tried.peak, request) > budget_bytes:
            too_much_bytes = target_bytes
        else:
            enough_bytes = target_bytes
            fitting = min(fitting, tried, key=lambda tried: tried.solution.time_ms)
    request.progress("gaps", _ATTEMPTS_BETWEEN, _ATTEMPTS_BETWEEN)
    return fitting


def _is_the_whole_step(request: PlanRequest) -> bool:
    """Whether the budget is what the eager step takes."""
    return is_fraction(request.budget) and read_budget(request.budget) == 1.0


def _tried_as_eager(
    measured: Measured, request: PlanRequest, module: torch.nn.Module, split: MemorySplit | None
) -> Tried:
    """The plan that keeps everything, as eager does, under what its step takes: eager's own peak may vary so much."""
    solution = KeepAll().solve(measured.problem, sys.maxsize)
    peak = try_plan(measured, request, module, solution, Asked(measured.eager_peak_bytes, sys.maxsize, split)).peak
    peak_bytes = bounded_bytes(peak, request)
    if split is not None:
        split = replace(split, total_bytes=split.total_bytes + peak_bytes - split.step_bytes)
    asked = Asked(peak_bytes, peak_bytes, split)
    return Tried(as_planned(measured, request, solution, asked, module), solution, peak_bytes, peak)


def _tell_fragmentation(peak: StepPeak, budget_bytes: int, device: torch.device) -> None:
    """A warning only: less for the tensors leaves no smaller gaps, but settings of the allocator do."""
    told = fragmentation_text(peak, budget_bytes, device)
    if told is not None:
        warnings.warn(told, FragmentationWarning, stacklevel=5)  # who calls Rockmate(...)


def _resolved(measured: Measured, request: PlanRequest) -> tuple[int, MemorySplit | None]:
    """The step's budget in bytes; how it was split off where the user's is for all of training."""
    held = measured.residents
    if held is None:
        return resolve_budget(request.budget, measured.step_now_bytes(request.scope), measured.device), None
    eager_bytes = held.total_bytes + measured.peak_now_bytes
    total_bytes = resolve_budget(request.budget, eager_bytes, measured.device, held.present_bytes, held.total_bytes)
    memory = request.memory_to_rest_in(measured.device) if measured.may_rest else None
    if memory is not None:
        held = _with_window(measured, held, total_bytes, memory)
    split = MemorySplit(total_bytes, held)
    return max(0, split.step_bytes), split


def _with_window(measured: Measured, held: Residents, total_bytes: int, memory: SecondMemory) -> Residents:
    """What is held where parameters are in a second memory, if the budget asks for that."""
    resting_bytes = sum(measured.may_rest.values())
    keep_all_bytes = KeepAll().solve(measured.problem, sys.maxsize).peak_bytes
    room_bytes = total_bytes - held.total_bytes - keep_all_bytes
    if room_bytes >= 0 or not resting_bytes:
        return held
    room_bytes += resting_bytes - memory.staging_bytes
    most_bytes = room_bytes + keep_all_bytes - int(_LEAST_STEP * least_bytes(measured.problem))
    window_bytes = window_for(measured.graphs.K_graph, measured.may_rest, memory, room_bytes, most_bytes)
    if window_bytes + memory.staging_bytes >= resting_bytes:
        return held
    return held.with_window(resting_bytes, window_bytes + memory.staging_bytes)


def _lower_bound_ms(
    measured: Measured, solution: Solution, found_for_bytes: int, budget_bytes: int, request: PlanRequest
) -> float | None:
    """What every plan takes at least that is predicted to fit the budget, or as much as this one takes.

    None where nobody asked: who follows another plan has no time for it.
    """
    allowed_bytes = max(budget_bytes, solution.peak_bytes)  # a plan is believed by its measured peak
    if not solution.schedule.recomputations and not solution.schedule.offloaded:
        return solution.time_ms
    memory, problem = memory_for(request, measured), measured.problem
    limit_s = min(request.limits.bound_s, request.limits.longest_s)
    if memory is not None:  # what is proven of recomputation alone says nothing of moves
        if request.follow is not None or request.is_hurried:
            return problem.keep_all_time_ms
        bound_ms = solution.lower_bound_ms
        if bound_ms is None or found_for_bytes < allowed_bytes:
            bound_ms = lower_bound_with_moves_ms(
                problem, allowed_bytes, memory, limit_s, chain=measured.chain, integer=False
            )
        return min(bound_ms, solution.time_ms)
    if solution.lower_bound_ms is not None and found_for_bytes >= allowed_bytes:
        return min(solution.lower_bound_ms, solution.time_ms)
    if request.follow is not None or request.is_hurried:
        return None
    plan = solution.schedule
    bound_ms = lower_bound_ms(problem, allowed_bytes, measured.chain, limit_s, plan=plan)
    return min(bound_ms, solution.time_ms)


def _solve(
    measured: Measured, request: PlanRequest, module: torch.nn.Module, budget_bytes: int, first: bool
) -> Solution:
    followed = _followed(request.follow, measured, request, budget_bytes)
    if followed is not None:
        return followed
    if first and not isinstance(request.solver, FixedPlan):
        # What is a hair above the budget on paper may fit: the step that follows tells, but of no loss that was seen.
        is_told = measured.loss is None or not measured.loss.is_seen
        keep_all = KeepAll().solve(measured.problem, round(budget_bytes * (_BENEFIT_OF_DOUBT if is_told else 1)))
        if keep_all.status.fits:
            return keep_all
    solver = solver_for(request, measured, partial(_tell_news, request.progress))
    solution = solver.solve(measured.problem, budget_bytes)
    if not solution.status.fits and not isinstance(request.solver, FixedPlan):
        solution = _followed(_LOWEST.get(module), measured, request, budget_bytes) or solution
    return solution


def _followed(
    decisions: PortablePlan | None, measured: Measured, request: PlanRequest, budget_bytes: int
) -> Solution | None:
    """What the decisions of another plan come to here; None where they do not fit the graph or the budget."""
    if decisions is None:
        return None
    try:
        followed = with_memory(FixedPlan(decisions), request, measured)
        solution = followed.solve(measured.problem, budget_bytes)
    except PlanMismatch:
        return None
    return solution if solution.status.fits else None


@contextlib.contextmanager
def planning(model: torch.nn.Module) -> Iterator[None]:
    """Context in which `model` is planned: as it is without checkpointing of its own, and told of memory that ran out.

    Parameters that rest in a second memory are all here meanwhile.

    What the user has around it (hooks on saved tensors, modes, anomaly detection) is aside meanwhile.

    Nothing is left in the cache of an allocator.
    """
    refuse_what_spans_ranks(model)
    try:
        doing = f"while {type(model).__name__} was planned"
        told = out_of_memory_told(doing, "Free some memory first.")
        with TURNS.planning(model), surroundings_aside(), own_garbage_collected(), told:
            with OwnCheckpointing(model).switched_off(), all_awake(model):
                yield
    finally:
        for device in module_devices(model) if isinstance(model, torch.nn.Module) else ():
            device_of(device).empty_cache()
