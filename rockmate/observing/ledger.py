"""What is alive, and who has allocated it; of each step, its highest moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rkgb.devices.caching_allocator import AllocationEvent
from rockmate.observing.labels import FORWARD, UNSEEN, Label

Kinds = Mapping[int, str]
"""What tensors that are known are, by the addresses of their storages."""


@dataclass(frozen=True, slots=True)
class Held:
    """One block of memory."""

    size_bytes: int
    label: Label
    born_in: int  # step
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Holder:
    """What of one kind was allocated by one operation on one line."""

    kind: str
    label: Label
    size_bytes: int
    blocks: int


@dataclass(frozen=True, slots=True)
class StepMoment:
    """The highest moment of one step, above what was there when it all began."""

    peak_bytes: int
    end_bytes: int  # at its end
    holders: tuple[Holder, ...]  # whose sizes add up to the peak, the largest first


class Ledger:
    """Blocks that live, from one stretch of events to the next."""

    def __init__(self) -> None:
        self.steps: list[StepMoment] = []
        self._alive: dict[int, Held] = {}  # by address
        self._level = 0

    @property
    def alive(self) -> Iterable[Held]:
        """What lives now."""
        return self._alive.values()

    def add(
        self,
        events: Sequence[AllocationEvent],
        label_at: Callable[[int], Label],
        first_backward_ns: int | None,
        kinds: Kinds,
    ) -> None:
        """Another step: what happened in it, and what is known at its end."""
        step, at_peak = len(self.steps), self._highest(events)
        peak: dict[int, Held] = dict(self._alive)
        peak_bytes, saved = self._level, set[int]()
        numbers = {address: number for number, address in enumerate(self._alive)}
        next_number = len(numbers)
        at_peak_numbers, is_backward = dict(numbers), False
        for place, event in enumerate(events, 1):
            if first_backward_ns is not None and not is_backward and event.time_ns >= first_backward_ns:
                is_backward, saved = True, set(numbers.values())
            if event.size_bytes > 0:
                self._alive[event.address] = Held(event.size_bytes, label_at(event.time_ns), step)
                numbers[event.address], next_number = next_number, next_number + 1
                self._level += event.size_bytes
            elif self._alive.get(event.address, _NOBODY).size_bytes == -event.size_bytes:
                del self._alive[event.address], numbers[event.address]
                self._level += event.size_bytes
            if place == at_peak:
                peak, peak_bytes, at_peak_numbers = dict(self._alive), self._level, dict(numbers)
        found = [
            (kinds.get(address) or _kind_of(held, at_peak_numbers[address] in saved, step), held)
            for address, held in peak.items()
        ]
        self.steps.append(StepMoment(peak_bytes, self._level, _holders(found)))

    def _highest(self, events: Sequence[AllocationEvent]) -> int:
        """After how many of `events` the level is highest; 0 for before the first."""
        sizes = {address: held.size_bytes for address, held in self._alive.items()}
        level = most = self._level
        found = 0
        for place, event in enumerate(events, 1):
            if event.size_bytes > 0:
                sizes[event.address] = event.size_bytes
                level += event.size_bytes
            elif sizes.get(event.address) == -event.size_bytes:
                del sizes[event.address]
                level += event.size_bytes
            if level > most:
                most, found = level, place
        return found

    def growing(self) -> list[Holder]:
        """What was allocated in earlier steps and lives on, step after step more of it: a leak, unless it is meant.

        By line and operation: at least one block of each of three steps before the last.
        """
        last = len(self.steps) - 1
        found: dict[Label, list[Held]] = {}
        for held in self._alive.values():
            if held.born_in < last:
                found.setdefault(held.label, []).append(held)
        return [
            Holder("growing", label, sum(one.size_bytes for one in blocks), len(blocks))
            for label, blocks in found.items()
            if len({one.born_in for one in blocks}) >= _LEAKING_STEPS
        ]


_NOBODY = Held(0, UNSEEN, 0)
_LEAKING_STEPS = 3


def _kind_of(held: Held, is_saved: bool, step: int) -> str:
    if held.born_in < step:
        return "from steps before"
    if held.label.phase == FORWARD and is_saved:
        return "activations"
    if held.label is UNSEEN:
        return "not by an operation"
    return "temporary"


def _holders(found: Iterable[tuple[str, Held]]) -> tuple[Holder, ...]:
    groups: dict[tuple[str, Label], list[Held]] = {}
    for kind, held in found:
        groups.setdefault((kind, held.label), []).append(held)
    holders = [
        Holder(kind, label, sum(one.size_bytes for one in blocks), len(blocks))
        for (kind, label), blocks in groups.items()
    ]
    return tuple(sorted(holders, key=lambda holder: -holder.size_bytes))
