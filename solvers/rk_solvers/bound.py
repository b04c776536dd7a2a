"""A lower bound on the time of every plan that fits a budget: the backward in a few coarse stages.

The backward operations are grouped into consecutive groups. For each group and forward operation: is it recomputed
there (once is enough to pay for)? For each data: is it alive when the group begins? What every plan satisfies of these:

* a data needed or read in a group is alive at its beginning, or recomputed in it; so is one alive at its end;
* at the beginning of each group, and at the forward operations, what is alive fits the budget;
* at a backward operation, its needs are alive, and so is what a later one of the group needs, or what is alive at the
  end of the group, unless it is recomputed in the group;
* an operation recomputed in a group has its inputs and outputs beside what is alive throughout the group.

What is relaxed: when in the group something happens, and how often. More groups are a tighter integer program, but as a
linear program fine groups alone are weak: half a recomputation from half an input, and again in the next group, make a
whole one. So several groupings are in one program, nested and linked: what is recomputed in a coarse group is paid for
in a fine one, and what is alive where both begin is the same. The bound is computed from the multipliers of the linear
program (see `milp.relaxation_bound`), so it holds whatever the solver's tolerances.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from .evaluate import peak_and_time, serving
from .milp import Limits, Model, Outcome, Result, Term, relaxation_bound, solve
from .problem import Chain, Problem
from .smallest import least_bytes

UNITS = 1000.0  # the budget in the unit of the memory rows


@dataclass(frozen=True, slots=True)
class Bound:
    """No plan that fits is faster than `time_ms`; infinite if none fits."""

    time_ms: float
    method: str  # "keep-all", "infeasible", "trivial", or what gave the bound, such as "lp, 32 groups"


def lower_bound_ms(
    problem: Problem,
    budget_bytes: int,
    chain: Chain | None = None,
    groups: int = 32,
    time_limit_s: float = 12.0,
    integer: bool = False,
) -> Bound:  # fmt: skip
    """A proven lower bound, in milliseconds, on the time of every plan whose peak is at most `budget_bytes`.

    Groups begin where blocks of `chain` do, if it is given. `integer` spends what is left of the time limit on the
    integer program, which is tighter. Raises `ValueError` if `chain` is not one of the problem or `groups` is below 1.
    """
    if groups < 1:
        raise ValueError(f"groups is {groups}; it must be at least 1")
    if chain is not None:
        chain.check(problem)
    if peak_and_time(problem, problem.no_recompute)[0] <= budget_bytes:
        return Bound(problem.keep_all_time_ms, "keep-all")
    best = Bound(problem.keep_all_time_ms, "trivial")
    if budget_bytes < least_bytes(problem) or not problem.backward:
        return Bound(math.inf, "infeasible")
    deadline = time.monotonic() + time_limit_s
    most = min(groups, len(problem.backward))
    for finest in (max(1, most // 4), most):
        start = time.monotonic()
        levels = [group_starts(problem, chain, count) for count in level_sizes(finest)]
        relaxation = Relaxation(problem, budget_bytes, levels)
        relaxation.build()
        result = relaxation_bound(relaxation.model, deadline - time.monotonic())
        best = _better(problem, best, result, f"lp, {finest} groups")
        now = time.monotonic()
        if best.time_ms == math.inf or now + 4 * (now - start) >= deadline:
            break
    if integer and best.time_ms < math.inf and time.monotonic() < deadline:
        relaxation.model.integer = relaxation.integer
        result = solve(relaxation.model, "scipy", Limits(deadline - time.monotonic()))
        best = _better(problem, best, result, f"mip, {finest} groups")
    return best


def level_sizes(finest: int) -> list[int]:
    """Numbers of groups of the levels, the finest last: each a quarter of the next, and one group of all."""
    sizes = {1, finest}
    while finest > 1:
        finest //= 4
        sizes.add(max(1, finest))
    return sorted(sizes)


def _better(problem: Problem, best: Bound, result: Result, method: str) -> Bound:
    if result.outcome is Outcome.INFEASIBLE:
        return Bound(math.inf, "infeasible")
    unit_ms = problem.keep_all_time_ms / UNITS or 1.0
    # The margin is for the rounding of sums and, of the integer program, for the back end's tolerance.
    time_ms = problem.keep_all_time_ms + result.bound * unit_ms * (1 - (1e-5 if method.startswith("mip") else 1e-9))
    return Bound(time_ms, method) if time_ms > best.time_ms else best


def group_starts(problem: Problem, chain: Chain | None, groups: int) -> list[int]:
    """First backward operation of each group; the longest group is cut until there are enough.

    The length of a group is the bytes that its operations need; with a chain, cuts between blocks come first.
    """
    count = len(problem.backward)
    weight = [1e-9] * count
    size = [item.size_bytes for item in problem.data]
    total = sum(sum(size[item] for item in op.needs) for op in problem.backward) or 1
    for stage, op in enumerate(problem.backward):
        weight[stage] = 0.5 * sum(size[item] for item in op.needs) / total + 0.5 / count
    natural: set[int] = set()
    if chain is not None:
        homes = chain.backward_block
        natural |= {stage for stage in range(1, count) if homes[stage] != homes[stage - 1]}
    chosen = {0}
    for cuts in (natural, set(range(count))):
        while len(chosen) < min(groups, len(chosen | cuts)):
            chosen.add(_middle_cut(weight, sorted(chosen), cuts - chosen))
    return sorted(chosen)


def _middle_cut(weight: list[float], starts: list[int], cuts: set[int]) -> int:
    """The cut in the middle of the heaviest group that has one."""
    best = (-math.inf, -math.inf, 0)
    for first, stop in zip(starts, [*starts[1:], len(weight)], strict=True):
        whole, left = sum(weight[first:stop]), 0.0
        for stage in range(first, stop):
            if stage in cuts:
                best = max(best, (whole, -abs(whole / 2 - left), stage))
            left += weight[stage]
    return best[2]


@dataclass(slots=True)
class Level:
    """One grouping of the backward operations, with its variables."""

    starts: list[int]  # first backward operation of each group
    stages: list[range]  # backward operations of each group
    needs: list[list[frozenset[int]]]  # per group and operation of it
    recomputed: list[dict[int, int]]  # per group: variable by forward operation
    kept: list[dict[int, int]] = field(default_factory=list)  # per group: variable by data, alive throughout it

    def end(self, group: int) -> int:
        """The backward operation after a group."""
        return self.stages[group].stop


@dataclass(slots=True)
class Relaxation:
    """The program of the module's docstring, under construction. Data are those not held."""

    problem: Problem
    budget_bytes: int
    levels: list[list[int]]  # first backward operation of each group; the next level has all of them and more
    model: Model = field(default_factory=Model)
    integer: list[bool] = field(default_factory=list)
    alive: dict[int, dict[int, int]] = field(default_factory=dict)  # per start of a group: variable by data
    resident: dict[int, dict[int, int]] = field(default_factory=dict)  # per start: replay state, here or later

    def size(self, item: int) -> float:
        """Bytes of a data in the unit of the rows."""
        return self.problem.data[item].size_bytes * UNITS / max(1, self.budget_bytes)

    def room(self, used_bytes: int, *, forward: int = -1) -> float:
        """What the budget leaves beside `used_bytes`, the base and the held data, in the unit of the rows."""
        problem = self.problem
        held = [i for i in problem.held if forward < 0 or problem.data[i].producer <= forward]
        used_bytes += problem.base_bytes + sum(problem.data[item].size_bytes for item in held)
        return (self.budget_bytes - used_bytes) * UNITS / max(1, self.budget_bytes)

    def build(self) -> None:
        """All variables and rows."""
        levels = [self._level(starts) for starts in self.levels]
        finest = levels[-1]
        self._add_finest_variables(finest)
        for level in levels:
            level.kept = [{item: self.variable() for item in self.alive.get(level.end(g), {})} for g in range_of(level)]
            if level is not finest:
                self._link(level, finest)
            for group in range_of(level):
                self._add_availability(level, group)
                self._add_group_memory(level, group)
        self._add_replay(finest)
        self._add_forward_memory()

    def variable(self, upper: float = 1.0, *, integer: bool = False) -> int:
        """A new variable; `integer` counts in the integer program only."""
        self.integer.append(integer)
        return self.model.add_variable(upper=upper)

    def _level(self, starts: list[int]) -> Level:
        problem = self.problem
        free = {index for index, op in enumerate(problem.forward) if op.recomputable}
        ends = [*starts[1:], len(problem.backward)]
        stages = [range(first, stop) for first, stop in zip(starts, ends, strict=True)]
        relevant = [sorted(set().union(*(serving(problem, free, stage) for stage in group))) for group in stages]
        return Level(
            starts,
            stages,
            [[frozenset(problem.backward[stage].needs) - problem.held for stage in group] for group in stages],
            [{index: self.variable(integer=True) for index in indices} for indices in relevant],
        )

    def _add_finest_variables(self, finest: Level) -> None:
        """The cost, and what is alive and resident at the beginning of each group."""
        problem = self.problem
        unit_ms = problem.keep_all_time_ms / UNITS or 1.0
        wanted: set[int] = set()  # data that a group or a later one may use
        stateful: set[int] = set()
        for group in reversed(range_of(finest)):
            wanted = wanted.union(*finest.needs[group])
            for index, variable in finest.recomputed[group].items():
                op = problem.forward[index]
                self.model.cost[variable] = op.time_ms / unit_ms
                wanted.update(set(op.inputs) - problem.held)
                if op.replay_bytes:
                    stateful.add(index)
            start = finest.starts[group]
            self.alive[start] = {item: self.variable(integer=True) for item in sorted(wanted)}
            self.resident[start] = {index: self.variable() for index in sorted(stateful)}

    def _link(self, level: Level, finest: Level) -> None:
        """What is recomputed in a coarse group is so in one of the finest groups within it."""
        inside: list[tuple[int, dict[int, int]]] = list(zip(finest.starts, finest.recomputed, strict=True))
        for stages, recomputed in zip(level.stages, level.recomputed, strict=True):
            parts = [part for start, part in inside if start in stages]
            for index, variable in recomputed.items():
                row = [(part[index], -1.0) for part in parts if index in part]
                self.model.add_row([(variable, 1.0), *row], upper=0.0)

    def _sources(self, level: Level, group: int, item: int) -> list[Term]:
        """Where a data used in a group may come from, as terms of a row `... <= 0`."""
        alive = self.alive[level.starts[group]]
        terms = [(alive[item], -1.0)] if item in alive else []
        producer = self.problem.data[item].producer
        if producer in level.recomputed[group]:
            terms.append((level.recomputed[group][producer], -1.0))
        return terms

    def _add_availability(self, level: Level, group: int) -> None:
        """What is used in a group, or alive at its end, is alive at its beginning or recomputed in it."""
        model, problem, recomputed = self.model, self.problem, level.recomputed[group]
        for item in sorted(frozenset().union(*level.needs[group])):
            model.add_row(self._sources(level, group, item), upper=-1.0)
        for index, variable in recomputed.items():
            for item in problem.forward[index].inputs:
                if item not in problem.held:
                    model.add_row([(variable, 1.0), *self._sources(level, group, item)], upper=0.0)
        for item, variable in self.alive.get(level.end(group), {}).items():
            model.add_row([(variable, 1.0), *self._sources(level, group, item)], upper=0.0)
            row = [(variable, 1.0), (level.kept[group][item], -1.0)]
            producer = problem.data[item].producer
            if producer in recomputed:
                row.append((recomputed[producer], -1.0))
            model.add_row(row, upper=0.0)

    def _add_replay(self, finest: Level) -> None:
        """A state is resident before a group if its operation is recomputed in it or later."""
        for group, start in enumerate(finest.starts):
            later = self.resident.get(finest.end(group), {})
            for index, variable in self.resident[start].items():
                for other in (finest.recomputed[group].get(index), later.get(index)):
                    if other is not None:
                        self.model.add_row([(other, 1.0), (variable, -1.0)], upper=0.0)

    def _replay(self, start: int) -> list[Term]:
        """Terms of the states that are resident just before a backward operation, a group's first."""
        unit = UNITS / max(1, self.budget_bytes)
        forward = self.problem.forward
        return [(variable, forward[k].replay_bytes * unit) for k, variable in self.resident.get(start, {}).items()]

    def _total(self, terms: list[Term]) -> int:
        """A variable that is at least the sum of the terms, to keep the rows that use it short."""
        total = self.variable(upper=sum(size * self.model.upper[variable] for variable, size in terms))
        self.model.add_row([*terms, (total, -1.0)], upper=0.0)
        return total

    def _add_group_memory(self, level: Level, group: int) -> None:
        """The budget at the beginning, at each backward operation and at each recomputation of a group."""
        problem, model, stages = self.problem, self.model, level.stages[group]
        first = problem.backward[stages[0]]
        start = [(variable, self.size(item)) for item, variable in self.alive[stages.start].items()]
        model.add_row([*start, *self._replay(stages.start)], upper=self.room(first.resident_bytes))
        kept = level.kept[group]
        states = self._replay(stages.stop)
        total = self._total([*((variable, self.size(item)) for item, variable in kept.items()), *states])
        ending = self.alive.get(stages.stop, {})
        for position, stage in enumerate(stages):
            op, own = problem.backward[stage], level.needs[group][position]
            room = self.room(op.peak_bytes) - sum(self.size(item) for item in own)
            if position + 1 == len(stages):  # recomputations come before: what the next group finds is alive
                row = [*((v, self.size(item)) for item, v in ending.items() if item not in own), *states]
                model.add_row(row, upper=room)
                continue
            later = frozenset().union(*level.needs[group][position + 1 :]) - own
            row = [(total, 1.0), *((kept[item], -self.size(item)) for item in own | later if item in kept)]
            for item in later:
                room -= self.size(item)
                producer = problem.data[item].producer
                if producer in level.recomputed[group]:
                    row.append((level.recomputed[group][producer], -self.size(item)))
            model.add_row(row, upper=room)
        self._add_recomputation_memory(level, group, total)

    def _add_recomputation_memory(self, level: Level, group: int, total: int) -> None:
        """An operation recomputed in a group: its inputs, outputs and workspace beside what is kept throughout."""
        problem, kept = self.problem, level.kept[group]
        room = self.room(min(problem.backward[stage].resident_bytes for stage in level.stages[group]))
        unit = UNITS / max(1, self.budget_bytes)
        for index, variable in level.recomputed[group].items():
            op = problem.forward[index]
            own = (set(op.inputs) | set(op.outputs)) - problem.held
            needed = sum(self.size(item) for item in own) + op.workspace_bytes * unit
            row = [(total, 1.0), (variable, needed), *((kept[item], -self.size(item)) for item in own if item in kept)]
            self.model.add_row(row, upper=room)

    def _add_forward_memory(self) -> None:
        """The budget at the forward operations: what they use, what later ones read, what the backward finds."""
        problem = self.problem
        last = [item.producer for item in problem.data]
        for index, op in enumerate(problem.forward):
            for item in op.inputs:
                last[item] = index
        unit = UNITS / max(1, self.budget_bytes)
        passed: list[list[int]] = [[] for _ in problem.forward]
        for item, index in enumerate(last):
            if item not in problem.held:
                passed[index].append(item)
        total, used = -1, 0
        for index, op in enumerate(problem.forward):
            used += sum(problem.data[item].size_bytes for item in op.outputs if item not in problem.held)
            row: list[Term] = [] if total < 0 else [(total, 1.0)]
            self.model.add_row(row, upper=self.room(used + op.workspace_bytes, forward=index))
            used -= sum(problem.data[item].size_bytes for item in passed[index])
            start = self.alive[0]
            row += [(start[item], self.size(item)) for item in passed[index] if item in start]
            if index in self.resident[0]:
                row.append((self.resident[0][index], problem.forward[index].replay_bytes * unit))
            if row:
                total = self._total(row)


def range_of(level: Level) -> range:
    """The groups of a level."""
    return range(len(level.starts))
