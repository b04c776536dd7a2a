"""The moves of a schedule, read back: what `Base.schedule` has written, or anybody else."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import replace

from rk_solvers.links import SecondMemory
from rk_solvers.liveness import evaluate, recompute_of
from rk_solvers.problem import Problem
from rk_solvers.schedule import Arrive, Backward, Compute, Leave, Op, Recall, Schedule, ScheduleError
from rk_solvers.transfers.moves import Base, Costs, Gap, Move


def moves_in(problem: Problem, schedule: Schedule, memory: SecondMemory) -> tuple[Base, tuple[Move, ...]]:
    """What a schedule recomputes, and what it moves, in the order in which data come back.

    Raises `ScheduleError` where a data comes back without having left, or between no two of its uses.
    """
    base = Base(problem, recompute_of(problem, schedule), memory)
    index_of = {data.name: item for item, data in enumerate(problem.data)}
    gaps: dict[int, list[Gap]] = {}
    for gap in base.gaps:
        gaps.setdefault(gap.data, []).append(gap)
    left: dict[int, int] = {}
    recalled: dict[int, int] = {}
    found: list[Move] = []
    for position, op in _placed(schedule.ops):
        if op.name not in index_of:
            raise ScheduleError(f"{op}: the problem has no such data")
        item = index_of[op.name]
        if isinstance(op, Leave):
            left[item] = position
        elif isinstance(op, Recall):
            recalled[item] = position + 1
        elif isinstance(op, Arrive):
            if item not in left or item not in recalled:
                raise ScheduleError(f"{op}: this data has not left, or was not recalled")
            after = position + 1
            own = gaps.get(item, [])
            place = bisect_left([gap.after for gap in own], after)
            if place == len(own) or own[place].after != after or not own[place].before <= left[item]:
                raise ScheduleError(f"{op}: this data is not used right after")
            found.append(Move(own[place], left.pop(item), recalled.pop(item)))
    return base, tuple(found)


def returns_in(schedule: Schedule) -> tuple[tuple[str, int], ...]:
    """Each data that comes back, and before which of the computations, counted from 0; in that order."""
    return tuple((op.name, position + 1) for position, op in _placed(schedule.ops) if isinstance(op, Arrive))


def costs_of(problem: Problem, schedule: Schedule, memory: SecondMemory | None) -> Costs:
    """What a schedule takes, with or without moves.

    Raises as `moves_in`, and where data move and there is no second memory.
    """
    if not schedule.offloaded:
        found = evaluate(problem, recompute_of(problem, schedule))
        return Costs(found.peak_bytes, found.time_ms, 0.0, 0)
    if memory is None:
        raise ScheduleError(f"offload {schedule.offloaded[0]}: no second memory was given")
    base, moves = moves_in(problem, schedule, memory)
    return base.costs(moves)


def corrected(problem: Problem, schedule: Schedule, memory: SecondMemory, late_ms: float) -> SecondMemory:
    """The second memory whose transfers slow the computation by so much more in a step of that schedule, or less.

    A transfer slows it by nothing at least, and by its own time at most. Raises as `moves_in`.
    """
    base, moves = moves_in(problem, schedule, memory)
    sizes = {data.name: data.size_bytes for data in problem.data}
    moving_ms = sum(memory.out.time_ms(sizes[name]) for name in schedule.offloaded)
    moving_ms += sum(memory.back.time_ms(base.size_bytes(move.gap)) for move in moves)
    more = late_ms / moving_ms if moving_ms > 0 else 0.0
    out, back = (replace(link, burden=min(1.0, max(0.0, link.burden + more))) for link in (memory.out, memory.back))
    return replace(memory, out=out, back=back)


def _placed(ops: Iterable[Op]) -> Iterable[tuple[int, Op]]:
    """Each transfer, with the step after which it comes."""
    position = -1
    for op in ops:
        if isinstance(op, Compute | Backward):
            position += 1
        else:
            yield position, op
