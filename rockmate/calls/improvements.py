"""Better schedules than those that are in use: looked for in the background, one after the other.

Training begins with what a short search has found. What a longer one finds is taken between two steps: for a plan,
where a real step of it is within the budget; for a family of sizes, as one more of its schedules.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

from rk_solvers import Problem, Solution
from rkgb import Sample
from rockmate.calls.specialization import Specialization
from rockmate.families.choice import FamilyPlans, room_of
from rockmate.families.polynomials import Point
from rockmate.guards.inputs import CallPattern
from rockmate.planning.background import BackgroundSearch, is_wanted
from rockmate.planning.fixed_plan import FixedPlan, PortablePlan
from rockmate.planning.graph_solver import solver_for
from rockmate.planning.request import PlanRequest

WORTH = 0.002  # of a step's time: a plan that gains less does not take the place of one that is there
_MOST_PROBLEMS = 64
_FAMILY_S = 30.0  # of a search for one of many sizes, by the clock: of a core it has what nobody else wants


@dataclass(frozen=True, eq=False, slots=True)
class _OfMember:
    """A search for a plan that was made in a hurry."""

    member: Specialization


@dataclass(frozen=True, eq=False, slots=True)
class _OfFamily:
    """A search for some sizes of a family."""

    plans: FamilyPlans
    point: Point
    budget_bytes: int


class Improvements:
    """What is looked for, and what was found for plans of one module.

    `family_has_better` is told of a family with a new schedule, and of the budget.
    """

    def __init__(self, family_has_better: Callable[[FamilyPlans, int], None]) -> None:
        self._family_has_better = family_has_better
        self._search = BackgroundSearch()
        self._waiting: deque[Specialization] = deque()
        self._families: list[tuple[FamilyPlans, int]] = []  # each with its budget; the latest is the first to be asked
        self._found: dict[Hashable, tuple[Specialization, Solution]] = {}  # by pattern
        self._problems: list[Problem] = []  # of plans for which a better one was looked for
        self._looking = threading.Lock()

    @property
    def is_busy(self) -> bool:
        """Whether a search goes on."""
        return self._search.is_busy

    def forget(self) -> None:
        """End the search, and let go of what was found."""
        self._search.close()
        self._waiting.clear()
        self._families.clear()
        self._found.clear()
        self._problems.clear()

    def ask_for(self, member: Specialization, request: PlanRequest) -> None:
        """Look for a better plan than that of `member`, if there may be one and it was made in a hurry."""
        plan = member.plan
        is_near = plan.gap is not None and plan.gap <= request.limits.gap
        if is_near or not plan.recomputations or member.exceeds or request.solver != "auto" or not is_wanted(request):
            return
        problem = member.measured.problem
        if member.measured.residents is not None or any(known is problem for known in self._problems):
            return  # where it bounds all of training, what is left to the step may be another by then
        self._problems = [*self._problems[-_MOST_PROBLEMS:], problem]
        self._waiting.append(member)
        self._begin(request)

    def ask_for_family(self, plans: FamilyPlans, budget_bytes: int, request: PlanRequest) -> None:
        """Look for better schedules of a family, for as long as more is to be gained."""
        others = [known for known in self._families if known[0] is not plans]
        self._families = [(plans, budget_bytes), *others]
        self._begin(request)

    def look(self, request: PlanRequest) -> None:
        """Take what was found, and let the search go on with what is next. Never waits."""
        if not self._search.is_busy or not self._looking.acquire(blocking=False):
            return
        try:
            found = self._search.finished()
            if found is not None:
                self._take(found.key, found.solution)
                if not self._begin(request):
                    self._search.close()
        finally:
            self._looking.release()

    def has_better(self, call: Sample) -> bool:
        """Whether there is something better for such calls, to be tried."""
        return bool(self._found) and CallPattern.of(call).key in self._found

    def better(self, call: Sample) -> tuple[Specialization, FixedPlan] | None:
        """What was found for the plan of such calls: it is tried once."""
        member, solution = self._found.pop(CallPattern.of(call).key, (None, None))
        if member is None or solution is None:
            return None
        return member, FixedPlan(PortablePlan.of(solution.schedule, solution.solver), solution.lower_bound_ms)

    def _take(self, key: Hashable, solution: Solution | None) -> None:
        if solution is None or not solution.status.fits:
            return
        if isinstance(key, _OfFamily):
            if key.plans.take(key.point, solution, key.budget_bytes):
                self._family_has_better(key.plans, key.budget_bytes)
        elif isinstance(key, _OfMember):
            planned = key.member.planned
            if solution.time_ms < (1 - WORTH) * planned.plan.time_ms:
                self._found[key.member.measured.pattern.key] = key.member, solution
            elif solution.lower_bound_ms is not None:  # nothing better is there, and now it is known
                bound_ms = min(solution.lower_bound_ms, planned.plan.time_ms)
                planned.plan = replace(planned.plan, lower_bound_ms=max(planned.plan.lower_bound_ms or 0.0, bound_ms))

    def _begin(self, request: PlanRequest) -> bool:
        """Whether a search goes on, if need be the next one."""
        if self._search.is_busy:
            return True
        while self._waiting and is_wanted(request):
            member = self._waiting.popleft()
            if self._began(_OfMember(member), member, request):
                return True
        return any(self._began_for(plans, budget_bytes, request) for plans, budget_bytes in self._families)

    def _began_for(self, plans: FamilyPlans, budget_bytes: int, request: PlanRequest) -> bool:
        wanted = plans.wanted(request.limits.gap) if is_wanted(request) else None
        if wanted is None:
            return False
        point, problem = wanted
        limits = request.limits.within(min(request.limits.search_s, _FAMILY_S))
        solver = solver_for(replace(request, limits=limits), replace(plans.family.base, problem=problem))
        within_bytes = budget_bytes - room_of(budget_bytes)
        return self._send(_OfFamily(plans, point, budget_bytes), solver, problem, within_bytes, limits.longest_s)

    def _began(self, key: _OfMember, member: Specialization, request: PlanRequest) -> bool:
        measured = member.measured
        solver = solver_for(request, measured)
        return self._send(key, solver, measured.problem, member.plan.budget_bytes, request.limits.longest_s)

    def _send(self, key: Hashable, *search: object) -> bool:
        try:
            self._search.begin(key, *search)  # type: ignore[arg-type]
        except Exception:  # noqa: BLE001  a solver of the user's that cannot be sent to another process
            self._search.close()
            return False
        return True
