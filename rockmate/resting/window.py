"""Which of many things are here, of which a window holds a few: what comes ahead of its use, and what leaves for it.

What is used next comes first, and what is used last leaves first, as far as the order of uses is known; it goes round.
The same rules hold for tensors and for a simulation of them, which tells what a window takes, and what is waited for.
"""

from __future__ import annotations

import abc
import bisect
import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from rk_solvers.links import Link


class Place(enum.Enum):
    """Where a thing is."""

    AWAY = "away"
    COMING = "coming"
    HERE = "here"


class Thing(Protocol):
    """What may be here or away."""

    size_bytes: int
    place: Place
    users: int


Item = TypeVar("Item", bound=Thing)


class UseOrder(Generic[Item]):
    """In which order tensors are used, over and over again."""

    def __init__(self, uses: Sequence[Item]) -> None:
        self.uses = tuple(uses)
        self._places: dict[Item, list[int]] = {}
        for place, item in enumerate(self.uses):
            self._places.setdefault(item, []).append(place)

    def until_next(self, item: Item, cursor: int) -> int:
        """How many uses come before the next one of `item`."""
        places = self._places.get(item)
        if not places:
            return 2 * len(self.uses) + 1
        found = bisect.bisect_left(places, cursor)
        return places[found] - cursor if found < len(places) else places[0] + len(self.uses) - cursor


class Window(abc.ABC, Generic[Item]):
    """At most so many bytes here, of things that are used in an order. More only while one use needs more."""

    def __init__(self, window_bytes: int) -> None:
        self.window_bytes = window_bytes
        self.held_bytes = 0
        self.most_held_bytes = 0
        self._all: dict[Item, None] = {}
        self._order: UseOrder[Item] = UseOrder(())
        self._cursor = 0

    @abc.abstractmethod
    def _leave(self, item: Item) -> bool:
        """Give up its place here; False where it cannot."""

    @abc.abstractmethod
    def _cancel(self, item: Item) -> None:
        """What comes is not needed so soon after all."""

    @abc.abstractmethod
    def _begin(self, item: Item) -> None:
        """Begin to bring it."""

    def _recall(self, item: Item) -> None:
        self._begin(item)
        item.place = Place.COMING
        self._hold(item.size_bytes)

    def _make_room(self, size_bytes: int, before: int = -1) -> bool:
        """Give up places until there is one of so many bytes, of what is used after so many other uses."""
        if self.held_bytes + size_bytes <= self.window_bytes:
            return True
        found = [
            (self._order.until_next(item, self._cursor), index, item)
            for index, item in enumerate(list(self._all))  # some may go meanwhile
            if not item.users and (item.place is Place.HERE or (item.place is Place.COMING and before < 0))
        ]
        for distance, _, item in sorted(found, reverse=True):
            if distance <= before:
                return False
            if item.place is Place.COMING:
                self._cancel(item)
            else:
                self._leave(item)
            if self.held_bytes + size_bytes <= self.window_bytes:
                return True
        return False

    def _fetch(self) -> None:
        """Begin to bring what is used next, as far as there is room for it, or for what is used later."""
        uses = self._order.uses
        for ahead in range(len(uses)):
            item = uses[(self._cursor + ahead) % len(uses)]
            if item.place is Place.AWAY:
                if not self._make_room(item.size_bytes, ahead):
                    return
                self._recall(item)

    def _hold(self, size_bytes: int) -> None:
        self.held_bytes += size_bytes
        self.most_held_bytes = max(self.most_held_bytes, self.held_bytes)


@dataclass(eq=False, slots=True)
class _Simulated:
    size_bytes: int
    place: Place = Place.HERE
    users: int = 0
    there_ms: float = 0.0  # when it is here, of what comes


class SimulatedWindow(Window[_Simulated]):
    """What a window does in steps whose uses begin at known times, with a link of known speed."""

    def __init__(self, window_bytes: int, sizes_bytes: Sequence[int], link: Link) -> None:
        super().__init__(window_bytes)
        self.read_bytes = 0
        self.wait_ms = 0.0
        self._link = link
        self._now_ms = self._link_free_ms = 0.0
        self._things = [_Simulated(size_bytes) for size_bytes in sizes_bytes]
        for thing in self._things:
            self._make_room(thing.size_bytes)
            self._all[thing] = None
            self._hold(thing.size_bytes)
        self._make_room(0)

    def step(self, uses: Iterable[tuple[float, Sequence[int]]], rest_ms: float = 0.0) -> None:
        """One step: after so many ms of computation each, these are used at once. Waits and bytes are those of it."""
        uses = list(uses)
        self._order = UseOrder([self._things[index] for _, used in uses for index in used])
        self._cursor = 0
        self.wait_ms, self.read_bytes, self.most_held_bytes = 0.0, 0, self.held_bytes
        self._make_room(0)
        self._fetch()
        cursor = 0
        for compute_ms, used in uses:
            self._now_ms += compute_ms
            self._cursor = cursor
            things = [self._things[index] for index in used]
            for thing in things:
                thing.users += 1
                self._arrive(thing)
            cursor += len(things)
            self._cursor = cursor
            self._fetch()
            for thing in things:
                thing.users -= 1
        self._now_ms += rest_ms

    def _arrive(self, thing: _Simulated) -> None:
        if thing.place is Place.AWAY:
            self._make_room(thing.size_bytes)
            self._recall(thing)
        if thing.place is Place.COMING:
            waited_ms = max(0.0, thing.there_ms - self._now_ms)
            self.wait_ms += waited_ms
            self._now_ms += waited_ms
            thing.place = Place.HERE

    def _begin(self, item: _Simulated) -> None:
        self.read_bytes += item.size_bytes
        moving_ms = self._link.latency_ms + item.size_bytes / self._link.bytes_per_ms
        self._link_free_ms = item.there_ms = max(self._link_free_ms, self._now_ms) + moving_ms

    def _cancel(self, item: _Simulated) -> None:
        self._now_ms = max(self._now_ms, item.there_ms)  # which is waited for, too
        self._leave(item)

    def _leave(self, item: _Simulated) -> bool:
        item.place = Place.AWAY
        self.held_bytes -= item.size_bytes
        return True
