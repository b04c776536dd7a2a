"""Memory and time of a recomputation plan, and its normal form.

Liveness: each computation of an operation makes a new instance of all its outputs (except held ones, which
keep their first); each use is served by the latest instance; an instance is alive from its computation to its
last use before the next instance, or during its computation only if nothing uses it. Every plan is thus
computable; plans differ in memory and in time only.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rk_solvers.problem import Problem, Recompute, check_recompute

Bytes = NDArray[np.int64]


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


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a plan costs."""

    peak_bytes: int
    time_ms: float
    peak_at: str  # operation of the (first) peak, such as "compute linear_3"; "" for an empty problem


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


def memory_curve(problem: Problem, recompute: Recompute) -> Bytes:
    """Highest bytes during each step of `steps_of(problem, recompute)`.

    Raises `ValueError` if `recompute` is not a plan for `problem`.
    """
    check_recompute(problem, recompute)
    steps = steps_of(problem, recompute)
    change = np.zeros(len(steps) + 1, np.int64)
    instances = instances_of(problem, recompute)
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


def evaluate(problem: Problem, recompute: Recompute) -> Evaluation:
    """Peak in bytes, time in milliseconds and place of the peak of a plan; raises as `memory_curve`."""
    curve = memory_curve(problem, recompute)
    time_ms = problem.keep_all_time_ms + recompute_time_ms(problem, recompute)
    if len(curve) == 0:
        return Evaluation(problem.base_bytes, time_ms, "")
    position = int(curve.argmax())
    step = steps_of(problem, recompute)[position]
    if step.forward < 0:
        place = f"backward {problem.backward[step.stage].name}"
    else:
        place = f"compute {problem.forward[step.forward].name}"
    return Evaluation(int(curve[position]), time_ms, place)


def peak_and_time(problem: Problem, recompute: Recompute) -> tuple[int, float]:
    """Peak in bytes and time in milliseconds of a plan; raises as `memory_curve`."""
    result = evaluate(problem, recompute)
    return result.peak_bytes, result.time_ms


def serving(problem: Problem, group: Set[int], stage: int) -> set[int]:
    """The operations of `group` that backward operation `stage` needs, directly or through others of it."""
    found: set[int] = set()
    wanted = set(problem.backward[stage].needs)
    for index in sorted(group, reverse=True):
        if not wanted.isdisjoint(problem.renewed(index)):
            found.add(index)
            wanted.update(problem.forward[index].inputs)
    return found


def normalise(problem: Problem, recompute: Recompute) -> Recompute:
    """Move each recomputation to the first stage, from its own on, that it serves; drop it if there is none.

    A run computes a group because its backward operation misses a value, so it computes only what leads
    there.
    """
    waiting: set[int] = set()
    groups: list[tuple[int, ...]] = []
    for stage, group in enumerate(recompute):
        waiting.update(group)
        useful = serving(problem, waiting, stage) if waiting else set()
        waiting -= useful
        groups.append(tuple(sorted(useful)))
    return tuple(groups)
