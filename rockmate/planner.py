"""From a module, a sample and a budget to a compiled plan."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from rk_solvers import SOLVERS, Chain, Effort, KeepAll, Problem, Solution, Solver, check, solver_named
from rk_solvers.bound import lower_bound_ms
from rk_solvers.registry import DEFAULT_GAP, DEFAULT_TIME_LIMIT_S
from rkgb import AllGraphs, Sample, d_to_s, make_sample
from rkgb.measure import FreshGradients
from rkgb.memory import AllocationLog
from rkgb.pipeline import exact_trace, measured_graphs, with_trained_outputs
from rkgb.sgraph import run_once
from rkgb.state import autocast_in_force, borrowed, module_devices, training_mode
from rkgb.tree import leaves
from rockmate.budget import Budget, check_budget, resolve_budget
from rockmate.codegen import CompiledProgram, compile_program
from rockmate.costs import LOSS, LossCost, LossFunction, assumed_loss_cost, build_problem, evaluate_loss, measure_loss
from rockmate.errors import BudgetTooSmall, LossError, NothingToTrain, SolverError
from rockmate.memory_split import MemorySplit, Residents, Scope, above_gradients, check_scope, count_residents
from rockmate.optimizer_state import OptimizerLike, optimizer_state_bytes
from rockmate.pattern import CallPattern
from rockmate.pinned import Pin, check_pins, pinned_operations
from rockmate.plan import Plan
from rockmate.program import Program, make_program
from rockmate.runner import Runner
from rockmate.simulator import simulate
from rockmate.units import format_bytes

_ATTEMPTS = 6  # corrections of a plan whose real step took more than predicted
_SPARE = 1.02  # on the smallest budget named: measured anew, times differ, and with them the plan that is found
_BOUND_S = 6.0  # most seconds for the lower bound; it is there after one or three for most models
_BENEFIT_OF_DOUBT = 1.02  # a plan without recomputation is run if its prediction is this close to the budget

Progress = Callable[[str, int, int], None]
StepFunction = Callable[..., Any]  # called like the module


def _no_progress(stage: str, done: int, total: int) -> None:
    """Nobody asked to be told."""


def _tell_news(progress: Progress, news: str) -> None:
    """How far a search is."""
    progress(f"solve ({news})", 0, 1)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What the user asked for."""

    budget: Budget
    loss: LossFunction | None = None
    solver: Solver | str = "auto"
    progress: Progress = _no_progress
    time_limit_s: float = DEFAULT_TIME_LIMIT_S  # for one search; a plan may take a few, and measuring takes its own
    gap: float = DEFAULT_GAP  # the search ends where no plan is faster by more than this share of the step's time
    pin: tuple[Pin, ...] = ()  # what is saved and never recomputed
    scope: Scope = "step"  # what the budget is for
    optimizer: OptimizerLike | None = None  # whose state is in a budget for all of training


@dataclass(eq=False, slots=True)
class Measured:
    """A module ready to be planned for any budget: graphs, costs, and the eager step beside them.

    Where the budget is for all of training there are `residents`, gradients of parameters among them: then `problem`
    and `eager_peak_bytes` are of a step above them.
    """

    sample: Sample | None  # None once planned: its tensors are the user's to free
    pattern: CallPattern
    graphs: AllGraphs
    problem: Problem
    chain: Chain
    eager_peak_bytes: int
    device: torch.device
    measuring_s: float
    residents: Residents | None = None


@dataclass(eq=False, slots=True)
class Planned:
    """A plan and the program that follows it."""

    plan: Plan
    program: Program
    header: str

    def compile_for(self, module: torch.nn.Module) -> CompiledProgram:
        """Generate and compile the code for `module` (the one planned, or a copy of it)."""
        return compile_program(self.program, module, self.header)


