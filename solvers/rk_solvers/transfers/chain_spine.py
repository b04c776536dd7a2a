"""The dynamic program of `chain_program` for one budget: partial plans from place to place along the chain."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rk_solvers.chain.blocks import Block
from rk_solvers.chain.rotor import RotorTable
from rk_solvers.chain.rotor_tables import Times, pinned_bytes
from rk_solvers.chain.sequence import Operation, expand
from rk_solvers.groups import normalise
from rk_solvers.links import SecondMemory
from rk_solvers.liveness import kept_over_the_turn
from rk_solvers.problem import Problem, Recompute
from rk_solvers.transfers.chain_labels import Choice, Label, Queue

_SHARES = (0.5, 1.0)  # of what a block saves for itself: moved, largest first
_CHUNKS = 3  # of what a block saves for itself, each let go of at once
_FEW = 2  # data of which all subsets are tried instead
_PARTS = 16  # of the budget, into which labels are sorted where there are too many


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a block once: an option, and what of that which it saves is moved."""

    option: int
    forward_bytes: int  # the block's input left out, pins of earlier blocks included
    backward_bytes: int
    back_ms: float
    kept_bytes: int
    own: tuple[int, ...]  # data for the block's own backward that are moved
    leaving: tuple[int, ...]  # data of the next block's input that are


