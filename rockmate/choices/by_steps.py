"""Steps of a module in several layouts, by turns: what was measured of its operations, confirmed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

import torch

from rk_solvers import KeepAll
from rkgb import AllGraphs
from rkgb.devices.out_of_memory import if_it_fits
from rkgb.devices.registry import device_of
from rockmate.layouts.weights import give_back, lay_out
from rockmate.planning.measured import Traced, borrowed_with_gradients, problem_of
from rockmate.planning.request import PlanRequest
from rockmate.planning.trying.real_step import run_step, step_ms
from rockmate.planning.trying.turns import by_turns

_TURNS = 3  # timed steps in each layout
_MOST_TURNS = 9  # of those, where steps are quick
_TURNS_S = 4.0  # of steps, beyond which there are no more than there must be

Paths = tuple[str, ...]


def eager_steps_ms(
    model: torch.nn.Module, traced: Traced, graphs: AllGraphs, request: PlanRequest, layouts: Sequence[Paths]
) -> list[float] | None:
    """Time of an eager step with each of these sets of weights in channels_last: the least of some, taken by turns.

    What else a machine does only adds to a step. None where the step does not fit the device. The module is left as it
    was given; within `for_planning`.
    """
    device = traced.device
    problem, _ = problem_of(graphs, traced.loss, None, traced.gradients)
    keep_all_bytes = KeepAll().solve(problem, sys.maxsize).peak_bytes
    if device_of(device).overcommits and keep_all_bytes > device_of(device).available_bytes():
        return None
    borrow = partial(borrowed_with_gradients, model, {device}, traced.graph.dgraph, traced.gradients)

    def step(paths: Paths, *, timed: bool) -> float:
        give_back(model)
        lay_out(model, paths)
        with borrow():
            if timed:
                return step_ms(model, traced.sample, request.loss, device)
            run_step(model, traced.sample.copy(), request.loss)
        return 0.0

    def turns() -> list[float]:
        request.progress("layout (steps)", 0, 1)
        for paths in layouts:
            step(paths, timed=False)  # libraries choose and prepare kernels in the first one
        times_ms = by_turns([partial(step, paths, timed=True) for paths in layouts], _TURNS, _MOST_TURNS, _TURNS_S)
        request.progress("layout (steps)", 1, 1)
        return [min(of_one) for of_one in zip(*times_ms, strict=True)]

    try:
        return if_it_fits(turns)
    finally:
        give_back(model)
