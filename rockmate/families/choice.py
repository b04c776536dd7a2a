"""Which of a family's schedules a call follows: the quickest of those whose step fits the budget at its sizes."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from rk_solvers import KeepAll, Problem, Schedule, SecondMemory, Solution, check
from rk_solvers.liveness import peak_and_time, recompute_of, recompute_time_ms
from rk_solvers.problem import Recompute
from rkgb import Sample
from rockmate.families.family import LEAST_MEMBERS, Family
from rockmate.families.moving import PlacedMoves, fits
from rockmate.families.polynomials import NotWhole, Point
from rockmate.families.sized_plan import PlanOfSize, SizedPlan
from rockmate.guards.inputs import CallPattern
from rockmate.planning.background import hurried_limits, is_wanted
from rockmate.planning.costs import LOSS
from rockmate.planning.fixed_plan import PortablePlan
from rockmate.planning.graph_solver import memory_for, solver_for
from rockmate.planning.measured import Measured
from rockmate.planning.plan import Plan
from rockmate.planning.request import PlanRequest

_MOST_SCHEDULES = 16
_LEAST_ROOM_BYTES = 64 << 10  # predictions are short by up to 5 KiB: the state of a random stream that is held
_MOST_SEEN = 4096  # sizes
_NEAR = 0.04  # sizes that differ by so much less have a schedule of one of them
_BEYOND = 1.05  # of a size that ran: what larger ones show by a step of their own, so near a one does not
_WORTH = 0.01  # of a step's time: another schedule that gains less is not worth the step in which it is measured
_LATE = 0.02  # of a step's time: so much later than predicted transfers may be, which no step has shown at these sizes
_WORTH_OF_LOSS = 0.9  # of what is assumed: a loss that takes no less is none to look for quicker plans for
_SAME_SHARE = 0.05  # by which shares of what is assumed may differ, and tell of one loss all the same
KEEP_ALL = PortablePlan((), KeepAll().name)


@dataclass(frozen=True, slots=True)
class _Cost:
    """What a schedule takes at some sizes."""

    decisions: PortablePlan
    peak_bytes: int
    time_ms: float
    schedule: Schedule | None = None  # of decisions that move data
    waiting_ms: float = 0.0
    stored_bytes: int = 0
    late_ms: float = 0.0  # than predicted, at worst
    has_room: bool = True  # for what moves

    @property
    def worst_ms(self) -> float:
        """By which it is compared with others."""
        return self.time_ms + self.late_ms


class FamilyPlans:
    """The schedules of a family, all under one budget."""

    def __init__(self, family: Family, decisions: Iterable[PortablePlan]) -> None:
        self.family = family
        by_decisions = {(one.stages, one.moves): one for one in (KEEP_ALL, *decisions)}
        self._schedules = list(by_decisions.values())
        self._memory: SecondMemory | None = None  # where data may move, as it was last seen
        self._placed = PlacedMoves()
        self._sized: dict[tuple[PortablePlan, Schedule | None], SizedPlan] = {}
        self._recomputed: dict[PortablePlan, Recompute] = {}  # by place, which is the same at all sizes
        self._too_large: dict[tuple[PortablePlan, int], Point] = {}  # sizes at which a schedule was above that budget
        self._in_vain: list[tuple[int, Point]] = []  # budgets and sizes for which a search has found none
        self._highest: Point | None = None  # of each symbol the largest size of steps that ran; None before the first
        self._ran: set[PortablePlan] = set()  # schedules of which a step was measured
        self._extra_ms: dict[Point, tuple[float, float]] = {}  # of steps: beyond keeping all, and of keeping all
        self._losses: dict[Point, int] = {}  # what steps took between forward and backward, where that is assumed
        self._loss: tuple[float, int] | None = None  # the share of what is assumed, and the bytes beside it
        self._excess_bytes = 0  # of steps that took more than predicted, and more than the budget
        self._searched: list[Point] = []  # for which a schedule of their own was looked for

    def plan_for(self, call: Sample, request: PlanRequest, budget_bytes: int) -> tuple[Measured, PlanOfSize] | None:
        """The plan of a call, with what it takes; None where the call is none of the family, or no schedule fits."""
        started = time.perf_counter()
        base = self.family.base
        pattern = CallPattern.of(call, base.pattern.autocast, base.pattern.flags)
        point = self.family.point_of(pattern)
        if point is None:
            return None
        try:
            problem = self._problem_at(point)
        except NotWhole:
            return None
        self._memory = memory_for(request, base)
        keep_all = self._cost(KEEP_ALL, problem, budget_bytes)
        measured = replace(
            base, sample=None, pattern=pattern, problem=problem, eager_peak_bytes=keep_all.peak_bytes, measuring_s=0.0
        )
        best = (
            self._best(point, problem, budget_bytes, keep_all)
            or self._found(point, measured, request, budget_bytes)
            or self._least(problem, budget_bytes)
        )
        if best is None:
            return None
        if len(self._extra_ms) < _MOST_SEEN:
            self._extra_ms[point] = best.time_ms - keep_all.time_ms, keep_all.time_ms
        sized = self._sized_for(best)
        is_moving = best.schedule is not None
        plan = Plan(
            budget_bytes=budget_bytes,
            peak_bytes=best.peak_bytes,
            time_ms=best.time_ms,
            baseline_peak_bytes=keep_all.peak_bytes,
            baseline_time_ms=keep_all.time_ms * _slower_eager(base),
            solver=best.decisions.solver,
            planning_s=time.perf_counter() - started,
            schedule=sized.schedule,
            calls=str(pattern),
            gradient_bytes=measured.gradient_bytes,
            memory=self._memory if is_moving else None,
            waiting_ms=best.waiting_ms,
            stored_bytes=best.stored_bytes,
            layout=request.chosen_layout,
            compiled=base.regions,
            kernels=base.kernels,
            loss_chunks=request.loss_chunks,
        )
        tier = request.tiers.on(base.device) if is_moving and request.tiers is not None else None
        return measured, PlanOfSize(plan, sized.program, "", tier=tier, sized=sized, point=point)

    @property
    def schedules(self) -> tuple[PortablePlan, ...]:
        """Those that are known."""
        return tuple(self._schedules)

    @property
    def is_new(self) -> bool:
        """Whether no step of the family has run."""
        return self._highest is None

    def is_new_ground(self, planned: PlanOfSize) -> bool:
        """Whether a step of that plan may show what no step before it has shown."""
        if self._highest is None or any(
            mine > _BEYOND * most for mine, most in zip(planned.point, self._highest, strict=True)
        ):
            return True
        room_bytes = room_of(planned.plan.budget_bytes)
        is_near = not room_bytes or planned.plan.peak_bytes + room_bytes > planned.plan.budget_bytes
        return is_near and planned.sized.decisions not in self._ran

    def was_seen(self, planned: PlanOfSize) -> None:
        """A step of that plan was as predicted."""
        self._highest = tuple(map(max, *self.family.points, planned.point, self._highest or planned.point))
        self._ran.add(planned.sized.decisions)

    def drop(self, planned: PlanOfSize) -> None:
        """A step of that plan took more than predicted, and more than the budget."""
        self._schedules = [one for one in self._schedules if one != planned.sized.decisions]
        taken_bytes = planned.plan.measured_peak_bytes
        if taken_bytes is not None:  # the next one is looked for with as much less
            self._excess_bytes = max(self._excess_bytes, taken_bytes - planned.plan.peak_bytes)

    def wanted(self, gap: float) -> tuple[Point, Problem] | None:
        """For which sizes a better schedule would gain most; None where none gains more than `gap` of a step.

        What was found for some sizes is near what is best for sizes near them.
        """
        gains = [
            (extra_ms, point)
            for point, (extra_ms, whole_ms) in self._extra_ms.items()
            if extra_ms > max(gap, _WORTH) * whole_ms and not any(_are_near(point, other) for other in self._searched)
        ]
        if not gains or len(self._searched) >= _MOST_SCHEDULES:
            return None
        point = max(gains)[1]
        self._searched.append(point)
        return point, self._problem_at(point)

    def look_at_losses(self, members: Iterable[Measured]) -> None:
        """Take what steps of calls that were measured have shown of their losses."""
        for measured in members:
            point = self.family.point_of(measured.pattern)
            if measured.loss is not None and measured.loss.is_seen and point is not None:
                self.take_loss(point, measured.loss.peak_bytes)

    def wants_loss_at(self, point: Point) -> bool:
        """Whether a step of these sizes is to show what its loss takes: it was not seen at three sizes yet."""
        return len(self._losses) < LEAST_MEMBERS and point not in self._losses

    def take_loss(self, point: Point, peak_bytes: int) -> bool:
        """A step of these sizes has shown what its loss takes; whether plans are to be made anew for that.

        At three sizes, it took at most a share of what was assumed: so it does at others, but for what does not grow.
        Where it took more, and as much more at each size, it is the loss that does, and no accident.
        """
        self._losses[point] = peak_bytes
        if len(self._losses) != LEAST_MEMBERS:
            return False
        assumed = {known: self.family.problem_at(known).backward[0] for known in self._losses}
        if any(op.name != LOSS or not op.peak_bytes for op in assumed.values()):
            return False
        shares = [seen_bytes / assumed[known].peak_bytes for known, seen_bytes in self._losses.items()]
        is_less = max(shares) < _WORTH_OF_LOSS
        is_more = min(shares) > 1 and max(shares) <= (1 + _SAME_SHARE) * min(shares)
        if not is_less and not is_more:
            return False
        self._loss = max(shares), min(self._losses.values()) if is_less else 0
        self._searched.clear()
        self._extra_ms.clear()
        self._too_large.clear()
        self._in_vain.clear()
        return True

    def _problem_at(self, point: Point) -> Problem:
        """The step of a call of these sizes, with what steps have shown of its loss. Raises `NotWhole`."""
        problem = self.family.problem_at(point)
        if self._loss is None:
            return problem
        (share, least_bytes), loss = self._loss, problem.backward[0]
        peak_bytes = math.ceil(share * loss.peak_bytes) + least_bytes
        if share <= 1:
            peak_bytes = min(peak_bytes, loss.peak_bytes)
        loss = replace(loss, peak_bytes=max(peak_bytes, loss.resident_bytes))
        return replace(problem, backward=(loss, *problem.backward[1:]))

    def take(self, point: Point, solution: Solution, budget_bytes: int) -> bool:
        """Whether what was found for these sizes is better there than all that is known; from now on it is known."""
        if not solution.status.fits:
            return False
        problem, decisions = self._problem_at(point), PortablePlan.of(solution.schedule, solution.solver)
        known = self._best(point, problem, budget_bytes)
        found = self._cost(decisions, problem, budget_bytes)
        if known is not None and found.worst_ms > (1 - _WORTH) * known.worst_ms:
            return False
        self._add(decisions)
        return True

    def best_ms(self, pattern: CallPattern, budget_bytes: int) -> float | None:
        """What a step of such a call takes by the quickest schedule; None where it has none."""
        point = self.family.point_of(pattern)
        best = None if point is None else self._best(point, self._problem_at(point), budget_bytes)
        return None if best is None else best.time_ms

    def _best(self, point: Point, problem: Problem, budget_bytes: int, keep_all: _Cost | None = None) -> _Cost | None:
        """The quickest of the schedules that are there, of those that fit.

        One that leaves no room is the last choice, unless a step of it ran: its first would have to be measured.
        """
        best: _Cost | None = None
        last_choice: _Cost | None = None
        for decisions in sorted(self._usable(), key=lambda one: self._least_ms(one, problem)):
            if best is not None and best.worst_ms <= self._least_ms(decisions, problem):
                break
            over = self._too_large.get((decisions, budget_bytes))
            if over is not None and all(map(operator.ge, point, over)):
                continue  # larger calls take more, as a rule; what it is for is to choose quickly
            cost = (keep_all if decisions == KEEP_ALL else None) or self._cost(decisions, problem, budget_bytes)
            if cost.peak_bytes > budget_bytes or not cost.has_room:
                if over is None or all(map(operator.le, point, over)):
                    self._too_large[decisions, budget_bytes] = point
            elif cost.peak_bytes + room_of(budget_bytes) <= budget_bytes or decisions in self._ran:
                best = cost if best is None else min(best, cost, key=lambda one: one.worst_ms)
            else:
                last_choice = last_choice or cost
        return best or last_choice

    def _usable(self) -> list[PortablePlan]:
        """Those of the schedules that have somewhere to move to what they move."""
        return [one for one in self._schedules if not one.moves or self._memory is not None]

    def _cost(self, decisions: PortablePlan, problem: Problem, budget_bytes: int) -> _Cost:
        if not decisions.moves or self._memory is None:
            return _Cost(decisions, *peak_and_time(problem, self._recompute(decisions)))
        allowed_bytes = budget_bytes - room_of(budget_bytes)
        schedule, costs = self._placed.best(decisions, problem, self._memory, allowed_bytes)
        if allowed_bytes < budget_bytes and not fits(costs, self._memory, allowed_bytes):
            schedule, costs = self._placed.best(decisions, problem, self._memory, budget_bytes)
        return _Cost(
            decisions,
            costs.peak_bytes,
            costs.time_ms,
            schedule,
            costs.waiting_ms,
            costs.stored_bytes,
            _LATE * problem.keep_all_time_ms,
            self._memory.has_room_for(costs.stored_bytes),
        )

    def _least_ms(self, decisions: PortablePlan, problem: Problem) -> float:
        """What it takes where no transfer is waited for."""
        return problem.keep_all_time_ms + recompute_time_ms(problem, self._recompute(decisions))

    def _recompute(self, decisions: PortablePlan) -> Recompute:
        """What a schedule recomputes, by place in the problem of any size."""
        if decisions not in self._recomputed:
            self._recomputed[decisions] = recompute_of(self.family.base.problem, dict(decisions.stages))
        return self._recomputed[decisions]

    def _found(self, point: Point, measured: Measured, request: PlanRequest, budget_bytes: int) -> _Cost | None:
        """A schedule for sizes for which none that is there fits."""
        if any(asked == budget_bytes and all(map(operator.ge, point, small)) for asked, small in self._in_vain):
            return None
        quick = replace(request, limits=hurried_limits(request.limits)) if is_wanted(request) else request
        most_bytes = budget_bytes - self._excess_bytes
        for allowed_bytes in dict.fromkeys((min(most_bytes, budget_bytes - room_of(budget_bytes)), most_bytes)):
            solution: Solution = solver_for(quick, measured).solve(measured.problem, allowed_bytes)
            if solution.status.fits:
                break
        else:
            self._in_vain.append((budget_bytes, point))
            return None
        decisions = PortablePlan.of(solution.schedule, solution.solver)
        self._add(decisions)
        return self._cost(decisions, measured.problem, budget_bytes)

    def _least(self, problem: Problem, budget_bytes: int) -> _Cost | None:
        """The schedule of lowest peak, where one would fit but for a loss that takes more than is assumed of one."""
        if self._loss is None or self._loss[0] <= 1:
            return None
        costs = (self._cost(one, problem, budget_bytes) for one in self._usable())
        least = min((cost for cost in costs if cost.has_room), key=lambda cost: cost.peak_bytes)
        beyond_bytes = math.ceil((1 - 1 / self._loss[0]) * problem.backward[0].peak_bytes)
        return least if least.peak_bytes - beyond_bytes <= budget_bytes else None

    def _add(self, decisions: PortablePlan) -> None:
        others = [one for one in self._schedules if one not in (decisions, KEEP_ALL)]
        self._schedules = [KEEP_ALL, *others[-_MOST_SCHEDULES:], decisions]

    def _sized_for(self, cost: _Cost) -> SizedPlan:
        key = cost.decisions, cost.schedule
        if key not in self._sized:
            # No schedule is believed unchecked; its rules are those of all sizes.
            base = self.family.base.problem
            schedule = cost.schedule or cost.decisions.schedule_for(base)
            check(base, schedule, None, self._memory)
            self._sized[key] = SizedPlan(self.family, cost.decisions, schedule)
        return self._sized[key]


def _slower_eager(base: Measured) -> float:
    """How much longer an eager step takes than a plan's that repeats nothing, as it was measured."""
    keep_all_ms = base.problem.keep_all_time_ms
    return base.eager_time_ms / keep_all_ms if keep_all_ms > 0 else 1.0


def room_of(budget_bytes: int) -> int:
    """What a schedule is to leave of the budget, so that no step of it need be measured: a thousandth, if that is far
    more than predictions are ever short by. 0 where it is not."""
    room_bytes = budget_bytes // 1000
    return room_bytes if room_bytes >= _LEAST_ROOM_BYTES else 0


def _are_near(point: Point, other: Point) -> bool:
    return all(abs(mine - theirs) <= _NEAR * max(mine, theirs) for mine, theirs in zip(point, other, strict=True))
