"""Large graphs of any shape, chain or not: divide the forward, solve the parts, merge their options upward.

Reference: X. Zhao, L. Eyraud-Dubois, T. Le Hellard, J. Gusak, O. Beaumont, "HiRemate: hierarchical approach for
efficient re-materialization of neural networks", 2024 (ICML 2025).

The forward sequence is divided into contiguous segments where few bytes are alive across the cuts, these again, down to
some tens of operations. If a chain is given, its blocks, and pairs of them, are other first divisions. A segment is a
block of `blocks`: its problem has a barrier where the rest of the step runs. A small one gets its options from greedy
and from the exact program. A larger one is a chain of its segments: under bounds on its peak and on what it saves,
rotor chooses among their options, and the plan, which may exceed the bounds since rotor counts some data for longer and
others in slots, is repaired and improved. Few options that no other one beats are handed on. Segments of equal numbers
are solved once.

At the root the fastest plans of the tables, and some that exceed the budget by little, are repaired and improved over
the whole graph, and so is keep-all, as greedy does. Complexity: each segment has an equal part of the first half of the
time limit. Known gaps: those of rotor for data that are alive across many cuts, which local search has to make up for;
the order in which segments are solved gives no second chance to those below; for thousands of operations, a round of
local search takes a fifth of a second, so that little of it is done.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from dataclasses import dataclass, field, replace

import numpy as np

from rk_solvers.chain.blocks import (
    Block,
    SubProblem,
    blocks_of,
    bounded,
    bounded_plan,
    bounds_of,
    has_choice,
    option_of,
    pareto,
    sub_problems_of,
)
from rk_solvers.chain.merging import LEAST_SLOTS, TableLimits, fitted
from rk_solvers.chain.rotor import prepare_table
from rk_solvers.chain.two_level import ExactPlanner, coarser
from rk_solvers.exact.checkmate import Checkmate
from rk_solvers.groups import normalise
from rk_solvers.liveness import PlanState, Tables, last_forward_uses, peak_and_time
from rk_solvers.local.local_search import LARGE, improve, improve_nearby, polish, weights_for
from rk_solvers.local.min_peak_search import min_peak_plan
from rk_solvers.local.repair import repair
from rk_solvers.problem import Chain, Problem, Recompute
from rk_solvers.solver import Solution, Solver, best_solution, solution_of

FINALISTS = 3  # plans of the whole graph that are improved
WIDE = 150  # forward operations of a segment up to which greedy makes plans of it too
SUMS = 1_000_000_000  # of a root's table; fewer slots for longer chains


@dataclass(frozen=True, slots=True)
class Hiremate(Solver):
    """Recursive division, options merged upward; exact where the whole problem is small.

    Deterministic where the time limit is not reached.
    """

    chain: Chain | None = None
    seed: int = 0
    time_limit_s: float = 30.0
    leaf: int = 24  # forward operations of a segment that is not divided
    branch: int = 8  # most segments that one is divided into, about
    most_options: int = 12  # of a segment
    grid: int = 3  # bounds per axis when options are made
    tries: int = 4  # repairs of keep-all, with different weights
    rounds: int = 120  # of local search on each of the best few plans, and on the best one again

    @property
    def name(self) -> str:
        """Short name shown in solutions."""
        return "hiremate"

    def solve(self, problem: Problem, budget_bytes: int) -> Solution:
        """The fastest schedule found within `budget_bytes`, or the one of lowest peak known.

        Raises `ValueError` on a chain of another problem.
        """
        start = time.monotonic()
        if peak_and_time(problem, problem.no_recompute)[0] <= budget_bytes:
            return solution_of(problem, budget_bytes, problem.no_recompute, self.name)
        plans: list[Recompute] = []
        if len(problem.forward) <= self.leaf:
            exact = Checkmate().least_time(problem, budget_bytes, start + self.time_limit_s / 2)
            if exact.recompute is not None:
                plans.append(exact.recompute)
                if exact.proven:
                    return solution_of(problem, budget_bytes, exact.recompute, self.name, optimal=True)
        plans += self.plans(problem, budget_bytes, start + self.time_limit_s / 2)
        found = self._finished(problem, budget_bytes, plans, start + self.time_limit_s)
        return best_solution(problem, budget_bytes, [(self.name, plan) for plan in found])

    def plans(self, problem: Problem, budget_bytes: int, deadline: float) -> list[Recompute]:
        """The plans of the tables, in which no bound is exact; raises as `solve`."""
        chains = []
        if self.chain is not None:
            self.chain.check(problem)
            chains += coarser(fitted(problem, self.chain, LEAST_SLOTS, TableLimits.here())[0], 2)
        if len(problem.forward) > 1 and problem.backward:
            chains.append(divided(problem, self.leaf, self.branch))
        hierarchy = Hierarchy(self, deadline)
        for chain in chains:
            hierarchy.expect(problem, chain)
        found: list[Recompute] = []
        for chain in chains:
            blocks = blocks_of(problem, chain, plans_of=hierarchy.plans)
            slots = max(50, min(500, SUMS * 6 // len(blocks) ** 3))
            table = prepare_table(problem, blocks, max(budget_bytes, 0), slots)
            found += table.plans(budget_bytes)
        return list(dict.fromkeys(found))

    def _finished(
        self, problem: Problem, budget_bytes: int, plans: list[Recompute], deadline: float
    ) -> list[Recompute]:  # fmt: skip
        """The best of the plans and of keep-all, repaired and improved; those of lowest peak where none fits."""
        costs = {plan: peak_and_time(problem, plan) for plan in plans}
        within = sorted((cost[1], cost[0], plan) for plan, cost in costs.items() if cost[0] <= budget_bytes)
        beyond = sorted((cost[0], cost[1], plan) for plan, cost in costs.items() if cost[0] > budget_bytes)
        starts = [plan for _, _, plan in within[:2] + beyond[:2]]
        tables, rng = Tables(problem), random.Random(self.seed)
        begin = time.monotonic()
        repaired: list[PlanState] = []
        failed: list[Recompute] = []
        for number, plan in enumerate([*starts, *[problem.no_recompute] * self.tries]):
            if repaired and time.monotonic() >= begin + (deadline - begin) / 2:
                break
            state = PlanState(tables, plan)
            exponent, spread = (rng.uniform(0.6, 1.2), 0.2) if number > len(starts) else (1.0, 0.0)
            if repair(state, budget_bytes, weights_for(state, rng, exponent, spread), deadline):
                polish(state, budget_bytes, deadline)
                repaired.append(state)
            else:
                failed.append(normalise(problem, state.recompute()))
        if not repaired:
            lowest = PlanState(tables, min_peak_plan(problem, [*starts, *failed], self.chain, deadline))
            if lowest.peak_bytes > budget_bytes:
                return [normalise(problem, lowest.recompute()), *starts]
            polish(lowest, budget_bytes, deadline)
            repaired.append(lowest)
        repaired.sort(key=lambda state: state.time_ms)
        better = improve if tables.count <= LARGE else improve_nearby
        for state in repaired[:FINALISTS]:
            better(state, budget_bytes, self.rounds, deadline, rng)
        best = min(repaired, key=lambda state: state.time_ms)
        better(best, budget_bytes, self.rounds, deadline, rng)
        return [normalise(problem, best.recompute())]


@dataclass(slots=True)
class Hierarchy:
    """Options of segments, solved once each; segments still to come have equal parts of what time is left."""

    solver: Hiremate
    deadline: float  # of `time.monotonic`
    solved: dict[SubProblem, list[Recompute]] = field(default_factory=dict)
    expected: set[SubProblem] = field(default_factory=set)

    def expect(self, problem: Problem, chain: Chain) -> None:
        """Count the segments, of all levels, that this division leads to."""
        for part in sub_problems_of(problem, chain):
            if has_choice(part) and part not in self.expected:
                self.expected.add(part)
                if len(part.problem.forward) > self.solver.leaf:
                    self.expect(part.problem, divided(part.problem, self.solver.leaf, self.solver.branch))

    def plans(self, part: SubProblem) -> list[Recompute]:
        """Plans of a segment's problem that recompute nothing before the barrier; keep-all is one of them."""
        if not has_choice(part):
            return [part.problem.no_recompute]
        if part not in self.solved:
            leaf = len(part.problem.forward) <= self.solver.leaf
            plans = self._of_leaf(part) if leaf else self._of_segments(part)
            self.solved[part] = few(part, [part.problem.no_recompute, *plans], self.solver.most_options)
            self.expected.discard(part)
        return self.solved[part]

    def _end(self) -> float:
        """When the segment that is begun now has to be ready."""
        now = time.monotonic()
        return now + max(0.0, self.deadline - now) / max(1, len(self.expected))

    def _of_leaf(self, part: SubProblem) -> list[Recompute]:
        """Greedy plans, in half the time at most, then exact ones."""
        end = self._end()
        half = (time.monotonic() + end) / 2
        found: list[Recompute] = []
        for number, (peak, saved) in enumerate(bounds_of(part.problem, self.solver.grid)):
            if number and time.monotonic() >= half:
                break
            plan = bounded_plan(part.problem, peak, saved, rounds=5)
            if plan is not None:
                found.append(plan)
        options = pareto([option_of(part, plan) for plan in [part.problem.no_recompute, *found]])
        return found + ExactPlanner(1, end, self.solver.leaf, (4, 4))(part, options)

    def _of_segments(self, part: SubProblem) -> list[Recompute]:
        """What rotor makes of the segments under each pair of bounds, and greedy, repaired and improved."""
        problem = part.problem
        blocks = blocks_of(problem, divided(problem, self.solver.leaf, self.solver.branch), plans_of=self.plans)
        end = self._end()
        found: list[Recompute] = []
        for number, (peak, saved) in enumerate(bounds_of(problem, self.solver.grid)):
            if number and time.monotonic() >= end:
                break
            plan = self._within(problem, blocks, peak, saved)
            if plan is not None:
                found.append(plan)
        return found

    def _within(self, problem: Problem, blocks: tuple[Block, ...], peak: int, saved: int) -> Recompute | None:
        """The fastest plan found with at most `peak` bytes, and `saved` in the barrier; None if there is none."""
        limited = bounded(problem, peak, saved)
        barrier = replace(blocks[-1], resident_bytes=peak - saved)
        table = prepare_table(limited, (*blocks[:-1], barrier), peak, slots=150, internal=3)
        ranked = sorted((max(0, cost[0] - peak), cost[1], plan) for plan, cost in
                        ((plan, peak_and_time(limited, plan)) for plan in table.plans(peak)))  # fmt: skip
        starts = [plan for _, _, plan in ranked[:1]]
        if not starts or len(problem.forward) <= WIDE:
            starts.append(limited.no_recompute)
        tables, rng = Tables(limited), random.Random(self.solver.seed)
        best: PlanState | None = None
        for plan in starts:
            state = PlanState(tables, plan)
            if repair(state, peak, weights_for(state, rng, 1.0, 0.0), self.deadline):
                polish(state, peak, self.deadline)
                best = state if best is None or state.time_ms < best.time_ms else best
        if best is None:
            return None
        improve(best, peak, 5, self.deadline, rng)
        found = normalise(problem, best.recompute())
        return None if found[0] else found


