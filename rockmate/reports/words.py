"""What reports say in words and in few numbers; the same on the page, in figures and in terminals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rk_solvers import Backward, Compute, Problem
from rockmate.plan_files.content import PlanFile
from rockmate.reports.explanation import Explanation
from rockmate.reports.measured import MeasuredSteps
from rockmate.units import format_bytes, format_ms


@dataclass(frozen=True, slots=True)
class Fact:
    """A number with its name, and what it is to be seen beside."""

    name: str
    value: str
    beside: str
    verdict: str = ""  # "good" or "bad", where it keeps or breaks a promise


@dataclass(frozen=True, slots=True)
class Bar:
    """A length of several parts, each with its share of the longest bar's."""

    label: str
    value: str
    parts: tuple[tuple[str, float], ...]  # kind of the part, and its share
    mark: float | None = None  # where the budget is


def percent(share: float, digits: int = 0) -> str:
    """0.123 as "12 %"."""
    return f"{100 * share:.{digits}f} %"


def _more(share: float) -> str:
    """Of time: 0.123 as "12.3 % more"; less where kernels of our own, or compiled ones, save more than is repeated."""
    return f"{percent(abs(share), 1)} {'less' if share < 0 else 'more'}"


def headline(plan_file: PlanFile) -> str:
    """What the plan does, in one sentence."""
    promise, plan = plan_file.promise, plan_file.plan
    peak_bytes = promise.peak_bytes if promise.measured_peak_bytes is None else promise.measured_peak_bytes
    within = f"A training step within {format_bytes(promise.budget_bytes)}"
    if plan.keeps_all:
        return f"{within}: everything is kept, and the peak is {format_bytes(peak_bytes)}."
    return (
        f"{within}: a peak of {format_bytes(peak_bytes)} instead of {format_bytes(promise.baseline_peak_bytes)}, "
        f"{'in' if plan.overhead < 0 else 'for'} {_more(plan.overhead)} time."
    )


def facts(plan_file: PlanFile, measured: MeasuredSteps | None) -> tuple[Fact, ...]:
    """The promise of the plan, number by number."""
    promise, plan = plan_file.promise, plan_file.plan
    eager_bytes = promise.baseline_peak_bytes
    of_eager = f"{percent(promise.budget_bytes / max(1, eager_bytes))} of eager's {format_bytes(eager_bytes)}"
    found = [
        Fact("Budget", format_bytes(promise.budget_bytes), of_eager if eager_bytes else ""),
        Fact("Predicted peak", format_bytes(promise.peak_bytes), _of_budget(promise.peak_bytes, plan_file)),
    ]
    peaks = [("Measured peak", promise.measured_peak_bytes, "when it was planned")]
    if measured is not None:
        peaks.append(("Observed peak", measured.plan.peak_bytes, "for this report"))
    for name, peak_bytes, when in peaks:
        if peak_bytes is not None:
            kept = peak_bytes <= promise.budget_bytes
            verdict = "within the budget" if kept else "above the budget"
            found.append(Fact(name, format_bytes(peak_bytes), f"{verdict}, {when}", "good" if kept else "bad"))
    if promise.measured_reserved_bytes is not None:
        found.append(Fact("Reserved", format_bytes(promise.measured_reserved_bytes), "by the allocator, with gaps"))
    more = f"{_more(plan.overhead)} than {format_ms(promise.baseline_time_ms)}, predicted"
    found.append(Fact("Time of a step", format_ms(promise.time_ms), "predicted" if plan.keeps_all else more))
    if measured is not None:
        against = "" if measured.eager is None else f"eager {format_ms(measured.eager.time_ms)}"
        found.append(Fact("Observed time", format_ms(measured.plan.time_ms), against))
    if promise.gap is not None and promise.lower_bound_ms is not None:
        bound = f"no plan takes less than {format_ms(promise.lower_bound_ms)}"
        found.append(Fact("Gap", "none" if promise.gap == 0 else f"≤ {percent(promise.gap, 2)}", bound))
    total = len(plan_file.problem.forward)
    again = len({name for names in plan_file.parsed_schedule.recomputed.values() for name in names})
    of_which = f"of {total} operations" if again == plan.recomputations else f"of {again} of {total} operations"
    found.append(Fact("Recomputations", str(plan.recomputations or "none"), of_which))
    found += _of_moves(plan_file)
    found += _of_layout(plan_file)
    if promise.kernels is not None:
        count = len(promise.kernels.operations)
        found.append(Fact("Other kernels", f"{count or 'no'} operations", promise.kernels.told))
    if promise.compiled is not None:
        found.append(Fact("Compiled", f"{len(promise.compiled.chosen) or 'no'} parts", promise.compiled.told))
    taken_bytes = promise.planning_peak_bytes
    taken = "" if taken_bytes is None else f", in {format_bytes(taken_bytes)} of memory"
    found.append(Fact("Solver", promise.solver, f"planned in {format_ms(1000 * promise.planning_s)}{taken}"))
    return tuple(found)


