"""What ranks run for the tests of one plan for all ranks."""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
from torch import distributed

from rk_solvers import Greedy, Problem, Solution
from rockmate import BudgetTooSmall, Rockmate
from rockmate.errors import PlanExchangeError, PlanExchangeWarning
from rockmate.plan_files.rank_agreement import plan_alone
from tests.free_memory import free_is
from tests.module.models import WIDTH, Layers, built
from tests.module.steps import assert_same_training, squares, train


def rows_of(count: int) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(count))


def _summary(module: Rockmate) -> dict[str, Any]:
    plan = module.plan
    return {
        "schedule": str(plan.schedule),
        "times": (plan.time_ms, plan.baseline_time_ms, plan.lower_bound_ms),
        "solver": plan.solver,
        "peaks": (plan.peak_bytes, plan.measured_peak_bytes),
        "fits": plan.measured_peak_bytes is not None and plan.measured_peak_bytes <= plan.budget_bytes,
        "recomputations": plan.recomputations,
    }


class Slow(Greedy):
    """Greedy, which takes its time, and counts."""

    solved = 0

    def solve(self, problem: Problem, budget_bytes: int) -> Solution:
        type(self).solved += 1
        time.sleep(0.5)
        return super().solve(problem, budget_bytes)


def plan_once(count: int) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Plans twice; returns how often this rank searched, and both plans. Trains as eager does."""
    Slow.solved = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = Rockmate(built(Layers), rows_of(count), 0.7, loss=squares, solver=Slow())
        second = Rockmate(built(Layers), rows_of(count), 0.7, loss=squares, solver=Slow())
    batches = [rows_of(count) + step for step in range(2)]
    assert_same_training(train(first, batches), train(built(Layers), batches))
    return Slow.solved, _summary(first), _summary(second)


def plan_different(count: int) -> tuple[dict[str, Any], float]:
    """Each rank has a model of its own: nobody waits for another."""
    depth = 2 + distributed.get_rank()
    started = time.monotonic()
    module = Rockmate(built(Layers, depth), rows_of(count), 0.7, loss=squares)
    return _summary(module), time.monotonic() - started


def plan_crosswise(count: int) -> list[str]:
    """Ranks plan the same two models, in another order each."""
    depths = [2, 3] if distributed.get_rank() == 0 else [3, 2]
    plans = {depth: Rockmate(built(Layers, depth), rows_of(count), 0.7, loss=squares).plan for depth in depths}
    return [str(plans[depth].schedule) + str(plans[depth].time_ms) for depth in (2, 3)]


def plan_on_one_rank(count: int) -> int:
    """The last short batch of one rank alone."""
    if distributed.get_rank() == 1:
        return Rockmate(built(Layers), rows_of(count), 0.7, loss=squares).plan.recomputations
    return -1


def too_small(count: int) -> tuple[str, int, int, str]:
    try:
        Rockmate(built(Layers), rows_of(count), 10_000, loss=squares)
    except BudgetTooSmall as error:
        return str(error), error.smallest_budget_bytes, error.proven_bytes, error.binding_op
    raise AssertionError("10 kB suffice")


class Broken(Greedy):
    """No solver at all, at first."""

    broken = True

    def solve(self, problem: Problem, budget_bytes: int) -> Solution:
        time.sleep(1.0)  # until the others wait
        if type(self).broken:
            raise ZeroDivisionError("a defect of a solver")
        return super().solve(problem, budget_bytes)


def fails_then_works(count: int) -> tuple[str, dict[str, Any]]:
    """What this rank was told, and the plan that it has once the defect is mended."""
    Broken.broken = True
    told = ""
    distributed.barrier()
    try:
        Rockmate(built(Layers), rows_of(count), 0.7, loss=squares, solver=Broken())
    except (ZeroDivisionError, PlanExchangeError) as error:
        told = f"{type(error).__name__}: {error}"
    Broken.broken = False
    distributed.barrier()
    return told, _summary(Rockmate(built(Layers), rows_of(count), 0.7, loss=squares, solver=Broken()))


def plan_by_itself(count: int) -> tuple[int, dict[str, Any]]:
    Slow.solved = 0
    with plan_alone():
        module = Rockmate(built(Layers), rows_of(count), 0.7, loss=squares, solver=Slow())
    return Slow.solved, _summary(module)


def cannot_follow(count: int) -> tuple[list[str], dict[str, Any]]:
    """Rank 0 plans for much memory, rank 1 has little, under a budget that both call by one name."""
    from rockmate.memory import budget

    rank = distributed.get_rank()
    whole = Rockmate(built(Layers), rows_of(count), "1GiB", loss=squares).plan
    free_bytes = whole.baseline_peak_bytes * (10 if rank == 0 else 7) // 10
    if rank == 1:
        distributed.barrier()
    real = budget.device_of
    budget.device_of = free_is(int(free_bytes / 0.9) + 1)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module = Rockmate(built(Layers), rows_of(count), None, loss=squares)
    finally:
        budget.device_of = real
    if rank == 0:
        distributed.barrier()
    told = [str(warning.message) for warning in caught if issubclass(warning.category, PlanExchangeWarning)]
    return told, _summary(module)
