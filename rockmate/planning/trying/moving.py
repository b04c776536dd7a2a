"""Plans that move data beside the one that does not: real steps decide, and correct what transfers are said to cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from rk_solvers import Link, SecondMemory
from rk_solvers.liveness import peak_and_time
from rk_solvers.transfers.reading import corrected, costs_of
from rockmate.offload.tier import Traffic
from rockmate.planning.fixed_plan import FixedPlan
from rockmate.planning.graph_solver import memory_for, moves_beside
from rockmate.planning.measured import Measured
from rockmate.planning.request import PlanRequest
from rockmate.planning.trying.tried import (
    Asked,
    Tried,
    is_within,
    try_if_it_fits,
)
from rockmate.planning.trying.turns import AS_PREDICTED, steps_by_turns_ms

_COMPARISONS = 3  # of plans that move data, each for links as the one before has shown them
_COMPARISONS_S = 15.0  # of comparisons and searches, beyond which no other begins
_LEAST_SEARCH_S = 1.0  # of a search for other moves: with less, none begins
_AFTER_A_SEARCH = 1.5  # as long as the comparison before: a first step of what is found, and its comparison
_TO_SPARE = 1.1  # of what transfers take in steps: one that is late is waited for, and one that is early costs nothing
_WORTH_MOVING = 0.01  # of a step's time: what is quicker by less may not be


class FreeLinks:
    """Context in which transfers are planned as if they cost the computation nothing, until steps show what they do.

    What they cost was measured beside another computation, and is often far less; and what a step of few transfers
    shows of it is mostly noise. So plans that move much come first. Where no step has shown anything, links are as they
    were measured afterwards. Nothing is changed where steps have shown it before, for a plan that is given, nor where
    all fits `budget_bytes`.
    """

    def __init__(self, request: PlanRequest, measured: Measured, budget_bytes: int) -> None:
        self._tiers, self._device = request.tiers, measured.device
        self._links: SecondMemory | None = None  # as they were measured, where they are to be changed
        is_given = isinstance(request.solver, FixedPlan) or request.follow is not None
        if self._tiers is None or is_given or self._tiers.are_shown(self._device):
            return
        problem = measured.problem
        if peak_and_time(problem, problem.no_recompute)[0] > budget_bytes:
            self._links = memory_for(request, measured)

    def __enter__(self) -> None:
        if self._tiers is not None and self._links is not None:
            out, back = (replace(link.taking(_TO_SPARE), burden=0.0) for link in (self._links.out, self._links.back))
            self._tiers.take(self._device, replace(self._links, out=out, back=back))

    def __exit__(self, *_: object) -> None:
        if self._tiers is not None and self._links is not None and not self._tiers.are_shown(self._device):
            self._tiers.take(self._device, self._links)


def the_quicker(
    measured: Measured, request: PlanRequest, module: torch.nn.Module, tried: Tried, asked: Asked, until: float
) -> Tried:
    """Of plans that move data and the one that does not, as far as all are within the budget: by steps of each.

    They are compared once, and again as long as that is over by `until`, of `time.perf_counter`.

    What transfers take, and what they cost the computation, depends on what else the machine does, and is predicted by
    far less well than what computation takes. Where steps take another time than predicted, the links are corrected,
    and moves looked for anew.
    """
    alone = tried.solution.alone if tried.solution.schedule.offloaded else None
    if alone is None or not alone.schedule.recomputations or not alone.status.fits or not is_within(tried, request):
        return tried
    assert request.tiers is not None
    moving, first = tried, memory_for(request, measured)
    other = try_if_it_fits(measured, request, module, alone, asked, is_last=False)
    if other is None or not is_within(other, request):
        return tried
    best, links_of_best = other, None
    request.progress("compare", 0, _COMPARISONS)
    share = 1.0 - _WORTH_MOVING  # of what the best takes that only recomputes
    last_begin = time.perf_counter() + _COMPARISONS_S
    for attempt in range(_COMPARISONS):
        both = [(measured, one.planned) for one in (moving, other)]
        solution, before, began = moving.solution, _traffic(moving), time.perf_counter()
        predicted = solution.time_ms / alone.time_ms
        moving_ms, alone_ms = steps_by_turns_ms(module, both, request.loss, predicted)
        ratio = moving_ms / alone_ms
        request.progress("compare", attempt + 1, _COMPARISONS)
        now = time.perf_counter()
        left_s = until - now - _AFTER_A_SEARCH * (now - began)
        is_as_predicted = abs(ratio - predicted) <= AS_PREDICTED
        assert solution.memory is not None
        links = solution.memory
        if not is_as_predicted:
            links = _as_in_steps(links, before, _traffic(moving))
        late_ms = ratio * alone.time_ms - costs_of(measured.problem, solution.schedule, links).time_ms
        links = corrected(measured.problem, solution.schedule, links, late_ms)
        request.tiers.show(measured.device, links)
        if ratio <= share:
            best, links_of_best, share = moving, links, ratio
        if is_as_predicted or attempt + 1 == _COMPARISONS or now >= last_begin or left_s < _LEAST_SEARCH_S:
            break
        again = moves_beside(alone, request, measured, left_s).solve(measured.problem, asked.target_bytes)
        if not again.schedule.offloaded or again.schedule == solution.schedule:
            break
        found = try_if_it_fits(measured, request, module, again, asked, is_last=False)
        if found is None or not is_within(found, request):
            break
        moving = found
    if links_of_best is not None:
        request.tiers.show(measured.device, links_of_best)  # not those of a plan that is not taken
    bound_ms, last = tried.solution.lower_bound_ms, memory_for(request, measured)
    if first is not None and last is not None and _is_faster(last, first):
        bound_ms = measured.problem.keep_all_time_ms  # what was proven counted more time than transfers take
    return best._replace(solution=replace(best.solution, lower_bound_ms=bound_ms))


def _traffic(tried: Tried) -> tuple[Traffic, Traffic]:
    """What was moved so far where its data are moved to."""
    assert tried.planned.tier is not None
    return tried.planned.tier.traffic()


def _as_in_steps(links: SecondMemory, before: Sequence[Traffic], after: Sequence[Traffic]) -> SecondMemory:
    """The links with the speeds of what was moved between the two, less what is to spare.

    They were measured beside another computation than the steps'.
    """

    def seen(link: Link, earlier: Traffic, later: Traffic) -> Link:
        moved = later.since(earlier)
        expected_ms = moved.transfers * link.latency_ms + moved.size_bytes / link.bytes_per_ms
        return link.taking(_TO_SPARE * moved.busy_ms / expected_ms) if expected_ms and moved.busy_ms else link

    out, back = (
        seen(link, earlier, later) for link, earlier, later in zip((links.out, links.back), before, after, strict=True)
    )
    return replace(links, out=out, back=back)


def _is_faster(one: SecondMemory, other: SecondMemory) -> bool:
    """Whether some transfers over the links of one take less time than over the other's."""
    pairs = (one.out, other.out), (one.back, other.back)
    return any(a.bytes_per_ms > b.bytes_per_ms or a.latency_ms < b.latency_ms for a, b in pairs)


def timed_anew(tried: Tried, request: PlanRequest, measured: Measured) -> Tried:
    """With the links as they are known now."""
    schedule = tried.solution.schedule
    memory = memory_for(request, measured) if schedule.offloaded else None
    if memory is None or memory == tried.solution.memory:
        return tried
    costs = costs_of(measured.problem, schedule, memory)
    plan = tried.planned.plan
    tried.planned.plan = replace(plan, memory=memory, time_ms=costs.time_ms, waiting_ms=costs.waiting_ms)
    return tried._replace(solution=replace(tried.solution, memory=memory, time_ms=costs.time_ms))
