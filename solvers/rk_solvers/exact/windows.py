"""Improve a plan exactly where it costs most: one window of stages at a time, all else as it is, or less.

A plan that local search cannot improve may still be far from the best, as a better one would recompute other operations
at several stages at once. The exact program of `checkmate` finds that, if it has few stages to choose for: in a window
of them it may recompute whatever the window needs or recomputes already; elsewhere it may only leave out. This is the
large-neighbourhood search of `local_search` with neighbourhoods that are solved, not repaired. With whole windows of
a time axis it is known from scheduling: Y. Pochet, L. Wolsey, "Production planning by mixed integer programming",
Springer 2006, chapter 3 (exchange heuristics).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rk_solvers.exact.checkmate import Program, build, require_faster
from rk_solvers.groups import serving
from rk_solvers.liveness import stage_times_ms
from rk_solvers.problem import Problem, Recompute

MOST_BINARIES = 1500  # of the plan's own recomputations: a larger program takes too long
SIZES = (300, 100)  # binaries of a window beyond those: solved in some seconds, and in some tenths of one
LONGEST = 24  # stages
WORTH = 2e-4  # of the step's time: what a window must cost to be looked at

Place = tuple[int, int, Recompute]  # the stage in the middle, a size, and the plan near that


@dataclass(slots=True)
class ExactWindows:
    """The windows of a problem that have been looked at."""

    problem: Problem
    budget_bytes: int
    tried: set[tuple[range, Recompute]] = field(default_factory=set)  # each with the plan in it and near it
    _around: dict[Place, range] = field(default_factory=dict)

    def next(self, plan: Recompute) -> Program | None:
        """The program of a window that has not been looked at with this plan: the costliest one; None at the end."""
        if sum(map(len, plan)) > MOST_BINARIES:
            return None
        problem = self.problem
        costs = stage_times_ms(problem, plan)
        least_ms = WORTH * problem.keep_all_time_ms
        for stage in sorted(range(len(plan)), key=lambda stage: (-costs[stage], stage)):
            if not costs[stage]:
                break
            for size in SIZES:
                window = self._window(stage, plan, size)
                near = (window, _near(window, plan))
                if near not in self.tried and sum(costs[stage] for stage in window) >= least_ms:
                    self.tried.add(near)
                    return self._program(window, plan)
        return None

    def _window(self, stage: int, plan: Recompute, size: int) -> range:
        """The widest window with this stage in its middle that has no more binaries of its own."""
        window = range(stage, stage + 1)
        place = (stage, size, _near(window, plan))
        if place in self._around:
            return self._around[place]
        while len(window) < LONGEST:
            wider = range(max(0, window.start - 1), min(len(plan), window.stop + 1))
            allowed = self._allowed(wider, plan)
            if wider == window or sum(len(allowed[s] - set(plan[s])) for s in wider) > size:
                break
            window = wider
        self._around[place] = window
        return window

    def _allowed(self, window: range, plan: Recompute) -> list[set[int]]:
        """By stage, what may be recomputed before it."""
        problem = self.problem
        allowed = [set(group) for group in plan]
        needs = {item for stage in window for item in problem.backward[stage].needs}
        near = {problem.data[item].producer for item in needs}.union(*(plan[stage] for stage in window))
        near = {index for index in near if problem.forward[index].recomputable}
        for stage in window:
            allowed[stage] = serving(problem, near, stage)
        return allowed

    def _program(self, window: range, plan: Recompute) -> Program:
        program = build(self.problem, self.budget_bytes, allowed=self._allowed(window, plan))
        require_faster(program, plan, gap=0.0)
        return program


def _near(window: range, plan: Recompute) -> Recompute:
    """The plan in a window and near it."""
    return plan[max(0, window.start - LONGEST) : window.stop + LONGEST]