def _of_moves(plan_file: PlanFile) -> list[Fact]:
    """What moves, where to, and how fast the links are."""
    promise, plan = plan_file.promise, plan_file.plan
    if promise.memory is None or not plan.moves:
        return []
    stored_bytes = promise.measured_stored_bytes or promise.stored_bytes
    limit_bytes = promise.memory.limit_bytes
    within = "" if limit_bytes is None else f", of {format_bytes(limit_bytes)} that may be there"
    moved = f"{format_bytes(stored_bytes)} in a second memory at most{within}"
    out, back = (format_bytes(round(1e3 * link.bytes_per_ms)) for link in (promise.memory.out, promise.memory.back))
    waits = f"{format_ms(promise.waiting_ms)} of the step" if promise.waiting_ms else "nothing"
    links = Fact("Links", f"{out}/s out", f"{back}/s back; waited for: {waits}")
    return [Fact("Moved", f"{plan.moves} tensors", moved), links]


def _of_layout(plan_file: PlanFile) -> list[Fact]:
    """In which layout convolutions are, and what that gains."""
    layout = plan_file.promise.layout
    if layout is None:
        return []
    return [Fact("Layout", layout.name, layout.told)]


def _of_budget(size_bytes: int, plan_file: PlanFile) -> str:
    free_bytes = plan_file.promise.budget_bytes - size_bytes
    return f"{format_bytes(free_bytes)} below the budget" if free_bytes > 0 else "all of the budget"


def origin(plan_file: PlanFile) -> tuple[Fact, ...]:
    """Of what, by what and where the plan was made."""
    made, asked = plan_file.made, plan_file.asked
    device = f"{made.device}, {made.threads} threads" if made.device == "cpu" else made.device
    found = [
        Fact("Calls", plan_file.graph.calls, ""),
        Fact("Device", device, ""),
        Fact("Versions", f"Rockmate {made.rockmate}, PyTorch {made.torch}", ""),
        Fact("Graph", plan_file.graph.digest[:12], f"{len(plan_file.graph.operations)} calls"),
    ]
    if asked.scope == "total":
        found.append(Fact("Budget of", "all of training", "what it leaves to the step is shown"))
    if asked.scope == "reserved":
        found.append(Fact("Budget of", "reserved memory", "gaps between tensors are in it"))
    if asked.offload is not None:
        place = {"disk": "a disk", "host": "host memory"}.get(asked.offload.where, "a second memory")
        found.append(Fact("Moves", f"may move to {place}", asked.offload.path or ""))
    if asked.pinned:
        found.append(Fact("Pinned", f"{len(asked.pinned)} operations", "never recomputed"))
    if asked.opaque:
        found.append(Fact("Opaque", f"{len(asked.opaque)} submodules", "each one operation"))
    return tuple(found)