def measure(model: torch.nn.Module, sample: Any, request: PlanRequest) -> Measured:
    """Trace and measure `model`; leaves it as it was.

    Raises `SampleError`, `TraceError`, `PinError`, `LossError`, and `NothingToTrain` for a module without any gradient.
    """
    started = time.perf_counter()
    arguments = make_sample(model, sample)
    check_pins(model, request.pin)
    state_bytes = None  # known before what takes minutes
    if request.scope == "total":
        place = _main_device(module_devices(model, arguments.tensors))
        state_bytes = optimizer_state_bytes(request.optimizer, model.parameters(), place)
    if not any(tensor.requires_grad for tensor in (*model.parameters(), *arguments.tensors)):
        raise NothingToTrain(
            f"no parameter of {type(model).__name__} and no tensor of the sample requires a gradient: there is no "
            "training step to plan. Unfreeze a parameter, or use the module as it is."
        )
    with training_mode(model):
        graphs, loss_cost = _graphs(model, arguments, request)
    if not graphs.K_graph.backward:
        raise NothingToTrain(
            f"no gradient reaches an output of {type(model).__name__}: the output does not depend on anything that "
            "requires one. Return the tensor that the loss is made of."
        )
    device = _device(graphs)
    residents = None
    if state_bytes is not None:
        constants = [leaf.constant for leaf in graphs.D_graph.leaves.values() if leaf.constant is not None]
        residents = count_residents(model, arguments.tensors, constants, device, state_bytes)
    with training_mode(model):
        problem, chain = build_problem(graphs, loss_cost or assumed_loss_cost(graphs.K_graph))
        problem = problem if residents is None else above_gradients(problem, graphs)
        request.progress("eager step", 0, 1)
        keep_all_peak = KeepAll().solve(problem, sys.maxsize).peak_bytes
        eager = _eager_peak_bytes(model, arguments, request.loss, device, keep_all_peak, residents)
        request.progress("eager step", 1, 1)
    pattern = CallPattern.of(arguments, autocast_in_force(module_devices(model, arguments.tensors)))
    measuring_s = time.perf_counter() - started
    return Measured(arguments, pattern, graphs, problem, chain, eager, device, measuring_s, residents)


def _graphs(model: torch.nn.Module, sample: Sample, request: PlanRequest) -> tuple[AllGraphs, LossCost | None]:
    """What `rkgb.make_all_graphs` makes, with the operations pinned that the user wants to be; what the loss takes."""
    loss, costs = request.loss, list[LossCost]()
    basic, dataflow = exact_trace(model, sample, on_stage=request.progress)
    pinned = pinned_operations(model, dataflow, request.pin)
    request.progress("loss", 0, 1)
    if loss is not None:
        dataflow = with_trained_outputs(
            dataflow, model, sample, lambda output: costs.append(measure_loss(loss, output))
        )
    request.progress("loss", 1, 1)
    simplified = run_once(d_to_s(dataflow), pinned)
    return measured_graphs(basic, simplified, model, sample, request.progress), costs[0] if costs else None


def make_plan(measured: Measured, request: PlanRequest, module: torch.nn.Module) -> Planned:
    """The fastest plan within the budget. Its peak is checked on one real step, and corrected if need be.

    Raises `BudgetTooSmall` naming the smallest budget that would do and the operation that binds it.
    """
    started = time.perf_counter()
    budget_bytes, split = _resolved(measured, request)
    target_bytes = budget_bytes
    lowest_bytes = sys.maxsize  # peak of the best plan that has run
    for attempt in range(_ATTEMPTS):
        request.progress("solve", attempt, _ATTEMPTS)
        solution = _solve(measured, request, target_bytes, first=attempt == 0)
        planned = _planned(measured, solution, budget_bytes, module, split)
        request.progress("check", attempt, _ATTEMPTS)
        runner = Runner(module, measured.graphs.D_graph, measured.pattern, planned.compile_for(module))
        peak_bytes = measured_peak_bytes(module, runner, measured, request.loss)
        if peak_bytes <= budget_bytes:
            break  # whatever was predicted: this was measured
        lowest_bytes = min(lowest_bytes, peak_bytes)
        if not solution.status.fits:
            raise _too_small(measured, solution, budget_bytes, lowest_bytes, split)
        if solution.peak_bytes > target_bytes:
            continue  # without recomputation it does not fit, after all
        # The prediction was short by this much: ask for that much less, and more so each time.
        target_bytes -= (attempt + 1) * (peak_bytes - budget_bytes) + (1 << 10)
    else:
        raise _too_small(measured, solution, budget_bytes, lowest_bytes, split)
    request.progress("check", _ATTEMPTS, _ATTEMPTS)
    request.progress("bound", 0, 1)
    limit_s = min(_BOUND_S, request.time_limit_s)
    bound_ms = _lower_bound_ms(measured, solution, target_bytes, budget_bytes, limit_s)
    request.progress("bound", 1, 1)
    planning_s = measured.measuring_s + time.perf_counter() - started
    planned.plan = replace(planned.plan, planning_s=planning_s, measured_peak_bytes=peak_bytes, lower_bound_ms=bound_ms)
    return planned


