"""Any solver of recomputations, with a second memory beside: what it finds alone, or a faster plan that moves data.

A proof of the solver's is of plans that move nothing. None is handed on, and no budget is called too small for all.
The bound on the time of all plans (`bound.lower_bound_with_moves_ms`) is computed in a process aside while moves are
looked for, where seconds for it are given.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from rk_solvers.links import SecondMemory
from rk_solvers.liveness import binding, op_of, recompute_of
from rk_solvers.problem import Chain, Problem
from rk_solvers.side_process import SideProcess
from rk_solvers.solver import Solution, Solver, Status
from rk_solvers.transfers.bound import lower_bound_with_moves_ms
from rk_solvers.transfers.moves import Base, Move
from rk_solvers.transfers.search import Moved, MoveSearch

NAME = "moves"  # what found the transfers, after the name of what found the recomputations
_START_S = 4.0  # for a process to begin, beside a search
_MORE_S = 2.0  # that a search, once it is over, waits for the bound
_BESIDE = 0.5  # of the bound's seconds: a search that is shorter has none beside it


@dataclass(frozen=True, slots=True)
class WithMoves(Solver):
    """`alone` solves first, with all the time that it takes; then plans that move data are looked for.

    `quick` gives a solver of recomputations that takes at most so many seconds: it is asked several times. `thorough`,
    if any, is asked in the place of `alone` where nothing was found within the budget: how little would do.
    """

    alone: Solver
    quick: Callable[[float], Solver]
    memory: SecondMemory
    chain: Chain | None = None
    time_limit_s: float = 15.0  # of the search for moves
    seed: int = 0
    thorough: Solver | None = None
    bound_s: float = 0.0  # for the bound, beside a search that is not much shorter

    @property
    def name(self) -> str:
        """Short name shown in solutions."""
        return f"{self.alone.name}+{NAME}"

    def solve(self, problem: Problem, budget_bytes: int) -> Solution:
        """Never slower, by prediction, than what `alone` finds; see the module for what is proven: nothing."""
        started = time.monotonic()
        alone = self._without_proof(problem, self.alone.solve(problem, budget_bytes))
        if alone.status.fits and not alone.schedule.recomputations:
            return alone
        found, bound_ms = None, None
        if budget_bytes >= binding(problem)[1]:
            search = MoveSearch(
                problem,
                self.memory,
                self.quick,
                self.chain,
                time_limit_s=self.time_limit_s,
                seed=self.seed,
                over_the_turn=True,
            )
            if self.bound_s and self.time_limit_s >= _BESIDE * self.bound_s:
                found, bound_ms = self._with_bound(search, problem, budget_bytes)
            else:
                found = search.solve(budget_bytes)
        if found is None:
            if alone.status.fits:
                return replace(alone, lower_bound_ms=bound_ms)
            if self.thorough is not None:
                alone = self._without_proof(problem, self.thorough.solve(problem, budget_bytes))
            return alone if alone.status.fits else self._smallest(problem, alone)
        if alone.status.fits and alone.time_ms <= found.costs.time_ms:
            return replace(alone, lower_bound_ms=bound_ms)
        return Solution(
            Status.FEASIBLE,
            found.schedule,
            found.costs.time_ms,
            found.costs.peak_bytes,
            self.name if found.moves else self.alone.name,
            interrupted=alone.interrupted,
            out_of_time=time.monotonic() - started >= self.time_limit_s,
            lower_bound_ms=bound_ms,
            stored_bytes=found.costs.stored_bytes,
            memory=self.memory if found.moves else None,
            alone=alone if found.moves else None,
        )

    def _with_bound(self, search: MoveSearch, problem: Problem, budget_bytes: int) -> tuple[Moved | None, float | None]:
        """What is found, and the bound if it is there not long after."""
        with SideProcess() as aside:
            arguments = problem, budget_bytes, self.memory, self.bound_s, self.chain, False
            aside.start(self.bound_s + _START_S, lower_bound_with_moves_ms, *arguments)
            found = search.solve(budget_bytes)
            until = time.monotonic() + _MORE_S
            while not aside.answered() and time.monotonic() < until:
                time.sleep(0.02)
            return found, aside.wait(None) if aside.answered() else None

    def _without_proof(self, problem: Problem, solution: Solution) -> Solution:
        """What is proven of plans that move nothing says little of others."""
        if not solution.status.fits:
            return replace(solution, proven_bytes=None, lower_bound_ms=None)
        if not solution.schedule.recomputations:
            return solution
        return replace(solution, status=Status.FEASIBLE, lower_bound_ms=None)

    def _smallest(self, problem: Problem, alone: Solution) -> Solution:
        """Where nothing fits: the least that is known to be enough, with all away that can be."""
        best = alone
        for plan in dict.fromkeys([recompute_of(problem, alone.schedule), problem.no_recompute]):
            base = Base(problem, plan, self.memory, over_the_turn=True)
            moves = [Move(gap, gap.before, gap.after) for gap in base.gaps]
            costs = base.costs(moves)
            if moves and self.memory.has_room_for(costs.stored_bytes) and costs.peak_bytes < best.peak_bytes:
                at = base.steps[int(base.held(moves).argmax())]
                best = replace(
                    alone,
                    schedule=base.schedule(moves),
                    time_ms=costs.time_ms,
                    peak_bytes=costs.peak_bytes,
                    solver=self.name,
                    smallest_budget_bytes=costs.peak_bytes,
                    binding_op=str(op_of(problem, at)),
                    stored_bytes=costs.stored_bytes,
                    memory=self.memory,
                )
        return best
