"""The smallest budget: a search for the plan of lowest peak.

Bisection between a bound that no plan can beat (what each operation holds at once) and the best plan known,
by greedy repair from keep-all and from that plan. The result is the lowest peak that the solvers know how to
reach, not a proof.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

from .baselines import baseline_plans
from .evaluate import evaluate, normalise, peak_and_time
from .local_search import polish, weights_for
from .plan_state import PlanState, Tables
from .problem import Chain, Problem, Recompute
from .repair import repair

STEPS = 12  # of the bisection


@dataclass(frozen=True, slots=True)
class SmallestBudget:
    """The lowest peak that the solvers can reach."""

    budget_bytes: int
    binding_op: str  # operation of that peak, such as "backward linear_3"
    recompute: Recompute  # a plan with that peak


def smallest_budget(problem: Problem, chain: Chain | None = None, time_limit_s: float = 10.0) -> SmallestBudget:
    """The lowest peak, in bytes, that any solver can reach, and where it occurs.

    After `time_limit_s` seconds the lowest peak found so far counts. The plans that the search starts from, keep-all
    and those of the baselines, are always made. Raises `ValueError` if `chain` is not one of the problem.
    """
    plan = lowest_peak_plan(problem, [], chain, time.monotonic() + time_limit_s)
    result = evaluate(problem, plan)
    return SmallestBudget(result.peak_bytes, result.peak_at, plan)


def least_bytes(problem: Problem) -> int:
    """A bound that no schedule can be below: what one operation holds at once."""
    size = [item.size_bytes for item in problem.data]
    held = sum(size[item] for item in problem.held)
    least = problem.base_bytes
    for index, op in enumerate(problem.forward):
        items = {
            *op.inputs,
            *op.outputs,
            *(item for item in problem.held if problem.data[item].producer <= index),
        }
        least = max(least, problem.base_bytes + op.workspace_bytes + sum(size[item] for item in items))
    for backward in problem.backward:
        free = sum(size[item] for item in backward.needs if item not in problem.held)
        least = max(least, problem.base_bytes + held + free + backward.peak_bytes)
    return least


def lowest_peak_plan(
    problem: Problem, plans: list[Recompute], chain: Chain | None, deadline: float, budget_bytes: int | None = None
) -> Recompute:
    """The plan of least peak found from the baselines by greedy repair; redundant recomputations dropped.

    A plan found from `plans` is returned instead if it fits `budget_bytes`, which the other does not. A lower peak that
    is still above the budget does not count: `plans` are made for one budget, so the search under a budget of that peak
    has others, and what is named as the smallest budget must be met by the solver that names it.

    The search ends when `time.monotonic` reaches `deadline`, with the best plan so far, also of `plans`.
    """
    search = _Search(Tables(problem), deadline)
    start = [problem.no_recompute, min(baseline_plans(problem, chain), key=search.cost)]
    lowest = search.lowest(start)
    starts = [*start, *(normalise(problem, plan) for plan in plans)]
    if time.monotonic() >= deadline:
        return min([lowest, *starts], key=search.cost)
    if budget_bytes is not None and search.cost(lowest)[0] > budget_bytes and plans:
        found = search.lowest(starts)
        return found if search.cost(found)[0] <= budget_bytes else lowest
    return lowest


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
