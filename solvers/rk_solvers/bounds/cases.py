"""A bound by cases: which of the large data are alive at one place.

Behind a step that holds much beside what it keeps, such as a loss with the logits of all words and their gradients, few
data are alive: those from which everything else is computed again. The relaxation (see `relaxation`) has parts of many
of them alive there, which is why it proves little just above the smallest budget. So each set of large data for which
there is room at that place is a case, and the linear program in which nothing else that is large is alive there bounds
the plans of that case.

Not each case needs a program. The multipliers of one prove for all of the cases a bound that is linear in what may be
alive (Benders, 1962). So the bounds are a vector, and each program raises many of them at once. The next program is
that of the lowest cases on the average, and that of the lowest one. Groups that tell much of one case tell little of
another. So where a program does not raise the lowest bound in any of the groups that are known, groups are placed for
that case anew, and these may serve others. Where beginnings told most of the last case is where they are tried first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from rk_solvers.bounds.refinement import Refinement, Target, left_s
from rk_solvers.bounds.relaxation import UNITS, Limit, Relaxation
from rk_solvers.liveness import alive_before, peak_and_time
from rk_solvers.milp import Floats, Outcome, Result, relaxation_bound
from rk_solvers.problem import Recompute

MOST_CASES = 100_000
LEAST_PARTS = (1 / 16, 1 / 8, 1 / 4)  # of the room, that make data large: the first of these with few enough cases
WORTH = 0.2  # of what is not proven yet: what telling cases must prove of the plan known, to be gone on with
GAIN = 0.01  # of the step's time: what they must prove of the lowest case, where no plan is known
RISE = 2e-3  # of the step's time: if the lowest bound rises by less in groups that are known, others are placed
FEW = 4  # groupings, the most useful ones first, in which a case is bounded before groups are placed for it
OF_MEAN = 1  # and in which many are bounded at once
LOWEST = 0.1  # of the cases that are open: those whose average is bounded
PLACING_S, LONGEST_S = 2.0, 8.0  # of a case's groups, at most: at first, and once that proves no more
TRIAL_S = 1.5  # to place groups for the plan known
SAME = 1e-6  # of the step's time

Grouping = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cases:
    """All cases at one place, with what is proven of each. Every plan belongs to one of them at least."""

    refinement: Refinement  # with spans, and without any limit: what is asked for, and groups to begin with
    stage: int  # the backward operation before which data are alive
    items: tuple[int, ...]  # the large data
    excluded: tuple[int, ...]  # data for which there is no room
    sets: NDArray[np.int32] = field(compare=False)  # by case, positions in `items`; filled up with their number
    bounds: Floats = field(compare=False)  # by case, in the unit of the objective
    tried_s: Floats = field(compare=False)  # by case: how long groups were placed for it in vain; inf: to the end
    groupings: tuple[Grouping, ...]  # the most useful ones first
    seconds: float = PLACING_S  # of a case's groups
    gains: Mapping[int, float] = field(default_factory=dict, hash=False)  # of beginnings, in the case last placed for

    @property
    def bound_ms(self) -> float:
        """No plan is faster."""
        return self.refinement.proven_ms(float(self.bounds.min()), integer=False)

    @property
    def is_over(self) -> bool:
        """Whether the lowest bound is that of a case of which no groups prove more, however long they are placed."""
        return bool(self.tried_s[int(self.bounds.argmin())] >= LONGEST_S)

    @staticmethod
    def at(refinement: Refinement, stage: int, time_limit_s: float) -> Cases | None:
        """The cases at a place, bounded by one program in the groups of `refinement`.

        None where there is nothing to tell apart, or too much.
        """
        starts = tuple(sorted({*refinement.starts, stage}))
        deadline = time.monotonic() + time_limit_s
        relaxation = refinement.relaxation(starts)
        alive = relaxation.alive[starts.index(stage)]
        room = _most(relaxation, alive, deadline)
        excluded = tuple(item for item in alive if relaxation.size(item) > room)
        relaxation.limit(Limit(stage, tuple((item, 0.0) for item in excluded)))
        for part in LEAST_PARTS:
            items = _in_order(relaxation, (item for item in alive if room * part < relaxation.size(item) <= room))
            left = _most(relaxation, {item: alive[item] for item in items}, deadline)
            sets = _fullest_sets([relaxation.size(item) for item in items], left)
            if sets is not None:
                break
        if not items or sets is None or len(sets) < 2:
            return None
        bounds = np.full(len(sets), -math.inf)
        found = Cases(refinement, stage, items, excluded, sets, bounds, np.zeros(len(sets)), (starts,))
        return found._raised(_Programs(found, deadline), starts, np.ones(len(items)))

    def tried(self, plan: Recompute | None, enough_ms: float, time_limit_s: float) -> tuple[Cases, float]:
        """With groups that are placed for a plan; and what is proven of all that have the same alive there, in ms.

        Without a plan it is the case of the least bound that is tried.
        """
        if plan is None:
            most = self._members(int(self.bounds.argmin()))
        else:
            there = set(alive_before(self.refinement.problem, plan, self.stage))
            most = np.array([float(item in there) for item in self.items])
        programs = _Programs(self, time.monotonic() + time_limit_s)
        found = self._with_placed(self._places(most, enough_ms, time_limit_s))
        result = programs.solved(found.groupings[0], most)
        proven_ms = 0.0 if result.outcome is Outcome.LIMIT else self.refinement.bound_of(result, integer=False)
        return found._raised_by(result, programs.variables(found.groupings[0]), most), proven_ms

    def advanced(self, target: Target) -> Cases:
        """With bounds that are raised until the least is enough, nothing more is proven, or time is over."""
        deadline = time.monotonic() + target.time_limit_s
        programs = _Programs(self, deadline)
        enough = self.refinement.units(target.enough_ms)
        found = self
        while found.bounds.min() < enough and not found.is_over and time.monotonic() < deadline:
            if found.tried_s[int(found.bounds.argmin())] >= found.seconds:
                found = replace(found, seconds=2 * found.seconds)
            found = found._step(programs, enough, target.enough_ms)
        return found

    def _step(self, programs: _Programs, enough: float, enough_ms: float) -> Cases:
        """With programs for the lowest cases together, and for the lowest one."""
        found = self
        open_ = np.flatnonzero(self.bounds < enough)
        lowest = open_[np.argsort(self.bounds[open_], kind="stable")[: math.ceil(LOWEST * len(open_))]]
        for starts in self.groupings[:OF_MEAN]:
            found = found._raised(programs, starts, self._mean(lowest))
        case = int(found.bounds.argmin())
        before = found.bounds[case]
        best = -math.inf
        for starts in found.groupings[:FEW]:
            result = programs.solved(starts, found._members(case))
            found = found._raised_by(result, programs.variables(starts), found._members(case))
            if result.bound > best:
                best, found = result.bound, found._with(starts)
            if found.bounds[case] >= enough:
                return found
        if found.bounds[case] > before + RISE * UNITS:
            return found
        return found._placed(case, programs, enough_ms)

    def _placed(self, case: int, programs: _Programs, enough_ms: float) -> Cases:
        """With groups that are placed for a case, and a note of it if they prove no more."""
        seconds = min(self.seconds, left_s(programs.deadline))
        placed = self._places(self._members(case), enough_ms, seconds)
        found = self._with_placed(placed)._raised(programs, placed.starts, self._members(case))
        if found.bounds[case] > self.bounds[case] + SAME * UNITS:
            return found
        tried_s = self.tried_s.copy()
        tried_s[case] = math.inf if placed.settled else seconds
        return replace(found, tried_s=tried_s)

    def _places(self, most: Floats, enough_ms: float, seconds: float) -> Refinement:
        """Groups that are placed for where so much of the large data may be alive."""
        limited = replace(self.refinement, limit=self._limit(most), bound_ms=0.0, gains=self.gains)
        target = Target(enough_ms, seconds, integer=False)
        return limited.with_spans({*self.groupings[0], self.stage}).placed(target)

    def _with_placed(self, placed: Refinement) -> Cases:
        """With groups that were placed for a case as the most useful ones, and what was seen of beginnings."""
        return replace(self._with(placed.starts), gains=placed.gains)

    def _with(self, starts: Grouping) -> Cases:
        """With a grouping as the most useful one."""
        return replace(self, groupings=(starts, *(other for other in self.groupings if other != starts)))

    def _members(self, case: int) -> Floats:
        """How much of each of the large data may be alive in a case."""
        most = np.zeros(len(self.items) + 1)
        most[self.sets[case]] = 1.0
        return most[:-1]

    def _mean(self, cases: NDArray[np.int_]) -> Floats:
        """How much of each of the large data may be alive in some cases, on the average."""
        counts = np.bincount(self.sets[cases].ravel(), minlength=len(self.items) + 1)
        return counts[:-1] / len(cases)

    def _limit(self, most: Floats) -> Limit:
        """What is assumed where so much of each of the large data may be alive."""
        large = zip(self.items, most.tolist(), strict=True)
        return Limit(self.stage, (*large, *((item, 0.0) for item in self.excluded)))

    def _raised(self, programs: _Programs, starts: Grouping, most: Floats) -> Cases:
        """With what the program of a grouping proves of all cases, where so much of the large data may be alive."""
        return self._raised_by(programs.solved(starts, most), programs.variables(starts), most)

    def _raised_by(self, result: Result, variables: list[int], most: Floats) -> Cases:
        """With what such a program's result proves. `variables` are those of the large data."""
        bounds = self.bounds.copy()
        if result.outcome is Outcome.INFEASIBLE:  # so are the cases in which no more may be alive
            allowed = np.append(most >= 1.0, True)
            bounds[allowed[self.sets].all(axis=1)] = math.inf
        elif result.reduced is not None:
            slopes = np.minimum(result.reduced[variables], 0.0)
            constant = result.bound - float(slopes @ most)
            np.maximum(bounds, constant + np.append(slopes, 0.0)[self.sets].sum(axis=1), out=bounds)
        return replace(self, bounds=bounds)


