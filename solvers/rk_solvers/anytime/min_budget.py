"""The smallest budget: the lowest peak that a search reaches, and what is proven of it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rk_solvers.bounds.peak_bound import peak_bound_bytes
from rk_solvers.exact.checkmate import PROVEN, build
from rk_solvers.groups import normalise
from rk_solvers.limits import Limits
from rk_solvers.liveness import evaluate, least_bytes, peak_and_time, schedule_of
from rk_solvers.local.min_peak_search import min_peak_plan
from rk_solvers.milp import BackendLimits, Outcome, solve
from rk_solvers.problem import Chain, Problem, Recompute
from rk_solvers.schedule import Schedule
from rk_solvers.side_process import SideProcess

# The exact program is solved for a nearer bound, and where it is small for a lower peak, too:
EXACT = (
    # operations of the forward times the backward's at most, part of the peak that is near enough, share of the seconds
    (4_000, 0.998, 0.5),
    (25_000, 0.98, 1.0),
)


@dataclass(frozen=True, slots=True)
class SmallestBudget:
    """The lowest peak that the solvers can reach."""

    budget_bytes: int
    binding_op: str  # operation of that peak, such as "backward linear_3"
    schedule: Schedule  # of that peak
    proven_bytes: int  # no plan's peak is lower (see `bounds.peak_bound`)


def smallest_budget(
    problem: Problem, chain: Chain | None = None, time_limit_s: float | None = None, limits: Limits | None = None
) -> SmallestBudget:
    """The lowest peak, in bytes, that any solver can reach, and where it occurs.

    After `time_limit_s` seconds (else `limits.search_s`) the lowest peak found so far counts; what is proven of it
    takes `limits.proof_s` and `limits.least_peak_s` more. No program is solved for that where rounds end a search. The
    plans that the search starts from, keep-all and those of the baselines, are always made.
    Raises `ValueError` if `chain` is not one of the problem.
    """
    limits = (limits or Limits()).within(time_limit_s)
    plan = min_peak_plan(problem, [], chain, time.monotonic() + limits.search_s)
    peak_bytes = peak_and_time(problem, plan)[0]
    proven_bytes = peak_bound_bytes(problem, peak_bytes, limits.proof_s)
    size = len(problem.forward) * len(problem.backward)
    shares = [share for most, near, share in EXACT if size <= most and proven_bytes < near * peak_bytes]
    if shares and limits.rounds is None and limits.least_peak_s > 0:
        limit_s = shares[0] * limits.least_peak_s
        with SideProcess() as process:  # whose back end prints, and cannot be interrupted
            process.start(2 * limit_s, exact_min_peak, problem, limit_s)
            exact, bound_bytes = process.wait((None, 0))
        proven_bytes = max(proven_bytes, bound_bytes)
        if exact is not None:
            plan = min([plan, normalise(problem, exact)], key=lambda one: peak_and_time(problem, one))
    result = evaluate(problem, plan)
    proven_bytes = min(proven_bytes, result.peak_bytes)
    return SmallestBudget(result.peak_bytes, result.peak_at, schedule_of(problem, plan), proven_bytes)


def exact_min_peak(problem: Problem, time_limit_s: float) -> tuple[Recompute | None, int]:
    """The plan of least peak, or None where that is not proven in time, and bytes that no plan is below."""
    program = build(problem, None)
    result = solve(program.model, "scipy", BackendLimits(time_limit_s))
    plan = program.plan(result.values) if result.outcome is Outcome.OPTIMAL and result.values is not None else None
    bound_bytes = int(result.bound * (1 - PROVEN)) if result.bound > 0 else 0
    return plan, max(bound_bytes, least_bytes(problem))
