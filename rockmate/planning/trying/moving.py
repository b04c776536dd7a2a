"""Plans that move data beside the one that does not: real steps decide, and correct what transfers are said to cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from rk_solvers import Link, SecondMemory, Solution
from rk_solvers.transfers.reading import corrected, costs_of
from rk_solvers.transfers.with_moves import BoundAside
from rockmate.memory.split import MemorySplit
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
from rockmate.planning.trying.turns import steps_by_turns_ms

_COMPARISONS = 3  # of plans that move data, each for links as the one before has shown them
_COMPARISONS_S = 15.0  # of comparisons and searches, beyond which no other begins
_LATE = 0.02  # of a step's time: links are corrected where transfers cost so much more than was predicted
_TO_SPARE = 1.1  # of what transfers take in steps: one that is late is waited for, and one that is early costs nothing
_WORTH_MOVING = 0.01  # of a step's time: what is quicker by less may not be


def the_quicker(
    measured: Measured, request: PlanRequest, module: torch.nn.Module, tried: Tried, split: MemorySplit | None
) -> Tried:
    """Of plans that move data and the one that does not, as far as all are within the budget: by steps of each.

    What transfers cost the computation depends on what else the machine does, and is predicted by far less well than
    what computation takes. Where steps take another time than predicted, the links are corrected, and moves looked for
    anew. Where none seem to pay, those are tried that would if transfers cost the computation nothing.
    """
    asked = Asked(tried.planned.plan.budget_bytes, tried.target_bytes, split)
    alone = tried.solution.alone if tried.solution.schedule.offloaded else tried.solution
    if alone is None or not alone.schedule.recomputations or not alone.status.fits or not is_within(tried, request):
        return tried
    first = memory_for(request, measured)
    if first is None:
        return tried
    with _bound_of_free_moves(request, measured, asked, first) as free_bound:
        best = _quicker_by_steps(measured, request, module, tried, alone, asked)
        bound_ms = tried.solution.lower_bound_ms
        now = memory_for(request, measured)
        if now is not None and (_is_faster(now, first) or _is_lighter(now, first)):
            # That bound counted what transfers do not cost.
            told_ms = None if _is_faster(now, first) else free_bound.told_ms()
            bound_ms = measured.problem.keep_all_time_ms if told_ms is None else told_ms
    return best._replace(solution=replace(best.solution, lower_bound_ms=bound_ms))


def _bound_of_free_moves(request: PlanRequest, measured: Measured, asked: Asked, links: SecondMemory) -> BoundAside:
    """The bound that holds whatever steps show transfers to cost the computation; nothing where it may not be needed.

    It is computed where a core has nothing else to do: steps are timed meanwhile.
    """
    limits, free = request.limits, _free(links)
    is_wanted = _is_lighter(free, links) and not _is_given(request)
    limit_s = min(limits.bound_s, limits.longest_s) if is_wanted else 0.0
    return BoundAside(measured.problem, asked.target_bytes, free, limit_s, measured.chain, yielding=True)


def _quicker_by_steps(
    measured: Measured, request: PlanRequest, module: torch.nn.Module, tried: Tried, alone: Solution, asked: Asked
) -> Tried:
    """`the_quicker` of what was `tried` and of what was found `alone`; its bound is the caller's."""
    moving: Tried | None = tried
    other: Tried | None = tried
    if tried.solution.schedule.offloaded:
        other = try_if_it_fits(measured, request, module, alone, asked, is_last=False)
    else:
        moving = _moving_freely(measured, request, module, alone, asked)
    if moving is None or other is None or not is_within(other, request):
        return tried
    best = other
    request.progress("compare", 0, _COMPARISONS)
    share = 1.0 - _WORTH_MOVING  # of what the best takes that only recomputes
    deadline = time.perf_counter() + _COMPARISONS_S
    for attempt in range(_COMPARISONS):
        both = [(measured, one.planned) for one in (moving, other)]
        before = _traffic(moving)
        predicted = moving.solution.time_ms / alone.time_ms
        moving_ms, alone_ms = steps_by_turns_ms(module, both, request.loss, predicted)
        request.progress("compare", attempt + 1, _COMPARISONS)
        if moving_ms <= share * alone_ms:
            best, share = moving, moving_ms / alone_ms
        solution = moving.solution
        took_ms = moving_ms / alone_ms * alone.time_ms
        if abs(took_ms - solution.time_ms) <= _LATE * alone.time_ms:
            break
        assert solution.memory is not None
        links = _as_in_steps(solution.memory, before, _traffic(moving))
        late_ms = took_ms - costs_of(measured.problem, solution.schedule, links).time_ms
        _take_links(request, measured, corrected(measured.problem, solution.schedule, links, late_ms))
        if attempt + 1 == _COMPARISONS or time.perf_counter() >= deadline:
            break
        again = moves_beside(alone, request, measured).solve(measured.problem, asked.target_bytes)
        if not again.schedule.offloaded or again.schedule == solution.schedule:
            break
        found = try_if_it_fits(measured, request, module, again, asked, is_last=False)
        if found is None or not is_within(found, request):
            break
        moving = found
    return _timed_anew(best, request, measured)


