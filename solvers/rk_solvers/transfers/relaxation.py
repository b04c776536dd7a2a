"""The relaxation of `bounds.relaxation`, where data may also leave for a second memory and come back.

What every plan satisfies, beside what is said there of groups of backward operations:

* a data used in a group is alive at its beginning, recomputed in it, or comes back in it after it had left before;
  alive is what holds its bytes, so that a data is alive from its recall on;
* what is recalled has left before: its one transfer outwards was complete. Of that transfer, the share that is done by
  a moment is a variable. It grows while the data is alive, and no faster than the link has time for;
* a value that there is at the end of a group, alive or sent, was there at its beginning or is recomputed in it;
* in the forward a data that is wanted later, and is not recomputed for that, is alive or has left;
* between the beginnings of two groups the link back has time for what is recalled and due there;
* in all, what is done more takes at least as long as transfers slow the computation beside them.

Moments are the beginnings of groups and a few operations of the forward. Time is what the computations take once, and
between any two moments something more: what is waited for, and what is computed more often than once. What is relaxed:
in which order data are transferred, and when exactly something happens between two moments. Of the second memory's
limit, only what is there at the beginnings of groups is counted.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from dataclasses import dataclass, field

from rk_solvers.bounds.relaxation import UNITS, Relaxation
from rk_solvers.links import SecondMemory
from rk_solvers.liveness import last_forward_uses
from rk_solvers.milp import Term
from rk_solvers.problem import Problem

MOMENTS = 4  # of the forward: more of them cost seconds, and tell little
MOST_WINDOWED = 12  # groups, up to which returns are looked at between any two of them


@dataclass(slots=True)
class MovesRelaxation(Relaxation):
    """The program of the module's docstring. `budget_bytes` is what staging leaves; `memory` must be given."""

    memory: SecondMemory | None = None
    most_extra_ms: float = 0.0  # bound of the time that is waited for between two moments
    unlinked: bool = False  # whether transfers take no time: what is infeasible so is infeasible at any speed
    most_moments: int = MOMENTS
    unit_ms: float = field(init=False)  # the objective's unit of time
    moments: list[int] = field(default_factory=list)  # forward operations: just before each is a moment
    sent: list[dict[int, int]] = field(default_factory=list)  # by moment of the forward: variable by data, share sent
    left: list[dict[int, int]] = field(default_factory=list)  # the same at the start of each group, and at the end
    regained: list[dict[int, int]] = field(default_factory=list)  # per group: back in it, as it had left before
    both: list[dict[int, int]] = field(default_factory=list)  # at the start of each group: alive, and sent
    begun: dict[int, dict[int, int]] = field(default_factory=dict)  # the same just before a backward operation
    waits: list[int] = field(default_factory=list)  # variables of what is waited for up to each moment of the forward
    pauses: list[int] = field(default_factory=list)  # just before each group
    extras: list[int] = field(default_factory=list)  # in each group: waited for, or computed more than once
    away: list[list[Term]] = field(default_factory=list)  # by forward operation: bytes between uses of the forward
    early: dict[int, int] = field(default_factory=dict)  # by data: back before the end of the forward, after its uses
    forward_returns: list[Term] = field(default_factory=list)  # what comes back in the forward, in milliseconds
    out_ms: list[float] = field(default_factory=list)
    back_ms: list[float] = field(default_factory=list)

    def movable(self, item: int) -> bool:
        """Whether a data can be moved, and it is of any use."""
        assert self.memory is not None
        limit_bytes = self.memory.limit_bytes
        fits = limit_bytes is None or self.live.size[item] <= limit_bytes
        return fits and item not in self.problem.held and self.live.size[item] > 0

    def _add_variables(self) -> None:
        Relaxation._add_variables(self)
        assert self.memory is not None
        self.unit_ms = self.problem.keep_all_time_ms / UNITS or 1.0
        self.moments = _moments(self.problem, self.most_moments)
        for data in self.problem.data:
            self.out_ms.append(self.memory.out.time_ms(data.size_bytes))
            self.back_ms.append(self.memory.back.time_ms(data.size_bytes))
        self._add_left()
        self._add_sent()
        self._add_gaps()
        groups = len(self.stages)
        for variables, count in ((self.waits, len(self.moments)), (self.pauses, groups), (self.extras, groups)):
            for _ in range(count):
                variables.append(self.variable(upper=self.most_extra_ms / self.unit_ms))
                self.model.cost[variables[-1]] = 1.0
        if not self.unlinked:
            self._add_out()
            self._add_back()
            self._add_burden()
        if self.memory.limit_bytes is not None:
            self._add_limit(self.memory.limit_bytes)

    def _at_most(self, variable: int, *others: int) -> None:
        """The variable is at most the sum of the others."""
        self.model.add_row([(variable, 1.0), *((other, -1.0) for other in others)], upper=0.0)

    def _add_left(self) -> None:
        """The share sent of each data at the start of each group, and at the end; and what comes back in each group."""
        groups = range(len(self.stages))
        self.left = [{item: self.variable() for item in self.alive[0] if self.movable(item)}]
        for alive in self.alive:
            self.left.append({item: self.variable() for item in self.left[-1] if item in alive})
        for group in groups:
            items = self.left[group + 1]
            self.returned.append({item: self.variable(integer=True) for item in items})
            self.regained.append({item: self.variable() for item in items})
            self.both.append({item: self.variable() for item in items})
            if len(self.stages[group]) == 1:
                self.begun[group] = {item: self.variable() for item in items}
        for group in groups:
            for item in self.left[group + 1]:
                self._add_left_rows(group, item)

    def _add_left_rows(self, group: int, item: int) -> None:
        """What links a data's state at the start of a group with that at its end."""
        start, end, back = self.left[group][item], self.left[group + 1][item], self.regained[group][item]
        begun = [self.begun[group][item]] if group in self.begun else []
        for earlier, later in itertools.pairwise([start, *begun, end]):
            self._at_most(earlier, later)
        self._at_most(self.returned[group][item], end)
        self._at_most(back, self.returned[group][item])
        self._at_most(self.both[group][item], self.alive[group][item])
        # What is regained was not alive at the start: where a half is kept, the other half comes back, if it was sent.
        self.model.add_row([(back, 1.0), (self.both[group][item], 1.0), (start, -1.0)], upper=0.0)
        # A value that there is, alive or sent, was there before, or is recomputed.
        again = self.recomputed[group].get(self.live.producer[item])
        row = [*self._had(group + 1, item, 1.0), *self._had(group, item, -1.0)]
        self.model.add_row(row if again is None else [*row, (again, -1.0)], upper=0.0)

    def _had(self, group: int, item: int, sign: float) -> list[Term]:
        """Terms of a data's being alive at the start of a group, or sent by then."""
        terms = [(self.left[group][item], sign)]
        if item in self._after(group - 1, self.alive):
            terms += [(self.alive[group][item], sign), (self.both[group][item], -sign)]
        return terms

    def _sources(self, group: int, recomputed: dict[int, int], item: int) -> list[Term]:
        terms = Relaxation._sources(self, group, recomputed, item)
        back = self.regained[group].get(item)
        return terms if back is None else [*terms, (back, -1.0)]

    def _add_sent(self) -> None:
        """Shares sent at the moments of the forward: none of what is not made yet."""
        wanted = {*self.left[0], *(item for item, _, _ in self._forward_gaps())}
        for moment in self.moments:
            self.sent.append({item: self.variable() for item in sorted(wanted) if self.live.producer[item] < moment})
        for before, after in itertools.pairwise([*self.sent, self.left[0]]):
            for item in before.keys() & after.keys():
                self._at_most(before[item], after[item])

    def _forward_gaps(self) -> list[tuple[int, int, int]]:
        """Data, and two uses of it in the forward that follow each other, with others between."""
        users = self.problem.forward_users()
        found: list[tuple[int, int, int]] = []
        for item, data in enumerate(self.problem.data):
            if self.movable(item):
                pairs = itertools.pairwise([data.producer, *users[item]])
                found += [(item, before, after) for before, after in pairs if after - before >= 2]
        return found

    def _add_gaps(self) -> None:
        """What is away in the forward alone: between two uses there, or after the last one."""
        self.away = [[] for _ in self.problem.forward]
        for item, before, after in self._forward_gaps():
            away = self.variable()
            self.forward_returns.append((away, self.back_ms[item]))
            for segment in range(self._segment(before + 1), self._segment(after - 1) + 1):
                here = self.variable()
                self._at_most(here, away)
                self._at_most(here, self.sent[segment][item])
                first = max(before + 1, self.moments[segment - 1] + 1 if segment else 0)
                for index in range(first, min(after - 1, self.moments[segment]) + 1):
                    self.away[index].append((here, -self.size(item)))
        for item in self.left[0]:
            self.early[item] = self.variable()
            self._at_most(self.early[item], self.both[0][item])
            self.forward_returns.append((self.early[item], self.back_ms[item]))

    def _segment(self, index: int) -> int:
        """Of the moments, the first that is not before forward operation `index`."""
        return bisect_left(self.moments, index)

    def _add_link_row(self, transfers: list[Term], time: list[Term], given_ms: float) -> None:
        """The transfers, in milliseconds, take no longer than the time: terms in the objective's unit, and more."""
        scale = max([UNITS, *(abs(length_ms) / self.unit_ms for _, length_ms in transfers)]) / UNITS
        row = [(variable, length_ms / self.unit_ms / scale) for variable, length_ms in transfers]
        row += [(variable, -coefficient / scale) for variable, coefficient in time]
        self.model.add_row(row, upper=given_ms / self.unit_ms / scale)

    def _add_out(self) -> None:
        """Between two moments the link outwards does no more than it has time for."""
        forward = self.problem.forward
        starts, before = [0, *self.moments], dict[int, int]()
        ends, pauses = [*self.moments, len(forward)], [*self.waits, self.pauses[0]]
        for start, end, now, pause in zip(starts, ends, [*self.sent, self.left[0]], pauses, strict=True):
            given_ms = math.fsum(op.time_ms for op in forward[start:end])
            self._add_link_row(self._grown(before, now), [(pause, 1.0)], given_ms)
            if made := {item: variable for item, variable in now.items() if self.live.producer[item] >= start}:
                first = min(self.live.producer[item] for item in made)  # until it has run, none of these is sent
                given_ms = math.fsum(op.time_ms for op in forward[first + 1 : end])
                self._add_link_row(self._grown({}, made), [(pause, 1.0)], given_ms)
            before = now
        for group, (start_of, end_of) in enumerate(itertools.pairwise(self.left)):
            given_ms, time = self._time_of(group)
            time += [(pause, 1.0) for pause in self.pauses[group + 1 : group + 2]]
            self._add_link_row(self._grown(start_of, end_of), time, given_ms)
            if group in self.begun:
                own_ms = self.problem.backward[self.stages[group][0]].time_ms
                self._add_link_row(self._grown(start_of, self.begun[group]), self._time_of(group)[1], given_ms - own_ms)

    def _grown(self, before: dict[int, int], after: dict[int, int]) -> list[Term]:
        """What is sent between two moments, in milliseconds of the link; what is not wanted any more is left out."""
        terms = [(variable, self.out_ms[item]) for item, variable in after.items()]
        return terms + [(variable, -self.out_ms[item]) for item, variable in before.items() if item in after]

    def _time_of(self, group: int) -> tuple[float, list[Term]]:
        """From the beginning of a group's first computation to the end of its last: milliseconds, and terms."""
        given_ms = math.fsum(self.problem.backward[stage].time_ms for stage in self.stages[group])
        time = [(variable, self.live.time[index] / self.unit_ms) for index, variable in self.recomputed[group].items()]
        return given_ms, [*time, (self.extras[group], 1.0)]

    def _add_back(self) -> None:
        """Between the beginning of a group and the end of another the link back does what is recalled and due there."""
        count = len(self.stages)
        used = [frozenset[int]().union(*needs) for needs in self.needs]
        transfers, time, given_ms = list[Term](), list[Term](), 0.0
        for last in range(count) if count <= MOST_WINDOWED else [count - 1]:
            transfers, time = [], []
            given_ms = -self.problem.backward[self.stages[last][-1]].time_ms  # all that is due is back before that
            due = {item: self._due(item, last, used) for item in self.left[0]}
            for first in reversed(range(last + 1)):
                transfers += [
                    (variable, self.back_ms[item])
                    for item, variable in self.returned[first].items()
                    if first <= due[item]
                ]
                own_ms, own = self._time_of(first)
                given_ms, time = given_ms + own_ms, [*time, *own, (self.pauses[first], 1.0)]
                self._add_link_row(transfers, time, given_ms)
        given_ms += math.fsum(op.time_ms for op in self.problem.forward)
        self._add_link_row(transfers + self.forward_returns, [*time, *((wait, 1.0) for wait in self.waits)], given_ms)

    def _add_burden(self) -> None:
        """What is done more takes at least as long as transfers slow the computation, each from where it begins."""
        assert self.memory is not None
        more = [(variable, 1.0) for variable in (*self.waits, *self.pauses, *self.extras)]
        last: dict[int, int] = {}  # by data: the variable of the share that is sent in all
        for shares in (*self.sent, *self.left):
            last |= shares
        sent = [(variable, self.out_ms[item]) for item, variable in last.items()]
        back = [(variable, self.back_ms[item]) for group in self.returned for item, variable in group.items()]
        for terms, burden in ((sent, self.memory.out.burden), (back + self.forward_returns, self.memory.back.burden)):
            more += [(variable, -burden * length_ms / self.unit_ms) for variable, length_ms in terms if burden]
        if self.memory.out.burden or self.memory.back.burden:
            self.model.add_row(more, lower=0.0)

    def _due(self, item: int, last: int, used: list[frozenset[int]]) -> int:
        """The last group whose recalls of a data are complete before the last backward operation of group `last`.

        `used` is what the backward operations of each group need.
        """
        if item not in self._after(last, self.alive):
            return last  # it is not wanted any more: a recall that serves nothing may be left out
        for group in range(last, -1, -1):
            if item in self.needs[group][-1]:
                return group
            if item in used[group]:
                return group - 1
        return -1

    def _add_limit(self, limit_bytes: int) -> None:
        """What the second memory holds at the end of what is before each group: all that comes back later, unless it
        was sent later."""
        for group in range(len(self.stages)):
            stored: list[Term] = []
            before = self.left[group - 1] if group else (self.sent[-1] if self.sent else {})
            for item in self.returned[group]:
                there = self.variable()
                stored.append((there, self.live.size[item] * UNITS / max(1, limit_bytes)))
                for later in range(group, len(self.stages)):
                    if item in self.returned[later]:
                        row = [(self.returned[later][item], 1.0), (there, -1.0), (self.left[later + 1][item], -1.0)]
                        row += [(before[item], 1.0)] if item in before else []
                        self.model.add_row(row, upper=0.0)
            self.model.add_row(stored, upper=limit_bytes * UNITS / max(1, limit_bytes))

    def _add_group_memory(self, group: int) -> None:
        """As without moves; and of a group of one backward operation: what leaves later is there when it runs."""
        Relaxation._add_group_memory(self, group)
        if group not in self.begun or self.brief:
            return
        (own,), (stage,) = self.needs[group], self.stages[group]
        row = self._replay(self._after(group, self.resident))
        room = self.room(self.problem.backward[stage].peak_bytes) - sum(self.size(item) for item in own)
        ending, movable = self._after(group, self.alive), self.left[group + 1].keys()
        row += [(ending[item], self.size(item)) for item in ending.keys() - movable - own]
        for item in sorted(movable - own):
            there, leaves = self.variable(), self.left[group + 1][item]
            row_there = [(leaves, 1.0), (there, -1.0), (self.begun[group][item], -1.0)]
            if item in ending:
                self._at_most(ending[item], there)
                row_there += [(ending[item], 1.0), (self.both[group + 1][item], -1.0)]
            self.model.add_row(row_there, upper=0.0)
            row.append((there, self.size(item)))
        self.model.add_row(row, upper=room)

    def _add_memory_in_stage(self, group: int, index: int, own: set[int], needed: float, room: float) -> None:
        """Nothing: what is alive at the end of a stage may have come back after the operation ran."""

    def _add_forward_memory(self) -> None:
        """The budget at the forward operations: what they use, what later ones read, what the backward finds."""
        problem, live = self.problem, self.live
        unit = UNITS / max(1, self.budget_bytes)
        passed: list[list[int]] = [[] for _ in problem.forward]
        for item, index in enumerate(last_forward_uses(problem)):
            if item not in problem.held:
                passed[index].append(item)
        gone, states = list[int](), list[Term]()  # data that only the backward reads, and what is resident, so far
        used = start = 0
        for segment, moment in enumerate(self.moments):
            total = self._at_least([*states, *(term for item in gone for term in self._there(item, segment))])
            for index in range(start, moment + 1):
                used += live.renewed_bytes[index]
                room = self.room(used + problem.forward[index].workspace_bytes, forward=index)
                self.model.add_row([(total, 1.0), *self.away[index]], upper=room)
                used -= sum(live.size[item] for item in passed[index])
                gone += passed[index]
                more = []
                if index in self.resident[0]:
                    more.append((self.resident[0][index], live.replay[index] * unit))
                    states += more
                if index < moment:
                    more = more + [term for item in passed[index] for term in self._there(item, segment)]
                    total = self._at_least([(total, 1.0), *more]) if more else total
            start = moment + 1

    def _there(self, item: int, segment: int) -> list[Term]:
        """The bytes of a data after its last use of the forward, in a segment that ends with a moment."""
        if item not in self.alive[0]:
            return []
        start = self.alive[0][item]
        if item not in self.left[0]:
            return [(start, self.size(item))]
        there, end = self.variable(), self.left[0][item]
        self._at_most(start, there, self.early[item])  # it stayed
        # It stayed, or leaves later, and stays until then; or it has left by now.
        others = [(other, -1.0) for other in (there, self.both[0][item], self.sent[segment][item])]
        self.model.add_row([(start, 1.0), (end, 1.0), *others], upper=0.0)
        return [(there, self.size(item))]


def _moments(problem: Problem, most: int) -> list[int]:
    """Forward operations about equally apart in the bytes made; the last one is among them."""
    made = list(
        itertools.accumulate(sum(problem.data[item].size_bytes for item in op.outputs) for op in problem.forward)
    )
    if not made:
        return []
    found = {bisect_left(made, made[-1] * place / most) for place in range(1, most)}
    return sorted({*(min(index, len(made) - 1) for index in found), len(made) - 1})
