"""The smallest budget: a search for the plan of lowest peak.

Bisection between a bound that no plan can beat (what each operation holds at once) and the best plan known,
by greedy repair from keep-all and from that plan. The result is the lowest peak that the solvers know how to
reach, not a proof.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from .baselines import baseline_plans
from .evaluate import evaluate, normalise, peak_and_time
from .local_search import polish, weights_for
from .plan_state import PlanState, Tables
from .problem import Chain, Problem, Recompute
from .repair import repair


@dataclass(frozen=True, slots=True)
class SmallestBudget:
    """The lowest peak that the solvers can reach."""

    budget_bytes: int
    binding_op: str  # operation of that peak, such as "backward linear_3"
    recompute: Recompute  # a plan with that peak


def smallest_budget(problem: Problem, chain: Chain | None = None, time_limit_s: float = 10.0) -> SmallestBudget:
    """The lowest peak, in bytes, that any solver can reach, and where it occurs."""
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
    problem: Problem, plans: list[Recompute], chain: Chain | None, deadline: float, steps: int = 12
) -> Recompute:
    """The plan of least peak found from `plans`, the baselines and greedy repair; redundant ones dropped."""
    tables = Tables(problem)
    baseline = min(baseline_plans(problem, chain), key=lambda plan: peak_and_time(problem, plan))
    starts = [problem.no_recompute, baseline, *(normalise(problem, plan) for plan in plans)]
    best = min(starts, key=lambda plan: peak_and_time(problem, plan))
    high, low = peak_and_time(problem, best)[0], least_bytes(problem) - 1
    for step in range(steps):
        if high - low <= max(1, high // 500) or time.monotonic() >= deadline:
            break
        middle = (low + high) // 2 if step else low + 1  # the bound is often reached
        best = min([best, *_repaired(tables, [*starts, best], middle)], key=lambda p: peak_and_time(problem, p))
        reached = peak_and_time(problem, best)[0]
        low = max(low, middle) if reached > middle else low
        high = reached
    rivals = [best, *(plan for plan in _repaired(tables, [*starts, best], high) if plan != best)]
    best = min(rivals, key=lambda plan: peak_and_time(problem, plan))
    return _shortened(tables, best, deadline)


def _repaired(tables: Tables, starts: list[Recompute], budget_bytes: int) -> list[Recompute]:
    """What repair makes of each of `starts`, within `budget_bytes` or not."""
    rng = random.Random(0)
    plans: list[Recompute] = []
    for start in dict.fromkeys(starts):
        state = PlanState(tables, start)
        repair(state, budget_bytes, weights_for(state, rng, 1.0, 0.0))
        plans.append(normalise(tables.problem, state.recompute()))
    return plans


def _shortened(tables: Tables, plan: Recompute, deadline: float) -> Recompute:
    """The plan without the recomputations that its peak can do without."""
    state = PlanState(tables, plan)
    polish(state, state.peak_bytes, deadline)
    shorter = normalise(tables.problem, state.recompute())
    return min(plan, shorter, key=lambda candidate: peak_and_time(tables.problem, candidate))
