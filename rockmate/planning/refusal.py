"""What a user is told whose budget no plan fits, or whose device a step does not fit: what binds, what would help."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

from rk_solvers import Limits, Problem, Simulation, Solution, simulate, solver_named
from rk_solvers.bounds.peak_bound import peak_bound_bytes
from rk_solvers.liveness import least_bytes
from rkgb.devices.registry import device_of
from rockmate.errors import BudgetTooSmall
from rockmate.memory.budget import RESERVE, is_fraction
from rockmate.memory.split import MemorySplit, gradients_made
from rockmate.planning.costs import LOSS
from rockmate.planning.graph_solver import memory_for
from rockmate.planning.measured import Measured, problem_of
from rockmate.planning.plan import Plan
from rockmate.planning.request import PlanRequest
from rockmate.runtime.codegen import FILE_NAME
from rockmate.units import format_apart, format_bytes

_MUCH = 0.15  # a part of the peak that is worth a word
_SHOWN = 3  # of what a plan holds, in a message
_ASSIGNED = re.compile(r"\[?(\w+)")  # the first name of a line of generated code


def too_small(
    measured: Measured,
    solution: Solution,
    budget_bytes: int,
    lowest_bytes: int,
    split: MemorySplit | None,
    request: PlanRequest,
) -> BudgetTooSmall:
    """The error of the budget that was asked for, that the plan of lowest peak, `solution`, exceeds.

    `lowest_bytes` was measured: a step of that plan really takes that much.
    """
    problem = measured.problem
    simulation = simulate(problem, solution.schedule, solution.memory)
    binding = simulation.peak.op
    op = str(binding)
    smallest = max(lowest_bytes, budget_bytes + 1)
    if memory_for(request, measured) is not None:  # what is proven of recomputation alone says nothing of moves
        proven = least_bytes(problem)
    else:
        proven = solution.proven_bytes or peak_bound_bytes(problem, max(solution.peak_bytes, 1), request.limits.proof_s)
    proven = min(smallest, proven)
    advice = " ".join(_advice(measured, _moment(problem, simulation), smallest, budget_bytes, request.limits))
    divided = ""
    if split is not None:
        _, needed = format_apart(split.step_bytes, smallest)
        divided = f": {split}, and at least {needed} are needed"
        resident_bytes = split.residents.total_bytes
        budget_bytes, smallest, proven = split.total_bytes, smallest + resident_bytes, proven + resident_bytes
    return BudgetTooSmall(
        f"budget {' < '.join(format_apart(budget_bytes, smallest))}, the smallest for which a schedule was found "
        f"({_proof(proven, smallest)}; bound at {op}{_where(measured, binding.name)}){divided}. "
        f"{_of_what(measured, request)}Raise the budget to at least "
        f"{smallest} bytes, or: {advice}",
        smallest,
        op,
        proven,
    )


def _proof(proven_bytes: int, smallest_bytes: int) -> str:
    if proven_bytes >= smallest_bytes:
        return "proven: none takes less"
    less = 1 - proven_bytes / smallest_bytes
    below = f"{less:.1%}" if less >= 0.001 else f"{smallest_bytes - proven_bytes} bytes"
    return f"proven: none takes less than {format_apart(proven_bytes, smallest_bytes)[0]}, {below} below"


def _of_what(measured: Measured, request: PlanRequest) -> str:
    """What a fraction is a part of."""
    written = request.budget
    if not is_fraction(written):
        return ""
    if request.scope == "reserved":
        held = format_bytes(measured.step_now_bytes(request.scope))
        return f"{written!r} is of the {held} that the allocator reserves for the step now. "
    held_bytes = 0 if measured.residents is None else measured.residents.total_bytes
    now, eager = (format_bytes(held_bytes + peak) for peak in (measured.peak_now_bytes, measured.eager_peak_bytes))
    what = "a step takes" if measured.residents is None else "training takes"
    if measured.checkpointed_peak_bytes is not None:
        return f"{written!r} is of the {now} that {what} now, with its own checkpointing; without it, {eager}. "
    return f"{written!r} is of the {now} that {what.replace('a step', 'the eager step')}. "


def _where(measured: Measured, op_name: str) -> str:
    """The user's own words for an operation: submodule and source line."""
    stages = measured.graphs.K_graph.backward
    name = next((stage.op for stage in stages if stage.name == op_name), op_name)
    return next((f", {op.source}" for op in measured.graphs.D_graph if op.name == name), "")


# ---- what would help ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Moment:
    """What is alive at the peak, in bytes."""

    op: str  # its name
    held_bytes: int  # the outputs of the model
    once: dict[str, int]  # values that nothing can recompute, by name


def _moment(problem: Problem, simulation: Simulation) -> _Moment:
    """The moment of the schedule's peak."""
    held_bytes, once = 0, dict[str, int]()
    for index in simulation.alive_at(simulation.moments.index(simulation.peak)):
        data = problem.data[index]
        if index in problem.held:
            held_bytes += data.size_bytes
        elif not problem.forward[data.producer].recomputable:
            once[data.name] = data.size_bytes
    return _Moment(simulation.peak.op.name, held_bytes, once)


def _least_above_gradients(measured: Measured, budget_bytes: int, limits: Limits) -> int:
    """What a step takes, as predicted, that adds to gradients: under the budget, or the least that was found."""
    problem, chain = problem_of(measured.graphs, measured.loss, None, frozenset(gradients_made(measured.graphs)))
    return solver_named("greedy", limits.within(limits.guess_s), chain).solve(problem, budget_bytes).peak_bytes


