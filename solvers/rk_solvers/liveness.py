"""What is alive when: under a plan, under a schedule, under a plan that is being edited, and whatever the plan.

Each computation of an operation makes a new instance of all its outputs (except held ones, which keep their first);
each use is served by the latest instance; an instance is alive from its computation to its last use before the next
instance, or during its computation only if nothing uses it. Every plan is thus computable; plans differ in memory and
in time only. What an operation needs beside data to be computed again is resident from its first computation to its
last (see `Problem.options`).

Everything that asks what is alive asks here: evaluation, local search, the builders of programs, bounds, and the
reports on a step. Two readings of the rules are independent of this one, and check it: `checker` and `exact.oracle`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rk_solvers import groups
from rk_solvers.problem import Problem, Recompute
from rk_solvers.schedule import Backward, Compute, Forget, Leave, Op, Recall, Schedule, ScheduleError

Bytes = NDArray[np.int64]
Recomputed = Mapping[str, Iterable[str]]
"""By the name of a backward operation, the names of the forward operations that are computed again just before it."""
Plan = Schedule | Recomputed | Recompute
"""A schedule, or what one is made of: names, or the tuples of indices that solvers have."""


@dataclass(frozen=True, slots=True)
class Step:
    """One computation: forward operation `forward` (first time in stage -1), or the backward of its stage."""

    stage: int  # -1 in the forward phase, then index of the backward operation it belongs to
    forward: int  # index of the forward operation, or -1 for the backward operation itself


@dataclass(frozen=True, slots=True)
class Instance:
    """One instance of a data, alive from step `first` to step `last`, both included."""

    data: int
    first: int
    last: int
    is_back: bool = False  # from a second memory: nothing computes it


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a plan costs."""

    peak_bytes: int
    time_ms: float
    peak_at: str  # operation of the (first) peak, such as "compute linear_3"; "" for an empty problem


# ---- whatever the plan --------------------------------------------------------------------------------


