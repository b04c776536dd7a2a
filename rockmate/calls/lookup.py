"""The plans of one module, found by what a call looks like: with many plans, a call is compared with few of them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator

from rkgb import Sample
from rockmate.calls.specialization import Specialization
from rockmate.guards.inputs import CallPattern


class SpecializationIndex:
    """Plans in the order of their last use, the latest first.

    Threads that run the module may look and reorder at once: what one of them walks, no other changes.
    """

    def __init__(self) -> None:
        self._all: tuple[Specialization, ...] = ()
        self._alike: dict[Hashable, tuple[Specialization, ...]] = {}

    def __iter__(self) -> Iterator[Specialization]:
        return iter(self._all)

    def __reversed__(self) -> Iterator[Specialization]:
        return reversed(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, index: int) -> Specialization:
        return self._all[index]

    def alike(self, call: Sample) -> tuple[Specialization, ...]:
        """Those for calls that look like `call`. They may still be for other modes, settings or data."""
        return self._alike.get(CallPattern.of(call).key, ())

    def next_larger(self, pattern: CallPattern) -> Specialization | None:
        """Of the plans for calls that are nowhere smaller than `pattern`, the nearest in size."""
        found: list[tuple[float, int, Specialization]] = []
        for index, member in enumerate(self):
            ratios = member.measured.pattern.size_ratios(pattern)
            if ratios is not None and all(ratio >= 1 for ratio in ratios):
                found.append((sum(map(math.log, ratios)), index, member))
        return min(found)[2] if found else None

    def add(self, member: Specialization, most: int) -> tuple[Specialization, ...]:
        """Take `member` in as the one used last, and drop what is then more than `most`; those are returned."""
        dropped = self._all[most - 1 :]
        self._set((member, *self._all[: most - 1]))
        return dropped

    def remove(self, members: Iterable[Specialization]) -> None:
        """Forget `members`."""
        gone = {id(member) for member in members}
        self._set(tuple(member for member in self._all if id(member) not in gone))

    def used(self, member: Specialization) -> None:
        """`member` comes first from now on."""
        member.uses += 1
        if self._all[0] is not member:
            self._all = _first(member, self._all)
        key = member.measured.pattern.key
        if key in self._alike and self._alike[key][0] is not member:
            self._alike[key] = _first(member, self._alike[key])

    def _set(self, members: tuple[Specialization, ...]) -> None:
        alike: dict[Hashable, tuple[Specialization, ...]] = {}
        for member in members:
            key = member.measured.pattern.key
            alike[key] = (*alike.get(key, ()), member)
        self._all, self._alike = members, alike


def _first(member: Specialization, others: tuple[Specialization, ...]) -> tuple[Specialization, ...]:
    return (member, *(other for other in others if other is not member))
