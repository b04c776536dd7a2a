"""What a step of a model takes whose blocks are planned: the account by which the plans of its blocks are chosen.

While the backward of one block runs, the blocks before it keep what their own backward will need. So a step takes what
all blocks keep, and beyond that what the largest block needs for its own backward, and the rest of the model. A plan
that keeps less in every block needs more in each block's backward.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rk_solvers import Backward, Chain, KeepAll, KeepNone, Problem, Solution, Solver, simulate
from rockmate.distributed.blocks import BlockClass
from rockmate.memory.split import above_gradients
from rockmate.planning.costs import LOSS, assumed_loss_cost, build_problem
from rockmate.planning.fixed_plan import PortablePlan

_MOST_CHOICES = 20_000  # compared one by one
_LEVELS = 6  # of kept bytes, at which each class is solved at first


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan of a block."""

    decisions: PortablePlan
    kept_bytes: int  # from its forward to its backward, its outputs included
    peak_bytes: int  # while its forward or its backward runs
    time_ms: float

    @property
    def working_bytes(self) -> int:
        """What its forward or its backward takes above what it keeps."""
        return self.peak_bytes - self.kept_bytes


@dataclass(frozen=True, slots=True)
class BlockProblem:
    """The step of one block above the gradients of its parameters, and how often it occurs."""

    problem: Problem
    chain: Chain
    calls: int

    @staticmethod
    def of(blocks: BlockClass) -> BlockProblem:
        """That of a class of equal blocks."""
        measured = blocks.measured
        problem, chain = build_problem(measured.graphs, measured.loss or assumed_loss_cost(measured.graphs.K_graph))
        return BlockProblem(above_gradients(problem, measured.graphs), chain, blocks.calls)

    def candidate(self, solution: Solution) -> Candidate:
        """What a plan keeps and takes."""
        moments = simulate(self.problem, solution.schedule).moments
        turn = next(place for place, moment in enumerate(moments) if moment.op == Backward(LOSS))
        peak_bytes = max(moment.peak_bytes for place, moment in enumerate(moments) if place != turn)
        kept_bytes = moments[turn].alive_bytes
        decisions = PortablePlan.of(solution.schedule, solution.solver)
        return Candidate(decisions, kept_bytes, max(peak_bytes, kept_bytes), moments[-1].end_ms)

    def extremes(self) -> list[Candidate]:
        """The plan that keeps the least, and the one that keeps everything."""
        return [self.candidate(solver.solve(self.problem, sys.maxsize)) for solver in (KeepNone(), KeepAll())]

    def solve(self, solver: Solver, kept_bytes: int, peak_bytes: int) -> Candidate | None:
        """The fastest plan found that keeps at most `kept_bytes` and takes at most `peak_bytes`; None without one.

        At the turn from forward to backward, in the loss's place, something takes all but `kept_bytes`.
        """
        turn, *others = self.problem.backward
        filled = replace(turn, peak_bytes=max(turn.resident_bytes, peak_bytes - kept_bytes))
        problem = replace(self.problem, backward=(filled, *others))
        solution: Solution = solver.solve(problem, peak_bytes)
        return self.candidate(solution) if solution.status.fits else None


Choice = list[Candidate]
"""One plan for each class of blocks."""


def step_bytes(problems: Sequence[BlockProblem], choice: Choice) -> int:
    """What the step takes but for the rest of the model."""
    kept_bytes = sum(p.calls * candidate.kept_bytes for p, candidate in zip(problems, choice, strict=True))
    return kept_bytes + max(candidate.working_bytes for candidate in choice)


def step_time_ms(problems: Sequence[BlockProblem], choice: Choice) -> float:
    """Time of all blocks in a step."""
    return sum(p.calls * candidate.time_ms for p, candidate in zip(problems, choice, strict=True))


