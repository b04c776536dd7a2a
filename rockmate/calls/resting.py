"""Parameters of a planned module that go to a second memory, as its plan says."""

from __future__ import annotations

import torch

from rockmate.offload.resting import RestingTensors
from rockmate.offload.tier import Tier
from rockmate.planning.measured import Measured
from rockmate.planning.plan import Plan


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
