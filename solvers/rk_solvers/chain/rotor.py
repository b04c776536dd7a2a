"""Dynamic program over a chain of blocks.

References: O. Beaumont, L. Eyraud-Dubois, J. Herrmann, A. Joly, A. Shilova, "Optimal checkpointing for
heterogeneous chains: how to train deep neural networks with limited memory", Inria RR-9302, 2019;
O. Beaumont, L. Eyraud-Dubois, A. Shilova, "Efficient combination of rematerialization and offloading for
training DNNs", NeurIPS 2021; options per block: Rockmate, ICML 2023 (see `blocks`).

Notation: `T[i, j, m]` is the least time to run the forwards and backwards of blocks `i..j` with the input of
`i` stored and `m` slots of memory beside it; pins (data that blocks beyond the next one read) are no inputs,
but counted in every cell where they are alive. Either the forward of `i` runs once, with one of its options
(`Fe`), and what it saves is stored while blocks `i+1..j` are solved; or blocks `i..k-1` run keeping only the
inputs of `i` and of `k` (`Fck`, then `Fng`), `k..j` are solved, then `i..k-1` again; or nothing is stored across the
backward of `j`: `i..j` run for it (none of them where it needs nothing of what is before), then `i..j-1` are
solved. The loss is block `L`, with no forward. In a cell before it the forward of the last block runs again for its
backward alone: what only later blocks would read is not computed again.

A second table holds the same times where, besides, what `j` hands on is still stored when the cell starts, and takes
its part of the `m` slots until the backward of `j`, which may need it: that of a ReLU reads its output. It is the input
of `k = j + 1`, so after a cell `k..` the cell `i..j` may begin so; it may also forget it, as the first table does. Only
blocks that have a use for it have such a column.

Schedules are persistent: what is stored across a backward operation stays until the backward of the block that it is
the input of, and is not computed again before. On chains of one operation a block the table has the least time
of these schedules. Complexity: O(L^2 (L + options) M) for L blocks and M slots: 100 blocks, 500 slots and 10 options
take about 0.15 s once numba is loaded and 0.4 s in numpy (`rotor_tables`); twice and three times that where every block
has a column in the second table. Of longer chains, neighbouring blocks are taken together (`merging`), so that a table
is within limits of bytes and of time. Known gaps: a pin is recomputed only with the block that makes it, and counted
until the end of the forward even where its readers could be through with it before; the input of a block of several
operations is stored until its backward even if that does not read it; sizes are rounded up to slots. The expanded plan
is therefore evaluated exactly, for several internal budgets.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from rk_solvers.chain.blocks import Block, blocks_of
from rk_solvers.chain.merging import TableLimits, effort, fitted
from rk_solvers.chain.rotor_tables import ChainNumbers, ChainTable, fill, least_to_pass, sweeps
from rk_solvers.chain.sequence import Operation, Sequence, expand
from rk_solvers.groups import normalise
from rk_solvers.liveness import Tables, peak_and_time
from rk_solvers.problem import Chain, Problem, Recompute
from rk_solvers.solver import Solution, Solver, best_solution, solution_of


@dataclass(frozen=True, slots=True)
class Rotor(Solver):
    """Dynamic program along `chain`."""

    chain: Chain
    slots: int = 500  # of the greatest budget
    grid: int = 4  # bounds per axis when options are made
    rounds: int = 10  # local search on each option
    internal: int = 9  # internal budgets tried for one budget
    limits: TableLimits | None = None  # of the table; None: those of the machine
    time_limit_s: float = math.inf  # to prepare a table

    @property
    def name(self) -> str:
        """Short name shown in solutions."""
        return "rotor"

    def prepare(self, problem: Problem, max_budget_bytes: int) -> RotorTable:
        """The table for every budget up to `max_budget_bytes`, over fewer blocks where the chain is long (`merging`).

        Raises `ValueError` on a chain of another problem, and `TimeoutError` at the time limit.
        """
        now = time.monotonic()
        deadline = now + self.time_limit_s
        self.chain.check(problem)
        limits = self.limits or TableLimits.here()
        chain, slots = fitted(problem, self.chain, self.slots, limits)
        grid, rounds = effort(chain, self.chain, self.grid, self.rounds)
        blocks = blocks_of(problem, chain, grid, rounds, deadline=now + self.time_limit_s / 2)
        return prepare_table(problem, blocks, max_budget_bytes, slots, self.internal, deadline, limits)

    def solve(self, problem: Problem, budget_bytes: int) -> Solution:
        """The fastest plan of the table that fits `budget_bytes`; see `prepare` for several budgets."""
        most = peak_and_time(problem, problem.no_recompute)[0]
        if most <= budget_bytes:
            return solution_of(problem, budget_bytes, problem.no_recompute, self.name)
        return solved(partial(self.prepare, problem), budget_bytes, most)


def solved(prepare: Callable[[int], RotorTable], budget_bytes: int, most_bytes: int) -> Solution:
    """The solution of the table that `prepare` makes for a budget; of one up to `most_bytes` where nothing fits."""
    solution = prepare(max(budget_bytes, 0)).solve(budget_bytes)
    if not solution.status.fits:  # the lowest peak may lie above what that table holds
        solution = prepare(most_bytes).solve(budget_bytes)
    return solution


def prepare_table(
    problem: Problem,
    blocks: tuple[Block, ...],
    max_budget_bytes: int,
    slots: int = 500,
    internal: int = 9,
    deadline: float = math.inf,
    limits: TableLimits | None = None,
) -> RotorTable:
    """The table over these blocks of a problem, for every budget up to `max_budget_bytes`.

    It has fewer than `slots` where so many would be beyond `limits`, by default those of the machine. Raises
    `TimeoutError` where it is not filled when `time.monotonic` reaches `deadline`.
    """
    slots = max(2, (limits or TableLimits.here()).slots(len(blocks), slots))
    fixed_bytes = problem.base_bytes + Tables(problem).held_bytes
    room = max(slots, round(1.3 * max(0, max_budget_bytes - fixed_bytes)))
    slot_bytes = -(-room // slots)
    table = fill(ChainNumbers.of(blocks, slot_bytes, slots), deadline)
    return RotorTable(problem, blocks, table, slot_bytes, fixed_bytes, internal)


@dataclass(frozen=True, slots=True)
class RotorTable:
    """A filled table, reusable for every budget up to the one it was prepared for."""

    problem: Problem
    blocks: tuple[Block, ...]
    table: ChainTable
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
        slots = (budget_bytes - self.fixed_bytes) / self.slot_bytes
        least, most = self._least_slots(), self.table.numbers.slots
        if least is None or slots < 0:
            return []
        peaks: dict[Recompute, int] = {}

        def fits(memory: int) -> bool:
            plan = self.plan(memory)
            if plan not in peaks:
                peaks[plan] = peak_and_time(self.problem, plan)[0]
            return peaks[plan] <= budget_bytes

        tried = sorted({min(int(slots * factor), most) for factor in np.linspace(0.8, 1.3, self.internal)})
        within = [(memory, fits(memory)) for memory in tried if memory >= least]
        low = max((memory for memory, fit in within if fit), default=least)
        high = min((memory for memory, fit in within if not fit and memory > low), default=low)
        while high - low > 1:  # the greatest internal budget between those tried that fits, if peaks only grow
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return list(peaks)

    def plan(self, memory: int) -> Recompute:
        """The plan of the table with `memory` slots."""
        return normalise(self.problem, expand(self.problem, self.blocks, self.sequence(memory)))

    def sequence(self, memory: int) -> Sequence:
        """The operations of the table with `memory` slots. Raises `ValueError` if there are none."""
        if not np.isfinite(self.table.times[0, 0, -1, memory]):
            raise ValueError(f"the chain does not fit in {memory} slots; ask for more")
        return Sequence(tuple(self.operations(0, 0, len(self.blocks) - 1, memory)))

    def operations(self, state: int, first: int, last: int, memory: int) -> list[Operation]:
        """The operations of a cell of the table whose time is finite."""
        operations: list[Operation] = []
        todo: list[_Cell | Operation] = [_Cell(state, first, last, memory)]
        while todo:
            entry = todo.pop()
            if isinstance(entry, Operation):
                operations.append(entry)
            else:
                todo.extend(reversed(_step(self.table, entry)))
        return operations

    def _least_slots(self) -> int | None:
        finite = np.flatnonzero(np.isfinite(self.table.times[0, 0, -1]))
        return int(finite[0]) if len(finite) else None


class _Cell(NamedTuple):
    """A cell of the table."""

    state: int
    first: int
    last: int
    memory: int


def _step(table: ChainTable, cell: _Cell) -> list[_Cell | Operation]:
    """One level of the recursion: the operations and the cells that give the value of a cell."""
    numbers, times = table.numbers, table.times
    state, first, last, memory = cell
    value = times[cell]
    if state and (numbers.given[state, last] < 0 or value == times[0, first, last, memory]):
        return _step(table, cell._replace(state=0))
    stores = first == last or bool(numbers.reads[state, last].any())
    for option in np.flatnonzero(numbers.keep[state, first, last] <= memory).tolist() if stores else []:
        left = memory - int(numbers.saved[first, option])
        if first < last:
            total = numbers.own_ms[first, option] + times[state, first + 1, last, left]
        else:
            total = numbers.alone_ms[state, first, option]
        if total <= value * (1 + 1e-12):
            inner = [_Cell(state, first + 1, last, left)] if first < last else []
            return [
                Operation("Fe", first, option, first == last and state > 0),
                *inner,
                Operation("B", first, option),
            ]
    best, found = np.inf, list[_Cell | Operation]()
    for option, (least, pass_ms) in enumerate(sweeps(numbers, state, first, last)):
        if first < last and least <= memory:
            total = times[0, first, last - 1, memory] + numbers.alone_ms[state, last, option] + pass_ms
            if total < best:
                passes = _passes(first, last) if numbers.reads[state, last, option] else []
                best, found = total, [*passes, Operation("Fe", last, option, state > 0), Operation("B", last, option),
                                      _Cell(0, first, last - 1, memory)]  # fmt: skip
    for after, least in enumerate(
        least_to_pass(numbers, state, first, last) if stores and first < last else [], first + 1
    ):
        left = memory - int(numbers.input[after])
        if left >= 0 and memory >= least:
            total = times[state, after, last, left] + times[-1, first, after - 1, memory]
            total += float(numbers.elapsed[after] - numbers.elapsed[first])
            if total < best:
                cells = [_Cell(state, after, last, left), _Cell(len(times) - 1, first, after - 1, memory)]
                best, found = total, [*_passes(first, after), *cells]
    return found


def _passes(first: int, stop: int) -> list[Operation]:
    """The forwards of `first` to `stop - 1`, keeping the inputs of `first` and of `stop` only."""
    return [Operation("Fck" if block == first else "Fng", block) for block in range(first, stop)]
