"""A recomputation plan that can be edited step by step, with its memory curve kept exact.

Each computation has an integer key that orders the whole step: forward operation `k` has key `k`; in stage
`b` (what runs just before and with backward operation `b`) the recomputation of `k` has key `F + b (F + 1) +
k` and the backward operation itself `F + b (F + 1) + F`, where `F` is the number of forward operations.
Adding or removing one recomputation changes the lifetimes of a few instances only, so the curve changes on a
few ranges: some tens of microseconds against milliseconds for a whole evaluation. `evaluate.memory_curve` is
the reference that the tests compare with.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from rk_solvers.evaluate import Bytes, memory_curve
from rk_solvers.problem import Problem, Recompute


class Tables:
    """Plain lists drawn once from a problem, for speed in inner loops."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.count = len(problem.forward)
        self.stride = self.count + 1
        self.stages = len(problem.backward)
        self.size = [item.size_bytes for item in problem.data]
        self.producer = [item.producer for item in problem.data]
        self.time = [op.recompute_ms for op in problem.forward]
        self.recomputable = [op.recomputable for op in problem.forward]
        self.replay = [op.replay_bytes for op in problem.forward]
        self.renewed = [problem.renewed(index) for index in range(self.count)]
        self.inputs = [tuple(item for item in op.inputs if item not in problem.held) for op in problem.forward]
        self.needs = [tuple(item for item in op.needs if item not in problem.held) for op in problem.backward]
        self.workspace = [problem.base_bytes + op.workspace_bytes for op in problem.forward]
        self.resident = [op.resident_bytes for op in problem.backward]
        self.peak = [problem.base_bytes + op.peak_bytes for op in problem.backward]
        self.renewed_bytes = [sum(self.size[item] for item in items) for items in self.renewed]
        self.uses: list[list[int]] = [[] for _ in problem.data]  # keys of the uses, without recomputation
        for index, items in enumerate(self.inputs):
            for item in items:
                self.uses[item].append(index)
        for stage, items in enumerate(self.needs):
            for item in items:
                self.uses[item].append(self.key(stage, self.count))

    def key(self, stage: int, index: int) -> int:
        """Key of the recomputation of `index` in `stage`; of its backward operation if `index` is `count`."""
        return self.count + stage * self.stride + index

    def split(self, key: int) -> tuple[int, int]:
        """Stage and forward index of a key of the backward phase."""
        return divmod(key - self.count, self.stride)