def few(part: SubProblem, plans: list[Recompute], most: int) -> list[Recompute]:
    """At most about `most` of those that no other one beats, spread evenly over the bytes that they save."""
    options = sorted(pareto([option_of(part, plan) for plan in plans]), key=lambda option: -option.saved_bytes)
    places = {round(step * (len(options) - 1) / max(1, most - 1)) for step in range(most)}
    chosen = [options[place].recompute for place in sorted(places)]
    return list(dict.fromkeys([part.problem.no_recompute, *(((), *recompute) for recompute in chosen)]))


def divided(problem: Problem, leaf: int, branch: int) -> Chain:
    """A division of the forward into at most about `branch` segments, of few bytes alive across, as a chain.

    The first backward operation, which may be a barrier, is that of the chain's loss.
    """
    count = len(problem.forward)
    places = backward_places(problem)
    pieces = min(branch, max(2, math.ceil(count / (0.7 * leaf))), count)
    cuts = balanced_cuts(bytes_across(problem, places), pieces)
    bounds = [0, *cuts, count]
    blocks = tuple(range(first, stop) for first, stop in itertools.pairwise(bounds))
    inside = np.searchsorted(np.array(bounds[1:]), np.array(places), side="right")
    return Chain(blocks, tuple(int(index) for index in inside))


