"""The fastest plan with moves of a small problem, by trying all: recomputations, gaps, and when each data leaves and
comes back. Data are sent in the order of their gaps. Exponential in everything; for tests and documentation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from rk_solvers.groups import check_recompute, normalise
from rk_solvers.links import SecondMemory
from rk_solvers.problem import Problem, Recompute
from rk_solvers.transfers.moves import Base, Move

MOST_PLANS = 3_000
MOST_GAPS = 4


def least_time_with_moves(
    problem: Problem, memory: SecondMemory, budget_bytes: int
) -> tuple[Base, tuple[Move, ...]] | None:
    """The base and the moves of a fastest plan within the budget; None where there is none.

    Raises `ValueError` for a problem of more plans than `MOST_PLANS`, or of more gaps than `MOST_GAPS` in one of them.
    """
    best: tuple[float, Base, tuple[Move, ...]] | None = None
    for recompute in _plans(problem):
        base = Base(problem, recompute, memory)
        if best is not None and base.ends_ms[-1] >= best[0]:
            continue  # nothing that moves is faster than what moves nothing
        for moves in _moves(base):
            if int(base.held(moves).max(initial=0)) > budget_bytes:
                continue
            costs = base.costs(moves)
            within = memory.limit_bytes is None or costs.stored_bytes <= memory.limit_bytes
            if within and (best is None or costs.time_ms < best[0]):
                best = costs.time_ms, base, moves
    return None if best is None else best[1:]


def _plans(problem: Problem) -> Iterator[Recompute]:
    """All that recompute only what serves."""
    again = [index for index, op in enumerate(problem.forward) if op.recomputable]
    number = (2 ** len(again)) ** len(problem.backward)
    if number > MOST_PLANS:
        raise ValueError(f"there are {number} plans of recomputations; all are tried for at most {MOST_PLANS}")
    groups = [group for size in range(len(again) + 1) for group in itertools.combinations(again, size)]
    for plan in itertools.product(groups, repeat=len(problem.backward)):
        check_recompute(problem, plan)
        if normalise(problem, plan) == plan:
            yield plan


def _moves(base: Base) -> Iterator[tuple[Move, ...]]:
    if len(base.gaps) > MOST_GAPS:
        raise ValueError(f"there are {len(base.gaps)} gaps; all ways are tried for at most {MOST_GAPS}")
    ways: list[list[Move | None]] = []
    for gap in base.gaps:
        pairs = itertools.combinations(range(gap.before, gap.after + 1), 2)
        ways.append([None, *(Move(gap, left, recalled) for left, recalled in pairs)])
    for chosen in itertools.product(*ways):
        yield tuple(move for move in chosen if move is not None)
