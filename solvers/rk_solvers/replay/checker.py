"""Replay a schedule with a set of alive data and check every rule; independent of the solvers' evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

from rk_solvers.links import SecondMemory
from rk_solvers.problem import Problem
from rk_solvers.schedule import (
    Arrive,
    Backward,
    Compute,
    Forget,
    Leave,
    Offload,
    Op,
    Recall,
    Schedule,
    ScheduleError,
    Transfer,
)


@dataclass(frozen=True, slots=True)
class CheckedSchedule:
    """What a valid schedule costs."""

    peak_bytes: int
    peak_at: str  # text of the operation at the (first) peak, such as "compute linear_3"
    time_ms: float
    overhead: float  # extra time relative to keep-all: 0.11 is +11 %
    stored_bytes: int = 0  # in the second memory at most
    waiting_ms: float = 0.0  # of the time: for transfers


@dataclass(slots=True)
class _Replay:
    problem: Problem
    budget_bytes: int | None
    last_computed: dict[str, int]  # line at which each forward operation is computed for the last time
    alive: set[str] = field(default_factory=set)  # names of data
    computed: int = 0  # forward operations computed once so far
    done: int = 0  # backward operations done so far
    group: list[int] = field(default_factory=list)  # recomputed since the last backward operation
    replaying: set[int] = field(default_factory=set)  # operations whose generator state is resident
    peak_bytes: int = -1
    peak_at: str = ""
    time_ms: float = 0.0
    # Of the second memory:
    staging_bytes: int = 0
    memory: SecondMemory | None = None
    last_arrival: dict[str, int] = field(default_factory=dict)  # line at which each data comes back for the last time
    leaving: dict[str, float] = field(default_factory=dict)  # data on their way out, and when they are there
    coming: dict[str, float] = field(default_factory=dict)  # data on their way back, and when they are there
    stored: set[str] = field(default_factory=set)  # names of data that are there, or on their way
    stored_bytes: int = 0  # at most
    out_free_ms: float = 0.0  # when the link has nothing more to do
    back_free_ms: float = 0.0
    waiting_ms: float = 0.0


def check(
    problem: Problem, schedule: Schedule, budget_bytes: int | None = None, memory: SecondMemory | None = None
) -> CheckedSchedule:
    """Replay `schedule` and return its peak and time.

    Transfers take place beside the computations. A data on its way holds its bytes at both ends: in the first memory
    until it leaves and from its recall on, in the second one, `memory`, from its offload until it arrives for the last
    time.

    Raises `ScheduleError`, naming the line, the operation and the data, if it breaks a rule of the problem
    or, where `budget_bytes` is given, if its peak is above it; so for the second memory and its limit.
    """
    last_computed = {op.name: line for line, op in enumerate(schedule.ops, 1) if isinstance(op, Compute)}
    last_arrival = {op.name: line for line, op in enumerate(schedule.ops, 1) if isinstance(op, Arrive)}
    replay = _Replay(problem, budget_bytes, last_computed, memory=memory, last_arrival=last_arrival)
    if memory is not None and schedule.offloaded:
        replay.staging_bytes = memory.staging_bytes
    for line, op in enumerate(schedule.ops, start=1):
        if isinstance(op, Compute):
            _compute(replay, line, op)
        elif isinstance(op, Backward):
            _backward(replay, line, op)
        elif isinstance(op, Forget):
            _forget(replay, line, op)
        else:
            _transfer(replay, line, op)
    if replay.computed < len(problem.forward):
        raise ScheduleError(f"the schedule never computes {problem.forward[replay.computed].name}")
    if replay.done < len(problem.backward):
        raise ScheduleError(f"the schedule never runs backward {problem.backward[replay.done].name}")
    if replay.group:
        raise ScheduleError(f"{problem.forward[replay.group[0]].name} is recomputed after the last backward")
    if replay.leaving or replay.coming or replay.stored:
        name = min([*replay.leaving, *replay.coming, *replay.stored])
        raise ScheduleError(f"{name} is moved, and the schedule ends before it has left and arrived")
    keep_all_ms = sum(op.time_ms for op in problem.forward) + sum(op.time_ms for op in problem.backward)
    overhead = replay.time_ms / keep_all_ms - 1 if keep_all_ms > 0 else 0.0
    peak_bytes = max(replay.peak_bytes, problem.base_bytes)
    return CheckedSchedule(peak_bytes, replay.peak_at, replay.time_ms, overhead, replay.stored_bytes, replay.waiting_ms)


def _fail(line: int, op: Op, reason: str) -> NoReturn:
    raise ScheduleError(f"line {line}: {op}: {reason}")


def _count(replay: _Replay, line: int, op: Op, own_bytes: int) -> None:
    problem = replay.problem
    total = problem.base_bytes + replay.staging_bytes + own_bytes
    total += sum(item.size_bytes for item in problem.data if item.name in replay.alive or item.name in replay.coming)
    total += sum(problem.forward[index].replay_bytes for index in replay.replaying)
    if total > replay.peak_bytes:
        replay.peak_bytes, replay.peak_at = total, str(op)
    if replay.budget_bytes is not None and total > replay.budget_bytes:
        _fail(line, op, f"{total} bytes are alive, the budget is {replay.budget_bytes}")


def _require_alive(replay: _Replay, line: int, op: Op, items: tuple[int, ...]) -> None:
    for item in items:
        name = replay.problem.data[item].name
        if name not in replay.alive:
            _fail(line, op, f"needs {name}, which is not alive")


def _compute(replay: _Replay, line: int, op: Compute) -> None:
    problem = replay.problem
    index = next((i for i, forward in enumerate(problem.forward) if forward.name == op.name), None)
    if index is None:
        _fail(line, op, "the problem has no such forward operation")
    forward = problem.forward[index]
    again = index < replay.computed
    own_bytes = forward.workspace_bytes
    if again:
        if replay.computed < len(problem.forward):
            _fail(line, op, "computed again before the forward is complete")
        if replay.done == len(problem.backward):
            _fail(line, op, "computed again after the last backward")
        if not forward.recomputable:
            _fail(line, op, "computed again, but it is not recomputable")
        if replay.group and replay.group[-1] >= index:
            _fail(
                line,
                op,
                f"computed after {problem.forward[replay.group[-1]].name}, against the forward order",
            )
        replay.group.append(index)
        own_bytes += problem.backward[replay.done].resident_bytes
    elif index > replay.computed:
        _fail(line, op, f"computed before {problem.forward[replay.computed].name}, against the forward order")
    else:
        replay.computed += 1
        if replay.last_computed[op.name] > line:
            replay.replaying.add(index)
    _require_alive(replay, line, op, forward.inputs)
    for item in forward.outputs:
        name = problem.data[item].name
        if name in replay.alive and item not in problem.held:
            _fail(line, op, f"makes a new instance of {name}, which is still alive; forget it first")
        if name in replay.coming:
            _fail(line, op, f"makes a new instance of {name}, which is on its way back")
        replay.alive.add(name)
    _count(replay, line, op, own_bytes)
    replay.time_ms += forward.recompute_ms if again else forward.time_ms
    if again and replay.last_computed[op.name] == line:
        replay.replaying.discard(index)


def _backward(replay: _Replay, line: int, op: Backward) -> None:
    problem = replay.problem
    if replay.computed < len(problem.forward):
        _fail(line, op, f"runs before the forward operation {problem.forward[replay.computed].name}")
    if replay.done == len(problem.backward):
        _fail(line, op, "runs after the last backward operation")
    expected = problem.backward[replay.done]
    if op.name != expected.name:
        _fail(line, op, f"the next backward operation must be {expected.name}")
    _require_alive(replay, line, op, expected.needs)
    _check_serving(replay, line, op)
    _count(replay, line, op, expected.peak_bytes)
    replay.time_ms += expected.time_ms
    replay.done += 1
    replay.group = []


def _check_serving(replay: _Replay, line: int, op: Backward) -> None:
    """Every recomputed operation must lead, through recomputed outputs, to the backward of its stage."""
    problem = replay.problem
    reached = set(problem.backward[replay.done].needs)
    for index in reversed(replay.group):
        forward = problem.forward[index]
        if any(item in reached and item not in problem.held for item in forward.outputs):
            reached |= set(forward.inputs)
        else:
            _fail(
                line,
                op,
                f"{forward.name} is recomputed just before but does not lead to it; recompute it later",
            )


def _forget(replay: _Replay, line: int, op: Forget) -> None:
    problem = replay.problem
    item = next((i for i, data in enumerate(problem.data) if data.name == op.name), None)
    if item is None:
        _fail(line, op, "the problem has no such data")
    if item in problem.held:
        _fail(line, op, "this data is held to the end of the step")
    if op.name not in replay.alive:
        _fail(line, op, "this data is not alive")
    if op.name in replay.leaving:
        _fail(line, op, "this data is on its way out; let it leave")
    replay.alive.remove(op.name)


def _transfer(replay: _Replay, line: int, op: Transfer) -> None:
    memory = replay.memory
    if memory is None:
        _fail(line, op, "no second memory was given")
    data = next((data for data in replay.problem.data if data.name == op.name), None)
    if data is None:
        _fail(line, op, "the problem has no such data")
    name = op.name
    if isinstance(op, Offload):
        if name not in replay.alive:
            _fail(line, op, "this data is not alive")
        if name in replay.stored:
            _fail(line, op, "this data is in the second memory already, or on its way")
        start_ms = max(replay.time_ms, replay.out_free_ms)
        replay.out_free_ms = start_ms + memory.out.latency_ms + data.size_bytes / memory.out.bytes_per_ms
        replay.leaving[name] = replay.out_free_ms
        replay.time_ms += memory.out.slowing_ms(data.size_bytes)
        replay.stored.add(name)
        stored_bytes = sum(
            -(-item.size_bytes // memory.unit_bytes) * memory.unit_bytes
            for item in replay.problem.data
            if item.name in replay.stored
        )
        replay.stored_bytes = max(replay.stored_bytes, stored_bytes)
        if memory.limit_bytes is not None and stored_bytes > memory.limit_bytes:
            _fail(line, op, f"{stored_bytes} bytes are in the second memory, its limit is {memory.limit_bytes}")
    elif isinstance(op, Leave):
        if name not in replay.stored or name not in replay.alive:
            _fail(line, op, "this data is not alive and on its way out, or there already")
        if replay.problem.data.index(data) in replay.problem.held:
            _fail(line, op, "this data is held to the end of the step")
        _wait(replay, replay.leaving.pop(name, replay.time_ms))
        replay.alive.remove(name)
    elif isinstance(op, Recall):
        if name not in replay.stored or name in replay.leaving:
            _fail(line, op, "this data is not in the second memory")
        if name in replay.alive or name in replay.coming:
            _fail(line, op, "this data is back already, or on its way")
        start_ms = max(replay.time_ms, replay.back_free_ms)
        replay.back_free_ms = start_ms + memory.back.latency_ms + data.size_bytes / memory.back.bytes_per_ms
        replay.coming[name] = replay.back_free_ms
        replay.time_ms += memory.back.slowing_ms(data.size_bytes)
        _count(replay, line, op, _resident_bytes(replay))
    else:
        if name not in replay.coming:
            _fail(line, op, "this data is not on its way back")
        _wait(replay, replay.coming.pop(name))
        replay.alive.add(name)
        if replay.last_arrival[name] == line:
            replay.stored.remove(name)


def _resident_bytes(replay: _Replay) -> int:
    """Gradients that are there between two operations of the backward."""
    problem = replay.problem
    if replay.computed < len(problem.forward) or replay.done == len(problem.backward):
        return 0
    return problem.backward[replay.done].resident_bytes


def _wait(replay: _Replay, until_ms: float) -> None:
    replay.waiting_ms += max(0.0, until_ms - replay.time_ms)
    replay.time_ms = max(replay.time_ms, until_ms)