def _moving_freely(
    measured: Measured, request: PlanRequest, module: torch.nn.Module, alone: Solution, asked: Asked
) -> Tried | None:
    """A plan of moves that pay if they cost the computation nothing; None where there is none, or it was not asked for.

    What they cost beside a step was measured beside another computation, and may be far less.
    """
    links = memory_for(request, measured)
    if links is None or _is_given(request) or not _is_lighter(_free(links), links):
        return None
    tried = None
    _take_links(request, measured, _free(links))
    try:
        found = moves_beside(alone, request, measured).solve(measured.problem, asked.target_bytes)
        if found.schedule.offloaded and found.time_ms <= (1 - _WORTH_MOVING) * alone.time_ms:
            tried = try_if_it_fits(measured, request, module, found, asked, is_last=False)
        if tried is not None and not is_within(tried, request):
            tried = None
    finally:
        if tried is None:  # no step has shown anything else
            _take_links(request, measured, links)
    return tried


def _is_given(request: PlanRequest) -> bool:
    """Whether what is asked for is a certain plan, and none is looked for."""
    return isinstance(request.solver, FixedPlan) or request.follow is not None


def _free(links: SecondMemory) -> SecondMemory:
    """The same if transfers cost the computation nothing."""
    return replace(links, out=replace(links.out, burden=0.0), back=replace(links.back, burden=0.0))


def _take_links(request: PlanRequest, measured: Measured, links: SecondMemory) -> None:
    assert request.tiers is not None
    request.tiers.correct(measured.device, links)


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


def _is_lighter(one: SecondMemory, other: SecondMemory) -> bool:
    """Whether transfers over the links of one cost the computation less than those over the other's."""
    return one.out.burden < other.out.burden or one.back.burden < other.back.burden


def _is_faster(one: SecondMemory, other: SecondMemory) -> bool:
    """Whether some transfers over the links of one take less time than over the other's."""
    pairs = (one.out, other.out), (one.back, other.back)
    return any(a.bytes_per_ms > b.bytes_per_ms or a.latency_ms < b.latency_ms for a, b in pairs)


def _timed_anew(tried: Tried, request: PlanRequest, measured: Measured) -> Tried:
    """With the links as they were corrected last."""
    schedule, memory = tried.solution.schedule, memory_for(request, measured)
    if not schedule.offloaded or memory is None or memory == tried.solution.memory:
        return tried
    costs = costs_of(measured.problem, schedule, memory)
    plan = tried.planned.plan
    tried.planned.plan = replace(plan, memory=memory, time_ms=costs.time_ms, waiting_ms=costs.waiting_ms)
    return tried._replace(solution=replace(tried.solution, memory=memory, time_ms=costs.time_ms))