def backward_places(problem: Problem) -> list[int]:
    """For each backward operation the forward operation that it comes nearest to undo; never going forward again.

    It is where the one before has its last need, and at least where it or any later one has. The first is at the end.
    """
    lowest: list[int] = []
    need = 0
    for op in reversed(problem.backward):
        need = max([need, *(problem.data[item].producer for item in op.needs if item not in problem.held)])
        lowest.append(need)
    lowest.reverse()
    return [len(problem.forward), *lowest[:-1]] if lowest else []


def bytes_across(problem: Problem, places: list[int]) -> list[int]:
    """For each cut `c` (before forward operation `c`), the bytes made before it and read after it or by the backward
    of what is after it."""
    last = last_forward_uses(problem)
    for place, backward in zip(places, problem.backward, strict=True):
        for number in backward.needs:
            last[number] = max(last[number], min(place, len(problem.forward) - 1))
    change = [0] * (len(problem.forward) + 2)
    for number, item in enumerate(problem.data):
        if number not in problem.held:
            change[item.producer + 1] += item.size_bytes
            change[last[number] + 1] -= item.size_bytes
    return [int(total) for total in np.cumsum(change)[: len(problem.forward) + 1]]


def balanced_cuts(across: list[int], pieces: int) -> list[int]:
    """Cuts of least sum of bytes, no segment longer than thrice the shortest one allowed; `across` has one for each."""
    count = len(across) - 1
    shortest = max(1, count // (2 * pieces))
    longest = min(count - 1, max(math.ceil(1.5 * count / pieces), 2 * shortest))
    best = np.full(count + 1, np.inf)
    best[0] = 0.0
    before = [0] * (count + 1)
    for cut in range(shortest, count + 1):
        low, high = max(0, cut - longest), cut - shortest + 1
        place = low + int(best[low:high].argmin())
        best[cut] = best[place] + (across[cut] if cut < count else 0)
        before[cut] = place
    cuts: list[int] = []
    place = before[count]
    while place > 0:
        cuts.append(place)
        place = before[place]
    return cuts[::-1]
