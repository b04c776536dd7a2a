"""By which kernels operations run: measured here, kept in the user's cache, and the same on all ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from rkgb import make_sample
from rockmate.choices.trial_notes import TrialNotes
from rockmate.kernels.option import ChosenKernels, KernelTrial
from rockmate.plan_files.rank_agreement import default_exchange
from rockmate.planning.measured import trace_model
from rockmate.planning.planner import planning
from rockmate.planning.request import PlanRequest

_WAIT_S = 600.0  # for another rank, which traces and measures


def with_agreed_kernels(model: torch.nn.Module, sample: Any, request: PlanRequest, keeps: bool) -> PlanRequest:
    """`request`, with what was found of other kernels before, if the cache `keeps` it, and what all ranks have.

    The ranks of a process group have the same: the first to come chooses. Raises as tracing does.
    """
    if keeps:
        request = replace(request, known_kernels=TrialNotes(model, KernelTrial))
    exchange = default_exchange(_WAIT_S)
    if exchange is None:
        return request

    def of_this_rank() -> ChosenKernels:
        with planning(model):
            return trace_model(model, sample, request).kernels or ChosenKernels()

    shapes = [(path, list(parameter.shape)) for path, parameter in model.named_parameters()]
    calls = [list(tensor.shape) for tensor in make_sample(model, sample).tensors]
    agreed: ChosenKernels = exchange.agree_on(
        ["kernels", type(model).__qualname__, shapes, calls], ChosenKernels, of_this_rank
    )
    return replace(request, chosen_kernels=agreed)
