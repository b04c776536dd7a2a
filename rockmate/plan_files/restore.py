"""From a plan file and a module to what runs: traced and compared, neither measured nor solved."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from typing import Any, NoReturn

import torch

from rkgb import AllGraphs, DGraph, RecordMismatch
from rkgb.errors import GraphError
from rkgb.ir.bgraph import kept_trees
from rkgb.ir.call import is_ref
from rkgb.ir.kgraph import KGraph
from rkgb.passes.cut import chain, cut
from rkgb.passes.equivalence import equivalent_classes
from rkgb.passes.s_to_k import s_to_k
from rkgb.profile.block_run import FreshGradients
from rkgb.profile.measure import MeasuredBlocks
from rkgb.profile.recorded import recorded_profiles
from rkgb.state.attributes import written
from rkgb.state.module_state import for_planning
from rkgb.tree import leaves
from rockmate.errors import BudgetTooSmall, OffloadError, PlanFileError, PlanFileMismatch, PlanFileWarning
from rockmate.guards.flags import flags_difference
from rockmate.offload.option import Offload
from rockmate.offload.tier import Tier
from rockmate.offload.tiers import Tiers
from rockmate.plan_files.content import Made, PlanFile
from rockmate.plan_files.difference import report
from rockmate.plan_files.record import graph_record, made_here
from rockmate.planning.costs import LossCost, LossFunction
from rockmate.planning.fixed_plan import FixedPlan, PortablePlan
from rockmate.planning.lowered import LoweredPlan, planned_as
from rockmate.planning.measured import (
    Measured,
    Traced,
    Trained,
    drawn_sooner_ms,
    joined,
    measure_traced,
    refuse_without_backward,
    trace_model,
)
from rockmate.planning.planner import make_plan, planning
from rockmate.planning.request import PlanRequest
from rockmate.planning.trying.tried import measured_peak
from rockmate.units import format_apart, format_bytes

_DAMAGED = "what the file tells of its costs does not belong to its graph: get the file anew, or plan the module again."


def restore(
    model: torch.nn.Module, sample: Any, request: PlanRequest, plan_file: PlanFile
) -> tuple[Measured, LoweredPlan]:
    """`model` on `sample` under the plan of a file, which decides what is opaque, pinned and trained in place of
    `request`.

    A plan that was made with this version of PyTorch, on such a processor and under these flags of its back ends, is
    taken over as it is, once the graph proves to be the same and to save the same tensors; with other threads, or where
    it does not tell its processor, once one real step has shown its peak. Of one made elsewhere, or with what other
    code measured, only what it recomputes is followed, with costs measured anew and a warning (`PlanFileWarning`).

    Raises `PlanFileMismatch`, with the differences, where the graph is another or the plan takes more here than its
    budget, `PlanFileError` for a file whose parts do not belong together, and what tracing raises.
    """
    request = replace(request, opaque=plan_file.asked.opaque, pin=(), scope=plan_file.asked.scope, is_checked=True)
    _refuse_missing_parts(model, plan_file)
    with planning(model):
        asked = plan_file.asked
        trained = None if asked.trained is None else Trained(frozenset(asked.trained), frozenset(asked.assumed))
        traced = trace_model(model, sample, request, trained, pinned_as(plan_file))
        here = graph_record(model, str(traced.pattern), traced.graph)
        if here.digest != plan_file.graph.digest:
            raise PlanFileMismatch(
                f"{report(here, plan_file.graph)}\nPlan this module by itself, or give the module and the sample for "
                "which the plan was made."
            )
        request = replace(request, loss=request.loss or _stand_in(model, traced.graph.dgraph))
        made, told = made_here(traced.device), plan_file.made
        why_followed = _made_elsewhere(told, made)
        if not why_followed:
            try:
                measured, planned = restore_traced(model, traced, plan_file, request.tiers)
            except RecordMismatch as error:
                why_followed = (
                    f"The plan's measurements are not those that are made here, as by another Rockmate: {error}"
                )
        if why_followed:
            _tell_followed(why_followed)
            measured, planned = _followed(model, traced, request, plan_file)
        elif made.threads != told.threads or not told.processor:
            _check_peak(model, measured, planned, request)
    measured.sample = None
    return measured, planned


def restore_traced(
    model: torch.nn.Module, traced: Traced, plan_file: PlanFile, tiers: Tiers | None = None
) -> tuple[Measured, LoweredPlan]:
    """The plan for what was traced of `model`, whose graph is the plan's. What it moves, moves to one of `tiers`.

    Raises `OffloadError` where it moves data, and they have nowhere to go here,
    `PlanFileError` where the file's numbers do not belong to that graph, and `RecordMismatch` where its blocks are not
    measured like that any more.
    """
    started = time.perf_counter()
    traced.gradients = frozenset(plan_file.asked.gradients)
    tier = _tier_for(plan_file, tiers, traced.device)
    try:
        measured = _recorded(model, traced, plan_file)
        planned = planned_as(plan_file.plan, measured, model, tier)
    except (KeyError, IndexError, ValueError, GraphError) as error:
        raise PlanFileError(f"the plan cannot be used: {_DAMAGED}") from error
    planned.plan = replace(planned.plan, planning_s=traced.tracing_s + time.perf_counter() - started)
    return measured, planned


def _tier_for(plan_file: PlanFile, tiers: Tiers | None, device: torch.device) -> Tier | None:
    """Where the plan's data move; None where none do."""
    if plan_file.promise.memory is None:
        return None
    if tiers is None:
        raise OffloadError(
            f"the plan moves {format_bytes(plan_file.promise.stored_bytes)} to a second memory, and there is none "
            'here: say offload="auto".'
        )
    return tiers.on(device)


