"""Plan a module, or take the plan that an earlier process made of the same training."""

from __future__ import annotations

import functools
import hashlib
import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

import rk_solvers
import rkgb
from rkgb import RecordMismatch, Sample, make_sample
from rkgb.profile.measure import MeasuredBlocks
from rockmate.errors import OffloadError, PlanFileError, PoorPlanWarning
from rockmate.guards.checkpointing import is_switched_off
from rockmate.memory.budget import RESERVE, is_what_is_free, read_budget, resolve_budget
from rockmate.memory.resident import ResidentRise
from rockmate.memory.split import gradients_made, gradients_there
from rockmate.plan_files import cache
from rockmate.plan_files.alike import taken_over
from rockmate.plan_files.content import PlanFile
from rockmate.plan_files.rank_agreement import default_exchange, plan_with_others, solver_text
from rockmate.plan_files.record import graph_record, made_here, plan_file_of
from rockmate.plan_files.restore import restore_traced
from rockmate.planning.lowered import LoweredPlan
from rockmate.planning.measured import Measured, Traced, measure_traced, measured_above, trace_model
from rockmate.planning.planner import make_plan, planning, poor_plan_text
from rockmate.planning.request import PlanRequest, check_request

_OF_MEASURING = 32  # digits of a key that are of what is measured: as many are of what is solved


def plan_or_reuse(
    model: torch.nn.Module,
    sample: Any,
    request: PlanRequest,
    known: MeasuredBlocks,
    use_cache: bool,
    earlier: Sequence[tuple[Measured, LoweredPlan]] = (),
) -> tuple[Measured, LoweredPlan]:
    """Trace `model`; take the plan of the same training from the cache, or measure, plan, and keep it there.

    Of plans that were made `earlier` under the same budget, one whose graph is the same but for numbers is taken over.

    One of several ranks plans with the others, and takes nothing from the cache: all are to do the same.
    Raises as `measure` and `make_plan` do.
    """
    check_request(request)
    with planning(model), ResidentRise() as resident:
        traced = trace_model(model, sample, request)
        alone = default_exchange(0.0) is None
        over = taken_over(model, traced, earlier) if earlier and alone else None
        if over is not None:
            over[0].sample = None
            return over
        key = _key(model, traced, request) if use_cache and cache.is_enabled() and alone else None
        found = None if key is None else _reused(model, traced, request, key)
        if found is None:
            measured = None if key is None else _measured_before(model, traced, request, key)
            measured = measured or measure_traced(model, traced, request, known)
            measured, planned = plan_with_others(measured, request, model, make_plan)
            _tell_poor_plan(planned, request)
            planned.plan = replace(planned.plan, planning_peak_bytes=resident.rise_bytes())
            if key is not None and planned.is_complete and not planned.plan.exceeds:
                cache.put(key, plan_file_of(model, measured, planned.plan, request))
        else:
            measured, planned = found
            # A graph none of whose parts is compiled, or runs by other kernels, is that of nobody who asked for it.
            planned.plan = replace(planned.plan, compiled=measured.regions, kernels=measured.kernels)
    measured.sample = None
    return measured, planned


def plan_again(
    model: torch.nn.Module,
    measured: Measured,
    sample: Any,
    request: PlanRequest,
    gradients: frozenset[str] | None = None,
) -> tuple[Measured, LoweredPlan]:
    """Plan what was `measured` of calls like `sample` within another budget.

    Nothing is traced or measured anew, but for the eager step where other gradients are there; those named are taken to
    be, if any are.

    Raises as `make_plan`.
    """
    check_request(request)
    with planning(model):
        call = make_sample(model, sample)
        there = gradients
        if there is None:
            there = gradients_there(model, measured.graphs.D_graph).intersection(gradients_made(measured.graphs))
        if there == measured.gradients:
            other = replace(measured, sample=call, measuring_s=0.0)
        else:
            other = measured_above(model, measured, call, request, there)
        other, planned = plan_with_others(other, request, model, make_plan)
        _tell_poor_plan(planned, request)
    other.sample = None
    return other, planned


def plan_above(
    model: torch.nn.Module, measured: Measured, sample: Sample, request: PlanRequest, gradients: frozenset[str]
) -> tuple[Measured, LoweredPlan]:
    """Plan what was `measured` of calls like `sample` once more, for steps before which other gradients are there.

    `gradients` are parameters by their names in the graph. Raises as `make_plan`.
    """
    with planning(model):
        other = measured_above(model, measured, sample, request, gradients)
        other, planned = plan_with_others(other, request, model, make_plan)
        _tell_poor_plan(planned, request)
    other.sample = None
    return other, planned


