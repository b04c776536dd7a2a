"""From a module, a sample and a budget to a compiled plan."""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
import time
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from rk_solvers import KeepAll, SecondMemory, Solution, check, simulate
from rk_solvers.bounds.time_bound import lower_bound_ms
from rk_solvers.liveness import least_bytes
from rk_solvers.transfers.bound import lower_bound_with_moves_ms
from rk_solvers.transfers.reading import corrected, costs_of
from rkgb.devices.out_of_memory import if_it_fits, out_of_memory_told
from rkgb.devices.registry import device_of
from rkgb.process.garbage import own_garbage_collected
from rkgb.process.surroundings import surroundings_aside
from rkgb.process.turns import TURNS
from rkgb.state.module_state import for_planning, module_devices
from rockmate.errors import BudgetError, FragmentationWarning, PlanMismatch
from rockmate.guards.attributes import BoundSettings
from rockmate.guards.checkpointing import OwnCheckpointing
from rockmate.guards.numbers import RunTimeNumbers
from rockmate.guards.sharded import refuse_what_spans_ranks
from rockmate.memory.allocators import StepPeak, allocated_now_bytes, fragmentation_text
from rockmate.memory.budget import AboveResidents, is_fraction, read_budget, resolve_budget
from rockmate.memory.split import MemorySplit, Residents
from rockmate.offload.tier import Tier
from rockmate.planning.costs import LossFunction
from rockmate.planning.fixed_plan import FixedPlan, PortablePlan
from rockmate.planning.graph_solver import memory_for, moves_beside, solver_for, with_memory
from rockmate.planning.measured import Measured, borrowed_with_gradients
from rockmate.planning.plan import Plan
from rockmate.planning.real_step import by_turns, real_peak_bytes, step_ms, warm_step
from rockmate.planning.refusal import too_small
from rockmate.planning.request import PlanRequest
from rockmate.progress import ProgressCallback
from rockmate.resting.tensors import all_awake
from rockmate.runtime.codegen import CompiledProgram, compile_program
from rockmate.runtime.lowering import Program, make_program
from rockmate.runtime.moves import MovingStep
from rockmate.runtime.runner import Runner
from rockmate.runtime.windows import window_for
from rockmate.units import format_apart, format_bytes

_FOR_GAPS = 0.05  # of a budget, more each time: less for tensors where a real step finds no memory
_ATTEMPTS = 6  # corrections of a plan whose real step took more than predicted
_ATTEMPTS_BETWEEN = 4  # corrections back, where a plan was found after those
_CLOSE = 0.02  # of a budget: plans for so much more are hardly faster
_STEPS_OF_A_REFUSAL = 3  # real steps of the smallest plan, beside the first, before its bytes are named
_POOR_GAP = 0.1  # a part of the step's time that a better plan might save, and that the user should hear of
_LEAST_STEP = 1.1  # of what one operation takes: so much a window leaves to the step at least
_TURNS_TO_COMPARE = 3  # steps of each of two plans
_MOST_TURNS = 5  # of those, where they are quick
_AGREEING = 0.01  # of a step's time: two turns that say the same to within this are enough
_CLEAR = 0.5  # of how far two plans are apart: turns that differ by less say the same
_DECIDED = 0.15  # of it: the first is slower by so much each time, and another turn does not make it the quicker
_COMPARE_S = 4.0  # of such steps, beyond which there are no more than there must be
_COMPARISONS = 3  # of plans that move data, each for links as the one before has shown them
_COMPARISONS_S = 15.0  # of comparisons and searches, beyond which no other begins
_LATE = 0.02  # of a step's time: links are corrected where transfers cost so much more than was predicted
_WORTH_MOVING = 0.01  # of a step's time: what is quicker by less may not be
_BENEFIT_OF_DOUBT = 1.02  # a plan without recomputation is run if its prediction is this close to the budget


# By module, the plan of a refusal: whoever raises the budget to the bytes that were named is to have a plan, though the
# search may end by its clock before it finds that one again.
_LOWEST: weakref.WeakKeyDictionary[torch.nn.Module, PortablePlan] = weakref.WeakKeyDictionary()


def _tell_news(progress: ProgressCallback, news: str) -> None:
    """How far a search is."""
    progress(f"solve ({news})", 0, 1)


