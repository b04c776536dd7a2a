"""Segments in the manner of Chen et al.

Reference: T. Chen, B. Xu, C. Zhang, C. Guestrin, "Training deep nets with sublinear memory cost", 2016
(arXiv:1604.06174), section 4: keep the values at the borders of about sqrt(n) segments and recompute each
segment once, when its backward starts. Our segments are ranges of the forward order (or runs of a chain's
blocks), several counts are tried, and the data that jump over a border are kept as well.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from rk_solvers.groups import normalise
from rk_solvers.problem import Chain, Problem, Recompute
from rk_solvers.solver import Solution, Solver, best_solution


@dataclass(frozen=True, slots=True)
class Chen(Solver):
    """Segments that are recomputed once each; the best of several numbers of segments."""

    chain: Chain | None = None  # borders only between its blocks, where given
    max_tries: int = 24  # numbers of segments that are tried

    @property
    def name(self) -> str:
        """Short name shown in solutions."""
        return "chen"

    def solve(self, problem: Problem, budget_bytes: int) -> Solution:
        """The fastest segmentation tried that fits `budget_bytes`, else the one of lowest peak."""
        plans = [(self.name, plan) for plan in chen_plans(problem, self.chain, self.max_tries)]
        return best_solution(problem, budget_bytes, plans)


def chen_plans(problem: Problem, chain: Chain | None = None, max_tries: int = 24) -> list[Recompute]:
    """Plans of the segments of equal bytes and of equal length, for several numbers of segments."""
    if chain is not None:
        chain.check(problem)
        borders = np.array([block.stop for block in chain.blocks])
    else:
        borders = np.arange(1, len(problem.forward) + 1)
    if len(borders) == 0:
        return [problem.no_recompute]
    size = np.array([sum(problem.data[item].size_bytes for item in op.outputs) for op in problem.forward])
    weights = [np.cumsum(size)[borders - 1].astype(float), borders.astype(float)]
    most = min(len(borders), max(4, round(3 * math.sqrt(len(borders)))))
    counts = np.unique(np.linspace(1, most, num=max(1, max_tries), dtype=int))
    seen: dict[tuple[int, ...], None] = {}
    for count in counts:
        for weight in weights:
            targets = weight[-1] * np.arange(1, count) / count
            cuts = borders[np.minimum(np.searchsorted(weight, targets), len(borders) - 1)]
            seen.setdefault(tuple(sorted({int(cut) for cut in cuts})), None)
    return [segment_plan(problem, cuts) for cuts in seen]


def segment_plan(problem: Problem, cuts: tuple[int, ...]) -> Recompute:
    """The plan that keeps what crosses a cut and recomputes the rest of each segment but the last, once."""
    bounds = [0, *cuts, len(problem.forward)]
    segment_of = [
        segment for segment, (start, stop) in enumerate(itertools.pairwise(bounds)) for _ in range(start, stop)
    ]
    kept = set(problem.held)
    for item, users in enumerate(problem.forward_users()):
        home = segment_of[problem.data[item].producer]
        if home == len(cuts) or any(segment_of[user] != home for user in users):
            kept.add(item)
    groups: list[set[int]] = [set() for _ in problem.backward]
    stage_of: dict[int, int] = {}
    seen: set[int] = set()  # with all that they are computed from
    for stage, op in enumerate(problem.backward):
        waiting = [item for item in op.needs if item not in kept]
        while waiting:
            index = problem.data[waiting.pop()].producer
            if index in seen or not problem.forward[index].recomputable:
                continue
            seen.add(index)
            groups[stage_of.setdefault(segment_of[index], stage)].add(index)
            waiting.extend(item for item in problem.forward[index].inputs if item not in kept)
    return normalise(problem, tuple(tuple(sorted(group)) for group in groups))
