"""The numbers of a report page: what its charts and tables are drawn from, as plain JSON in columns.

Columns, and each text once: a plan of thousands of operations is to stay a small file.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rk_solvers import Compute
from rockmate.plan_files.content import OperationRecord, PlanFile
from rockmate.reports.comparison import Timeline, scaled_to
from rockmate.reports.explanation import Explanation
from rockmate.reports.measured import MeasuredStep, MeasuredSteps, thinned
from rockmate.reports.pareto import ParetoPoint
from rockmate.reports.step import Computation, calls_by_name, keep_all_simulation, link_uses, main_operations

MOST_ARGUMENTS = 160  # characters of a call's arguments that are shown

Columns = dict[str, Any]


class _Texts:
    """Texts by number, each once."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))


def payload(
    plan_file: PlanFile,
    explanation: Explanation,
    steps: Sequence[Computation],
    measured: MeasuredSteps | None,
    points: Iterable[ParetoPoint],
) -> dict[str, Any]:
    """What the page's script reads. Times in ms, sizes in bytes, names of operations as in the problem."""
    texts = _Texts()
    promise = plan_file.promise
    content: dict[str, Any] = {
        "budget": promise.budget_bytes,
        "peak": promise.peak_bytes,
        "time": _ms(promise.time_ms),
        "keepAllTime": _ms(promise.baseline_time_ms),
        "solver": promise.solver,
        "forward": _forward(plan_file, texts),
        "backward": _backward(plan_file, texts),
        "steps": _steps(steps),
        "links": _links(plan_file),
        "keepAll": [moment.peak_bytes for moment in keep_all_simulation(plan_file.problem).moments],
        "tensors": _tensors(plan_file, explanation, texts),
        "points": [[point.solver, point.peak_bytes, _ms(point.time_ms)] for point in points],
        "measured": None if measured is None else _measured(plan_file, measured),
        "measuredOperations": _measured_operations(plan_file, measured) if measured and measured.operation_ms else None,
    }
    return content | {"texts": list(texts.numbers)}


def as_script(content: dict[str, Any]) -> str:
    """JSON that stands in a script element, whatever its texts: nothing of it can end the element, or begin another."""
    text = json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _ms(time_ms: float) -> float:
    return round(time_ms, 4)


def _forward(plan_file: PlanFile, texts: _Texts) -> Columns:
    problem, main = plan_file.problem, main_operations(plan_file)
    counts = Counter(op.name for op in plan_file.parsed_schedule.ops if isinstance(op, Compute))
    back_ms = _backward_ms(plan_file, {op.name: op.time_ms for op in problem.backward})
    return _places([main.get(op.name) for op in problem.forward], texts) | {
        "name": [op.name for op in problem.forward],
        "time": [_ms(op.time_ms) for op in problem.forward],
        "again": [_ms(op.recompute_ms) for op in problem.forward],
        "backward": [_ms(back_ms[op.name]) for op in problem.forward],
        "bytes": [sum(problem.data[item].size_bytes for item in op.outputs) for op in problem.forward],
        "computed": [counts[op.name] for op in problem.forward],
        "arguments": [_shortened(main[op.name].arguments) if op.name in main else "" for op in problem.forward],
    }


def _backward_ms(plan_file: PlanFile, times_ms: Mapping[str, float]) -> dict[str, float]:
    """By forward operation, the time of its backward, which may be of several stages."""
    found: dict[str, float] = defaultdict(float)
    by_name = calls_by_name(plan_file)
    for op in plan_file.problem.backward:
        call = by_name.get(op.op)
        found[call.node if call else ""] += times_ms.get(op.name, 0.0)
    return found


def _backward(plan_file: PlanFile, texts: _Texts) -> Columns:
    by_name = calls_by_name(plan_file)
    index_of = {op.name: index for index, op in enumerate(plan_file.problem.forward)}
    calls = [by_name.get(op.op) for op in plan_file.problem.backward]
    return _places(calls, texts) | {
        "name": [op.name for op in plan_file.problem.backward],
        "op": [op.op for op in plan_file.problem.backward],
        "time": [_ms(op.time_ms) for op in plan_file.problem.backward],
        "forward": [index_of.get(call.node, -1) if call else -1 for call in calls],
    }