@dataclass(eq=False, slots=True)
class LoweredPlan:
    """A plan and the program that follows it."""

    plan: Plan
    program: Program
    header: str
    is_complete: bool = True  # False where the user ended the search
    is_out_of_time: bool = False  # True where the search had to end, and found the plan by then
    tier: Tier | None = None  # where its data move, where some do
    is_taken_over: bool = False  # from a plan of other numbers with the same graph: nothing was measured or solved

    def compile_for(self, module: torch.nn.Module, numbers: RunTimeNumbers | None = None) -> CompiledProgram:
        """Generate and compile the code for `module` (the one planned, or a copy of it)."""
        return compile_program(self.program, module, self.header, numbers)

    def runner_for(self, module: torch.nn.Module, measured: Measured, settings: BoundSettings | None = None) -> Runner:
        """What calls that code in the place of `module`; `settings` are those of a runner that was there before."""
        graph = measured.graphs.D_graph
        compiled = self.compile_for(module, measured.numbers)
        bound = settings or measured.settings.bound_to(module)
        return self.moving(Runner(module, graph, measured.pattern, measured.traits, bound, compiled, measured.numbers))

    def moving(self, runner: Runner) -> Runner:
        """The runner, whose steps move what the plan moves."""
        if self.program.moves is not None and self.tier is not None:
            runner.make_step = partial(MovingStep, moves=self.program.moves, tier=self.tier)
        return runner


def make_plan(measured: Measured, request: PlanRequest, module: torch.nn.Module) -> LoweredPlan:
    """The fastest plan within the budget. Its peak is checked on one real step, and corrected if need be.

    Raises `BudgetTooSmall` naming the smallest budget that would do and the operation that binds it; where the request
    says that a plan may exceed the budget, it is the one of lowest peak then. Warns by
    `FragmentationWarning` where CUDA's allocator reserves much more for the step than the budget.
    """
    started = time.perf_counter()
    budget_bytes, split = _resolved(measured, request)
    tried = _tried_within(measured, request, module, budget_bytes, split)
    tried = _or_that_of_a_refusal(tried, measured, request, module, split)
    whole = _is_the_whole_step(request) and measured.checkpointed_peak_bytes is None
    if whole and (request.scope == "reserved" or tried.peak.allocated_bytes > budget_bytes):
        tried = _tried_as_eager(measured, request, module, split)
        budget_bytes = tried.planned.plan.budget_bytes
    tried = _the_quicker(measured, request, module, tried, split)
    planned, solution, target_bytes, peak, _ = tried
    if _bounded_bytes(peak, request) > budget_bytes and not request.may_exceed:
        told = None if isinstance(request.budget, AboveResidents) else split  # in whose terms a refusal is told
        needed_bytes = _with_margin(tried, measured, request, module)
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


class _Tried(NamedTuple):
    """A plan, and what one real step of it took."""

    planned: LoweredPlan
    solution: Solution
    target_bytes: int  # for which it was made
    peak: StepPeak
    stored_bytes: int = 0  # in the second memory at most


def _tried_within(
    measured: Measured, request: PlanRequest, module: torch.nn.Module, budget_bytes: int, split: MemorySplit | None
) -> _Tried:
    """The first plan whose real step is within the budget; where there is none, the one of lowest peak."""
    target_bytes = too_much_bytes = budget_bytes
    for attempt in range(_ATTEMPTS):
        request.progress("solve", attempt, _ATTEMPTS)
        solution = _solve(measured, request, module, target_bytes, first=attempt == 0)
        request.progress("check", attempt, _ATTEMPTS)
        asked = _Asked(budget_bytes, target_bytes, split)
        tried = _tried_if_it_fits(measured, request, module, solution, asked, is_last=attempt + 1 == _ATTEMPTS)
        if tried is None:  # gaps, and buffers of libraries, take what the tensors leave
            too_much_bytes = target_bytes
            target_bytes -= int((attempt + 1) * _FOR_GAPS * target_bytes)
            continue
        peak_bytes = _bounded_bytes(tried.peak, request)
        if peak_bytes <= budget_bytes and attempt and request.scope == "reserved":
            return _with_smaller_gaps(measured, request, module, tried, too_much_bytes, split)
        if peak_bytes <= budget_bytes or not solution.status.fits:
            return tried  # whatever was predicted: this was measured
        if solution.peak_bytes > target_bytes:
            continue  # without recomputation it does not fit, after all
        # The prediction was short by this much: ask for that much less, and more so each time.
        too_much_bytes = target_bytes
        target_bytes -= (attempt + 1) * (peak_bytes - budget_bytes) + (1 << 10)
    return _tried(
        measured, request, module, _solve(measured, request, module, 1, False), _Asked(budget_bytes, 1, split)
    )


