"""Schedules: the ordered operations of a step, as text that round-trips (`Schedule.parse(str(schedule))`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


class ScheduleError(ValueError):
    """A schedule that cannot be read, or that breaks a rule of the problem."""


@dataclass(frozen=True, slots=True)
class _Operation:
    """A word, and the name of what it is about."""

    word: ClassVar[str]
    name: str

    def __str__(self) -> str:
        return f"{self.word} {self.name}"


@dataclass(frozen=True, slots=True)
class Compute(_Operation):
    """Compute a forward operation, the first time or again."""

    word = "compute"


@dataclass(frozen=True, slots=True)
class Backward(_Operation):
    """Run a backward operation."""

    word = "backward"


@dataclass(frozen=True, slots=True)
class Forget(_Operation):
    """Drop the alive instance of a data."""

    word = "forget"


@dataclass(frozen=True, slots=True)
class Offload(_Operation):
    """Begin to copy a data to the second memory."""

    word = "offload"


@dataclass(frozen=True, slots=True)
class Leave(_Operation):
    """Wait until a data is in the second memory, and drop the alive instance."""

    word = "leave"


@dataclass(frozen=True, slots=True)
class Recall(_Operation):
    """Take memory for a data that has left, and begin to copy it back."""

    word = "recall"


@dataclass(frozen=True, slots=True)
class Arrive(_Operation):
    """Wait until a data that was recalled is back: it is alive again."""

    word = "arrive"


Op = Compute | Backward | Forget | Offload | Leave | Recall | Arrive
Transfer = Offload | Leave | Recall | Arrive
_BY_WORD: dict[str, type[Op]] = {
    kind.word: kind for kind in (Compute, Backward, Forget, Offload, Leave, Recall, Arrive)
}


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
            kind = _BY_WORD.get(words[0])
            if kind is None:
                *others, last = _BY_WORD
                raise ScheduleError(f"line {number}: unknown operation {words[0]!r}; use {', '.join(others)} or {last}")
            ops.append(kind(words[1]))
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
    def offloaded(self) -> tuple[str, ...]:
        """The data that leave for the second memory, in that order."""
        return tuple(op.name for op in self.ops if isinstance(op, Offload))

    @property
    def recomputations(self) -> int:
        """How many operations are computed again, in all."""
        return sum(map(len, self.recomputed.values()))
