"""The exact solver where few states matter: a dynamic program that goes through the step from its end to its start.

A state, between two events, is what the events after it ask of those before it:

* the data alive, which have a later use (those of zero bytes do not count, and held ones are always alive);
* the replay set: operations with replay bytes that are computed again later;
* within a stage, the data wanted: those that the rest of the stage uses, and that it may compute again itself.

Backward, because liveness is then known: a use makes its data alive before it, a computation ends the need for what it
makes. Going forward, a state would have to guess what is used again. Each recomputation is an event of its own, with
two outcomes; `oracle` tries whole groups, of which there are many more than there are states that they lead to. What is
computed again must make something that is wanted, so all plans are in the normal form of `normalise`.

Dominance:

* Of two ways to one state, the one of less time is kept. What may happen in the events before, its bytes and its time,
  depends on the state alone, so what completes one way completes the other. For the same reason what nothing will ask
  about is forgotten: the data that an operation makes are wanted no more once it is passed.
* Between stages a state is dropped if another that lacks one member of it took no more time. What completes the one
  completes the other: what is wanted in a stage follows from the stage's needs and its recomputations, not from what is
  alive, so the same recomputations may happen, with at most as many bytes at each.

Dropped too are states above the budget, and those that took more time than allowed: times are not negative.

Complexity: a few operations on integers of some bits per data for each state at each event, and as much memory as the
states at one event need. Their number is at most exponential in how many data may be alive at once. It is small near
the smallest budget, where few sets of data fit, and near keep-all, where a known plan leaves little time to spend.

Known gaps: the time that a state must still spend in earlier stages is not bounded, so equal operations in a chain of
more than about 20, with half of the memory that keep-all takes, are above the limit on the states. A limit on the bytes
at the end of the forward phase is not known here.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rk_solvers.liveness import Tables
from rk_solvers.problem import Problem, Recompute

MOST_STATES = 800_000  # of all events together: half a second, some tens of MB

Link = tuple[tuple[int, int], "Link | None"]  # the last recomputation taken, its stage and operation; those before it
Value = tuple[float, int, Link | None]  # ms of the recomputations, bytes of what the state counts, how it was reached
States = dict[int, Value]


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep ended with."""

    recompute: Recompute | None  # of least time; None if none was found
    proven: bool  # that no plan within the limits takes less time, or that there is none; False where it gave up
    states: int  # that it went through


def sweep_states(
    problem: Problem, budget_bytes: int, at_most_ms: float = math.inf, most_states: int = MOST_STATES
) -> Swept:
    """The plan of least time that fits the budget and whose recomputations take at most `at_most_ms` in all.

    Gives up, without a plan, where it would go through more than `most_states` states.
    """
    return Sweep(problem, budget_bytes, at_most_ms, most_states).run()


class TooMany(Exception):
    """There are more states than allowed."""


@dataclass(frozen=True, slots=True)
class _Again:
    """What a recomputation of an operation does to a state."""

    asks: int  # bits of what it makes among the data wanted: it serves the stage if one of them is set
    adds: int  # bits of what has bytes while it runs
    clears: int  # bits of what it makes
    reads: int  # bits of what it reads
    made_bytes: int
    time_ms: float