def request_of(plan_file: PlanFile, request: PlanRequest) -> PlanRequest:
    """`request`, with the budget of a plan, and what else its maker asked for. A second memory may be another here."""
    asked, tiers = plan_file.asked, request.tiers
    if tiers is None and asked.offload is not None:
        tiers = Tiers(Offload(asked.offload.where, asked.offload.path, asked.offload.limit_bytes))
    budget_bytes = plan_file.promise.whole_budget_bytes
    return replace(
        request,
        budget=budget_bytes,
        scope=asked.scope,
        opaque=asked.opaque,
        pin=asked.pinned,
        tiers=tiers,
        chosen_layout=plan_file.promise.layout,
        chosen_regions=plan_file.promise.compiled,
        chosen_kernels=plan_file.promise.kernels,
    )


def pinned_as(plan_file: PlanFile) -> dict[str, str]:
    """Operations that run once in the plan as they were pinned, and why."""
    reason_of = {op.name: op.keep_reason for op in plan_file.graph.operations}
    return {name: reason_of.get(name) or f"{name} is pinned" for name in plan_file.asked.pinned}


def _refuse_missing_parts(model: torch.nn.Module, plan_file: PlanFile) -> None:
    paths = {path for path, _ in model.named_modules()}
    missing = [path for path in plan_file.asked.opaque if path not in paths]
    if missing:
        raise PlanFileMismatch(
            f"the plan was made for a {plan_file.graph.model} whose submodule {missing[0]!r} is one operation, and "
            f"this {type(model).__name__} has no such submodule."
        )


def _recorded(model: torch.nn.Module, traced: Traced, plan_file: PlanFile) -> Measured:
    """What `measure_traced` would give, with the numbers of the file."""
    found = plan_file.measured
    recorded: MeasuredBlocks = {block.digest: (block.names, block.profile) for block in found.blocks}
    blocks = cut(traced.graph, chain(traced.graph).skip_values)
    with for_planning(model):
        profiles = recorded_profiles(traced.graph, blocks, model, traced.sample, recorded)
    whole = s_to_k(traced.graph, blocks, profiles)
    refuse_without_backward(model, whole)
    _put_stages(whole, found.stages)
    dataflow = traced.graph.dgraph
    classes = equivalent_classes(dataflow, blocks)
    graphs = AllGraphs(traced.basic, dataflow, traced.graph, blocks, classes, whole, profiles)
    split = plan_file.promise.memory_split
    residents = None if split is None else split.residents
    traced.loss = _loss_of(plan_file)
    measured = joined(traced, graphs, residents, found.eager_peak_bytes)
    drawn_sooner_ms(dataflow)  # kernels are proven now, and not within a step
    measured.drawn_sooner_ms = found.drawn_sooner_ms  # where the plan was made
    measured.checkpointed_peak_bytes = plan_file.promise.checkpointed_peak_bytes
    if measured.problem != plan_file.problem or measured.chain != plan_file.solver_chain:
        raise ValueError("the problem of the graph is another than the file's")
    return measured


