"""When data leave and come back whose gaps are given: as late and as early as a budget lets them.

A transfer that is begun early and waited for late is behind the computation. Both ends cost bytes: until a data is let
go of, and from its recall on, it holds them beside what has taken its place.

Two ways are tried. By bytes, as much room as there is goes to the first that asks. By the clock, a data is let go of
once it is there, or once the next step has no room for it: the order on
a link is given, so waiting earlier than that serves nothing, and returns are the same seen from the end. Where the last
departure is over before the first return has bytes, nothing in that order is faster for the same gaps. Returns of other
orders can be: two data that the same operation wants come back in the order of their indices.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from rk_solvers.liveness import Bytes
from rk_solvers.transfers.moves import Base, Gap, Move


class _Transfer(NamedTuple):
    """What holds bytes on one side until it is over."""

    begin: int  # the step after which it can run
    latest: int  # the step after which it is over at the latest
    size_bytes: int
    time_ms: float


def least_held(base: Base, gaps: Iterable[Gap]) -> Bytes:
    """What is held at least in each step where data are away in these gaps."""
    return base.held([Move(gap, gap.before, gap.after) for gap in gaps])


def placed(base: Base, gaps: Sequence[Gap], budget_bytes: int, *, quick: bool = False) -> list[Move] | None:
    """Moves in these gaps within the budget; None where even with all of them away it is exceeded.

    Of the ways the fastest, each with returns placed first or departures first: they compete for the bytes around the
    turn from the forward to the backward. With `quick` by the clock only, which is the faster one mostly.
    """
    held = least_held(base, gaps)
    if int(held.max(initial=0)) > budget_bytes:
        return None
    slack = budget_bytes - held
    gaps = sorted(gaps)
    used = (_by_the_clock,) if quick else (_by_the_clock, _by_bytes)
    ways = [way(base, gaps, slack.copy(), first) for way in used for first in (False, True)]
    return min(ways, key=base.time_ms)


# ---- by the clock -----------------------------------------------------------------------------------------


def _by_the_clock(base: Base, gaps: Sequence[Gap], slack: Bytes, returns_first: bool) -> list[Move]:
    sizes = [base.size_bytes(gap) for gap in gaps]
    left = [gap.before for gap in gaps]
    recalled = [gap.after for gap in gaps]
    last = len(base.steps) - 1
    first: dict[int, int] = {}  # by data; it is sent once alone, and gaps are in order
    for index, gap in enumerate(gaps):
        first.setdefault(gap.data, index)
    sent = sorted(first.values(), key=lambda index: (gaps[index].before, -gaps[index].after, gaps[index].data))
    wanted = sorted(range(len(gaps)), key=lambda index: (gaps[index].after, gaps[index].before, gaps[index].data))

    def departures() -> None:
        time_ms = base.memory.out.time_ms
        out = [_Transfer(left[i], recalled[i] - 1, sizes[i], time_ms(sizes[i])) for i in sent]
        for index, end in zip(sent, _ends(base.times_ms, slack, out), strict=True):
            left[index] = end

    def returns() -> None:
        time_ms, order = base.memory.back.time_ms, wanted[::-1]
        back = [_Transfer(last - gaps[i].after, last - left[i] - 1, sizes[i], time_ms(sizes[i])) for i in order]
        for index, end in zip(order, _ends(base.times_ms[::-1], slack[::-1], back), strict=True):
            recalled[index] = last - end

    for way in (returns, departures) if returns_first else (departures, returns):
        way()
    return [Move(*each) for each in zip(gaps, left, recalled, strict=True)]


def _ends(times_ms: Sequence[float], slack: Bytes, transfers: Sequence[_Transfer]) -> list[int]:
    """By transfer, in the order in which they begin, the step after which it holds no bytes; what it holds is taken.

    Each is over at the step's end at which it is found to be, or is waited for where the next step has no room for it.
    """
    ends = [transfer.begin for transfer in transfers]
    latest = list(itertools.accumulate((transfer.latest for transfer in reversed(transfers)), min))[::-1]
    room = slack.tolist()
    taken = [0] * len(room)
    over: list[float] = []  # of each that has begun, when it is
    now = free = 0.0
    held = first = 0  # bytes under way, and the first transfer of it
    for step in range(transfers[0].begin if transfers else 0, len(room)):
        while first < len(over) and (over[first] <= now or held > room[step] or latest[first] < step):
            now = max(now, over[first])
            ends[first] = step - 1
            held -= transfers[first].size_bytes
            first += 1
        taken[step] = held
        now += times_ms[step]
        while len(over) < len(transfers) and transfers[len(over)].begin == step:
            free = max(now, free) + transfers[len(over)].time_ms
            held += transfers[len(over)].size_bytes
            over.append(free)
        if first == len(transfers):
            break
    slack -= np.array(taken, np.int64)
    return ends


# ---- by bytes ---------------------------------------------------------------------------------------------


def _by_bytes(base: Base, gaps: Sequence[Gap], slack: Bytes, returns_first: bool) -> list[Move]:
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