def _resolved(measured: Measured, request: PlanRequest) -> tuple[int, MemorySplit | None]:
    """The step's budget in bytes; how it was split off where the user's is for all of training."""
    held = measured.residents
    if held is None:
        return resolve_budget(request.budget, measured.eager_peak_bytes, measured.device), None
    eager_bytes = held.total_bytes + measured.eager_peak_bytes
    total_bytes = resolve_budget(request.budget, eager_bytes, measured.device, held.present_bytes)
    split = MemorySplit(total_bytes, held)
    return max(0, split.step_bytes), split


def _lower_bound_ms(
    measured: Measured, solution: Solution, found_for_bytes: int, budget_bytes: int, limit_s: float
) -> float:
    """What every plan takes at least that is predicted to fit the budget, or as much as this one takes."""
    allowed_bytes = max(budget_bytes, solution.peak_bytes)  # a plan is believed by its measured peak
    if not any(solution.recompute):
        return solution.time_ms
    if solution.lower_bound_ms is not None and found_for_bytes >= allowed_bytes:
        return min(solution.lower_bound_ms, solution.time_ms)
    plan = solution.recompute
    bound_ms = lower_bound_ms(measured.problem, allowed_bytes, measured.chain, limit_s, plan=plan)
    return min(bound_ms, solution.time_ms)


def _solve(measured: Measured, request: PlanRequest, budget_bytes: int, first: bool) -> Solution:
    if first:
        # What is a hair above the budget on paper may fit: the step that follows tells.
        keep_all = KeepAll().solve(measured.problem, round(budget_bytes * _BENEFIT_OF_DOUBT))
        if keep_all.status.fits:
            return keep_all
    solver = request.solver
    if isinstance(solver, str):
        tell = partial(_tell_news, request.progress)
        effort = Effort(measured.chain, request.time_limit_s, gap=request.gap, progress=tell)
        solver = solver_named(solver, effort)
    return solver.solve(measured.problem, budget_bytes)


def _planned(
    measured: Measured, solution: Solution, budget_bytes: int, module: torch.nn.Module, split: MemorySplit | None
) -> Planned:
    problem = measured.problem
    if solution.status.fits:
        check(problem, solution.schedule, None)  # no schedule is believed unchecked
    simulation = simulate(problem, solution.schedule)
    plan = Plan(
        budget_bytes=budget_bytes,
        peak_bytes=simulation.peak_bytes,
        time_ms=simulation.time_ms,
        baseline_peak_bytes=measured.eager_peak_bytes,
        baseline_time_ms=problem.keep_all_time_ms,
        solver=solution.solver,
        planning_s=0.0,
        schedule=solution.schedule,
        recompute=solution.recompute,
        memory_split=split,
    )
    first_stage = sum(op.name == LOSS for op in problem.backward)
    program = make_program(measured.graphs.K_graph, solution.recompute, first_stage)
    header = (
        f"{type(module).__name__} under {format_bytes(budget_bytes)}: generated code, to be read and stepped through.\n"
        f"Predicted peak {format_bytes(plan.peak_bytes)}, overhead {plan.overhead:+.1%}, by {plan.solver}."
    )
    return Planned(plan, program, header)


def _too_small(
    measured: Measured, solution: Solution, budget_bytes: int, lowest_bytes: int, split: MemorySplit | None
) -> BudgetTooSmall:
    """`lowest_bytes` was measured: a step of the plan of lowest peak really takes that much."""
    op = solution.binding_op or simulate(measured.problem, solution.schedule).peak_op
    smallest = max(round(lowest_bytes * _SPARE), budget_bytes + 1)
    divided = ""
    if split is not None:
        divided = f": {split}, and at least {format_bytes(smallest)} are needed"
        budget_bytes, smallest = split.total_bytes, smallest + split.residents.total_bytes
    return BudgetTooSmall(
        f"budget {format_bytes(budget_bytes)} < {format_bytes(smallest)}, the smallest for which a schedule was found "
        f"(bound at {op}{_where(measured, op)}){divided}. Raise the budget to at least {smallest} bytes, reduce the "
        "batch, or split that operation.",
        smallest,
        op,
    )


