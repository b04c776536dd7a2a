"""Partial plans of the chain's dynamic program with moves: what both links are doing at one place of the chain.

A partial plan covers the blocks before a place, both ways: their first forwards, seen from the start of the step, and
their backwards, seen from its end. Seen from the end, a return is a departure: its data is there when it is needed, and
holds its bytes until its transfer is over. A link's transfers follow one another in the order in which they were asked
for, whatever waits for them, so a clock tells how far its queue has come.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Queue(NamedTuple):
    """One side of a partial plan: its clock, and what is under way on its link then."""

    now_ms: float = 0.0
    free_ms: float = 0.0  # when the link has done what it was asked for
    held_bytes: int = 0  # of all that is under way
    under_way: tuple[tuple[float, int], ...] = ()  # when each is over, and its bytes; in the order of the link

    def with_room(self, room_bytes: int) -> Queue | None:
        """At the first moment from which what is under way takes at most `room_bytes`; None where that is negative."""
        if room_bytes < 0:
            return None
        if self.held_bytes <= room_bytes:
            return self
        held = self.held_bytes
        now = self.now_ms
        for over, size in self.under_way:
            if held <= room_bytes:
                break
            now = over
            held -= size
        return self.at(now)

    def at(self, now_ms: float) -> Queue:
        """At a later moment."""
        held, done = self.held_bytes, 0
        for over, size in self.under_way:
            if over > now_ms:
                break
            held -= size
            done += 1
        return Queue(now_ms, max(now_ms, self.free_ms), held, self.under_way[done:])

    def asked(self, transfers: Iterable[tuple[float, int]]) -> Queue:
        """With more to transfer from now on: how long each takes, and its bytes."""
        free, held = self.free_ms, self.held_bytes
        under_way = list(self.under_way)
        for time_ms, size in transfers:
            free += time_ms
            held += size
            under_way.append((free, size))
        return Queue(self.now_ms, free, held, tuple(under_way))

    def no_later(self, other: Queue) -> bool:
        """Whether it is as far in everything as another one, at its moment and at all later ones."""
        if self.now_ms > other.now_ms or self.free_ms > other.free_ms:
            return False
        if not self.under_way:
            return True
        held = other.held_bytes
        moments = [(other.now_ms, held)]
        for over, size in other.under_way:
            held -= size
            moments.append((over, held))
        return all(sum(size for over, size in self.under_way if over > moment) <= most for moment, most in moments)


class Choice(NamedTuple):
    """How the blocks from one place to the next one run."""

    first: int
    after: int  # the place reached
    option: int = -1  # of the block, where it runs once; else all of them run again, from the input of the first
    slots: int = 0  # of memory, while they run again
    moved: tuple[int, ...] = ()  # data of them that are away at the turn


@dataclass(frozen=True, slots=True, eq=False)
class Label:
    """A partial plan up to a block, whose input is kept or is to leave."""

    out: Queue
    back: Queue
    kept_bytes: int = 0  # until the backward of the blocks that it is kept for
    leaving: tuple[int, ...] = ()  # data of the block's input that leave once it has run
    moved_bytes: int = 0  # counted where the second memory has a limit
    before: Label | None = None
    choice: Choice | None = None

    @property
    def time_ms(self) -> float:
        """Of all that it covers."""
        return self.out.now_ms + self.back.now_ms

    @property
    def moved(self) -> frozenset[int]:
        """All data that are away at the turn."""
        return frozenset(item for choice in self.choices() for item in choice.moved)

    def choices(self) -> list[Choice]:
        """From the start of the chain on."""
        found: list[Choice] = []
        label: Label | None = self
        while label is not None:
            if label.choice is not None:
                found.append(label.choice)
            label = label.before
        return found[::-1]

    def beats(self, other: Label) -> bool:
        """Whether whatever follows the other one can follow this one, in no more time."""
        return (
            self.kept_bytes <= other.kept_bytes
            and self.moved_bytes <= other.moved_bytes
            and self.leaving == other.leaving
            and self.out.no_later(other.out)
            and self.back.no_later(other.back)
        )