def _or_that_of_a_refusal(
    tried: _Tried, measured: Measured, request: PlanRequest, module: torch.nn.Module, split: MemorySplit | None
) -> _Tried:
    """Where what was found exceeds the budget: the plan of a refusal, which named these bytes, if its step is within.

    Whatever is predicted of it: the bytes that were named were measured.
    """
    lowest = _LOWEST.get(module)
    if lowest is None or _is_within(tried, request) or isinstance(request.solver, FixedPlan):
        return tried
    budget_bytes = tried.planned.plan.budget_bytes
    solution = _followed(lowest, measured, request, sys.maxsize)
    if solution is None:
        return tried
    asked = _Asked(budget_bytes, budget_bytes, split)
    again = _tried_if_it_fits(measured, request, module, solution, asked, is_last=False)
    return again if again is not None and _is_within(again, request) else tried


def _with_smaller_gaps(
    measured: Measured,
    request: PlanRequest,
    module: torch.nn.Module,
    fitting: _Tried,
    too_much_bytes: int,
    split: MemorySplit | None,
) -> _Tried:
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
        asked = _Asked(budget_bytes, target_bytes, split)
        tried = _tried_if_it_fits(measured, request, module, solution, asked, is_last=False)
        if tried is None or _bounded_bytes(tried.peak, request) > budget_bytes:
            too_much_bytes = target_bytes
        else:
            enough_bytes = target_bytes
            fitting = min(fitting, tried, key=lambda tried: tried.solution.time_ms)
    request.progress("gaps", _ATTEMPTS_BETWEEN, _ATTEMPTS_BETWEEN)
    return fitting


def _bounded_bytes(peak: StepPeak, request: PlanRequest) -> int:
    """What the budget bounds of a step. Gaps between tensors are not planned: a plan for less leaves room for them."""
    if request.scope != "reserved":
        return peak.allocated_bytes
    assert peak.reserved_bytes is not None  # other devices are refused
    return max(peak.allocated_bytes, peak.reserved_bytes)


class _Asked(NamedTuple):
    """Bytes that a plan is made for."""

    budget_bytes: int
    target_bytes: int  # those that its prediction is to be within
    split: MemorySplit | None


def _tried(
    measured: Measured, request: PlanRequest, module: torch.nn.Module, solution: Solution, asked: _Asked
) -> _Tried:
    planned = _planned(measured, request, solution, asked, module)
    _refuse_more_than_there_is(planned.plan, measured.device)
    tier = planned.tier
    if tier is not None:
        tier.watch_most()
    peak = measured_peak(module, planned.runner_for(module, measured), measured, request.loss)
    if measured.loss is not None and measured.loss.is_seen:
        peak = peak.or_higher(StepPeak(solution.peak_bytes))  # it is not in the step that was measured
    stored_bytes = 0 if tier is None else tier.most_held_bytes
    return _Tried(planned, solution, asked.target_bytes, peak, stored_bytes)


def _tried_if_it_fits(
    measured: Measured, request: PlanRequest, module: torch.nn.Module, solution: Solution, asked: _Asked, is_last: bool
) -> _Tried | None:
    """`_tried`; None where the device's memory does not suffice, and another plan may take less."""
    if is_last or not solution.status.fits:
        return _tried(measured, request, module, solution, asked)
    found = if_it_fits(lambda: _tried(measured, request, module, solution, asked))
    if found is None:
        device_of(measured.device).empty_cache()
    return found


def _is_the_whole_step(request: PlanRequest) -> bool:
    """Whether the budget is what the eager step takes."""
    return is_fraction(request.budget) and read_budget(request.budget) == 1.0


def _tried_as_eager(
    measured: Measured, request: PlanRequest, module: torch.nn.Module, split: MemorySplit | None
) -> _Tried:
    """The plan that keeps everything, as eager does, under what its step takes: eager's own peak may vary so much."""
    solution = KeepAll().solve(measured.problem, sys.maxsize)
    peak = _tried(measured, request, module, solution, _Asked(measured.eager_peak_bytes, sys.maxsize, split)).peak
    peak_bytes = _bounded_bytes(peak, request)
    if split is not None:
        split = replace(split, total_bytes=split.total_bytes + peak_bytes - split.step_bytes)
    asked = _Asked(peak_bytes, peak_bytes, split)
    return _Tried(_planned(measured, request, solution, asked, module), solution, peak_bytes, peak)


