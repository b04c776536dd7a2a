"""Plans of low peak, found in seconds: what tells of a batch whether it may fit before it is measured."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rk_solvers import Chain, Problem, Schedule, SecondMemory, normalise
from rk_solvers.liveness import least_bytes
from rk_solvers.local.min_peak_search import min_peak_plan
from rk_solvers.transfers.reading import costs_of
from rockmate.planning.graph_solver import moving_solver


@dataclass(frozen=True, slots=True)
class LowPeaks:
    """Looks for plans that recompute and, where there is a second memory, move data as well."""

    memory: SecondMemory | None
    search_s: float  # for recomputations, and as much for moves

    def peak_bytes(self, problem: Problem, plan: Schedule) -> int:
        """What a plan takes; more than there is anywhere where it moves more than the second memory may hold."""
        costs = costs_of(problem, plan, self.memory)
        has_room = self.memory is None or self.memory.has_room_for(costs.stored_bytes)
        return costs.peak_bytes if has_room else sys.maxsize

    def lowest(
        self, problem: Problem, plans: Sequence[Schedule], chain: Chain | None, allowed_bytes: int | None = None
    ) -> Schedule:
        """The plan of least peak that is found from those given and others.

        With `allowed_bytes`, the search ends where a plan takes no more.
        """
        staying = [plan for plan in plans if not plan.offloaded]
        deadline = time.monotonic() + self.search_s
        best = normalise(problem, min_peak_plan(problem, staying, chain, deadline, allowed_bytes))
        wanted_bytes = least_bytes(problem) if allowed_bytes is None else allowed_bytes
        if self.memory is None or self.peak_bytes(problem, best) <= wanted_bytes:
            return best
        moving = moving_solver(chain, self.memory, self.search_s).solve(problem, wanted_bytes).schedule
        found = [best, moving, *(plan for plan in plans if plan.offloaded)]
        return min(found, key=lambda plan: self.peak_bytes(problem, plan))
