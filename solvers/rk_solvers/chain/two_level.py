"""Exact options for the blocks of a chain, then the chain's dynamic program: two levels.

Reference: X. Zhao, T. Le Hellard, L. Eyraud-Dubois, J. Gusak, O. Beaumont, "Rockmate: an efficient, fast, automatic and
generic tool for re-materialization in PyTorch", ICML 2023.

Blocks of equal numbers are one class and share their options. A class has those of greedy (see `blocks`), and what
the exact program of `checkmate` finds under bounds on (peak, saved) bytes: each pair that a greedy option reaches,
then pairs between. Bounds on which an answer is known already, by an option found within wider ones or by a proof
that there is none, are not tried. Then `rotor` chooses one option for each block, and what runs again between them.

The same is done with blocks taken together two by two: a plan inside a pair is not bound to end at the cut between
them. The fastest of the plans counts.

Complexity: a program a bound, some tens of them a class, each of a tenth of a second to seconds for twenty operations;
each class has its part of the time limit. Known gaps: those of rotor; a block of more than `max_forward` operations has
greedy options only, and so has one whose programs do not end in time.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from rk_solvers.chain.blocks import (
    Block,
    BlockOption,
    SubProblem,
    blocks_of,
    bounded,
    has_choice,
    saved_bytes_at_barrier,
    with_more_options,
)
from rk_solvers.chain.merging import TableLimits, effort, fitted
from rk_solvers.chain.rotor import RotorTable, prepare_table, solved
from rk_solvers.exact.checkmate import Checkmate
from rk_solvers.liveness import peak_and_time, recompute_of
from rk_solvers.problem import Chain, Problem, Recompute
from rk_solvers.solver import Solution, Solver, best_solution

Blocks = tuple[Block, ...]
LEAST_S = 0.05  # a program is not worth starting with less time


@dataclass(frozen=True, slots=True)
class RockmateSolver(Solver):
    """Dynamic program along `chain`, over exact and greedy options. Never worse than over greedy ones alone.

    Deterministic where the time limit is not reached; tables over `chain` are always made.
    """

    chain: Chain
    time_limit_s: float = 15.0
    max_forward: int = 40  # recomputable operations of a block that the exact program is asked for
    steps: int = 5  # bounds on the peak
    saved_steps: int = 5  # bounds on the saved bytes, with each of these
    backend: str = "scipy"  # of the exact program, or "gurobi"
    together: int = 2  # neighbouring blocks taken as one in the coarsest chain
    slots: int = 500  # of the greatest budget
    grid: int = 4  # bounds per axis when greedy makes options
    rounds: int = 10  # local search on each option
    internal: int = 9  # internal budgets tried for one budget

    @property
    def name(self) -> str:
        """Short name shown in solutions."""
        return "rockmate"

    def prepare(self, problem: Problem, max_budget_bytes: int) -> list[RotorTable]:
        """Tables for every budget up to `max_budget_bytes`: for each chain over the greedy options, and over all.

        Raises `ValueError` on a chain of another problem.
        """
        deadline = time.monotonic() + self.time_limit_s
        return [self._table(problem, blocks, max_budget_bytes) for blocks in self.blocks(problem, deadline)]

    def blocks(self, problem: Problem, deadline: float) -> Iterator[Blocks]:
        """For each chain, the blocks with the greedy options, and with all their options; raises as `prepare`.

        Half of what is left until `deadline` (`time.monotonic`) is for exact options, in equal parts. A chain is left
        out if there is less time than the one before has taken.
        """
        self.chain.check(problem)
        chain, _ = fitted(problem, self.chain, self.slots, TableLimits.here())
        grid, rounds = effort(chain, self.chain, self.grid, self.rounds)
        end = math.inf if chain is self.chain else time.monotonic() + 0.5 * (deadline - time.monotonic())
        chains = coarser(chain, self.together)
        begun = took_s = 0.0
        for number, chain in enumerate(chains):
            took_s, begun = time.monotonic() - begun, time.monotonic()
            if number and begun + took_s > deadline:
                return
            greedy = blocks_of(problem, chain, grid, rounds, deadline=end)
            yield greedy
            classes = {block.part for block in greedy if block.part and has_choice(block.part)}
            now = time.monotonic()
            until = now + max(0.0, deadline - now) / (len(chains) - number) * 0.5
            steps = self.steps, self.saved_steps
            yield with_more_options(greedy, ExactPlanner(len(classes), until, self.max_forward, steps, self.backend))

    def solve(self, problem: Problem, budget_bytes: int) -> Solution:
        """The fastest plan of the tables that fits `budget_bytes`; see `prepare` for several budgets.

        Towards the end of the time limit, no coarser chain is begun.
        """
        deadline = time.monotonic() + self.time_limit_s
        most = peak_and_time(problem, problem.no_recompute)[0]
        plans = [(self.name, problem.no_recompute)]
        if most <= budget_bytes:
            return best_solution(problem, budget_bytes, plans)
        for blocks in self.blocks(problem, deadline):
            solution = solved(partial(self._table, problem, blocks), budget_bytes, most)
            plans.append((self.name, recompute_of(problem, solution.schedule)))
        return best_solution(problem, budget_bytes, plans)

    def _table(self, problem: Problem, blocks: Blocks, max_budget_bytes: int) -> RotorTable:
        return prepare_table(problem, blocks, max_budget_bytes, self.slots, self.internal)


def coarser(chain: Chain, most: int) -> list[Chain]:
    """The chain, then those with `k` neighbouring blocks taken as one, for `k` up to `most` and any first border."""
    count = len(chain.blocks)
    found = [chain]
    for together in range(2, most + 1):
        for offset in range(1, together + 1):
            borders = sorted({0, count, *range(offset, count, together)})
            pieces = list(itertools.pairwise(borders))
            blocks = tuple(range(chain.blocks[first].start, chain.blocks[last - 1].stop) for first, last in pieces)
            of = [piece for piece, (first, last) in enumerate(pieces) for _ in range(first, last)] + [len(pieces)]
            found.append(Chain(blocks, tuple(of[block] for block in chain.backward_block)))
    return list(dict.fromkeys(found))


@dataclass(slots=True)
class ExactPlanner:
    """Exact plans for classes of blocks, asked for one after the other: each has an equal part of what time is left."""

    classes: int  # still to come
    deadline: float  # of `time.monotonic`, for all of them
    max_forward: int = 40
    steps: tuple[int, int] = (5, 5)  # bounds on the peak and on the saved bytes
    backend: str = "scipy"
    proven: int = field(default=0, init=False)  # bounds whose best plan is known

    def __call__(self, part: SubProblem, options: tuple[BlockOption, ...]) -> list[Recompute]:
        """Plans within bounds on the peak and on the saved bytes; nothing before the barrier."""
        now = time.monotonic()
        end = now + max(0.0, self.deadline - now) / max(1, self.classes)
        self.classes -= 1
        if sum(op.recomputable for op in part.problem.forward) > self.max_forward:
            return []
        found: list[Recompute] = []
        settled: list[_Settled] = []
        bounds = bounds_between(part, options, self.steps)
        for number, (peak, saved) in enumerate(bounds):
            left_s = end - time.monotonic()
            if left_s < LEAST_S:
                break
            if any(known.covers(peak, saved) for known in settled):
                continue
            limit = time.monotonic() + max(2 * left_s / (len(bounds) - number), LEAST_S)
            answer = Checkmate(self.backend).least_time(bounded(part.problem, peak, saved), peak, min(limit, end))
            plan, used = answer.recompute, (-1, -1)
            if plan is not None:
                used = peak_and_time(part.problem, plan)[0], saved_bytes_at_barrier(part.problem, plan)
                if not plan[0]:
                    found.append(plan)
            if answer.proven:
                self.proven += 1
                settled.append(_Settled((peak, saved), used))
        return found


@dataclass(frozen=True, slots=True)
class _Settled:
    """Bounds for which the best plan is known, and what it uses of them; less than nothing where there is none."""

    bounds: tuple[int, int]
    used: tuple[int, int]

    def covers(self, peak: int, saved: int) -> bool:
        """Whether the same plan is the best within these bounds."""
        fits = self.used[0] <= peak and self.used[1] <= saved
        return fits and peak <= self.bounds[0] and saved <= self.bounds[1]


def bounds_between(part: SubProblem, options: tuple[BlockOption, ...], steps: tuple[int, int]) -> list[tuple[int, int]]:
    """Pairs of bounds on (peak, saved) bytes: what the options reach, then a grid between the extremes of these."""
    reached = [(max(option.forward_bytes, option.backward_bytes, option.saved_bytes), option.saved_bytes)
               for option in options]  # fmt: skip
    lowest = (
        min(peak for peak, _ in reached),
        sum(part.problem.data[d].size_bytes for d in part.problem.backward[0].needs),
    )
    highest = max(peak for peak, _ in reached), max(saved for _, saved in reached)
    axes = [
        [low + (high - low) * step // max(1, count - 1) for step in reversed(range(count))]
        for low, high, count in zip(lowest, highest, steps, strict=True)
    ]
    grid = [(peak, saved) for peak in axes[0] for saved in axes[1] if saved <= peak]
    return list(dict.fromkeys([*sorted(reached, reverse=True), *grid]))
