"""What solvers decide, as plain tuples: which forward operations are computed again before each backward operation.

The form in which they compare, edit and hash plans, and theirs alone: to everybody else a plan is a `Schedule`, made of
it and read back in `liveness`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Set

from rk_solvers.problem import Problem, Recompute


def check_recompute(problem: Problem, recompute: Recompute) -> None:
    """Raise `ValueError` unless `recompute` is a plan for `problem` (sizes, order, recomputable)."""
    if len(recompute) != len(problem.backward):
        raise ValueError(f"plan has {len(recompute)} stages for {len(problem.backward)} backward operations")
    for stage, group in enumerate(recompute):
        if any(first >= second for first, second in itertools.pairwise(group)):
            raise ValueError(f"plan stage {stage} is {group}; indices must strictly increase")
        for index in group:
            if not 0 <= index < len(problem.forward):
                raise ValueError(f"plan stage {stage}: there is no forward operation {index}")
            if not problem.forward[index].recomputable:
                raise ValueError(f"plan stage {stage}: {problem.forward[index].name} is not recomputable")


def serving(problem: Problem, group: Set[int], stage: int) -> set[int]:
    """The operations of `group` that backward operation `stage` needs, directly or through others of it."""
    found: set[int] = set()
    wanted = set(problem.backward[stage].needs)
    for index in sorted(group, reverse=True):
        if not wanted.isdisjoint(problem.renewed(index)):
            found.add(index)
            wanted.update(problem.forward[index].inputs)
    return found


def leading_to(problem: Problem, wanted: Iterable[int], available: Set[int] = frozenset()) -> set[int]:
    """The forward operations to compute again for the data `wanted`, where those `available` are there.

    Held data are there, and so is what may not be recomputed.
    """
    found: set[int] = set()
    waiting = [item for item in wanted if item not in available]
    while waiting:
        item = waiting.pop()
        index = problem.data[item].producer
        if index in found or item in problem.held or not problem.forward[index].recomputable:
            continue
        found.add(index)
        waiting.extend(item for item in problem.forward[index].inputs if item not in available)
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
