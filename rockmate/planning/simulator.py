"""Replay a schedule step by step: the memory over the step, its peak, its time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rk_solvers import Backward, Compute, Forget, Problem, Schedule


@dataclass(frozen=True, slots=True)
class Moment:
    """One computation of the step."""

    op: str  # the schedule's text, such as "compute linear_3"
    start_ms: float
    end_ms: float
    alive_bytes: int  # before it
    peak_bytes: int  # while it runs


@dataclass(frozen=True, slots=True)
class Simulation:
    """A step as the schedule predicts it."""

    moments: tuple[Moment, ...]

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once."""
        return max(moment.peak_bytes for moment in self.moments)

    @property
    def time_ms(self) -> float:
        """Time of the step."""
        return self.moments[-1].end_ms

    @property
    def peak_op(self) -> str:
        """The first computation during which the peak is reached."""
        return max(self.moments, key=lambda moment: moment.peak_bytes).op


def simulate(problem: Problem, schedule: Schedule) -> Simulation:
    """Walk through `schedule`, counting the bytes of what is alive."""
    forward = {op.name: op for op in problem.forward}
    size = {data.name: data.size_bytes for data in problem.data}
    repeats_left = Counter(op.name for op in schedule.ops if isinstance(op, Compute))
    computed: set[str] = set()
    alive: set[str] = set()
    states: dict[str, int] = {}  # random states and smaller forms, kept from the first computation to the last
    stages = iter(problem.backward)
    stage = next(stages)  # the next one to run: its resident gradients are there during recomputations
    moments: list[Moment] = []
    now = 0.0
    for op in schedule.ops:
        held = problem.base_bytes + sum(size[name] for name in alive) + sum(states.values())
        if isinstance(op, Compute):
            node = forward[op.name]
            held += stage.resident_bytes if op.name in computed else 0
            made = {problem.data[index].name for index in node.outputs} - alive
            repeats_left[op.name] -= 1
            states[op.name] = node.replay_bytes if repeats_left[op.name] else 0
            peak = held + sum(size[name] for name in made) + node.workspace_bytes
            peak += states[op.name] if op.name not in computed else 0
            time_ms = node.recompute_ms if op.name in computed else node.time_ms
            moments.append(Moment(str(op), now, now + time_ms, held, peak))
            alive |= made
            computed.add(op.name)
        elif isinstance(op, Backward):
            moments.append(
                Moment(str(op), now, now + stage.time_ms, held + stage.resident_bytes, held + stage.peak_bytes)
            )
            stage = next(stages, stage)
        elif isinstance(op, Forget):
            alive.discard(op.name)
        now = moments[-1].end_ms
    return Simulation(tuple(moments))
