"""Greedy repair: add recomputations to a plan until its peak fits a budget.

This is eviction by cost / (bytes x staleness), the rule of M. Kirisame et al., "Dynamic tensor
rematerialization", ICLR 2021, made offline: bytes x staleness becomes what the eviction really takes off the
part of the memory curve above the budget, and the cost is that of all that has to be computed again. The
queue is lazy: an optimistic score orders the candidates, and only those that reach the front are evaluated
exactly.
"""

from __future__ import annotations

import heapq
import math
import time
from bisect import bisect_left
from dataclasses import dataclass

from rk_solvers.liveness import PlanState


@dataclass(frozen=True, slots=True)
class Weights:
    """The rule by which candidates are ranked: cost ** exponent * noise / gain."""

    exponent: float
    noise: tuple[float, ...]  # one factor per forward operation
    least_ms: float  # added to every cost, so that free operations are ranked too


def repair(state: PlanState, budget_bytes: int, weights: Weights, deadline: float = math.inf) -> bool:
    """Edit `state` until its peak is within `budget_bytes`; False if no single recomputation helps more.

    False too, with what has been gained so far, once `time.monotonic` reaches `deadline`.
    """
    excess = state.excess(budget_bytes)
    while excess > 0:
        left = _sweep(state, budget_bytes, weights, excess, deadline)
        if left >= excess or (left > 0 and time.monotonic() >= deadline):
            return False
        excess = left
    return True


def _sweep(state: PlanState, budget_bytes: int, weights: Weights, excess: int, deadline: float) -> int:
    """Apply the best candidates of one queue, until the deadline at most; returns the excess that is left."""
    tables = state.tables
    heap = [(score, -1, key) for key, score in candidates(state, budget_bytes, weights, excess).items()]
    heapq.heapify(heap)
    queued = {key for _, _, key in heap}
    version = 0
    while heap and excess > 0 and time.monotonic() < deadline:
        _, seen, key = heapq.heappop(heap)
        stage, index = tables.split(key)
        if state.has(stage, index):
            continue
        mark = state.mark()
        for addition in closure(state, key, budget_bytes):
            state.add(addition)
        gain = excess - state.excess(budget_bytes)
        added = state.log[mark.edits :]
        if gain <= 0:
            state.undo(mark)
            continue
        cost = sum(tables.time[tables.split(addition)[1]] for addition in added)
        score = rank(weights, index, cost, gain)
        if seen != version and heap and score > heap[0][0]:
            state.undo(mark)
            heapq.heappush(heap, (score, version, key))
            continue
        excess -= gain
        version += 1
        for addition in added:
            for entry in _new_candidates(state, addition, weights, excess, queued):
                heapq.heappush(heap, entry)
    return excess


def rank(weights: Weights, index: int, cost_ms: float, gain: float) -> float:
    """Score of a candidate, the lower the better."""
    return float((cost_ms + weights.least_ms) ** weights.exponent) * weights.noise[index] / gain


def closure(state: PlanState, key: int, budget_bytes: int) -> list[int]:
    """Recomputations to add for `key`: itself, and ancestors that neither are alive nor could stay so."""
    tables = state.tables
    stage, index = tables.split(key)
    found = [key]
    seen = {index}
    for addition in found:
        for item in tables.inputs[tables.split(addition)[1]]:
            producer = tables.producer[item]
            if producer in seen or not tables.recomputable[producer]:
                continue
            last_use = state.around(item, addition)[1]
            if last_use >= 0 or state.extension(item, addition) + tables.size[item] <= budget_bytes:
                continue
            if not state.has(stage, producer):
                seen.add(producer)
                found.append(tables.key(stage, producer))
    return found


def candidates(state: PlanState, budget_bytes: int, weights: Weights, excess: int) -> dict[int, float]:
    """Recomputations (by key) that may take bytes off the excess, with an optimistic score."""
    tables = state.tables
    over = [state.keys[place] for place in (state.memory > budget_bytes).nonzero()[0]]
    found: dict[int, float] = {}
    if not over:
        return found
    for index in range(tables.count):
        if not tables.recomputable[index] or not tables.renewed_bytes[index]:
            continue
        stages: dict[int, None] = {}
        for item in tables.renewed[index]:
            uses = state.uses[item]
            for use in uses[bisect_left(uses, max(tables.count, over[0])) :]:
                stages[(use - tables.count) // tables.stride] = None
        for stage in stages:
            key = tables.key(stage, index)
            bound = _bound(state, index, key, over)
            if bound and not state.has(stage, index):
                found[key] = rank(weights, index, tables.time[index], min(bound, excess))
    return found


def _bound(state: PlanState, index: int, key: int, over: list[int]) -> int:
    """At least the bytes that `key` can take off the excess at the events `over`."""
    total = 0
    tables = state.tables
    before, after = state.neighbours(state.computed[index], key)
    end = bisect_left(over, key)
    for item in tables.renewed[index]:
        left, right = state.touches(item, key, before, after)
        if right >= 0:
            total += tables.size[item] * (end - bisect_left(over, left + 1))
    return total


def _new_candidates(
    state: PlanState, addition: int, weights: Weights, excess: int, queued: set[int]
) -> list[tuple[float, int, int]]:
    """Candidates born of a recomputation: its inputs could be recomputed with it."""
    tables = state.tables
    stage, index = tables.split(addition)
    entries: list[tuple[float, int, int]] = []
    for item in tables.inputs[index]:
        producer = tables.producer[item]
        key = tables.key(stage, producer)
        if not tables.recomputable[producer] or key in queued or state.has(stage, producer):
            continue
        queued.add(key)
        score = rank(weights, producer, tables.time[producer], max(excess, 1))
        entries.append((score, -1, key))
    return entries
