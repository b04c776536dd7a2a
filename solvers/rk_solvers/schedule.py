"""Schedules: the ordered operations of a step, as text that round-trips (`Schedule.parse(str(schedule))`)."""

from __future__ import annotations

from dataclasses import dataclass


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

    @property
    def recomputed(self) -> dict[str, tuple[str, ...]]:
        """By backward operation, the forward operations computed again just before it; of those that have some."""
        found: dict[str, tuple[str, ...]] = {}
        seen: set[str] = set()
        group: list[str] = []
        for op in self.ops:
            if isinstance(op, Compute):
                if op.name in seen:
                    group.append(op.name)
                seen.add(op.name)
            elif isinstance(op, Backward) and group:
                found[op.name] = tuple(group)
                group = []
        return found

    @property
    def recomputations(self) -> int:
        """How many operations are computed again, in all."""
        return sum(map(len, self.recomputed.values()))
