"""What to recompute and what to move, by search: each budget is met by recomputation down to a level, and moves below.

Level by level, from the budget to what the step takes with everything kept, a plan of recomputations alone is taken
from another solver; the data that are away at the moments that remain too large are chosen for long gaps, one after the
other; and the best few are improved by trying other gaps. A plan that moves nothing and one that recomputes nothing are
among those that are compared, so that none of the two is faster by prediction than what is found.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rk_solvers.links import SecondMemory
from rk_solvers.liveness import peak_and_time, recompute_of
from rk_solvers.problem import Chain, Problem, Recompute
from rk_solvers.schedule import Schedule
from rk_solvers.solver import Solver
from rk_solvers.transfers.moves import Base, Costs, Gap, Move
from rk_solvers.transfers.placing import least_held, placed

_LEVELS = 8
_IMPROVED = 3  # of the levels' plans
_TRIES_S = 0.5  # of the time, for improvements


@dataclass(frozen=True, slots=True)
class Moved:
    """A plan with moves. It was found, and nothing is proven of it, but what `bound.with_bound` adds."""

    schedule: Schedule
    costs: Costs
    moves: tuple[Move, ...]
    recompute: Recompute
    lower_bound_ms: float | None = None  # no plan within the budget is faster, whatever it moves; None: not looked for


@dataclass(slots=True)
class _Found:
    """A base with gaps, and what they come to."""

    base: Base
    gaps: list[Gap]
    moves: list[Move]
    costs: Costs


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
    _deadline: float = field(init=False)

    def solve(self, budget_bytes: int) -> Moved | None:
        """The fastest plan that was found within `budget_bytes`; None where none was."""
        self._deadline = time.monotonic() + self.time_limit_s
        found = [one for base in self._bases(budget_bytes) if (one := self._met(base, budget_bytes)) is not None]
        found.sort(key=lambda one: one.costs.time_ms)
        if not found:
            return None
        chance = random.Random(self.seed)
        for place, one in enumerate(found[:_IMPROVED]):
            until = time.monotonic() + (self._deadline - time.monotonic()) / (_IMPROVED - place)
            found[place] = self._improved(one, budget_bytes, chance, until)
        best = min(found, key=lambda one: one.costs.time_ms)
        return Moved(best.base.schedule(best.moves), best.costs, tuple(best.moves), best.base.recompute)

    def _bases(self, budget_bytes: int) -> list[Base]:
        """Plans of recomputations alone, at levels from the budget up to where nothing is recomputed."""
        keep_all_bytes, _ = peak_and_time(self.problem, self.problem.no_recompute)
        plans: list[Recompute] = [self.problem.no_recompute]
        if keep_all_bytes > budget_bytes:
            each_s = self.time_limit_s * (1 - _TRIES_S) / _LEVELS
            for level in range(_LEVELS):
                level_bytes = budget_bytes + (keep_all_bytes - budget_bytes) * level // _LEVELS
                solution = self.solver_for(each_s).solve(self.problem, level_bytes)
                plans.append(recompute_of(self.problem, solution.schedule))
        return [
            Base(self.problem, plan, self.memory, over_the_turn=self.over_the_turn) for plan in dict.fromkeys(plans)
        ]

    def _met(self, base: Base, budget_bytes: int) -> _Found | None:
        """The base with gaps that bring it within the budget; None where no gaps do."""
        gaps: list[Gap] = []
        held = base.curve
        while int(held.max(initial=0)) > budget_bytes:
            gap = self._gap_for(base, gaps, int(np.argmax(held)))
            if gap is None:
                return None
            gaps.append(gap)
            held = least_held(base, gaps)
        return self._tried(base, gaps, budget_bytes)

    def _gap_for(self, base: Base, gaps: Sequence[Gap], step: int) -> Gap | None:
        """Of the gaps around a step, the longest for what its data takes on the links."""
        taken = set(gaps)
        around = [gap for gap in base.gaps if gap.before < step < gap.after and gap not in taken]
        return max(around, key=lambda gap: (base.length_ms(gap) - self._transfer_ms(base, gap), gap), default=None)

    def _transfer_ms(self, base: Base, gap: Gap) -> float:
        size_bytes = base.size_bytes(gap)
        return self.memory.out.time_ms(size_bytes) + self.memory.back.time_ms(size_bytes)

    def _tried(self, base: Base, gaps: list[Gap], budget_bytes: int) -> _Found | None:
        moves = placed(base, gaps, budget_bytes)
        if moves is None:
            return None
        costs = base.costs(moves)
        if self.memory.limit_bytes is not None and costs.stored_bytes > self.memory.limit_bytes:
            return None
        return _Found(base, gaps, moves, costs)

    def _improved(self, found: _Found, budget_bytes: int, chance: random.Random, until: float) -> _Found:
        """With other gaps: some are left out, put in or exchanged, as long as that is faster."""
        base, best = found.base, found
        since = 0
        while time.monotonic() < until and since < 20 * (len(base.gaps) + 1):
            since += 1
            gaps = _changed(base, best.gaps, chance)
            tried = None if gaps is None else self._tried(base, gaps, budget_bytes)
            if tried is not None and tried.costs.time_ms < best.costs.time_ms:
                best, since = tried, 0
        return best


def _changed(base: Base, gaps: list[Gap], chance: random.Random) -> list[Gap] | None:
    """Other gaps than these, by one or two of them; None where there is nothing to change."""
    others = [gap for gap in base.gaps if gap not in gaps]
    way = chance.randrange(3)
    if (way != 1 and not gaps) or (way != 0 and not others):
        return None
    changed = list(gaps)
    if way != 1:
        changed.pop(chance.randrange(len(changed)))
    if way != 0:
        changed.append(chance.choice(others))
    return changed