def _where(measured: Measured, binding_op: str) -> str:
    """The user's own words for an operation: submodule and source line."""
    name = binding_op.split()[-1].split(".backward")[0]
    for op in measured.graphs.D_graph:
        if op.name == name:
            return f", {op.source}"
    return ""


# ---- real steps --------------------------------------------------------------------------------------


def _device(graphs: AllGraphs) -> torch.device:
    return _main_device(info.device for info in graphs.D_graph.values.values())


def _main_device(devices: Iterable[torch.device]) -> torch.device:
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def run_step(step: StepFunction, sample: Sample, loss: LossFunction | None) -> None:
    """One forward and backward, holding the output to the end as training loops do."""
    with torch.enable_grad():
        output = step(*sample.args, **sample.kwargs)
        if loss is None:
            # As a loss would: its gradients belong to autograd, which frees them once they are used.
            differentiable = [tensor for tensor in leaves(output) if tensor.requires_grad]
            FreshGradients.apply(*differentiable).backward()  # type: ignore[no-untyped-call]
        else:
            evaluate_loss(loss, output).backward()


def peak_of(step: StepFunction, sample: Sample, loss: LossFunction | None, device: torch.device) -> int:
    """Most bytes that one step allocates at once above what was there before."""
    fresh = sample.copy()  # gradients of inputs are not the user's to find
    with AllocationLog(device) as log:
        run_step(step, fresh, loss)
    return log.peak_bytes


def _real_peak(
    step: StepFunction, sample: Sample, loss: LossFunction | None, device: torch.device, residents: Residents | None
) -> int:
    """Peak of a real step, from no gradients of parameters; above `residents`, if given, with and without gradients.

    The module is to be borrowed: the first step leaves the gradients to which the second adds.
    """
    without_bytes = peak_of(step, sample, loss, device)
    if residents is None:
        return without_bytes
    return max(peak_of(step, sample, loss, device), without_bytes - residents.gradient_bytes)


def _eager_peak_bytes(
    model: torch.nn.Module,
    sample: Sample,
    loss: LossFunction | None,
    device: torch.device,
    keep_all_peak_bytes: int,
    residents: Residents | None,
) -> int:
    """Peak of the eager step, measured; what keep-all takes, where eager does not fit the device.

    Without a loss to run, a measured step lacks what the assumed loss takes: the larger figure counts.
    """
    try:
        with borrowed(model, {device}):
            measured = _real_peak(model, sample, loss, device, residents)
    except (torch.OutOfMemoryError, MemoryError):
        return keep_all_peak_bytes
    return max(measured, keep_all_peak_bytes) if loss is None else measured


def measured_peak_bytes(module: torch.nn.Module, runner: Runner, measured: Measured, loss: LossFunction | None) -> int:
    """Peak of one real step of the plan on the sample. The module is left as it was."""
    assert measured.sample is not None, "planning needs the sample with which the module was measured"
    with training_mode(module), borrowed(module, {measured.device}):
        return _real_peak(runner, measured.sample, loss, measured.device, measured.residents)


def plan_model(model: torch.nn.Module, sample: Any, request: PlanRequest) -> tuple[Measured, Planned]:
    """Measure and plan in one go."""
    check_budget(request.budget)
    _check_request(request)
    measured = measure(model, sample, request)
    planned = make_plan(measured, request, model)
    measured.sample = None
    return measured, planned


def _check_request(request: PlanRequest) -> None:
    """Refuse what could only fail after minutes of measuring."""
    known = request.solver in SOLVERS if isinstance(request.solver, str) else isinstance(request.solver, Solver)
    if not known:
        raise SolverError(
            f"solver must be one of {', '.join(sorted(SOLVERS))}, or an instance of rk_solvers.Solver such as "
            f'Greedy(), but is {request.solver!r}. Leave it out, or say "auto", to have the best of several.'
        )
    check_scope(request.scope, request.optimizer)
    if not request.time_limit_s >= 0:
        raise SolverError(f"time_limit is {request.time_limit_s!r}; give the seconds that a search may take.")
    if not 0 <= request.gap < 1:
        raise SolverError(
            f"gap is {request.gap!r}; give the share of the step's time that a faster plan may save, such "
            "as 0.01 for 1 %, and 0 for a proof."
        )
    if request.loss is not None and not callable(request.loss):
        raise LossError(f"loss must be a function of the model's output, but is {request.loss!r}.")
