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
from rk_solvers.transfers.improving import Found, Improver, met, tried, with_slack, without_needless
from rk_solvers.transfers.moves import Base, Costs, Move

_LEVELS = 8
_IMPROVED = 4  # of all plans
_PROGRAM_S = 0.15  # of the time, for the chain's program
_LEVELS_S = 0.2  # of it, for other solvers
_TRIM_S = 0.1  # beyond it, to move less
_ROUND_S = 0.6  # of what remains, for all that are improved; for the best of them the rest


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
        deadline = time.monotonic() + self.time_limit_s
        keep_all = Base(self.problem, self.problem.no_recompute, self.memory, over_the_turn=self.over_the_turn)
        least_ms = keep_all.ends_ms[-1]  # nothing is faster
        found: list[Found] = []
        for one in self._found(keep_all, budget_bytes):
            if one is not None:
                found.append(one)
                if one.costs.time_ms <= least_ms:
                    break
        if not found:
            return None
        best = min(found, key=_time_ms)
        if best.costs.time_ms > least_ms:
            improver = Improver(budget_bytes, least_ms, random.Random(self.seed))
            best = self._improved(sorted(found, key=_time_ms)[:_IMPROVED], improver, deadline)
            again = tried(best.base, best.gaps, budget_bytes)  # improvements are placed in the quick ways
            best = min((one for one in (best, again) if one is not None), key=_time_ms)
        best = without_needless(best, budget_bytes, time.monotonic() + _TRIM_S * self.time_limit_s)
        best = with_slack(best, budget_bytes)
        return Moved(best.base.schedule(best.moves), best.costs, tuple(best.moves), best.base.recompute)

    def _found(self, keep_all: Base, budget_bytes: int) -> Iterator[Found | None]:
        """Plans to begin with; the quickest to find first."""
        yield met(keep_all, [], budget_bytes)
        if int(keep_all.curve.max(initial=0)) <= budget_bytes:
            return
        program = self._program(time.monotonic() + _PROGRAM_S * self.time_limit_s)
        yield from self._of_levels(keep_all, budget_bytes, program)
        if program is not None:
            yield from self._of_program(program, budget_bytes, time.monotonic() + _PROGRAM_S * self.time_limit_s)

    def _improved(self, found: list[Found], improver: Improver, deadline: float) -> Found:
        """The best once all are improved, and then that one alone."""
        each_s = _ROUND_S * max(0.0, deadline - time.monotonic()) / len(found)
        improved = [improver.improved(one, time.monotonic() + each_s) for one in found]
        return improver.improved(min(improved, key=_time_ms), deadline)

    def _program(self, deadline: float) -> ChainProgram | None:
        """The chain's program, ready to be asked; None where there is no chain, or no time for its table."""
        if self.chain is None:
            return None
        program = ChainProgram(self.problem, self.chain, self.memory, over_the_turn=self.over_the_turn)
        try:
            program.prepare(deadline)
        except TimeoutError:
            return None
        return program

    def _of_program(self, program: ChainProgram, budget_bytes: int, deadline: float) -> list[Found | None]:
        """Plans of the chain's program."""
        plans = program.plans(budget_bytes, deadline)
        return [Found(plan.base, list(plan.gaps), list(plan.moves), plan.base.costs(plan.moves)) for plan in plans]

    def _of_levels(self, keep_all: Base, budget_bytes: int, program: ChainProgram | None) -> Iterator[Found | None]:
        """Plans of recomputations alone, and what they move beside: from the budget up to where nothing is recomputed.

        Levels are shares of what there is between. Where there is a program, its table has plans for them at once, and
        the other solver is asked for the budget and for the best level alone.
        """
        above_bytes = int(keep_all.curve.max(initial=0)) - budget_bytes
        found: dict[Recompute, Found | None] = {}
        times = {1.0: float("inf")}

        def met_by(level: float, plan_for: Callable[[int], Recompute]) -> Found | None:
            recompute = plan_for(budget_bytes + int(level * above_bytes))
            if recompute not in found:
                found[recompute] = met(keep_all.again(recompute), [], budget_bytes)
            one = found[recompute]
            times[level] = min(times.get(level, float("inf")), float("inf") if one is None else one.costs.time_ms)
            return one

        def solved(level_bytes: int) -> Recompute:
            solution = self.solver_for(self.time_limit_s * _LEVELS_S / count).solve(self.problem, level_bytes)
            return recompute_of(self.problem, solution.schedule)

        if program is None:
            count = _LEVELS
            for level in self._levels(times, keep_all, above_bytes):
                yield met_by(level, solved)
        else:
            for level in self._levels(times, keep_all, above_bytes):
                yield met_by(level, program.recompute)
            asked = {0.0, min(times, key=lambda level: times[level])} - {1.0}
            count = len(asked)
            for level in sorted(asked):
                yield met_by(level, solved)

    def _levels(self, times: dict[float, float], keep_all: Base, above_bytes: int) -> Iterator[float]:
        """`_LEVELS` of them, given the times found so far."""
        forward_ms = keep_all.ends_ms[len(self.problem.forward)]
        backward_ms = keep_all.ends_ms[-1] - forward_ms
        hidden = min(forward_ms * self.memory.out.bytes_per_ms, backward_ms * self.memory.back.bytes_per_ms)
        spread = dict.fromkeys([0.0, 0.25, 0.5, 0.75, min(0.875, hidden / above_bytes)])
        yield from spread
        for _ in range(_LEVELS - len(spread)):
            known = sorted(times)
            best = min(range(len(known)), key=lambda place: times[known[place]])
            around = [(known[place], known[place + 1]) for place in (best - 1, best) if 0 <= place < len(known) - 1]
            low, high = max(around, key=lambda pair: pair[1] - pair[0])
            yield (low + high) / 2


def _time_ms(found: Found) -> float:
    return found.costs.time_ms
