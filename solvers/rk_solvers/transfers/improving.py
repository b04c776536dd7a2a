"""Better plans with moves from a given one: other gaps, other recomputations, and other moments for returns."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rk_solvers.groups import normalise
from rk_solvers.liveness import Step, recompute_time_ms
from rk_solvers.problem import Recompute
from rk_solvers.transfers.moves import Base, Costs, Gap, Move
from rk_solvers.transfers.placing import least_held, placed

_LATE_MS = 1.0  # that a transfer may be late by chance,
_LATE = 0.5  # and a part of what it takes
_GIVEN_UP = 20  # changes that serve nothing, by gap, after which no more are tried


@dataclass(slots=True)
class Found:
    """A base with gaps, and what they come to."""

    base: Base
    gaps: list[Gap]
    moves: list[Move]
    costs: Costs


def tried(base: Base, gaps: list[Gap], budget_bytes: int, *, quick: bool = False) -> Found | None:
    """The base with these gaps; None where that is beyond a budget."""
    moves = placed(base, gaps, budget_bytes, quick=quick)
    return None if moves is None else _found(base, gaps, moves)


def met(base: Base, gaps: Iterable[Gap], budget_bytes: int, *, quick: bool = False) -> Found | None:
    """The base with these gaps, and more where they do not bring it within the budget; None where no gaps do."""
    chosen = list(gaps)
    held = least_held(base, chosen)
    taken = set(chosen)
    left = [gap for gap in base.gaps if gap not in taken]
    while int(held.max(initial=0)) > budget_bytes:
        step = int(np.argmax(held))
        around = [gap for gap in left if gap.before < step < gap.after]
        if not around:
            return None
        # the longest for what its data takes on the links
        gap = max(around, key=lambda gap: (base.length_ms(gap) - _transfer_ms(base, gap), gap))
        if not chosen:
            held += base.memory.staging_bytes
        held[gap.before + 1 : gap.after] -= base.size_bytes(gap)
        chosen.append(gap)
        left.remove(gap)
    return tried(base, chosen, budget_bytes, quick=quick)


def without_needless(found: Found, budget_bytes: int, until: float) -> Found:
    """The plan without the moves that it is as fast without, the largest first: a real link may be slower than told."""
    for gap in sorted(found.gaps, key=lambda gap: (-found.base.size_bytes(gap), gap)):
        if time.monotonic() >= until:
            break
        fewer = tried(found.base, [one for one in found.gaps if one != gap], budget_bytes)
        if fewer is not None and fewer.costs.time_ms <= found.costs.time_ms:
            found = fewer
    return found


def with_slack(found: Found, budget_bytes: int) -> Found:
    """The same, with data let go of later and taken back earlier where the budget has room for it.

    No plan is faster by that as predicted. But a real transfer is late by chance, and the step waits for each that has
    no time to spare. Room is given out step by step in turns, to each move until it has enough.
    """
    base = found.base
    slack = budget_bytes - base.held(found.moves)
    left, recalled = ([getattr(move, name) for move in found.moves] for name in ("left", "recalled"))
    sizes = [base.size_bytes(move.gap) for move in found.moves]
    out_ms, back_ms = (
        [_LATE_MS + _LATE * link.time_ms(size_bytes) for size_bytes in sizes]
        for link in (base.memory.out, base.memory.back)
    )  # that are still to be given
    is_over = False
    while not is_over:
        is_over = True
        for place, size_bytes in enumerate(sizes):
            step = left[place] + 1
            if out_ms[place] > 0 and step < recalled[place] - 1 and slack[step] >= size_bytes:
                slack[step] -= size_bytes
                left[place], is_over = step, False
                out_ms[place] -= base.times_ms[step]
            step = recalled[place] - 1
            if back_ms[place] > 0 and step > left[place] + 1 and slack[step] >= size_bytes:
                slack[step] -= size_bytes
                recalled[place], is_over = step, False
                back_ms[place] -= base.times_ms[step]
    moves = [Move(move.gap, *ends) for move, *ends in zip(found.moves, left, recalled, strict=True)]
    costs = base.costs(moves)
    return Found(base, found.gaps, moves, costs) if costs.time_ms <= found.costs.time_ms else found


class Improver:
    """Changes a plan as long as that makes it faster. A kind of change that serves is tried more often."""

    def __init__(self, budget_bytes: int, least_ms: float, chance: random.Random) -> None:
        self.budget_bytes, self.chance = budget_bytes, chance
        self.least_ms = least_ms  # no plan is faster
        self.kinds: list[Callable[[Found], Found | None]] = [
            self._other_gaps,
            self._recompute_instead,
            self._move_instead,
            self._return_at_another_step,
        ]
        self.weights = [4.0, 2.0, 2.0, 1.0]

    def improved(self, found: Found, until: float) -> Found:
        """What is faster than `found`, or that, once `time.monotonic` reaches `until`."""
        best, since = found, 0
        current = found  # as fast as the best: a change that costs nothing may lead to one that serves
        most = _GIVEN_UP * (len(best.base.gaps) + 1)
        while best.costs.time_ms > self.least_ms and since < most and time.monotonic() < until:
            since += 1
            (kind,) = self.chance.choices(range(len(self.kinds)), self.weights)
            other = self.kinds[kind](current)
            self.weights[kind] = max(0.5, 0.99 * self.weights[kind])
            if other is None or other.costs.time_ms > best.costs.time_ms:
                continue
            current = other
            if other.costs.time_ms < best.costs.time_ms:
                best, since = other, 0
                self.weights[kind] = min(8.0, self.weights[kind] + 1)
        return best

    def _other_gaps(self, found: Found) -> Found | None:
        """Some are left out, put in or exchanged."""
        gaps = _changed(found.base, found.gaps, self.chance)
        return None if gaps is None else tried(found.base, gaps, self.budget_bytes, quick=True)

    def _recompute_instead(self, found: Found) -> Found | None:
        """A data is computed again that moves, mostly; and where that is slower, some others are not any more."""
        base = found.base
        problem = base.problem
        gaps = [gap for gap in base.gaps if problem.forward[problem.data[gap.data].producer].recomputable]
        away = [gap for gap in found.gaps if problem.forward[problem.data[gap.data].producer].recomputable]
        if not gaps:
            return None
        gap = self.chance.choice(away if away and self.chance.random() < 0.7 else gaps)
        stage = base.steps[gap.after].stage
        if stage < 0:
            return None
        groups = [set(group) for group in base.recompute]
        producer = problem.data[gap.data].producer
        groups[stage].add(producer)
        more_ms = problem.forward[producer].recompute_ms - found.costs.waiting_ms
        again = [(other, index) for other, group in enumerate(base.recompute) for index in group]
        while more_ms >= 0 and again:
            other, index = again.pop(self.chance.randrange(len(again)))
            groups[other].discard(index)
            more_ms -= problem.forward[index].recompute_ms
        return self._with(found, groups, [other for other in found.gaps if other.data != gap.data])

    def _move_instead(self, found: Found) -> Found | None:
        """What is computed again is kept or moved instead."""
        stages = [stage for stage, group in enumerate(found.base.recompute) if group]
        if not stages:
            return None
        groups = [set(group) for group in found.base.recompute]
        stage = self.chance.choice(stages)
        index = self.chance.choice(sorted(groups[stage]))
        if self.chance.random() < 0.3:
            groups[stage].clear()
        groups[stage].discard(index)
        return self._with(found, groups, found.gaps)

    def _with(self, found: Found, groups: Sequence[set[int]], gaps: Sequence[Gap]) -> Found | None:
        """With other recomputations, the same gaps where they are there still, and more where it takes them."""
        before = found.base
        recompute: Recompute = normalise(before.problem, tuple(tuple(sorted(group)) for group in groups))
        if recompute == before.recompute:
            return None
        problem = before.problem
        if problem.keep_all_time_ms + recompute_time_ms(problem, recompute) >= found.costs.time_ms:
            return None
        base = before.again(recompute)
        same = {_ends_of(base, gap): gap for gap in base.gaps}
        kept = (same.get(_ends_of(before, gap)) for gap in gaps)
        return met(base, [gap for gap in kept if gap is not None], self.budget_bytes, quick=True)

    def _return_at_another_step(self, found: Found) -> Found | None:
        """A data is taken back earlier or later."""
        if not found.moves:
            return None
        place = self.chance.randrange(len(found.moves))
        move = found.moves[place]
        if move.gap.after <= move.left + 1:
            return None
        recalled = self.chance.randint(move.left + 1, move.gap.after)
        moves = list(found.moves)
        moves[place] = replace(move, recalled=recalled)
        if int(found.base.held(moves).max(initial=0)) > self.budget_bytes:
            return None
        return _found(found.base, found.gaps, moves)


def _found(base: Base, gaps: list[Gap], moves: list[Move]) -> Found | None:
    costs = base.costs(moves)
    return Found(base, gaps, moves, costs) if base.memory.has_room_for(costs.stored_bytes) else None


def _transfer_ms(base: Base, gap: Gap) -> float:
    size_bytes = base.size_bytes(gap)
    return base.memory.out.time_ms(size_bytes) + base.memory.back.time_ms(size_bytes)


def _ends_of(base: Base, gap: Gap) -> tuple[int, Step, Step]:
    """What tells a gap in plans of other recomputations, too."""
    return gap.data, base.steps[gap.before], base.steps[gap.after]


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
