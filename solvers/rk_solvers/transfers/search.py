"""What to recompute and what to move, by search: each budget is met by recomputation down to a level, and moves below.

Levels lie between the budget and what the step takes with everything kept. At each a plan of recomputations alone is
taken from another solver, and the data that are away at the moments that remain too large are chosen for long gaps, one
after the other. The first levels are spread, one of them where the links hide what is moved; the others lie between the
best and its neighbours. Plans of the chain's dynamic program are added where a chain is given, and the best few of all
are improved (`improving`). A plan that moves nothing and one that recomputes nothing are among those that are compared,
and so are those of the program, so that none of these is faster by prediction than what is found.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rk_solvers.links import SecondMemory
from rk_solvers.liveness import recompute_of
from rk_solvers.problem import Chain, Problem, Recompute
from rk_solvers.schedule import Schedule
from rk_solvers.solver import Solver
from rk_solvers.transfers.chain_program import ChainProgram
from rk_solvers.transfers.improving import Found, Improver, met
from rk_solvers.transfers.moves import Base, Costs, Move

_LEVELS = 8
_IMPROVED = 3  # of all plans
_PROGRAM_S = 0.15  # of the time, for the chain's program
_LEVELS_S = 0.45  # of it, for other solvers


@dataclass(frozen=True, slots=True)
class Moved:
    """A plan with moves. It was found, and nothing is proven of it."""

    schedule: Schedule
    costs: Costs
    moves: tuple[Move, ...]
    recompute: Recompute


@dataclass(slots=True)
class MoveSearch:
    """One search. `solver_for` gives what finds recomputations alone, given its seconds."""

    problem: Problem
    memory: SecondMemory
    solver_for: Callable[[float], Solver]
    chain: Chain | None = None
    time_limit_s: float = 30.0
    seed: int = 0
    over_the_turn: bool = False  # as `Base` has it: what generated code can do

    def solve(self, budget_bytes: int) -> Moved | None:
        """The fastest plan that was found within `budget_bytes`; None where none was."""
        began = time.monotonic()
        keep_all = Base(self.problem, self.problem.no_recompute, self.memory, over_the_turn=self.over_the_turn)
        found = [met(keep_all, [], budget_bytes)]
        if int(keep_all.curve.max(initial=0)) > budget_bytes:
            found += self._of_program(budget_bytes, began + _PROGRAM_S * self.time_limit_s)
            found += self._of_levels(keep_all, budget_bytes)
        ranked = sorted((one for one in found if one is not None), key=lambda one: one.costs.time_ms)
        if not ranked:
            return None
        improver = Improver(budget_bytes, random.Random(self.seed))
        for place, one in enumerate(ranked[:_IMPROVED]):
            left_s = began + self.time_limit_s - time.monotonic()
            if one.costs.time_ms > self.problem.keep_all_time_ms:
                ranked[place] = improver.improved(one, time.monotonic() + left_s / (_IMPROVED - place))
        best = min(ranked, key=lambda one: one.costs.time_ms)
        return Moved(best.base.schedule(best.moves), best.costs, tuple(best.moves), best.base.recompute)

    def _of_program(self, budget_bytes: int, deadline: float) -> list[Found | None]:
        """Plans of the chain's program."""
        if self.chain is None:
            return []
        try:
            plans = ChainProgram(self.problem, self.chain, self.memory).plans(budget_bytes, deadline)
        except TimeoutError:
            return []
        return [Found(plan.base, list(plan.gaps), list(plan.moves), plan.base.costs(plan.moves)) for plan in plans]

    def _of_levels(self, keep_all: Base, budget_bytes: int) -> list[Found | None]:
        """Plans of recomputations alone, and what they move beside: from the budget up to where nothing is recomputed.

        Levels are shares of what there is between.
        """
        most_bytes = int(keep_all.curve.max(initial=0))
        each_s = self.time_limit_s * _LEVELS_S / _LEVELS
        found: dict[Recompute, Found | None] = {}
        times = {1.0: float("inf")}
        for level in self._levels(times, keep_all, most_bytes - budget_bytes):
            solver = self.solver_for(each_s)
            level_bytes = budget_bytes + int(level * (most_bytes - budget_bytes))
            recompute = recompute_of(self.problem, solver.solve(self.problem, level_bytes).schedule)
            if recompute not in found:
                found[recompute] = met(keep_all.again(recompute), [], budget_bytes)
            one = found[recompute]
            times[level] = float("inf") if one is None else one.costs.time_ms
        return list(found.values())

    def _levels(self, times: dict[float, float], keep_all: Base, above_bytes: int) -> Iterator[float]:
        """`_LEVELS` of them, given the times found so far."""
        forward_ms = keep_all.ends_ms[len(self.problem.forward)]
        backward_ms = keep_all.ends_ms[-1] - forward_ms
        hidden = min(forward_ms * self.memory.out.bytes_per_ms, backward_ms * self.memory.back.bytes_per_ms)
        spread = {0.0: None, 0.25: None, 0.5: None, 0.75: None}
        if hidden < above_bytes:
            spread[hidden / above_bytes] = None
        yield from spread
        for _ in range(_LEVELS - len(spread)):
            known = sorted(times)
            best = min(range(len(known)), key=lambda place: times[known[place]])
            around = [(known[place], known[place + 1]) for place in (best - 1, best) if 0 <= place < len(known) - 1]
            low, high = max(around, key=lambda pair: pair[1] - pair[0])
            yield (low + high) / 2
