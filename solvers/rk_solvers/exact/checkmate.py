"""The exact solver on one problem: a sweep over states where they are few, else a mixed-integer program.

The sweep is in `state_sweep`. The program is over the events of the step.

Events, in order: each forward operation; then for each backward operation what may be recomputed just before it, and
itself. One binary per recomputation; for each data one variable per interval between two events that touch it: alive
or not. Liveness is as in `liveness`: backward through the touches, data is alive before a use that happens, and before
a computation that does not happen if alive after it. So the alive variables are bounded from below only and need not
be declared integer. An event that does not happen asks for no more bytes than the next one that does: what is alive
across it is alive there too, and backward operations have `peak_bytes >= resident_bytes`.

The idea of a program for checkpointing is from P. Jain et al., "Checkmate: breaking the memory wall with optimal tensor
rematerialization", MLSys 2020.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rk_solvers.exact.state_sweep import MOST_STATES, sweep_states
from rk_solvers.groups import serving
from rk_solvers.liveness import (
    Bytes,
    Step,
    Tables,
    evaluate,
    kept_over_the_turn,
    least_bytes,
    peak_and_time,
    recompute_time_ms,
    schedule_of,
)
from rk_solvers.local.greedy import Greedy
from rk_solvers.milp import BackendLimits, Floats, Model, Outcome, solve
from rk_solvers.problem import Problem, Recompute
from rk_solvers.solver import Solution, Solver, Status, solution_of

ALIVE, DEAD = -1, -2  # in place of the number of a variable
UNITS = 1000.0  # time of the step in the unit of the objective
ROW_UNITS = 1e7  # limits of the memory rows are at most this: tolerances of 1e-6 are then 1e-13 of them

SizedTerm = tuple[int, int]  # a variable and the bytes that it stands for
EXACT_BYTES = 10**7  # the tolerance of back ends is well below a byte of a peak below this
FASTER = 1 - 1e-9  # a plan must take less than this share of a known one's recomputations to be of interest
PROVEN = 2e-6  # a time is proven the least if no plan is faster by more than this share: the tolerance of back ends


@dataclass(frozen=True, slots=True)
class Touch:
    """An event that makes or uses a data."""

    event: int
    makes: bool
    variable: int  # the recomputation that it is, or ALIVE for an event that always happens


@dataclass(slots=True)
class Program:
    """The program under construction."""

    problem: Problem
    tables: Tables = field(init=False)
    model: Model = field(default_factory=Model)
    events: list[Step] = field(default_factory=list)
    recomputation: dict[Step, int] = field(default_factory=dict)  # variable of each
    fixed: Bytes = field(default_factory=lambda: np.zeros(0, np.int64))  # bytes at each event whatever the plan
    variable_bytes: list[list[SizedTerm]] = field(default_factory=list)  # at each event
    saved_fixed: int = 0  # bytes alive between the last forward operation and what follows
    saved_variable: list[SizedTerm] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tables = Tables(self.problem)

    @property
    def unit_ms(self) -> float:
        """Unit of the objective: back ends stop at an absolute gap of about 1e-6."""
        return self.problem.keep_all_time_ms / UNITS or 1.0

    def add_interval(self, variable: int, size: int, first: int, last: int) -> None:
        """`size` bytes are alive at the events `first` to `last`, if `variable` is 1."""
        boundary = first <= len(self.problem.forward) <= last
        if variable == ALIVE:
            self.fixed[first : last + 1] += size
            self.saved_fixed += size * boundary
        elif variable != DEAD:
            for event in range(first, last + 1):
                self.variable_bytes[event].append((variable, size))
            if boundary:
                self.saved_variable.append((variable, size))

    def add_limit(self, terms: list[SizedTerm], limit_bytes: int) -> None:
        """The sum of the terms is at most `limit_bytes`: a number of whole common divisors of the sizes."""
        sizes = [size for _, size in terms]
        if sum(sizes) <= limit_bytes:
            return
        divisor = math.gcd(*sizes) or 1  # nothing but empty data
        whole = limit_bytes // divisor
        unit = max(1.0, whole / ROW_UNITS)
        self.model.add_row([(variable, size // divisor / unit) for variable, size in terms], upper=whole / unit)

    def plan(self, values: Floats) -> Recompute:
        """The plan that the values of the variables describe."""
        groups: list[list[int]] = [[] for _ in self.problem.backward]
        for step, variable in self.recomputation.items():
            if values[variable] > 0.5:
                groups[step.stage].append(step.forward)
        return tuple(tuple(sorted(group)) for group in groups)


def build(
    problem: Problem,
    budget_bytes: int | None,
    saved_bytes: int | None = None,
    allowed: Sequence[Set[int]] | None = None,
) -> Program:
    """The program of least time within the budget; of least peak if there is no budget.

    `saved_bytes` limits what is alive between the last forward operation and what follows it; `allowed` says for each
    backward operation what may be recomputed just before it.
    """
    program = Program(problem)
    free = {index for index, op in enumerate(problem.forward) if op.recomputable}
    _add_events(program, allowed or [free] * len(problem.backward))
    _add_serving(program)
    for item, touches in enumerate(_touches(program)):
        if touches:
            _add_liveness(program, item, touches)
    for index, size in enumerate(program.tables.replay):
        if size:
            _add_replay(program, index, size)
    if budget_bytes is None:
        _add_peak(program)
    else:
        _add_time(program)
        _add_budget(program, budget_bytes)
    if saved_bytes is not None:
        program.add_limit(program.saved_variable, saved_bytes - program.saved_fixed)
    return program


def _add_events(program: Program, allowed: Sequence[Set[int]]) -> None:
    """All events in order, a binary for each that may or may not happen, and the bytes of their own."""
    problem, tables = program.problem, program.tables
    program.events = [Step(-1, index) for index in range(len(problem.forward))]
    own = [tables.workspace[index] + tables.held_until(index) for index in range(tables.count)]
    beside = problem.base_bytes + tables.held_bytes
    for stage in range(tables.stages):
        for index in sorted(serving(problem, allowed[stage], stage)):
            program.recomputation[Step(stage, index)] = program.model.add_variable(integer=True)
            program.events.append(Step(stage, index))
            own.append(beside + tables.resident[stage])
        program.events.append(Step(stage, -1))
        own.append(tables.held_bytes + tables.peak[stage])
    program.fixed = np.array(own, np.int64)
    program.saved_fixed = tables.held_bytes
    program.variable_bytes = [[] for _ in program.events]
    for event, step in enumerate(program.events):
        if step in program.recomputation:
            workspace = problem.forward[step.forward].workspace_bytes
            program.variable_bytes[event].append((program.recomputation[step], workspace))


def _add_serving(program: Program) -> None:
    """What is recomputed in a stage leads to its backward operation."""
    problem = program.problem
    readers = problem.forward_users()
    for step, variable in program.recomputation.items():
        made = problem.renewed(step.forward)
        if not set(made).isdisjoint(problem.backward[step.stage].needs):
            continue
        later = {Step(step.stage, reader) for item in made for reader in readers[item]}
        served = [(program.recomputation[other], -1.0) for other in later if other in program.recomputation]
        program.model.add_row([(variable, 1.0), *served], upper=0.0)


def _touches(program: Program) -> list[list[Touch]]:
    """By data that is not held, the events that make or use it, in order."""
    tables = program.tables
    touches: list[list[Touch]] = [[] for _ in tables.size]
    for event, step in enumerate(program.events):
        variable = program.recomputation.get(step, ALIVE)
        for item in tables.inputs[step.forward] if step.forward >= 0 else tables.needs[step.stage]:
            touches[item].append(Touch(event, False, variable))
        for item in tables.renewed[step.forward] if step.forward >= 0 else ():
            touches[item].append(Touch(event, True, variable))
    return touches


def _add_liveness(program: Program, item: int, touches: list[Touch]) -> None:
    """When a data is alive, from its last touch back to its first computation, and its bytes."""
    size = program.tables.size[item]
    if not size:
        return
    after = DEAD
    for position in range(len(touches) - 1, 0, -1):
        touch = touches[position]
        before = _before_making(program, touch, after) if touch.makes else _before_use(program, touch, after)
        program.add_interval(before, size, touches[position - 1].event + 1, touch.event)
        if touch.makes:  # the new instance; where it is not made, the old one is counted
            program.variable_bytes[touch.event].append((touch.variable, size))
        after = before
    program.fixed[touches[0].event] += size


def _before_use(program: Program, touch: Touch, after: int) -> int:
    """Whether data is alive before a use of it: if the use happens, or if it is alive after."""
    if ALIVE in (touch.variable, after):
        return ALIVE
    if after in (DEAD, touch.variable):
        return touch.variable
    before = program.model.add_variable()
    program.model.add_row([(before, 1.0), (after, -1.0)], lower=0.0)
    program.model.add_row([(before, 1.0), (touch.variable, -1.0)], lower=0.0)
    return before


def _before_making(program: Program, touch: Touch, after: int) -> int:
    """Whether data is alive before it may be made again: if it is not, and alive after. Never if it is."""
    if after == DEAD:
        return DEAD
    before = program.model.add_variable()
    if after == ALIVE:
        program.model.add_row([(before, 1.0), (touch.variable, 1.0)], lower=1.0, upper=1.0)
        return before
    program.model.add_row([(before, 1.0), (touch.variable, 1.0), (after, -1.0)], lower=0.0)
    program.model.add_row([(before, 1.0), (touch.variable, 1.0)], upper=1.0)
    return before


def _add_replay(program: Program, index: int, size: int) -> None:
    """What an operation needs to be computed again is resident from its first to its last computation."""
    events = [event for event, step in enumerate(program.events) if step.forward == index]
    after = DEAD
    for previous, event in zip(reversed(events[:-1]), reversed(events[1:]), strict=True):
        after = _before_use(program, Touch(event, False, program.recomputation[program.events[event]]), after)
        program.add_interval(after, size, previous + (previous >= len(program.problem.forward)), event)


def _add_time(program: Program) -> None:
    """The objective: the time of the step. A constant variable bears the part that no plan changes."""
    problem, model, unit = program.problem, program.model, program.unit_ms
    for step, variable in program.recomputation.items():
        model.cost[variable] = program.tables.time[step.forward] / unit
    model.add_variable(problem.keep_all_time_ms / unit, lower=1.0)


def _add_budget(program: Program, budget_bytes: int) -> None:
    """The bytes at each event are at most the budget."""
    for fixed, terms in zip(program.fixed.tolist(), program.variable_bytes, strict=True):
        program.add_limit(terms, budget_bytes - fixed)


def _add_peak(program: Program) -> None:
    """The objective: the bytes of the highest event."""
    least = least_bytes(program.problem)
    unit = max(1.0, least / ROW_UNITS)
    peak = program.model.add_variable(unit, lower=least / unit, upper=math.inf)
    for fixed, terms in zip(program.fixed.tolist(), program.variable_bytes, strict=True):
        if fixed + sum(size for _, size in terms) > least:
            row = [(variable, size / unit) for variable, size in terms]
            program.model.add_row([*row, (peak, -1.0)], upper=-fixed / unit)


def saved_bytes_of(problem: Problem, recompute: Recompute) -> int:
    """Bytes of data and replay states between the last forward operation and what follows it, under a plan."""
    tables = Tables(problem)
    kept = (item for item in kept_over_the_turn(problem, recompute) if item not in problem.held)
    again = {index for group in recompute for index in group}
    data_bytes = tables.held_bytes + sum(tables.size[item] for item in kept)
    return data_bytes + sum(tables.replay[index] for index in again)


@dataclass(frozen=True, slots=True)
class Found:
    """What a search ended with."""

    recompute: Recompute | None  # fits all limits; None if none is known
    proven: bool  # that it is optimal, or that there is none


@dataclass(frozen=True, slots=True)
class Checkmate(Solver):
    """Exact for blocks of some tens of operations: the least time, or the least peak where nothing fits.

    Where the time limit ends the search, the status is not OPTIMAL. Raises `BackendUnavailable` from `solve` if the
    back end is not there.
    """

    backend: str = "scipy"  # or "gurobi"
    time_limit_s: float = 60.0
    gap: float = 0.0  # stop when the time of the step is proven to be within this share of the least; 0.01 is 1 %
    saved_bytes: int | None = None  # most bytes alive between the last forward and the first backward operation
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)  # of the back end
    most_states: int = MOST_STATES  # of the sweep, tried first unless a back end is asked for; 0: the program alone

    @property
    def name(self) -> str:
        """Short name shown in solutions."""
        return "checkmate"

    def solve(self, problem: Problem, budget_bytes: int) -> Solution:
        """The schedule of least time within the budget, or that of least peak if none fits."""
        deadline = time.monotonic() + self.time_limit_s
        if self._fits(problem, budget_bytes, problem.no_recompute):
            return solution_of(problem, budget_bytes, problem.no_recompute, self.name, optimal=True)
        found = self.least_time(problem, budget_bytes, deadline)
        if found.recompute is not None:
            return solution_of(problem, budget_bytes, found.recompute, self.name, optimal=found.proven)
        lowest = self.least_peak(problem, max(deadline, time.monotonic() + 0.5 * self.time_limit_s))
        if lowest.recompute is None:  # no budget is enough for these saved bytes, or none is known
            plan = problem.no_recompute
            result, schedule = evaluate(problem, plan), schedule_of(problem, plan)
            return Solution(Status.INFEASIBLE, schedule, result.time_ms, result.peak_bytes, self.name)
        return solution_of(problem, budget_bytes, lowest.recompute, self.name)

    def least_time(self, problem: Problem, budget_bytes: int, deadline: float) -> Found:
        """The plan of least time that fits, at the latest at `deadline` (`time.monotonic`)."""
        if budget_bytes < least_bytes(problem):
            return Found(None, True)
        start = self._start(problem, budget_bytes, deadline)
        spent_ms = math.inf if start is None else recompute_time_ms(problem, start)
        if spent_ms <= 0:
            return Found(start, True)
        if self.saved_bytes is None and self.backend == "scipy" and time.monotonic() < deadline:
            swept = sweep_states(problem, budget_bytes, spent_ms * FASTER, self.most_states)
            if swept.proven:
                return Found(swept.recompute or start, True)
        return self._search(problem, budget_bytes, start, deadline)

    def _search(self, problem: Problem, budget_bytes: int, start: Recompute | None, deadline: float) -> Found:
        """The plan of least time; `start`, which fits, if none is faster."""
        program = build(problem, budget_bytes, self.saved_bytes)
        if start is not None:
            require_faster(program, start, self.gap)
        while True:
            result = solve(
                program.model, self.backend, BackendLimits(deadline - time.monotonic(), self.gap, self.parameters)
            )
            if result.values is None:
                proven = result.outcome is Outcome.INFEASIBLE
                return Found(start, proven and (start is None or self.gap < PROVEN))
            plan = program.plan(result.values)
            if self._fits(problem, budget_bytes, plan):
                time_ms = peak_and_time(problem, plan)[1]
                return Found(plan, result.bound * program.unit_ms >= time_ms * (1 - PROVEN))
            if time.monotonic() >= deadline:
                return Found(start, False)
            _exclude(program, plan)  # over by a few bytes, within the back end's tolerance

    def _start(self, problem: Problem, budget_bytes: int, deadline: float) -> Recompute | None:
        """A quick plan that fits, if there is one."""
        left_s = (deadline - time.monotonic()) / 10
        found = Greedy(tries=2, rounds=20, time_limit_s=left_s).plan(problem, budget_bytes)
        return found if self._fits(problem, budget_bytes, found) else None

    def least_peak(self, problem: Problem, deadline: float) -> Found:
        """A plan of the least peak, at the latest at `deadline`."""
        program = build(problem, None, self.saved_bytes)
        result = solve(program.model, self.backend, BackendLimits(deadline - time.monotonic(), 0.0, self.parameters))
        if result.values is None:
            return Found(None, result.outcome is Outcome.INFEASIBLE)
        plan = program.plan(result.values)
        peak, least = peak_and_time(problem, plan)[0], least_bytes(problem)
        if peak <= least or (result.bound > peak - 0.5 and peak < EXACT_BYTES):
            return Found(plan, True)
        while time.monotonic() < deadline:  # is there one a few bytes lower, within the back end's tolerance?
            lower = self._search(problem, peak - 1, None, deadline)
            if lower.recompute is None:
                return Found(plan, lower.proven)
            plan = lower.recompute
            peak = peak_and_time(problem, plan)[0]
        return Found(plan, False)

    def _fits(self, problem: Problem, budget_bytes: int, plan: Recompute) -> bool:
        """Whether a plan, evaluated exactly, is within both limits."""
        saved = self.saved_bytes is None or saved_bytes_of(problem, plan) <= self.saved_bytes
        return saved and peak_and_time(problem, plan)[0] <= budget_bytes


def require_faster(program: Program, plan: Recompute, gap: float) -> None:
    """Only plans that are faster than `plan`, by more than `gap` of the step's time, are of interest."""
    problem = program.problem
    spent_ms = recompute_time_ms(problem, plan)
    least_gain = max(1e-6, gap * (problem.keep_all_time_ms + spent_ms) / spent_ms)
    times = ((variable, program.tables.time[step.forward]) for step, variable in program.recomputation.items())
    terms = [(variable, time_ms * UNITS / spent_ms) for variable, time_ms in times]
    program.model.add_row(terms, upper=UNITS * (1.0 - least_gain))


def _exclude(program: Program, plan: Recompute) -> None:
    """Add the row that every other plan satisfies and this one does not."""
    terms, count = [], 0
    for step, variable in program.recomputation.items():
        chosen = step.forward in plan[step.stage]
        terms.append((variable, -1.0 if chosen else 1.0))
        count += chosen
    program.model.add_row(terms, lower=1.0 - count)
