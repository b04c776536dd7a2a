"""Knapsack: which data to keep between forward and backward, all others being computed again.

The classical choice on two levels. First, which of the data that the backward needs are kept: a 0/1 knapsack
of so many bytes, where the value of a data is the time to compute it from others that the backward needs. It is
filled by value per byte (G. B. Dantzig, "Discrete-variable extremum problems", Operations Research, 1957), and
exactly by the dynamic program over slots of memory (R. Bellman, "Some applications of the theory of dynamic
programming", 1954). Second, what is not kept is computed again just before the first backward operation that
needs it, and stays for the others of a window: the whole backward, or a part of it where that takes too much.

Complexity: O(data x slots) for one table, which serves every capacity; then one evaluation per capacity tried.
Known gaps: values are added as if data were recomputed independently; windows are of equal length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rk_solvers.groups import leading_to, normalise
from rk_solvers.liveness import peak_and_time
from rk_solvers.problem import Problem, Recompute
from rk_solvers.solver import Solution, Solver, best_solution


@dataclass(frozen=True, slots=True)
class Item:
    """Something to keep or not."""

    data: int
    size_bytes: int
    value_ms: float  # time to compute it again


Choice = Callable[[int], set[int]]
"""The data to keep within a capacity in bytes."""


@dataclass(frozen=True, slots=True)
class Knapsack(Solver):
    """What to keep by value per byte and by the exact knapsack; the better of both, over several capacities."""

    slots: int = 1000  # of the exact knapsack
    tries: int = 12  # capacities tried by each, before the last ones that fit are refined
    windows: tuple[int, ...] = (1, 2, 4, 8, 16)  # numbers of windows that the backward is divided into

    @property
    def name(self) -> str:
        """Short name shown in solutions."""
        return "knapsack"

    def solve(self, problem: Problem, budget_bytes: int) -> Solution:
        """The fastest plan that fits `budget_bytes`, else the one of lowest peak."""
        items = items_of(problem)
        total = sum(item.size_bytes for item in items)
        plans: dict[Recompute, int] = {}  # with their peaks

        def fits(capacity: int, choice: Choice, length: int) -> bool:
            plan = keeping_plan(problem, choice(capacity), length)
            if plan not in plans:
                plans[plan] = peak_and_time(problem, plan)[0]
            return plans[plan] <= budget_bytes

        lengths = {-(-max(1, len(problem.backward)) // windows) for windows in self.windows}
        for choice in (by_density(items), by_table(items, self.slots)):
            for length in sorted(lengths, reverse=True):
                self._search(total, functools.partial(fits, choice=choice, length=length))
        chosen = [plan for plan, peak in plans.items() if peak <= budget_bytes] or [min(plans, key=plans.__getitem__)]
        return best_solution(problem, budget_bytes, [(self.name, plan) for plan in chosen])

    def _search(self, total: int, fits: Callable[[int], bool]) -> None:
        """Try capacities from `total` bytes down to one that fits, then greater ones that may fit as well."""
        capacities = [total * step // self.tries for step in range(self.tries, -1, -1)]
        high = total
        for low in capacities:
            if fits(low):
                for _ in range(8):
                    middle = (low + high) // 2
                    low, high = (middle, high) if fits(middle) else (low, middle)
                break
            high = low


def items_of(problem: Problem) -> list[Item]:
    """The data that the backward needs and that can be computed again, with the time that this takes."""
    needed = {item for op in problem.backward for item in op.needs}
    items: list[Item] = []
    for item in sorted(needed - problem.held):
        if problem.forward[problem.data[item].producer].recomputable:
            group = leading_to(problem, [item], needed - {item})
            time_ms = sum(problem.forward[index].recompute_ms for index in group)
            items.append(Item(item, problem.data[item].size_bytes, time_ms))
    return items


def keeping_plan(problem: Problem, kept: set[int], length: int | None = None) -> Recompute:
    """The plan that keeps `kept` and computes all else that the backward needs when it first needs it.

    What is computed again stays for a window of `length` backward operations, or to the end.
    """
    available = set(kept)
    groups: list[tuple[int, ...]] = []
    for stage, op in enumerate(problem.backward):
        if length is not None and stage % length == 0:
            available = set(kept)
        group = leading_to(problem, list(op.needs), available)
        available.update(item for index in group for item in problem.forward[index].outputs)
        groups.append(tuple(sorted(group)))
    return normalise(problem, tuple(groups))


def by_density(items: list[Item]) -> Choice:
    """Those of most time per byte, as long as they fit."""
    ranked = sorted(items, key=lambda item: (-item.value_ms / max(item.size_bytes, 1e-9), item.data))

    def choose(capacity: int) -> set[int]:
        kept: set[int] = set()
        for item in ranked:
            if item.size_bytes <= capacity:
                capacity -= item.size_bytes
                kept.add(item.data)
        return kept

    return choose


def by_table(items: list[Item], slots: int) -> Choice:
    """Those of most time in sum; exact where sizes are whole slots, and never above the capacity."""
    slot_bytes = max(1, -(-sum(item.size_bytes for item in items) // slots))
    weights = [-(-item.size_bytes // slot_bytes) for item in items]
    width = sum(weights) + 1  # rounded up: the capacity where all fits may be above `slots`
    best = np.zeros(width)
    taken = np.zeros((len(items), width), bool)
    for row, (item, weight) in enumerate(zip(items, weights, strict=True)):
        with_it = best[: max(0, width - weight)] + item.value_ms
        taken[row, weight:] = with_it >= best[weight:]
        best[weight:] = np.maximum(best[weight:], with_it)

    def choose(capacity: int) -> set[int]:
        if capacity >= sum(item.size_bytes for item in items):
            return {item.data for item in items}
        left = min(capacity // slot_bytes, width - 1)
        kept: set[int] = set()
        for row in range(len(items) - 1, -1, -1):
            if taken[row, left]:
                kept.add(items[row].data)
                left -= weights[row]
        return kept

    return choose
