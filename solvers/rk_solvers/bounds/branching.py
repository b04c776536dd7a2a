"""A bound by cases: how many of the data, and which, are alive where least can be.

Where a step holds the most beside what it keeps, such as at a loss with the logits of all words and their gradients,
few data are alive: those from which everything else is computed again. The relaxation (see `relaxation`) has parts of
many of them alive there, which is why it proves little just above the smallest budget. So cases are told apart: at most
so many of a set of data are alive where the backward passes that place, or more. Sets are all of them, then halves in
the order in which they are made, and halves of these, so that what replaces each other in a plan is in one set, and a
case leaves little to choose from. In each case the groups of the relaxation are placed anew: with what is kept
there given, others tell more, and programs are quicker to solve.

Every plan belongs to one case of those that are open or closed, so that the least of their bounds holds for all. The
case with the least bound goes first, as in any branch and bound (Land and Doig, 1960), whose tree this is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rk_solvers.bounds.refinement import Refinement, Target
from rk_solvers.bounds.relaxation import Kept, Relaxation
from rk_solvers.milp import Floats, Outcome, relaxation_bound
from rk_solvers.problem import Problem

PLACING_S = 6.0  # of a case's groups, at most
LEAST_PART = 1 / 16  # of the bytes that are alive at the place: what is smaller is in no set
WHOLE = 0.02  # how far the number of a set's data that are alive may be from a whole one
TRIED = 3  # sets by which a case is split for trial
PLACES = 3  # where least is alive, of which the one that tells most is taken
WORTH = 3e-3  # of the step's time: what the first split must raise the bound by
LINEAR_S = 60.0  # of one linear program, at most
LEAST_S = 1.0  # of one, whatever is left


@dataclass(frozen=True, slots=True)
class Case:
    """Some of the plans: those of which what `refinement` assumes is true. Its bound is theirs."""

    refinement: Refinement
    alive: Mapping[int, float] = field(hash=False)  # how much of each data is, where cases are told apart
    is_placed: bool = False  # whether its groups were placed for it
    is_solved: bool = True  # False: there was no time to solve its program


@dataclass(frozen=True, slots=True)
class Branching:
    """Cases of what is alive when the backward operation `stage` begins."""

    stage: int
    sets: tuple[tuple[int, ...], ...]  # of data, the largest first
    cases: tuple[Case, ...]
    closed_ms: float = math.inf  # the least bound of cases that are split no further

    @property
    def bound_ms(self) -> float:
        """No plan is faster."""
        return min([self.closed_ms, *(case.refinement.bound_ms for case in self.cases)])

    @staticmethod
    def worth(refinement: Refinement, coarse: Refinement, deadline: float) -> Branching | None:
        """Cases at the place where they tell most, as the linear program of `refinement` has it; in groups of `coarse`.

        None where they would tell too little.
        """
        relaxation = refinement.relaxation(refinement.starts)
        result = relaxation_bound(relaxation.model, max(0.1, deadline - time.monotonic()))
        if result.values is None:
            return None
        plain, linear_ms = replace(refinement, bound_ms=0.0), refinement.bound_of(result, integer=False)
        found: list[tuple[float, int, tuple[tuple[int, ...], ...]]] = []
        for place in _narrowest(relaxation, result.values):
            alive = _alive_at(relaxation, result.values, place)
            sets = _sets(relaxation.problem, alive)
            if not sets:
                continue
            tried = Branching(place, sets, ()).split(Case(plain, alive), math.inf, deadline)
            raised_ms = min((one.refinement.bound_ms for one in tried), default=0.0) - linear_ms
            found.append((raised_ms, place, sets))
        raised_ms, stage, sets = max(found, default=(-math.inf, 0, ()))
        if not sets or raised_ms < WORTH * refinement.problem.keep_all_time_ms:
            return None
        root = coarse.with_spans({*coarse.starts, stage})
        anything = Kept(stage, sets[0])  # a group begins there in all cases
        case = Branching(stage, sets, ()).case(replace(root, kept=(anything,)), 0.0, deadline)
        return Branching(stage, sets, (case,)) if case.is_solved else None

    def advanced(self, target: Target) -> Branching:
        """With cases that are placed and split, until the bound is enough, or time is over."""
        deadline = time.monotonic() + target.time_limit_s
        found = self
        while found.cases and found.bound_ms < target.enough_ms and time.monotonic() < deadline:
            further = found._step(target.enough_ms, deadline)
            if not all(case.is_solved for case in further.cases):  # next time, with more time
                break
            found = further
        return found

    def _step(self, enough_ms: float, deadline: float) -> Branching:
        """With the case of the least bound placed, or split, or closed."""
        case = min(self.cases, key=lambda case: case.refinement.bound_ms)
        others = tuple(other for other in self.cases if other is not case)
        if case.refinement.bound_ms >= self.closed_ms:  # the bound is that of a closed one
            return replace(self, cases=())
        if not case.is_placed:
            return replace(self, cases=(*others, self.placed(case, enough_ms, deadline)))
        parts = self.split(case, enough_ms, deadline)
        if parts:
            return replace(self, cases=(*others, *parts))
        again = self.placed(case, enough_ms, deadline)  # its time may have been too short
        if again.refinement.starts != case.refinement.starts or not again.is_placed:
            return replace(self, cases=(*others, again))
        return replace(self, cases=others, closed_ms=min(self.closed_ms, case.refinement.bound_ms))

    def placed(self, case: Case, enough_ms: float, deadline: float) -> Case:
        """The case in groups that are placed for it."""
        seconds = min(PLACING_S, max(0.1, deadline - time.monotonic()))
        placed = case.refinement.placed(Target(enough_ms, seconds, integer=False))
        is_placed = placed.settled or seconds == PLACING_S
        return replace(self.case(placed, case.refinement.bound_ms, deadline), is_placed=is_placed)

    def case(self, refinement: Refinement, least_ms: float, deadline: float) -> Case:
        """The case of what is assumed, bounded by its linear program, and by that of a case that it is a part of."""
        relaxation = refinement.relaxation(refinement.starts)
        limit_s = min(LINEAR_S, max(LEAST_S, deadline - time.monotonic()))
        result = relaxation_bound(relaxation.model, limit_s)
        bound_ms = max(least_ms, refinement.bound_of(result, integer=False))
        alive = {} if result.values is None else _alive_at(relaxation, result.values, self.stage)
        is_solved = result.outcome is not Outcome.LIMIT
        return Case(replace(refinement, bound_ms=bound_ms), alive, is_solved=is_solved)

    def split(self, case: Case, enough_ms: float, deadline: float) -> tuple[Case, ...]:
        """Two cases in the place of one: of the sets tried, by the one that raises the lesser bound most.

        None of them where the number of each set's data is whole.
        """
        best: tuple[Case, ...] = ()
        best_ms = -math.inf
        for items, number in self._undecided(case):
            kept = case.refinement.kept
            both = (Kept(self.stage, items, most=number), Kept(self.stage, items, least=number + 1))
            parts = tuple(
                self.case(replace(case.refinement, kept=(*kept, one)), case.refinement.bound_ms, deadline)
                for one in both
            )
            low_ms, high_ms = sorted(min(part.refinement.bound_ms, enough_ms) for part in parts)
            # Of equals the one whose other case is closed sooner; where nothing limits them, the lesser alone counts.
            value_ms = low_ms + (0.1 * (high_ms - low_ms) if high_ms < math.inf else 0.0)
            if value_ms > best_ms:
                best, best_ms = parts, value_ms
        return best

    def _undecided(self, case: Case) -> list[tuple[tuple[int, ...], int]]:
        """The largest sets of which no whole number is alive, and the whole number below."""
        found: list[tuple[tuple[int, ...], int]] = []
        for items in self.sets:
            number = math.fsum(case.alive.get(item, 0.0) for item in items)
            if abs(number - round(number)) > WHOLE:
                found.append((items, math.floor(number)))
            if len(found) == TRIED:
                break
        return found


def _alive_at(relaxation: Relaxation, values: Floats, stage: int) -> dict[int, float]:
    alive = relaxation.alive[relaxation.starts.index(stage)]
    return {item: float(values[variable]) for item, variable in alive.items()}


def _narrowest(relaxation: Relaxation, values: Floats) -> list[int]:
    """Where the fewest bytes are alive, of the beginnings of groups."""

    def alive_bytes(stage: int) -> float:
        return math.fsum(relaxation.live.size[i] * part for i, part in _alive_at(relaxation, values, stage).items())

    return sorted(relaxation.starts, key=alive_bytes)[:PLACES]


def _sets(problem: Problem, alive: Mapping[int, float]) -> tuple[tuple[int, ...], ...]:
    """All data that are large there, in the order in which they are made, then halves of that, and so on."""
    alive_bytes = math.fsum(problem.data[item].size_bytes * part for item, part in alive.items())
    large = [item for item in alive if problem.data[item].size_bytes > LEAST_PART * alive_bytes]
    sets = [tuple(sorted(large, key=lambda item: (problem.data[item].producer, item)))] if large else []
    for items in sets:  # which grows meanwhile: level by level
        if len(items) > 1:
            sets += [items[: len(items) // 2], items[len(items) // 2 :]]
    return tuple(sets)
