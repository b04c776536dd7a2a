"""A planned step as people look at it: which computation runs when, and what fills the memory meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from rk_solvers import LinkUse, Problem, Simulation, schedule_of, simulate
from rockmate.plan_files.content import OperationRecord, PlanFile
from rockmate.reports.explanation import Explanation

Lane = Literal["forward", "recompute", "backward"]


@dataclass(frozen=True, slots=True)
class Computation:
    """One computation of the step. Its bytes, all together, are what is alive at most while it runs."""

    lane: Lane
    name: str  # of the operation of the problem, such as "linear_3" or "linear_3.backward"
    index: int  # of that operation, in `Problem.forward` or `Problem.backward`
    stage: int  # the operation of the backward that runs next, or now; what is recomputed, is recomputed for it
    start_ms: float
    end_ms: float
    kept_bytes: int  # tensors that are there since the forward, and random states
    recomputed_bytes: int  # tensors that were computed again
    gradient_bytes: int  # resident when it starts
    workspace_bytes: int  # what it takes while it runs, new gradients among it

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive while it runs."""
        return self.kept_bytes + self.recomputed_bytes + self.gradient_bytes + self.workspace_bytes


def computations(plan_file: PlanFile, explanation: Explanation) -> tuple[Computation, ...]:
    """Every computation of the plan, in order; `explanation` is that of the same file."""
    problem = plan_file.problem
    moments = simulate(problem, plan_file.parsed_schedule, plan_file.promise.memory).moments
    found: list[Computation] = []
    stage = 0
    for moment, again_bytes in zip(moments, _recomputed_bytes(explanation, len(moments)), strict=True):
        step = moment.step
        lane: Lane = "backward" if step.forward < 0 else "forward" if step.stage < 0 else "recompute"
        stage = max(stage, step.stage)
        gradient_bytes = problem.backward[stage].resident_bytes if lane != "forward" else 0
        if lane == "backward":
            workspace_bytes = problem.backward[stage].peak_bytes - gradient_bytes
        else:
            workspace_bytes = problem.forward[step.forward].workspace_bytes
        kept_bytes = moment.peak_bytes - again_bytes - gradient_bytes - workspace_bytes
        index = stage if lane == "backward" else step.forward
        times = (moment.start_ms, moment.end_ms)
        parts = (kept_bytes, again_bytes, gradient_bytes, workspace_bytes)
        found.append(Computation(lane, moment.op.name, index, stage, *times, *parts))
    return tuple(found)


def _recomputed_bytes(explanation: Explanation, steps: int) -> list[int]:
    """Bytes at each step of the tensors that are there for a second time, or a later one."""
    change = [0] * (steps + 1)
    for entry in explanation.entries:
        for stay in entry.lifetimes[1:]:
            if stay.is_back:
                continue  # kept, but elsewhere for a while
            change[stay.first] += entry.size_bytes
            change[stay.last + 1] -= entry.size_bytes
    return list(accumulate(change))[:steps]


def link_uses(plan_file: PlanFile) -> tuple[LinkUse, ...]:
    """Each transfer of the plan, as predicted; none where nothing moves."""
    return simulate(plan_file.problem, plan_file.parsed_schedule, plan_file.promise.memory).link_uses


def keep_all_simulation(problem: Problem) -> Simulation:
    """The step that keeps everything, as predicted: what stands for eager training where none was measured."""
    return simulate(problem, schedule_of(problem, {}))


def main_operations(plan_file: PlanFile) -> dict[str, OperationRecord]:
    """For each forward operation of the problem, by name, the call that it is named after."""
    found: dict[str, OperationRecord] = {}
    for op in plan_file.graph.operations:
        if op.node and (op.name == op.node or op.node not in found):
            found[op.node] = op
    return found


def calls_by_name(plan_file: PlanFile) -> dict[str, OperationRecord]:
    """All calls of the graph; a backward operation says of which it is (`BackwardOp.op`)."""
    return {op.name: op for op in plan_file.graph.operations}
