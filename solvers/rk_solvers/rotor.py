"""Dynamic program over a chain of blocks.

References: O. Beaumont, L. Eyraud-Dubois, J. Herrmann, A. Joly, A. Shilova, "Optimal checkpointing for
heterogeneous chains: how to train deep neural networks with limited memory", Inria RR-9302, 2019;
O. Beaumont, L. Eyraud-Dubois, A. Shilova, "Efficient combination of rematerialization and offloading for
training DNNs", NeurIPS 2021; options per block: Rockmate, ICML 2023 (see `blocks`).

Notation: `T[i, j, m]` is the least time to run the forwards and backwards of blocks `i..j` with the input of
`i` stored and `m` slots of memory beside it. Either the forward of `i` runs once, with one of its options
(`Fe`), and what it saves is stored while blocks `i+1..j` are solved; or blocks `i..k-1` run keeping only the
inputs of `i` and of `k` (`Fck`, then `Fng`), `k..j` are solved, then `i..k-1` again. The loss is block `L`,
with no forward.

Complexity: O(L^2 (L + options) M) for L blocks and M slots, in numpy along `k` and `m`; 100 blocks and 500
slots take seconds. Known gaps: data that jump over blocks are counted as resident and never recomputed by the
table; sizes are rounded up to slots. The expanded plan is therefore evaluated exactly, for several internal
budgets.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .blocks import Block, Option, blocks_of
from .evaluate import normalise, peak_and_time
from .problem import Chain, Problem, Recompute
from .sequence import Operation, expand
from .solver import Solution, Solver, best_solution, solution_of

Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Rotor(Solver):
    """Dynamic program along `chain`."""

    chain: Chain
    slots: int = 500  # of the greatest budget
    grid: int = 4  # bounds per axis when options are made
    rounds: int = 10  # local search on each option
    internal: int = 9  # internal budgets tried for one budget

    @property
    def name(self) -> str:
        """Short name shown in solutions."""
        return "rotor"

    def prepare(self, problem: Problem, max_budget_bytes: int) -> RotorTable:
        """The table for every budget up to `max_budget_bytes`; `ValueError` on a chain of another problem."""
        held = sum(problem.data[item].size_bytes for item in problem.held)
        room = max(self.slots, round(1.3 * max(0, max_budget_bytes - problem.base_bytes - held)))
        slot_bytes = -(-room // self.slots)
        blocks = blocks_of(problem, self.chain, self.grid, self.rounds)
        table = _fill(_Numbers.of(blocks, slot_bytes, self.slots))
        return RotorTable(problem, blocks, table, slot_bytes, problem.base_bytes + held, self.internal)

    def solve(self, problem: Problem, budget_bytes: int) -> Solution:
        """The fastest plan of the table that fits `budget_bytes`; see `prepare` for several budgets."""
        most = peak_and_time(problem, problem.no_recompute)[0]
        if most <= budget_bytes:
            return solution_of(problem, budget_bytes, problem.no_recompute, self.name)
        solution = self.prepare(problem, max(budget_bytes, 0)).solve(budget_bytes)
        if not solution.status.fits:  # the lowest peak may lie above what that table holds
            solution = self.prepare(problem, most).solve(budget_bytes)
        return solution


@dataclass(frozen=True, slots=True)
class RotorTable:
    """A filled table, reusable for every budget up to the one it was prepared for."""

    problem: Problem
    blocks: tuple[Block, ...]
    table: _Table
    slot_bytes: int
    fixed_bytes: int  # resident and held throughout
    internal: int

    def solve(self, budget_bytes: int) -> Solution:
        """The fastest plan that fits `budget_bytes`, or the one of lowest peak that the table knows."""
        plans = [("rotor", plan) for plan in self.plans(budget_bytes)]
        if not any(peak_and_time(self.problem, plan)[0] <= budget_bytes for _, plan in plans):
            least = self._least_slots()
            if least is not None:
                plans.append(("rotor", self.plan(least)))
        plans.append(("rotor", self.problem.no_recompute))
        return best_solution(self.problem, budget_bytes, plans)

    def plans(self, budget_bytes: int) -> list[Recompute]:
        """Plans of several internal budgets around `budget_bytes`; some may exceed it."""
        table = self.table
        slots = (budget_bytes - self.fixed_bytes) // self.slot_bytes
        seen: dict[Recompute, None] = {}
        for factor in np.linspace(0.8, 1.3, self.internal):
            memory = min(int(slots * factor), table.numbers.slots)
            if memory >= 0 and np.isfinite(table.times[0, -1, memory]):
                seen.setdefault(self.plan(memory), None)
        return list(seen)

    def plan(self, memory: int) -> Recompute:
        """The plan of the table with `memory` slots."""
        return normalise(self.problem, expand(self.problem, self.blocks, self.sequence(memory)))

    def sequence(self, memory: int) -> list[Operation]:
        """The operations of the table with `memory` slots. Raises `ValueError` if there are none."""
        table = self.table
        if not np.isfinite(table.times[0, -1, memory]):
            raise ValueError(f"the chain does not fit in {memory} slots; ask for more")
        operations: list[Operation] = []
        todo: list[tuple[int, int, int] | Operation] = [(0, len(self.blocks) - 1, memory)]
        while todo:
            entry = todo.pop()
            if isinstance(entry, Operation):
                operations.append(entry)
            else:
                todo.extend(reversed(_step(table, *entry)))
        return operations

    def _least_slots(self) -> int | None:
        finite = np.flatnonzero(np.isfinite(self.table.times[0, -1]))
        return int(finite[0]) if len(finite) else None


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The blocks in slots, sizes rounded up."""

    slots: int
    forward_ms: Times
    backward_ms: Times
    input: list[int]
    options: list[list[tuple[float, int, int, int]]]  # extra ms, saved, forward peak, backward peak
    forget: list[int]
    resident: list[int]  # while forwards run before the backward of a block; none before the loss

    @staticmethod
    def of(blocks: tuple[Block, ...], slot_bytes: int, slots: int) -> _Numbers:
        def up(size: int) -> int:
            return -(-size // slot_bytes)

        def row(block: Block, option: Option) -> tuple[float, int, int, int]:
            jump = block.jump_bytes
            backward = option.backward_bytes + jump + block.resident_bytes
            return option.extra_ms, up(option.saved_bytes), up(option.forward_bytes + jump), up(backward)

        return _Numbers(
            slots,
            np.array([block.forward_ms for block in blocks]),
            np.array([block.backward_ms for block in blocks]),
            [up(block.input_bytes) for block in blocks],
            [[row(block, option) for option in block.options] for block in blocks],
            [up(block.forget_bytes + block.jump_bytes) for block in blocks],
            [up(block.resident_bytes) for block in blocks[:-1]] + [0],
        )


@dataclass(frozen=True, slots=True)
class _Table:
    numbers: _Numbers
    times: Times  # [i, j, memory]


def _fill(numbers: _Numbers) -> _Table:
    """All cells, by increasing j - i: the recursion of RR-9302, with options."""
    count, width = len(numbers.input), numbers.slots + 1
    times = np.full((count, count, width), np.inf)
    stored = np.full((count, count, width), np.inf)  # [k, j]: T[k, j] with the input of k paid from the memory
    elapsed = np.concatenate([[0.0], np.cumsum(numbers.forward_ms)])
    memory = np.arange(width)
    for length in range(count):
        for first in range(count - length):
            last = first + length
            cell = times[first, last]
            for option in numbers.options[first]:
                _keep(numbers, times, first, last, option, cell)
            if length:
                after = np.arange(first + 1, last + 1)
                total = stored[after, last] + times[first, first:last] + (elapsed[after] - elapsed[first])[:, None]
                least = _run_through(numbers, first, last)
                total[memory[None, :] < least[:, None]] = np.inf
                np.minimum(cell, total.min(axis=0), out=cell)
            shift = numbers.input[first]
            if shift < width:
                stored[first, last, shift:] = cell[: width - shift]
    return _Table(numbers, times)


def _keep(
    numbers: _Numbers, times: Times, first: int, last: int, option: tuple[float, int, int, int], cell: Times
) -> None:
    """Lower `cell` by the plans in which block `first` runs once, with `option`."""
    extra, saved, forward, backward = option
    width = len(cell)
    least = max(forward + numbers.resident[last], backward)
    own = numbers.forward_ms[first] + numbers.backward_ms[first] + extra
    if last == first:
        if least < width:
            np.minimum(cell[least:], own, out=cell[least:])
        return
    least = max(least, saved)
    if least < width:
        rest = times[first + 1, last, least - saved : width - saved]
        np.minimum(cell[least:], own + rest, out=cell[least:])


def _run_through(numbers: _Numbers, first: int, last: int) -> NDArray[np.int64]:
    """For k = first+1..last, the slots needed to run first..k-1 keeping nothing but the input of k."""
    needed = [
        numbers.forget[block] + numbers.resident[last] + (numbers.input[block] if block > first else 0)
        for block in range(first, last)
    ]
    return np.maximum.accumulate(np.array(needed, np.int64))


def _step(table: _Table, first: int, last: int, memory: int) -> list[tuple[int, int, int] | Operation]:
    """One level of the recursion: the operations and the cells that give the value of a cell."""
    numbers, times = table.numbers, table.times
    value = times[first, last, memory]
    for number, option in enumerate(numbers.options[first]):
        single = np.full(numbers.slots + 1, np.inf)
        _keep(numbers, times, first, last, option, single)
        if single[memory] <= value * (1 + 1e-12):
            inner: list[tuple[int, int, int] | Operation] = []
            if last > first:
                inner.append((first + 1, last, memory - option[1]))
            return [Operation("Fe", first, number), *inner, Operation("B", first, number)]
    least = _run_through(numbers, first, last)
    best, place = np.inf, first + 1
    for after in range(first + 1, last + 1):
        left = memory - numbers.input[after]
        if left < 0 or memory < least[after - first - 1]:
            continue
        total = times[after, last, left] + times[first, after - 1, memory]
        total += float(numbers.forward_ms[first:after].sum())
        if total < best:
            best, place = total, after
    passes = [Operation("Fck" if block == first else "Fng", block) for block in range(first, place)]
    return [*passes, (place, last, memory - numbers.input[place]), (first, place - 1, memory)]
