"""Greedy eviction over the whole graph, then local search: the quick solver for problems of any shape.

A try starts from keep-all and repairs it (`repair`), drops redundant recomputations, and is improved by
destroying and repairing parts of the plan (`local_search`). Several tries differ by their ranking weights.

Complexity: a repair evaluates some thousands of edits, each linear in the number of instances it changes
times the length of the ranges of the memory curve it touches. Known gaps: no bound on the distance to the
optimum; the result depends on the machine's speed where the time limit, not the number of rounds, ends the
search.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

from rk_solvers.baselines.both import baseline_plans
from rk_solvers.groups import normalise
from rk_solvers.liveness import Plan, PlanState, Tables, peak_and_time, recompute_of, schedule_of
from rk_solvers.local.local_search import improve, polish, weights_for
from rk_solvers.local.min_peak_search import min_peak_plan
from rk_solvers.local.repair import repair
from rk_solvers.problem import Problem, Recompute
from rk_solvers.schedule import Schedule
from rk_solvers.solver import Solution, Solver, best_plan, solution_of


@dataclass(frozen=True, slots=True)
class Greedy(Solver):
    """Eviction by recomputation cost per byte taken off the excess, then local search."""

    seed: int = 0
    tries: int = 6  # plans built, at least two: from keep-all and from the best baseline
    rounds: int = 120  # destroy-and-repair rounds on the best of them
    time_limit_s: float = 20.0  # checked between rounds; a first plan is always built

    @property
    def name(self) -> str:
        """Short name shown in solutions."""
        return "greedy"

    def solve(self, problem: Problem, budget_bytes: int) -> Solution:
        """A fast schedule within `budget_bytes`, or the one of lowest peak known."""
        return solution_of(problem, budget_bytes, self.plan(problem, budget_bytes), self.name)

    def plan(self, problem: Problem, budget_bytes: int) -> Recompute:
        """What that schedule recomputes."""
        if peak_and_time(problem, problem.no_recompute)[0] <= budget_bytes:
            return problem.no_recompute
        plans = self.plans(problem, budget_bytes, time.monotonic() + self.time_limit_s)
        return best_plan(problem, budget_bytes, [(self.name, plan) for plan in plans])[1]

    def plans(self, problem: Problem, budget_bytes: int, deadline: float) -> list[Recompute]:
        """Candidate plans, the improved one first; they may exceed the budget."""
        tables = Tables(problem)
        best: PlanState | None = None
        failed: list[Recompute] = []
        for state in attempts(tables, budget_bytes, baseline_plans(problem), self.seed, self.tries, deadline):
            if state.peak_bytes > budget_bytes:
                failed.append(state.recompute())
            elif best is None or state.time_ms < best.time_ms:
                best = state
        if best is None:
            start = min_peak_plan(problem, failed, None, deadline, budget_bytes)
            best = PlanState(tables, start)
            if best.peak_bytes > budget_bytes:
                return [start]
            polish(best, budget_bytes, deadline)
        improve(best, budget_bytes, self.rounds, deadline, random.Random(self.seed))
        return [best.recompute()]


def attempts(
    tables: Tables, budget_bytes: int, baselines: list[Recompute], seed: int, tries: int, deadline: float
) -> Iterator[PlanState]:
    """At least two plans, which may exceed the budget: from keep-all, from the best baseline, then with random weights.

    The later ones are left out once `deadline` (`time.monotonic`) has passed.
    """
    rng = random.Random(seed)
    best = best_plan(tables.problem, budget_bytes, [("", plan) for plan in baselines])[1]
    for number in range(max(2, tries)):
        if number > 1 and time.monotonic() >= deadline:
            return
        state = PlanState(tables, best if number == 1 else None)
        exponent, spread = (1.0, 0.0) if number < 2 else (rng.uniform(0.6, 1.2), rng.choice([0.1, 0.3]))
        if repair(state, budget_bytes, weights_for(state, rng, exponent, spread), deadline):
            polish(state, budget_bytes, deadline)
        yield state


def improve_plan(
    problem: Problem, budget_bytes: int, given: Plan, *, seed: int = 0, rounds: int = 120,
    time_limit_s: float = 20.0,
) -> Schedule:  # fmt: skip
    """A plan at least as fast as `given`, found near it; `given` itself if it exceeds the budget."""
    plan = normalise(problem, recompute_of(problem, given))
    state = PlanState(Tables(problem), plan)
    if state.peak_bytes > budget_bytes:
        return schedule_of(problem, given)
    deadline = time.monotonic() + time_limit_s
    polish(state, budget_bytes, deadline)
    improve(state, budget_bytes, rounds, deadline, random.Random(seed))
    better = normalise(problem, state.recompute())
    old, new = peak_and_time(problem, plan), peak_and_time(problem, better)
    return schedule_of(problem, better if new[0] <= budget_bytes and new[1] <= old[1] else plan)
