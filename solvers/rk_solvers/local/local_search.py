"""Improve a plan that fits its budget: drop recomputations, and destroy and repair neighbourhoods of it.

The search is a large-neighbourhood search (P. Shaw, "Using constraint programming and local search methods to
solve vehicle routing problems", CP 1998): take some recomputations out, repair the excess with randomly
perturbed weights, drop what became redundant, keep the result if the step is not slower.
"""

from __future__ import annotations

import math
import random
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from rk_solvers.liveness import PlanState
from rk_solvers.local.repair import Weights, repair

LARGE = 400  # forward operations above which a plan is improved piece by piece (`improve_nearby`)


def weights_for(state: PlanState, rng: random.Random, exponent: float, spread: float) -> Weights:
    """Ranking weights with log-normal noise of standard deviation `spread`."""
    times = [time_ms for time_ms in state.tables.time if time_ms > 0]
    least_ms = 1e-3 * sum(times) / len(times) if times else 1.0
    count = state.tables.count
    noise = tuple(rng.lognormvariate(0.0, spread) for _ in range(count)) if spread else (1.0,) * count
    return Weights(exponent, noise, least_ms)


def take_out(state: PlanState, key: int) -> None:
    """Remove a recomputation; those of its stage that only led to it move to their next use, or go."""
    under_way = [_taking_out(state, key)]  # not by recursion: what leads to it may be a chain of thousands
    while under_way:
        only_led_to_it = next(under_way[-1], None)
        if only_led_to_it is None:
            under_way.pop()
        else:
            under_way.append(_taking_out(state, only_led_to_it))


def _taking_out(state: PlanState, key: int) -> Iterator[int]:
    """Remove it; gives those that are to be taken out then, each before what follows is done."""
    tables = state.tables
    stage, index = tables.split(key)
    state.remove(key)
    for item in tables.inputs[index]:
        producer = tables.producer[item]
        if state.has(stage, producer) and not _serves(state, stage, producer):
            origin = tables.key(stage, producer)
            later = _next_stage(state, producer, origin)
            yield origin
            if later >= 0 and not state.has(later, producer):
                state.add(tables.key(later, producer))


def drop_redundant(state: PlanState, budget_bytes: int, keys: list[int], deadline: float = math.inf) -> bool:
    """Take out every recomputation of `keys`, in their order, that the budget can do without, until `deadline`."""
    changed = False
    for key in keys:
        if time.monotonic() >= deadline:
            break
        if not state.has(*state.tables.split(key)):
            continue
        mark = state.mark()
        take_out(state, key)
        if state.peak_bytes > budget_bytes or state.time_ms > mark.time_ms:
            state.undo(mark)
        else:
            changed = True
    return changed


def costly_first(state: PlanState) -> list[int]:
    """All recomputations, the costliest first."""
    tables = state.tables
    return sorted(state.recomputations(), key=lambda key: (-tables.time[tables.split(key)[1]], key))


def polish(state: PlanState, budget_bytes: int, deadline: float) -> None:
    """Drop redundant recomputations until none is."""
    while drop_redundant(state, budget_bytes, costly_first(state), deadline) and time.monotonic() < deadline:
        continue


def improve(state: PlanState, budget_bytes: int, rounds: int, deadline: float, rng: random.Random) -> int:
    """Destroy and repair `state` up to `rounds` times or until `deadline` (`time.monotonic`).

    The state fits the budget before and after; returns the number of rounds that made it faster.
    """
    better = 0
    for _ in range(rounds):
        if time.monotonic() >= deadline or state.time_ms <= 0:
            break
        keys = _choose(state, rng)
        weights = weights_for(state, rng, rng.uniform(0.7, 1.3), rng.choice([0.0, 0.2, 0.5, 1.0]))
        better += _rebuild(state, budget_bytes, keys, weights, deadline, nearby=False)
    state.log.clear()
    return better


def improve_nearby(state: PlanState, budget_bytes: int, rounds: int, deadline: float, rng: random.Random) -> int:
    """As `improve`, with twenty times the rounds, in which all that is done is near one moment of the step.

    What `improve` tries to drop after each round is the whole plan, of which there is too much in a large one.
    """
    better = 0
    for _ in range(20 * rounds):
        keys = state.recomputations()
        if not keys or time.monotonic() >= deadline:
            break
        pivot, amount = rng.randrange(len(keys)), 1 + int(rng.expovariate(1 / 8))
        weights = weights_for(state, rng, rng.uniform(0.7, 1.3), rng.choice([0.0, 0.2, 0.5]))
        near = keys[max(0, pivot - amount) : pivot + amount]
        better += _rebuild(state, budget_bytes, near, weights, deadline, nearby=True)
    state.log.clear()
    return better


def _rebuild(
    state: PlanState, budget_bytes: int, keys: list[int], weights: Weights, deadline: float, *, nearby: bool
) -> bool:  # fmt: skip
    """Take `keys` out, repair, and drop what is redundant, of what is `nearby` alone or of all; whether it is faster.

    The state is as before where it would be slower.
    """
    state.log.clear()
    before = state.mark()
    for key in keys:
        if state.has(*state.tables.split(key)):
            take_out(state, key)
    if not repair(state, budget_bytes, weights, deadline):
        state.undo(before)
        return False
    if state.time_ms < (1.05 if nearby else 1.15) * before.time_ms:
        drop_redundant(state, budget_bytes, _changed(state) if nearby else costly_first(state), deadline)
    if state.time_ms > before.time_ms + 1e-12:
        state.undo(before)
    return state.time_ms < before.time_ms - 1e-9


def _changed(state: PlanState) -> list[int]:
    """The recomputations between the first and the last that was added or removed, the costliest first."""
    changed = [key if key >= 0 else -key - 1 for key in state.log]
    first, last = min(changed), max(changed)
    return [key for key in costly_first(state) if first <= key <= last]


def _choose(state: PlanState, rng: random.Random) -> list[int]:
    """Recomputations to destroy: some at random, those near one in time, or those of nearby operations."""
    keys = state.recomputations()
    tables = state.tables
    kind = rng.randrange(3)
    amount = min(len(keys), 1 + int(rng.expovariate(1 / 6)))
    if kind == 0:
        return rng.sample(keys, amount)
    costs = [tables.time[tables.split(key)[1]] for key in keys]
    pivot = rng.choices(range(len(keys)), [cost + 1e-9 for cost in costs])[0]
    if kind == 1:
        return keys[max(0, pivot - amount) : pivot + amount]
    index = tables.split(keys[pivot])[1]
    near = [key for key in keys if abs(tables.split(key)[1] - index) <= amount]
    return near


def _serves(state: PlanState, stage: int, index: int) -> bool:
    """Whether the recomputation of `index` in `stage` is used in that stage."""
    tables = state.tables
    start, stop = tables.key(stage, index), tables.key(stage, tables.count)
    for item in tables.renewed[index]:
        uses = state.uses[item]
        if bisect_right(uses, stop) > bisect_left(uses, start):
            return True
    return False


def _next_stage(state: PlanState, index: int, key: int) -> int:
    """First stage that uses the instances made by recomputation `key` of `index`; -1 if none."""
    tables = state.tables
    after = state.neighbours(state.computed[index], key)[1]
    first = -1
    for item in tables.renewed[index]:
        uses = state.uses[item]
        place = bisect_left(uses, key)
        if place < len(uses) and (after < 0 or uses[place] < after) and (first < 0 or uses[place] < first):
            first = uses[place]
    return -1 if first < 0 else (first - tables.count) // tables.stride
