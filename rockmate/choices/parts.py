"""Whether parts of a module are compiled: a plan with them and one without, and steps of both that decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from rkgb import make_sample
from rkgb.devices.out_of_memory import if_it_fits
from rkgb.profile.measure import MeasuredBlocks
from rockmate.choices.trial_notes import TrialNotes
from rockmate.errors import BudgetTooSmall
from rockmate.plan_files import cache
from rockmate.plan_files.rank_agreement import RankAgreement, default_exchange, plan_key
from rockmate.plan_files.record import made_here
from rockmate.plan_files.reuse import code_digest, digest_of, plan_or_reuse
from rockmate.planning.lowered import LoweredPlan
from rockmate.planning.measured import Measured, trace_model
from rockmate.planning.planner import planning
from rockmate.planning.request import PlanRequest, check_request
from rockmate.planning.trying.turns import steps_by_turns_ms
from rockmate.regions.option import CompiledRegions, RegionTrial, is_compiled

_WAIT_S = 600.0  # for another rank, which traces, compiles and measures
_MOST_COMPILED = 4  # plans of a module for which parts are compiled: that takes seconds for each
_WORTH_IT = 0.01  # of a step's time: what is quicker by less may not be, and is rounded otherwise for nothing

Planned = tuple[Measured, LoweredPlan]


@dataclass(frozen=True, slots=True)
class _Times:
    """Of a step, in ms. None where steps could not be run."""

    with_parts: float | None
    without: float | None


def plan_with_or_without_parts(
    model: torch.nn.Module,
    sample: Any,
    request: PlanRequest,
    known: MeasuredBlocks,
    use_cache: bool,
    earlier: Sequence[Planned] = (),
) -> Planned:
    """What `plan_or_reuse` finds; where parts may be compiled, the faster one of the plan with them and that without.

    Steps of both decide, by turns: what the parts gain is a few percent, about as much as predictions are off by. What
    they took is kept in the user's cache. The first of several ranks decides for all.

    Raises as `plan_or_reuse` does.
    """
    if not request.compile:
        return plan_or_reuse(model, sample, request, known, use_cache, earlier)
    check_request(request)
    keeps = use_cache and cache.is_enabled()
    trials = TrialNotes(model, RegionTrial) if keeps else None
    request = replace(request, compiles_anew=len(earlier) < _MOST_COMPILED, trials=trials)
    exchange = default_exchange(_WAIT_S)
    if exchange is not None:
        request = replace(request, chosen_regions=_agreed_regions(model, sample, request, exchange))

    def make(asked: PlanRequest) -> Planned:
        return plan_or_reuse(model, sample, asked, known, use_cache, earlier)

    def times(one: Planned, other: Planned) -> _Times:
        here = str(made_here(one[0].device))
        key = [plan_key(one[0], request), here, *(str(planned.plan.schedule) for _, planned in (one, other))]
        measure = partial(_measured_times, model, sample, request, one, other)
        if exchange is not None:
            agreed: _Times = exchange.agree_on(["steps", *key], _Times, measure)
            return agreed
        note = digest_of(["steps with parts and without", code_digest(), *key])
        return cache.noted(note if keeps else None, _Times, measure)

    return chosen(make, request, times, earlier)


def chosen(
    make: Callable[[PlanRequest], Planned],
    request: PlanRequest,
    times: Callable[[Planned, Planned], _Times],
    earlier: Sequence[Planned] = (),
) -> Planned:
    """The plan with compiled parts, unless that without takes less time, or is the only one within the budget."""
    without = request.without_parts()
    try:
        made = make(request)
    except BudgetTooSmall:
        return _told(make(without), "no plan with compiled parts is within the budget")
    regions, plan = made[0].regions, made[1].plan
    if not is_compiled(regions) or _is_taken_over(made, earlier):
        return made
    try:
        other = make(without)
    except BudgetTooSmall:
        return made
    if plan.exceeds or other[1].plan.exceeds:  # whichever is the nearest to the budget, where that is all there is
        return made if takes_no_more(made, other) else _told(other, "plans without compiled parts take less memory")
    found = times(made, other)
    if found.with_parts is None or found.without is None:
        is_slower = plan.time_ms > other[1].plan.time_ms
        told = "plans without compiled parts take less time by prediction"
    else:
        is_slower = found.with_parts > (1 - _WORTH_IT) * found.without
        told = f"steps with compiled parts took {found.with_parts:.4g} ms, and {found.without:.4g} ms without"
    return _told(other, told) if is_slower else made


def takes_no_more(one: Planned, other: Planned) -> bool:
    """Whether a plan takes at most what another does, of that which the budget is for."""
    ours, theirs = (plan.bounded_bytes or plan.peak_bytes for plan in (one[1].plan, other[1].plan))
    return ours <= theirs


def same_on_all_ranks(model: torch.nn.Module, sample: Any) -> list[Any]:
    """What tells a module and its calls, and is equal on all ranks: its class, and shapes of parameters and tensors."""
    shapes = [(path, list(parameter.shape)) for path, parameter in model.named_parameters()]
    calls = [list(tensor.shape) for tensor in make_sample(model, sample).tensors]
    return [type(model).__qualname__, shapes, calls]


def _told(one: Planned, why: str) -> Planned:
    """A plan without compiled parts, and `why` there are none."""
    measured, planned = one
    measured.regions = CompiledRegions(refused=why)
    planned.plan = replace(planned.plan, compiled=measured.regions)
    return measured, planned


def _is_taken_over(made: Planned, earlier: Sequence[Planned]) -> bool:
    """Whether a plan is an earlier one but for numbers: that was decided already."""
    measured, planned = made
    return any(
        planned.plan.schedule == other.plan.schedule and measured.problem == known.problem for known, other in earlier
    )


def _measured_times(model: torch.nn.Module, sample: Any, request: PlanRequest, one: Planned, other: Planned) -> _Times:
    call = make_sample(model, sample)
    both = [(replace(measured, sample=call), planned) for measured, planned in (one, other)]
    request.progress("compare", 0, 1)
    predicted = one[1].plan.time_ms / other[1].plan.time_ms
    with planning(model):
        found = if_it_fits(lambda: steps_by_turns_ms(model, both, request.loss, predicted))
    request.progress("compare", 1, 1)
    return _Times(None, None) if found is None else _Times(*found)


def _agreed_regions(
    model: torch.nn.Module, sample: Any, request: PlanRequest, exchange: RankAgreement
) -> CompiledRegions | None:
    """The parts that all ranks compile: those of the first to come."""

    def of_this_rank() -> CompiledRegions | None:
        with planning(model):
            return trace_model(model, sample, request).regions

    content = ["regions", *same_on_all_ranks(model, sample)]
    agreed: CompiledRegions | None = exchange.agree_on(content, CompiledRegions | None, of_this_rank)
    return agreed