class PlanState:
    """A plan, its events in order, and the bytes alive at each."""

    def __init__(self, tables: Tables, recompute: Recompute | None = None) -> None:
        self.tables = tables
        count = tables.count
        self.keys = list(range(count)) + [tables.key(stage, count) for stage in range(tables.stages)]
        curve = memory_curve(tables.problem, tables.problem.no_recompute)
        self._memory: Bytes = np.zeros(2 * len(curve) + 64, np.int64)
        self._memory[: len(curve)] = curve
        self.uses = [list(keys) for keys in tables.uses]
        self.computed = [[index] for index in range(count)]  # keys at which each operation is computed
        self.time_ms = 0.0  # of the recomputations
        self.log: list[int] = []  # keys added (key) and removed (-key - 1) since the last commit
        for stage, group in enumerate(recompute or ()):
            for index in group:
                self.add(tables.key(stage, index))
        self.log.clear()

    @property
    def memory(self) -> Bytes:
        """Bytes alive at each event of `keys`."""
        return self._memory[: len(self.keys)]

    @property
    def peak_bytes(self) -> int:
        """Highest bytes of the step."""
        return int(self.memory.max(initial=self.tables.problem.base_bytes))

    def excess(self, budget_bytes: int) -> int:
        """Bytes above the budget, summed over the events."""
        memory = self._memory[: len(self.keys)]
        return int(np.maximum(memory, budget_bytes).sum()) - budget_bytes * len(memory)

    def recompute(self) -> Recompute:
        """The plan as plain data."""
        groups: list[list[int]] = [[] for _ in range(self.tables.stages)]
        for key in self.keys[self.tables.count :]:
            stage, index = self.tables.split(key)
            if index < self.tables.count:
                groups[stage].append(index)
        return tuple(tuple(group) for group in groups)

    def recomputations(self) -> list[int]:
        """Keys of all recomputations, in order."""
        count, stride = self.tables.count, self.tables.stride
        return [key for key in self.keys[count:] if (key - count) % stride != count]

    def has(self, stage: int, index: int) -> bool:
        """Whether `index` is recomputed in `stage`."""
        computed = self.computed[index]
        key = self.tables.key(stage, index)
        position = bisect_left(computed, key)
        return position < len(computed) and computed[position] == key

    def undo(self, mark: int = 0) -> None:
        """Take back every edit made since the log had length `mark`."""
        log = self.log
        while len(log) > mark:
            entry = log.pop()
            if entry >= 0:
                self.remove(entry)
            else:
                self.add(-entry - 1)
            log.pop()

    def add(self, key: int) -> None:
        """Insert the recomputation `key`, which must not be in the plan."""
        tables, keys = self.tables, self.keys
        stage, index = tables.split(key)
        place = bisect_left(keys, key)
        length = len(keys)
        if length == len(self._memory):
            self._memory = np.concatenate([self._memory, np.zeros(length, np.int64)])
        memory = self._memory
        across = int(memory[place]) - self._own(keys[place])
        memory[place + 1 : length + 1] = memory[place:length]
        memory[place] = across + tables.workspace[index] + tables.resident[stage]
        keys.insert(place, key)
        computed = self.computed[index]
        before, after = self.neighbours(computed, key)
        for item in tables.renewed[index]:
            size = tables.size[item]
            if size:
                left, right = self.touches(item, key, before, after)
                if right >= 0:
                    memory[bisect_left(keys, left) + 1 : place] -= size
                else:
                    memory[place] += size
        insort(computed, key)
        for item in tables.inputs[index]:
            start, stop = self.neighbours(self.computed[tables.producer[item]], key)
            left, right = self.touches(item, key, start, stop)
            if right < 0:
                memory[bisect_left(keys, left) + 1 : place + 1] += tables.size[item]
            insort(self.uses[item], key)
        if tables.replay[index] and after < 0:
            first = bisect_left(keys, before) + (len(computed) > 2)
            memory[first : place + 1] += tables.replay[index]
        self.time_ms += tables.time[index]
        self.log.append(key)

    def remove(self, key: int) -> None:
        """Take the recomputation `key` out of the plan."""
        tables, keys, memory = self.tables, self.keys, self._memory
        _, index = tables.split(key)
        place = bisect_left(keys, key)
        computed = self.computed[index]
        before, after = self.neighbours(computed, key)
        if tables.replay[index] and after < 0:
            first = bisect_left(keys, before) + (len(computed) > 2)
            memory[first : place + 1] -= tables.replay[index]
        for item in tables.inputs[index]:
            uses = self.uses[item]
            del uses[bisect_left(uses, key)]
            start, stop = self.neighbours(self.computed[tables.producer[item]], key)
            left, right = self.touches(item, key, start, stop)
            if right < 0:
                memory[bisect_left(keys, left) + 1 : place + 1] -= tables.size[item]
        del computed[bisect_left(computed, key)]
        for item in tables.renewed[index]:
            size = tables.size[item]
            if size:
                left, right = self.touches(item, key, before, after)
                if right >= 0:
                    memory[bisect_left(keys, left) + 1 : place] += size
        memory[place : len(keys) - 1] = memory[place + 1 : len(keys)]
        del keys[place]
        self.time_ms -= tables.time[index]
        self.log.append(-key - 1)

    def around(self, item: int, key: int) -> tuple[int, int]:
        """Last touch before `key` of the latest instance of `item`, and its last use after it (or -1)."""
        start, stop = self.neighbours(self.computed[self.tables.producer[item]], key)
        return self.touches(item, key, start, stop)

    def extension(self, item: int, key: int) -> int:
        """Highest bytes of the step between the last touch of `item` before `key` and `key`."""
        first = bisect_left(self.keys, self.around(item, key)[0]) + 1
        place = bisect_left(self.keys, key)
        return int(self._memory[first:place].max(initial=0))

    def _own(self, key: int) -> int:
        """Bytes at an event of the backward phase that do not cross from the event before."""
        stage, index = self.tables.split(key)
        if index == self.tables.count:
            return self.tables.peak[stage]
        return self.tables.workspace[index] + self.tables.resident[stage] + self.tables.renewed_bytes[index]

    @staticmethod
    def neighbours(computed: list[int], key: int) -> tuple[int, int]:
        """The computations just before and just after `key` (-1: none)."""
        place = bisect_left(computed, key)
        before = computed[place - 1]
        if place < len(computed) and computed[place] == key:
            place += 1
        return before, computed[place] if place < len(computed) else -1

    def touches(self, item: int, key: int, start: int, stop: int) -> tuple[int, int]:
        """Last touch before `key` (at least `start`), and last use from `key` to `stop` (or -1)."""
        uses = self.uses[item]
        place = bisect_left(uses, key)
        left = uses[place - 1] if place and uses[place - 1] > start else start
        last = bisect_left(uses, stop, place) if stop >= 0 else len(uses)
        return left, uses[last - 1] if last > place else -1
