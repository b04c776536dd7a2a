"""A step as its schedule predicts it: each computation with the memory that it finds, each transfer on its link.

One of the readings of a schedule, for plans, reports and files; `checker` is another one, and independent of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from rk_solvers.links import SecondMemory
from rk_solvers.liveness import Instance, Step, curve_of, steps_in
from rk_solvers.problem import Problem
from rk_solvers.schedule import (
    Backward,
    Compute,
    Leave,
    Offload,
    Op,
    Recall,
    Schedule,
    ScheduleError,
    Transfer,
)


@dataclass(frozen=True, slots=True)
class Moment:
    """One computation of a step, as its schedule predicts it."""

    step: Step
    op: Op  # the same by name; as text such as "compute linear_3"
    start_ms: float
    end_ms: float
    alive_bytes: int  # before it
    peak_bytes: int  # while it runs


@dataclass(frozen=True, slots=True)
class LinkUse:
    """One transfer, as a schedule predicts it."""

    data: str  # its name
    is_out: bool  # to the second memory; else back from it
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """A step, as its schedule predicts it."""

    moments: tuple[Moment, ...]
    instances: tuple[Instance, ...]  # of data, by when they are made
    link_uses: tuple[LinkUse, ...] = ()  # by when they begin, of each link
    waiting_ms: float = 0.0  # of the time: for transfers

    @property
    def peak(self) -> Moment:
        """The first computation during which the most bytes are alive."""
        return max(self.moments, key=lambda moment: moment.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once."""
        return self.peak.peak_bytes

    @property
    def time_ms(self) -> float:
        """Time of the step."""
        return self.moments[-1].end_ms

    def alive_at(self, place: int) -> list[int]:
        """The data alive during a computation, by its place among the moments; in the order of their indices."""
        return sorted(item.data for item in self.instances if item.first <= place <= item.last)


def simulate(problem: Problem, schedule: Schedule, memory: SecondMemory | None = None) -> Simulation:
    """Each computation of a schedule, with the memory that it finds and takes, and each transfer to or from `memory`.

    Data are alive until the schedule forgets them, or lets them leave. Raises `ScheduleError` where a name is not the
    problem's, and where data move and there is no second memory; `check` verifies that the schedule is valid.
    """
    pairs = steps_in(problem, schedule)
    steps = [step for step, *_ in pairs]
    instances = _instances_in(problem, pairs)
    curve = curve_of(problem, steps, instances)
    if schedule.offloaded and memory is not None:
        curve += memory.staging_bytes
    clock = _Clock(problem, memory)
    made = _made_at(problem, instances, steps)
    moments: list[Moment] = []
    for op in schedule.ops:
        if isinstance(op, Transfer):
            clock.transfer(op)
        elif isinstance(op, Compute | Backward):
            position = len(moments)
            step = steps[position]
            if step.forward < 0:
                backward = problem.backward[step.stage]
                own_bytes, time_ms = backward.peak_bytes - backward.resident_bytes, backward.time_ms
            else:
                forward = problem.forward[step.forward]
                own_bytes = forward.workspace_bytes + made[position]
                time_ms = forward.time_ms if step.stage < 0 else forward.recompute_ms
            peak_bytes, now = int(curve[position]), clock.now
            clock.now += time_ms
            moments.append(Moment(step, op, now, clock.now, peak_bytes - own_bytes, peak_bytes))
    return Simulation(tuple(moments), tuple(instances), tuple(clock.uses), clock.waiting_ms)


class _Clock:
    """What a step waits for: transfers take their links one after the other, beside what is computed."""

    def __init__(self, problem: Problem, memory: SecondMemory | None) -> None:
        self.now = self.waiting_ms = 0.0
        self.uses: list[LinkUse] = []
        self._memory = memory
        self._sizes = {data.name: data.size_bytes for data in problem.data}
        self._free_at = {True: 0.0, False: 0.0}  # by direction
        self._over_at: dict[tuple[str, bool], float] = {}  # by data and direction

    def transfer(self, op: Transfer) -> None:
        """What a transfer, or the wait for it, takes."""
        if self._memory is None:
            raise ScheduleError(f"{op}: no second memory was given")
        if op.name not in self._sizes:
            raise ScheduleError(f"{op}: the problem has no such data")
        is_out = isinstance(op, Offload | Leave)
        if isinstance(op, Offload | Recall):
            link, size_bytes = self._memory.out if is_out else self._memory.back, self._sizes[op.name]
            start_ms = max(self.now, self._free_at[is_out])
            end_ms = self._free_at[is_out] = self._over_at[op.name, is_out] = start_ms + link.time_ms(size_bytes)
            self.uses.append(LinkUse(op.name, is_out, start_ms, end_ms))
            self.now += link.slowing_ms(size_bytes)
        else:
            until = max(self.now, self._over_at.get((op.name, is_out), 0.0))
            self.waiting_ms += until - self.now
            self.now = until


def _instances_in(problem: Problem, steps: list[tuple[Step, list[str], list[str]]]) -> list[Instance]:
    """The instances of data that a schedule makes; what it never forgets stays to the end."""
    index_of = {data.name: item for item, data in enumerate(problem.data)}
    since: dict[int, tuple[int, bool]] = {}
    found: list[Instance] = []
    for position, (step, recalled, forgotten) in enumerate(steps):
        for name in recalled:
            since.setdefault(index_of[name], (position, True))
        for item in problem.forward[step.forward].outputs if step.forward >= 0 else ():
            since.setdefault(item, (position, False))
        for name in forgotten:
            if index_of.get(name) not in since:
                raise ScheduleError(f"forget {name}: the problem has no such data, or it is not alive")
            item = index_of[name]
            first, is_back = since.pop(item)
            found.append(Instance(item, first, position, is_back))
    found += [Instance(item, first, len(steps) - 1, is_back) for item, (first, is_back) in since.items()]
    return sorted(found, key=lambda instance: (instance.first, instance.data))


def _made_at(problem: Problem, instances: list[Instance], steps: list[Step]) -> list[int]:
    """Bytes that each computation adds: of new instances, and of what is resident until it is computed again."""
    made = [0] * len(steps)
    for instance in instances:
        if instance.is_back:
            continue
        made[instance.first] += problem.data[instance.data].size_bytes
    first = {step.forward: position for position, step in reversed(list(enumerate(steps))) if step.forward >= 0}
    for index in {step.forward for step in steps if step.stage >= 0 and step.forward >= 0}:
        made[first[index]] += problem.forward[index].replay_bytes
    return made