class Tables:
    """What each computation asks for, as plain lists drawn once from a problem, for speed in inner loops.

    Held data are left out: they are alive from their computation on, whatever the plan. Each computation has an integer
    key that orders the whole step: forward operation `k` has key `k`; in stage `b` (what runs just before and with
    backward operation `b`) the recomputation of `k` has key `F + b (F + 1) + k` and the backward operation itself
    `F + b (F + 1) + F`, where `F` is the number of forward operations.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.count = len(problem.forward)
        self.stride = self.count + 1
        self.stages = len(problem.backward)
        self.size = [item.size_bytes for item in problem.data]
        self.producer = [item.producer for item in problem.data]
        again = [problem.recomputed(index) for index in range(self.count)]
        self.time = [option.costs["compute"] for option in again]
        self.replay = [option.kept_bytes for option in again]
        self.recomputable = [op.recomputable for op in problem.forward]
        self.renewed = [problem.renewed(index) for index in range(self.count)]
        self.inputs = [tuple(item for item in op.inputs if item not in problem.held) for op in problem.forward]
        self.needs = [tuple(item for item in op.needs if item not in problem.held) for op in problem.backward]
        self.workspace = [problem.base_bytes + op.workspace_bytes for op in problem.forward]
        self.resident = [op.resident_bytes for op in problem.backward]
        self.peak = [problem.base_bytes + op.peak_bytes for op in problem.backward]
        self.renewed_bytes = [sum(self.size[item] for item in items) for items in self.renewed]
        self.held_bytes = sum(self.size[item] for item in problem.held)
        self.uses: list[list[int]] = [[] for _ in problem.data]  # keys of the uses, without recomputation
        for index, items in enumerate(self.inputs):
            for item in items:
                self.uses[item].append(index)
        for stage, items in enumerate(self.needs):
            for item in items:
                self.uses[item].append(self.key(stage, self.count))

    def key(self, stage: int, index: int) -> int:
        """Key of the recomputation of `index` in `stage`; of its backward operation if `index` is `count`."""
        return self.count + stage * self.stride + index

    def split(self, key: int) -> tuple[int, int]:
        """Stage and forward index of a key of the backward phase."""
        return divmod(key - self.count, self.stride)

    def held_until(self, index: int) -> int:
        """Bytes of held data from the first computation of forward operation `index` on, those that it makes among
        them."""
        return sum(self.size[item] for item in self.problem.held if self.producer[item] <= index)

    def least_forward(self) -> list[int]:
        """For each forward operation, the bytes that there are at least when it is computed first."""
        held = 0
        found: list[int] = []
        for index, op in enumerate(self.problem.forward):
            held += sum(self.size[item] for item in op.outputs if item in self.problem.held)
            used = {*self.inputs[index], *self.renewed[index]}
            found.append(held + self.workspace[index] + sum(self.size[item] for item in used))
        return found

    def least_backward(self) -> list[int]:
        """The same for each backward operation."""
        return [
            self.held_bytes + peak + sum(self.size[item] for item in needs)
            for needs, peak in zip(self.needs, self.peak, strict=True)
        ]


def binding(problem: Problem) -> tuple[Op | None, int]:
    """The first computation that holds most at once whatever the plan, and its bytes; None where nothing is held."""
    tables = Tables(problem)
    best: tuple[Op | None, int] = None, problem.base_bytes
    for ops, least in ((problem.forward, tables.least_forward()), (problem.backward, tables.least_backward())):
        for index, size_bytes in enumerate(least):
            if size_bytes > best[1]:
                best = (Compute if ops is problem.forward else Backward)(ops[index].name), size_bytes
    return best


def least_bytes(problem: Problem) -> int:
    """A bound that no schedule can be below: what one operation holds at once."""
    return binding(problem)[1]


def last_forward_uses(problem: Problem) -> list[int]:
    """For each data, the last operation of the forward phase that reads it; its producer where none does."""
    last = [item.producer for item in problem.data]
    for index, op in enumerate(problem.forward):
        for item in op.inputs:
            last[item] = index
    return last


# ---- under a plan -------------------------------------------------------------------------------------


def steps_of(problem: Problem, recompute: Recompute) -> list[Step]:
    """All computations of the plan in execution order."""
    steps = [Step(-1, index) for index in range(len(problem.forward))]
    for stage, group in enumerate(recompute):
        steps += [Step(stage, index) for index in group]
        steps.append(Step(stage, -1))
    return steps


def instances_of(problem: Problem, recompute: Recompute) -> list[Instance]:
    """All instances of data that the plan makes, with the steps between which they are alive."""
    renewed = [problem.renewed(index) for index in range(len(problem.forward))]
    steps = steps_of(problem, recompute)
    first = [-1] * len(problem.data)
    last = [-1] * len(problem.data)
    instances: list[Instance] = []
    for position, step in enumerate(steps):
        if step.forward < 0:
            for item in problem.backward[step.stage].needs:
                last[item] = position
            continue
        for item in problem.forward[step.forward].inputs:
            last[item] = position
        for item in problem.forward[step.forward].outputs if step.stage < 0 else renewed[step.forward]:
            if first[item] >= 0:
                instances.append(Instance(item, first[item], last[item]))
            first[item] = last[item] = position
    for item, start in enumerate(first):
        end = len(steps) - 1 if item in problem.held else last[item]
        instances.append(Instance(item, start, end))
    return instances


def memory_curve(problem: Problem, plan: Plan) -> Bytes:
    """Highest bytes during each computation of a plan, in order, if everything is forgotten after its last use.

    Raises `ValueError` if it is no plan for `problem`.
    """
    recompute = recompute_of(problem, plan)
    return curve_of(problem, steps_of(problem, recompute), instances_of(problem, recompute))


def curve_of(problem: Problem, steps: list[Step], instances: list[Instance]) -> Bytes:
    """Highest bytes during each step, where these instances are alive."""
    change = np.zeros(len(steps) + 1, np.int64)
    if instances:
        size = np.array([problem.data[item.data].size_bytes for item in instances], np.int64)
        np.add.at(change, np.array([item.first for item in instances]), size)
        np.add.at(change, np.array([item.last for item in instances]) + 1, -size)
    last_replay: dict[int, int] = {}
    own = np.full(len(steps), problem.base_bytes, np.int64)
    for position, step in enumerate(steps):
        if step.forward < 0:
            own[position] += problem.backward[step.stage].peak_bytes
            continue
        own[position] += problem.forward[step.forward].workspace_bytes
        if step.stage >= 0:
            own[position] += problem.backward[step.stage].resident_bytes
            last_replay[step.forward] = position
    for index, position in last_replay.items():
        change[index] += problem.forward[index].replay_bytes
        change[position + 1] -= problem.forward[index].replay_bytes
    return np.asarray(own + np.cumsum(change)[:-1], np.int64)


def recompute_time_ms(problem: Problem, recompute: Recompute) -> float:
    """Time of the recomputations alone, in milliseconds."""
    return math.fsum(problem.forward[index].recompute_ms for group in recompute for index in group)


def stage_times_ms(problem: Problem, recompute: Recompute) -> list[float]:
    """By backward operation, the time of what is recomputed just before it, in milliseconds."""
    return [sum(problem.forward[index].recompute_ms for index in group) for group in recompute]


def evaluate(problem: Problem, plan: Plan) -> Evaluation:
    """Peak in bytes, time in milliseconds and place of the peak of a plan; raises as `memory_curve`."""
    recompute = recompute_of(problem, plan)
    steps = steps_of(problem, recompute)
    curve = curve_of(problem, steps, instances_of(problem, recompute))
    time_ms = problem.keep_all_time_ms + recompute_time_ms(problem, recompute)
    if len(curve) == 0:
        return Evaluation(problem.base_bytes, time_ms, "")
    position = int(curve.argmax())
    return Evaluation(int(curve[position]), time_ms, str(op_of(problem, steps[position])))


def peak_and_time(problem: Problem, plan: Plan) -> tuple[int, float]:
    """Peak in bytes and time in milliseconds of a plan; raises as `memory_curve`."""
    result = evaluate(problem, plan)
    return result.peak_bytes, result.time_ms


def kept_over_the_turn(problem: Problem, recompute: Recompute) -> list[int]:
    """The data alive between the last operation of the forward and what follows it, those held among them."""
    return _alive_before_step(problem, recompute, len(problem.forward))


def alive_before(problem: Problem, recompute: Recompute, stage: int) -> list[int]:
    """The data alive between the backward operation before this one and what follows it, those held among them."""
    steps = steps_of(problem, recompute)
    first = next(number for number, step in enumerate(steps) if step.stage >= stage)
    return _alive_before_step(problem, recompute, first)


def _alive_before_step(problem: Problem, recompute: Recompute, number: int) -> list[int]:
    return [item.data for item in instances_of(problem, recompute) if item.first < number <= item.last]


# ---- plans and schedules ------------------------------------------------------------------------------


def schedule_of(problem: Problem, plan: Plan) -> Schedule:
    """The schedule of a plan: each instance of data is forgotten right after its last use (held data never).

    Raises `ValueError` if it is no plan for `problem`.
    """
    recompute = recompute_of(problem, plan)
    steps = steps_of(problem, recompute)
    forgotten: list[list[int]] = [[] for _ in steps]
    for instance in instances_of(problem, recompute):
        if instance.data not in problem.held:
            forgotten[instance.last].append(instance.data)
    ops: list[Op] = []
    for step, items in zip(steps, forgotten, strict=True):
        ops.append(op_of(problem, step))
        ops += [Forget(problem.data[item].name) for item in sorted(items)]
    return Schedule(tuple(ops))


def recompute_of(problem: Problem, plan: Plan) -> Recompute:
    """What a plan recomputes, as solvers have it.

    Raises `ScheduleError` on an unknown name or on a recomputation after the last backward operation, and `ValueError`
    if it is no plan for `problem`; `check` verifies all other rules of a schedule.
    """
    if isinstance(plan, Schedule):
        recompute = _groups_in(problem, plan)
    else:
        recompute = _groups_by_name(problem, plan) if isinstance(plan, Mapping) else plan
    groups.check_recompute(problem, recompute)
    return recompute


def _groups_by_name(problem: Problem, recomputed: Recomputed) -> Recompute:
    index_of = {op.name: index for index, op in enumerate(problem.forward)}
    unknown = set(recomputed) - {op.name for op in problem.backward}
    if unknown:
        raise ValueError(f"the problem has no backward operation {min(unknown)}")
    found: list[tuple[int, ...]] = []
    for backward in problem.backward:
        names = set(recomputed.get(backward.name, ()))
        if names - index_of.keys():
            raise ValueError(f"the problem has no forward operation {min(names - index_of.keys())}")
        found.append(tuple(sorted(index_of[name] for name in names)))
    return tuple(found)


def _groups_in(problem: Problem, schedule: Schedule) -> Recompute:
    found: list[tuple[int, ...]] = []
    group: list[int] = []
    for step, *_ in steps_in(problem, schedule):
        if step.forward < 0:
            found.append(tuple(sorted(group)))
            group = []
        elif step.stage >= 0:
            group.append(step.forward)
    if group:
        name = problem.forward[group[0]].name
        raise ScheduleError(f"{name} is recomputed after the last backward operation")
    return tuple(found)


def steps_in(problem: Problem, schedule: Schedule) -> list[tuple[Step, list[str], list[str]]]:
    """The computations of a schedule, each with the data for which memory is taken right before it, as they come back,
    and those that it gives up after it, by name.
    """
    index_of = {op.name: index for index, op in enumerate(problem.forward)}
    names = {data.name for data in problem.data}
    found: list[tuple[Step, list[str], list[str]]] = []
    seen: set[int] = set()
    recalled: list[str] = []
    stage = 0
    for number, op in enumerate(schedule.ops, start=1):
        if isinstance(op, Compute):
            if op.name not in index_of:
                raise ScheduleError(f"line {number}: {op}: the problem has no such forward operation")
            index = index_of[op.name]
            found.append((Step(stage if index in seen else -1, index), recalled, []))
            seen.add(index)
            recalled = []
        elif isinstance(op, Backward):
            found.append((Step(stage, -1), recalled, []))
            stage += 1
            recalled = []
        elif op.name not in names:
            raise ScheduleError(f"line {number}: {op}: the problem has no such data")
        elif isinstance(op, Recall):
            recalled.append(op.name)
        elif isinstance(op, Forget | Leave) and found:
            found[-1][2].append(op.name)
    return found


def normalise(problem: Problem, plan: Plan) -> Schedule:
    """The schedule with each recomputation moved to the first backward operation, from its own on, that it serves.

    One that serves none is dropped. Raises as `recompute_of`.
    """
    return schedule_of(problem, groups.normalise(problem, recompute_of(problem, plan)))


def op_of(problem: Problem, step: Step) -> Op:
    """A computation by its name."""
    if step.forward < 0:
        return Backward(problem.backward[step.stage].name)
    return Compute(problem.forward[step.forward].name)


# ---- under a plan that is being edited ----------------------------------------------------------------


class Mark(NamedTuple):
    """What a plan that is being edited can come back to."""

    edits: int  # since the last commit
    memory: Bytes  # alive at each event
    time_ms: float  # of the recomputations


class PlanState:
    """A plan, its events in order, and the bytes alive at each, kept exact from edit to edit.

    Adding or removing one recomputation changes the lifetimes of a few instances only, so the curve changes on a few
    ranges: some tens of microseconds against milliseconds for a whole evaluation. Tests compare with `memory_curve`.
    """

    def __init__(self, tables: Tables, recompute: Recompute | None = None) -> None:
        self.tables = tables
        count = tables.count
        self.keys = list(range(count)) + [tables.key(stage, count) for stage in range(tables.stages)]
        curve = memory_curve(tables.problem, tables.problem.no_recompute)
        self._memory: Bytes = np.zeros(2 * len(curve) + 64, np.int64)
        self._memory[: len(curve)] = curve
        self.uses = [list(keys) for keys in tables.uses]
        self.computed = [[index] for index in range(count)]  # keys at which each operation is computed
        self.time_ms = 0.0  # of the recomputations
        self.log: list[int] = []  # keys added (key) and removed (-key - 1) since the last commit
        for stage, group in enumerate(recompute or ()):
            for index in group:
                self.add(tables.key(stage, index))
        self.log.clear()

    @property
    def memory(self) -> Bytes:
        """Bytes alive at each event of `keys`."""
        return self._memory[: len(self.keys)]

    @property
    def peak_bytes(self) -> int:
        """Highest bytes of the step."""
        return int(self.memory.max(initial=self.tables.problem.base_bytes))

    def excess(self, budget_bytes: int) -> int:
        """Bytes above the budget, summed over the events."""
        memory = self._memory[: len(self.keys)]
        return int(np.maximum(memory, budget_bytes).sum()) - budget_bytes * len(memory)

    def recompute(self) -> Recompute:
        """The plan as plain data."""
        groups: list[list[int]] = [[] for _ in range(self.tables.stages)]
        for key in self.keys[self.tables.count :]:
            stage, index = self.tables.split(key)
            if index < self.tables.count:
                groups[stage].append(index)
        return tuple(tuple(group) for group in groups)

    def recomputations(self) -> list[int]:
        """Keys of all recomputations, in order."""
        count, stride = self.tables.count, self.tables.stride
        return [key for key in self.keys[count:] if (key - count) % stride != count]

    def has(self, stage: int, index: int) -> bool:
        """Whether `index` is recomputed in `stage`."""
        computed = self.computed[index]
        key = self.tables.key(stage, index)
        position = bisect_left(computed, key)
        return position < len(computed) and computed[position] == key

    def mark(self) -> Mark:
        """What `undo` needs to come back to the plan as it is now."""
        return Mark(len(self.log), self.memory.copy(), self.time_ms)

    def undo(self, mark: Mark) -> None:
        """Take back every edit made since `mark`: its bytes are copied, as counting back takes as long as the edits."""
        tables = self.tables
        for entry in reversed(self.log[mark.edits :]):
            key = entry if entry >= 0 else -entry - 1
            index = tables.split(key)[1]
            for keys in (self.keys, self.computed[index], *(self.uses[item] for item in tables.inputs[index])):
                if entry >= 0:
                    del keys[bisect_left(keys, key)]
                else:
                    insort(keys, key)
        del self.log[mark.edits :]
        self._memory[: len(mark.memory)] = mark.memory
        self.time_ms = mark.time_ms

    def add(self, key: int) -> None:
        """Insert the recomputation `key`, which must not be in the plan."""
        tables, keys = self.tables, self.keys
        stage, index = tables.split(key)
        place = bisect_left(keys, key)
        length = len(keys)
        if length == len(self._memory):
            self._memory = np.concatenate([self._memory, np.zeros(length, np.int64)])
        memory = self._memory
        across = int(memory[place]) - self._own(keys[place])
        memory[place + 1 : length + 1] = memory[place:length]
        memory[place] = across + tables.workspace[index] + tables.resident[stage]
        keys.insert(place, key)
        computed = self.computed[index]
        before, after = self.neighbours(computed, key)
        for item in tables.renewed[index]:
            size = tables.size[item]
            if size:
                left, right = self.touches(item, key, before, after)
                if right >= 0:
                    memory[bisect_left(keys, left) + 1 : place] -= size
                else:
                    memory[place] += size
        insort(computed, key)
        for item in tables.inputs[index]:
            start, stop = self.neighbours(self.computed[tables.producer[item]], key)
            left, right = self.touches(item, key, start, stop)
            if right < 0:
                memory[bisect_left(keys, left) + 1 : place + 1] += tables.size[item]
            insort(self.uses[item], key)
        if tables.replay[index] and after < 0:
            first = bisect_left(keys, before) + (len(computed) > 2)
            memory[first : place + 1] += tables.replay[index]
        self.time_ms += tables.time[index]
        self.log.append(key)

    def remove(self, key: int) -> None:
        """Take the recomputation `key` out of the plan."""
        tables, keys, memory = self.tables, self.keys, self._memory
        _, index = tables.split(key)
        place = bisect_left(keys, key)
        computed = self.computed[index]
        before, after = self.neighbours(computed, key)
        if tables.replay[index] and after < 0:
            first = bisect_left(keys, before) + (len(computed) > 2)
            memory[first : place + 1] -= tables.replay[index]
        for item in tables.inputs[index]:
            uses = self.uses[item]
            del uses[bisect_left(uses, key)]
            start, stop = self.neighbours(self.computed[tables.producer[item]], key)
            left, right = self.touches(item, key, start, stop)
            if right < 0:
                memory[bisect_left(keys, left) + 1 : place + 1] -= tables.size[item]
        del computed[bisect_left(computed, key)]
        for item in tables.renewed[index]:
            size = tables.size[item]
            if size:
                left, right = self.touches(item, key, before, after)
                if right >= 0:
                    memory[bisect_left(keys, left) + 1 : place] += size
        memory[place : len(keys) - 1] = memory[place + 1 : len(keys)]
        del keys[place]
        self.time_ms -= tables.time[index]
        self.log.append(-key - 1)

    def around(self, item: int, key: int) -> tuple[int, int]:
        """Last touch before `key` of the latest instance of `item`, and its last use after it (or -1)."""
        start, stop = self.neighbours(self.computed[self.tables.producer[item]], key)
        return self.touches(item, key, start, stop)

    def extension(self, item: int, key: int) -> int:
        """Highest bytes of the step between the last touch of `item` before `key` and `key`."""
        first = bisect_left(self.keys, self.around(item, key)[0]) + 1
        place = bisect_left(self.keys, key)
        return int(self._memory[first:place].max(initial=0))

    def _own(self, key: int) -> int:
        """Bytes at an event of the backward phase that do not cross from the event before."""
        stage, index = self.tables.split(key)
        if index == self.tables.count:
            return self.tables.peak[stage]
        return self.tables.workspace[index] + self.tables.resident[stage] + self.tables.renewed_bytes[index]

    @staticmethod
    def neighbours(computed: list[int], key: int) -> tuple[int, int]:
        """The computations just before and just after `key` (-1: none)."""
        place = bisect_left(computed, key)
        before = computed[place - 1]
        if place < len(computed) and computed[place] == key:
            place += 1
        return before, computed[place] if place < len(computed) else -1

    def touches(self, item: int, key: int, start: int, stop: int) -> tuple[int, int]:
        """Last touch before `key` (at least `start`), and last use from `key` to `stop` (or -1)."""
        uses = self.uses[item]
        place = bisect_left(uses, key)
        left = uses[place - 1] if place and uses[place - 1] > start else start
        last = bisect_left(uses, stop, place) if stop >= 0 else len(uses)
        return left, uses[last - 1] if last > place else -1
