"""A budget that was given as a fraction: of what, where other gradients are there before a step than at first."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import torch

from rk_solvers import KeepAll
from rockmate.memory.budget import Budget, read_budget
from rockmate.memory.split import gradients_made, gradients_there
from rockmate.planning.measured import Measured, problem_of
from rockmate.planning.request import PlanRequest


@dataclass(frozen=True, slots=True)
class Share:
    """A part of what a step takes: of the one that was planned first."""

    fraction: float
    first: Measured

    @staticmethod
    def of(budget: Budget, first: Measured) -> Share | None:
        """None for a budget in bytes, which stays what it is, and for one that counts all gradients anyway."""
        fraction = read_budget(budget)
        if not isinstance(fraction, float) or first.residents is not None or not first.gradients:
            return None
        return Share(fraction, first)

    def is_of(self, measured: Measured) -> bool:
        """Whether this was measured of the calls that it is a share of, whatever gradients are there."""
        return measured.graphs is self.first.graphs

    def is_of_more(self, model: torch.nn.Module) -> bool:
        """Whether a step of `model` would make gradients now that were there before the first one."""
        return not self.first.gradients <= gradients_there(model, self.first.graphs.D_graph)

    def bytes_now(self, model: torch.nn.Module) -> int:
        """The share of what the first step would take above the gradients that are there now, as predicted."""
        first = self.first
        now = gradients_there(model, first.graphs.D_graph).intersection(gradients_made(first.graphs))
        problem, _ = problem_of(first.graphs, first.loss, None, now)
        then_bytes, now_bytes = (KeepAll().solve(one, sys.maxsize).peak_bytes for one in (first.problem, problem))
        return round(self.fraction * (first.peak_now_bytes + max(0, now_bytes - then_bytes)))


def asked_now(
    request: PlanRequest, share: Share | None, model: torch.nn.Module, alike: Measured | None = None
) -> PlanRequest:
    """`request`, whose budget is the bytes of the first plan, for the gradients that are there now.

    What a fraction is of is more where a step makes gradients to which the first one added. Where calls like those of
    the first plan were measured, `alike`, the fraction itself is asked for: their step is measured.
    """
    if share is None or request.scope == "reserved" or not share.is_of_more(model):
        return request  # what is reserved is measured of each step, and not predicted
    is_measured = alike is not None and share.is_of(alike)
    return replace(request, budget=share.fraction if is_measured else share.bytes_now(model))
