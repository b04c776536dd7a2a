"""The best of all solvers: the default choice."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from rk_solvers.anytime.min_budget import smallest_budget
from rk_solvers.anytime.search import Search
from rk_solvers.bounds.peak_bound import is_infeasible
from rk_solvers.exact.checkmate import Checkmate
from rk_solvers.groups import serving
from rk_solvers.limits import Limits
from rk_solvers.liveness import peak_and_time
from rk_solvers.local.min_peak_search import min_peak_plan
from rk_solvers.problem import Chain, Problem
from rk_solvers.side_process import SideProcess
from rk_solvers.solver import SAME, Solution, Solver, solution_of

LOWEST_S = 1.0  # for any plan that fits, where the search has found none in its time
EXACT = 400  # binaries of a problem that the exact program solves in about a second


def _silent(_: str) -> None:
    """Nobody asked to be told."""


@dataclass(frozen=True, slots=True)
class Auto(Solver):
    """Keep-all where it fits, the exact program where it is small, else a search with a proven gap (see `search`).

    Anytime: Ctrl-C ends the search with the best plan so far, once there is one that fits. Deterministic as long as the
    search ends by its gap or its rounds and not by its time limit.
    """

    chain: Chain | None = None
    seed: int = 0
    tries: int = 6  # of greedy
    rounds: int = 120  # of local search, on each plan
    time_limit_s: float = 30.0
    extra_s: float = 0.0  # beyond it, for as long as a plan may be much faster than the best one (`search.FAR`)
    gap: float = 0.01  # enough: no plan is faster by more than this share of the step's time
    progress: Callable[[str], None] | None = None  # called with a line for each better plan or bound
    limits: Limits | None = None  # in one record, in place of seed, time_limit_s, extra_s and gap

    @property
    def name(self) -> str:
        """Short name shown in solutions."""
        return "auto"

    def solve(self, problem: Problem, budget_bytes: int) -> Solution:
        """The fastest schedule found within `budget_bytes`, or the one of lowest peak."""
        if peak_and_time(problem, problem.no_recompute)[0] <= budget_bytes:
            return solution_of(problem, budget_bytes, problem.no_recompute, "keep-all", optimal=True)
        limits, tell = self._limits(), self.progress or _silent
        with SideProcess() as process, SideProcess() as aside:
            search = Search(problem, budget_bytes, self.chain, limits, tell, process, aside, self.tries, self.rounds)
            try:
                if is_infeasible(problem, budget_bytes, limits.proof_s):
                    search.bound_ms = float("inf")
                else:
                    self._search(search)
            except KeyboardInterrupt:
                if not search.plans:
                    raise
                search.say("interrupted: the best plan so far is kept")
                return replace(self._solution(search), interrupted=True)
        return self._solution(search)

    def _limits(self) -> Limits:
        if self.limits is not None:
            return self.limits
        return Limits(search_s=self.time_limit_s, extra_s=self.extra_s, gap=self.gap, seed=self.seed)

    def _search(self, search: Search) -> None:
        if search.limits.rounds is not None:
            search.run_rounds(search.limits.rounds)
            return
        if _is_small(search.problem):
            search.work(2)
            limit = min(search.first_deadline, time.monotonic() + 0.3 * search.limits.search_s)
            exact = Checkmate().least_time(search.problem, search.budget_bytes, limit)
            if exact.recompute is not None:
                search.add("checkmate", exact.recompute)
            if exact.proven:
                search.prove(search.plans[0].time_ms if search.plans else float("inf"))
        else:
            search.process.prepare()
        if not search.done():
            search.run()

    def _solution(self, search: Search) -> Solution:
        problem, budget_bytes = search.problem, search.budget_bytes
        if not search.plans and search.bound_ms < float("inf"):
            self._add_lowest(search)
        if search.plans:
            best = search.plans[0]
            optimal = search.gap <= SAME
            solution = solution_of(problem, budget_bytes, best.recompute, best.solver, optimal=optimal)
            ended = search.gap > search.enough and time.monotonic() >= search.deadline
            return replace(solution, lower_bound_ms=min(search.bound_ms, best.time_ms), out_of_time=ended)
        # In time of its own, whatever the search took: the smallest budget that a refusal names was found like this,
        # and must be met when it is asked for.
        smallest = smallest_budget(problem, self.chain, limits=search.limits)
        solution = solution_of(problem, budget_bytes, smallest.schedule, self.name)
        proven_bytes = None if solution.status.fits else smallest.proven_bytes
        return replace(solution, lower_bound_ms=search.bound_ms, proven_bytes=proven_bytes)

    def _add_lowest(self, search: Search) -> None:
        """Take note of the plan of lowest peak that a short while finds, made quicker, if it fits."""
        search.deadline = max(search.deadline, time.monotonic() + LOWEST_S)
        problem, budget_bytes = search.problem, search.budget_bytes
        lowest = min_peak_plan(problem, search.others, self.chain, search.deadline, budget_bytes)
        if peak_and_time(problem, lowest)[0] <= budget_bytes:
            search.add_repaired("smallest", lowest)


def _is_small(problem: Problem) -> bool:
    """Whether the exact program is small enough to be the first choice."""
    if len(problem.forward) * len(problem.backward) > 10 * EXACT:
        return False
    free = {index for index, op in enumerate(problem.forward) if op.recomputable}
    return sum(len(serving(problem, free, stage)) for stage in range(len(problem.backward))) <= EXACT
