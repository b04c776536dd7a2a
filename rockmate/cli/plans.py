"""Plans as text and as content for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rockmate.cli.output import pairs
from rockmate.planning.plan import Plan
from rockmate.units import format_bytes, format_ms


def plan_table(plan: Plan, before: Sequence[tuple[str, str]] = (), after: Sequence[tuple[str, str]] = ()) -> str:
    """What a plan promises, and what was measured, beside eager; with rows `before` and `after` it."""
    eager, time_ms = plan.baseline_peak_bytes, plan.baseline_time_ms
    split = plan.memory_split
    rows = [
        ("budget", f"{format_bytes(plan.budget_bytes)}{_share(plan.budget_bytes, eager)}"),
        ("predicted peak", f"{format_bytes(plan.peak_bytes)}{_share(plan.peak_bytes, eager)}"),
        ("measured peak", _measured(plan)),
        ("eager peak", format_bytes(eager)),
        ("predicted time", f"{format_ms(plan.time_ms)}, {plan.overhead:+.1%} of {format_ms(time_ms)}"),
        ("gap", "not known" if plan.gap is None else f"a better plan could save {plan.gap:.1%} of it at most"),
        ("recomputations", str(plan.recomputations)),
        *_moves(plan),
        ("solver", plan.solver),
        ("planned in", f"{plan.planning_s:.1f} s{_taken(plan)}"),
    ]
    if split is not None:
        rows.insert(0, ("budget in all", f"{format_bytes(split.total_bytes)}, of which the step has:"))
    return pairs([*before, *rows, *after])


def _moves(plan: Plan) -> list[tuple[str, str]]:
    if not plan.moves:
        return []
    stored_bytes = plan.measured_stored_bytes or plan.stored_bytes
    waits = f", {format_ms(plan.waiting_ms)} waited for" if plan.waiting_ms else ""
    return [("moved", f"{plan.moves} tensors, {format_bytes(stored_bytes)} at once{waits}")]


def _share(size_bytes: int, eager_bytes: int) -> str:
    return f", {size_bytes / eager_bytes:.1%} of eager's" if eager_bytes else ""


def _taken(plan: Plan) -> str:
    return "" if plan.planning_peak_bytes is None else f", in {format_bytes(plan.planning_peak_bytes)} of memory"


def _measured(plan: Plan) -> str:
    if plan.measured_peak_bytes is None:
        return "not measured"
    reserved = plan.measured_reserved_bytes
    held = "" if reserved is None else f"; {format_bytes(reserved)} reserved by the allocator"
    return f"{format_bytes(plan.measured_peak_bytes)}{_share(plan.measured_peak_bytes, plan.baseline_peak_bytes)}{held}"


def plan_content(plan: Plan) -> dict[str, Any]:
    """A plan's numbers for programs."""
    return {
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "measured_peak_bytes": plan.measured_peak_bytes,
        "measured_reserved_bytes": plan.measured_reserved_bytes,
        "predicted_reserved_bytes": plan.predicted_reserved_bytes,
        "eager_peak_bytes": plan.baseline_peak_bytes,
        "time_ms": plan.time_ms,
        "eager_time_ms": plan.baseline_time_ms,
        "overhead": plan.overhead,
        "lower_bound_ms": plan.lower_bound_ms,
        "gap": plan.gap,
        "recomputations": plan.recomputations,
        "moves": plan.moves,
        "stored_bytes": plan.stored_bytes,
        "measured_stored_bytes": plan.measured_stored_bytes,
        "waiting_ms": plan.waiting_ms,
        "solver": plan.solver,
        "planning_s": plan.planning_s,
        "planning_peak_bytes": plan.planning_peak_bytes,
        "total_budget_bytes": None if plan.memory_split is None else plan.memory_split.total_bytes,
    }
