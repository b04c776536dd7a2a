"""When data leave and come back whose gaps are given: as late and as early as a budget lets them.

A transfer that is begun early and waited for late is behind the computation. Both ends cost bytes: until a data is let
go of, and from its recall on, it holds them beside what has taken its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from rk_solvers.liveness import Bytes
from rk_solvers.transfers.moves import Base, Gap, Move


def least_held(base: Base, gaps: Iterable[Gap]) -> Bytes:
    """What is held at least in each step where data are away in these gaps."""
    return base.held([Move(gap, gap.before, gap.after) for gap in gaps])


def placed(base: Base, gaps: Sequence[Gap], budget_bytes: int) -> list[Move] | None:
    """Moves in these gaps within the budget; None where even with all of them away it is exceeded.

    Of two ways the faster: returns are made early first, or departures late first. They compete for the bytes around
    the turn from the forward to the backward.
    """
    held = least_held(base, gaps)
    if int(held.max(initial=0)) > budget_bytes:
        return None
    slack = budget_bytes - held
    gaps = sorted(gaps)
    ways = [_relaxed(base, gaps, slack.copy(), returns_first) for returns_first in (True, False)]
    return min(ways, key=lambda moves: base.costs(moves).time_ms)


def _relaxed(base: Base, gaps: Sequence[Gap], slack: Bytes, returns_first: bool) -> list[Move]:
    left = {gap: gap.before for gap in gaps}
    recalled = {gap: gap.after for gap in gaps}

    def early_returns() -> None:
        for gap in sorted(gaps, key=lambda gap: (gap.after, gap.before, gap.data)):
            recalled[gap] = _first_with_room(slack, left[gap] + 1, gap.after, base.size_bytes(gap))

    def late_departures() -> None:
        for gap in sorted(gaps, key=lambda gap: (-gap.before, gap.after, gap.data)):
            left[gap] = _last_with_room(slack, gap.before, recalled[gap] - 1, base.size_bytes(gap))

    for way in (early_returns, late_departures) if returns_first else (late_departures, early_returns):
        way()
    return [Move(gap, left[gap], recalled[gap]) for gap in gaps]


def _first_with_room(slack: Bytes, first: int, after: int, size_bytes: int) -> int:
    """The earliest step, from `first` on, from which there is room up to `after`; it is taken.

    The data is away in one step at least: a recall at `first` + 1 is the earliest.
    """
    short = np.flatnonzero(slack[first + 1 : after] < size_bytes)
    start = first + 1 + (int(short[-1]) + 1 if len(short) else 0)
    slack[start:after] -= size_bytes
    return start


def _last_with_room(slack: Bytes, before: int, last: int, size_bytes: int) -> int:
    """The latest step, before `last`, up to which there is room from the one after `before` on; it is taken."""
    short = np.flatnonzero(slack[before + 1 : last] < size_bytes)
    end = before + int(short[0]) if len(short) else max(before, last - 1)
    slack[before + 1 : end + 1] -= size_bytes
    return end
