"""Modules that move data to a second memory by plans that tests write."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from rk_solvers import check
from rk_solvers.groups import normalise
from rk_solvers.links import Link, SecondMemory
from rk_solvers.problem import Recompute
from rk_solvers.transfers.moves import Base, Costs
from rk_solvers.transfers.placing import least_held, placed
from rockmate.offload.tier import Tier
from rockmate.planning.lowered import planned_as
from rockmate.planning.measured import Measured
from rockmate.planning.plan import Plan
from rockmate.planning.trying.tried import measured_peak
from rockmate.runtime.runner import Runner
from tests.module.steps import Loss, measured_for, squares

MEMORY = SecondMemory(Link(1e6), Link(1e6))


@dataclass
class Moving:
    """What runs in a module's place, and what was predicted of it."""

    runner: Runner
    costs: Costs
    moves: int
    measured: Measured
    model: nn.Module
    loss: Loss | None

    def peak_bytes(self) -> int:
        """Of one real step."""
        self.model.zero_grad()
        return measured_peak(self.model, self.runner, self.measured, self.loss).allocated_bytes


def moving(
    model: nn.Module,
    sample: Any,
    tier: Tier,
    *,
    share: float = 1.0,
    seed: int = 0,
    loss: Loss | None = squares,
    recompute: Callable[[Measured], Recompute] | None = None,
) -> Moving:
    """A share of what may move does, between its last use in the forward and its first in the backward.

    With seed 0 all leave at once and come back when they are wanted, else at moments that the seed decides.
    """
    measured, chance = measured_for(model, sample, loss), random.Random(seed)
    problem = measured.problem
    plan = problem.no_recompute if recompute is None else normalise(problem, recompute(measured))
    base = Base(problem, plan, MEMORY, over_the_turn=True)
    gaps = [gap for gap in base.gaps if chance.random() < share]
    least_bytes = int(least_held(base, gaps).max())
    budget_bytes = chance.randint(least_bytes, int(base.curve.max())) if seed else least_bytes
    moves = placed(base, gaps, budget_bytes)
    assert moves is not None
    schedule, costs = base.schedule(moves), base.costs(moves)
    check(problem, schedule, budget_bytes, MEMORY)
    planned = planned_as(
        Plan(
            budget_bytes=budget_bytes,
            peak_bytes=costs.peak_bytes,
            time_ms=costs.time_ms,
            baseline_peak_bytes=measured.eager_peak_bytes,
            baseline_time_ms=problem.keep_all_time_ms,
            solver="hand",
            planning_s=0.0,
            schedule=schedule,
        ),
        measured,
        model,
        tier,
    )
    runner = planned.runner_for(model, measured)
    return Moving(runner, costs, len(moves), measured, model, loss)