class Chooser:
    """Finds the plans of all classes that together take the least time within a number of bytes."""

    def __init__(self, problems: Sequence[BlockProblem], solvers: Sequence[Solver]) -> None:
        self._problems = problems
        self._solvers = solvers
        self._candidates = [problem.extremes() for problem in problems]
        self._solved: dict[tuple[int, int], list[tuple[int, Candidate | None]]] = {}  # by class and kept bytes

    def leanest(self) -> Choice:
        """The plans that keep the least."""
        return [min(found, key=lambda c: (c.kept_bytes, c.peak_bytes)) for found in self._candidates]

    def choose(self, limit_bytes: int) -> Choice | None:
        """The fastest plans that take at most `limit_bytes` together, the rest of the model aside; None without any."""
        least = [candidate.kept_bytes for candidate in self.leanest()]
        most = [max(candidate.kept_bytes for candidate in found) for found in self._candidates]
        for index in range(len(self._problems)):
            for level in range(_LEVELS):
                self._solve(index, least[index] + (most[index] - least[index]) * level // _LEVELS, limit_bytes)
        choice = self._best(limit_bytes)
        if choice is None:
            return None
        for index in range(len(self._problems)):  # what is left over, to each class in turn
            left_bytes = limit_bytes - step_bytes(self._problems, choice)
            self._solve(index, choice[index].kept_bytes + left_bytes // self._problems[index].calls, limit_bytes)
            choice = self._best(limit_bytes) or choice
        return choice

    def _solve(self, index: int, kept_bytes: int, limit_bytes: int) -> None:
        """Add the plan that keeps so much, where all other blocks keep the same or, of other classes, the least."""
        problem = self._problems[index]
        leanest = zip(self._problems, self.leanest(), strict=True)
        others = sum(p.calls * lean.kept_bytes for p, lean in leanest if p is not problem)
        peak_bytes = limit_bytes - others - (problem.calls - 1) * kept_bytes
        known = self._solved.setdefault((index, kept_bytes), [])
        if peak_bytes < kept_bytes or any(_answers(entry, peak_bytes) for entry in known):
            return
        found = problem.solve(self._solvers[index], kept_bytes, peak_bytes)
        known.append((peak_bytes, found))
        if found is not None:
            self._candidates[index].append(found)

    def _best(self, limit_bytes: int) -> Choice | None:
        """The fastest choice that fits: of all, where these are not too many, else by steps that each save the most."""
        candidates = [_undominated(found) for found in self._candidates]
        if math.prod(map(len, candidates)) > _MOST_CHOICES:
            return self._climbed(candidates, limit_bytes)
        choices = [list(choice) for choice in itertools.product(*candidates)]
        fitting = [choice for choice in choices if step_bytes(self._problems, choice) <= limit_bytes]
        return min(fitting, key=lambda choice: step_time_ms(self._problems, choice), default=None)

    def _climbed(self, candidates: list[list[Candidate]], limit_bytes: int) -> Choice | None:
        """From the leanest plans on, what saves the most time for its bytes, as long as anything fits."""
        smallest = [min(found, key=lambda c: (c.peak_bytes, c.kept_bytes)) for found in candidates]
        choice = min(self.leanest(), smallest, key=lambda start: step_bytes(self._problems, start))
        if step_bytes(self._problems, choice) > limit_bytes:
            return None
        while True:
            moves = [
                (self._worth(choice, moved), moved)
                for index, found in enumerate(candidates)
                for candidate in found
                if candidate.time_ms < choice[index].time_ms
                for moved in [[*choice[:index], candidate, *choice[index + 1 :]]]
                if step_bytes(self._problems, moved) <= limit_bytes
            ]
            if not moves:
                return choice
            choice = max(moves, key=lambda move: move[0])[1]

    def _worth(self, choice: Choice, moved: Choice) -> tuple[float, float]:
        saved_ms = step_time_ms(self._problems, choice) - step_time_ms(self._problems, moved)
        more_bytes = step_bytes(self._problems, moved) - step_bytes(self._problems, choice)
        return (float("inf"), saved_ms) if more_bytes <= 0 else (saved_ms / more_bytes, saved_ms)


def _answers(solved: tuple[int, Candidate | None], peak_bytes: int) -> bool:
    """Whether what was found for one limit of the peak tells enough of another one, which real steps have corrected."""
    limit_bytes, found = solved
    return limit_bytes >= peak_bytes if found is None else found.peak_bytes <= peak_bytes


def _undominated(candidates: list[Candidate]) -> list[Candidate]:
    """Without those that keep no less, take no less and are no faster than another."""
    kept: list[Candidate] = []
    for one in sorted(candidates, key=lambda c: (c.time_ms, c.kept_bytes, c.peak_bytes)):
        if not any(o.kept_bytes <= one.kept_bytes and o.working_bytes <= one.working_bytes for o in kept):
            kept.append(one)
    return kept
