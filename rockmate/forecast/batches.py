"""The largest batch that fits, from a step at two batch sizes: bytes are affine in the batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rk_solvers import Chain, Problem, Schedule, normalise, peak_and_time
from rk_solvers.local.min_peak_search import min_peak_plan
from rkgb.devices.allocation_log import highest_moment
from rkgb.devices.caching_allocator import AllocationEvent
from rockmate.forecast.eager_step import EagerStep
from rockmate.queries.batches import interpolated

MOST = 1 << 20  # rows; where even these fit, the model has no batch to speak of
_SEARCHES = 3


@dataclass(frozen=True, slots=True)
class SizedStep:
    """A step of one batch: without a plan, and, where it was traced, for the solvers."""

    batch: int
    eager: EagerStep
    problem: Problem | None = None  # None where the model cannot be planned
    chain: Chain | None = None
    why: str = ""  # it cannot


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest batch that fits."""

    batch: int
    overhead: float = 0.0  # of its step's time, over that without recomputation


def largest_eager_batch(one: SizedStep, other: SizedStep, memory_bytes: int) -> int | None:
    """Without a plan; None where the two steps are not the same in two sizes."""
    if len(one.eager.all_events) != len(other.eager.all_events):
        return None

    def fits(batch: int) -> bool:
        return eager_peak_at(one, other, batch) <= memory_bytes

    return _last(fits)


def eager_peak_at(one: SizedStep, other: SizedStep, batch: int) -> int:
    """Bytes of a step of that batch, by the storages of the two others, one by one."""
    share = (batch - one.batch) / (other.batch - one.batch)

    def between(low: int, high: int) -> int:
        return round(low + share * (high - low))

    events = [
        AllocationEvent(a.address, between(a.size_bytes, b.size_bytes))
        for a, b in zip(one.eager.all_events, other.eager.all_events, strict=True)
    ]
    return between(one.eager.held_bytes, other.eager.held_bytes) + highest_moment(events)[0]


def largest_planned_batch(one: SizedStep, other: SizedStep, memory_bytes: int, search_s: float) -> Largest | None:
    """With the plans of least peak that searches of `search_s` seconds in all find; None without such a batch.

    What is beside the step, and the optimizer's step after it, count as without a plan.
    """
    if one.problem is None or other.problem is None or one.chain is None:
        return None
    first, second = (one.batch, one.problem), (other.batch, other.problem)
    chain, found, batch = one.chain, None, one.batch
    for _ in range(_SEARCHES):
        problem = interpolated(batch, first, second)
        if problem is None:
            return None
        plan = normalise(problem, min_peak_plan(problem, [], chain, time.monotonic() + search_s / _SEARCHES))
        costs = partial(_costs_at, first, second, plan)
        largest = _last(lambda rows, costs=costs: _total_bytes(one, other, rows, costs(rows)[0]) <= memory_bytes)  # type: ignore[misc]
        if largest < 1:
            return found
        if found is None or largest > found.batch:
            found = Largest(largest, costs(largest)[1])
        if largest == batch:
            break
        batch = largest
    return found


def _costs_at(first: tuple[int, Problem], second: tuple[int, Problem], plan: Schedule, batch: int) -> tuple[int, float]:
    """Peak of the plan's step at a batch, and its time over that without recomputation."""
    problem = interpolated(batch, first, second)
    assert problem is not None  # as for the batches of the two
    peak_bytes, time_ms = peak_and_time(problem, plan)
    return peak_bytes, time_ms / problem.keep_all_time_ms - 1


def _total_bytes(one: SizedStep, other: SizedStep, batch: int, step_peak_bytes: int) -> int:
    share = (batch - one.batch) / (other.batch - one.batch)

    def between(low: int, high: int) -> int:
        return round(low + share * (high - low))

    held_bytes = between(one.eager.held_bytes, other.eager.held_bytes)
    after_bytes = between(one.eager.after_backward_bytes, other.eager.after_backward_bytes)
    return max(held_bytes + step_peak_bytes, after_bytes)


def _last(fits: Callable[[int], bool]) -> int:
    """The last batch for which `fits` holds; it holds up to some batch. 0 for none."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= MOST and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