class Spine:
    """The program for `room_bytes`, without what is resident and held throughout. See `chain_program`.

    With `once` nothing runs again. At most `labels` are kept at each place.
    """

    def __init__(
        self, problem: Problem, table: RotorTable, memory: SecondMemory, room_bytes: int, labels: int, once: bool
    ) -> None:
        self.problem, self.table, self.memory, self.room_bytes = problem, table, memory, room_bytes
        self.labels, self.once = labels, once
        self.sizes = [item.size_bytes for item in problem.data]
        blocks = table.blocks
        self.last = len(blocks) - 1
        self.pinned = pinned_bytes(blocks)[:, self.last].tolist()
        self.first_ms = [sum(problem.forward[index].time_ms for index in block.forward) for block in blocks]
        users = _last_users(problem, blocks)
        self.inputs = [
            _inputs(problem, users, blocks[place - 1], place) if place else () for place in range(len(blocks))
        ]
        self.ways = [self._ways(users, place) for place in range(self.last)]
        self.least_ms = [0.0] * (len(blocks) + 1)
        for place in reversed(range(len(blocks))):
            self.least_ms[place] = self.least_ms[place + 1] + self.first_ms[place] + blocks[place].backward_ms
        self.best_ms = math.inf
        self.known: dict[tuple[int, ...], tuple[list[tuple[float, int]], list[tuple[float, int]], int]] = {}

    def ended(self, deadline: float = math.inf) -> list[Label]:
        """Whole plans, the fastest last; those found until `time.monotonic` reaches `deadline`."""
        found: list[Label] = []
        places: list[list[Label]] = [[] for _ in range(self.last + 1)]
        places[0].append(Label(Queue(), Queue()))
        for place, labels in enumerate(places):
            for label in self._worth(labels, place):
                end = self._end(label, place)
                if end is not None and end.time_ms < self.best_ms:
                    self.best_ms = end.time_ms
                    found.append(end)
                for after, more in self._next(label, place):
                    places[after].append(more)
            labels.clear()
            if time.monotonic() >= deadline:
                break
        return found

    def recompute(self, label: Label) -> Recompute:
        """What a whole plan computes again."""
        states = len(self.table.table.times)
        forward: list[Operation] = []
        backward: list[list[Operation]] = []
        for choice in label.choices():
            if choice.option >= 0:
                forward.append(Operation("Fe", choice.first, choice.option))
                backward.append([Operation("B", choice.first, choice.option)])
            elif choice.after > self.last:
                forward += self.table.operations(0, choice.first, self.last, choice.slots)
            else:
                forward += [Operation("Fck", place) for place in range(choice.first, choice.after)]
                backward.append(self.table.operations(states - 1, choice.first, choice.after - 1, choice.slots))
        operations = forward + list(itertools.chain.from_iterable(reversed(backward)))
        return normalise(self.problem, expand(self.problem, self.table.blocks, operations))

    # ---- from place to place -----------------------------------------------------------------------------

    def _next(self, label: Label, place: int) -> Iterator[tuple[int, Label]]:
        if place == self.last:
            return
        yield from ((place + 1, more) for more in self._run_once(label, place))
        if not self.once:
            yield from self._run_again(label, place)

    def _run_once(self, label: Label, place: int) -> Iterator[Label]:
        """The block runs once."""
        sent, returned, sent_bytes = self._transfers(label.leaving)
        room = self.room_bytes - label.kept_bytes - sent_bytes
        option, out, back = -1, None, None
        for way in self.ways[place]:
            if way.option != option:
                option = way.option
                out = label.out.with_room(room - way.forward_bytes)
                back = label.back.with_room(room - way.backward_bytes)
                out = None if out is None else out.at(out.now_ms + self.first_ms[place]).asked(sent)
                back = None if back is None else back.at(back.now_ms + way.back_ms)
            if out is None or back is None or self._late(out, back, place + 1):
                continue
            own_sent, own_returned, _ = self._transfers(way.own)
            choice = Choice(place, place + 1, way.option, moved=way.own + way.leaving)
            more = self._label(
                label,
                choice,
                (out.asked(own_sent), back.asked([*own_returned, *returned])),
                label.kept_bytes + way.kept_bytes,
                way.leaving,
            )
            if more is not None:
                yield more

    def _run_again(self, label: Label, place: int) -> Iterator[tuple[int, Label]]:
        """The block and some after it run again, from its input."""
        blocks = self.table.blocks
        sent, returned, input_bytes = self._transfers(label.leaving)
        room = self.room_bytes - label.kept_bytes
        sent_bytes = input_bytes
        out = label.out
        for after in range(place + 1, self.last + 1):
            block = blocks[after - 1]
            begun = out.with_room(room - input_bytes - block.forget_bytes - self.pinned[after - 1])
            if begun is None:
                return
            out = begun.at(begun.now_ms + self.first_ms[after - 1])
            if after == place + 1:
                out = out.asked(sent)
            input_bytes = blocks[after].input_bytes
            times = self.table.table.times[-1, place, after - 1]
            solved = self._solved(label.back, times, room - sent_bytes)
            if solved is None or self._late(out, solved[0], after):
                continue
            back, slots = solved
            sides = out, back.asked(returned)
            for leaving in ((), self.inputs[after]) if self.inputs[after] and after < self.last else ((),):
                kept_bytes = label.kept_bytes + input_bytes - sum(self.sizes[item] for item in leaving)
                choice = Choice(place, after, slots=slots, moved=leaving)
                more = self._label(label, choice, sides, kept_bytes, leaving)
                if more is not None:
                    yield after, more

    def _end(self, label: Label, place: int) -> Label | None:
        """With all that remains solved by the table, and nothing more moved. All that leaves has left by then."""
        if label.leaving or (self.once and place < self.last):
            return None
        back = label.back if place == self.last else label.back.at(label.back.free_ms)
        solved = self._solved(back, self.table.table.times[0, place, self.last], self.room_bytes - label.kept_bytes)
        if solved is None:
            return None
        after = self.last + 1
        beyond_ms = sum(self.first_ms[place:]) - sum(block.forward_ms for block in self.table.blocks[place:])
        out = label.out.at(label.out.free_ms + beyond_ms)
        sides = out, solved[0].at(solved[0].free_ms)
        return self._label(label, Choice(place, after, slots=solved[1]), sides, label.kept_bytes, ())

    def _solved(self, back: Queue, times: Times, room_bytes: int) -> tuple[Queue, int] | None:
        """After a cell of the table of these times, and the slots that it has; None where there are never enough.

        Where that ends it earlier, more is waited for before.
        """
        held = back.held_bytes
        best: tuple[float, int] | None = None
        for now, left in itertools.chain([(back.now_ms, 0)], back.under_way):
            held -= left
            slots = min((room_bytes - held) // self.table.slot_bytes, len(times) - 1)
            if slots >= 0:
                end = now + float(times[slots])
                if end < (math.inf if best is None else best[0]):
                    best = end, slots
        return None if best is None else (back.at(best[0]), best[1])

    def _label(
        self, before: Label, choice: Choice, sides: tuple[Queue, Queue], kept_bytes: int, leaving: tuple[int, ...]
    ) -> Label | None:
        moved_bytes = before.moved_bytes
        if self.memory.limit_bytes is not None:
            moved_bytes += sum(self.sizes[item] for item in choice.moved)
            if moved_bytes > self.memory.limit_bytes:
                return None
        return Label(*sides, kept_bytes, leaving, moved_bytes, before, choice)

    def _transfers(self, items: tuple[int, ...]) -> tuple[list[tuple[float, int]], list[tuple[float, int]], int]:
        """Out in their order, back in the reverse one, and their bytes; those of many data are taken together."""
        if items not in self.known:
            chunks = _chunks(items)
            sizes = [(sum(self.sizes[item] for item in chunk), len(chunk)) for chunk in chunks]
            links = self.memory.out, self.memory.back
            out, back = (
                [(link.time_ms(size) + (count - 1) * link.latency_ms, size) for size, count in sizes] for link in links
            )
            self.known[items] = out, back[::-1], sum(size for size, _ in sizes)
        return self.known[items]

    def _late(self, out: Queue, back: Queue, place: int) -> bool:
        """Whether nothing from this place on is faster than what is known."""
        return out.now_ms + back.now_ms + self.least_ms[place] >= self.best_ms

    # ---- which labels are worth more ---------------------------------------------------------------------

    def _worth(self, labels: list[Label], place: int) -> list[Label]:
        labels = [label for label in labels if not self._late(label.out, label.back, place)]
        labels.sort(key=lambda label: label.time_ms)
        if len(labels) > self.labels:
            part = max(1, self.room_bytes // _PARTS)
            sorted_in: dict[tuple[bool, int, int, int], Label] = {}
            for label in labels:
                held = label.out.held_bytes // part, label.back.held_bytes // part
                sorted_in.setdefault((bool(label.leaving), label.kept_bytes // part, *held), label)
            labels = sorted(sorted_in.values(), key=lambda label: self._hoped_ms(label, place))[: self.labels]
        kept: list[Label] = []
        for label in labels:
            if not any(other.beats(label) for other in kept):
                kept.append(label)
        return kept

    def _hoped_ms(self, label: Label, place: int) -> float:
        """The time of the step if what is yet to come runs again, or is moved where both links have time for it."""
        times = self.table.table.times[0, place, self.last]
        slot_bytes = self.table.slot_bytes
        leaving_bytes = sum(self.sizes[item] for item in label.leaving)
        slots = (self.room_bytes - label.kept_bytes) // slot_bytes
        out_ms = sum(self.first_ms[place:]) - (label.out.free_ms - label.out.now_ms)
        back_ms = sum(block.backward_ms for block in self.table.blocks[place:])
        back_ms -= label.back.free_ms - label.back.now_ms
        out, back = self.memory.out.bytes_per_ms, self.memory.back.bytes_per_ms
        free_bytes = max(0.0, min(out_ms * out, back_ms * back)) - leaving_bytes
        more_bytes = (np.arange(len(times)) - slots) * float(slot_bytes) - free_bytes
        waiting_ms = np.maximum(0.0, more_bytes) * (1 / out + 1 / back)
        return label.time_ms + float(np.min(times + waiting_ms))

    # ---- numbers of blocks -------------------------------------------------------------------------------

    def _ways(self, users: Sequence[int], place: int) -> list[Way]:
        block = self.table.blocks[place]
        found: list[Way] = []
        made = _made(self.problem, block)
        for number, option in enumerate(block.options):
            if block.part is None or (self.once and option.extra_ms > 0):
                continue
            saved = [made[item] for item in kept_over_the_turn(block.part.problem, ((), *option.recompute))]
            saved = [item for item in saved if item not in self.problem.held and self.sizes[item]]
            own = [item for item in saved if users[item] <= place]
            handed = tuple(item for item in self.inputs[place + 1] if place + 1 < self.last)
            saved_bytes = option.saved_bytes - sum(pin.size_bytes for pin in block.pins)
            pinned = self.pinned[place]
            for moved in self._subsets(own):
                for leaving in ((), handed) if handed else ((),):
                    moved_bytes = sum(self.sizes[item] for item in itertools.chain(moved, leaving))
                    found.append(
                        Way(
                            number,
                            option.forward_bytes + pinned,
                            option.backward_bytes + block.resident_bytes + pinned,
                            block.backward_ms + option.extra_ms,
                            saved_bytes - moved_bytes,
                            moved,
                            leaving,
                        )
                    )
        return found

    def _subsets(self, items: list[int]) -> list[tuple[int, ...]]:
        """All of a few data, else none and shares of their bytes, largest first."""
        if len(items) <= _FEW:
            sizes = range(len(items) + 1)
            return [chosen for size in sizes for chosen in itertools.combinations(sorted(items), size)]
        ranked = sorted(items, key=lambda item: (-self.sizes[item], item))
        sums = list(itertools.accumulate(self.sizes[item] for item in ranked))
        counts = [0, *(1 + next(i for i, total in enumerate(sums) if total >= share * sums[-1]) for share in _SHARES)]
        return [tuple(sorted(ranked[:count])) for count in dict.fromkeys(counts)]


def _chunks(items: tuple[int, ...]) -> list[tuple[int, ...]]:
    """At most `_CHUNKS` of them."""
    length = -(-len(items) // _CHUNKS) or 1
    return [items[start : start + length] for start in range(0, len(items), length)]


def _made(problem: Problem, block: Block) -> list[int]:
    """The data of a block's own problem, by their numbers there."""
    return [item for index in block.forward for item in problem.forward[index].outputs]


def _last_users(problem: Problem, blocks: Sequence[Block]) -> list[int]:
    """By data, the last block that makes or uses it."""
    last = [0] * len(problem.data)
    for place, block in enumerate(blocks):
        for index in block.forward:
            op = problem.forward[index]
            for item in (*op.inputs, *op.outputs):
                last[item] = max(last[item], place)
        for stage in block.stages:
            for item in problem.backward[stage].needs:
                last[item] = max(last[item], place)
    return last


def _inputs(problem: Problem, users: Sequence[int], before: Block, place: int) -> tuple[int, ...]:
    """What the block before makes for this one alone."""
    made = _made(problem, before)
    return tuple(item for item in sorted(made) if users[item] == place and item not in problem.held)
