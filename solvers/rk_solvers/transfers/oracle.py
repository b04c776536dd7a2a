"""The fastest plan with moves of a small problem, by trying all: recomputations, gaps, and when each data leaves and
comes back. Data are sent in the order of their gaps. Exponential in everything; for tests and documentation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from rk_solvers.groups import check_recompute, leading_to, normalise
from rk_solvers.links import SecondMemory
from rk_solvers.liveness import instances_of, steps_of
from rk_solvers.problem import Problem, Recompute
from rk_solvers.transfers.moves import Base, Move, by_need

MOST_PLANS = 3_000
MOST_GAPS = 4


def least_time_with_moves(
    problem: Problem, memory: SecondMemory, budget_bytes: int, *, of_chain_program: bool = False
) -> tuple[Base, tuple[Move, ...]] | None:
    """The base and the moves of a fastest plan within the budget; None where there is none.

    With `of_chain_program`, of the plans that `chain_program` is about; the problem is then a chain of one operation a
    block, of which each has one backward operation, in the reverse order. Raises `ValueError` for a problem of more
    plans than `MOST_PLANS`, or of more gaps than `MOST_GAPS` in one of them.
    """
    best: tuple[float, Base, tuple[Move, ...]] | None = None
    for recompute in _plans(problem):
        if of_chain_program and not (_is_persistent(problem, recompute) and _is_by_blocks(problem, recompute)):
            continue
        base = Base(problem, recompute, memory, over_the_turn=of_chain_program)
        if best is not None and base.ends_ms[-1] >= best[0]:
            continue  # nothing that moves is faster than what moves nothing
        for moves in _moves(base, _starts(base) if of_chain_program else None):
            if int(base.held(moves).max(initial=0)) > budget_bytes:
                continue
            costs = base.costs(moves)
            within = memory.has_room_for(costs.stored_bytes)
            if within and (best is None or costs.time_ms < best[0]):
                best = costs.time_ms, base, moves
    return None if best is None else best[1:]


def _plans(problem: Problem) -> Iterator[Recompute]:
    """All that recompute only what serves."""
    again = [sorted(leading_to(problem, op.needs)) for op in problem.backward]
    number = math.prod(2 ** len(found) for found in again)
    if number > MOST_PLANS:
        raise ValueError(f"there are {number} plans of recomputations; all are tried for at most {MOST_PLANS}")
    groups = [[group for size in range(len(one) + 1) for group in itertools.combinations(one, size)] for one in again]
    for plan in itertools.product(*groups):
        check_recompute(problem, plan)
        if normalise(problem, plan) == plan:
            yield plan


def _moves(base: Base, starts: set[int] | None) -> Iterator[tuple[Move, ...]]:
    """All ways to move; with `starts` those that leave in the forward, and take bytes for returns right before them."""
    if len(base.gaps) > MOST_GAPS:
        raise ValueError(f"there are {len(base.gaps)} gaps; all ways are tried for at most {MOST_GAPS}")
    turn = len(base.problem.forward)
    ways: list[list[Move | None]] = []
    for gap in base.gaps:
        pairs = list(itertools.combinations(range(gap.before, gap.after + 1), 2))
        if starts is not None:
            pairs = [(left, recalled) for left, recalled in pairs if left < turn and recalled in starts]
        ways.append([None, *(Move(gap, left, recalled) for left, recalled in pairs)])
    for chosen in itertools.product(*ways):
        moves = tuple(move for move in chosen if move is not None)
        returns = [move.recalled for move in sorted(moves, key=by_need)]
        if starts is None or returns == sorted(returns):
            yield moves


def _is_persistent(problem: Problem, recompute: Recompute) -> bool:
    """Whether what is stored across a backward operation is not computed again before its last use."""
    steps = steps_of(problem, recompute)
    backward = [position for position, step in enumerate(steps) if step.forward < 0]
    instances = instances_of(problem, recompute)
    last = {instance.data: instance for instance in instances}
    return all(
        instance is last[instance.data] or not any(instance.first < position < instance.last for position in backward)
        for instance in instances
    )


def _is_by_blocks(problem: Problem, recompute: Recompute) -> bool:
    """Whether the input of an operation stays for its backward from where what it saves for that was computed."""
    inputs = {item for op in problem.forward for item in op.inputs}
    latest = [-1] * len(problem.forward)  # stage in which an operation was computed
    for stage, group in enumerate(recompute):
        for index in group:
            latest[index] = stage
        own = len(problem.forward) - 1 - stage
        op = problem.forward[own]
        saves = not inputs.issuperset(set(op.outputs) & set(problem.backward[stage].needs))
        if saves and any(latest[problem.data[item].producer] > latest[own] for item in op.inputs):
            return False
    return True


def _starts(base: Base) -> set[int]:
    """Steps at which the backward of some blocks begins that is not a part of that of more blocks.

    It is where nothing up to the block of the backward operation has been computed again before.
    """
    count = len(base.problem.backward)
    lowest = len(base.problem.forward)  # operation that was computed again before
    starts: set[int] = set()
    position = len(base.problem.forward)
    for stage, group in enumerate(base.recompute):
        if lowest > count - 1 - stage:
            starts.add(position)
        lowest = min([lowest, *group])
        position += len(group) + 1
    return starts
