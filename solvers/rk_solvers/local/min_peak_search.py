"""A search for the plan of lowest peak.

Bisection between a bound that no plan can beat (what each operation holds at once) and the best plan known,
by greedy repair from keep-all and from that plan. Times do not matter here, and are left out: the same bytes give the
same plan, so that a budget named as the smallest is met again when the model is measured anew.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rk_solvers.baselines.both import baseline_plans
from rk_solvers.groups import normalise
from rk_solvers.liveness import Plan, PlanState, Tables, least_bytes, peak_and_time, recompute_of
from rk_solvers.local.local_search import polish, take_out, weights_for
from rk_solvers.local.repair import repair
from rk_solvers.problem import Chain, ForwardOp, Problem, Recompute

STEPS = 12  # of the bisection
SHAKES = 60  # attempts to get below it, at most
SHAKEN = 8000  # … times the operations of the forward, at most


def min_peak_plan(
    problem: Problem, plans: Sequence[Plan], chain: Chain | None, deadline: float, budget_bytes: int | None = None
) -> Recompute:
    """The plan of least peak found from the baselines by greedy repair; redundant recomputations dropped.

    A plan found from `plans` is returned instead if it fits `budget_bytes`, which the other does not. A lower peak that
    is still above the budget does not count: `plans` are made for one budget, so the search under a budget of that peak
    has others, and what is named as the smallest budget must be met by the solver that names it.

    The search ends when `time.monotonic` reaches `deadline`, with the best plan so far, also of `plans`.
    """
    best = problem.no_recompute
    for timeless in (_timeless(problem, by_bytes=True), _timeless(problem, by_bytes=False)):
        search = _Search(Tables(timeless), deadline)
        start = [problem.no_recompute, best, min(baseline_plans(timeless, chain), key=search.cost)]
        best = search.shaken(min([best, search.lowest(start)], key=search.cost))
        if search.cost(best)[0] == least_bytes(problem):
            break  # the other order finds none below it
    starts = [problem.no_recompute, best, *(normalise(problem, recompute_of(problem, plan)) for plan in plans)]
    if time.monotonic() >= deadline:
        return min(starts, key=search.cost)
    if budget_bytes is not None and search.cost(best)[0] > budget_bytes and plans:
        found = search.lowest(starts)
        return found if search.cost(found)[0] <= budget_bytes else best
    return best


def _timeless(problem: Problem, *, by_bytes: bool) -> Problem:
    """The same problem with times that nobody measured: by what an operation reads and writes, or all the same."""

    def time_ms(op: ForwardOp) -> float:
        moved_bytes = sum(problem.data[item].size_bytes for item in (*op.inputs, *op.outputs))
        return 1.0 + moved_bytes / (1 << 20) if by_bytes else 1.0

    forward = tuple(replace(op, time_ms=time_ms(op), repeat_ms=None) for op in problem.forward)
    return replace(problem, forward=forward, backward=tuple(replace(op, time_ms=1.0) for op in problem.backward))


@dataclass(slots=True)
class _Search:
    """Bisection for the least peak that repair reaches."""

    tables: Tables
    deadline: float
    costs: dict[Recompute, tuple[int, float]] = field(default_factory=dict)  # plans are compared again and again

    def cost(self, plan: Recompute) -> tuple[int, float]:
        """Peak and time of a plan."""
        if plan not in self.costs:
            self.costs[plan] = peak_and_time(self.tables.problem, plan)
        return self.costs[plan]

    def lowest(self, starts: list[Recompute]) -> Recompute:
        """The plan of least peak found from `starts` until the deadline."""
        best = min(starts, key=self.cost)
        high, low = self.cost(best)[0], least_bytes(self.tables.problem) - 1
        for step in range(STEPS):
            if high - low <= max(1, high // 500) or time.monotonic() >= self.deadline:
                break
            middle = (low + high) // 2 if step else low + 1  # the bound is often reached
            best = min([best, *_repaired(self.tables, [*starts, best], middle, self.deadline)], key=self.cost)
            reached = self.cost(best)[0]
            low = max(low, middle) if reached > middle else low
            high = reached
        rivals = [plan for plan in _repaired(self.tables, [*starts, best], high, self.deadline) if plan != best]
        return _shortened(self.tables, min([best, *rivals], key=self.cost), self.deadline)

    def shaken(self, plan: Recompute) -> Recompute:
        """`plan`, or one of lower peak: what is recomputed near some stage is dropped, and the rest repaired."""
        tables, rng = self.tables, random.Random(0)
        least = least_bytes(tables.problem)
        for _ in range(min(SHAKES, SHAKEN // max(1, tables.count)) if plan else 0):
            peak_bytes = self.cost(plan)[0]
            if peak_bytes - least <= peak_bytes // 500 or time.monotonic() >= self.deadline:
                break
            state = PlanState(tables, plan)
            middle, reach, share = rng.randrange(len(plan)), rng.choice([3, 10, 30, 100]), rng.choice([0.2, 0.5, 1.0])
            for key in state.recomputations():
                if (
                    abs(tables.split(key)[0] - middle) <= reach
                    and rng.random() < share
                    and state.has(*tables.split(key))
                ):
                    take_out(state, key)
            weights = weights_for(state, rng, rng.choice([0.0, 0.5, 1.0]), rng.choice([0.0, 0.5, 1.0]))
            repair(state, peak_bytes - 1 - rng.choice([0, peak_bytes // 500]), weights, self.deadline)
            plan = min([plan, normalise(tables.problem, state.recompute())], key=self.cost)
        return plan


def _repaired(tables: Tables, starts: list[Recompute], budget_bytes: int, deadline: float) -> list[Recompute]:
    """What repair makes of each of `starts` until the deadline, within `budget_bytes` or not."""
    rng = random.Random(0)
    plans: list[Recompute] = []
    for start in dict.fromkeys(starts):
        if time.monotonic() >= deadline:
            break
        state = PlanState(tables, start)
        repair(state, budget_bytes, weights_for(state, rng, 1.0, 0.0), deadline)
        plans.append(normalise(tables.problem, state.recompute()))
    return plans


def _shortened(tables: Tables, plan: Recompute, deadline: float) -> Recompute:
    """The plan without the recomputations that its peak can do without, as far as the deadline allows."""
    state = PlanState(tables, plan)
    polish(state, state.peak_bytes, deadline)
    shorter = normalise(tables.problem, state.recompute())
    return min(plan, shorter, key=lambda candidate: peak_and_time(tables.problem, candidate))