def _tell_poor_plan(planned: LoweredPlan, request: PlanRequest) -> None:
    told = None if request.is_hurried else poor_plan_text(planned, request)
    if told is not None:
        warnings.warn(told, PoorPlanWarning, stacklevel=5)  # who calls Rockmate(...)


def _reused(
    model: torch.nn.Module, traced: Traced, request: PlanRequest, key: str
) -> tuple[Measured, LoweredPlan] | None:
    plan_file = cache.get(key)
    if plan_file is None or not _is_budget_now(plan_file, traced, request):
        return None
    request.progress("reuse", 0, 1)
    try:
        found = restore_traced(model, traced, plan_file, request.tiers)
    except (PlanFileError, RecordMismatch, OffloadError):
        cache.drop(key)  # whatever it is, it is planned again
        return None
    request.progress("reuse", 1, 1)
    return found


def _measured_before(model: torch.nn.Module, traced: Traced, request: PlanRequest, key: str) -> Measured | None:
    """What was measured of the same training for another budget, or another solver; None where nothing was."""
    other_key = next(iter(cache.keys(key[:_OF_MEASURING])), None)
    plan_file = None if other_key is None else cache.get(other_key)
    if other_key is None or plan_file is None or plan_file.promise.memory_split is not None:
        return None
    request.progress("reuse", 0, 1)
    gradients = traced.gradients
    try:
        measured, _ = restore_traced(model, traced, plan_file, request.tiers)
    except OffloadError:
        traced.gradients = gradients
        return None
    except (PlanFileError, RecordMismatch):
        cache.drop(other_key)
        traced.gradients = gradients
        return None
    request.progress("reuse", 1, 1)
    return measured


def _is_budget_now(plan_file: PlanFile, traced: Traced, request: PlanRequest) -> bool:
    """Where the budget is the free memory: whether about as much is free now, and not less."""
    if not is_what_is_free(request.budget):
        return True
    split = plan_file.promise.memory_split
    present_bytes = 0 if split is None else split.residents.present_bytes
    now_bytes = resolve_budget(None, plan_file.measured.eager_peak_bytes, traced.device, present_bytes)
    then_bytes = plan_file.promise.whole_budget_bytes
    without = not plan_file.parsed_schedule.recomputations  # more memory makes no better plan
    return then_bytes <= now_bytes and (without or then_bytes >= now_bytes * (1 - RESERVE))


def _key(model: torch.nn.Module, traced: Traced, request: PlanRequest) -> str | None:
    """A digest of all that decides what is measured, and one of all else that decides a plan.

    None where something of it cannot be told.
    """
    solver = request.solver if isinstance(request.solver, str) else solver_text(request.solver)
    if solver is None:
        return None
    budget = "auto" if is_what_is_free(request.budget) else read_budget(request.budget)
    of_solving = [
        [budget, type(budget).__name__],  # 1.0 is a share, and 1 is a byte
        [solver, asdict(request.limits)],
        None if request.follow is None else request.follow.to_json(),
        None if request.tiers is None else asdict(request.tiers.option),
        None if request.chosen_layout is None else asdict(request.chosen_layout),
    ]
    return key_of_measuring(model, traced, request)[:_OF_MEASURING] + digest_of(of_solving)[_OF_MEASURING:]


def key_of_measuring(model: torch.nn.Module, traced: Traced, request: PlanRequest) -> str:
    """A digest of all that decides what is measured of what was `traced` of `model`."""
    of_measuring = [
        code_digest(),
        msgspec.to_builtins(made_here(traced.device)),
        graph_record(model, str(traced.pattern), traced.graph).digest,
        [(node.name, node.keep_reason) for node in traced.graph if node.keep_reason],
        request.scope,
        traced.state_bytes and traced.state_bytes[0],
        None if traced.loss is None else traced.loss.peak_bytes,
        request.opaque,
        sorted(traced.gradients),
        is_switched_off(),  # a fraction is of the step with the model's own checkpointing, where that is on
    ]
    return digest_of(of_measuring)


def digest_of(content: list[Any]) -> str:
    """Of plain values; others count by their texts."""
    return hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()


@functools.cache
def code_digest() -> str:
    """Of the code that plans: another version of it may find another plan, or write another program."""
    exact = hashlib.sha256()
    for package in (rkgb, rk_solvers):
        _add(exact, Path(str(package.__file__)).parent)
    _add(exact, Path(__file__).parents[1])
    return exact.hexdigest()


def _add(exact: Any, folder: Path) -> None:
    for file in sorted(folder.rglob("*.py")):
        exact.update(f"{file.relative_to(folder)} ".encode())
        exact.update(file.read_bytes())
