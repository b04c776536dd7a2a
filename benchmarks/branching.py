"""A branch and bound of our own over the relaxation in groups, told to begin with what is kept over the turn.

It bounds the time of every plan that recomputes, as the integer program of `rk_solvers.bounds.relaxation` does, and is
here to be compared with it: no back end can be told to decide first what stays alive where there is least room. The
search for plans does not use it, as the stored results show why (`small_budgets.py`).
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rk_solvers.bounds.relaxation import Relaxation
from rk_solvers.milp import BackendLimits, Floats, Model, Outcome, relaxation_bound, solve

PART = 16  # a data of less than so small a part of the room is not branched on: it hardly decides what else is kept
WHOLE = 1e-5  # a count this near to a whole number is one
FIRST_S = 5.0  # of the integer program of one node; each further time it has twice as long
GAP = 1e-4  # that such a program may leave

Counts = tuple[int, int]  # of kept data, at least and at most


@dataclass(frozen=True, slots=True)
class Branched:
    """What a branch and bound has proven, in the unit of the relaxation's objective."""

    bound: float  # no plan that fits is below it; infinite where none fits
    nodes: int  # linear and integer programs solved
    complete: bool  # whether the bound is the least value of the integer program, up to `GAP`
    value: float  # of the best solution in whole numbers that was met, infinite without: no bound is above it


@dataclass(order=True, slots=True)
class _Node:
    """Plans whose counts of kept data are within limits, by how many of the data in order are counted."""

    bound: float
    number: int
    counts: Mapping[int, Counts] = field(compare=False)
    values: Floats | None = field(compare=False)
    seconds: float = field(default=0.0, compare=False)  # that its integer program had
    solved: bool = field(default=False, compare=False)  # whether that was enough


def fullest_border(relaxation: Relaxation) -> int:
    """The group at whose beginning there is the least room for data: the turn, where the loss is what takes most."""
    return min(range(len(relaxation.starts)), key=lambda group: (_room_bytes(relaxation, group), group))


def branched_bound(relaxation: Relaxation, time_limit_s: float) -> Branched:
    """The bound after that time: the least over all nodes that are open, so it holds whenever the search ends.

    A node is divided by how many of the first data, in order of their computation, are alive at the fullest border:
    at most so many, or more. Where all such counts are whole, what is left is the integer program's. The best node
    comes first. All variables of the integer program keep their meaning, so each plan is in one of the parts.
    """
    return _Branching(relaxation, time.monotonic() + time_limit_s).run()


class _Branching:
    """The tree under construction."""

    def __init__(self, relaxation: Relaxation, deadline: float) -> None:
        self.relaxation, self.deadline = relaxation, deadline
        border = fullest_border(relaxation)
        least_bytes = _room_bytes(relaxation, border) / PART
        size, producer = relaxation.live.size, relaxation.live.producer
        alive = relaxation.alive[border]
        large = [item for item in alive if size[item] > 0 and size[item] >= least_bytes]
        self.order = [alive[item] for item in sorted(large, key=lambda item: (producer[item], item))]
        self.nodes, self.value = 0, math.inf
        self.open: list[_Node] = []

    def run(self) -> Branched:
        """Divide the node of the least bound until the time is over, or that node is solved."""
        self._add({}, -math.inf)
        while self.open and time.monotonic() < self.deadline and not self.open[0].solved:
            node = heapq.heappop(self.open)
            before = self.nodes
            self._divide(node)
            if self.nodes == before:  # no time is left for a program
                heapq.heappush(self.open, node)
                break
        bound = self.open[0].bound if self.open else math.inf
        return Branched(bound, self.nodes, not self.open or self.open[0].solved, self.value)

    def _divide(self, node: _Node) -> None:
        """Put the parts of a node in its place, or what its integer program proves."""
        place = None if node.values is None else self._place(node.values)
        if place is None:
            self._solve(node)
            return
        count, below = place
        low, high = node.counts.get(count, (0, count))
        for part in ((low, below), (below + 1, high)):
            self._add({**node.counts, count: part}, node.bound)

    def _place(self, values: Floats) -> tuple[int, int] | None:
        """How many data are counted where the count is farthest from a whole number, and that below it."""
        total, best = 0.0, (WHOLE, 0, 0)
        for count, variable in enumerate(self.order, 1):
            total += float(values[variable])
            below = math.floor(total + WHOLE)
            best = max(best, (min(total - below, below + 1 - total), count, below))
        return best[1:] if best[1] else None

    def _add(self, counts: Mapping[int, Counts], bound: float) -> None:
        """Open the node of these counts, unless no plan is in it; without time, with its parent's bound."""
        model = self._model(counts)
        result = None if model is None else relaxation_bound(model, max(0.01, self.deadline - time.monotonic()))
        self.nodes += 1
        if result is not None and result.outcome is not Outcome.INFEASIBLE:
            heapq.heappush(self.open, _Node(max(bound, result.bound), self.nodes, counts, result.values))

    def _solve(self, node: _Node) -> None:
        """Have the integer program raise the node's bound; it is solved once that has the time it needs."""
        left_s = self.deadline - time.monotonic()
        model = self._model(node.counts)
        if left_s <= 0 or model is None:
            return
        model.integer = self.relaxation.integer
        seconds = min(left_s, 2 * node.seconds or FIRST_S)
        result = solve(model, "scipy", BackendLimits(seconds, GAP))
        self.nodes += 1
        self.value = min(self.value, result.objective)
        if result.outcome is not Outcome.INFEASIBLE:
            bound, solved = max(node.bound, result.bound), result.outcome is Outcome.OPTIMAL
            heapq.heappush(self.open, replace(node, bound=bound, seconds=seconds, solved=solved))

    def _model(self, counts: Mapping[int, Counts]) -> Model | None:
        """The relaxation's program with these limits of counts; None if they contradict each other."""
        model = _copy(self.relaxation.model)
        low, high = [0] * (len(self.order) + 1), list(range(len(self.order) + 1))
        for count, (least, most) in counts.items():
            low[count], high[count] = least, most
        for count in range(1, len(low)):  # each data adds one at most
            low[count], high[count] = max(low[count], low[count - 1]), min(high[count], high[count - 1] + 1)
        for count in reversed(range(1, len(low))):
            low[count - 1], high[count - 1] = max(low[count - 1], low[count] - 1), min(high[count - 1], high[count])
        if any(least > most for least, most in zip(low, high, strict=True)):
            return None
        for count, variable in enumerate(self.order):
            model.lower[variable] = max(model.lower[variable], float(low[count + 1] - high[count]))
            model.upper[variable] = min(model.upper[variable], float(high[count + 1] - low[count]))
        for count, (least, most) in counts.items():
            terms = [(variable, 1.0) for variable in self.order[:count]]
            model.add_row(terms, lower=float(least) if least else -math.inf, upper=float(most))
        return model


def _room_bytes(relaxation: Relaxation, group: int) -> int:
    """What the budget leaves for data at the beginning of a group, beside the operations on either side of it."""
    problem, start = relaxation.problem, relaxation.starts[group]
    used_bytes = problem.backward[start].resident_bytes
    if start:
        used_bytes = max(used_bytes, problem.backward[start - 1].peak_bytes)
    return relaxation.budget_bytes - problem.base_bytes - relaxation.live.held_bytes - used_bytes


def _copy(model: Model) -> Model:
    """A program of its own that starts as `model` is."""
    kept = {name: list(getattr(model, name)) for name in model.__slots__}
    made = Model()
    for name, values in kept.items():
        setattr(made, name, values)
    return made
