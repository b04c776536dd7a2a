"""The memory of the model of retention intervals: ends of instances, replay bytes, one shared capacity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rk_solvers.intervals.model import Copy, Ends, IntervalModel, Literal, Stages, negation, stages_of
from rk_solvers.liveness import instances_of, steps_of


@dataclass(frozen=True, slots=True)
class Value:
    """Data of one producer with the same uses, as one."""

    item: int  # the first of them
    producer: int
    size: int  # of all of them, in units
    forward_users: tuple[int, ...]
    backward_users: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Use:
    """Something that keeps an instance alive up to `slot`, where all `conditions` hold."""

    slot: Any
    latest: int  # the last slot possible
    conditions: tuple[Literal, ...] = ()


def values_of(model: IntervalModel) -> list[Value]:
    """The data that are not held and take bytes, merged where their lifetimes are the same."""
    problem = model.problem
    forward, backward = problem.forward_users(), problem.backward_users()
    merged: dict[tuple[int, tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for item, data in enumerate(problem.data):
        if data.size_bytes and item not in problem.held:
            merged.setdefault((data.producer, tuple(forward[item]), tuple(backward[item])), []).append(item)
    return [
        Value(items[0], producer, sum(problem.data[item].size_bytes for item in items) // model.units.bytes, *users)
        for (producer, *users), items in merged.items()
    ]


def add_memory(model: IntervalModel, values: list[Value]) -> None:
    """Add what is alive when, and that it fits. To be called once."""
    for value in values:
        uses = uses_of(model, value)
        for copy in model.copies[value.producer]:
            _retain(model, value, copy, uses[copy.number])
    _add_replay(model)
    profile = np.cumsum(model.profile)[:-1]
    changes = np.flatnonzero(np.diff(profile)) + 1
    for first, stop in zip([0, *changes.tolist()], [*changes.tolist(), len(profile)], strict=True):
        if profile[first] > 0:
            task = model.cp.new_fixed_size_interval_var(first, stop - first, "")
            model.tasks.append((task, int(profile[first])))
    model.cp.add_cumulative([task for task, _ in model.tasks], [size for _, size in model.tasks], model.capacity)


def uses_of(model: IntervalModel, value: Value) -> list[list[Use]]:
    """For each copy of the producer, the uses that it may serve: a use is served by the latest copy."""
    copies = model.copies[value.producer]
    uses: list[list[Use]] = [[] for _ in copies]
    for stage in value.backward_users:
        slot = model.key(stage, model.count)
        _serve(uses, Use(slot, slot), [model.by(copy, stage) for copy in copies])
    for op in value.forward_users:
        for user in model.copies[op]:
            latest = model.key(user.high, op)
            always = () if not user.free else (model.present(user),)
            _serve(uses, Use(model.start(user), latest, always), [model.before(copy, user) for copy in copies])
    return uses


def _serve(uses: list[list[Use]], use: Use, earlier: list[Literal]) -> None:
    """Give `use` to the latest copy, under the condition that it is the latest; `earlier`: not after the use."""
    conditions = use.conditions
    for number in reversed(range(len(earlier))):
        literal = earlier[number]
        if literal is False:
            continue
        if literal is True:
            uses[number].append(Use(use.slot, use.latest, conditions))
            return
        uses[number].append(Use(use.slot, use.latest, (*conditions, literal)))
        conditions = (*conditions, negation(literal))


def _retain(model: IntervalModel, value: Value, copy: Copy, uses: list[Use]) -> None:
    start = model.start(copy)
    least = model.key(copy.low, copy.op)
    if not copy.free:
        least = max([least, *(use.latest for use in uses if not use.conditions and isinstance(use.slot, int))])
        uses = [use for use in uses if use.latest > least]
        if not uses:
            model.constant(start, least, value.size)
            return
    most = max([model.key(copy.high, copy.op), *(use.latest for use in uses)])
    end = model.ends[value.item, copy.number] = model.cp.new_int_var(least + 1, most + 1, "")
    for use in uses:
        model.cp.add(end >= use.slot + 1).only_enforce_if(use.conditions)
    if copy.free:
        size = model.cp.new_int_var(1, most + 1 - least, "")
        task = model.cp.new_optional_interval_var(start, size, end, model.present(copy), "")
        model.others.append((size, lambda ends, stages: _length(model, copy, value.item, ends, stages)))
    else:
        task = model.cp.new_interval_var(start, end - start, end, "")
    model.tasks.append((task, value.size))


def _length(model: IntervalModel, copy: Copy, item: int, ends: Ends, stages: Stages) -> int:
    if (item, copy.number) not in ends:
        return 1
    return ends[item, copy.number] - model.key(stages[copy.op][copy.number], copy.op)


def _add_replay(model: IntervalModel) -> None:
    for op, kept_bytes in enumerate(model.live.replay):
        size, copies = kept_bytes // model.units.bytes, model.copies[op]
        if not size or len(copies) == 1:
            continue
        free = [copy for copy in copies if copy.free]
        fixed = [copy.stage for copy in copies[1:] if not copy.free]
        least = model.key(max(fixed), op) + 1 if fixed else op + 1
        if not free or (fixed and free[-1].high < max(fixed)):
            model.constant(op, least - 1, size)
            continue
        end = model.cp.new_int_var(least, model.key(free[-1].high, op) + 1, "")
        for copy in free:
            model.cp.add(end >= model.start(copy) + 1).only_enforce_if(model.present(copy))
        if fixed:
            task = model.cp.new_interval_var(op, end - op, end, "")
        else:
            task = model.cp.new_optional_interval_var(op, end - op, end, model.present(free[0]), "")
        model.tasks.append((task, size))
        model.others.append((end, _last_slot(model, op)))


def _last_slot(model: IntervalModel, op: int) -> Callable[[Ends, Stages], int]:
    """The slot after the last computation of `op`."""
    return lambda _, stages: model.key(max(stage for stage in stages[op] if stage < model.stages), op) + 1


def add_hints(model: IntervalModel) -> None:
    """Hint every variable with what it is in the plan of the model, which must be in normal form."""
    planned = stages_of(model.problem, model.plan)
    stages: Stages = []
    for op, copies in enumerate(model.copies):
        fixed = [copy.stage for copy in copies if not copy.free]
        waiting = [stage for stage in planned[op] if stage not in fixed]
        waiting += [model.stages] * len(copies)
        stages.append([waiting.pop(0) if copy.free else copy.stage for copy in copies])
    ends = _ends(model, stages)
    for copies in model.copies:
        for copy in copies:
            if copy.free:
                model.cp.add_hint(copy.stage, stages[copy.op][copy.number])
    for (op, number, stage), literal in model.order.items():
        model.cp.add_hint(literal, stages[op][number] <= stage)
    for (op, number, other, count), literal in model.pairs.items():
        model.cp.add_hint(literal, stages[op][number] <= stages[other][count])
    for name, end in model.ends.items():
        if name in ends:
            model.cp.add_hint(end, ends[name])
    for variable, says in model.others:
        model.cp.add_hint(variable, says(ends, stages))


def _ends(model: IntervalModel, stages: Stages) -> Ends:
    """The slot after the last use of each instance that the plan makes."""
    slots = [
        model.key(step.stage, step.forward if step.forward >= 0 else model.count)
        for step in steps_of(model.problem, model.plan)
    ]
    ends: Ends = {}
    numbers: dict[int, list[int]] = {}
    for instance in instances_of(model.problem, model.plan):
        op = model.problem.data[instance.data].producer
        if instance.data not in numbers:
            numbers[instance.data] = [number for number, stage in enumerate(stages[op]) if stage < model.stages]
        ends[instance.data, numbers[instance.data].pop(0)] = slots[instance.last] + 1
    return ends