def _the_quicker(
    measured: Measured, request: PlanRequest, module: torch.nn.Module, tried: _Tried, split: MemorySplit | None
) -> _Tried:
    """Of plans that move data and the one that does not, as far as all are within the budget: by steps of each.

    What transfers cost the computation depends on what else the machine does, and is predicted by far less well than
    what computation takes. Where steps take another time than predicted, the links are corrected, and moves looked for
    anew. Where none seem to pay, those are tried that would if transfers cost the computation nothing.
    """
    asked = _Asked(tried.planned.plan.budget_bytes, tried.target_bytes, split)
    moves = bool(tried.solution.schedule.offloaded)
    alone = tried.solution.alone if moves else tried.solution
    if alone is None or not alone.schedule.recomputations or not alone.status.fits or not _is_within(tried, request):
        return tried
    first = memory_for(request, measured)
    if first is None:
        return tried
    bound_ms = tried.solution.lower_bound_ms
    moving: _Tried | None = tried
    other: _Tried | None = tried
    if moves:
        other = _tried_if_it_fits(measured, request, module, alone, asked, is_last=False)
    else:
        moving = _moving_freely(measured, request, module, alone, asked, first)
    if moving is None or other is None or not _is_within(other, request):
        return tried
    best = other
    request.progress("compare", 0, _COMPARISONS)
    share = 1.0 - _WORTH_MOVING  # of what the best takes that only recomputes
    deadline = time.perf_counter() + _COMPARISONS_S
    for attempt in range(_COMPARISONS):
        both = [(measured, one.planned) for one in (moving, other)]
        moving_ms, alone_ms = steps_by_turns_ms(module, both, request.loss)
        request.progress("compare", attempt + 1, _COMPARISONS)
        if moving_ms <= share * alone_ms:
            best, share = moving, moving_ms / alone_ms
        solution = moving.solution
        late_ms = moving_ms / alone_ms * alone.time_ms - solution.time_ms
        if abs(late_ms) <= _LATE * alone.time_ms:
            break
        assert solution.memory is not None
        _take_links(request, measured, corrected(measured.problem, solution.schedule, solution.memory, late_ms))
        if attempt + 1 == _COMPARISONS or time.perf_counter() >= deadline:
            break
        again = moves_beside(alone, request, measured).solve(measured.problem, asked.target_bytes)
        if not again.schedule.offloaded or again.schedule == solution.schedule:
            break
        found = _tried_if_it_fits(measured, request, module, again, asked, is_last=False)
        if found is None or not _is_within(found, request):
            break
        moving = found
    best = _timed_anew(best, request, measured)
    if _is_lighter(memory_for(request, measured), first):
        bound_ms = measured.problem.keep_all_time_ms  # the bound of the first search counted what transfers do not cost
    return best._replace(solution=replace(best.solution, lower_bound_ms=bound_ms))


def _moving_freely(
    measured: Measured,
    request: PlanRequest,
    module: torch.nn.Module,
    alone: Solution,
    asked: _Asked,
    links: SecondMemory,
) -> _Tried | None:
    """A plan of moves that pay if they cost the computation nothing; None where there is none, or it was not asked for.

    What they cost beside a step was measured beside another computation, and may be far less.
    """
    if isinstance(request.solver, FixedPlan) or request.follow is not None:
        return None
    free = replace(links, out=replace(links.out, burden=0.0), back=replace(links.back, burden=0.0))
    if not _is_lighter(free, links):
        return None
    tried = None
    _take_links(request, measured, free)
    try:
        found = moves_beside(alone, request, measured).solve(measured.problem, asked.target_bytes)
        if found.schedule.offloaded and found.time_ms <= (1 - _WORTH_MOVING) * alone.time_ms:
            tried = _tried_if_it_fits(measured, request, module, found, asked, is_last=False)
        if tried is not None and not _is_within(tried, request):
            tried = None
    finally:
        if tried is None:  # no step has shown anything else
            _take_links(request, measured, links)
    return tried


def _take_links(request: PlanRequest, measured: Measured, links: SecondMemory) -> None:
    assert request.tiers is not None
    request.tiers.correct(measured.device, links)


def _is_lighter(one: SecondMemory | None, other: SecondMemory) -> bool:
    """Whether transfers over the links of one cost the computation less than those over the other's."""
    return one is not None and (one.out.burden < other.out.burden or one.back.burden < other.back.burden)


def _timed_anew(tried: _Tried, request: PlanRequest, measured: Measured) -> _Tried:
    """With the links as they were corrected last."""
    schedule, memory = tried.solution.schedule, memory_for(request, measured)
    if not schedule.offloaded or memory is None or memory == tried.solution.memory:
        return tried
    costs = costs_of(measured.problem, schedule, memory)
    plan = tried.planned.plan
    tried.planned.plan = replace(plan, memory=memory, time_ms=costs.time_ms, waiting_ms=costs.waiting_ms)
    return tried._replace(solution=replace(tried.solution, memory=memory, time_ms=costs.time_ms))


