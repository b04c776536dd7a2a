"""Solvers that read more of a module than its numbers."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from rk_solvers import Chain, Limits, Problem, SecondMemory, Solution, Solver, solver_named
from rk_solvers.transfers.with_moves import WithMoves
from rockmate.errors import SolverError
from rockmate.planning.fixed_plan import FixedPlan, PortablePlan
from rockmate.planning.measured import Measured
from rockmate.planning.request import PlanRequest

_SHARE_ALONE = 2 / 3  # of the time, for the search for recomputations
_SHARE_OF_MOVES = 1 / 3  # of it, for that for moves: links are known by far less well than what it would gain with more
_LEAST_S = 1.0  # for moves, where there is as much at all
_STEPS = 8  # real steps of plans with moves and without, which share the time with the searches


class GraphSolver(Solver):
    """Is made anew for the graphs of each call that is planned: for its blocks, or for the layers of the module.

    Subclasses are dataclasses of plain values, so that equal ones are known to plan alike.
    """

    @abc.abstractmethod
    def for_measured(self, measured: Measured) -> Solver:
        """The solver for this module and call."""

    def solve(self, problem: Problem, budget_bytes: int) -> Solution:
        """Raises `SolverError`: numbers alone do not tell what it works along."""
        raise SolverError(
            f"the solver {self.name!r} needs the graphs of a module, and is given numbers alone: hand it to "
            "Rockmate(model, solver=...), or take a solver of rk_solvers."
        )


def solver_for(request: PlanRequest, measured: Measured, progress: Callable[[str], None] | None = None) -> Solver:
    """The solver that was asked for, made for what was measured; it tells `progress` how far its search is.

    Where data may be moved, it is one that does so where that is faster.
    """
    if isinstance(request.solver, FixedPlan):
        return with_memory(request.solver, request, measured)
    thorough, moves = None, memory_for(request, measured) is not None
    if moves:
        request = replace(request, limits=_less_steps(request.limits, measured))
    if isinstance(request.solver, str):
        limits = request.limits
        if moves:
            limits = limits_beside_moves(limits)
            thorough = solver_named(request.solver, limits, measured.chain, progress)
            limits = replace(limits, least_peak_s=0.0)  # where recomputation alone does not fit, moves may
        alone = solver_named(request.solver, limits, measured.chain, progress)
    elif isinstance(request.solver, GraphSolver):
        alone = request.solver.for_measured(measured)
    else:
        alone = request.solver
    return _beside(alone, request, measured, thorough)


def moves_beside(alone: Solution, request: PlanRequest, measured: Measured, seconds: float) -> Solver:
    """What looks for moves once more beside what was found of recomputation alone: for `seconds`, or what is usual."""
    search_s = min(seconds / _SHARE_OF_MOVES, request.limits.search_s / 2)
    limits = replace(request.limits.within(search_s), bound_s=0.0)  # the first search had the bound
    request = replace(request, limits=limits)
    return _beside(FixedPlan(PortablePlan.of(alone.schedule, alone.solver)), request, measured)


def _less_steps(limits: Limits, measured: Measured) -> Limits:
    """Of the searches, where steps of what they find take a part of the time: at least half."""
    steps_s = 1e-3 * _STEPS * measured.eager_time_ms
    return replace(limits, search_s=max(limits.search_s / 2, limits.search_s - steps_s))


def _beside(alone: Solver, request: PlanRequest, measured: Measured, thorough: Solver | None = None) -> Solver:
    memory, limits = memory_for(request, measured), request.limits
    if memory is None:
        return alone
    solver = request.solver if isinstance(request.solver, str) else alone
    quick = partial(_quick, solver, limits, measured.chain)
    search_s = max(_SHARE_OF_MOVES * limits.search_s, min(_LEAST_S, limits.search_s))
    bound_s = min(limits.bound_s, limits.longest_s)
    return WithMoves(alone, quick, memory, measured.chain, search_s, limits.seed, thorough, bound_s)


def limits_beside_moves(limits: Limits) -> Limits:
    """Of a search for recomputations beside one for moves, which share the time.

    Where data may move, the best plan that only recomputes is rarely the best: so it has no second wind.
    """
    return replace(limits, search_s=_SHARE_ALONE * limits.search_s, extra_s=0.0)


def with_memory(plan: FixedPlan, request: PlanRequest, measured: Measured) -> FixedPlan:
    """The same decisions, where what moves has somewhere to go."""
    return replace(plan, memory=memory_for(request, measured)) if plan.decisions.moves else plan


def memory_for(request: PlanRequest, measured: Measured) -> SecondMemory | None:
    """The second memory for steps on the device, with its links as they were measured; None where nothing may move."""
    if request.tiers is None:
        return None
    return request.tiers.links_on(measured.device, _typical_bytes(measured.problem))


def _typical_bytes(problem: Problem) -> int:
    """Of a data: half of all bytes are of data that are at most so large."""
    sizes = sorted(data.size_bytes for data in problem.data)
    summed, half = 0, sum(sizes) / 2
    for size_bytes in sizes:
        summed += size_bytes
        if summed >= half:
            return size_bytes
    return 0


def moving_solver(chain: Chain | None, memory: SecondMemory, search_s: float) -> Solver:
    """Looks for recomputations and for moves, `search_s` seconds for each, and proves nothing."""
    quick = partial(_quick, "auto", Limits(), chain)
    return WithMoves(quick(search_s), quick, memory, chain, search_s)


def _quick(solver: Solver | str, limits: Limits, chain: Chain | None, seconds: float) -> Solver:
    """A solver like the one that was asked for, which takes no more than so many seconds where it can be told.

    It proves nothing of budgets that are too small: data may move there.
    """
    if not isinstance(solver, str):
        return solver
    return solver_named(solver, limits.without_proofs(seconds), chain)
