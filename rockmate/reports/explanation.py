"""What there is to say of a plan, tensor by tensor: records, and how to find one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Decision = Literal["kept", "recomputed", "moved", "held", "never recomputed", "not needed"]
"""Kept from the forward to the backward; forgotten and recomputed; moved to a second memory, and back; an output of
the model, which its user holds to the end of the step; kept because it must not, or cannot, be computed twice; of no
use after the forward."""

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Lifetime:
    """One stay in memory. Steps count the computations of the schedule from 0, both included."""

    first: int  # the step that makes it
    last: int  # the step after which it is forgotten
    start_ms: float
    end_ms: float
    is_back: bool = False  # from a second memory: nothing makes it


@dataclass(frozen=True, slots=True)
class Flip:
    """The same plan with this one decision the other way, all else as it was."""

    peak_bytes: int
    peak_op: str
    time_ms: float
    extra_ms: float  # its time less the plan's
    fits: bool  # by prediction, in the budget
    also_kept: tuple[str, ...]  # of a tensor recomputed: inputs that would have to stay for it


@dataclass(frozen=True, slots=True)
class Entry:
    """One storage of the forward, or one tensor that autograd saves beside them (a phantom)."""

    name: str
    kind: str  # "data" or "phantom"
    text: str  # type and shape; "" of a phantom
    size_bytes: int
    producer: str  # the forward operation of the problem that makes it
    function: str  # what that applies, such as "aten::linear.default"
    module: str  # path of the submodule in which that was called
    source: str  # "file.py:12"
    decision: Decision
    why: str  # one sentence
    cost_ms: float  # of computing its producer once more
    recomputed: int  # how many times it is recomputed for a later use
    idle_ms: (
        float | None
    )  # from its last use in the forward to its first in the backward, were all kept; or no such use
    lifetimes: tuple[Lifetime, ...]
    forward_users: tuple[str, ...]
    backward_users: tuple[str, ...]
    flip: Flip | None  # None where there is nothing to decide, or where it was not tried

    @property
    def cost_ms_per_mib(self) -> float:
        """What a MiB of it costs to recompute; infinite of something without bytes."""
        return self.cost_ms * MIB / self.size_bytes if self.size_bytes else float("inf")

    @property
    def weight(self) -> float:
        """Bytes times milliseconds for which they would lie idle: by this, entries are ranked."""
        return self.size_bytes * (self.idle_ms or 0.0)


@dataclass(frozen=True, slots=True)
class Alive:
    """A tensor at the peak."""

    name: str
    size_bytes: int
    decision: Decision


@dataclass(frozen=True, slots=True)
class PeakFacts:
    """The first step with the highest predicted bytes, and of what they are: the parts add up to the peak."""

    step: int
    op: str  # such as "backward linear_3"
    source: str  # of that operation; "" of the loss
    at_ms: float
    peak_bytes: int
    alive: tuple[Alive, ...]  # the largest first
    gradient_bytes: int  # resident when the step starts
    working_bytes: int  # what the operation takes while it runs, new gradients among it
    other_bytes: int  # random states kept for recomputations, and what is there throughout


@dataclass(frozen=True, slots=True)
class Explanation:
    """A plan, tensor by tensor."""

    entries: tuple[Entry, ...]  # in the order in which the forward makes them
    peak: PeakFacts
    budget_bytes: int
    time_ms: float
    binding_op: str  # the operation that no plan can run in less than …
    binding_bytes: int  # … these bytes: the budget can be no smaller

    def entry(self, name: str) -> Entry:
        """The entry of that name. Raises `KeyError` with the names like it."""
        found = next((entry for entry in self.entries if entry.name == name), None)
        if found is None:
            alike = [entry.name for entry in self.entries if name in entry.name or entry.producer == name]
            advice = f"there are {', '.join(alike[:8])}" if alike else f"there are {len(self.entries)} others"
            raise KeyError(f"the plan has no tensor {name!r}; {advice}")
        return found

    def of_operation(self, name: str) -> tuple[Entry, ...]:
        """Entries called `name` or made by an operation called so, or in a submodule of that path."""
        return tuple(
            entry
            for entry in self.entries
            if name in (entry.name, entry.producer) or entry.module == name or entry.module.startswith(f"{name}.")
        )

    def heaviest(self, count: int) -> tuple[Entry, ...]:
        """The `count` entries with most bytes for the longest time, the heaviest first."""
        return tuple(sorted(self.entries, key=lambda entry: (-entry.weight, -entry.size_bytes))[:count])