def _is_within(tried: _Tried, request: PlanRequest) -> bool:
    return _bounded_bytes(tried.peak, request) <= tried.planned.plan.budget_bytes


def _with_margin(tried: _Tried, measured: Measured, request: PlanRequest, module: torch.nn.Module) -> int:
    """What the plan of lowest peak surely takes at most: the most of some real steps, and how far apart they were.

    Steps take the same bytes but for workspaces that differ from run to run, as those of some FFTs do.
    """
    peaks = [_bounded_bytes(tried.peak, request)]
    for _ in range(_STEPS_OF_A_REFUSAL):
        runner = tried.planned.runner_for(module, measured)
        peaks.append(_bounded_bytes(measured_peak(module, runner, measured, request.loss), request))
    return max(peaks) + (max(peaks) - min(peaks))


def _tell_fragmentation(peak: StepPeak, budget_bytes: int, device: torch.device) -> None:
    """A warning only: less for the tensors leaves no smaller gaps, but settings of the allocator do."""
    told = fragmentation_text(peak, budget_bytes, device)
    if told is not None:
        warnings.warn(told, FragmentationWarning, stacklevel=5)  # who calls Rockmate(...)


def _refuse_more_than_there_is(plan: Plan, device: torch.device) -> None:
    """A system may promise more than it has, and end the process that takes it at its word."""
    free_bytes = device_of(device).available_bytes()
    if device_of(device).overcommits and plan.peak_bytes > free_bytes:
        takes, free = format_apart(plan.peak_bytes, free_bytes)
        raise BudgetError(
            f"the budget {format_bytes(plan.budget_bytes)} is more than there is: a step would take {takes}, and "
            f"{free} are free on {device}. Give a budget below that, or None for the free memory less a reserve."
        )


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


def _planned(
    measured: Measured, request: PlanRequest, solution: Solution, asked: _Asked, module: torch.nn.Module
) -> LoweredPlan:
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
        loss_chunks=request.loss_chunks,
    )
    tier = None if solution.memory is None or request.tiers is None else request.tiers.on(measured.device)
    return planned_as(plan, measured, module, tier)


def planned_as(plan: Plan, measured: Measured, module: torch.nn.Module, tier: Tier | None = None) -> LoweredPlan:
    """`plan`, made for what was `measured` of `module`, with the program that follows it, and where its data move."""
    program = make_program(measured.graphs.K_graph, plan.schedule)
    header = (
        f"{type(module).__name__} under {format_bytes(plan.budget_bytes)}: generated code, to be read and stepped "
        f"through.\nPredicted peak {format_bytes(plan.peak_bytes)}, overhead {plan.overhead:+.1%}, by {plan.solver}."
    )
    return LoweredPlan(plan, program, header, tier=tier)


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


def steps_by_turns_ms(
    module: torch.nn.Module,
    plans: Sequence[tuple[Measured, LoweredPlan]],
    loss: LossFunction | None,
) -> tuple[float, float]:
    """Times of a step of two plans of `module`, by turns: that of the first is what is to prove itself.

    What else the machine does only adds, so that the least of each would tell, if it did as much beside both: the
    first is as slow as the least times say, or as most of the turns do, whichever is slower. The module is left alone.
    """

    def timed(measured: Measured, runner: Runner) -> float:
        assert measured.sample is not None, "steps need the sample with which the module was measured"
        graph = measured.graphs.D_graph
        with borrowed_with_gradients(module, {measured.device}, graph, measured.gradients):
            return step_ms(runner, measured.sample, loss, measured.device)

    with for_planning(module):
        steps = [partial(timed, measured, planned.runner_for(module, measured)) for measured, planned in plans]
        turns = by_turns(steps, _TURNS_TO_COMPARE, _MOST_TURNS, _COMPARE_S, _agree)
    first_ms, other_ms = (min(times_ms) for times_ms in zip(*turns, strict=True))
    return max(first_ms, other_ms * statistics.median(one / another for one, another in turns)), other_ms


def _agree(turns: list[list[float]]) -> bool:
    """Whether turns of two plans have told which is the quicker."""
    ratios = [one / another for one, another in turns]
    apart = max(ratios) - min(ratios)
    is_clear = apart <= _CLEAR * abs(1 - statistics.mean(ratios))
    return len(ratios) > 1 and (min(ratios) > 1 + _DECIDED or apart <= _AGREEING or is_clear)


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