def _loss_of(plan_file: PlanFile) -> LossCost | None:
    told = plan_file.measured.loss
    return None if told is None else LossCost(told.time_ms, told.peak_bytes, is_seen=told.is_seen)


def _put_stages(graph: KGraph, stages: tuple[tuple[int, int], ...]) -> None:
    for comp, (resident_bytes, peak_bytes) in zip(graph.backward, stages, strict=True):
        comp.resident_bytes, comp.peak_bytes = resident_bytes, peak_bytes


def _stand_in(model: torch.nn.Module, graph: DGraph) -> LossFunction:
    """A loss that hands gradients to what the plan's loss trains, and takes nothing itself."""

    def loss(output: Any) -> torch.Tensor:
        attributes = written(graph.attributes, model)
        named = {
            ref.name: tensor
            for tree, held in zip(kept_trees(graph), (output, *attributes), strict=True)
            for ref, tensor in zip(leaves(tree, is_ref), leaves(held), strict=False)
        }
        value: torch.Tensor = FreshGradients.apply(*(named[name] for name in graph.gradient_outputs))  # type: ignore[no-untyped-call]
        return value

    return loss


# ---- plans made elsewhere ------------------------------------------------------------------------------


def _made_elsewhere(told: Made, here: Made) -> str:
    """Why what was measured there says nothing of this place; empty where it does."""
    if (told.torch, told.device) != (here.torch, here.device):
        this = f"PyTorch {here.torch} on {here.device}"
        return f"The plan was made by PyTorch {told.torch} on {told.device}, and this is {this}."
    if told.processor and told.processor != here.processor:
        return f"The plan was made on {told.processor}, and this is {here.processor}."
    difference = flags_difference(here.flags, told.flags) if told.flags else ""
    return f"Of PyTorch's flags, {difference} where the plan was made." if difference else ""


def _check_peak(model: torch.nn.Module, measured: Measured, planned: LoweredPlan, request: PlanRequest) -> None:
    """One real step: with other threads, or on a processor that nobody tells, libraries take other scratch memory."""
    plan = planned.plan
    peak = measured_peak(model, planned.runner_for(model, measured), measured, request.loss)
    plan = replace(
        plan,
        measured_peak_bytes=peak.allocated_bytes,
        measured_reserved_bytes=peak.reserved_bytes,
        predicted_reserved_bytes=peak.predicted_reserved_bytes,
    )
    if plan.exceeds:
        _refuse_peak(plan.budget_bytes, plan.bounded_bytes or 0)
    planned.plan = plan


def _tell_followed(why: str) -> None:
    warnings.warn(
        f"{why} Its decisions are followed, and measured anew.",
        PlanFileWarning,
        stacklevel=6,  # who calls Rockmate(...)
    )


def _followed(
    model: torch.nn.Module, traced: Traced, request: PlanRequest, plan_file: PlanFile
) -> tuple[Measured, LoweredPlan]:
    """What the plan recomputes, with the costs of this place."""
    decisions = PortablePlan.of(plan_file.parsed_schedule, plan_file.promise.solver)
    budget_bytes = plan_file.promise.whole_budget_bytes
    traced.loss, traced.gradients = _loss_of(plan_file), frozenset(plan_file.asked.gradients)
    measured = measure_traced(model, traced, request)
    try:
        planned = make_plan(measured, replace(request, budget=budget_bytes, solver=FixedPlan(decisions)), model)
    except BudgetTooSmall as error:
        _refuse_peak(budget_bytes, error.smallest_budget_bytes)
    return measured, planned


def _refuse_peak(budget_bytes: int, peak_bytes: int) -> NoReturn:
    takes, allowed = format_apart(peak_bytes, budget_bytes)
    raise PlanFileMismatch(
        f"the plan takes {takes} here, which is above its budget of {allowed}: plan the module again."
    )