class _Programs:
    """The linear programs of some cases, made once for each grouping."""

    def __init__(self, cases: Cases, deadline: float) -> None:
        self.cases, self.deadline = cases, deadline
        self.made: dict[Grouping, Relaxation] = {}

    def solved(self, starts: Grouping, most: Floats) -> Result:
        relaxation = self._relaxation(starts)
        relaxation.limit(self.cases._limit(most))
        return relaxation_bound(relaxation.model, left_s(self.deadline))

    def variables(self, starts: Grouping) -> list[int]:
        """Of the large data, where the cases are told apart."""
        alive = self._relaxation(starts).alive[starts.index(self.cases.stage)]
        return [alive[item] for item in self.cases.items]

    def _relaxation(self, starts: Grouping) -> Relaxation:
        if starts not in self.made:
            self.made[starts] = self.cases.refinement.relaxation(starts)
        return self.made[starts]


def worth(refinement: Refinement, stages: Sequence[int], plan: Recompute | None, time_limit_s: float) -> Cases | None:
    """The cases at that of some places where they tell most of a plan, or of a case; None if they tell too little."""
    deadline = time.monotonic() + time_limit_s
    problem = refinement.problem
    enough_ms = math.inf if plan is None else peak_and_time(problem, plan)[1]
    worth_ms = GAIN * problem.keep_all_time_ms if plan is None else WORTH * (enough_ms - refinement.bound_ms)
    best, best_ms = None, refinement.bound_ms + worth_ms
    for stage in stages:
        cases = Cases.at(refinement.with_spans(), stage, left_s(deadline))
        if cases is None:
            continue
        cases, proven_ms = cases.tried(plan, enough_ms, min(TRIAL_S, left_s(deadline)))
        if proven_ms > best_ms:
            best, best_ms = cases, proven_ms
        if proven_ms > (enough_ms + refinement.bound_ms) / 2:  # there is no need to look for a better place
            break
    return best


