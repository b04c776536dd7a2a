"""A relaxation of the problem: the backward in a few coarse groups of stages.

The backward operations are grouped into consecutive groups. For each group and forward operation: is it recomputed
there (once is enough to pay for)? For each data: is it alive when the group begins? What every plan satisfies of these:

* a data needed or read in a group is alive at its beginning, or recomputed in it; so is one alive at its end;
* at the beginning of each group, and at the forward operations, what is alive fits the budget;
* at a backward operation, its needs are alive, and so is what a later one of the group needs, or what is alive at the
  end of the group, unless it is recomputed in the group;
* an operation recomputed in a group has its inputs and outputs beside what is alive throughout the group.

What is relaxed: when in the group something happens, and how often. More groups make the integer program tighter, but
the linear program weaker: half a recomputation from half an input, and again in the next group, make a whole one. Spans
of consecutive groups mend that where they are wanted: for each span and forward operation, is it recomputed there at
all? At most as often as in the span's two parts together, and at least as often as in either; and what is used in the
span, or alive at its end, is alive at its beginning or recomputed in it, as if the span were one group; the states that
its operations need are resident before it. Even so, a few groups in the right places do best (see `refinement`).

Where there are spans, the order of what is recomputed in a group of one stage counts, too: beside an operation there is
what the stage needs of earlier ones, what of theirs is alive at the end, and what of later ones is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

from rk_solvers.groups import normalise
from rk_solvers.liveness import Tables, last_forward_uses
from rk_solvers.milp import Floats, Model, Term
from rk_solvers.problem import Problem, Recompute

UNITS = 1000.0  # the budget in the unit of the memory rows; the time of the step in that of the objective
LONGEST = 8  # terms of a sum before it gets a variable of its own


@dataclass(frozen=True, slots=True)
class Limit:
    """How much of some data may be alive where a group begins: what is assumed in a case (see `cases`)."""

    stage: int  # the backward operation that begins the group
    most: tuple[tuple[int, float], ...]  # data, and the part of each


@dataclass(slots=True)
class Relaxation:
    """The program of the module's docstring, under construction. Data are those not held."""

    problem: Problem
    budget_bytes: int
    starts: list[int]  # first backward operation of each group
    spans: bool = False  # whether to have spans of groups
    brief: bool = False  # the budget at the beginnings of groups alone: less tight, and much quicker to solve
    stop: int | None = None  # the backward operation before which the last group ends; None: there is none
    live: Tables = field(init=False)
    model: Model = field(default_factory=Model)
    integer: list[bool] = field(default_factory=list)  # which variables the integer program has whole
    stages: list[range] = field(default_factory=list)  # backward operations of each group
    needs: list[list[frozenset[int]]] = field(default_factory=list)  # per group and operation of it
    recomputed: list[dict[int, int]] = field(default_factory=list)  # per group: variable by forward operation
    alive: list[dict[int, int]] = field(default_factory=list)  # at each group's start, and at `stop`: variable by data
    kept: list[dict[int, int]] = field(default_factory=list)  # per group: variable by data, alive throughout it
    returned: list[dict[int, int]] = field(default_factory=list)  # per group: variable by data that comes back in it
    resident: list[dict[int, int]] = field(
        default_factory=list
    )  # at the start: variable by op of a state, here or later

    def __post_init__(self) -> None:
        problem, self.live = self.problem, Tables(self.problem)
        ends = [*self.starts[1:], len(problem.backward) if self.stop is None else self.stop]
        self.stages = [range(first, stop) for first, stop in zip(self.starts, ends, strict=True)]
        self.needs = [[frozenset(self.live.needs[stage]) for stage in stages] for stages in self.stages]
        self._add_variables()
        for group in range(len(self.stages)):
            self._add_availability(group)
            self._add_replay(group)
            self._add_group_memory(group)
        if self.spans:
            self._add_spans()
        if not self.brief:
            self._add_forward_memory()

    def size(self, item: int) -> float:
        """Bytes of a data in the unit of the rows."""
        return self.live.size[item] * UNITS / max(1, self.budget_bytes)

    def room(self, used_bytes: int, *, forward: int = -1) -> float:
        """What the budget leaves beside `used_bytes`, the base and the held data, in the unit of the rows."""
        held_bytes = self.live.held_bytes if forward < 0 else self.live.held_until(forward)
        used_bytes += self.problem.base_bytes + held_bytes
        return (self.budget_bytes - used_bytes) * UNITS / max(1, self.budget_bytes)

    def limit(self, limit: Limit) -> None:
        """Plans of a case alone, in the place of an earlier one. Raises `ValueError` if no group begins there."""
        alive = self.alive[self.starts.index(limit.stage)]
        for item, part in limit.most:
            if item in alive:
                self.model.upper[alive[item]] = part

    def fix(self, stage: int, alive: Mapping[int, float]) -> None:
        """Plans that have just these parts of data alive where the group begins."""
        for item, variable in self.alive[self.starts.index(stage)].items():
            self.model.lower[variable] = self.model.upper[variable] = alive[item]

    def alive_in(self, values: Floats) -> dict[int, dict[int, float]]:
        """By the first stage of a group, how much of each data is alive there."""
        groups = zip(self.starts, self.alive, strict=self.stop is None)
        return {start: {item: float(values[v]) for item, v in alive.items()} for start, alive in groups}

    def recompute(self, values: Floats) -> Recompute:
        """A plan that recomputes what the values of the variables do, each as late in its group as it serves."""
        groups: list[tuple[int, ...]] = [()] * len(self.problem.backward)
        for start, recomputed in zip(self.starts, self.recomputed, strict=True):
            groups[start] = tuple(sorted(index for index, variable in recomputed.items() if values[variable] > 0.5))
        return normalise(self.problem, tuple(groups))

    def variable(self, *, lower: float = 0.0, upper: float = 1.0, integer: bool = False) -> int:
        """A new variable; `integer` counts in the integer program only."""
        self.integer.append(integer)
        return self.model.add_variable(lower=lower, upper=upper)

    def _add_variables(self) -> None:
        """What is recomputed in each group, with its cost, and what is alive and resident at its beginning."""
        live = self.live
        unit_ms = self.problem.keep_all_time_ms / UNITS or 1.0
        wanted: set[int] = set()  # data that a group or a later one may use
        stateful: set[int] = set()
        # Groups are built from the last one on, and turned round below.
        if self.stop is not None:
            self._operations(live.needs[self.stop :], wanted, stateful)
            self.alive.append({item: self.variable() for item in sorted(wanted)})
            self.resident.append({index: self.variable() for index in sorted(stateful)})
        for needs in reversed(self.needs):
            recomputed: dict[int, int] = {}
            for index in self._operations(needs, wanted, stateful):
                recomputed[index] = self.variable(integer=True)
                self.model.cost[recomputed[index]] = live.time[index] / unit_ms
            alive = {item: self.variable(integer=True) for item in sorted(wanted)}
            later = self.alive[-1] if self.alive else {}
            self.kept.append({item: self.variable() for item in later})
            self.recomputed.append(recomputed)
            self.alive.append(alive)
            self.resident.append({index: self.variable() for index in sorted(stateful)})
        for groups in (self.kept, self.recomputed, self.alive, self.resident):
            groups.reverse()

    def _operations(self, needs: Iterable[Iterable[int]], wanted: set[int], stateful: set[int]) -> list[int]:
        """The operations that may be recomputed in stages of these needs.

        `wanted` and `stateful` are the data and the states that stages after these may use; those of these are added.
        """
        operations = relevant(self.live, frozenset().union(*needs))
        wanted.update(*needs, *(self.live.inputs[index] for index in operations))
        stateful.update(index for index in operations if self.live.replay[index])
        return operations

    def _after(self, group: int, per_start: list[dict[int, int]]) -> dict[int, int]:
        """What `per_start` has for the start of the group after this one."""
        return per_start[group + 1] if group + 1 < len(per_start) else {}

    def _sources(self, group: int, recomputed: dict[int, int], item: int) -> list[Term]:
        """Where a data may come from that is used in a span, as terms of a row `... <= 0`.

        The span begins with `group`; `recomputed` are its variables by operation.
        """
        terms = [(self.alive[group][item], -1.0)] if item in self.alive[group] else []
        producer = self.live.producer[item]
        if producer in recomputed:
            terms.append((recomputed[producer], -1.0))
        return terms

    def _made(self, group: int, item: int, coefficient: float) -> list[Term]:
        """Terms of a data's being recomputed in a group, or coming back in it."""
        found = [self.recomputed[group].get(self.live.producer[item]), self._after(group - 1, self.returned).get(item)]
        return [(variable, coefficient) for variable in found if variable is not None]

    def _add_availability(self, group: int) -> None:
        """What is used in a group, or alive at its end, is alive at its beginning or made in it."""
        self._add_uses(group, group, self.recomputed[group])
        for item, variable in self._after(group, self.alive).items():
            row = [(variable, 1.0), (self.kept[group][item], -1.0), *self._made(group, item, -1.0)]
            self.model.add_row(row, upper=0.0)

    def _add_uses(self, first: int, last: int, recomputed: dict[int, int]) -> None:
        """What is used from group `first` to `last`, or alive after that, is alive before it or recomputed in it."""
        model = self.model
        needs = frozenset[int]().union(*(needs for group in self.needs[first : last + 1] for needs in group))
        for item in sorted(needs):
            model.add_row(self._sources(first, recomputed, item), upper=-1.0)
        for index, variable in recomputed.items():
            for item in self.live.inputs[index]:
                model.add_row([(variable, 1.0), *self._sources(first, recomputed, item)], upper=0.0)
        for item, variable in self._after(last, self.alive).items():
            model.add_row([(variable, 1.0), *self._sources(first, recomputed, item)], upper=0.0)

    def _add_spans(self) -> None:
        """Spans of 2, 3, 4, 6, 8, 12, … groups, each made of two shorter ones: what holds of a group holds of them."""
        spans = {(group, 1): recomputed for group, recomputed in enumerate(self.recomputed)}
        count = len(self.stages)
        for length in sorted(start << doublings for start in (2, 3) for doublings in range(count.bit_length())):
            half = (length + 1) // 2
            for first in range(count - length + 1):
                parts = (spans[first, half], spans[first + half, length - half])
                spans[first, length] = self._joined(*parts)
                self._add_uses(first, first + length - 1, spans[first, length])
                self._add_replay_of_span(first, spans[first, length])

    def _add_replay_of_span(self, first: int, recomputed: dict[int, int]) -> None:
        """A state is resident before a span in which its operation is recomputed at all."""
        for index, variable in self.resident[first].items():
            if index in recomputed:
                self.model.add_row([(recomputed[index], 1.0), (variable, -1.0)], upper=0.0)

    def _joined(self, one: dict[int, int], other: dict[int, int]) -> dict[int, int]:
        """By operation, whether it is recomputed in a span of these two parts: a variable, or that of the one part."""
        joined: dict[int, int] = {}
        for index in sorted(one.keys() | other.keys()):
            parts = [part[index] for part in (one, other) if index in part]
            if len(parts) == 1:
                joined[index] = parts[0]
                continue
            joined[index] = self.variable()
            self.model.add_row([(joined[index], 1.0), *((part, -1.0) for part in parts)], upper=0.0)
            for part in parts:
                self.model.add_row([(part, 1.0), (joined[index], -1.0)], upper=0.0)
        return joined

    def _add_replay(self, group: int) -> None:
        """A state is resident before a group if its operation is recomputed in it or later."""
        later = self._after(group, self.resident)
        for index, variable in self.resident[group].items():
            for other in (self.recomputed[group].get(index), later.get(index)):
                if other is not None:
                    self.model.add_row([(other, 1.0), (variable, -1.0)], upper=0.0)

    def _replay(self, resident: dict[int, int]) -> list[Term]:
        """Terms of the states that are resident where these variables say so."""
        unit = UNITS / max(1, self.budget_bytes)
        return [(variable, self.live.replay[k] * unit) for k, variable in resident.items()]

    def _add_group_memory(self, group: int) -> None:
        """The budget at the beginning, at each backward operation and at each recomputation of a group."""
        problem, model, stages = self.problem, self.model, self.stages[group]
        start = [(variable, self.size(item)) for item, variable in self.alive[group].items()]
        room = self.room(problem.backward[stages[0]].resident_bytes)
        model.add_row([*start, *self._replay(self.resident[group])], upper=room)
        if self.brief:
            return
        kept, needs, ending = self.kept[group], self.needs[group], self._after(group, self.alive)
        states = self._replay(self._after(group, self.resident))
        total = self._at_least([*((variable, self.size(item)) for item, variable in kept.items()), *states])
        own, room = needs[-1], self.room(problem.backward[stages[-1]].peak_bytes)
        room -= sum(self.size(item) for item in own)  # recomputations come before: what the next group finds is alive
        model.add_row([*((v, self.size(i)) for i, v in ending.items() if i not in own), *states], upper=room)
        later: set[int] = set()  # what operations further on in the group need
        later_bytes, later_terms = 0.0, list[Term]()  # and what of it is alive beyond what is kept throughout
        for stage, own, after in reversed(list(zip(stages, needs, needs[1:], strict=False))):
            for item in after - later:
                later_bytes += self.size(item)
                later_terms += self._elsewhere(group, item)
            later |= after
            if len(later_terms) > LONGEST:
                later_terms = [(self._at_least(later_terms), 1.0)]
            room = self.room(problem.backward[stage].peak_bytes) - later_bytes
            room -= sum(self.size(item) for item in own - later)
            row = [(total, 1.0), *later_terms]
            row += [(kept[item], -self.size(item)) for item in own - later if item in kept]
            for item in own & later:
                row += self._made(group, item, self.size(item))
            model.add_row(row, upper=room)
        self._add_recomputation_memory(group, total)

    def _elsewhere(self, group: int, item: int) -> list[Term]:
        """What of a data needed in a group may be dead before, or counted already: made in it, or kept."""
        terms = [(self.kept[group][item], -self.size(item))] if item in self.kept[group] else []
        return terms + self._made(group, item, -self.size(item))

    def _at_least(self, terms: list[Term]) -> int:
        """A variable that is at least the sum of the terms, whatever their signs."""
        upper = self.model.upper
        lowest = sum(size * (upper[v] if size < 0 else self.model.lower[v]) for v, size in terms)
        highest = sum(size * (upper[v] if size > 0 else self.model.lower[v]) for v, size in terms)
        total = self.variable(lower=lowest, upper=highest)
        self.model.add_row([*terms, (total, -1.0)], upper=0.0)
        return total

    def _add_recomputation_memory(self, group: int, total: int) -> None:
        """An operation recomputed in a group: its inputs, outputs and workspace beside what is kept throughout."""
        live, kept = self.live, self.kept[group]
        room = self.room(min(live.resident[stage] for stage in self.stages[group]))
        unit = UNITS / max(1, self.budget_bytes)
        for index, variable in self.recomputed[group].items():
            own = {*live.inputs[index], *live.renewed[index]}
            workspace_bytes = self.problem.forward[index].workspace_bytes
            needed = sum(self.size(item) for item in own) + workspace_bytes * unit
            row = [(total, 1.0), (variable, needed), *((kept[item], -self.size(item)) for item in own if item in kept)]
            self.model.add_row(row, upper=room)
            if len(self.stages[group]) == 1 and self.spans:
                self._add_memory_in_stage(group, index, own, needed, room)

    def _add_memory_in_stage(self, group: int, index: int, own: set[int], needed: float, room: float) -> None:
        """An operation recomputed in a group of one stage: before it was made what earlier ones make for later.

        Where it is not recomputed, the row asks for no more than what the stage itself does.
        """
        producer, ending = self.live.producer, self._after(group, self.alive)
        needs = {item for item in self.needs[group][0] if producer[item] < index} - own
        row = [(self.recomputed[group][index], needed + sum(self.size(item) for item in needs))]
        there = {item: variable for item, variable in ending.items() if producer[item] < index}
        there |= {item: variable for item, variable in self.kept[group].items() if producer[item] > index}
        row += [(variable, self.size(item)) for item, variable in there.items() if item not in own | needs]
        self.model.add_row([*row, *self._replay(self._after(group, self.resident))], upper=room)

    def _add_forward_memory(self) -> None:
        """The budget at the forward operations: what they use, what later ones read, what the backward finds."""
        problem, live = self.problem, self.live
        unit = UNITS / max(1, self.budget_bytes)
        passed: list[list[int]] = [[] for _ in problem.forward]
        for item, index in enumerate(last_forward_uses(problem)):
            if item not in problem.held:
                passed[index].append(item)
        total, used = -1, 0
        for index, op in enumerate(problem.forward):
            used += live.renewed_bytes[index]
            row: list[Term] = [] if total < 0 else [(total, 1.0)]
            self.model.add_row(row, upper=self.room(used + op.workspace_bytes, forward=index))
            used -= sum(live.size[item] for item in passed[index])
            start = self.alive[0]
            row += [(start[item], self.size(item)) for item in passed[index] if item in start]
            if index in self.resident[0]:
                row.append((self.resident[0][index], live.replay[index] * unit))
            if row:
                total = self._at_least(row)


def relevant(live: Tables, needs: Set[int]) -> list[int]:
    """The operations that may be recomputed and lead to `needs`, in order."""
    found: list[int] = []
    wanted = set(needs)
    for index in reversed(range(live.count)):
        if live.recomputable[index] and not wanted.isdisjoint(live.renewed[index]):
            found.append(index)
            wanted.update(live.inputs[index])
    return found[::-1]
