"""When data move, at sizes that were not measured: decisions say which, and their sizes how early and how late."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from rk_solvers import Problem, Schedule, SecondMemory
from rk_solvers.transfers.moves import Costs
from rk_solvers.transfers.reading import costs_of
from rockmate.planning.fixed_plan import FixedPlan, PortablePlan

_MOST = 8  # schedules of the same decisions: each is code of its own
_WORTH = 0.01  # of a step's time: what is quicker by less is not worth another one


class Placed(NamedTuple):
    """A schedule with moves, and what it takes at some sizes."""

    schedule: Schedule
    costs: Costs


@dataclass(slots=True)
class PlacedMoves:
    """The schedules of a family that move data. As few as do for all of its sizes."""

    _known: dict[PortablePlan, list[Schedule]] = field(default_factory=dict)  # used last at the end

    def best(self, decisions: PortablePlan, problem: Problem, memory: SecondMemory, budget_bytes: int) -> Placed:
        """The quickest schedule of the decisions within the budget; where there is none, that of least peak.

        What it moves may be more than there is room for in the second memory, then, too.
        """
        known = self._known.setdefault(decisions, [])
        found = [Placed(schedule, costs_of(problem, schedule, memory)) for schedule in known]
        fitting = [one for one in found if fits(one.costs, memory, budget_bytes)]
        best = min(fitting, key=lambda one: one.costs.time_ms, default=None)
        own = _placed_anew(decisions, problem, memory, budget_bytes)
        if not fits(own.costs, memory, budget_bytes):
            return best or own
        if best is None or own.costs.time_ms < (1 - _WORTH) * best.costs.time_ms:
            best = own
        if best.schedule in known:
            known.remove(best.schedule)
        self._known[decisions] = [*known[-_MOST + 1 :], best.schedule]
        return best


def fits(costs: Costs, memory: SecondMemory, budget_bytes: int) -> bool:
    """Whether a step is within the budget, and what it moves has room."""
    return costs.peak_bytes <= budget_bytes and memory.has_room_for(costs.stored_bytes)


def _placed_anew(decisions: PortablePlan, problem: Problem, memory: SecondMemory, budget_bytes: int) -> Placed:
    schedule = FixedPlan(decisions, memory=memory).solve(problem, budget_bytes).schedule
    return Placed(schedule, costs_of(problem, schedule, memory))
