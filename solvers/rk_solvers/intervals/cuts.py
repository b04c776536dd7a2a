"""Redundant constraints for the model of retention intervals: what is alive at some backward operations, in bytes.

They follow from the others, but as linear inequalities over Boolean variables, of which the solver's linear
relaxation makes a bound; of the shared capacity alone it makes next to none. The inequalities are those of the
stage-wise formulation (P. Jain et al., "Checkmate", MLSys 2020) between chosen stages: a value that is alive at one of
them was alive at the one before, or is computed between.
"""

from __future__ import annotations

import itertools
from typing import Any

from rk_solvers.intervals.memory import Value
from rk_solvers.intervals.model import Copy, IntervalModel, Literal


def chosen_stages(model: IntervalModel, most: int) -> list[int]:
    """At most `most` stages, spread evenly over those of the window, the first one included."""
    stages = model.window.stages if model.window else range(model.stages)
    step = max(1, -(-len(stages) // max(1, most)))
    return list(stages[::step])


def add_cuts(model: IntervalModel, values: list[Value], most: int) -> None:
    """Add the constraints at no more than `most` stages; none of them removes a plan."""
    stages = chosen_stages(model, most)
    if not stages:
        return
    alive = [_alive(model, value, stages) for value in values]
    for place, stage in enumerate(stages):
        terms = [value.size * row[place] for value, row in zip(values, alive, strict=True)]
        model.cp.add(sum(terms) <= _room(model, stage))
    for value, row in zip(values, alive, strict=True):
        for place, (start, stop) in enumerate(itertools.pairwise([*stages, model.stages])):
            if isinstance(row[place], int) and row[place]:
                continue
            _link(model, value, row, place, range(start, stop))


def _room(model: IntervalModel, stage: int) -> int:
    """Capacity for what is not held during the backward of `stage`; replay bytes are left out."""
    return model.room[stage] - model.live.held_bytes // model.units.bytes


def _alive(model: IntervalModel, value: Value, stages: list[int]) -> list[Any]:
    """For each of `stages`, whether any instance of `value` is alive then: a constant or a Boolean variable."""
    row: list[Any] = []
    copies = model.copies[value.producer]
    for stage in stages:
        slot = model.key(stage, model.count)
        if stage in value.backward_users:
            row.append(1)
            continue
        literal = model.cp.new_bool_var("")
        row.append(literal)
        names = []
        for copy in copies:
            reached = model.by(copy, stage)
            end = model.ends.get((value.item, copy.number))
            if reached is False or end is None:
                continue
            names.append((copy, reached))
            conditions = [~literal] if reached is True else [~literal, reached]
            model.cp.add(end <= slot).only_enforce_if(conditions)
        model.others.append((literal, _alive_hint(model, value, copies, stage)))
    return row


def _alive_hint(model: IntervalModel, value: Value, copies: list[Copy], stage: int) -> Any:
    slot = model.key(stage, model.count)

    def says(ends: dict[tuple[int, int], int], stages: list[list[int]]) -> bool:
        return any(
            stages[copy.op][copy.number] <= stage and ends.get((value.item, copy.number), 0) > slot for copy in copies
        )

    return says


def _made(model: IntervalModel, op: int, after: int, until: int) -> list[Any]:
    """Terms whose sum is the number of recomputations of `op` after stage `after`, until stage `until`."""
    terms: list[Any] = []
    for copy in model.copies[op][1:]:
        terms += [_number(model.by(copy, until)), -_number(model.by(copy, after))]
    return terms


def _number(literal: Literal) -> Any:
    return int(literal) if isinstance(literal, bool) else literal


def _link(model: IntervalModel, value: Value, row: list[Any], place: int, stages: range) -> None:
    """What is used or alive after the stage `stages[0]` and before the next is alive there, or is computed between."""
    first, last = stages[0], stages[-1]
    op = value.producer
    if place + 1 < len(row):
        model.cp.add(row[place + 1] <= row[place] + sum(_made(model, op, first, stages.stop)))
    used = [stage for stage in value.backward_users if first < stage <= last]
    if used:
        model.cp.add(row[place] + sum(_made(model, op, first, used[0])) >= 1)
    for user in value.forward_users:
        for copy in model.copies[user][1:]:
            until = model.by(copy, stages.stop if place + 1 < len(row) else last)
            after = model.by(copy, first)
            if until is after or until is False:
                continue
            made = sum(_made(model, op, first, stages.stop if place + 1 < len(row) else last))
            model.cp.add(row[place] + made >= _number(until) - _number(after))
