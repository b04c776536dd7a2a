"""Where groups are divided: where that tells most of the plan that an integer program has found.

With what is alive between the groups as that plan has it, each group is a problem of its own: what it takes depends on
no other. So one linear program tells of all groups at once what they take if they are divided somewhere. Those that
take the most more are, as no plan like this one takes less. The integer program in these groups finds another plan, or
proves that none is better. What is divided is only what such plans are wrong about, which a linear program alone does
not tell: its plans are parts of many.
"""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Iterable, Iterator, Mapping

from rk_solvers.bounds.refinement import Refinement, left_s
from rk_solvers.bounds.relaxation import UNITS, Relaxation
from rk_solvers.milp import Floats, Outcome, relaxation_bound

PLACES = 6  # at which each group is divided for trial
DIVIDED = 2  # groups at once, at most
GAIN = 5e-4  # of the step's time: what a group must take more, divided


def divided(refinement: Refinement, time_limit_s: float) -> set[int]:
    """Beginnings of groups, with those that divide the ones that the last integer program is most wrong about.

    The same as they are where nothing is to be gained, or there is no time.
    """
    trial = _Trial(refinement, time.monotonic() + time_limit_s)
    plain = trial.costs([])
    if plain is None:
        return set(refinement.starts)
    gains: dict[int, tuple[float, int]] = {}  # by group, the best gain, and where
    for places in _places(refinement):
        costs = trial.costs(places.values())
        for start, place in places.items():
            own = costs if costs is not None else trial.costs([place])  # of several, which one cannot be is not known
            if trial.is_late:
                return set(refinement.starts)
            gain = math.inf if own is None else own[start] - plain[start]
            gains[start] = max(gains.get(start, (0.0, 0)), (gain, place))
    best = sorted((gain for gain in gains.values() if gain[0] > GAIN * UNITS), reverse=True)
    return {*refinement.starts, *(place for _, place in best[:DIVIDED])}


class _Trial:
    """What the groups take with what is alive between them as it is in the last integer program."""

    def __init__(self, refinement: Refinement, deadline: float) -> None:
        self.refinement, self.deadline = refinement, deadline
        self.is_late = False

    def costs(self, places: Iterable[int]) -> dict[int, float] | None:
        """Of each group, by its beginning, divided at these places; None if they cannot be, or there is no time."""
        relaxation = self.refinement.relaxation({*self.refinement.starts, *places})
        for start, alive in self.refinement.alive.items():
            relaxation.fix(start, alive)
        result = relaxation_bound(relaxation.model, left_s(self.deadline))
        self.is_late = self.is_late or result.outcome is Outcome.LIMIT
        return None if result.values is None else self._by_group(relaxation, result.values)

    def _by_group(self, relaxation: Relaxation, values: Floats) -> dict[int, float]:
        starts = self.refinement.starts
        costs = dict.fromkeys(starts, 0.0)
        for start, recomputed in zip(relaxation.starts, relaxation.recomputed, strict=True):
            group = starts[bisect.bisect_right(starts, start) - 1]
            cost = relaxation.model.cost
            costs[group] += math.fsum(cost[variable] * values[variable] for variable in recomputed.values())
        return costs


def _places(refinement: Refinement) -> Iterator[Mapping[int, int]]:
    """Places within the groups, by beginning: one of each group at a time."""
    ends = (*refinement.starts[1:], len(refinement.problem.backward))
    for number in range(PLACES):
        found = {}
        for start, end in zip(refinement.starts, ends, strict=True):
            count = min(PLACES, end - start - 1)
            if number < count:
                found[start] = start + 1 + (end - start - 1) * number // count
        if found:
            yield found
