"""Parameters of a planned module that go to a second memory, as its plans say."""

from __future__ import annotations

import torch

from rockmate.calls.specialization import Specialization
from rockmate.memory.optimizer_state import StateRests
from rockmate.offload.tier import Tier
from rockmate.planning.measured import Measured
from rockmate.planning.plan import Plan
from rockmate.planning.request import PlanRequest
from rockmate.resting.tensors import RestingTensors
from rockmate.runtime.windows import parameters_that_may_rest


class RestingParameters:
    """Those of one module. Its plans share a window, the smallest that one of them has."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._owner: RestingTensors | None = None

    def follow(self, member: Specialization, request: PlanRequest) -> None:
        """Have them rest as the plan says, if it does. Raises `OffloadError` where they cannot be stored."""
        split = member.plan.memory_split
        if split is None or not split.residents.window_bytes or request.tiers is None:
            return
        tier = request.tiers.on(member.measured.device)
        if self._owner is not None:
            window_bytes = split.residents.window_bytes - tier.staging_bytes
            self._owner.window_bytes = min(self._owner.window_bytes, window_bytes)
            return
        if not member.measured.may_rest:  # a plan of a file
            trains = isinstance(request.optimizer, StateRests)
            member.measured.may_rest = parameters_that_may_rest(self._model, member.measured.graphs.K_graph, trains)
        self._owner = rest_as_planned(self._model, member.measured, member.plan, tier)

    def wake(self) -> None:
        """Have all of them here: another plan is to come."""
        if self._owner is not None:
            self._owner.wake_all()
        self._owner = None


def rest_as_planned(model: torch.nn.Module, measured: Measured, plan: Plan, tier: Tier) -> RestingTensors | None:
    """Have those parameters of `model` rest in `tier` that `plan` does not count; None where it counts all.

    Raises `OffloadError` where they cannot be stored; those that are not are as they were.
    """
    if plan.memory_split is None or not plan.memory_split.residents.window_bytes:
        return None
    leaves = measured.graphs.D_graph.leaves
    owner = RestingTensors(tier, plan.memory_split.residents.window_bytes - tier.staging_bytes)
    paths = [leaves[name].path if name in leaves else name for name in measured.may_rest]
    owner.take(map(model.get_parameter, paths))
    return owner
