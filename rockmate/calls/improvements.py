"""Better schedules than those that are in use: looked for in the background, one after the other.

Training begins with what a short search has found. What a longer one finds is taken between two steps: for a plan,
where a real step of it is within the budget; for a family of sizes, as one more of its schedules.

Where no loss was given, first steps show what it takes: schedules are looked for anew with that.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

from rk_solvers import Problem, Solution, Solver
from rk_solvers.transfers.reading import costs_of
from rkgb import Sample
from rkgb.devices.registry import device_of
from rkgb.process.ranks import has_other_ranks
from rkgb.tree import leaves
from rockmate.calls.specialization import Specialization
from rockmate.families.choice import FamilyPlans, room_of
from rockmate.families.polynomials import Point
from rockmate.families.sized_plan import PlanOfSize
from rockmate.guards.inputs import CallPattern
from rockmate.memory.loss_window import LossWindow
from rockmate.planning.background import BackgroundSearch, is_wanted
from rockmate.planning.costs import LossCost, assumed_loss_cost
from rockmate.planning.fixed_plan import FixedPlan, PortablePlan
from rockmate.planning.graph_solver import solver_for
from rockmate.planning.measured import problem_of
from rockmate.planning.request import PlanRequest
from rockmate.units import format_bytes

WORTH = 0.002  # of a step's time: a plan that gains less does not take the place of one that is there
_MOST_PROBLEMS = 64
_MOST_WINDOWS = 8  # forwards whose backward is to come
_MOST_LOOKS = 6  # at losses that take more than is assumed, until two agree
_SAME_LOSS = 0.01  # of the bytes: two steps that differ by less agree
_FAMILY_S = 30.0  # of a search for one of many sizes, by the clock: of a core it has what nobody else wants


@dataclass(frozen=True, eq=False, slots=True)
class _OfMember:
    """A search for a plan that was made in a hurry."""

    member: Specialization


@dataclass(frozen=True, eq=False, slots=True)
class Better:
    """What was found for a plan, or is to be found by the solver."""

    member: Specialization
    solver: Solver | str
    why: str = ""  # the plan that is there exceeds the budget, where it does


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
        self._found: dict[Hashable, Better] = {}  # by pattern
        self._windows: list[tuple[Specialization, LossWindow]] = []  # steps that show what a loss takes
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
        for _, window in self._windows:
            window.close()
        self._windows.clear()

    def watch(self, member: Specialization, output: Any) -> None:
        """See what is taken between the forward that gave `output` and its backward, where that is assumed."""
        if member.loss_is_settled or len(self._windows) >= _MOST_WINDOWS or has_other_ranks():
            return  # ranks are to have one plan, made together
        measured, planned = member.measured, member.planned
        member.loss_is_settled = True
        if measured.residents is not None or (measured.loss is not None and not measured.loss.is_seen):
            return
        if isinstance(planned, PlanOfSize):
            plans = self._plans_of(planned)
            if plans is None or not plans.wants_loss_at(planned.point):
                return
        elif measured.loss is not None:
            return
        window = LossWindow.after(leaves(output), measured.device)
        if window is not None:
            self._windows.append((member, window))
        elif device_of(measured.device).is_watched:
            member.loss_is_settled = False  # a step that nobody else measures may show it

    def _plans_of(self, planned: PlanOfSize) -> FamilyPlans | None:
        return next((plans for plans, _ in self._families if plans.family is planned.sized.family), None)

    def _take_losses(self, request: PlanRequest) -> None:
        windows, self._windows = self._windows, []
        for member, window in windows:
            window.close()
            planned = member.planned
            if window.peak_bytes is None:
                member.loss_is_settled = False  # a forward without a backward: another one may show it
            elif isinstance(planned, PlanOfSize):
                plans = self._plans_of(planned)
                if plans is not None and plans.take_loss(planned.point, window.peak_bytes):
                    self._family_has_better(plans, member.plan.budget_bytes)
            else:
                self._take_loss(member, window.peak_bytes, request)

    def _take_loss(self, member: Specialization, peak_bytes: int, request: PlanRequest) -> None:
        """Correct what was measured for a plan by what its loss was seen to take: where that is more, twice."""
        plan, before = member.plan, member.measured
        measured = replace(before, loss=LossCost(0.0, peak_bytes, is_seen=True))
        measured.problem, measured.chain = problem_of(before.graphs, measured.loss, None, before.gradients)
        corrected_bytes = costs_of(measured.problem, plan.schedule, plan.memory).peak_bytes
        if corrected_bytes == plan.peak_bytes:
            return
        is_eager = plan.keeps_all and plan.budget_bytes == before.eager_peak_bytes
        if corrected_bytes > plan.peak_bytes and (is_eager or not self._is_seen_twice(member, peak_bytes)):
            return
        member.measured = measured
        member.planned.plan = replace(plan, peak_bytes=corrected_bytes, lower_bound_ms=None)
        if corrected_bytes > plan.budget_bytes:
            assumed_bytes = assumed_loss_cost(before.graphs.K_graph).peak_bytes
            why = (
                f"up to {format_bytes(corrected_bytes)}, as {format_bytes(peak_bytes)} are taken between forward and "
                f"backward, where {format_bytes(assumed_bytes)} were assumed without a loss"
            )
            self._found[measured.pattern.key] = Better(member, request.solver, why)
        elif is_wanted(request):
            self.ask_for(member, request)
        elif not plan.keeps_all:
            self._found[measured.pattern.key] = Better(member, request.solver)

    def _is_seen_twice(self, member: Specialization, peak_bytes: int) -> bool:
        """Whether an earlier step took the same; where none did, the next one is looked at, too.

        What is taken once may be of something else that runs between a forward and its backward.
        """
        is_known = any(abs(peak_bytes - seen_bytes) <= _SAME_LOSS * seen_bytes for seen_bytes in member.losses_bytes)
        member.losses_bytes = (*member.losses_bytes, peak_bytes)
        member.loss_is_settled = is_known or len(member.losses_bytes) >= _MOST_LOOKS
        return is_known

    def ask_for(self, member: Specialization, request: PlanRequest) -> None:
        """Look for a better plan than that of `member`, if there may be one and it was made in a hurry."""
        plan = member.plan
        is_near = plan.gap is not None and plan.gap <= request.limits.gap
        if is_near or plan.keeps_all or member.exceeds or request.solver != "auto" or not is_wanted(request):
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
        if not (self._search.is_busy or self._windows) or not self._looking.acquire(blocking=False):
            return
        try:
            if self._windows:
                self._take_losses(request)
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

    def better(self, call: Sample) -> Better | None:
        """What was found for the plan of such calls, or what is to find it: it is tried once."""
        return self._found.pop(CallPattern.of(call).key, None)

    def _take(self, key: Hashable, solution: Solution | None) -> None:
        if solution is None or not solution.status.fits:
            return
        if isinstance(key, _OfFamily):
            if key.plans.take(key.point, solution, key.budget_bytes):
                self._family_has_better(key.plans, key.budget_bytes)
        elif isinstance(key, _OfMember):
            planned = key.member.planned
            if solution.time_ms < (1 - WORTH) * planned.plan.time_ms:
                found = FixedPlan(PortablePlan.of(solution.schedule, solution.solver), solution.lower_bound_ms)
                self._found[key.member.measured.pattern.key] = Better(key.member, found)
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
        alone = replace(request, limits=limits, tiers=None)  # plans by sizes move nothing
        solver = solver_for(alone, replace(plans.family.base, problem=problem))
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