def _places(calls: list[OperationRecord | None], texts: _Texts) -> Columns:
    """What each applies, and where in the model and in the user's source."""
    return {
        "function": [texts.number(call.function if call else "") for call in calls],
        "module": [texts.number(call.module if call else "") for call in calls],
        "source": [texts.number(call.source if call else "") for call in calls],
    }


def _shortened(text: str) -> str:
    return text if len(text) <= MOST_ARGUMENTS else f"{text[: MOST_ARGUMENTS - 1]}…"


def _steps(steps: Sequence[Computation]) -> Columns:
    ends = [0.0, *(step.end_ms for step in steps)]
    waits = [_ms(step.start_ms - end_ms) for step, end_ms in zip(steps, ends, strict=False)]
    return {
        "lane": "".join(step.lane[0] for step in steps),
        # What each waits for, beside what it takes; nothing where nothing moves.
        "wait": waits if any(waits) else [],
        "index": [step.index for step in steps],
        "stage": [step.stage for step in steps],
        "kept": [step.kept_bytes for step in steps],
        "recomputed": [step.recomputed_bytes for step in steps],
        "gradients": [step.gradient_bytes for step in steps],
        "workspace": [step.workspace_bytes for step in steps],
    }


def _links(plan_file: PlanFile) -> Columns:
    """Transfers, by when they begin; empty where nothing moves."""
    uses = link_uses(plan_file)
    item_of = {data.name: item for item, data in enumerate(plan_file.problem.data)}
    return {
        "lane": "".join("o" if use.is_out else "i" for use in uses),
        "tensor": [item_of[use.data] for use in uses],
        "start": [_ms(use.start_ms) for use in uses],
        "end": [_ms(use.end_ms) for use in uses],
    }


def _tensors(plan_file: PlanFile, explanation: Explanation, texts: _Texts) -> Columns:
    entries = explanation.entries
    return {
        "name": [entry.name for entry in entries],
        "text": [texts.number(entry.text or "saved by autograd") for entry in entries],
        "bytes": [entry.size_bytes for entry in entries],
        "producer": [data.producer for data in plan_file.problem.data],
        "decision": [texts.number(entry.decision) for entry in entries],
        "recomputed": [entry.recomputed for entry in entries],
        "why": [texts.number(entry.why) for entry in entries],
        "stays": [[bound for stay in entry.lifetimes for bound in (stay.first, stay.last)] for entry in entries],
    }


def _measured(plan_file: PlanFile, measured: MeasuredSteps) -> dict[str, Any]:
    promise, eager = plan_file.promise, measured.eager
    return {
        "plan": _measured_step(measured.plan, promise.time_ms),
        "eager": None if eager is None else _measured_step(eager, promise.baseline_time_ms),
    }


def _measured_operations(plan_file: PlanFile, measured: MeasuredSteps) -> Columns:
    """Of each forward operation, its time and that of its backward; -1 for one that is not there any more."""
    times_ms = dict(measured.operation_ms)
    back = _backward_ms(plan_file, times_ms)
    names = [op.name for op in plan_file.problem.forward]
    return {
        "forward": [_ms(times_ms.get(name, -1.0)) for name in names],
        "backward": [_ms(back[name]) for name in names],
    }


def _measured_step(step: MeasuredStep, predicted_ms: float) -> dict[str, Any]:
    """Stretched to the time that was predicted, so that the two lie upon each other."""
    line: Timeline = scaled_to(thinned(step.timeline), predicted_ms)
    return {
        "peak": step.peak_bytes,
        "at": [_ms(time_ms) for time_ms, _ in line],
        "bytes": [size_bytes for _, size_bytes in line],
    }
