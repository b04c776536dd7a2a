"""A plan with moves: what it recomputes, and which data are in the second memory between which of their uses.

What is held when does not depend on how fast the links are: a data holds its bytes in the first memory until a given
step has run, and again from another on. Links decide on time alone, by how long a step waits.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rk_solvers.links import SecondMemory
from rk_solvers.liveness import Bytes, Instance, Step, curve_of, instances_of, schedule_of, steps_of
from rk_solvers.problem import Problem, Recompute
from rk_solvers.schedule import Arrive, Backward, Compute, Leave, Offload, Op, Recall, Schedule


@dataclass(frozen=True, slots=True, order=True)
class Gap:
    """Steps between two uses of an instance of a data; it may be away in all those between."""

    before: int  # the step of the earlier use
    after: int  # the step of the later use: at least two further on
    data: int


@dataclass(frozen=True, slots=True, order=True)
class Move:
    """A data that is away in a part of a gap."""

    gap: Gap
    left: int  # it is let go of right after this step: from `gap.before` to before `recalled`
    recalled: int  # memory is taken for it right before this step: after `left`, up to `gap.after`


@dataclass(frozen=True, slots=True)
class Costs:
    """What a plan with moves takes."""

    peak_bytes: int
    time_ms: float
    waiting_ms: float  # of it
    stored_bytes: int  # in the second memory at most


class Base:
    """A problem and what is recomputed of it: the steps, and what they hold where nothing moves.

    Its gaps are all between two uses of one instance, or those `over_the_turn` alone: from the last use in the forward
    to the first after it.
    """

    def __init__(
        self, problem: Problem, recompute: Recompute, memory: SecondMemory, *, over_the_turn: bool = False
    ) -> None:
        self.problem, self.recompute, self.memory = problem, recompute, memory
        self.over_the_turn = over_the_turn
        self.steps = steps_of(problem, recompute)
        instances = instances_of(problem, recompute)
        self.curve: Bytes = curve_of(problem, self.steps, instances)
        self.times_ms = [_time_ms(problem, step) for step in self.steps]
        ends = itertools.accumulate(self.times_ms)
        self.ends_ms = [0.0, *ends]  # by step: when it begins where nothing waits; and the end of the last
        turn = len(problem.forward)
        gaps = self._gaps(instances)
        self.gaps = sorted(gap for gap in gaps if not over_the_turn or gap.before < turn <= gap.after)

    def again(self, recompute: Recompute) -> Base:
        """The same with other recomputations."""
        return Base(self.problem, recompute, self.memory, over_the_turn=self.over_the_turn)

    def size_bytes(self, gap: Gap) -> int:
        """Of its data."""
        return self.problem.data[gap.data].size_bytes

    def length_ms(self, gap: Gap) -> float:
        """From the end of the earlier use to the later one, where nothing waits."""
        return self.ends_ms[gap.after] - self.ends_ms[gap.before + 1]

    def held(self, moves: Iterable[Move]) -> Bytes:
        """Highest bytes of the first memory in each step."""
        held = self.curve.copy()
        staging_bytes = 0
        for move in moves:
            held[move.left + 1 : move.recalled] -= self.size_bytes(move.gap)
            staging_bytes = self.memory.staging_bytes
        held += staging_bytes
        return held

    def costs(self, moves: Sequence[Move]) -> Costs:
        """Peak, time with all that is waited for, and what the second memory holds."""
        held = self.held(moves)
        return Costs(int(held.max(initial=self.problem.base_bytes)), *self._clock(moves), self._stored_bytes(moves))

    def time_ms(self, moves: Sequence[Move]) -> float:
        """Of `costs`."""
        return self._clock(moves)[0]

    def schedule(self, moves: Sequence[Move]) -> Schedule:
        """The plan as a schedule, whose operations at one place are in the order of `_clock`."""
        names = [data.name for data in self.problem.data]
        after: list[list[Op]] = [[] for _ in self.steps]
        before: list[list[Op]] = [[] for _ in self.steps]
        sending = _first_of_each(moves)
        for move in sorted(sending, key=_by_gap):
            after[move.gap.before].append(Offload(names[move.gap.data]))
        for move in sorted(moves, key=_by_gap):
            after[move.left].append(Leave(names[move.gap.data]))
        for move in sorted(moves, key=by_need):
            before[move.recalled].append(Recall(names[move.gap.data]))
        for move in sorted(moves, key=by_need):
            before[move.gap.after].append(Arrive(names[move.gap.data]))
        ops: list[Op] = []
        position = -1
        for op in schedule_of(self.problem, self.recompute).ops:
            if isinstance(op, Compute | Backward):
                ops += after[position] if position >= 0 else []
                position += 1
                ops += before[position]
            ops.append(op)
        return Schedule(tuple(ops + (after[position] if position >= 0 else [])))

    def _gaps(self, instances: Iterable[Instance]) -> Iterable[Gap]:
        uses: dict[int, list[int]] = {}
        for position, step in enumerate(self.steps):
            problem = self.problem
            read = problem.forward[step.forward].inputs if step.forward >= 0 else problem.backward[step.stage].needs
            for item in read:
                uses.setdefault(item, []).append(position)
        for instance in instances:
            if instance.data in self.problem.held or not self.problem.data[instance.data].size_bytes:
                continue
            own = [position for position in uses.get(instance.data, []) if instance.first < position <= instance.last]
            for before, after in itertools.pairwise([instance.first, *own]):
                if after - before >= 2:
                    yield Gap(before, after, instance.data)

    def _clock(self, moves: Sequence[Move]) -> tuple[float, float]:
        """The time of the step, and how much of it is waited for."""
        sent: defaultdict[int, list[int]] = defaultdict(list)  # by step, and so on: the moves
        left: defaultdict[int, list[int]] = defaultdict(list)
        recalled: defaultdict[int, list[int]] = defaultdict(list)
        taken: defaultdict[int, list[int]] = defaultdict(list)
        first: set[int] = set()  # data that are sent
        for index in sorted(range(len(moves)), key=lambda index: _by_gap(moves[index])):
            gap = moves[index].gap
            if gap.data not in first:
                first.add(gap.data)
                sent[gap.before].append(index)
            left[moves[index].left].append(index)
        for index in sorted(range(len(moves)), key=lambda index: by_need(moves[index])):
            recalled[moves[index].recalled].append(index)
            taken[moves[index].gap.after].append(index)
        out_ms = [self.memory.out.time_ms(self.size_bytes(move.gap)) for move in moves]
        back_ms = [self.memory.back.time_ms(self.size_bytes(move.gap)) for move in moves]
        there_ms, here_ms = [0.0] * len(moves), [0.0] * len(moves)
        now = waiting = out_free = back_free = 0.0
        for position, time_ms in enumerate(self.times_ms):
            for index in recalled.get(position, ()):
                back_free = here_ms[index] = max(now, back_free) + back_ms[index]
                now += self.memory.back.burden * back_ms[index]
            for index in taken.get(position, ()):
                waiting += max(0.0, here_ms[index] - now)
                now = max(now, here_ms[index])
            now += time_ms
            for index in sent.get(position, ()):
                out_free = there_ms[index] = max(now, out_free) + out_ms[index]
                now += self.memory.out.burden * out_ms[index]
            for index in left.get(position, ()):
                waiting += max(0.0, there_ms[index] - now)
                now = max(now, there_ms[index])
        return now, waiting

    def _stored_bytes(self, moves: Iterable[Move]) -> int:
        since: dict[int, int] = {}
        until: dict[int, int] = {}
        for move in moves:
            item = move.gap.data
            since[item] = min(since.get(item, move.gap.before), move.gap.before)
            until[item] = max(until.get(item, 0), move.gap.after)
        change = np.zeros(len(self.steps) + 1, np.int64)
        for item in since:
            size_bytes = self.memory.stored_bytes(self.problem.data[item].size_bytes)
            change[since[item]] += size_bytes
            change[until[item]] -= size_bytes
        return int(np.cumsum(change).max(initial=0))


def _first_of_each(moves: Iterable[Move]) -> set[Move]:
    """Those that send their data: the second memory has it until it comes back for the last time."""
    first: dict[int, Move] = {}
    for move in moves:
        known = first.get(move.gap.data)
        if known is None or move.gap.before < known.gap.before:
            first[move.gap.data] = move
    return set(first.values())


def _by_gap(move: Move) -> tuple[int, int, int]:
    """In the order in which data are sent: those that are wanted last go first."""
    return move.gap.before, -move.gap.after, move.gap.data


def by_need(move: Move) -> tuple[int, int, int]:
    """In the order in which data come back."""
    return move.gap.after, move.gap.before, move.gap.data


def _time_ms(problem: Problem, step: Step) -> float:
    if step.forward < 0:
        return problem.backward[step.stage].time_ms
    forward = problem.forward[step.forward]
    return forward.time_ms if step.stage < 0 else forward.recompute_ms