def _advice(
    measured: Measured, moment: _Moment, smallest_bytes: int, budget_bytes: int, limits: Limits
) -> Iterator[str]:
    """Sentences, the most helpful first."""
    made = gradients_made(measured.graphs)
    parameters_bytes = sum(made[name] for name in made.keys() - measured.gradients)
    if measured.residents is not None:
        parameters_bytes = 0  # counted beside the step
    yield _smaller_inputs(measured.pattern.batch, min(parameters_bytes, smallest_bytes), smallest_bytes)
    if moment.held_bytes > _MUCH * smallest_bytes:
        held = format_bytes(moment.held_bytes)
        yield f"return less, such as the loss instead of what it is made of (outputs hold {held} throughout);"
    kept_bytes = sum(moment.once.values())
    if kept_bytes > _MUCH * smallest_bytes:
        largest = max(moment.once, key=lambda name: moment.once[name])
        yield (
            f"keep less that cannot be recomputed ({format_bytes(kept_bytes)}, of which {largest} is "
            f"{format_bytes(moment.once[largest])});"
        )
    if parameters_bytes > _MUCH * smallest_bytes:
        yield f"freeze parameters (their gradients take {format_bytes(parameters_bytes)} at the end of the step);"
        above_bytes = _least_above_gradients(measured, budget_bytes, limits)
        if above_bytes < budget_bytes or above_bytes < (1 - _MUCH) * smallest_bytes:
            does = "this budget does" if above_bytes <= budget_bytes else f"about {format_bytes(above_bytes)} do"
            yield (
                "have gradients before the step, which is then planned above them: set each parameter's grad to zeros "
                "once, and keep them by zero_grad(set_to_none=False) "
                f"({does}, above {format_bytes(sum(made.values()))} of gradients);"
            )
    if moment.op == LOSS:
        yield "compute the loss in parts, as the peak is there."
    else:
        yield f"split {moment.op} into parts, as the peak is there."


def _smaller_inputs(batch: int | None, fixed_bytes: int, smallest_bytes: int) -> str:
    """Advice that fits what a step is called with; `fixed_bytes` do not shrink with it."""
    half = format_bytes(fixed_bytes + (smallest_bytes - fixed_bytes) // 2)
    all_but = "if all but gradients of parameters shrink with it"
    if batch is None:  # such as the nodes and the edges of one graph
        return f"give smaller inputs (about {half} would do for half of them, {all_but});"
    if batch > 1:
        return f"halve the batch (about {half} would do, {all_but});"
    if batch == 1:
        return "give smaller inputs, such as shorter sequences: there is one row alone;"
    return "give a sample with rows: the batch is empty, and a real one takes more;"


# ---- a step that finds no memory -----------------------------------------------------------------------


def tell_of_lack(measured: Measured, plan: Plan, name: str, error: BaseException) -> None:
    """Add a note to `error`, with which memory ran out in a step of `plan`: who holds it there, and what would fit.

    `name` is the module's class.
    """
    device = device_of(measured.device)
    peak_bytes = plan.measured_peak_bytes or plan.peak_bytes
    simulation = simulate(measured.problem, plan.schedule, plan.memory)
    place = _place_of(error, measured, simulation)
    held_bytes = simulation.moments[place].alive_bytes
    free_bytes = device.available_bytes()
    there_bytes = held_bytes + free_bytes
    if there_bytes < peak_bytes:
        budget = format_bytes(int(there_bytes * (1 - RESERVE)))
        advice = (
            f"Beside what else is there, about {format_bytes(there_bytes)} are left for a step: plan for them "
            f'(budget="{budget}"), give a smaller batch, or free memory first.'
        )
    else:
        advice = f"That is as much as the step takes, but in pieces that are too small. {device.gaps_advice()}"
    error.add_note(
        f"{name} ran by its plan for {format_bytes(plan.budget_bytes)}, whose step takes "
        f"{format_bytes(peak_bytes)} above what was there before it. Memory ran out at "
        f"{_told(measured, simulation.moments[place].op.name)}, where the plan holds {format_bytes(held_bytes)}"
        f"{_held_at(place, measured, simulation)}; {format_bytes(free_bytes)} were free on {measured.device}. {advice}"
    )


def _place_of(error: BaseException, measured: Measured, simulation: Simulation) -> int:
    """Of the computation that failed, by the line of generated code; of the highest one where that is not known."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(FILE_NAME)]
    found = _ASSIGNED.match((frames[-1].line or "").strip()) if frames else None
    if found is not None:
        op = next((op.name for op in measured.graphs.D_graph if found[1] in op.output_names), found[1])
        places = [place for place, moment in enumerate(simulation.moments) if moment.op.name == op]
        if places:
            return places[0 if frames[-1].name == "forward" else -1]
    return simulation.moments.index(simulation.peak)


def _held_at(place: int, measured: Measured, simulation: Simulation) -> str:
    """The largest of what is alive before a computation."""
    problem = measured.problem
    made_here = {data for data, item in enumerate(problem.data) if item.name == simulation.moments[place].op.name}
    alive = [problem.data[index] for index in simulation.alive_at(place) if index not in made_here]
    largest = sorted(alive, key=lambda data: -data.size_bytes)[:_SHOWN]
    if not largest:
        return ""
    told = ", ".join(
        f"{format_bytes(data.size_bytes)} of {_told(measured, problem.forward[data.producer].name)}" for data in largest
    )
    return f": {told}{', and others' if len(alive) > len(largest) else ''}"


def _told(measured: Measured, op_name: str) -> str:
    """An operation with its place in the user's code."""
    where = _where(measured, op_name).removeprefix(", ")
    return f"{op_name} ({where})" if where else op_name