def _most(relaxation: Relaxation, alive: Mapping[int, int], deadline: float) -> float:
    """The most bytes of some data that are alive together where a group begins, in the unit of the rows."""
    cost, relaxation.model.cost = relaxation.model.cost, [0.0] * len(relaxation.model.cost)
    for item, variable in alive.items():
        relaxation.model.cost[variable] = -relaxation.size(item)
    result = relaxation_bound(relaxation.model, left_s(deadline))
    relaxation.model.cost = cost
    everything = math.fsum(relaxation.size(item) for item in alive)
    if result.outcome is not Outcome.OPTIMAL:  # no time, or no plan fits: then nothing is wrong
        return everything
    return min(everything, -result.bound * (1 + 1e-9) + 1e-9)


def _in_order(relaxation: Relaxation, items: Iterable[int]) -> tuple[int, ...]:
    """Data in the order in which they are made."""
    return tuple(sorted(items, key=lambda item: (relaxation.live.producer[item], item)))


def _fullest_sets(sizes: list[float], room: float) -> NDArray[np.int32] | None:
    """The sets for which there is room, and in which there is no room for another one; None if there are too many."""
    found: list[tuple[int, ...]] = []
    open_: list[tuple[int, float, tuple[int, ...]]] = [(0, room, ())]
    smallest_first = sorted(range(len(sizes)), key=sizes.__getitem__)
    least = min(sizes, default=0.0)
    while open_:
        first, left, chosen = open_.pop()
        if left >= least:
            open_ += [
                (place + 1, left - sizes[place], (*chosen, place))
                for place in range(first, len(sizes))
                if sizes[place] <= left
            ]
        other = next((place for place in smallest_first if place not in chosen), None)
        if other is None or sizes[other] > left:
            found.append(chosen)
        if len(found) > MOST_CASES or len(open_) > MOST_CASES:
            return None
    width = max(map(len, found))
    return np.array([[*chosen, *[len(sizes)] * (width - len(chosen))] for chosen in sorted(found)], np.int32)
