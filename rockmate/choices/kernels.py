"""By which kernels operations run: measured here, kept in the user's cache, and the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from rkgb.profile.measure import MeasuredBlocks
from rockmate.choices.parts import Planned, plan_with_or_without_parts, same_on_all_ranks, takes_no_more
from rockmate.choices.trial_notes import TrialNotes
from rockmate.errors import BudgetTooSmall
from rockmate.kernels.option import ChosenKernels, KernelTrial, has_others
from rockmate.plan_files import cache
from rockmate.plan_files.rank_agreement import default_exchange
from rockmate.planning.measured import trace_model
from rockmate.planning.planner import planning
from rockmate.planning.request import PlanRequest, check_request

_WAIT_S = 600.0  # for another rank, which traces and measures


def plan_by_faster_kernels(
    model: torch.nn.Module,
    sample: Any,
    request: PlanRequest,
    known: MeasuredBlocks,
    use_cache: bool,
    earlier: Sequence[Planned] = (),
) -> Planned:
    """What `plan_with_or_without_parts` finds, by other kernels where those may be, and are faster.

    They may take more memory: where no plan with them is within the budget, PyTorch's choice is taken.

    Raises as `plan_with_or_without_parts` does.
    """

    def make(asked: PlanRequest) -> Planned:
        return plan_with_or_without_parts(model, sample, asked, known, use_cache, earlier)

    if request.kernels == "as given" or request.chosen_kernels is not None:
        return make(request)
    check_request(request)
    usual = replace(request, kernels="as given")
    asked = _with_agreed(model, sample, request, use_cache and cache.is_enabled())
    try:
        made = make(asked)
    except BudgetTooSmall:
        if not has_others(asked.chosen_kernels or _chosen(model, sample, asked)):
            raise
        return _told(make(usual), "no plan by other kernels is within the budget")
    if not (made[1].plan.exceeds and has_others(made[0].kernels)):
        return made
    try:
        other = make(usual)
    except BudgetTooSmall:
        return made
    return made if takes_no_more(made, other) else _told(other, "plans by PyTorch's choice take less memory")


def _told(one: Planned, why: str) -> Planned:
    """A plan by the kernels that PyTorch picks, and `why` there are no others."""
    measured, planned = one
    measured.kernels = ChosenKernels(refused=why)
    planned.plan = replace(planned.plan, kernels=measured.kernels)
    return measured, planned


def _with_agreed(model: torch.nn.Module, sample: Any, request: PlanRequest, keeps: bool) -> PlanRequest:
    """`request`, with what was found of other kernels before, if the cache `keeps` it, and what all ranks have.

    The ranks of a process group have the same: the first to come chooses. Raises as tracing does.
    """
    if keeps:
        request = replace(request, known_kernels=TrialNotes(model, KernelTrial))
    exchange = default_exchange(_WAIT_S)
    if exchange is None:
        return request

    content = ["kernels", *same_on_all_ranks(model, sample)]
    agreed: ChosenKernels = exchange.agree_on(content, ChosenKernels, lambda: _chosen(model, sample, request))
    return replace(request, chosen_kernels=agreed)


def _chosen(model: torch.nn.Module, sample: Any, request: PlanRequest) -> ChosenKernels:
    """Those that are measured to be faster, or were before."""
    with planning(model):
        return trace_model(model, sample, request).kernels or ChosenKernels()