@dataclass(slots=True)
class Sweep:
    """The sweep of one problem. A state is an integer, of one bit per possible member of each of its three sets.

    Bit `2 k` is for data `k` alive, `2 k + 1` for it wanted, and those of the replay set come last: where a sweep is
    among the first layers, as at the end of the backward, its integers are short.
    """

    problem: Problem
    budget_bytes: int
    at_most_ms: float
    most_states: int
    states: int = 0  # so far
    sizes: list[int] = field(default_factory=list)  # bytes that each bit stands for; none for data wanted
    weights: dict[int, int] = field(default_factory=dict)  # bytes of the sets of bits met so far
    again: list[_Again] = field(default_factory=list)
    tables: Tables = field(init=False)

    def __post_init__(self) -> None:
        self.tables = Tables(self.problem)
        self.sizes = [part for size in self.tables.size for part in (size, 0)] + self.tables.replay
        self.again = [self._again(index) for index in range(len(self.problem.forward))]

    def _again(self, index: int) -> _Again:
        tables = self.tables
        read, made = self._alive(tables.inputs[index]), self._alive(tables.renewed[index])
        asks = self._wanted(tables.renewed[index])
        reads = read | self._wanted(tables.inputs[index])
        adds = read | made | self._replay(index)
        return _Again(asks, adds, asks | made, reads, self._weight(made), tables.time[index])

    def _alive(self, items: Iterable[int]) -> int:
        """Bits of data alive, as far as they count."""
        return sum(1 << 2 * item for item in items if self.tables.size[item])

    def _wanted(self, items: Iterable[int]) -> int:
        """Bits of data wanted: of those that may be computed again."""
        tables = self.tables
        return sum(1 << 2 * item + 1 for item in items if tables.recomputable[tables.producer[item]])

    def _replay(self, index: int) -> int:
        """Bit of an operation in the replay set; none if it has no replay bytes."""
        return 1 << 2 * len(self.problem.data) + index if self.tables.replay[index] else 0

    def _weight(self, bits: int) -> int:
        """Bytes of data alive and of replay states."""
        if bits not in self.weights:
            self.weights[bits] = sum(size for place, size in enumerate(self.sizes) if bits >> place & 1)
        return self.weights[bits]

    def _count(self, states: States) -> None:
        self.states += len(states)
        if self.states > self.most_states:
            raise TooMany

    def run(self) -> Swept:
        """Go through the step, from its end."""
        problem = self.problem
        possible = self.at_most_ms >= 0 and problem.base_bytes <= self.budget_bytes
        states: States = {0: (0.0, 0, None)} if possible else {}
        try:
            with _without_collection():
                for stage in reversed(range(len(problem.backward))):
                    states = self._stage(stage, states)
                for index in reversed(range(len(problem.forward))):
                    states = self._first_time(index, states)
        except TooMany:
            return Swept(None, False, self.states)
        if not states:
            return Swept(None, True, self.states)
        ((_, _, link),) = states.values()  # nothing is alive before the step
        return Swept(_plan(problem, link), True, self.states)

    def _stage(self, stage: int, states: States) -> States:
        """The states before all recomputations of a stage, from those after its backward operation."""
        tables, needs = self.tables, self.tables.needs[stage]
        room = self.budget_bytes - tables.held_bytes
        states = self._backward(needs, room - tables.peak[stage], states)
        reached = self._wanted(needs)
        for index in reversed(range(tables.count)):
            again = self.again[index]
            if again.asks & reached:
                reached |= again.reads
                own = tables.resident[stage] + tables.workspace[index]
                states = self._recompute((stage, index), room - own, states)
        return _undominated(states)

    def _backward(self, needs: tuple[int, ...], limit_bytes: int, states: States) -> States:
        """The states before a backward operation alone."""
        self._count(states)
        alive, wanted = self._alive(needs), self._wanted(needs)
        before: States = {}
        for state, (time_ms, size, link) in states.items():
            size += self._weight(alive & ~state)
            key = state | alive | wanted
            if size <= limit_bytes and (key not in before or time_ms < before[key][0]):
                before[key] = (time_ms, size, link)
        return before

    def _recompute(self, step: tuple[int, int], limit_bytes: int, states: States) -> States:
        """The states before a computation that may happen or not, in place: here the sweep spends its time."""
        self._count(states)
        again, weights = self.again[step[1]], self.weights
        asks, adds, kept, reads = again.asks, again.adds, ~again.clears, again.reads
        latest_ms, limit_bytes = self.at_most_ms - again.time_ms, limit_bytes - again.made_bytes
        for state in [state for state in states if state & asks]:  # the others it does not serve
            value = time_ms, size, link = states.pop(state)
            key = state & ~asks
            if key not in states or time_ms < states[key][0]:
                states[key] = value
            if time_ms > latest_ms:
                continue
            more = adds & ~state
            size += weights[more] if more in weights else self._weight(more)
            size -= again.made_bytes
            if size > limit_bytes:
                continue
            key = (state | adds) & kept | reads
            time_ms += again.time_ms
            if key not in states or time_ms < states[key][0]:
                states[key] = (time_ms, size, (step, link))
        return states

    def _first_time(self, index: int, states: States) -> States:
        """The states before the computation of `index` in the forward phase."""
        self._count(states)
        tables = self.tables
        limit_bytes = self.budget_bytes - tables.held_until(index) - tables.workspace[index]
        read, made = self._alive(tables.inputs[index]), self._alive(tables.renewed[index])
        kept = ~(made | self._replay(index))
        before: States = {}
        for state, (time_ms, size, link) in states.items():
            running = state | read | made
            size += self._weight(running & ~state)
            key = running & kept
            if size <= limit_bytes and (key not in before or time_ms < before[key][0]):
                before[key] = (time_ms, size - self._weight(running & ~key), link)
        return before


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """No garbage collection meanwhile: states have no cycles, and to look at each took a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _undominated(states: States) -> States:
    """The states between two stages without those of which another lacks one member and took no more time."""
    kept: States = {}
    for state, value in states.items():
        left = state
        while left:
            member = left & -left
            other = states.get(state ^ member)
            if other is not None and other[0] <= value[0]:
                break
            left ^= member
        else:
            kept[state] = value
    return kept


def _plan(problem: Problem, link: Link | None) -> Recompute:
    """The plan of the recomputations that led to a state; they come in their order, as the sweep goes backward."""
    groups: list[list[int]] = [[] for _ in problem.backward]
    while link is not None:
        (stage, index), link = link
        groups[stage].append(index)
    return tuple(map(tuple, groups))
