"""The best of all solvers: the default choice."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from .baselines import baseline_plans
from .evaluate import peak_and_time
from .greedy import Greedy, improve_plan
from .problem import Chain, Problem, Recompute
from .rotor import Rotor
from .smallest import lowest_peak_plan
from .solver import Solution, Solver, best_solution, solution_of


@dataclass(frozen=True, slots=True)
class Auto(Solver):
    """Keep-all where it fits, else the best of greedy, the baselines and rotor (on `chain`), improved.

    Deterministic as long as the search ends by its rounds and not by its time limit.
    """

    chain: Chain | None = None
    seed: int = 0
    tries: int = 6  # of greedy
    rounds: int = 120  # of local search, on each of the starting plans
    time_limit_s: float = 30.0
    progress: Callable[[str], None] | None = None  # called with one line after each part

    @property
    def name(self) -> str:
        """Short name shown in solutions."""
        return "auto"

    def solve(self, problem: Problem, budget_bytes: int) -> Solution:
        """The fastest schedule found within `budget_bytes`, or the one of lowest peak."""
        if peak_and_time(problem, problem.no_recompute)[0] <= budget_bytes:
            return solution_of(problem, budget_bytes, problem.no_recompute, "keep-all")
        start = time.monotonic()
        deadline = start + self.time_limit_s
        plans: list[tuple[str, Recompute]] = []
        greedy = Greedy(self.seed, self.tries, self.rounds)
        plans += [("greedy", plan) for plan in greedy.plans(problem, budget_bytes, start + self.time_limit_s / 2)]
        self._report(problem, budget_bytes, plans)
        if self.chain is not None:
            table = Rotor(self.chain).prepare(problem, max(budget_bytes, 0))
            found = table.solve(budget_bytes)
            plans.append(("rotor", found.recompute))
            if found.status.fits:
                plans.append(("rotor", self._improved(problem, budget_bytes, found.recompute, deadline)))
            self._report(problem, budget_bytes, plans)
        plans += [("baseline", plan) for plan in baseline_plans(problem, self.chain)]
        best = best_solution(problem, budget_bytes, plans)
        if best.status.fits and best.solver == "baseline":
            plan = self._improved(problem, budget_bytes, best.recompute, deadline)
            best = solution_of(problem, budget_bytes, plan, best.solver)
        if not best.status.fits:
            plan = lowest_peak_plan(problem, [best.recompute], self.chain, deadline)
            best = solution_of(problem, budget_bytes, plan, best.solver)
        return best

    def _improved(self, problem: Problem, budget_bytes: int, plan: Recompute, deadline: float) -> Recompute:
        left_s = max(0.0, deadline - time.monotonic())
        return improve_plan(problem, budget_bytes, plan, seed=self.seed, rounds=self.rounds, time_limit_s=left_s)

    def _report(self, problem: Problem, budget_bytes: int, plans: list[tuple[str, Recompute]]) -> None:
        if self.progress is not None and plans:
            self.progress(str(best_solution(problem, budget_bytes, plans)))