def memory_bars(plan_file: PlanFile, measured: MeasuredSteps | None) -> tuple[Bar, ...]:
    """Peaks, beside the budget."""
    promise = plan_file.promise
    rows = [("eager", promise.baseline_peak_bytes, "eager"), ("plan, predicted", promise.peak_bytes, "forward")]
    if promise.measured_peak_bytes is not None:
        rows.append(("plan, measured", promise.measured_peak_bytes, "forward"))
    if measured is not None:
        rows.append(("plan, observed", measured.plan.peak_bytes, "forward"))
    longest = most_shown(promise.budget_bytes, [size_bytes for _, size_bytes, _ in rows])
    mark = promise.budget_bytes / longest if promise.budget_bytes <= longest else None
    return tuple(Bar(name, format_bytes(size), ((kind, size / longest),), mark) for name, size, kind in rows)


def most_shown(budget_bytes: int, others: Sequence[int]) -> int:
    """Most bytes that a chart has room for: a budget that is far from all else is told, and not drawn."""
    highest = max(1, *others)
    return max(budget_bytes, highest) if budget_bytes <= 2 * highest else highest


def time_bar(plan_file: PlanFile) -> tuple[Bar, ...]:
    """The step's time: what keeping everything takes, what the budget costs at least, and what is left to gain."""
    promise = plan_file.promise
    total_ms = max(promise.time_ms, promise.baseline_time_ms, 1e-9)
    base = min(promise.baseline_time_ms, promise.time_ms) / total_ms
    found = [Bar("keep all", format_ms(promise.baseline_time_ms), (("eager", base),))]
    if promise.lower_bound_ms is None:
        parts: tuple[tuple[str, float], ...] = (("eager", base), ("recompute", promise.time_ms / total_ms - base))
    else:
        bound = max(base, promise.lower_bound_ms / total_ms)
        parts = (("eager", base), ("recompute", bound - base))
        found.append(Bar("lower bound", format_ms(promise.lower_bound_ms), parts))
        parts = (*parts, ("gap", max(0.0, promise.time_ms / total_ms - bound)))
    return (*found, Bar("this plan", format_ms(promise.time_ms), parts))


def told(op: str, problem: Problem) -> str:
    """An operation of a schedule, such as "backward linear_3.backward", as people say it."""
    for backward in problem.backward:
        if op == str(Backward(backward.name)):
            return f"the backward of {backward.op}" if backward.op else "the loss and its backward"
    return next((forward.name for forward in problem.forward if op == str(Compute(forward.name))), op)


def story(plan_file: PlanFile, explanation: Explanation) -> str:
    """The chart of memory over the step, for those who do not see it."""
    peak, problem = explanation.peak, plan_file.problem
    forward_ms = sum(op.time_ms for op in problem.forward)
    moments = len(problem.forward) + len(problem.backward) + plan_file.plan.recomputations
    return (
        f"The step has {moments} computations: {len(problem.forward)} of the forward, in the first "
        f"{format_ms(forward_ms)}, then {len(problem.backward)} of the backward with {plan_file.plan.recomputations} "
        f"recomputations between them{_moves_told(plan_file)}. Memory is highest, {format_bytes(peak.peak_bytes)}, at "
        f"{told(peak.op, problem)}, {format_ms(peak.at_ms)} after the start. Keeping everything, it would reach "
        f"{format_bytes(plan_file.promise.baseline_peak_bytes)}."
    )


def _moves_told(plan_file: PlanFile) -> str:
    moves = plan_file.plan.moves
    return f"; {moves} tensors go to a second memory and come back" if moves else ""


def largest_at_peak(explanation: Explanation, problem: Problem, count: int) -> Sequence[tuple[str, int, str]]:
    """(what, bytes, decision) of the largest tensors at the peak, with gradients and workspace among them."""
    peak = explanation.peak
    rows = [(one.name, one.size_bytes, str(one.decision)) for one in peak.alive]
    rows += [
        ("gradients", peak.gradient_bytes, "of the backward"),
        ("workspace", peak.working_bytes, f"of {told(peak.op, problem)}"),
        ("random states", peak.other_bytes, "kept for recomputations"),
    ]
    return sorted((row for row in rows if row[1]), key=lambda row: -row[1])[:count]
