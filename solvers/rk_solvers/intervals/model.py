"""The constraint program of retention intervals: computations of operations, and how long each instance is kept.

Each operation has copies: its first computation, and recomputations whose stage is a variable (or a constant,
outside a `Window`). An instance of a data is an interval from its computation to a variable end; all intervals
share one memory of limited capacity. The slots of the time line are the keys of `liveness.Tables`: every computation
that is possible has its own slot, so that the order of the computations is fixed and only their stages vary.

Reference: B. Bartan, H. Li, H. Teague, C. Lott, B. Dilkina, "Moccasin: efficient tensor rematerialization for
neural networks", ICML 2023 (arXiv:2304.14463).

The memory is that of `liveness`: the latest copy serves, so the literals "copy c is computed at or before stage s"
decide which instance a use keeps alive. Slots in which nothing runs cost nothing: what is alive there is also alive
at the next computation. Needs ortools, which is imported by the functions that build.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rk_solvers.liveness import Tables
from rk_solvers.problem import Problem, Recompute

Literal = Any  # a Boolean variable of ortools, its negation, or a Python bool where the answer is known
Ends = dict[tuple[int, int], int]  # slot after the last of an instance, by data and number of the copy
Stages = list[list[int]]  # stage of each copy of each operation


@dataclass(frozen=True, slots=True)
class Window:
    """What may change: recomputations of `ops` in `stages`; all others stay as the plan has them."""

    ops: frozenset[int]
    stages: range  # contiguous
    near: bool = False  # recompute only where a direct use, or a user's direct use, or the plan has it


@dataclass(slots=True, eq=False)
class Copy:
    """One computation of an operation."""

    op: int
    number: int  # 0: the first computation
    low: int  # first and last stage possible; -1 for the first computation
    high: int
    stage: Any  # int, or an integer variable that is the number of stages if the copy is absent
    free: bool = False


@dataclass(frozen=True, slots=True)
class Units:
    """Whole numbers for bytes and times."""

    bytes: int  # divides all sizes, workspaces and replay bytes: nothing is lost
    time_ms: float  # times are rounded down to multiples: a bound in these units is a bound in milliseconds

    @staticmethod
    def of(problem: Problem) -> Units:
        """The units for `problem`: exact for times in whole milliseconds, else about 1e-11 of the step each."""
        sizes = [item.size_bytes for item in problem.data]
        for op in problem.forward:
            sizes += [op.workspace_bytes, op.replay_bytes]
        times = [op.recompute_ms for op in problem.forward]
        total = math.fsum(times)
        whole = all(time_ms == int(time_ms) for time_ms in times) and total < 2**40
        return Units(math.gcd(*sizes) or 1, 1.0 if whole or not total else total / 2**36)

    def time(self, time_ms: float) -> int:
        """`time_ms` in units, rounded down."""
        return int(time_ms / self.time_ms)


class IntervalModel:
    """A model of `problem` under `budget_bytes`, around `plan` where a window is given.

    `computations` limits how often an operation may be computed, the first time included; an operation that `plan`
    computes more often may still be computed as often.
    """

    def __init__(
        self, problem: Problem, budget_bytes: int, plan: Recompute, computations: int,
        window: Window | None = None,
    ) -> None:  # fmt: skip
        from ortools.sat.python import cp_model  # optional, and slow to import

        self.cp = cp_model.CpModel()
        self.domain = cp_model.Domain
        self.problem, self.plan, self.window = problem, plan, window
        self.count, self.stages = len(problem.forward), len(problem.backward)
        self.stride = self.count + 1
        self.live = Tables(problem)
        self.horizon = self.key(self.stages, 0)
        self.units = Units.of(problem)
        self.capacity = (budget_bytes - problem.base_bytes) // self.units.bytes
        self.budget_bytes = budget_bytes
        self.room = [self._room(op.peak_bytes) for op in problem.backward]
        self.fits = self.capacity >= 0 and min(self.room, default=0) >= 0
        self.copies = self._copies(computations)
        self.order: dict[tuple[int, int, int], Any] = {}
        self.pairs: dict[tuple[int, int, int, int], Any] = {}
        self.ends: dict[tuple[int, int], Any] = {}  # end of an instance, by data and number of the copy
        self.others: list[tuple[Any, Callable[[Ends, Stages], int]]] = []  # further variables, and what to hint
        self.profile: NDArray[np.int64] = np.zeros(self.horizon + 1, np.int64)  # differences of the constant bytes
        self.tasks: list[tuple[Any, int]] = []  # intervals and the bytes that they take, in units
        self.fixed_ms = 0  # time of the recomputations that stay, in units
        if self.fits:
            self._build()

    def key(self, stage: int, op: int) -> int:
        """Slot of `op` in `stage`; of the backward operation if `op` is the number of forward operations."""
        return self.live.key(stage, op) if stage >= 0 else op

    def value_of(self, time: Any, copy: Copy) -> Any:
        """What a solver's value function `time` says of the stage of `copy`."""
        return time(copy.stage) if copy.free else copy.stage

    def recompute(self, value: Any) -> Recompute:
        """The plan, by a solver's value function."""
        groups: list[list[int]] = [[] for _ in range(self.stages)]
        for copies in self.copies:
            for copy in copies[1:]:
                stage = self.value_of(value, copy)
                if stage < self.stages:
                    groups[stage].append(copy.op)
        return tuple(tuple(sorted(group)) for group in groups)

    def _room(self, own_bytes: int) -> int:
        return (self.budget_bytes - self.problem.base_bytes - own_bytes) // self.units.bytes

    # --- copies ---------------------------------------------------------------------------------------------------

    def _copies(self, computations: int) -> list[list[Copy]]:
        problem = self.problem
        window = self.window or Window(frozenset(range(self.count)), range(self.stages))
        may = {op for op in window.ops if problem.forward[op].recomputable}
        planned = stages_of(problem, self.plan)
        domains = self._domains(may, window, planned)
        copies = []
        for op in range(self.count):
            kept = [stage for stage in planned[op] if op not in may or stage not in window.stages]
            free = max(len(planned[op]) - len(kept), computations - 1 - len(kept), 0) if op in may else 0
            stages: list[int | None] = [stage for stage in kept if stage < window.stages.start]
            before = len(stages)
            stages += [None] * min(free, len(domains[op])) + list(kept[before:])
            copies.append([Copy(op, 0, -1, -1, -1)])
            for stage in stages:
                copies[op].append(self._copy(op, len(copies[op]), stage, domains[op]))
        return copies

    def _domains(self, may: set[int], window: Window, planned: list[list[int]]) -> list[list[int]]:
        """For each operation of `may`, the stages of `window` where something may use a recomputation of it."""
        problem = self.problem
        forward, backward = problem.forward_users(), problem.backward_users()
        domains: list[list[int]] = [[] for _ in problem.forward]
        direct: list[set[int]] = [set() for _ in problem.forward]
        for op in reversed(range(self.count)):
            if op not in may:
                continue
            found: set[int] = set(planned[op])
            for item in self.live.renewed[op]:
                direct[op].update(backward[item])
                for user in forward[item]:
                    found.update(direct[user] if window.near else domains[user], planned[user])
            domains[op] = sorted((found | direct[op]).intersection(window.stages))
        return domains

    def _copy(self, op: int, number: int, stage: int | None, domain: list[int]) -> Copy:
        if stage is not None:
            return Copy(op, number, stage, stage, stage)
        variable = self.cp.new_int_var_from_domain(self.domain.from_values([*domain, self.stages]), f"s{op}_{number}")
        return Copy(op, number, domain[0], domain[-1], variable, free=True)

    def by(self, copy: Copy, stage: int) -> Literal:
        """Whether `copy` is computed at or before `stage`."""
        if not copy.free or stage < copy.low:
            return copy.high <= stage if not copy.free else False
        stage = min(stage, copy.high)
        name = (copy.op, copy.number, stage)
        if name not in self.order:
            literal = self.order[name] = self.cp.new_bool_var("")
            self.cp.add(copy.stage <= stage).only_enforce_if(literal)
            self.cp.add(copy.stage > stage).only_enforce_if(~literal)
        return self.order[name]

    def present(self, copy: Copy) -> Literal:
        """Whether `copy` is computed at all."""
        return self.by(copy, self.stages)

    def before(self, first: Copy, second: Copy) -> Literal:
        """Whether `first` is computed in the stage of `second` or earlier; of no meaning where `second` is absent."""
        if not second.free:
            return self.by(first, second.stage)
        if not first.free:
            return negation(self.by(second, first.stage - 1))
        if first.low > second.high:
            return False
        name = (first.op, first.number, second.op, second.number)
        if name not in self.pairs:
            literal = self.pairs[name] = self.cp.new_bool_var("")
            self.cp.add(first.stage <= second.stage).only_enforce_if(literal)
            self.cp.add(first.stage > second.stage).only_enforce_if(~literal)
        return self.pairs[name]

    def start(self, copy: Copy) -> Any:
        """Slot of `copy`."""
        return copy.stage * self.stride + (self.count + copy.op) if copy.free else self.key(copy.stage, copy.op)

    # --- constraints ----------------------------------------------------------------------------------------------

    def _build(self) -> None:
        for copies in self.copies:
            for first, second in itertools.pairwise(copies):
                if first.free and second.free:  # in order; the absent ones last
                    self.cp.add(second.stage > first.stage).only_enforce_if(self.present(second))
                    self.cp.add_implication(self.present(second), self.present(first))
            for copy in copies:
                if copy.free:
                    self._serves(copy)
        self._own_bytes()
        terms = []
        for copies in self.copies:
            time = self.units.time(self.live.time[copies[0].op])
            self.fixed_ms += time * sum(not copy.free for copy in copies[1:])
            terms += [time * self.present(copy) for copy in copies if copy.free]
        self.cp.minimize(sum(terms) + self.fixed_ms)

    def _serves(self, copy: Copy) -> None:
        """A recomputation has a use in its own stage (the normal form of plans)."""
        anchors: list[Literal] = []
        renewed = set(self.live.renewed[copy.op])
        for stage in range(copy.low, copy.high + 1):
            if renewed.intersection(self.problem.backward[stage].needs):
                literal = self.cp.new_bool_var("")
                self.cp.add(copy.stage == stage).only_enforce_if(literal)
                anchors.append(literal)
                self.others.append((literal, self._same(copy, stage)))
        for user in range(copy.op + 1, self.count):
            if renewed.intersection(self.problem.forward[user].inputs):
                for other in self.copies[user][1:]:
                    if other.low <= copy.high and copy.low <= other.high:
                        anchors.append(self._together(copy, other))
        self.cp.add_bool_or([*anchors, negation(self.present(copy))])

    @staticmethod
    def _same(copy: Copy, stage: int) -> Callable[[Ends, Stages], int]:
        return lambda _, stages: stages[copy.op][copy.number] == stage

    def _together(self, copy: Copy, other: Copy) -> Literal:
        literal = self.cp.new_bool_var("")
        self.cp.add(copy.stage == other.stage).only_enforce_if(literal)
        self.others.append((literal, lambda _, stages: stages[copy.op][copy.number] == stages[other.op][other.number]))
        return literal

    def _own_bytes(self) -> None:
        """Workspaces, gradients, held data: constant, but for the workspaces of free copies."""
        for stage, op in enumerate(self.problem.backward):
            resident = self.capacity - self._room(op.resident_bytes)
            self.constant(self.key(stage, 0), self.key(stage, self.count) - 1, resident)
            self.constant(self.key(stage, self.count), self.key(stage, self.count), self.capacity - self.room[stage])
        for copies in self.copies:
            size = self.problem.forward[copies[0].op].workspace_bytes // self.units.bytes
            for copy in copies:
                if not copy.free:
                    self.constant(self.start(copy), self.start(copy), size)
                elif size:
                    present = self.present(copy)
                    task = self.cp.new_optional_fixed_size_interval_var(self.start(copy), 1, present, "")
                    self.tasks.append((task, size))
        for item in self.problem.held:
            data = self.problem.data[item]
            self.constant(data.producer, self.horizon - 1, data.size_bytes // self.units.bytes)

    def constant(self, first: int, last: int, size: int) -> None:
        """Add constant bytes, in units, to the slots from `first` to `last`."""
        self.profile[first] += size
        self.profile[last + 1] -= size


def negation(literal: Literal) -> Literal:
    """The opposite of a literal, which may be a constant."""
    return not literal if isinstance(literal, bool) else ~literal


def stages_of(problem: Problem, plan: Recompute) -> list[list[int]]:
    """For each forward operation, the stages in which `plan` recomputes it."""
    stages: list[list[int]] = [[] for _ in problem.forward]
    for stage, group in enumerate(plan):
        for op in group:
            stages[op].append(stage)
    return stages
