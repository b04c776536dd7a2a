"""The largest batch that can be trained within a budget."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from rk_solvers import Limits, Solver
from rkgb import make_sample
from rkgb.replay.first_call import left_as_it_was
from rockmate.errors import ArgumentError, BudgetError, BudgetTooSmall
from rockmate.memory.budget import Budget, is_fraction
from rockmate.memory.optimizer_state import OptimizerLike
from rockmate.memory.split import Scope
from rockmate.offload.option import Offload
from rockmate.options import PlanOptions
from rockmate.planning.costs import LossFunction
from rockmate.planning.request import PlanRequest
from rockmate.progress import ProgressCallback, progress_display
from rockmate.queries.batch_search import BatchSearch, LargestBatch
from rockmate.queries.batches import MakeBatch, find_batch

_START = 4  # the first batch where nobody says one: of one row alone, some layers cannot be trained


def max_batch(
    model: torch.nn.Module | MakeBatch,
    sample: Any = None,
    budget: Budget = None,
    *,
    loss: LossFunction | None = None,
    start: int | None = None,
    most: int = 1 << 20,
    among: Sequence[int] | None = None,
    measurements: int | None = 5,
    scope: Scope = "step",
    optimizer: OptimizerLike | None = None,
    solver: Solver | str = "auto",
    time_limit: float | None = None,
    gap: float | None = None,
    limits: Limits | None = None,
    progress: bool | ProgressCallback = False,
    offload: Offload | str | None = None,
    compile: bool = False,
    options: PlanOptions | None = None,
) -> LargestBatch:
    """The largest batch that can be trained within a budget.

    Batches are measured and planned until one fits and the next larger one does not. What two of them take tells
    what others will, so that few are needed: four, mostly. The answer was measured: a real step of its plan stays
    within the budget. The trace is compared with the module for the first batch, and by whoever follows the plan. With
    `compile`, plans have compiled parts, but where a larger batch fits without.

    Args:
        model: a function of the batch size that returns (model, sample) or (model, sample, loss); or a module, whose
            batch dimension is then found by trial.
        sample: of a module, as for `Rockmate`.
        budget: bytes, a size, or None for the free memory; no part of the eager peak, which grows with the batch.
        loss: of a module, a function of the output that takes any batch.
        start: the batch to begin with.
        most: no larger batch is tried.
        among: only these batches are tried, such as ``range(8, 1025, 8)``.
        measurements: so many batches are measured at most, once one fits; the answer may then be a few rows too small,
            and says so (`is_largest`). None: until the next larger batch was tried.
        scope, optimizer, solver, time_limit, gap, limits, progress, offload, compile, options: as for `Rockmate`.

    Raises:
        BudgetTooSmall: the smallest batch that can be tried does not fit.
        BudgetError: the budget is a part of the eager peak, or of what an allocator reserves.
        BatchError: the batch dimension of a module is not found; the message tells what was tried.
        ArgumentError: `start`, `most` or what is in `among` is no batch, or `measurements` no positive number; or a
            sample is given beside a function.
    """
    said = {
        "loss": loss,
        "solver": solver,
        "limits": limits,
        "progress": progress,
        "scope": scope,
        "optimizer": optimizer,
        "offload": offload,
        "compile": compile,
    }
    options = PlanOptions.of(options, said, time_limit, gap)
    _check(model, sample, budget, options.scope)
    if isinstance(model, torch.nn.Module):
        with left_as_it_was(model, make_sample(model, sample)):
            batches = find_batch(model, sample, options.loss)
        make, found = batches.make, batches.tried[-1]
        start = start or batches.size
    else:
        make, found = model, "by the function of the batch"
    allowed = _allowed(most, among)
    start = start or min(_START, most)
    if start < 1 or most < start:
        raise ArgumentError(f"the search cannot begin with a batch of {start} and end at {most}")
    if measurements is not None and measurements < 1:
        raise ArgumentError(f"measurements is {measurements!r}: give a positive number, or None for as many as needed")
    with progress_display(options.progress) as tell:
        request = replace(options.request(budget), progress=tell)
        return _searched(make, request, allowed, measurements, start, found)


def _check(model: torch.nn.Module | MakeBatch, sample: Any, budget: Budget, scope: Scope) -> None:
    """Refuse what no batch can be searched for."""
    if is_fraction(budget):
        raise BudgetError(
            f"the budget {budget!r} is a part of the eager peak, which grows with the batch: give bytes, a size such "
            'as "8GiB", or None for the free memory.'
        )
    if scope == "reserved":
        raise BudgetError(
            'scope="reserved" is measured of one batch at a time: search with scope="step" and a budget somewhat '
            "lower, and plan the batch that is found."
        )
    if sample is not None and not isinstance(model, torch.nn.Module):
        raise ArgumentError(
            f"a sample is given, {str(sample)[:60]!r}, beside a function that makes one for each batch; if it is the "
            "budget, say budget=..."
        )


def _searched(
    make: MakeBatch,
    request: PlanRequest,
    allowed: Sequence[int],
    measurements: int | None,
    start: int,
    found: str,
) -> LargestBatch:
    """The largest batch in each of the ways that there are: a later one is taken where a larger batch fits."""
    best: LargestBatch | None = None
    for one in request.in_each_way():
        batches, first = allowed, start
        if best is not None:
            plan = best.plan_file.plan
            batches = allowed[bisect_right(allowed, best.batch) :]
            if not batches or one.is_answered_by(plan.compiled, plan.kernels):
                continue
            one, first = replace(one, budget=best.budget_bytes), batches[0]
        try:
            larger = BatchSearch(make, one, batches, measurements).run(first, found)
        except BudgetTooSmall as error:
            refused = error.with_traceback(None)  # whose frames hold a model and a batch
            continue
        best = larger if best is None else replace(larger, trials=(*best.trials, *larger.trials))
    if best is None:
        raise refused
    return best


def _allowed(most: int, among: Sequence[int] | None) -> Sequence[int]:
    """The batches that may be tried, ascending."""
    if among is None:
        return range(1, max(1, most) + 1)
    if isinstance(among, range) and among.step > 0:  # of a million of them, no list
        found: Sequence[int] = range(among.start, min(among.stop, most + 1), among.step)
    else:
        found = sorted({batch for batch in among if batch <= most})
    if not found or found[0] < 1:
        raise ArgumentError(f"no batch may be tried: of {among!r}, none is from 1 to {most}")
    return found
