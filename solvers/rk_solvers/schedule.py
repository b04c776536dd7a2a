"""Schedules: the ordered operations of a step, as text that round-trips (`Schedule.parse(str(schedule))`)."""

from __future__ import annotations

from dataclasses import dataclass

from rk_solvers.evaluate import instances_of, steps_of
from rk_solvers.problem import Problem, Recompute, check_recompute


class ScheduleError(ValueError):
    """A schedule that cannot be read, or that breaks a rule of the problem."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute a forward operation, the first time or again."""

    name: str

    def __str__(self) -> str:
        return f"compute {self.name}"


@dataclass(frozen=True, slots=True)
class Backward:
    """Run a backward operation."""

    name: str

    def __str__(self) -> str:
        return f"backward {self.name}"


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop the alive instance of a data."""

    name: str

    def __str__(self) -> str:
        return f"forget {self.name}"


Op = Compute | Backward | Forget


@dataclass(frozen=True, slots=True)
class Schedule:
    """The operations of one training step, in order."""

    ops: tuple[Op, ...]

    def __str__(self) -> str:
        return "\n".join(str(op) for op in self.ops)

    def __len__(self) -> int:
        return len(self.ops)

    @staticmethod
    def parse(text: str) -> Schedule:
        """Read the text form, one operation per line; empty lines are skipped.

        Raises `ScheduleError` naming the line.
        """
        ops: list[Op] = []
        for number, line in enumerate(text.splitlines(), start=1):
            words = line.split()
            if not words:
                continue
            if len(words) != 2:
                raise ScheduleError(f"line {number}: {line!r} must be two words, such as 'compute linear_3'")
            match words[0]:
                case "compute":
                    ops.append(Compute(words[1]))
                case "backward":
                    ops.append(Backward(words[1]))
                case "forget":
                    ops.append(Forget(words[1]))
                case other:
                    raise ScheduleError(f"line {number}: unknown operation {other!r}; use compute, backward or forget")
        return Schedule(tuple(ops))

    def recompute(self, problem: Problem) -> Recompute:
        """The recomputation plan that this schedule follows.

        Raises `ScheduleError` on an unknown name or on a recomputation after the last backward operation;
        `check` verifies all the other rules.
        """
        index_of = {op.name: index for index, op in enumerate(problem.forward)}
        seen: set[int] = set()
        groups: list[tuple[int, ...]] = []
        group: list[int] = []
        for number, op in enumerate(self.ops, start=1):
            if isinstance(op, Compute):
                if op.name not in index_of:
                    raise ScheduleError(f"line {number}: {op}: the problem has no such forward operation")
                index = index_of[op.name]
                if index in seen:
                    group.append(index)
                seen.add(index)
            elif isinstance(op, Backward):
                groups.append(tuple(sorted(group)))
                group = []
        if group:
            name = problem.forward[group[0]].name
            raise ScheduleError(f"{name} is recomputed after the last backward operation")
        return tuple(groups)


def schedule_of(problem: Problem, recompute: Recompute) -> Schedule:
    """The schedule of a plan: each instance of data is forgotten right after its last use (held data never).

    Raises `ValueError` if `recompute` is not a plan for `problem`.
    """
    check_recompute(problem, recompute)
    steps = steps_of(problem, recompute)
    forgotten: list[list[int]] = [[] for _ in steps]
    for instance in instances_of(problem, recompute):
        if instance.data not in problem.held:
            forgotten[instance.last].append(instance.data)
    ops: list[Op] = []
    for step, items in zip(steps, forgotten, strict=True):
        if step.forward < 0:
            ops.append(Backward(problem.backward[step.stage].name))
        else:
            ops.append(Compute(problem.forward[step.forward].name))
        ops += [Forget(problem.data[item].name) for item in sorted(items)]
    return Schedule(tuple(ops))
