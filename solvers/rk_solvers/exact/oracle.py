"""Exact answers for small problems: the least time under a budget, and the least peak.

Going backward through the step, what is alive is known: a state is the set of data with a later use (and the
set of operations that are recomputed later, for their replay bytes). For each backward operation, from the
last to the first, every serving group of recomputations is tried on every reachable state. There is no limit
on how often an operation is recomputed. Exponential in the number of operations; for tests and documentation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations

from rk_solvers.groups import serving
from rk_solvers.problem import Problem, Recompute
from rk_solvers.solver import Solution, Solver, solution_of

State = tuple[frozenset[int], frozenset[int]]  # data with a later use, operations recomputed later
Value = tuple[float, Recompute]


@dataclass(frozen=True, slots=True)
class Oracle(Solver):
    """Exhaustive search; raises `ValueError` above `max_forward` forward operations."""

    max_forward: int = 10

    @property
    def name(self) -> str:
        """Short name shown in solutions."""
        return "oracle"

    def solve(self, problem: Problem, budget_bytes: int) -> Solution:
        """The schedule of least time within `budget_bytes`, or the one of least peak if there is none."""
        if len(problem.forward) > self.max_forward:
            raise ValueError(
                f"the oracle was given {len(problem.forward)} forward operations; it takes {self.max_forward}"
            )
        plan = least_time(problem, budget_bytes)
        if plan is not None:
            return solution_of(problem, budget_bytes, plan, self.name, optimal=True)
        return solution_of(problem, budget_bytes, least_peak(problem), self.name)


@dataclass(slots=True)
class _Sweep:
    problem: Problem
    budget_bytes: int | None  # None: the value of a plan is its peak in bytes; else its time in milliseconds
    held_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.held_bytes = self.bytes_of(self.problem.held)

    def bytes_of(self, items: Iterable[int]) -> int:
        return sum(self.problem.data[item].size_bytes for item in items)

    def free(self, items: Iterable[int]) -> frozenset[int]:
        """The data among `items` that are not held."""
        return frozenset(items) - self.problem.held

    def stage(self, stage: int, group: tuple[int, ...], state: State) -> tuple[int, State]:
        """Peak of a stage and the state before it, from the state after it."""
        problem = self.problem
        op = problem.backward[stage]
        alive, again = state
        alive |= self.free(op.needs)
        fixed = problem.base_bytes + self.held_bytes
        peak = fixed + self.bytes_of(alive) + self.replay(again) + op.peak_bytes
        for index in reversed(group):
            forward = problem.forward[index]
            made, read = self.free(forward.outputs), self.free(forward.inputs)
            again |= {index}
            now = self.bytes_of(alive | made | read) + self.replay(again)
            peak = max(peak, fixed + now + forward.workspace_bytes + op.resident_bytes)
            alive = (alive - made) | read
        return peak, (alive, frozenset(index for index in again if problem.forward[index].replay_bytes))

    def replay(self, again: Iterable[int]) -> int:
        return sum(self.problem.forward[index].replay_bytes for index in again)

    def forward_peak(self, state: State) -> int:
        """Peak of the forward phase, from the state after it."""
        problem = self.problem
        alive, again = state
        peak = problem.base_bytes
        for index in reversed(range(len(problem.forward))):
            forward = problem.forward[index]
            made, read = self.free(forward.outputs), self.free(forward.inputs)
            held = self.bytes_of(item for item in problem.held if problem.data[item].producer <= index)
            states = self.replay(other for other in again if other <= index)
            now = self.bytes_of(alive | made | read) + held + states
            peak = max(peak, problem.base_bytes + now + forward.workspace_bytes)
            alive = (alive - made) | read
        return peak

    def run(self) -> Value | None:
        start: State = (frozenset(), frozenset())
        states: dict[State, Value] = {start: (0.0, ())}
        for stage in reversed(range(len(self.problem.backward))):
            groups = list(_groups(self.problem, stage))
            reached: dict[State, Value] = {}
            for state, (value, plan) in states.items():
                for group in groups:
                    peak, before = self.stage(stage, group, state)
                    worth = self._join(value, peak, group)
                    if worth is not None and (before not in reached or worth < reached[before][0]):
                        reached[before] = (worth, (group, *plan))
            states = reached
        best: Value | None = None
        for state, (value, plan) in states.items():
            worth = self._join(value, self.forward_peak(state), ())
            if worth is not None and (best is None or (worth, plan) < best):
                best = (worth, plan)
        return best

    def _join(self, value: float, peak: int, group: tuple[int, ...]) -> float | None:
        if self.budget_bytes is None:
            return max(value, float(peak))
        if peak > self.budget_bytes:
            return None
        return value + sum(self.problem.forward[index].recompute_ms for index in group)


def least_time(problem: Problem, budget_bytes: int) -> Recompute | None:
    """The plan of least time whose peak is at most `budget_bytes`, or None if there is none."""
    best = _Sweep(problem, budget_bytes).run()
    return best[1] if best else None


def least_peak(problem: Problem) -> Recompute:
    """A plan of least peak."""
    best = _Sweep(problem, None).run()
    assert best is not None  # without a budget every plan counts
    return best[1]


def _groups(problem: Problem, stage: int) -> Iterable[tuple[int, ...]]:
    """All groups of recomputations that serve `stage`."""
    free = {index for index, op in enumerate(problem.forward) if op.recomputable}
    relevant = sorted(serving(problem, free, stage))
    for count in range(len(relevant) + 1):
        for group in combinations(relevant, count):
            if len(serving(problem, set(group), stage)) == count:
                yield group
