"""A lower bound on the time of every plan that fits a budget."""

from __future__ import annotations

import math
import time

from rk_solvers.bounds.chain_bound import chain_bound_ms
from rk_solvers.bounds.narrowing import Narrowing
from rk_solvers.bounds.peak_bound import is_infeasible
from rk_solvers.bounds.refinement import Refinement, Target
from rk_solvers.limits import Limits
from rk_solvers.liveness import Plan, peak_and_time, recompute_of
from rk_solvers.problem import Chain, Problem

COARSE = 2  # groupings, of which the linear program is solved, before others are for small budgets
SHORTEST_S = 1.0  # of a round
ROUNDING = 1e-6  # of a plan's time, by which its bound may be below it


def lower_bound_ms(
    problem: Problem,
    budget_bytes: int,
    chain: Chain | None = None,
    time_limit_s: float = 12.0,
    integer: bool = False,
    plan: Plan | None = None,
) -> float:
    """A proven lower bound, in milliseconds, on the time of every plan whose peak is at most `budget_bytes`.

    Infinite if none fits; that of keep-all if it fits. The bound is that of `chain_bound`, or that of a relaxation in a
    few coarse groups of stages (see `refinement`): of its linear program, or, with `integer`, of its integer program,
    which is tighter, and of what is for small budgets (see `narrowing`), until the time limit. The groups may begin
    where blocks of `chain` do. `plan`, a good one for this budget, helps to place them, and a bound of its time is
    enough. Raises `ValueError` if `chain` is not one of the problem.
    """
    if chain is not None:
        chain.check(problem)
    if peak_and_time(problem, problem.no_recompute)[0] <= budget_bytes:
        return problem.keep_all_time_ms
    if not problem.backward or is_infeasible(problem, budget_bytes, Limits().proof_s):
        return math.inf
    deadline = time.monotonic() + time_limit_s
    incumbent = problem.no_recompute if plan is None else recompute_of(problem, plan)
    enough_ms = math.inf if plan is None else peak_and_time(problem, incumbent)[1] * (1 - ROUNDING)
    coarse = Refinement(problem, budget_bytes, chain, bound_ms=chain_bound_ms(problem, budget_bytes))
    while coarse.bound_ms < enough_ms and time.monotonic() < deadline and coarse.rounds < COARSE:
        target = Target(enough_ms, deadline - time.monotonic(), integer=False)
        before, coarse = coarse, coarse.advanced(incumbent, target)
        if coarse is before:
            break
    if not integer:
        return coarse.bound_ms
    narrow = Narrowing.of(coarse)
    while narrow.bound_ms < enough_ms and time.monotonic() < deadline:
        limit_s = max(SHORTEST_S, narrow.share(incumbent) * (deadline - time.monotonic()))
        last, narrow = narrow, narrow.advanced(incumbent, Target(enough_ms, limit_s))
        if narrow is last:
            break
    return narrow.bound_ms
