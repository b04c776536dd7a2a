"""A bound below which no plan's peak can be: which budgets are proven to be infeasible.

Under a given budget, what is possible at each stage of the backward is propagated until nothing changes:

* an operation can be recomputed before a stage if its inputs can be there, and it fits beside what must be alive then
  and what the stage needs of earlier operations;
* a data can be alive at a stage if it can be recomputed there, or be alive one stage earlier, or at the end of the
  forward, and fits beside what that stage must have alive;
* an operation of several inputs has the first ones beside it while what leads to the others is recomputed after them;
* a data must be alive at a stage if a stage from there on needs it before it can be recomputed.

Where a stage needs what cannot be there, or must have alive what does not fit, the budget is infeasible. What plans do
besides is left out, so the bound may be too low, but never too high. Found by bisection.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rk_solvers.liveness import Tables, last_forward_uses, least_bytes
from rk_solvers.problem import Problem

ROUNDS = 20  # of propagation; a few do for most problems
PRECISION = 1 / 10_000  # of the bound, as a share of the budget
LARGEST = 6_000_000  # data times stages: a second and 100 MiB; of a larger problem only `least_bytes` is told

Bools = NDArray[np.bool_]
Sizes = NDArray[np.int64]


def peak_bound_bytes(problem: Problem, known_bytes: int, time_limit_s: float = math.inf) -> int:
    """Bytes that the peak of every plan is at least; `known_bytes` is the peak of some plan.

    At most `PRECISION` below what this kind of proof can tell, and less tight once the time is up. Takes about a second
    for a thousand operations.
    """
    infeasible, feasible = least_bytes(problem) - 1, known_bytes
    if not _is_tabled(problem):
        return infeasible + 1
    tables = _Tables(problem, time.monotonic() + time_limit_s)
    if feasible - infeasible > 1 and tables.infeasible(feasible - 1):
        return feasible
    while feasible - infeasible > max(1, int(known_bytes * PRECISION)) and time.monotonic() < tables.deadline:
        middle = (infeasible + feasible) // 2
        if tables.infeasible(middle):
            infeasible = middle
        else:
            feasible = middle
    return infeasible + 1


def least_peak_bytes(problem: Problem, known_bytes: int, *, may_move: bool, time_limit_s: float = math.inf) -> int:
    """Bytes that the peak of every plan is at least, where data may be moved or not.

    `peak_bound_bytes` is of plans that move nothing; what one operation holds at once is of all.
    """
    return least_bytes(problem) if may_move else peak_bound_bytes(problem, known_bytes, time_limit_s)


def is_infeasible(problem: Problem, budget_bytes: int, time_limit_s: float = math.inf) -> bool:
    """Whether it is proven that no plan fits. False says nothing."""
    deadline = time.monotonic() + time_limit_s
    if budget_bytes < least_bytes(problem):
        return True
    return _is_tabled(problem) and _Tables(problem, deadline).infeasible(budget_bytes)


def _is_tabled(problem: Problem) -> bool:
    """Whether what is possible for each data at each stage is looked at."""
    return len(problem.data) * len(problem.backward) <= LARGEST


@dataclass(slots=True)
class _Possible:
    """What a round of propagation found, by item or operation, and stage."""

    recomputed: Bools  # [operation, stage]
    alive: Bools  # [item, stage]: when the stage runs
    given: Bools  # [item, stage]: before anything is recomputed for the stage


class _Tables:
    """A problem as arrays. Data that are held are left out: they are alive throughout."""

    def __init__(self, problem: Problem, deadline: float) -> None:
        self.problem = problem
        self.deadline = deadline  # of `time.monotonic`: joins are left out from then on
        stages, items = len(problem.backward), len(problem.data)
        self.live = live = Tables(problem)
        self.size: Sizes = np.array(live.size, dtype=np.int64)
        self.size[list(problem.held)] = 0
        self.resident = problem.base_bytes + live.held_bytes + np.array(live.resident, dtype=np.int64)
        self.peak = live.held_bytes + np.array(live.peak, dtype=np.int64)
        self.needed: Bools = np.zeros((items, stages), dtype=np.bool_)
        for stage, needs in enumerate(live.needs):
            self.needed[list(needs), stage] = True
        self.next_need = _next_true(self.needed)
        self.inputs = [sorted(read, key=live.producer.__getitem__) for read in live.inputs]
        self.outputs = [list(made) for made in live.renewed]
        self.crossing = self._crossing_bytes()

    def infeasible(self, budget_bytes: int) -> bool:
        """Whether no plan fits, as far as propagation can tell."""
        problem = self.problem
        if not problem.backward:
            return False
        must = np.zeros_like(self.needed)  # alive when the recomputations before a stage begin
        for _ in range(ROUNDS):
            at_stage = self.peak + self.size @ (must | self.needed)
            at_start = self.resident + self.size @ must
            if (at_stage > budget_bytes).any() or (at_start > budget_bytes).any():
                return True
            possible = self._possible(budget_bytes, must, at_stage, at_start)
            if (self.needed & ~possible.alive).any() or (must & ~possible.alive).any():
                return True
            forced = self.next_need < _next_true(possible.recomputed[self.live.producer])
            if not (forced & ~must).any():
                return False
            must |= forced
        return False

    def _possible(self, budget_bytes: int, must: Bools, at_stage: Sizes, at_start: Sizes) -> _Possible:
        """What can be recomputed and alive where, given what must be alive and what that takes."""
        problem, stages = self.problem, len(self.problem.backward)
        items, operations = len(problem.data), len(problem.forward)
        found = _Possible(*(np.zeros((rows, stages), dtype=np.bool_) for rows in (operations, items, items)))
        room = np.zeros((operations, stages), dtype=np.int64)  # that a recomputation leaves
        there = must | self.needed
        before = np.zeros(stages, dtype=np.int64)  # what the stage needs, and operations before this one make
        for index, op in enumerate(problem.forward):
            if op.recomputable:
                # Recomputed in the forward's order: what the stage needs of earlier operations is there by then.
                own = self.size[self.inputs[index]] @ ~there[self.inputs[index]]
                own += self.size[self.outputs[index]] @ ~must[self.outputs[index]]
                room[index] = budget_bytes - (at_start + before + own + op.workspace_bytes)
                found.recomputed[index] = room[index] >= 0
                for item in self.inputs[index]:
                    found.recomputed[index] &= found.alive[item]
                joins = len(self.inputs[index]) if time.monotonic() < self.deadline else 0
                for first in range(1, joins):
                    found.recomputed[index] &= self._joined(index, first, found, room, there)
            for item in self.outputs[index]:
                # Carried over a stage; over the forward, it fits beside each later operation.
                carried = at_stage + self.size[item] * ~there[item] <= budget_bytes
                kept = self.crossing[item] <= budget_bytes
                found.alive[item] = _reached(found.recomputed[index], carried, kept)
                found.given[item] = np.concatenate(([kept], (found.alive[item] & carried)[:-1]))
                before = before + self.size[item] * (self.needed[item] & ~must[item])
        return found

    def _joined(self, index: int, first: int, found: _Possible, room: Sizes, there: Bools) -> Bools:
        """Where an operation's inputs can come together.

        Those before the `first` one, in order, are there when what leads to the others is recomputed after them.
        """
        inputs = self.inputs[index]
        early, last = inputs[:first], self.problem.data[inputs[first - 1]].producer
        leading = {self.problem.data[item].producer for item in inputs[first:]}
        for producer in range(index - 1, last, -1):
            if producer in leading:
                leading.update(self.problem.data[item].producer for item in self.inputs[producer])
        beside: dict[int, Bools] = {}  # by operation: where it can run with the early inputs there
        for producer in sorted(leading):
            if producer > last:
                others = [item for item in early if item not in self.inputs[producer]]
                fits = found.recomputed[producer] & (room[producer] >= self.size[others] @ ~there[others])
                for item in self.inputs[producer]:
                    fits = fits & self._reachable(item, found, beside)
                beside[producer] = fits
        result: Bools = np.logical_and.reduce([self._reachable(item, found, beside) for item in inputs[first:]])
        return result

    def _reachable(self, item: int, found: _Possible, beside: dict[int, Bools]) -> Bools:
        """Where an item can be there, if the operations of `beside` can run only where that says."""
        producer = self.problem.data[item].producer
        return found.given[item] | beside[producer] if producer in beside else found.alive[item]

    def _crossing_bytes(self) -> list[int]:
        """For each item the most that it and a later operation of the forward take together."""
        own, size = self.live.least_forward(), self.size
        after = [*np.maximum.accumulate(np.array(own[::-1], dtype=np.int64))[::-1].tolist(), 0]
        readers = [set(users) for users in self.problem.forward_users()]
        last = last_forward_uses(self.problem)
        found = []
        for item, producer in enumerate(self.live.producer):
            between = [own[k] for k in range(producer + 1, last[item]) if k not in readers[item]]
            found.append(max([after[last[item] + 1], *between]) + int(size[item]))
        return found


def _next_true(table: Bools) -> Sizes:
    """For each place in a row of `table`, the next one from there on that is true; the row's length where none is."""
    length = table.shape[1]
    places = np.where(table, np.arange(length), length)
    result: Sizes = np.minimum.accumulate(places[:, ::-1], axis=1)[:, ::-1]
    return result


def _reached(made: Bools, carried: Bools, before: bool) -> Bools:
    """Where something is that is made at some places, and carried from each place to the next at some.

    `before` says whether it is there before the first place.
    """
    places = np.arange(len(made))
    last_made = np.maximum.accumulate(np.where(made, places, -1 if before else -len(made) - 1))
    # Lost where it was not carried over the place before.
    lost = np.concatenate(([-1 if before else 0], np.where(carried, -2, places + 1)[:-1]))
    result: Bools = last_made >= np.maximum.accumulate(lost)
    return result
