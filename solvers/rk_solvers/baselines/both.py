"""The plans of the baselines that the other solvers start from."""

from __future__ import annotations

from rk_solvers.baselines.chen import chen_plans
from rk_solvers.baselines.keep_none import keep_none_plan
from rk_solvers.problem import Chain, Problem, Recompute

LARGE = 2000  # forward operations above which fewer of Chen's plans are made: one takes some tenths of a second


def baseline_plans(problem: Problem, chain: Chain | None = None) -> list[Recompute]:
    """Chen's plans, and keep-none where it is short (its length grows with the square of the problem's)."""
    plans = chen_plans(problem, chain, max_tries=12 if len(problem.forward) <= LARGE else 4)
    if len(problem.forward) * len(problem.backward) <= 10_000:
        plans.append(keep_none_plan(problem))
    return plans
